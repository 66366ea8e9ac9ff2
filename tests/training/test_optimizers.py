"""A run of training goes on in another framework, as if it had stayed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import fmapper
from fmapper import ConversionError, convert_training
from fmapper.checkpoints import Offset, Rename, Rules, Transpose

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
jnp = jax.numpy
optim = torch.optim
schedulers = torch.optim.lr_scheduler

X = np.random.default_rng(0).normal(size=(8, 3))
Y = np.random.default_rng(1).normal(size=(8, 2))

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "dampening": lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.3),
    "adam": lambda p: optim.Adam(p, 1e-2, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, 1e-2, weight_decay=0.1),
    "amsgrad": lambda p: optim.AdamW(p, 1e-2, amsgrad=True),
    "maximize": lambda p: optim.Adam(p, 1e-3, maximize=True, weight_decay=0.1),
    "adamax": lambda p: optim.Adamax(p, 1e-2, weight_decay=0.01),
    "nadam": lambda p: optim.NAdam(p, 1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(p, 1e-2, weight_decay=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-3),
    "centered": lambda p: optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1, weight_decay=0.01),
    "adadelta": lambda p: optim.Adadelta(p, 1.0),
    "adafactor": lambda p: optim.Adafactor(p, 0.05, weight_decay=0.01),
}

SCHEDULES = {
    "none": lambda o: None,
    "constant": lambda o: schedulers.ConstantLR(o, 0.3, 5),
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "milestones": lambda o: schedulers.MultiStepLR(o, [2, 4, 4], 0.5),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 10, 2.0),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 6, 1e-4),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2, 1e-4),
    "onecycle": lambda o: schedulers.OneCycleLR(o, 1e-2, 12, cycle_momentum=False),
    "function": lambda o: schedulers.LambdaLR(o, lambda step: (step + 1) / 5 if step < 5 else 0.9),
    "warmup": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.CosineAnnealingLR(o, 8)], [4]
    ),
}


@contextlib.contextmanager
def double():
    """Without it rounding would hide what differs."""
    torch.set_default_dtype(torch.float64)
    try:
        with jax.enable_x64(True):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def make_net():
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    return torch.nn.Sequential(*layers)


def in_groups(net):
    """Norms and biases without decay and with a rate of their own, as people have them."""
    flat = [p for p in net.parameters() if p.ndim == 1]
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": flat, "weight_decay": 0.0, "lr": 3e-3},
    ]


def train_torch(net, optimizer, scheduler, steps):
    x, y = (torch.from_numpy(z).to(torch.get_default_dtype()) for z in (X, Y))
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return net


def train_jax(model, optimizer, steps):
    x, y = (jnp.asarray(z, jnp.result_type(float)) for z in (X, Y))
    if isinstance(optimizer, nnx.Optimizer):

        @nnx.jit
        def update(model, optimizer):
            optimizer.update(model, nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(model))

        for _ in range(steps):
            update(model, optimizer)
        return model, optimizer
    tx, held = optimizer
    if hasattr(model, "params"):
        params, put = model.params, lambda params: model.replace(params=params)
    else:
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        each = jax.vmap if isinstance(model, eqx.nn.MLP) else lambda function: function
        put = lambda params: each(eqx.combine(params, rest))  # noqa: E731

    @jax.jit
    def step(params, held):
        gradients = jax.grad(lambda p: jnp.mean((put(p)(x) - y) ** 2))(params)
        updates, held = tx.update(gradients, held, params)
        return optax.apply_updates(params, updates), held

    for _ in range(steps):
        params, held = step(params, held)
    return put(params) if hasattr(model, "params") else eqx.combine(params, rest), (tx, held)


def difference(state, other):
    """The largest difference, relative to the largest element, over all arrays."""
    pairs = [(np.asarray(fmapper.to_numpy(state[k])), fmapper.to_numpy(other[k])) for k in other]
    return max(float(np.abs(a - b).max() / max(1e-3, np.abs(b).max())) for a, b in pairs)


def weights(net):
    found = fmapper.state(net)
    return {name: found[name] for name, _ in net.named_parameters()}


def begin(optimizer, schedule="none", groups=True, steps=3):
    net = make_net()
    made = OPTIMIZERS[optimizer](in_groups(net) if groups else net.parameters())
    scheduler = SCHEDULES[schedule](made)
    return train_torch(net, made, scheduler, steps), made, scheduler


LAYOUTS = {
    "jax": ("jax", {}),
    "flat": ("flax", {}),
    "structured": ("flax", {"structure": True}),
    "equinox": ("equinox", {"structure": True}),
}


@pytest.mark.daily_cases("adamw-jax", "dampening-flat", "nadam-jax")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_are_those_that_torch_would_have_made(name, layout):
    with double():
        net, optimizer, _ = begin(name)
        to, options = LAYOUTS[layout]
        given = net, optimizer, to, (torch.from_numpy(X),)
        model, moved, scheduler = convert_training(*given, **options)
        assert scheduler is None
        model, _ = train_jax(model, moved, 5)
        train_torch(net, optimizer, None, 5)
        there = fmapper.state(model, source=bool(options))
        assert difference(there, weights(net)) < 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_groups_and_a_schedule_goes_on_and_comes_back(name, layout):
    with double():
        net, optimizer, scheduler = begin(name, "warmup")
        to, options = LAYOUTS[layout]
        options = {**options, "scheduler": scheduler, "scheduler_every": 1}
        model, moved, _ = convert_training(net, optimizer, to, (torch.from_numpy(X),), **options)
        model, moved = train_jax(model, moved, 5)
        train_torch(net, optimizer, scheduler, 5)
        is_structured = "structure" in options
        assert difference(fmapper.state(model, source=is_structured), weights(net)) < 1e-12
        back, again, later = convert_training(model, moved, "torch", (X,))
        train_torch(back, again, later, 5)
        train_torch(net, optimizer, scheduler, 5)
        got, want = (module(torch.from_numpy(X)).detach() for module in (back, net))
        assert difference({"y": got}, {"y": want}) < 1e-12
        steps = [int(held["step"]) for held in again.state.values() if "step" in held]
        assert steps in ([], [13] * len(steps))


@pytest.mark.daily_cases("none-0")
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_on_from_their_position_and_come_back(schedule, steps):
    with double():
        net, optimizer, scheduler = begin("adamw", schedule, steps=steps)
        given = torch.from_numpy(X)
        options = {"scheduler": scheduler, "scheduler_every": 1} if scheduler else {}
        model, moved, _ = convert_training(net, optimizer, "jax", (given,), **options)
        model, moved = train_jax(model, moved, 3)
        train_torch(net, optimizer, scheduler, 3)
        assert difference(fmapper.state(model), weights(net)) < 1e-12
        back, again, later = convert_training(model, moved, "torch", (X,))
        assert type(again) is torch.optim.AdamW
        assert (later is None) == (scheduler is None)
        train_torch(back, again, later, 4)
        train_torch(net, optimizer, scheduler, 4)
        assert difference(fmapper.state(back), weights(net)) < 1e-12


@pytest.mark.parametrize("tree", [{}, {"a": None}, {"a": optax.MaskedNode()}])
def test_a_group_may_be_without_parameters(tree):
    """As one is of which a user gives a part of the model to the transformation."""
    from fmapper.training import ALGORITHMS
    from fmapper_adapters.jax.training.transformations import transformation

    settings = {**ALGORITHMS["adam"].settings, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    tx = transformation("adam", settings, {})
    updates, state = tx.update(tree, tx.init(tree), tree)
    assert updates == tree
    assert int(state.count) == 1


def test_a_rate_of_optax_is_one_of_the_widest_floats():
    """Or weight decay would be rounded by it. And a rate is a function for `jax.jit`."""
    from fmapper.training import Schedule
    from fmapper_adapters.jax.training.transformations import OfCount, Rate

    with double():
        schedule = optax.linear_schedule(1e-2, 1e-3, 10)
        rate = Rate(1.0, Schedule("LambdaLR", {"function": OfCount(schedule)}))
        assert schedule(jnp.int32(3)).dtype == jnp.float32
        assert jax.jit(rate)(jnp.int32(3)) == schedule(jnp.int32(3))
        assert rate(jnp.int32(3)).dtype == jnp.float64


@pytest.mark.parametrize("shape", [(4, 6), (8, 8), (16, 5)])
def test_newton_schulz_rounds_as_torch_does(shape):
    from torch.optim import _muon

    from fmapper_adapters.jax.training.transformations import _newton_schulz

    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    given = (3.4445, -4.775, 2.0315), 5, 1e-7
    want = _muon._zeropower_via_newtonschulz(torch.from_numpy(x), *given).float().numpy()
    is_tall = shape[0] > shape[1]
    got = np.asarray(_newton_schulz(jnp.asarray(x.T if is_tall else x), *given))
    assert np.array_equal(got.T if is_tall else got, want)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["jax", "flat", "structured"])
def test_muon_rounds_as_torch_does_and_comes_back(layout):
    """With matrices that are wide, tall and square, whose sides have other roles in Flax."""
    with double():
        torch.manual_seed(0)
        sizes = (3, 4, 4, 2)
        layers = [torch.nn.Linear(*size, bias=False) for size in itertools.pairwise(sizes)]
        net = torch.nn.Sequential(*layers)
        optimizer = optim.Muon(net.parameters(), 0.02, weight_decay=0.1)
        train_torch(net, optimizer, None, 3)
        options = {"structure": True} if layout == "structured" else {}
        to = "jax" if layout == "jax" else "flax"
        given = torch.from_numpy(X)
        model, moved, _ = convert_training(net, optimizer, to, (given,), **options)
        model, moved = train_jax(model, moved, 5)
        train_torch(net, optimizer, None, 5)
        assert difference(fmapper.state(model, source=bool(options)), weights(net)) < 1e-12
        if layout == "jax":
            back, again, _ = convert_training(model, moved, "torch", (X,))
            train_torch(back, again, None, 3)
            train_torch(net, optimizer, None, 3)
            assert difference(fmapper.state(back), weights(net)) < 1e-12


def test_the_rows_of_a_column_have_their_moments():
    """Whose mean squares over rows have the shape of the parameter."""
    with double():
        net = torch.nn.Linear(1, 4, bias=False)
        optimizer = optim.Adafactor(net.parameters(), 0.05)
        with_ones(net, optimizer, 2)
        twin = nnx.Linear(1, 4, use_bias=False, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        rules = Rules([Rename("weight", "kernel"), Transpose("kernel")])
        model, moved, _ = convert_training(net, optimizer, twin, rules=rules)
        moved.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
        with_ones(net, optimizer, 1)
        got = {"weight": model.kernel[...].T}
        assert difference(got, weights(net)) < 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_differs_by_rounding_alone(name):
    x = X.astype(np.float32)
    net, optimizer, _ = begin(name)
    others = [copy.deepcopy((net, optimizer)) for _ in range(2)]
    model, moved, _ = convert_training(net, optimizer, "jax", (torch.from_numpy(x),))
    model, _ = train_jax(model, moved, 5)
    train_torch(net, optimizer, None, 5)
    with double():
        for off, (twin, made) in enumerate(others):
            for value in (x for state in made.state.values() for x in state.values()):
                value.data = value.double()
            for weight in twin.double().parameters():
                weight.data *= 1 + off * 2.0**-23
            train_torch(twin, made, None, 5)
    exact, moved_by_a_rounding = (weights(twin) for twin, _ in others)
    bound = max(1e-6, 4 * difference(moved_by_a_rounding, exact))
    assert difference(fmapper.state(model), exact) < bound


def matrices(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


OF_OPTAX = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "l2": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2)),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "masked": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "partition": lambda: optax.partition(
        {True: optax.adamw(1e-2, weight_decay=0.1), False: optax.adamw(3e-3, weight_decay=0)},
        matrices,
    ),
    "frozen": lambda: optax.partition(
        {True: optax.adam(1e-2), False: optax.set_to_zero()}, matrices
    ),
    "adamax": lambda: optax.adamax(1e-2),
    "adadelta": lambda: optax.adadelta(1.0, rho=0.9, eps=1e-6),
    "named": lambda: optax.named_chain(("clip", optax.identity()), ("adam", optax.adam(1e-2))),
    "a rate of one": lambda: optax.sgd(1.0),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "injected schedule": lambda: optax.chain(
        optax.identity(),
        optax.inject_hyperparams(optax.adamw)(
            learning_rate=optax.cosine_decay_schedule(1e-2, 20), b1=0.8
        ),
    ),
    "two schedules": lambda: optax.partition(
        {
            True: optax.adam(optax.cosine_decay_schedule(1e-2, 20)),
            False: optax.adam(optax.linear_schedule(1e-2, 1e-3, 20)),
        },
        matrices,
    ),
    "mean of gradients": lambda: optax.chain(
        optax.ema(0.9, debias=False), optax.scale_by_learning_rate(0.1)
    ),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, 20)),
}  # fmt: skip


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        how = {"rngs": rngs, "param_dtype": jnp.float64}
        self.a, self.n = nnx.Linear(3, 4, **how), nnx.LayerNorm(4, **how)
        self.b = nnx.Linear(4, 2, **how)

    def __call__(self, x):
        return self.b(jnp.tanh(self.n(self.a(x))))


@pytest.mark.daily_cases("a rate of one-False")
@pytest.mark.parametrize("structure", [False, True])
@pytest.mark.parametrize("name", OF_OPTAX)
def test_the_next_steps_are_those_that_nnx_would_have_made(name, structure):
    with double():
        net = OfNnx(nnx.Rngs(0))
        optimizer = nnx.Optimizer(net, OF_OPTAX[name](), wrt=nnx.Param)
        train_jax(net, optimizer, 3)
        options = {"structure": True} if structure else {}
        model, moved, scheduler = convert_training(net, optimizer, "torch", (X,), **options)
        train_torch(model, moved, scheduler, 5)
        train_jax(net, optimizer, 5)
        assert difference(fmapper.state(model, source=structure), fmapper.state(net)) < 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_OPTAX)
def test_the_next_steps_are_those_that_equinox_would_have_made(name):
    with double():
        net = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
        tx = OF_OPTAX[name]()
        optimizer = tx, tx.init(eqx.filter(net, eqx.is_inexact_array))
        net, optimizer = train_jax(net, optimizer, 3)
        model, moved, scheduler = convert_training(net, optimizer, "torch", (X[0],))
        batched = torch.func.vmap(model)
        for _ in range(5):
            moved.zero_grad()
            (batched(torch.from_numpy(X)) - torch.from_numpy(Y)).square().mean().backward()
            moved.step()
            if scheduler is not None:
                scheduler.step()
        net, _ = train_jax(net, optimizer, 5)
        assert difference(fmapper.state(model), fmapper.state(net)) < 1e-12


# --- several optimizers, averages, settings that change ------------------------------------------


def with_ones(model, optimizer, steps, *, averaged=None, scheduler=None):
    """Updates with gradients of ones, so that nothing is compiled."""
    if isinstance(model, torch.nn.Module):
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if averaged is not None:
                averaged.update_parameters(model)
        return model
    (tx, held), params, average = optimizer, model.params, None
    for _ in range(steps):
        updates, held = tx.update(jax.tree.map(jnp.ones_like, params), held, params)
        params = optax.apply_updates(params, updates)
        if averaged is not None:
            average, state = averaged[0].update(params, averaged[1])
            averaged = averaged[0], state
    return model.replace(params=params), (tx, held), averaged, average


def by_layers(net):
    return [{"params": net[at].parameters(), "lr": rate} for at, rate in ((0, 1e-2), (3, 3e-3))]


OF_SETTINGS = {
    "functions": (optim.Adam, lambda o: schedulers.LambdaLR(o, [lambda s: 0.9**s, lambda s: 0.5])),
    "one cycle": (optim.AdamW, lambda o: schedulers.OneCycleLR(o, [1e-2, 3e-3], 20)),
    "of momentum": (
        lambda p: optim.SGD(p, momentum=0.9, nesterov=True),
        lambda o: schedulers.OneCycleLR(o, 0.1, 20, three_phase=True, anneal_strategy="linear"),
    ),
    "of rmsprop": (
        lambda p: optim.RMSprop(p, momentum=0.9), lambda o: schedulers.OneCycleLR(o, 0.1, 20)
    ),
    "to average": (
        optim.Adam, lambda o: torch.optim.swa_utils.SWALR(o, [1e-3, 2e-3], anneal_epochs=6)
    ),
    "averaged": (
        optim.Adam,
        lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, anneal_epochs=2, anneal_strategy="linear"),
    ),
}  # fmt: skip


@pytest.mark.daily_cases("of momentum")
@pytest.mark.parametrize("name", OF_SETTINGS)
def test_settings_of_groups_change_as_in_torch_and_come_back(name):
    with double():
        net = make_net()
        make, schedule = OF_SETTINGS[name]
        optimizer = make(by_layers(net))
        scheduler = schedule(optimizer)
        with_ones(net, optimizer, 3, scheduler=scheduler)
        how = {"scheduler": scheduler, "scheduler_every": 1}
        model, moved, _ = convert_training(net, optimizer, "jax", (torch.from_numpy(X),), **how)
        model, moved, *_ = with_ones(model, moved, 5)
        with_ones(net, optimizer, 5, scheduler=scheduler)
        assert difference(fmapper.state(model), weights(net)) < 1e-12
        back, again, later = convert_training(model, moved, "torch", (X,))
        assert name not in ("one cycle", "of momentum") or type(later) is type(scheduler)
        with_ones(back, again, 5, scheduler=later)
        with_ones(net, optimizer, 5, scheduler=scheduler)
        assert difference(fmapper.state(back), weights(net)) < 1e-12


def test_several_optimizers_of_one_model_go_along():
    """As the two of a GAN, each for the parameters that it has."""
    with double():
        net = make_net()
        adam, sgd = optim.Adam(net[0].parameters()), optim.SGD(net[3].parameters(), 0.1)
        decay = schedulers.ExponentialLR(adam, 0.9)
        with_ones(net, adam, 3, scheduler=decay)
        with_ones(net, sgd, 3)
        how = {"scheduler": (decay, None), "scheduler_every": (1, None)}
        given = net, (adam, sgd), "jax", (torch.from_numpy(X),)
        model, (moved, other), none = convert_training(*given, **how)
        assert none == (None, None)
        model, moved, *_ = with_ones(model, moved, 2)
        model, other, *_ = with_ones(model, other, 2)
        back, again, later = convert_training(model, [moved, other], "torch", (X,))
        for at in range(2):
            with_ones(back, again[at], 3, scheduler=later[at])
        with_ones(net, adam, 5, scheduler=decay)
        with_ones(net, sgd, 5)
        assert difference(fmapper.state(back), weights(net)) < 1e-12
        for wrong in ([decay], decay):
            with pytest.raises(ConversionError, match="2 optimizers, 1 schedulers and 2 numbers"):
                convert_training(*given, scheduler=wrong)


swa = torch.optim.swa_utils
AVERAGES = {
    "ema": lambda net: swa.AveragedModel(net, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9)),
    "ema by parameter": lambda net: swa.AveragedModel(net, avg_fn=swa.get_ema_avg_fn(0.9)),
    "equal": swa.AveragedModel,
}


@pytest.mark.daily_cases("equal-3")
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_of_the_weights_goes_along_and_comes_back(name, steps):
    with double():
        net = make_net()
        sgd, averaged = optim.SGD(net.parameters(), 0.1), AVERAGES[name](net)
        with_ones(net, sgd, steps, averaged=averaged)
        given = net, (sgd, averaged), "jax", (torch.from_numpy(X),)
        model, (moved, there), _ = convert_training(*given)
        model, moved, there, average = with_ones(model, moved, 4, averaged=there)
        with_ones(net, sgd, 4, averaged=averaged)
        assert difference(average, weights(averaged.module)) < 1e-12
        back, (again, later), _ = convert_training(model, (moved, there), "torch", (X,))
        assert int(later.n_averaged) == steps + 4
        with_ones(back, again, 4, averaged=later)
        with_ones(net, sgd, 4, averaged=averaged)
        assert difference(weights(later.module), weights(averaged.module)) < 1e-12


def change_weights(net):
    nnx.update(net, jax.tree.map(lambda x: 0.9 * x + 0.1, nnx.state(net, nnx.Param)))


@pytest.mark.daily_cases("nnx")
@pytest.mark.parametrize("kind", ["unbiased", "plain", "nnx"])
def test_averages_of_jax_go_along_to_torch_and_to_flax(kind):
    with double():
        net = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        params = lambda: nnx.state(net, nnx.Param)  # noqa: E731
        tx = optax.ema(0.9, debias=kind == "unbiased")
        held = nnx.EMA(net, 0.9) if kind == "nnx" else tx.init(params())

        def update():
            nonlocal held
            change_weights(net)
            if kind == "nnx":
                held.update(net)
                return held.params
            average, held = tx.update(params(), held)
            return average

        for _ in range(3):
            update()
        model, averaged, _ = convert_training(
            net, held if kind == "nnx" else (tx, held), "torch", (X,)
        )
        twin, (other, there), _ = convert_training(model, averaged, "flax", (torch.from_numpy(X),))
        want = fmapper.state(nnx.to_pure_dict(update()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9).add_(0.1)
        averaged.update_parameters(model)
        assert difference(fmapper.state(averaged.module), want) < 1e-12
        change_weights(twin)
        average, _ = other.update(nnx.state(twin, nnx.Param), there)
        got = {str(array.shape): array for array in jax.tree.leaves(average)}
        assert difference(got, {str(array.shape): array for array in want.values()}) < 1e-12


def test_an_average_of_flax_may_be_one_of_all_variables():
    from fmapper.verification.models.owners import adapter_of_model

    net = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    averaged, read = nnx.EMA(net, 0.9), adapter_of_model(net).read_optimizer
    averaged.update(jax.tree.map(lambda x: x + 1, nnx.state(net)))
    state = read(net, averaged, None)
    assert [float(x[0]) for x in state.slots["average"].values()] == pytest.approx([0.1, 1.1])
    some = nnx.EMA(net, 0.9, only=nnx.PathContains("scale"))
    with pytest.raises(ConversionError, match="average for 1 parameters, and the model has 2"):
        read(net, some, None)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda net: swa.AveragedModel(net, avg_fn=lambda a, b, n: a), "its function is not one"),
        (lambda net: swa.AveragedModel(torch.nn.Linear(2, 2)), "is one of another model"),
        (
            lambda net: swa.AveragedModel(net, use_buffers=True),
            "use_buffers=True has averages of buffers, too",
        ),
    ],
)
def test_averages_without_a_counterpart_are_refused(make, what):
    net = torch.nn.BatchNorm1d(3)
    with pytest.raises(ConversionError, match=what):
        convert_training(net, make(net), "jax", ONE)
    with pytest.raises(ConversionError, match="has no rate, and so no scheduler"):
        convert_training(net, swa.AveragedModel(net), "jax", ONE, scheduler=object())


def test_accumulated_gradients_are_said_with_their_count():
    with double():
        net = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        tx = optax.MultiSteps(optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)), 2)
        optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
        grads = nnx.state(net, nnx.Param)
        optimizer.update(net, grads)
        with pytest.raises(ConversionError, match="only between two updates"):
            convert_training(net, optimizer, "torch", (X,))
        optimizer.update(net, grads)
        said = r"accumulate gradients. Before each step call \(loss / 2\).backward\(\) 2 times"
        with (
            pytest.warns(fmapper.ConversionWarning, match=said),
            pytest.warns(fmapper.ConversionWarning, match="clip_grad_value_"),
        ):
            _, moved, _ = convert_training(net, optimizer, "torch", (X,))
        assert moved.param_groups[0]["momentum"] == 0.9
        assert len(moved.state) == 2


# --- twins, files and meshes -------------------------------------------------------------------


class Twin(nnx.Module):
    """The net of `make_net`, as somebody else wrote it."""

    def __init__(self):
        how = {"rngs": nnx.Rngs(1), "param_dtype": jnp.result_type(float)}
        self.up, self.norm = nnx.Linear(3, 4, **how), nnx.LayerNorm(4, **how, epsilon=1e-5)
        self.down = nnx.Linear(4, 2, **how)

    def __call__(self, x):
        return self.down(jnp.tanh(self.norm(self.up(x))))


TWIN = Rules([
    Rename(["0.weight", "3.weight"], ["up.kernel", "down.kernel"]),
    Rename(["0.bias", "3.bias"], ["up.bias", "down.bias"]),
    Rename(["1.weight", "1.bias"], ["norm.scale", "norm.bias"]),
    Transpose(["up.kernel", "down.kernel"]),
])  # fmt: skip


@pytest.mark.daily_cases("momentum")
@pytest.mark.parametrize("name", ["adamw", "momentum", "adafactor"])
def test_a_run_goes_on_in_a_twin_and_comes_back(name):
    with double():
        net, optimizer, _ = begin(name)
        twin, moved, _ = convert_training(net, optimizer, Twin(), rules=TWIN)
        twin, moved = train_jax(twin, moved, 3)
        train_torch(net, optimizer, None, 3)
        want = {n: a.read() for n, a in TWIN.apply(fmapper.to_numpy(weights(net))).items()}
        assert difference(fmapper.state(twin), want) < 1e-12
        back, again, _ = convert_training(twin, moved, make_net(), rules=TWIN.inverse())
        train_torch(back, again, None, 3)
        train_torch(net, optimizer, None, 3)
        assert difference(weights(back), weights(net)) < 1e-12


def test_a_run_goes_on_in_a_linen_module_and_comes_back():
    """Whose optimizer is a pair for its `params`."""
    linen = pytest.importorskip("flax.linen")
    with double():
        net = torch.nn.Linear(3, 2)
        groups = [{"params": [net.weight], "lr": 1e-2}, {"params": [net.bias]}]
        optimizer = optim.Adam(groups)
        with_ones(net, optimizer, 2)
        module = linen.Dense(2, param_dtype=jnp.float64)
        twin = module, module.init(jax.random.key(0), jnp.ones((1, 3)))
        rules = Rules([
            Rename({"weight": "params.kernel", "bias": "params.bias"}), Transpose("params.kernel")
        ])  # fmt: skip
        (_, variables), (tx, held), _ = convert_training(net, optimizer, twin, rules=rules)
        params = variables["params"]
        updates, held = tx.update(jax.tree.map(jnp.ones_like, params), held, params)
        twin = module, {"params": optax.apply_updates(params, updates)}
        back, again, _ = convert_training(twin, (tx, held), net, rules=rules.inverse())
        with_ones(back, again, 2)
        with_ones(net, optimizer, 3)
        assert difference(weights(back), weights(net)) < 1e-12


def test_rules_need_a_model():
    with pytest.raises(ConversionError, match="pass that in place of 'jax'"):
        convert_training(LINEAR, optim.SGD(LINEAR.parameters()), "jax", ONE, rules=TWIN)


def test_a_run_goes_on_in_a_twin_of_the_same_framework():
    with double():
        net = OfNnx(nnx.Rngs(0))
        rate = optax.linear_schedule(1e-2, 1e-3, 10)
        optimizer = nnx.Optimizer(net, optax.adam(rate), wrt=nnx.Param)
        names = {"a.{x}": "up.{x}", "n.{x}": "norm.{x}", "b.{x}": "down.{x}"}
        twin = Twin()
        twin.norm.epsilon = net.n.epsilon
        twin, moved, _ = convert_training(net, optimizer, twin, rules=Rules([Rename(names)]))
        grads = nnx.state(net, nnx.Param)
        optimizer.update(net, grads)
        moved.update(twin, nnx.state(twin, nnx.Param))
        assert np.allclose(twin.up.kernel[...], net.a.kernel[...], rtol=1e-12)
        lion = nnx.Optimizer(net, optax.lion(1e-3), wrt=nnx.Param)
        with pytest.raises(ConversionError, match="scale_by_lion has no counterpart in torch"):
            convert_training(net, lion, Twin(), rules=Rules([Rename(names)]))


def test_rules_that_change_values_have_no_moments():
    net, optimizer, _ = begin("adamw", steps=0)
    rules = TWIN + Rules([Offset("norm.scale", 1)])
    with pytest.raises(ConversionError, match=r"Offset.* changes values"):
        convert_training(net, optimizer, Twin(), rules=rules)


@pytest.mark.daily_cases("flax")
@pytest.mark.parametrize("to", ["jax", "flax"])
def test_a_training_state_goes_through_a_file_and_to_a_mesh(to, tmp_path):
    net = make_net()
    optimizer = OPTIMIZERS["adamw"](in_groups(net))
    train_torch(net, optimizer, None, 2)
    given = net, optimizer, to, (torch.from_numpy(X.astype(np.float32)),)
    model, moved, _ = convert_training(*given)
    tree = {"model": model, "optimizer": moved if to == "flax" else moved[1]}
    fmapper.save(tree, tmp_path / "run.safetensors")
    zeros = fmapper.fmap(jnp.zeros_like, tree)
    again = fmapper.load(tmp_path / "run.safetensors", like=zeros)
    want, got = fmapper.state(tree), fmapper.state(again)
    assert want.keys() == got.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = fmapper.state(fmapper.shard(tree, mesh, {"0.weight": ("model",)}))
    specs = {name: array.sharding.spec for name, array in sharded.items()}
    divided = [name for name in specs if specs[name] == jax.sharding.PartitionSpec("model")]
    assert {name.partition(".")[0] for name in divided} == {"model", "optimizer"}
    assert len(divided) == 3  # the parameter and its two moments


# --- what is refused ----------------------------------------------------------------------------

LINEAR = torch.nn.Linear(3, 2)
ONE = (torch.ones(1, 3),)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (optim.LBFGS, "LBFGS cannot be converted: it evaluates the loss"),
        (optim.ASGD, "ASGD cannot be converted"),
        (lambda p: type("Mine", (optim.SGD,), {})(p, 0.1), "Mine cannot be converted: its class"),
    ],
)
def test_optimizers_without_a_counterpart_are_refused_by_name(make, what):
    parameters = [LINEAR.weight]
    with pytest.raises(ConversionError, match=what):
        convert_training(LINEAR, make(parameters), "jax", ONE)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: optax.lion(1e-3), "torch.optim has no Lion"),
        (lambda: optax.rmsprop(1e-3), "eps_in_sqrt=True"),
        (lambda: optax.nadam(1e-3), "nesterov=True"),
        (lambda: optax.adam(1e-3, mu_dtype=jnp.bfloat16), "mu_dtype"),
        (lambda: optax.radam(1e-3), "scale_by_radam has no counterpart in torch: torch's RAdam"),
        (lambda: optax.MultiSteps(optax.adam(1e-3), lambda step: 4), "only a constant number"),
        (lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)), "counterpart for debias=True"),
        (lambda: optax.ema(0.9, debias=False), "ema with debias=False begins at 0"),
        (
            lambda: optax.inject_hyperparams(optax.adamw)(1e-3, weight_decay=lambda step: 0.1),
            "inject_hyperparams: weight_decay follows a schedule",
        ),
        (lambda: optax.adafactor(1e-3), "scale_by_factored_rms"),
        (optax.contrib.scale_by_muon, "torch's Muon corrects no bias"),
        (lambda: optax.sgd(-1e-3), "positive sign"),
        (
            lambda: optax.chain(optax.adam(1.0), optax.add_decayed_weights(0.1)),
            "add_decayed_weights after scale has no counterpart",
        ),
        (lambda: optax.chain(optax.scale(0.5), optax.adam(1.0)), "scale_by_adam after scale"),
        (
            lambda: optax.rmsprop(1e-3, momentum=0.9, eps_in_sqrt=False),
            "trace after scale has no counterpart",
        ),
        (
            lambda: optax.chain(optax.stateless(lambda updates, _: updates), optax.sgd(0.1)),
            "stateless has no counterpart",
        ),
        (lambda: optax.chain(optax.keep_params_nonnegative(), optax.sgd(0.1)), "keep_params"),
        (
            lambda: optax.chain(optax.sgd(lambda count: 0.1), optax.scale_by_learning_rate(len)),
            "two schedules",
        ),
        (
            lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(len)),
            "only optax.scale_by_learning_rate",
        ),
        (lambda: optax.chain(optax.scale_by_adam(), optax.adam(1e-3)), "after scale_by_adam"),
        (lambda: optax.chain(optax.set_to_zero(), optax.adamw(1e-3)), "set_to_zero has no counter"),
        (
            lambda: optax.chain(
                optax.masked(optax.clip_by_global_norm(1.0), {"w": True, "b": False}),
                optax.sgd(0.1),
            ),
            "clip_by_global_norm of some of the parameters",
        ),
    ],
)  # fmt: skip
def test_transformations_without_a_counterpart_are_refused_by_name(make, what):
    tx = make()
    function = lambda params, x: x @ params["w"] + params["b"]  # noqa: E731
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    with pytest.raises(ConversionError, match=what):
        convert_training((function, params), (tx, tx.init(params)), "torch", (jnp.ones((1, 3)),))


def test_what_torch_does_outside_of_the_optimizer_is_said():
    from fmapper_adapters.jax.training.read import read

    params = {"w": jnp.ones(2)}
    tx = optax.chain(optax.clip_by_global_norm(2.0), optax.adam(1e-3))
    with pytest.warns(fmapper.ConversionWarning, match=r"clip_grad_norm_\(model.parameters\(\), 2"):
        assert read(params, tx, tx.init(params)).algorithm == "adam"


def test_an_optimizer_of_another_model_is_refused():
    other = optim.SGD(torch.nn.Linear(3, 2).parameters(), 0.1)
    with pytest.raises(ConversionError, match="is not one of the model"):
        convert_training(LINEAR, other, "jax", ONE)
    with pytest.raises(ConversionError, match="is not a model that it could train"):
        convert_training(LINEAR, (optax.adam(1e-3), ()), "jax", ONE)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (schedulers.ReduceLROnPlateau, "ReduceLROnPlateau cannot be converted"),
        (
            lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o)]),
            "ChainedScheduler cannot be converted",
        ),
        (
            lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
            "MultiplicativeLR cannot be converted",
        ),
        (lambda o: schedulers.CyclicLR(o, 0.1, 0.2), "CyclicLR cannot be converted"),
        (
            lambda o: schedulers.SequentialLR(
                o, [schedulers.ConstantLR(o), schedulers.CyclicLR(o, 0.1, 0.2)], [2]
            ),
            "CyclicLR cannot be converted",
        ),
    ],
)
def test_schedules_that_are_no_function_of_the_step_are_refused(make, what):
    optimizer = optim.SGD(LINEAR.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ConversionError, match=what):
        convert_training(LINEAR, optimizer, "jax", ONE, scheduler=make(optimizer))


def test_a_schedule_that_counts_epochs_is_refused():
    net = torch.nn.Linear(3, 2)
    optimizer = optim.Adam(net.parameters(), 0.1)
    scheduler = schedulers.StepLR(optimizer, 1)
    for _ in range(3):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    scheduler.step()
    with pytest.raises(ConversionError, match="called 1 times in 3 updates"):
        convert_training(net, optimizer, "jax", ONE, scheduler=scheduler)


def test_a_group_that_its_scheduler_does_not_have_is_refused():
    """One of weights that were frozen before: torch's scheduler goes on with the others alone."""
    net = torch.nn.Linear(3, 2)
    optimizer = optim.SGD([net.weight], 0.1)
    scheduler = schedulers.ExponentialLR(optimizer, 0.9)
    optimizer.add_param_group({"params": [net.bias]})
    with pytest.raises(ConversionError, match="group 1 was added to the optimizer after"):
        convert_training(net, optimizer, "jax", ONE, scheduler=scheduler)


