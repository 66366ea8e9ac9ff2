"""Blocks of one class whose attributes choose between statements are one class with a flag."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fmapper  # noqa: E402


class Attention(nn.Module):
    """Looks at few positions where it has a window; its mask is no argument."""

    def __init__(self, window=None):
        super().__init__()
        self.window = window
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        i = torch.arange(x.shape[1])
        mask = i[:, None] >= i[None]
        if self.window is not None:
            mask = mask & (i[:, None] - i[None] < self.window)
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Centred(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        if self.kind == "mean":
            y = y - y.mean(dim=1, keepdim=True)
        elif self.kind == "max":
            y = y - y.amax(dim=1, keepdim=True)
        return x + y


class Shifted(nn.Module):
    def __init__(self, shift=0):
        super().__init__()
        self.shift = shift
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        if self.shift > 0:
            x = torch.roll(x, -self.shift, dims=1)
        y = self.layer(x).cumsum(1)
        if self.shift > 0:
            y = torch.roll(y, self.shift, dims=1)
        return y


class Several(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (lambda: [Attention(3), Attention(), Attention(3), Attention()], ["has_window"]),
        (lambda: [Centred("mean"), Centred("none"), Centred("max")], ["is_mean", "is_max"]),
        (lambda: [Shifted(2), Shifted(), Shifted(2), Shifted()], ["has_shift"]),
    ],
    ids=["none or a number", "words", "zero or not"],
)
@pytest.mark.parametrize("to", ["flax", "equinox"])
def test_attributes_that_choose_are_flags_of_one_class(make, flags, to):
    if to == "equinox":
        pytest.importorskip("equinox")
    model = Several(*make()).eval()
    x = torch.randn(2, 6, 8)
    code = fmapper.source(model, to, (x,))
    title = type(model.blocks[0]).__name__
    assert len(re.findall(rf"class {title}\w*\(", code)) == 1
    for flag in flags:
        assert f"if self.{flag}" in code
    if to == "flax":
        space = {"__name__": "translated"}
        exec(compile(code, "translated.py", "exec"), space)
        made = space["Several"](rngs=nnx.Rngs(0))
        state = {name: array.numpy() for name, array in model.state_dict().items()}
        made = space["load_weights"](made, state)
        for length in (6, 9):
            x = torch.randn(3, length, 8)
            np.testing.assert_allclose(made(x.numpy()), model(x).detach(), rtol=1e-4, atol=1e-5)
