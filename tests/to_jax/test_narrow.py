"""Integers of 64 bits in programs for JAX, which has 32: narrowed where they fit, else refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("jax")

from support import converting  # noqa: E402

FIRST, LAST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
X = torch.tensor([[1, 2], [3, 4]])
MASK = torch.tensor([[True, False], [False, True]])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 2**40,
        lambda x: x & 0xFFFFFFFF,
        lambda x: x + torch.tensor([2**40, 3]),
        lambda x: torch.full((2,), 2**40),
        lambda x: x.masked_fill(MASK, LAST) - 1,
        lambda x: x.masked_fill(MASK, LAST).float(),
        lambda x: x.masked_fill(MASK, LAST).to(torch.int32),
        lambda x: torch.where(MASK, x, FIRST).sum(),
        lambda x: torch.where(MASK, x.float(), torch.full((), LAST)),
        lambda x: torch.masked.logsumexp(x, 1, mask=MASK),
        lambda x: x.index_put((X[0] - 1,), torch.tensor(LAST), accumulate=True),
        lambda x: x.scatter(0, X[:1] - 1, LAST, reduce="add"),
        lambda x: torch.cond(x.sum() > 0, lambda x: x + 2**40, lambda x: x + 1, (x,)),
        lambda x: torch.cond(
            x.sum() > 0, lambda x: x.masked_fill(MASK, LAST), lambda x: x + 1, (x,)
        ),
    ],
)
def test_lost_integers_are_refused_at_conversion(function: Any) -> None:
    with pytest.raises(fmapper.LossyCastError, match=r"32-bit.*jax_enable_x64"):
        fmapper.convert(converting.Function(function), "jax", (X,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x < 2**40, x == 2**40, x > -(2**40), x >= LAST, x != 2**31),
        lambda x: (x.clamp(-(2**40), 2**50), x.clamp(max=LAST), x.clamp(min=3, max=2**31)),
        lambda x: torch.where(MASK, x, LAST).min(1).indices + 1,
        lambda x: x.masked_fill(MASK, LAST).sort(1).indices * 2,
        lambda x: x.masked_fill(MASK, LAST) == LAST,
        lambda x: x.masked_fill(MASK, LAST).to(torch.bool),
        lambda x: torch.masked.argmin(x, 1, mask=MASK),
        lambda x: torch.full((2,), float(2**40)) * 2,
    ],
)
def test_ends_and_bounds_are_as_good_as_in_64_bits(function: Any) -> None:
    converting.check(function, X)


def test_ends_of_int64_come_out_as_those_of_int32() -> None:
    model = fmapper.convert(
        converting.Function(lambda x: x.masked_fill(MASK, LAST).sort(1, descending=True)[0]),
        "jax",
        (X,),
    )
    assert np.asarray(model(X.numpy())).tolist() == [[2**31 - 1, 2], [2**31 - 1, 3]]


def test_inputs_that_do_not_fit_are_refused() -> None:
    model = fmapper.convert(converting.Function(lambda x: x + 1), "jax", (X,))
    with pytest.raises(fmapper.LossyCastError, match=r"args\[0\]: 1099511627776"):
        model(np.array([[2**40, 1], [1, 1]]))


@pytest.mark.nightly
def test_nothing_is_refused_with_64_bits() -> None:
    code = """
import jax, torch, numpy as np, fmapper
jax.config.update("jax_enable_x64", True)
class Sum(torch.nn.Module):
    def forward(self, x):
        return (x.masked_fill(x == 1, -2**63) + 2**40 & 0xFFFFFFFFFF) + torch.tensor(2**50)
x = torch.tensor([1, 2**33])
model = fmapper.convert(Sum(), "jax", (x,))
assert (np.asarray(model(x.numpy())) == Sum()(x).numpy()).all()
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)