def test_a_scheduler_of_another_optimizer_is_refused():
    scheduler = schedulers.StepLR(optim.SGD(LINEAR.parameters(), 0.1), 10)
    optimizer = optim.SGD(LINEAR.parameters(), 0.1)
    with pytest.raises(ConversionError, match="is the scheduler of another optimizer"):
        convert_training(LINEAR, optimizer, "jax", ONE, scheduler=scheduler)


def test_a_rate_that_something_else_has_set_is_refused():
    net = torch.nn.Linear(3, 2)
    optimizer = optim.SGD(net.parameters(), 0.1)
    scheduler = schedulers.StepLR(optimizer, 10)
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(ConversionError, match=r"has the rate 0.01, and its scheduler gives 0.1"):
        convert_training(net, optimizer, "jax", ONE, scheduler=scheduler, scheduler_every=1)


def test_schedules_of_transformers_go_on():
    transformers = pytest.importorskip("transformers")
    net = torch.nn.Linear(3, 2)
    optimizer = optim.SGD(net.parameters(), 0.1)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: the optimizer made no step
        for _ in range(3):
            scheduler.step()
    how = {"scheduler": scheduler, "scheduler_every": 1}
    _, (tx, held), _ = convert_training(net, optimizer, "jax", ONE, **how)
    params = {"weight": jnp.zeros((2, 3)), "bias": jnp.zeros(2)}
    for _ in range(5):
        updates, held = tx.update(jax.tree.map(jnp.ones_like, params), held, params)
        assert np.allclose(-updates["bias"], scheduler.get_last_lr()[0], rtol=1e-5, atol=1e-8)
        optimizer.step()
        scheduler.step()


