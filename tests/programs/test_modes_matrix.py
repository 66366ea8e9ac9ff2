"""Every source in every form: as handed in, in training, in evaluation."""

import copy
import sys
import types
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import fmapper

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
TOKENS = X.reshape(1, 4, 8)
KEY = jax.random.key(5)


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.dense(x))


class Attended(nnx.Module):
    def __init__(self, rngs):
        options = {"dropout_rate": 0.5, "deterministic": False, "decode": False}
        self.attend = nnx.MultiHeadAttention(2, 8, rngs=rngs, **options)

    def __call__(self, x):
        return self.attend(x)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(x))


class Centered(nnx.Module):
    """Keeps its statistics by hand."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(8))
        self.use_running_average = False

    def __call__(self, x):
        y = self.dense(x)
        if self.use_running_average:
            return y - self.mean[...]
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * y.mean(0)
        return y - y.mean(0)


class Scanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Dropped(rngs)

        self.blocks = make(rngs.split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


class LinenDropped(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        return linen.Dropout(0.5, deterministic=not train)(linen.Dense(8)(x))


class LinenAttended(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        options = {"dropout_rate": 0.5, "deterministic": not train}
        return linen.MultiHeadDotProductAttention(2, **options)(x)


class LinenNormed(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        return linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x))


class LinenCentered(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        y = linen.Dense(8)(x)
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(8))
        if not train:
            return y - mean.value
        mean.value = 0.9 * mean.value + 0.1 * y.mean(0)
        return y - y.mean(0)


class Block(linen.Module):
    train: bool

    @linen.compact
    def __call__(self, x, _):
        return linen.Dropout(0.5, deterministic=not self.train)(linen.Dense(8)(x)), None


class LinenScanned(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        rngs = {"params": True, "dropout": True}
        blocks = linen.scan(Block, variable_axes={"params": 0}, split_rngs=rngs, length=3)
        return blocks(train)(x, None)[0]


class EquinoxDropped(eqx.Module):
    dense: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.dense = eqx.nn.Linear(8, 8, key=key)
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        return self.drop(jax.vmap(self.dense)(x), key=key)


class EquinoxAttended(eqx.Module):
    attend: eqx.nn.MultiheadAttention

    def __init__(self, key):
        self.attend = eqx.nn.MultiheadAttention(2, 8, dropout_p=0.5, key=key)

    def __call__(self, x, *, key=None):
        return self.attend(x, x, x, key=key)


class EquinoxScanned(eqx.Module):
    blocks: EquinoxDropped

    def __init__(self, key):
        self.blocks = eqx.filter_vmap(EquinoxDropped)(jax.random.split(key, 3))

    def __call__(self, x, *, key=None):
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        keys = None if key is None else jax.random.split(key, 3)

        def run(x, given):
            return eqx.combine(given[0], rest)(x, key=given[1]), None

        return jax.lax.scan(run, x, (arrays, keys))[0]


def _of_linen(cls, x, **kwargs):
    module = cls()
    return (module, module.init(jax.random.key(0), x)), x, kwargs


_RNGS = {"rngs": {"dropout": KEY}}
CASES = {
    "nnx dropout": lambda: (Dropped(nnx.Rngs(0)), X, {}),
    "nnx attention": lambda: (Attended(nnx.Rngs(0)), TOKENS, {}),
    "nnx norm": lambda: (Normed(nnx.Rngs(0)), X, {}),
    "nnx by hand": lambda: (Centered(nnx.Rngs(0)), X, {}),
    "nnx scan": lambda: (Scanned(nnx.Rngs(0)), X, {}),
    "linen dropout": lambda: _of_linen(LinenDropped, X, **_RNGS),
    "linen attention": lambda: _of_linen(LinenAttended, TOKENS, **_RNGS),
    "linen norm": lambda: _of_linen(LinenNormed, X),
    "linen by hand": lambda: _of_linen(LinenCentered, X),
    "linen scan": lambda: _of_linen(LinenScanned, X, **_RNGS),
    "equinox dropout": lambda: (EquinoxDropped(KEY), X, {"key": KEY}),
    "equinox attention": lambda: (EquinoxAttended(KEY), X, {"key": KEY}),
    "equinox scan": lambda: (EquinoxScanned(KEY), X, {"key": KEY}),
}
# What layers of torch do not do in training.
UNWRITTEN = {"nnx scan", "linen attention", "linen scan", "equinox scan"}
QUICK = {"nnx attention", "linen norm", "equinox dropout"}
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]


def _call_source(model, x, kwargs, *, train):
    """Calls a model in a mode; returns its output and, of a model of Flax, its statistics."""
    if isinstance(model, eqx.Module):
        return eqx.nn.inference_mode(model, not train)(x, **kwargs), []
    if isinstance(model, nnx.Module):
        own = nnx.clone(model)
        own.train() if train else own.eval()
        return own(x), jax.tree.leaves(nnx.state(own, nnx.BatchStat))
    options = {"mutable": ["batch_stats"]} if train else {}
    found = model[0].apply(model[1], x, train=train, **kwargs, **options)
    return (found[0], jax.tree.leaves(found[1])) if train else (found, [])


def _of_torch(kwargs):
    words = jax.tree.map(jax.random.key_data, kwargs)
    return jax.tree.map(lambda key: torch.from_numpy(np.array(key)), words)


def _statistics(converted):
    return [x for name, x in converted.named_buffers() if "mean" in name or "var" in name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", EACH)
def test_flat_models_start_train_and_evaluate_as_their_source(name):
    model, x, kwargs = CASES[name]()
    converted = fmapper.convert(model, "torch", (x,), kwargs, train=True)
    assert converted.training is not name.startswith("linen")
    assert fmapper.verify(model, converted, x, example_kwargs=kwargs)
    outputs = {}
    for train in (False, True):
        expected, statistics = _call_source(model, x, kwargs, train=train)
        found = converted.train(train)(torch.from_numpy(x), **_of_torch(kwargs))
        np.testing.assert_allclose(found.detach(), expected, atol=1e-5)
        for ours, theirs in zip(_statistics(converted), statistics, strict=train):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
        outputs[train] = found
    assert not torch.allclose(outputs[True], outputs[False])


@pytest.mark.nightly
@pytest.mark.parametrize("name", EACH)
def test_models_of_written_classes_train_or_refuse_to(name):
    model, x, kwargs = CASES[name]()
    options = {"structure": True}
    if name in UNWRITTEN:
        with pytest.raises(fmapper.ConversionError, match="training cannot be written"):
            fmapper.convert(model, "torch", (x,), kwargs, train=True, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            converted = fmapper.convert(model, "torch", (x,), kwargs, **options)
        told = any("for evaluation alone" in str(one.message) for one in caught)
        assert told is not name.startswith("linen")  # which is called for evaluation
        with pytest.raises(RuntimeError, match="for evaluation alone"):
            converted.train()
        assert not converted.training
        assert "for evaluation alone" in fmapper.source(converted)
    else:
        converted = fmapper.convert(model, "torch", (x,), kwargs, train=True, **options)
        assert converted.training is not name.startswith("linen")
    expected, _ = _call_source(model, x, kwargs, train=False)
    evaluated = converted.eval()(torch.from_numpy(x))
    np.testing.assert_allclose(evaluated.detach(), expected, atol=1e-5)
    if name in UNWRITTEN:
        return
    expected, statistics = _call_source(model, x, kwargs, train=True)
    trained = converted.train()(torch.from_numpy(x))
    assert not torch.allclose(trained, evaluated)
    if statistics:
        np.testing.assert_allclose(trained.detach(), expected, atol=1e-5)
        for ours, theirs in zip(_statistics(converted), statistics, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_files_train_or_refuse_to(name):
    model, x, kwargs = CASES[name]()
    given = (model, "torch", (x,), kwargs)
    trains = name not in UNWRITTEN
    if not trains:
        with pytest.raises(fmapper.ConversionError, match="training cannot be written"):
            fmapper.source(*given, train=True)
    code = fmapper.source(*given, train=trains)
    module = types.ModuleType("written_modes")
    sys.modules[module.__name__] = module
    exec(code, vars(module))
    made = getattr(module, type(model[0] if isinstance(model, tuple) else model).__name__)()
    if trains:
        assert made.train().training
    else:
        with pytest.raises(RuntimeError, match="for evaluation alone"):
            made.train()
        assert not any(part.training for part in made.modules())


class TorchDropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.drop = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.dense(x))


class TorchAttended(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0]


class TorchNormed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.dense(x))


class TorchCentered(torch.nn.Module):
    """Keeps its statistics by hand."""

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.dense(x)
        if not self.training:
            return y - self.mean
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - y.mean(0)


def _call_torch(model, x, *, train):
    own = copy.deepcopy(model).train(train)
    output = own(torch.from_numpy(x)).detach().numpy()
    return output, [b.numpy() for b in own.buffers() if b.ndim]


@pytest.mark.nightly
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize(
    ("make", "x", "draws"),
    [
        pytest.param(TorchDropped, X, True, marks=pytest.mark.nightly),
        pytest.param(TorchAttended, TOKENS, True, marks=pytest.mark.nightly),
        (TorchNormed, X, False),
        (TorchCentered, X, False),
    ],
)
def test_structured_modules_of_torch_start_train_and_evaluate_as_their_source(
    make, x, draws, starts
):
    source = make().train(starts)
    given = (torch.from_numpy(x),)
    converted = fmapper.convert(source, "flax", given, structure=True, train=True)
    evaluated, _ = _call_torch(source, x, train=False)
    trained, statistics = _call_torch(source, x, train=True)
    as_given = nnx.clone(converted)(x)
    if draws:
        assert np.allclose(as_given, evaluated, atol=1e-5) is not starts
    else:
        np.testing.assert_allclose(as_given, trained if starts else evaluated, atol=1e-5)
    converted.eval()
    np.testing.assert_allclose(converted(x), evaluated, atol=1e-5)
    converted.train()
    if draws:
        assert not np.allclose(converted(x), evaluated, atol=1e-5)
        return
    np.testing.assert_allclose(converted(x), trained, atol=1e-5)
    kept = [v[...] for _, v in nnx.to_flat_state(nnx.state(converted)) if type(v) is not nnx.Param]
    found = sorted(float(np.abs(v).sum()) for v in kept if np.shape(v) == (8,))
    expected = sorted(float(np.abs(v).sum()) for v in statistics)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.nightly_cases("True-TorchDropped", "True-TorchCentered", "False-TorchDropped")
@pytest.mark.parametrize(
    "make",
    [
        TorchDropped,
        pytest.param(TorchAttended, marks=pytest.mark.nightly),
        TorchNormed,
        TorchCentered,
    ],
)
@pytest.mark.parametrize("starts", [True, False])
def test_flat_models_of_torch_start_train_and_evaluate_as_their_source(make, starts):
    x = TOKENS if make is TorchAttended else X
    source = make().train(starts)
    given = (torch.from_numpy(x),)
    converted = fmapper.convert(source, "flax", given, train=True, rngs=nnx.Rngs(dropout=0))
    evaluated, _ = _call_torch(source, x, train=False)
    trained, statistics = _call_torch(source, x, train=True)
    assert converted.deterministic is not starts
    converted.eval()
    np.testing.assert_allclose(converted(x), evaluated, atol=1e-5)
    converted.train()
    if not statistics:
        assert not np.allclose(converted(x), evaluated, atol=1e-5)
        return
    np.testing.assert_allclose(converted(x), trained, atol=1e-5)
    found = [x for x in jax.tree.leaves(converted.state_dict()) if np.shape(x) == (8,)]
    for expected in statistics:
        assert any(np.allclose(one, expected, atol=1e-5) for one in found)


@pytest.mark.nightly_cases("TorchDropped")
@pytest.mark.parametrize(
    "make",
    [
        TorchDropped,
        pytest.param(TorchAttended, marks=pytest.mark.nightly),
        TorchNormed,
        TorchCentered,
    ],
)
def test_files_of_torch_train_or_refuse_to(make, monkeypatch):
    def refuse(*_, **__):
        raise fmapper.ConversionError("a transcription trains")

    monkeypatch.setattr("fmapper.translation.source.transcribe", refuse)
    x = TOKENS if make is TorchAttended else X
    code = fmapper.source(make(), "flax", (torch.from_numpy(x),))
    module = types.ModuleType("written_for_evaluation")
    exec(code, vars(module))
    made = getattr(module, make.__name__)(rngs=nnx.Rngs(0))
    with pytest.raises(RuntimeError, match="for evaluation alone"):
        made.train()


class EquinoxNormed(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.dense = eqx.nn.Linear(8, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        def one(x, state):
            return self.norm(self.dense(x), state)

        return jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


@pytest.mark.nightly
def test_batch_norm_of_equinox_trains_and_evaluates_as_its_source():
    model, state = eqx.nn.make_with_state(EquinoxNormed)(KEY)
    converted = fmapper.convert((model, state), "torch", (X,), train=True)
    assert converted.training
    trained, after = model(X, state)
    found = converted.train()(torch.from_numpy(X)).detach()
    np.testing.assert_allclose(found, trained, atol=1e-5)
    evaluated, _ = eqx.nn.inference_mode(model)(X, after)
    found = converted.eval()(torch.from_numpy(X)).detach()
    np.testing.assert_allclose(found, evaluated, atol=1e-5)


@pytest.mark.nightly
def test_written_batch_norm_of_equinox_trains_and_evaluates_as_its_source():
    given = eqx.nn.make_with_state(EquinoxNormed)(KEY)
    model, state = given
    trained, after = model(X, state)
    evaluated, _ = eqx.nn.inference_mode(model)(X, after)
    converted = fmapper.convert(given, "torch", (X,), structure=True, train=True)
    assert converted.training
    np.testing.assert_allclose(converted(torch.from_numpy(X)).detach(), trained, atol=1e-5)
    found = converted.eval()(torch.from_numpy(X)).detach()
    np.testing.assert_allclose(found, evaluated, atol=1e-5)
    module = types.ModuleType("written_norm")
    sys.modules[module.__name__] = module
    exec(fmapper.source(given, "torch", (X,), train=True), vars(module))
    made = module.EquinoxNormed()
    module.load_weights(made, {k: np.array(v) for k, v in fmapper.state(given).items()})
    np.testing.assert_allclose(made.train()(torch.from_numpy(X)).detach(), trained, atol=1e-5)
    np.testing.assert_allclose(made.eval()(torch.from_numpy(X)).detach(), evaluated, atol=1e-5)


class EquinoxCentered(eqx.Module):
    """Keeps its statistics by hand."""

    dense: eqx.nn.Linear
    mean: eqx.nn.StateIndex
    inference: bool

    def __init__(self, key):
        self.dense, self.inference = eqx.nn.Linear(8, 8, key=key), False
        self.mean = eqx.nn.StateIndex(jnp.zeros(8))

    def __call__(self, x, state):
        y, mean = jax.vmap(self.dense)(x), state.get(self.mean)
        if self.inference:
            return y - mean, state
        return y - y.mean(0), state.set(self.mean, 0.9 * mean + 0.1 * y.mean(0))


@pytest.mark.nightly
def test_statistics_of_equinox_by_hand_are_kept_and_never_written_in_part():
    given = eqx.nn.make_with_state(EquinoxCentered)(KEY)
    model, state = eqx.nn.make_with_state(EquinoxCentered)(KEY)
    trained, after = model(X, state)
    evaluated, _ = eqx.nn.inference_mode(model)(X, after)
    converted = fmapper.convert(given, "torch", (X,), train=True)
    assert converted.training
    np.testing.assert_allclose(converted(torch.from_numpy(X)).detach(), trained, atol=1e-5)
    found = converted.eval()(torch.from_numpy(X)).detach()
    np.testing.assert_allclose(found, evaluated, atol=1e-5)
    with pytest.raises(fmapper.ConversionError, match="training cannot be written"):
        fmapper.convert(given, "torch", (X,), structure=True, train=True)
    with pytest.raises(fmapper.ConversionError, match="training cannot be written"):
        fmapper.source(given, "torch", (X,), train=True)
    with pytest.warns(fmapper.ConversionWarning, match="for evaluation alone"):
        built = fmapper.convert(given, "torch", (X,), structure=True)
    with pytest.raises(RuntimeError, match="for evaluation alone"):
        built.train()
