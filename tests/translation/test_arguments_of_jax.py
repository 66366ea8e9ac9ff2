"""What constructors of NNX and Equinox were given, as their models and their source say it."""

import pytest

pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

from fmapper_translate import NotTranscribed  # noqa: E402
from fmapper_translate.constructors.arguments import find_arguments  # noqa: E402
from fmapper_translate.torch.equinox.arguments import EQUINOX  # noqa: E402
from fmapper_translate.torch.nnx.arguments import NNX  # noqa: E402


class Block(nnx.Module):
    def __init__(self, width, rate=0.0, *, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)


class Net(nnx.Module):
    def __init__(self, inputs, width, depth, rate=0.0, *, rngs):
        self.stem = nnx.Linear(inputs, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rate, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Sequential(nnx.LayerNorm(width, rngs=rngs), nnx.relu)


class Scaled(nnx.Module):
    def __init__(self, width, scale=1.0, *, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.factor = 2.0 * scale + 1.0


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, rate=0.0, *, key):
        self.linear = eqx.nn.Linear(width, width, key=key)
        self.dropout = eqx.nn.Dropout(rate)


class Stack(eqx.Module):
    layers: list

    def __init__(self, width, rate=0.5, *, key):
        self.layers = [Layer(width, rate, key=key), Layer(width, rate, key=key)]


def test_a_constructor_of_nnx_says_where_its_arguments_went():
    model = Net(3, 4, 2, 0.25, rngs=nnx.Rngs(0))
    assert find_arguments(model, NNX) == ((), {"inputs": 3, "width": 4, "depth": 2, "rate": 0.25})
    model.eval()
    assert find_arguments(model, NNX)[1]["rate"] == 0.25


def test_a_constructor_of_equinox_says_where_its_arguments_went():
    model = Stack(4, 0.25, key=jax.random.key(0))
    assert find_arguments(model, EQUINOX) == ((), {"width": 4, "rate": 0.25})
    still = eqx.nn.inference_mode(model)
    assert find_arguments(still, EQUINOX) == ((), {"width": 4, "rate": 0.25})


def test_a_default_that_makes_another_model_is_not_taken():
    """Neither shapes nor a comparison in evaluation tell a rate of dropout from another."""
    with pytest.raises(NotTranscribed, match="does not say what scale was"):
        find_arguments(Scaled(4, 3.0, rngs=nnx.Rngs(0)), NNX)
    assert find_arguments(Scaled(4, rngs=nnx.Rngs(0)), NNX) == ((), {"width": 4})
    model = Stack(4, key=jax.random.key(0))
    last = eqx.tree_at(lambda tree: tree.layers[1].dropout.p, model, 0.125)
    with pytest.raises(
        NotTranscribed, match="does not make this model of the arguments that it keeps"
    ):
        find_arguments(last, EQUINOX)