def run_epochs(net, optimizer, scheduler, updates, each=2, begin=0):
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    for at in range(begin, begin + updates):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
        if (at + 1) % each == 0:
            scheduler.step()


@pytest.mark.daily_cases("momentum-3")
@pytest.mark.parametrize("updates", [3, 4])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_schedule_of_epochs_goes_on(name, updates):
    """In the middle of an epoch only for optimizers that count."""
    with double():
        net = make_net()
        optimizer = OPTIMIZERS[name](net.parameters())
        scheduler = schedulers.MultiStepLR(optimizer, [2, 3], 0.3)
        begin = updates if name == "adamw" else 4
        run_epochs(net, optimizer, scheduler, begin)
        how = {"scheduler": scheduler, "scheduler_every": 2}
        model, moved, _ = convert_training(net, optimizer, "jax", (torch.from_numpy(X),), **how)
        model, moved = train_jax(model, moved, 3)
        run_epochs(net, optimizer, scheduler, 3, begin=begin)
        assert difference(fmapper.state(model), weights(net)) < 1e-12
        back, again, later = convert_training(model, moved, "torch", (X,))
        run_epochs(back, again, later, 4, begin=begin + 3)
        run_epochs(net, optimizer, scheduler, 4, begin=begin + 3)
        assert difference(fmapper.state(back), weights(net)) < 1e-12


