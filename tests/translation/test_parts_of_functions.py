"""Models of JAX that are functions of a tree of arrays: functions of a part of it are classes."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

import fmapper  # noqa: E402
from support.written import normal, run, written  # noqa: E402


def arrays(seed, *sizes):
    """Returns weights so small that a float32 of the outputs' slopes is not mostly rounding."""
    return {"w": normal(*sizes, seed=seed) / 2, "b": normal(sizes[-1], seed=seed + 1)}


def linear(x, params):
    return x @ params["w"] + params["b"]


@jax.jit
def block(params, x):
    return x + jax.nn.relu(linear(x, params["fc"]))


def stack(params, x):
    for one in params["blocks"]:
        x = block(one, x)
    return linear(x, params=params["out"])


def mixed(params, x):
    return linear(x, {"w": params["first"]["w"], "b": params["second"]["b"]}) + stack(
        {"blocks": [], "out": params["first"]}, x
    )


BLOCKS = {"blocks": [{"fc": arrays(i, 4, 4)} for i in range(3)], "out": arrays(7, 4, 2)}
MIXED = {"first": arrays(0, 4, 2), "second": arrays(2, 4, 2)}


def code_of(model, *args):
    """Returns a file's code after comparing its outputs and gradients with those of JAX."""
    source, net, _ = written(model, *args)
    given = [torch.tensor(np.asarray(x), requires_grad=True) for x in args]
    found = net(*given)
    if isinstance(model, tuple):
        model = functools.partial(*model)
    np.testing.assert_allclose(found.detach().numpy(), run(model, *args), rtol=1e-5, atol=1e-6)
    slope = jax.grad(lambda x: jnp.sum(jnp.cos(run(model, x))))(*args)
    torch.cos(found).sum().backward()
    np.testing.assert_allclose(given[0].grad.numpy(), slope, rtol=1e-4, atol=1e-5)
    return source.code


def classes_in(code):
    return re.findall(r"class (\w+)\(nn.Module\)", code)


@pytest.mark.nightly
def test_functions_of_a_container_are_classes_and_their_loops_are_loops():
    before = dict(globals())
    code_of((stack, BLOCKS), normal(5, 4))
    assert all(globals()[name] is value for name, value in before.items())


@pytest.mark.nightly
def test_containers_that_are_made_in_a_call_are_not_parts():
    assert classes_in(code_of((mixed, MIXED), normal(5, 4))) == ["Second", "mixed"]


def test_functions_are_restored_after_an_error():
    def fails(params, x):
        raise ValueError(f"of {len(params)}")

    before = dict(globals())
    with pytest.raises(fmapper.ConversionError, match="of 2"):
        fmapper.source((fails, BLOCKS), "torch", (normal(5, 4),))
    assert all(globals()[name] is value for name, value in before.items())


@pytest.mark.nightly
def test_the_files_of_functions_are_proved():
    _source, _, proof = fmapper.translation.source.translate(
        (stack, BLOCKS), "torch", (normal(5, 4),), proved=True
    )
    assert proof, proof
