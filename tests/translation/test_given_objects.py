"""Models that are given objects, as dataclasses, take such when they are written as code."""

from __future__ import annotations

import dataclasses
import types
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
struct = pytest.importorskip("flax.struct")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402


@dataclasses.dataclass
class Given:
    x: object
    y: object
    mask: object = None


torch.utils._pytree.register_dataclass(Given)


class Pair(NamedTuple):
    x: object
    y: object


@struct.dataclass
class Scaled:
    x: jax.Array
    y: jax.Array
    by: int = struct.field(pytree_node=False, default=3)


@jax.tree_util.register_pytree_node_class
class Opaque:
    def __init__(self, *held):
        self.x, self.y = held

    def tree_flatten(self):
        return (self.x, self.y), None

    @classmethod
    def tree_unflatten(cls, _, held):
        return cls(*held)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given, c):
        return self.linear(given.x) + given.y * c


class JaxNet(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, given, c):
        return self.linear(given.x) + given.y * getattr(given, "by", 1) * c


class Nested(nnx.Module):
    def __init__(self):
        self.net = JaxNet()

    def __call__(self, pairs, *, c):
        return self.net(pairs["first"][0], c)


def arrays(*shape):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape or (2, 4)).astype(np.float32) for _ in range(3)]


@pytest.mark.parametrize("kind", [Given, Pair])
def test_objects_known_to_torch_are_inputs(kind):
    torch.manual_seed(0)
    net, (x, y, c) = Net(), arrays()
    given = kind(torch.tensor(x), torch.tensor(y))
    new = fmapper.convert(net, "jax", (given, torch.tensor(c)))
    want = net(given, torch.tensor(c)).detach()
    np.testing.assert_allclose(new(kind(x, y), c), want, rtol=1e-5, atol=1e-6)


def test_a_dataclass_is_given_to_a_model_of_written_classes():
    torch.manual_seed(0)
    net, (x, y, c) = Net(), arrays()
    given = Given(torch.tensor(x), torch.tensor(y))
    new = fmapper.convert(net, "flax", (given, torch.tensor(c)), structure=True)
    want = net(given, torch.tensor(c)).detach()
    np.testing.assert_allclose(new(Given(x, y), c), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"written for given.mask=None"):
        new(Given(x, y, mask=x), c)


@pytest.mark.nightly
def test_the_file_has_a_class_for_what_it_is_given():
    net, (x, y, c) = JaxNet(), arrays()
    _source, _, proof = translate(net, "torch", (Scaled(x, y), c), proved=True)
    assert proof, str(proof)


@pytest.mark.nightly
def test_objects_in_other_structures_are_given_to_written_classes():
    net, (x, y, c) = Nested(), arrays()
    new = fmapper.convert(net, "torch", ({"first": (Scaled(x, y),)},), {"c": c}, structure=True)
    given = types.SimpleNamespace(x=torch.tensor(x), y=torch.tensor(y), by=3)
    want = net({"first": (Scaled(x, y),)}, c=c)
    got = new({"first": (given,)}, c=torch.tensor(c)).detach()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    given.by = 2
    with pytest.raises(ValueError, match=r"\.by == 3"):
        new({"first": (given,)}, c=torch.tensor(c))


@pytest.mark.nightly
def test_objects_without_names_are_refused():
    net, (x, y, c) = JaxNet(), arrays()
    with pytest.raises(fmapper.ConversionError, match=r"no names.*or omit structure=True"):
        fmapper.convert(net, "torch", (Opaque(x, y), c), structure=True)
    with pytest.warns(fmapper.ConversionWarning, match="parameters of their own, given_field0"):
        fmapper.source(net, "torch", (Opaque(x, y), c))


def test_numbers_in_structures_are_checked():
    class Scales(nn.Module):
        def forward(self, given):
            return given[0] * given[1]

    x = arrays()[0]
    new = fmapper.convert(Scales(), "flax", ((torch.tensor(x), 3.0),), structure=True)
    np.testing.assert_allclose(new((x, 3.0)), x * 3, rtol=1e-6)
    with pytest.raises(ValueError, match=r"given\[1\] == 3\.0"):
        new((x, 4.0))