def one_update(net, optimizer):
    net(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def test_groups_keep_what_users_write_in_them():
    net = torch.nn.Linear(3, 2)
    groups = [{"params": [p], "name": name, "at": 1} for name, p in net.named_parameters()]
    net, optimizer = one_update(net, optim.Adam(groups))
    model, pair, _ = convert_training(net, optimizer, "jax", ONE)
    model, pair, *_ = with_ones(model, pair, 1)
    _, again, _ = convert_training(model, pair, "torch", (jnp.ones((1, 3)),))
    shapes = {group["name"]: group["params"][0].shape for group in again.param_groups}
    assert shapes == {"weight": (2, 3), "bias": (2,)}
    assert again.defaults.keys() == optimizer.defaults.keys()


def test_the_count_of_updates_of_sgd_is_asked_for():
    optimizer = optim.SGD(LINEAR.parameters(), 0.1)
    scheduler = schedulers.StepLR(optimizer, 30)
    with pytest.raises(ConversionError, match=r"no count of updates.*pass scheduler_every=1"):
        convert_training(LINEAR, optimizer, "jax", ONE, scheduler=scheduler)


def test_a_scheduler_that_is_not_passed_is_said():
    optimizer = optim.SGD(LINEAR.parameters(), 0.1)
    schedulers.StepLR(optimizer, 30)
    with pytest.warns(fmapper.ConversionWarning, match="scheduler, which was not passed"):
        convert_training(LINEAR, optimizer, "jax", ONE)


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.pooler = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
def test_a_parameter_without_a_gradient_does_not_decay(make):
    net = Unused()
    optimizer = make(net.parameters(), lr=0.1, weight_decay=0.1)
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ConversionError, match=r"pooler\.bias: has had no gradient"):
        convert_training(net, optimizer, "jax", ONE)


