"""The algorithms of `torch.optim` as optax transformations.

Each continues a run of torch to rounding. The formulas are those of its documentation,
https://docs.pytorch.org/docs/stable/optim.html. Those of optax differ in most, and its Adam is off
by 1e-5 in float32, where it corrects the bias of the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fmapper import ConversionError
from fmapper.training import ALGORITHMS, Group, OptimizerState, Schedule

_DECOUPLED = ("adafactor", "muon")  # whose weights decay by themselves, not by the gradient
_MEAN_OVER = {"row_var": -1, "col_var": -2}  # of the square that Adafactor divides in two


@dataclass(eq=False)
class Rate:
    """A setting by the count of updates, as optax takes it: a schedule that scales a base value."""

    base: float
    schedule: Schedule

    def __call__(self, count: Any) -> Any:
        """Returns the value for an update."""
        count = jnp.asarray(count) // self.schedule.every
        step = count.astype(jnp.result_type(float))  # a quotient of int32 is float32
        # optax has float32 for an int32, in which products with a decay would round.
        return jnp.asarray(self.schedule.rate(self.base, step, _NAMESPACE), step.dtype)


@dataclass(frozen=True)  # with a dict, which LambdaLR saves
class OfCount:
    """A schedule of optax, called as optax calls it: with an int32."""

    schedule: Callable[[Any], Any]

    def __call__(self, step: Any) -> Any:
        """Returns the rate at a step."""
        rate = self.schedule(jnp.asarray(step, jnp.int32))
        return rate if isinstance(rate, jax.core.Tracer) else float(rate)


def _call(function: Callable[[Any], Any], step: Any) -> Any:
    """Calls a function of Python on the host, where it gets a number and no tracer."""
    if isinstance(function, OfCount):
        return function(step)
    if not isinstance(step, jax.core.Tracer):
        return jnp.asarray(function(int(step)), step.dtype)
    value = lambda at: step.dtype.type(function(int(at)))  # noqa: E731
    return jax.pure_callback(value, jax.eval_shape(lambda: step), step, vmap_method="sequential")


_NAMESPACE = SimpleNamespace(**vars(jnp), call=_call)


def build(params: Any, state: OptimizerState) -> tuple[Any, Any]:
    """Returns a transformation and its state for a tree of parameters.

    Where there are several groups, or parameters that no group has, it is an `optax.partition`.

    Raises:
        ConversionError: An array of a slot has another shape than the transformation expects.
    """
    labels = ["frozen"] * len(jax.tree.leaves(params))
    parts, begun = {}, {}
    for number, group in enumerate(state.groups):
        for at in group.members:
            labels[at] = str(number)
        bases = dict(group.settings)
        if "betas" in bases:
            bases["momentum"] = bases["betas"][0]
        rates = {name: Rate(bases[name], schedule) for name, schedule in group.schedules.items()}
        tx = parts[str(number)] = transformation(state.algorithm, group.settings, rates)
        begun[str(number)] = tx._replace(init=partial(_begin, tx, state, group))
    if "frozen" in labels:
        parts["frozen"] = begun["frozen"] = optax.set_to_zero()
    elif len({*labels}) == 1:
        return parts[labels[0]], begun[labels[0]].init(params)

    # A function, as Flax hands in parameters with and without their boxes.
    label = lambda tree: jax.tree.unflatten(jax.tree.structure(tree), labels)  # noqa: E731
    return optax.partition(parts, label), optax.partition(begun, label).init(params)


def _begin(tx: Any, state: OptimizerState, group: Group, params: Any) -> Moments:
    """Returns the state of a transformation of a group, with what was gathered before."""
    made: Moments = tx.init(params)
    arrays = {}
    for slot, tree in made.arrays.items():
        leaves = jax.tree.leaves(tree)
        for place, at in enumerate(sorted(group.members)):
            old, new = state.slots.get(slot, {}).get(at, leaves[place]), leaves[place]
            if jnp.shape(old) != new.shape:
                shapes = f"{jnp.shape(old)}, and {new.shape} here"
                raise ConversionError(f"{slot} of parameter {at} has the shape {shapes}")
            leaves[place] = jnp.asarray(old, new.dtype)
        arrays[slot] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    seen = next((x.position for x in group.schedules.values()), group.step)
    step, position = (jnp.asarray(count, jnp.int32) for count in (group.step, seen))
    numbers = {name: jnp.asarray(x, jnp.result_type(float)) for name, x in group.numbers.items()}
    return Moments(step, position, arrays, made.numbers | numbers)


class Moments(NamedTuple):
    """The state of these transformations."""

    count: Any  # of updates
    position: Any  # how many of them the schedule of the rate has seen
    arrays: dict[str, Any]  # slot -> a tree of arrays like the parameters
    numbers: dict[str, Any]  # state that is one number


def transformation(
    algorithm: str, settings: Mapping[str, Any], rates: Mapping[str, Callable[[Any], Any]]
) -> Any:
    """Returns an algorithm with its rate and decay, and with functions for settings that change.

    Its updates are added to the parameters. `average` gets parameters, and returns their average.
    """
    slots = ALGORITHMS[algorithm].slots
    names = [name for name, setting in slots.items() if setting is None or settings[setting]]

    def init_fn(params: Any) -> Moments:
        zero = jnp.zeros((), jnp.int32)
        numbers = {"mu_product": jnp.ones(())} if algorithm == "nadam" else {}
        arrays = {name: jax.tree.map(partial(_slot, name, settings), params) for name in names}
        return Moments(zero, zero, arrays, numbers)

    def update_fn(updates: Any, state: Moments, params: Any = None) -> tuple[Any, Moments]:
        params = updates if algorithm == "average" else params
        if params is None:
            raise ValueError("pass the parameters: tx.update(updates, state, params)")
        values = {"axes": None, "maximize": False, "weight_decay": 0.0, **settings}
        values |= {name: rate(state.position) for name, rate in rates.items()}
        if "momentum" in rates and "betas" in settings:
            values["betas"] = values["momentum"], settings["betas"][1]
        s = SimpleNamespace(**values, count=state.count + 1)
        s.number = s.count.astype(jnp.result_type(float))
        s.numbers = {name: (x * _mu(s)).astype(x.dtype) for name, x in state.numbers.items()}
        is_decoupled = values.get("decoupled", algorithm in _DECOUPLED)

        def update_leaf(given: Any, old: Any, *arrays: Any) -> tuple[Any, ...]:
            gradient, slots = -given if s.maximize else given, dict(zip(names, arrays, strict=True))
            if s.weight_decay and not is_decoupled:
                gradient = gradient + s.weight_decay * old
            update, new = _RULES[algorithm](gradient, old, slots, s)
            if s.weight_decay and is_decoupled:
                update = update - s.lr * s.weight_decay * old
            return update.astype(given.dtype), *(new[n].astype(x.dtype) for n, x in slots.items())

        made = jax.tree.map(update_leaf, updates, params, *(state.arrays[name] for name in names))
        treedef: Any = jax.tree.structure(updates)
        rows, width = treedef.flatten_up_to(made), 1 + len(names)
        update, *arrays = (treedef.unflatten([row[i] for row in rows]) for i in range(width))
        held = dict(zip(names, arrays, strict=True))
        return update, Moments(s.count, state.position + 1, held, s.numbers)

    return optax.GradientTransformation(init_fn, update_fn)


def _slot(name: str, settings: Mapping[str, Any], leaf: Any) -> Any:
    """Makes a slot. Adafactor has two vectors for a matrix, or else `variance`."""
    shape = list(leaf.shape)
    if name in (*_MEAN_OVER, "variance") and (leaf.ndim > 1) == (name == "variance"):
        shape = [0]
    elif name in _MEAN_OVER:
        shape = [leaf.shape[axis] for axis in settings.get("axes") or range(leaf.ndim)]
        shape[_MEAN_OVER[name]] = 1
    return jnp.zeros(shape, leaf.dtype)


def _correction(beta: Any, s: Any) -> Any:
    """Returns `1 - beta ** count`, which loses four digits without 64-bit floats, by `expm1`."""
    is_number = isinstance(beta, float) and beta
    return -jnp.expm1(s.number * (math.log(beta) if is_number else jnp.log(beta)))


_Slots = Mapping[str, Any]
_Result = tuple[Any, dict[str, Any]]


def _mix(share: Any, before: Any, new: Any) -> Any:
    return share * before + (1 - share) * new


def _means(gradient: Any, slots: _Slots, s: Any) -> tuple[Any, Any, dict[str, Any]]:
    mean = _mix(s.betas[0], slots["exp_avg"], gradient)
    squares = _mix(s.betas[1], slots["exp_avg_sq"], gradient**2)
    return mean, squares, {"exp_avg": mean, "exp_avg_sq": squares}


def _sgd(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    if not slots:
        return -s.lr * gradient, {}
    mean = s.momentum * slots["momentum_buffer"] + (1 - s.dampening) * gradient
    mean = jnp.where(s.count == 1, gradient, mean) if s.dampening else mean
    update = gradient + s.momentum * mean if s.nesterov else mean
    return -s.lr * update, {"momentum_buffer": mean}


def _adam(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    mean, squares, new = _means(gradient, slots, s)
    if s.amsgrad:
        squares = new["max_exp_avg_sq"] = jnp.maximum(slots["max_exp_avg_sq"], squares)
    scale = jnp.sqrt(squares) / jnp.sqrt(_correction(s.betas[1], s)) + s.eps
    return -s.lr / _correction(s.betas[0], s) * mean / scale, new


def _adamax(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    first, second = s.betas
    mean = _mix(first, slots["exp_avg"], gradient)
    largest = jnp.maximum(second * slots["exp_inf"], jnp.abs(gradient) + s.eps)
    update = -s.lr / _correction(first, s) * mean / largest
    return update, {"exp_avg": mean, "exp_inf": largest}


def _mu(s: Any, ahead: int = 0) -> Any:
    """Returns the momentum of NAdam for this update, or a later one."""
    power = (s.number + ahead) * s.momentum_decay
    return s.betas[0] * (1.0 - 0.5 * jnp.exp(power * math.log(0.96)))


def _nadam(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    mean, squares, new = _means(gradient, slots, s)
    product, later = s.numbers["mu_product"], _mu(s, 1)
    update = (1.0 - _mu(s)) / (1.0 - product) * gradient + later / (1.0 - product * later) * mean
    return -s.lr * update / (jnp.sqrt(squares / _correction(s.betas[1], s)) + s.eps), new


def _radam(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    """Computes RAdam, whose rectification is 0 while the variance is not known.

    Its `rho` is a small difference of large numbers: `beta = exp(-x / count)` gives it as
    `expm1(x) - x`, and that is summed up where `x` is small.
    """
    mean, squares, new = _means(gradient, slots, s)
    beta, correction = s.betas[1], _correction(s.betas[1], s)
    rate, small = -math.log(beta), 1 - beta
    x = s.number * rate
    series = sum(x**n / math.factorial(n) for n in range(2, 12))
    beyond = jnp.where(x < 1.0, series, jnp.expm1(x) - x) + s.number * (rate - small)
    rho = 2 * jnp.exp(-x) * beyond / (small * correction) - 1
    longest = 2 / small - 1
    wide = jnp.maximum(rho, 5.0)  # or the root that is not taken would be NaN
    ratio = (wide - 4) * (wide - 2) * longest / ((longest - 4) * (longest - 2) * wide)
    adaptive = jnp.sqrt(ratio) * jnp.sqrt(correction) / (jnp.sqrt(squares) + s.eps)
    mean = mean / _correction(s.betas[0], s)
    return -s.lr * mean * jnp.where(rho > 5.0, adaptive, 1.0), new


def _rmsprop(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    squares = _mix(s.alpha, slots["square_avg"], gradient**2)
    new = {"square_avg": squares}
    if s.centered:
        mean = new["grad_avg"] = _mix(s.alpha, slots["grad_avg"], gradient)
        squares = squares - mean**2
    update = gradient / (jnp.sqrt(squares) + s.eps)
    if "momentum_buffer" in slots:
        update = new["momentum_buffer"] = s.momentum * slots["momentum_buffer"] + update
    return -s.lr * update, new


def _adagrad(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    total = slots["sum"] + gradient**2
    rate = s.lr / (1 + (s.number - 1) * s.lr_decay)
    return -rate * gradient / (jnp.sqrt(total) + s.eps), {"sum": total}


def _adadelta(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    squares = _mix(s.rho, slots["square_avg"], gradient**2)
    delta = jnp.sqrt(slots["acc_delta"] + s.eps) / jnp.sqrt(squares + s.eps) * gradient
    later = _mix(s.rho, slots["acc_delta"], delta**2)
    return -s.lr * delta, {"square_avg": squares, "acc_delta": later}


def _adafactor(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    small, floor = s.eps
    finfo: Any = jnp.finfo
    small = float(finfo(old.dtype).eps) if small is None else small
    share = s.number**s.beta2_decay
    scale = jnp.maximum(floor, jnp.sqrt(jnp.mean(old**2)))
    alpha = scale * jnp.minimum(s.lr, jax.lax.rsqrt(s.number))
    axes = s.axes or range(gradient.ndim)
    gradient = gradient.transpose(axes)
    new, means = dict(slots), {"variance": gradient**2}
    if gradient.ndim > 1:
        means = {name: jnp.mean(gradient**2, at, keepdims=True) for name, at in _MEAN_OVER.items()}
    for name, mean in means.items():
        estimate = new[name] = slots[name] + share * (mean - slots[name])
    if gradient.ndim > 1:
        mean = jnp.mean(new["row_var"], -2, keepdims=True)
        estimate = new["row_var"] * new["col_var"] / jnp.maximum(mean, small)
    update = gradient * jax.lax.rsqrt(jnp.maximum(estimate, small**2))
    update = update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)) / s.d)
    return -alpha * update.transpose(np.argsort(axes)), new


def _muon(gradient: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    mean = _mix(s.momentum, slots["momentum_buffer"], gradient)
    axes = s.axes or (0, 1)
    update = (_mix(s.momentum, mean, gradient) if s.nesterov else mean).transpose(axes)
    height, width = update.shape
    is_as_adamw = s.adjust_lr_fn == "match_rms_adamw"
    ratio = (
        0.2 * math.sqrt(max(height, width)) if is_as_adamw else math.sqrt(max(1, height / width))
    )
    how = s.ns_coefficients, s.ns_steps, s.eps
    flat = _newton_schulz(update.T if height > width else update, *how)
    flat = (flat.T if height > width else flat).astype(gradient.dtype)
    return -(s.lr * ratio) * flat.transpose(np.argsort(axes)), {"momentum_buffer": mean}


def _newton_schulz(x: Any, coefficients: tuple[float, float, float], steps: int, eps: float) -> Any:
    """Orthogonalizes a matrix in bfloat16, rounded where torch rounds."""

    def to_bfloat16(y: Any) -> Any:
        # Under jit XLA would leave out a cast to bfloat16 and back.
        return jax.lax.reduce_precision(jnp.asarray(y, jnp.float32), 8, 7)

    product = partial(jnp.matmul, precision="highest")
    a, b, c = coefficients
    x = to_bfloat16(x)
    x = to_bfloat16(x / jnp.maximum(to_bfloat16(jnp.linalg.norm(x)), to_bfloat16(eps)))
    for _ in range(steps):
        gram = to_bfloat16(product(x, x.T))
        x = to_bfloat16(a * x + product(to_bfloat16(b * gram + c * product(gram, gram)), x))
    return x


def _average(weight: Any, old: Any, slots: _Slots, s: Any) -> _Result:
    """Averages weights, the first of which is a copy."""
    share = 1.0 / s.number if s.decay is None else 1.0 - s.decay
    if s.kind == "unbiased":  # as `optax.ema` with `debias=True`
        share = share / _correction(s.decay, s)
    share = jnp.where(s.count == 1, 1.0, share)
    average = slots["average"] + share * (weight - slots["average"])
    return average, {"average": average}


_RULES = {
    "sgd": _sgd, "adam": _adam, "adamax": _adamax, "nadam": _nadam, "radam": _radam,
    "rmsprop": _rmsprop, "adagrad": _adagrad, "adadelta": _adadelta, "adafactor": _adafactor,
    "muon": _muon, "average": _average,
}  # fmt: skip
