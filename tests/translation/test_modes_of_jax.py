"""Files for torch of models of JAX whose own code does something else in training."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import fmapper
from fmapper.translation import run_file
from fmapper.translation.source import translate, translate_for_evaluation, translate_proved

pytestmark = pytest.mark.nightly


class Doubled(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.deterministic = False

    def __call__(self, x):
        y = self.linear(x)
        if not self.deterministic:
            y = y * 2
        return y


def test_a_file_has_what_the_model_does_in_evaluation():
    model, x = Doubled(nnx.Rngs(0)), np.ones((2, 3), np.float32)
    fmapper.source(model, "torch", (x,))
    found, _, _ = translate(model, "torch", (x,), modes=True)
    built = run_file(found)["Doubled"]()
    weights = {"linear.weight": model.linear.kernel[...].T, "linear.bias": model.linear.bias[...]}
    built.load_state_dict({key: torch.tensor(np.asarray(one)) for key, one in weights.items()})
    for mode in ("eval", "train"):
        getattr(built, mode)(), getattr(model, mode)()
        given = built(torch.tensor(x)).detach()
        np.testing.assert_allclose(given, model(x), rtol=1e-5, atol=1e-6)


def test_modes_that_are_two_programs_are_proved_in_both():
    source, proof, reason = translate_proved(Doubled(nnx.Rngs(0)), "torch", (jnp.ones((2, 3)),))
    assert proof, proof
    assert not reason
    assert {what.split()[0] for what in proof.errors} == {"eval", "train"}
    assert source.modes == ("eval", "train")


class OtherHead(nnx.Module):
    """Has another head in training, whose parts one class cannot have."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.deterministic = False

    def __call__(self, x):
        x = self.norm(x)
        return self.linear(x) if self.deterministic else 2 * self.linear(x)


def test_what_cannot_have_both_modes_has_the_one_for_evaluation():
    source, proof = translate_for_evaluation(OtherHead(nnx.Rngs(0)), "torch", (jnp.ones((2, 3)),))
    assert proof, proof
    assert "eval" in source.modes
    fmapper.source(OtherHead(nnx.Rngs(0)), "torch", (np.ones((2, 3), np.float32),))


def test_statistics_in_a_state_at_the_root_are_proved():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        linear: eqx.nn.Linear

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
            self.linear = eqx.nn.Linear(3, 2, key=key)

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return self.linear(x), state

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    whole = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    x = jax.random.normal(jax.random.key(1), (6, 3))
    with pytest.warns(fmapper.ConversionWarning, match="fields have no names"):
        source, proof, reason = translate_proved(whole, "torch", (x, state))
    assert proof, proof
    assert not reason
    assert set(source.leaves.values()) == {1, 2, 3}