def test_a_frozen_parameter_in_the_optimizer_stays():
    net = torch.nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    net, optimizer = one_update(net, optim.Adam(net.parameters(), 0.1))
    model, (tx, held), _ = convert_training(net, optimizer, "jax", ONE)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, model.params), held, model.params)
    assert not np.any(updates["bias"])
    assert np.all(updates["weight"])


def frozen_later(net):
    net, optimizer = one_update(net, optim.Adam(net.parameters(), 0.1))
    net.weight.requires_grad_(False)
    return optimizer


def of_another_dtype(net):
    net, optimizer = one_update(net, optim.SGD(net.parameters(), 0.1, momentum=0.9))
    entry = optimizer.state[net.weight]
    entry["momentum_buffer"] = entry["momentum_buffer"].double()
    return optimizer


def with_hook(net):
    net.weight.register_hook(lambda gradient: 2 * gradient)
    return optim.SGD(net.parameters(), 0.1)


def with_step_hook(net):
    optimizer = optim.SGD(net.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *args: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (frozen_later, "weight: is frozen, so that its moments would be lost"),
        (of_another_dtype, "weight: its moments are of torch.float64"),
        (with_hook, "weight: has hooks of its gradient"),
        (with_step_hook, "has hooks of its steps"),
    ],
)
def test_what_would_be_lost_is_refused(make, what):
    net = torch.nn.Linear(3, 2)
    with pytest.raises(ConversionError, match=what):
        convert_training(net, make(net), "jax", ONE)


