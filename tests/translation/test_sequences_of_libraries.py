"""Parts of libraries that call layers one after the other are an `nn.Sequential` for torch."""

from __future__ import annotations

import numpy as np
import pytest

import fmapper

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from fmapper.translation.source import translate_proved  # noqa: E402
from support.written import normal, written  # noqa: E402


def agree(model, *args):
    """Asserts that a file gives what its model does; returns the file and its module."""
    source, net, _ = written(model, *args)
    got = net(*[torch.from_numpy(np.array(x)) for x in args])
    np.testing.assert_allclose(got.detach(), model(*args), rtol=1e-5, atol=1e-5)
    return source.code, net


class PINN(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self):
        self.mlp = eqx.nn.MLP(2, "scalar", 8, 2, activation=jnp.tanh, key=jax.random.key(0))

    def __call__(self, t, x):
        return self.mlp(jnp.stack([t, x]))


@pytest.mark.nightly
def test_a_perceptron_of_the_library_is_a_sequence():
    t = normal(5)
    _found, proof, reason = translate_proved(jax.vmap(PINN()), "torch", (t, t * 2))
    assert proof
    assert not reason


ACTIVATIONS = [
    (jax.nn.relu, "nn.ReLU()"),
    (jax.nn.gelu, "nn.GELU(approximate='tanh')"),
    (lambda x: jax.nn.gelu(x, approximate=False), "nn.GELU()"),
    (jax.nn.silu, "nn.SiLU()"),
    (jax.nn.softplus, "nn.Softplus()"),
    (jax.nn.sigmoid, "nn.Sigmoid()"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("function", "module"), ACTIVATIONS)
def test_activations_are_modules(function, module):
    class Net(eqx.Module):
        mlp: eqx.nn.MLP

        def __init__(self):
            self.mlp = eqx.nn.MLP(3, 2, 4, 1, activation=function, key=jax.random.key(0))

        def __call__(self, x):
            return self.mlp(x)

    _code, net = agree(jax.vmap(Net()), normal(5, 3) * 3)
    assert isinstance(net.mlp, torch.nn.Sequential)


class Own(nnx.Module):
    """A class of the model, which its reader looks for in the file."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.own = Own(rngs)
        self.head = nnx.Sequential(
            nnx.Linear(2, 4, rngs=rngs), nnx.gelu, nnx.Linear(4, 1, rngs=rngs)
        )

    def __call__(self, x):
        return self.head(self.own(x))


class Field(eqx.Module):
    func: eqx.nn.MLP

    def __init__(self):
        self.func = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))

    def __call__(self, x):
        return self.func(x)


@pytest.mark.nightly
def test_a_model_with_a_function_has_its_own_name():
    _, net = agree(jax.vmap(Field()), normal(5, 3))
    assert type(net).__name__ == "Field"


@pytest.mark.nightly
def test_classes_of_the_model_stay():
    _code, net = agree(Model(), normal(5, 3))
    assert isinstance(net.head, torch.nn.Sequential)


@pytest.mark.nightly
def test_the_way_back():
    model, x = jax.vmap(PINN()), normal(5)
    net = fmapper.convert(model, "torch", (x, x), structure=True)
    names = fmapper.state(net, source=True)
    assert "mlp.layers.1.weight" in names
    np.testing.assert_array_equal(names["mlp.layers.1.weight"].detach(), net.mlp[2].weight.detach())
