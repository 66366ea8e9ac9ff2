"""A converted model is in the mode in which the call of its source runs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import fmapper
from fmapper_adapters.flax import FlaxModel

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


class WithFlag(nnx.Module):
    """Dropout and statistics under one argument."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, deterministic: bool = True):
        y = self.norm(self.dense(x), use_running_average=deterministic)
        return self.drop(y, deterministic=deterministic)


class WithFlagOfDropout(WithFlag):
    def __call__(self, x, deterministic: bool = True):
        return self.drop(self.norm(self.dense(x)), deterministic=deterministic)


class Plain(WithFlag):
    def __call__(self, x):
        return self.drop(self.norm(self.dense(x)))


class InLinen(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic: bool = True):
        y = linen.BatchNorm(use_running_average=deterministic)(linen.Dense(4)(x))
        return linen.Dropout(0.5)(y, deterministic=deterministic)


class InEquinox(eqx.Module):
    dense: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self):
        self.dense = eqx.nn.Linear(4, 4, key=jax.random.key(0))
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None, inference: bool = True):
        return self.drop(jax.vmap(self.dense)(x), key=key, inference=inference)


def _outputs(model):
    if isinstance(model, tuple):
        return model[0].apply(model[1], X)
    return (nnx.clone(model) if isinstance(model, nnx.Module) else model)(X)


def _linen():
    return InLinen(), InLinen().init(jax.random.key(0), X)


@pytest.mark.nightly_cases("<lambda>-False", "InEquinox-False")
@pytest.mark.parametrize("structure", [False, True])
@pytest.mark.parametrize("make", [lambda: WithFlag(nnx.Rngs(0)), _linen, InEquinox])
def test_a_default_argument_decides_the_mode(make, structure):
    model = make()
    converted = fmapper.convert(model, "torch", (X,), structure=structure)
    assert not converted.training
    found = converted(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(found, _outputs(model), atol=1e-6)
    assert fmapper.verify(model, converted, X)


def test_an_argument_that_asks_for_training_starts_in_training():
    model = WithFlag(nnx.Rngs(0))
    converted = fmapper.convert(model, "torch", (X,), {"deterministic": False})
    assert converted.training
    expected = nnx.clone(model)(X, deterministic=False)
    assert fmapper.verify(model, converted, X, example_kwargs={"deterministic": False})
    np.testing.assert_allclose(converted(torch.from_numpy(X)).detach(), expected, atol=1e-6)


def test_a_call_that_is_neither_training_nor_evaluation_is_refused():
    model = WithFlagOfDropout(nnx.Rngs(0))
    with pytest.raises(fmapper.ConversionError, match="neither its training nor its") as caught:
        fmapper.convert(model, "torch", (X,))
    assert "norm.use_running_average=False" in str(caught.value)
    assert "deterministic=True is for evaluation" in str(caught.value)
    model.eval()
    assert fmapper.verify(model, fmapper.convert(model, "torch", (X,)), X)


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_argument_decides_where_both_modes_compute_the_same(deterministic):
    model = WithFlag(nnx.Rngs(0))
    model.drop.rate = 0.0
    model.norm = lambda x, use_running_average: x
    mode = {"deterministic": deterministic}
    converted = fmapper.convert(model, "torch", (X,), mode)
    assert converted.training is not deterministic
    found = converted(torch.from_numpy(X), **mode).detach()
    np.testing.assert_allclose(found, model(X, **mode), atol=1e-6)


@pytest.mark.nightly
def test_parts_keep_their_modes_in_training():
    model = Plain(nnx.Rngs(0))
    model.norm.eval()
    converted = fmapper.convert(model, "torch", (X,))
    assert converted.training
    assert fmapper.verify(model, converted, X)
    converted(torch.from_numpy(X))
    assert torch.equal(converted.norm.mean, torch.zeros(4))
    assert not fmapper.verify(model, converted.eval(), X)


def test_comparing_leaves_generators_and_statistics_as_they_are():
    model = Plain(nnx.Rngs(0))
    converted = fmapper.convert(model, "torch", (X,))
    for _ in range(2):
        assert fmapper.verify(model, converted, X)
    assert int(converted.drop.rngs.count) == int(model.drop.rngs.count[...]) == 0
    assert not jnp.any(model.norm.mean[...])


class WithField(linen.Module):
    train: bool = False

    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=not self.train)(linen.Dense(4)(x))


def test_fields_of_linen_modules_are_modes():
    variables = WithField().init(jax.random.key(0), X)
    for train in (False, True):
        converted = fmapper.convert((WithField(train=train), variables), "torch", (X,))
        assert converted.training is train
        found = converted(torch.from_numpy(X))
        assert not torch.allclose(converted.train(not train)(torch.from_numpy(X)), found)


class InTorch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.dense(x)))


def test_modules_of_flax_that_were_written_for_evaluation_refuse_training():
    module = InTorch()
    model = fmapper.convert(module, "flax", (X,), structure=True)
    with pytest.raises(fmapper.ConversionError, match=r"evaluation only.*train=True"):
        model.train()
    np.testing.assert_allclose(model(X), module.eval()(torch.from_numpy(X)).detach(), atol=1e-6)
    back = fmapper.convert(model, "torch", (X,))
    assert not back.training
    with pytest.raises(fmapper.ProgramInputError, match="evaluation only"):
        back.train()(torch.from_numpy(X))
    assert fmapper.verify(module, model, X)


def test_modules_of_flax_that_were_written_for_training_start_as_the_module_is():
    module = InTorch()
    for trains in (True, False):
        module.train(trains)
        model = fmapper.convert(module, "flax", (X,), structure=True, train=True)
        assert model.drop.deterministic is not trains
        assert model.norm.use_running_average is not trains
        model.train()
        assert not np.array_equal(model(X), model(X))


def test_a_loaded_model_of_flax_starts_in_the_mode_in_which_it_was_saved(tmp_path):
    model = fmapper.convert(InTorch(), "flax", (X,), train=True, check=False)
    for saved in (True, False):
        model.train() if saved else model.eval()
        model.save(tmp_path / "model.safetensors")
        assert FlaxModel.load(tmp_path / "model.safetensors").deterministic is not saved


def test_modules_that_refuse_training_are_converted_for_evaluation():
    class Alone(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0))

        def train(self, **attributes):
            raise RuntimeError("it evaluates")

        def __call__(self, x):
            return self.norm(x)

    converted = fmapper.convert(Alone(), "torch", (X,))
    with pytest.raises(fmapper.ProgramInputError, match="put into training: it evaluates"):
        converted.train()(torch.from_numpy(X))
    with pytest.raises(fmapper.ConversionError, match="put into training: it evaluates"):
        fmapper.convert(Alone(), "torch", (X,), train=True)


def test_modules_of_torch_that_refuse_training_say_so():
    class Alone(torch.nn.Linear):
        def train(self, mode=True):
            if mode:
                raise RuntimeError("it evaluates")
            return super().train(mode)

    with pytest.raises(fmapper.ConversionError, match="put into training: it evaluates"):
        fmapper.convert(Alone(4, 4).eval(), "flax", (torch.from_numpy(X),), train=True)