def test_complex_parameters_are_refused():
    net = torch.nn.Linear(3, 2, dtype=torch.complex64)
    with pytest.raises(ConversionError, match="weight: is complex"):
        convert_training(net, optim.Adam(net.parameters()), "jax", (torch.ones(1, 3) + 0j,))
    function = lambda params, x: abs(x @ params["w"])  # noqa: E731
    params = {"w": jnp.ones((3, 2), jnp.complex64)}
    tx = optax.sgd(0.1)
    with pytest.raises(ConversionError, match="complex parameters"):
        convert_training((function, params), (tx, tx.init(params)), "torch", (jnp.ones((1, 3)),))


class Many(torch.nn.Module):
    def __init__(self):
        super().__init__()
        zeros = torch.zeros((), dtype=torch.bfloat16)
        self.each = torch.nn.ParameterList([zeros.clone() for _ in range(260)])

    def forward(self, x):
        return x * torch.stack([*self.each]).sum()


def test_groups_are_exact_in_a_small_dtype():
    """And a parameter that is made of those of several is refused."""
    from fmapper.training import Group, OptimizerState
    from fmapper.training.convert import _carry

    side = SimpleNamespace(trainable=list)
    old = [torch.zeros(2, dtype=torch.bfloat16) for _ in range(300)] + [torch.zeros(0)]
    groups = tuple(Group((at,), {"lr": float(at)}) for at in range(301))
    held = OptimizerState("sgd", groups, {})
    fill = lambda arrays: [torch.tensor(x, dtype=torch.bfloat16) for x in arrays.values()]  # noqa: E731
    carried = _carry(held, side, old, side, fill)
    assert carried.groups == groups[:300]  # nothing is in the last parameter
    with pytest.raises(ConversionError, match="parameter 0 of the result is made of several"):
        _carry(held, side, old, side, lambda arrays: [torch.cat(fill(arrays))])


