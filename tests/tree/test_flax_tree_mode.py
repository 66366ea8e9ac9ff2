"""Ties of NNX modules where Flax is in its tree mode, which knows none."""

import pytest

import fmapper

pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
if not hasattr(nnx, "set_graph_mode"):
    pytest.skip("this Flax has no tree mode", allow_module_level=True)
import jax.numpy as jnp  # noqa: E402


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)
        self.b.kernel = self.a.kernel
        self.norm, self.again = nnx.BatchNorm(2, rngs=rngs), self.a

    def __call__(self, x):
        return self.norm(self.b(self.a(x))) + self.again(x)


def is_tied(model):
    return model.a.kernel is model.b.kernel and model.again is model.a


@pytest.fixture
def tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield


X = jnp.arange(6.0).reshape(3, 2)


@pytest.mark.nightly_cases("fmap")
@pytest.mark.parametrize(
    "walk",
    [
        lambda model: fmapper.fmap(lambda v: 2 * v, model),
        fmapper.to_numpy,
        fmapper.to_cpu(copy=True),
        lambda model: fmapper.load_state(model, fmapper.state(model)),
        lambda model: fmapper.move_(model, fmapper.to_cpu(copy=True)),
        fmapper.jit(lambda m: m),
    ],
    ids=["fmap", "to_numpy", "copy", "load_state", "move_", "jit"],
)
def test_walks_and_moves_keep_ties(tree_mode, walk):
    new = walk(Tied(nnx.Rngs(0)))
    assert is_tied(new)


@pytest.mark.nightly
def test_gradients_of_tied_variables_are_summed(tree_mode):
    def loss(model):
        return model.b(model.a(X)).sum()

    model = Tied(nnx.Rngs(0))
    gradient = fmapper.grad(loss)(model)
    with nnx.set_graph_mode(True), nnx.set_graph_updates(True):
        expected = nnx.grad(loss)(model)
    assert is_tied(gradient)
    assert jnp.allclose(gradient.a.kernel[...], expected["a"]["kernel"][...])


@pytest.mark.nightly
def test_conversions_keep_ties(tree_mode):
    torch = pytest.importorskip("torch")
    model = Tied(nnx.Rngs(0))
    converted = fmapper.convert(model, "torch", (X,))
    assert fmapper.verify(model, converted, X)
    assert converted.a.kernel is converted.b.kernel
    back = fmapper.convert(converted, "flax", (torch.ones(3, 2),))
    assert fmapper.verify(back, converted.eval(), X)
    assert back.a.kernel is back.b.kernel
    with pytest.raises(ValueError, match=r"(?s)Duplicate.*\.a\..*\.again\."):
        nnx.split(back)  # Flax refuses ties itself, with their paths
