"""Lists of arrays stay whole, as they are in the model's own code."""

import pytest
import torch
from torch import nn

from fmapper.translation.merging.whole_lists import with_whole_lists
from fmapper.translation.source import translate_proved


class Layer(nn.Module):
    def __init__(self, width, grows=4):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, grows)

    def forward(self, found):
        return self.out(torch.relu(self.norm(torch.cat(found, 1))))


class Dense(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width + 4 * i) for i in range(3))

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(layer(found))
        return torch.stack(torch.cat(found, 1).split(5, 1)), torch.stack((x, -x), 1)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "jax"])
def test_layers_that_concatenate_all_before_are_one_class(target):
    pytest.importorskip(target)
    torch.manual_seed(0)
    if target == "jax":
        source, proof, reason = translate_proved(Dense().eval(), target, (torch.randn(5, 3),))
    else:
        source, proof, reason = translate_proved(Dense(), target, (torch.randn(5, 3),))
        assert source.code.count("class Layer") == 1
    assert proof, reason
    assert source.code.count("jnp.concatenate(found, axis=1)") == 1
    assert "jnp.stack(jnp.split(" in source.code
    assert "jnp.stack([x, -x], axis=1)" in source.code


@pytest.mark.parametrize(
    "lines",
    [
        ["a, b = x.split(2)", "y = jnp.stack([b, a])"],
        ["a, b = x.split(2)", "y = jnp.stack([a, b, a])"],
        ["a, b = x.split(2)", "y = jnp.stack([a, b])", "return y, a"],
        ["a, b = x.split(2)", "x = g(x)", "y = jnp.stack([a, b])"],
        ["a, b = x.split(2)", "return [a, b]"],
        ["a, b = x.reshape(2, 3)", "y = jnp.stack([a, b])"],
        ["t = f(x)", "return jnp.stack([t[0], t[1]])"],
        ["return jnp.stack([t[0], t[2]])"],
        ["return jnp.stack([t[0]])"],
    ],
)
def test_other_lists_stay(lines):
    assert with_whole_lists(lines, {"t": 2}) == lines
