"""Structured models are made of files in the words of their source, where that is possible."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")
eqx = pytest.importorskip("equinox")

import jax.numpy as jnp  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402

X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
WORDS = "transcribed from"


class InTorch(nn.Module):
    def __init__(self, width=6, words=4):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, words, bias=False)
        self.table = nn.Embedding(words, width)
        self.second.weight = self.table.weight
        self.register_buffer("scale", torch.full((words,), 0.5), persistent=False)

    def forward(self, x, *, shift=0.0):
        if self.training:
            shift = shift + 2
        return self.second(self.norm(self.first(x)) + self.table.weight[0]) * self.scale + shift


class InFlax(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.width = width
        self.linear = nnx.Linear(4, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.linear(x)))


class InLinen(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x, train: bool = False):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(self.width)(x))
        return linen.Dropout(0.5, deterministic=not train)(x)


class InEquinox(eqx.Module):
    linear: eqx.nn.Linear
    width: int = eqx.field(static=True)

    def __init__(self, width, *, key):
        self.width = width
        self.linear = eqx.nn.Linear(4, width, key=key)

    def __call__(self, x):
        return jax.nn.relu(self.linear(x))


def convert(model, to, *inputs, **options):
    """A structured model, which no warning is given for."""
    with warnings.catch_warnings(action="error", category=fmapper.FmapperWarning):
        return fmapper.convert(model, to, inputs, structure=True, **options)


@pytest.mark.nightly
def test_a_module_of_torch_keeps_words_names_and_ties():
    model = InTorch()
    made = convert(model, "flax", X)
    code = fmapper.source(made)
    assert WORDS in code
    assert "self.first = Linear(4, width, rngs=rngs)" in code
    state = fmapper.state(made, source=True)
    assert state.keys() >= model.state_dict().keys()
    assert np.array_equal(state["second.weight"], model.table.weight.detach())
    back = fmapper.load_state(InTorch(), {name: x + 1 for name, x in state.items()})
    assert back.second.weight is back.table.weight
    assert torch.equal(back.first.weight, model.first.weight + 1)
    there = fmapper.load_state(made, fmapper.state(back), source=True)
    assert "scale" not in back.state_dict()
    fmapper.load_state(made, dict(back.state_dict()), source=True)
    given = torch.from_numpy(X)
    assert np.allclose(there(X, shift=1.0), back.eval()(given, shift=1.0).detach(), atol=1e-5)


@pytest.mark.nightly
def test_what_was_asked_for_in_evaluation_refuses_training_and_starts_as_the_module_otherwise():
    made = convert(InTorch(), "flax", X)
    assert made.norm.use_running_average
    with pytest.raises(fmapper.ConversionError, match=r"evaluation only.*train=True"):
        made.train()
    for trains in (True, False):
        model = InTorch().train(trains)
        made = convert(model, "flax", X, train=True)
        assert made.norm.use_running_average is not trains
        made.train()
        wanted = model.train()(torch.from_numpy(X)).detach()
        assert np.allclose(made(X), wanted, atol=1e-5)
        assert np.allclose(made.norm.mean[...], model.norm.running_mean, atol=1e-5)


@pytest.mark.nightly
def test_other_dtypes_are_kept():
    made = convert(InTorch(), "flax", X)
    assert {str(x.dtype) for x in fmapper.state(made).values()} == {"float32"}
    half = fmapper.convert(InTorch().to(torch.bfloat16), "flax", (torch.from_numpy(X).bfloat16(),),
                           structure=True)  # fmt: skip
    assert half.first.kernel[...].dtype == jnp.bfloat16
    assert WORDS in fmapper.source(half)
    assert half(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.nightly
def test_a_module_of_nnx_starts_in_its_mode_and_gives_its_keys_back():
    model = InFlax(3, nnx.Rngs(0))
    for trains in (True, False):
        model.train() if trains else model.eval()
        made = convert(model, "torch", X)
        assert made.training is trains
        assert WORDS in fmapper.source(made)
    state = fmapper.state(made, source=True)
    assert state.keys() == fmapper.state(model).keys()
    filled = fmapper.load_state(model, state)
    assert np.array_equal(filled.linear.kernel[...], model.linear.kernel[...])
    assert np.allclose(made(torch.from_numpy(X)).detach(), model(X), atol=1e-5)
    assert isinstance(made.linear, nn.Linear)


@pytest.mark.parametrize("bound", [False, True])
def test_a_module_of_linen_follows_its_own_mode_where_a_call_says_none(bound):
    module = InLinen(3)
    variables = module.init(jax.random.key(0), X)
    model = module.bind(variables) if bound else (module, variables)
    assert WORDS in fmapper.source(model, "torch", (X,))
    made = convert(model, "torch", X)
    assert WORDS in fmapper.source(made)
    assert not made.training
    given = torch.from_numpy(X)
    wanted = module.apply(variables, X)
    assert np.allclose(made(given).detach(), wanted, atol=1e-5)
    assert not np.allclose(made.train()(given).detach(), wanted, atol=1e-2)
    assert np.allclose(made(given, train=False).detach(), wanted, atol=1e-2)
    there = fmapper.load_state((module, variables), fmapper.state(made.eval(), source=True))
    assert "batch_stats.BatchNorm_0.mean" in fmapper.state(there)


def test_a_module_of_equinox_is_written_in_its_words():
    model = InEquinox(3, key=jax.random.key(0))
    assert WORDS in fmapper.source(model, "torch", (X[0],))
    made = convert(model, "torch", X[0])
    assert WORDS in fmapper.source(made)
    assert np.allclose(made(torch.from_numpy(X[0])).detach(), model(X[0]), atol=1e-5)
    state = {name: x * 0 for name, x in fmapper.state(made, source=True).items()}
    assert not fmapper.load_state(model, state).linear.weight.any()


def test_what_the_source_does_not_say_is_made_of_operations(monkeypatch):
    def refuse(*_, **__):
        raise fmapper.ConversionError("its source is not there")

    monkeypatch.setattr("fmapper.translation.source.transcribe", refuse)
    made = convert(InTorch(), "flax", X)
    assert WORDS not in (code := fmapper.source(made))
    assert "in the words of its source: its source is not there." in code
    with pytest.raises(fmapper.ConversionError, match="its source is not there"):
        convert(InTorch(), "flax", X, arguments={"width": 6})


def test_arguments_are_those_of_its_constructor():
    class Hidden(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.shift = scale + 1.0

        def forward(self, x):
            return self.linear(x) * self.shift

    made = convert(Hidden(2), "flax", X, arguments={"scale": 2}, dynamic_shapes=["batch, _"])
    assert "Hidden(scale=2, rngs=rngs)" in fmapper.source(made)
    with pytest.raises(fmapper.ConversionError, match="arguments given, scale, gives something"):
        convert(Hidden(2), "flax", X, arguments={"scale": 3})


@pytest.mark.nightly
def test_a_file_that_differs_in_training_is_not_taken(monkeypatch):
    from fmapper_translate.transcription import Transcription

    right = Transcription.whole.fget
    monkeypatch.setattr(
        Transcription, "whole", property(lambda self: right(self).replace("shift + 2", "shift + 3"))
    )
    made = convert(InTorch().train(), "flax", X, train=True)
    assert WORDS not in fmapper.source(made)