def test_a_flag_by_position_is_given_to_the_file_as_it_is():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x, doubled):
            x = self.linear(x)
            return x * 2 if doubled else x

    net = Net(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    _, proof, reason = translate_proved(net, "torch", (jnp.ones(3), True))
    assert proof, reason


def test_one_mask_for_all_steps_is_refused_with_a_way_out():
    nn = pytest.importorskip("flax.linen")

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            h = nn.tanh(nn.Dense(3)(h) + nn.Dense(3)(x))
            return h, nn.Dropout(0.3, deterministic=False)(h)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            split = {"params": False, "dropout": False}
            scan = nn.scan(
                Cell, variable_broadcast="params", split_rngs=split, in_axes=1, out_axes=1
            )
            return scan()(jnp.zeros((x.shape[0], 3)), x)[1]

    x, keys = jnp.ones((2, 4, 3)), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    model = Net(), Net().init(keys, x)
    with pytest.raises(fmapper.ConversionError, match="Draw others in each step"):
        translate(model, "torch", (x,), {"rngs": {"dropout": jax.random.key(2)}})


class Dropped(equinox.Module):
    linear: equinox.nn.Linear
    drop: equinox.nn.Dropout

    def __init__(self):
        self.linear = equinox.nn.Linear(3, 4, key=jax.random.key(0))
        self.drop = equinox.nn.Dropout(0.2)

    def __call__(self, x, key=None):
        return self.drop(self.linear(x), key=key)


def test_dropout_of_equinox_with_a_key_for_each_example_is_a_layer():
    given = jnp.ones((2, 3)), jax.random.split(jax.random.key(1), 2)
    source, proof, reason = translate_proved(jax.vmap(Dropped()), "torch", given)
    assert proof, proof
    assert not reason
    assert source.modes == ("eval", "train")


def test_one_mask_for_all_examples_is_not_that_layer():
    model = jax.vmap(Dropped(), in_axes=(0, None))
    _source, proof, reason = translate_proved(model, "torch", (jnp.ones((2, 3)), jax.random.key(1)))
    assert proof, proof
    assert "draws random numbers" in reason


class Headed(nnx.Module):
    """Has another output in training."""

    def __init__(self, rngs):
        self.linear, self.head = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.deterministic = False

    def __call__(self, x):
        y = self.linear(x)
        return (y, None) if self.deterministic else (y, self.head(y))


class LinenDoubled(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        y = linen.Dropout(0.5, deterministic=not train)(linen.Dense(4)(x))
        return y * 2 if train else y


class EquinoxDoubled(equinox.Module):
    linear: equinox.nn.Linear
    drop: equinox.nn.Dropout
    inference: bool

    def __init__(self, key):
        self.linear, self.drop = equinox.nn.Linear(3, 4, key=key), equinox.nn.Dropout(0.5)
        self.inference = False

    def __call__(self, x, key=None):
        y = self.drop(jax.vmap(self.linear)(x), key=key)
        return y if self.inference else y * 2


@pytest.mark.parametrize("make", [Doubled, pytest.param(Headed, marks=pytest.mark.nightly)])
def test_structured_modules_have_both_modes_of_code_of_the_models_own(make):
    model, x = make(nnx.Rngs(0)), np.ones((2, 3), np.float32)
    built = fmapper.convert(model, "torch", (x,), structure=True)
    assert built.training
    for mode in ("eval", "train"):
        getattr(built, mode)(), getattr(model, mode)()
        pairs = zip(jax.tree.leaves(built(torch.tensor(x))), jax.tree.leaves(model(x)), strict=True)
        for given, expected in pairs:
            np.testing.assert_allclose(given.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["linen", pytest.param("equinox", marks=pytest.mark.nightly)])
def test_structured_modules_have_both_modes_beside_keys_and_flags(kind):
    x, key = np.ones((64, 3), np.float32), jax.random.key(0)
    if kind == "linen":
        model = LinenDoubled(), LinenDoubled().init(key, x)
        expected, kwargs = model[0].apply(model[1], x), {"rngs": {"dropout": key}}
    else:
        model, kwargs = EquinoxDoubled(key), {"key": key}
        expected = equinox.nn.inference_mode(model)(x)
    built = fmapper.convert(model, "torch", (x,), kwargs, structure=True, train=True)
    assert built.training is (kind == "equinox")
    np.testing.assert_allclose(built.eval()(torch.tensor(x)).detach(), expected, atol=1e-6)
    trained = built.train()(torch.tensor(x)).detach().numpy()
    kept = trained != 0
    np.testing.assert_allclose(trained[kept], 4 * np.asarray(expected)[kept], rtol=1e-4)
    assert 0.3 < kept.mean() < 0.7


class Frozen(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.BatchNorm(3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs, use_running_average=True)

    def __call__(self, x):
        return self.norm(self.first(x))


def test_batch_norm_that_is_frozen_stays_so_in_training():
    model, x = Frozen(nnx.Rngs(0)), np.arange(6, dtype=np.float32).reshape(2, 3)
    model.norm.mean[...] = jnp.arange(3.0)
    built = fmapper.convert(model, "torch", (x,), structure=True, train=True)
    given = built(torch.tensor(x)).detach()
    np.testing.assert_allclose(given, model(x), atol=1e-5)
    mean = next(
        b for name, b in built.named_buffers() if name.startswith("norm.") and "mean" in name
    )
    np.testing.assert_array_equal(mean, np.arange(3.0))


def test_structured_modules_are_compared_in_training(monkeypatch):
    from fmapper.programs import check_target

    compared, check = [], check_target.check

    def note(*given):
        compared.append(given[4].train)
        check(*given)

    monkeypatch.setattr(check_target, "check", note)
    x = np.ones((2, 3), np.float32)
    fmapper.convert(Doubled(nnx.Rngs(0)), "torch", (x,), structure=True)
    assert compared
    assert all(compared)