@pytest.mark.nightly
def test_many_groups_are_kept_apart_in_a_small_dtype():
    net = Many()
    groups = [{"params": [p], "lr": float(at)} for at, p in enumerate(net.parameters())]
    given = net, optim.SGD(groups, 0.1), "jax", (torch.ones(1, dtype=torch.bfloat16),)
    model, (tx, held), _ = convert_training(*given, check=False)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, model.params), held, model.params)
    rates = [-float(updates[f"each.{at}"]) for at in range(260)]
    assert np.allclose(rates, range(260), rtol=1e-2)


def test_an_optimizer_of_some_parameters_leaves_the_others():
    """Those of `wrt`, whose moments are fewer than the parameters of the model."""
    with double():
        net = OfNnx(nnx.Rngs(0))
        tx = optax.sgd(0.1, momentum=0.9)
        optimizer = nnx.Optimizer(net, tx, wrt=nnx.All(nnx.Param, nnx.PathContains("b")))
        grads = nnx.state(net, nnx.All(nnx.Param, nnx.PathContains("b")))
        optimizer.update(net, grads)
        before = {name: np.asarray(x) for name, x in fmapper.state(net).items()}
        model, moved, _ = convert_training(net, optimizer, "torch", (X,))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        moved.step()
        after = fmapper.state(model)
        change = {
            name: np.abs(after[name].detach().numpy() - before[name]).max() for name in before
        }
        assert {name for name, x in change.items() if x} == {"b.bias", "b.kernel"}
        (group,) = moved.param_groups
        assert len(moved.state) == len(group["params"]) == 2


def test_frozen_and_tied_parameters_keep_their_state():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[1].bias.requires_grad_(False)
    optimizer = optim.Adam([p for p in net.parameters() if p.requires_grad], 0.1)
    net(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    model, (tx, held), _ = convert_training(net, optimizer, "jax", (torch.ones(2, 3),))
    grads = jax.tree.map(jnp.ones_like, model.params)
    updates, _ = tx.update(grads, held, model.params)
    assert np.abs(updates["0.weight"]).min() > 0
    assert not np.any(updates["1.bias"])
