"""The algorithms of `torch.optim` as optax transformations.

Each continues a run of torch to rounding. The formulas are those of its documentation,
https://docs.pytorch.org/docs/stable/optim.html. Those of optax differ in most, and its Adam is off
by 1e-5 in float32, where it corrects the bias of the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fmapper.training import ALGORITHMS

_DECOUPLED = ("adafactor", "muon")  # whose weights decay by themselves, not by the gradient
_MEAN_OVER = {"row_var": -1, "col_var": -2}  # of the square that Adafactor divides in two


class Moments(NamedTuple):
    """The state of these transformations.

    Attributes:
        count: How many updates there were.
        position: How many updates the schedule of the rate has seen.
        arrays: Slot -> a tree of arrays like the parameters.
        numbers: State that is one number.
    """

    count: Any
    position: Any
    arrays: dict[str, Any]
    numbers: dict[str, Any]


def transformation(
    algorithm: str, settings: Mapping[str, Any], rates: Mapping[str, Callable[[Any], Any]]
) -> Any:
    """Returns an algorithm with its rate and decay; its updates are added to the parameters.

    Of `average` the updates are the parameters, and it returns their average.

    Args:
        algorithm: A key of `fmapper.training.ALGORITHMS`.
        settings: Those of a `Group`.
        rates: Those that change: functions of how many updates there were.
    """
    slots = ALGORITHMS[algorithm].slots
    names = [name for name, setting in slots.items() if setting is None or settings[setting]]

    def init_fn(params: Any) -> Moments:
        zero = jnp.zeros((), jnp.int32)
        numbers = {"mu_product": jnp.ones(())} if algorithm == "nadam" else {}
        make = {name: partial(_slot, name, settings=settings) for name in names}
        arrays = {name: jax.tree.map(make[name], params) for name in names}
        return Moments(zero, zero, arrays, numbers)

    def update_fn(updates: Any, state: Moments, params: Any = None) -> tuple[Any, Moments]:
        params = updates if algorithm == "average" else params
        if params is None:
            raise ValueError("pass the parameters: tx.update(updates, state, params)")
        at = Step(state.count + 1, _settings_at(settings, rates, state.position), state.numbers)
        leaves: list[Any]
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        olds = treedef.flatten_up_to(params)
        held = {name: treedef.flatten_up_to(tree) for name, tree in state.arrays.items()}
        made, new = [], {name: list[Any]() for name in held}
        for place, (gradient, old) in enumerate(zip(leaves, olds, strict=True)):
            slots = {name: arrays[place] for name, arrays in held.items()}
            update, changed = _update(algorithm, gradient, old, slots, at)
            made.append(update.astype(gradient.dtype))
            for name, slot in slots.items():
                new[name].append(changed[name].astype(slot.dtype))
        arrays = {name: treedef.unflatten(each) for name, each in new.items()}
        later = Moments(at.count, state.position + 1, arrays, at.numbers())
        return treedef.unflatten(made), later

    return optax.GradientTransformation(init_fn, update_fn)


def _slot(name: str, leaf: Any, settings: Mapping[str, Any]) -> Any:
    """Makes a slot. Adafactor has two vectors for a matrix, or else `variance`."""
    if name not in (*_MEAN_OVER, "variance"):
        return jnp.zeros_like(leaf)
    if (leaf.ndim > 1) == (name == "variance"):
        return jnp.zeros((0,), leaf.dtype)
    shape = [leaf.shape[axis] for axis in settings.get("axes") or range(leaf.ndim)]
    if name in _MEAN_OVER:
        shape[_MEAN_OVER[name]] = 1
    return jnp.zeros(shape, leaf.dtype)


def _settings_at(
    settings: Mapping[str, Any], rates: Mapping[str, Callable[[Any], Any]], position: Any
) -> SimpleNamespace:
    """Returns settings with the values that those which change have at a position."""
    values = {name: rate(position) for name, rate in rates.items()}
    if "momentum" in values and "betas" in settings:
        values["betas"] = (values.pop("momentum"), settings["betas"][1])
    return SimpleNamespace(**{"axes": None, **settings, **values})


def _update(
    algorithm: str, gradient: Any, old: Any, slots: Mapping[str, Any], at: Step
) -> tuple[Any, dict[str, Any]]:
    """Returns what is added to a parameter, and its new moments."""
    s = at.settings
    decay = getattr(s, "weight_decay", 0.0)
    is_decoupled = getattr(s, "decoupled", algorithm in _DECOUPLED)
    if getattr(s, "maximize", False):
        gradient = -gradient
    if decay and not is_decoupled:
        gradient = gradient + decay * old
    update, new = _RULES[algorithm](gradient, old, slots, at, s)
    if decay and is_decoupled:
        update = update - s.lr * decay * old
    return update, new


class Step:
    """The settings of an update, and factors that depend on the count of updates alone.

    Without 64-bit floats `1 - beta ** count` loses four digits: it is computed by `expm1`.

    Args:
        count: The count, with this update.
        settings: The settings of the algorithm.
        numbers: Its state that is one number.
    """

    def __init__(self, count: Any, settings: Any, numbers: Mapping[str, Any]) -> None:
        self.count, self.settings, self._numbers = count, settings, numbers
        self.number = count.astype(jnp.result_type(float))

    def correction(self, beta: Any) -> Any:
        """Returns `1 - beta ** count`."""
        if isinstance(beta, float) and not beta:
            return jnp.ones_like(self.number)
        log = math.log(beta) if isinstance(beta, float) else jnp.log(beta)
        return -jnp.expm1(self.number * log)

    def numbers(self) -> dict[str, Any]:
        """Returns the new state that is one number."""
        return {
            name: (value * self._mu(0)).astype(value.dtype) for name, value in self._numbers.items()
        }

    def _mu(self, ahead: int) -> Any:
        """Returns the momentum of NAdam for this update, or a later one."""
        power = (self.number + ahead) * self.settings.momentum_decay
        return self.settings.betas[0] * (1.0 - 0.5 * jnp.exp(power * math.log(0.96)))

    def nesterov(self) -> tuple[Any, Any]:
        """Returns the factors of gradient and mean for NAdam."""
        product = self.numbers()["mu_product"]
        later = self._mu(1)
        return (1.0 - self._mu(0)) / (1.0 - product), later / (1.0 - product * later)

    def rectification(self, beta: float) -> Any:
        """Returns the factor of RAdam, 0 while the variance is not known.

        Its `rho` is a small difference of large numbers: `beta = exp(-x / count)` gives it as
        `expm1(x) - x`, and that is summed up where `x` is small.
        """
        rate, small = -math.log(beta), 1 - beta
        x = self.number * rate
        series = sum(x**n / math.factorial(n) for n in range(2, 12))
        beyond = jnp.where(x < 1.0, series, jnp.expm1(x) - x) + self.number * (rate - small)
        rho = 2 * jnp.exp(-x) * beyond / (small * self.correction(beta)) - 1
        longest = 2 / small - 1
        wide = jnp.maximum(rho, 5.0)  # or the root that is not taken would be NaN
        ratio = (wide - 4) * (wide - 2) * longest / ((longest - 4) * (longest - 2) * wide)
        return jnp.where(rho > 5.0, jnp.sqrt(ratio), 0.0)


_Slots = Mapping[str, Any]
_Result = tuple[Any, dict[str, Any]]


def _means(gradient: Any, slots: _Slots, betas: tuple[float, float]) -> dict[str, Any]:
    first, second = betas
    return {
        "exp_avg": first * slots["exp_avg"] + (1 - first) * gradient,
        "exp_avg_sq": second * slots["exp_avg_sq"] + (1 - second) * gradient**2,
    }


def _sgd(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    if not slots:
        return -s.lr * gradient, {}
    later = s.momentum * slots["momentum_buffer"] + (1 - s.dampening) * gradient
    mean = jnp.where(at.count == 1, gradient, later) if s.dampening else later
    update = gradient + s.momentum * mean if s.nesterov else mean
    return -s.lr * update, {"momentum_buffer": mean}


def _adam(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    new = _means(gradient, slots, s.betas)
    squares = new["exp_avg_sq"]
    if s.amsgrad:
        squares = new["max_exp_avg_sq"] = jnp.maximum(slots["max_exp_avg_sq"], squares)
    scale = jnp.sqrt(squares) / jnp.sqrt(at.correction(s.betas[1])) + s.eps
    return -s.lr / at.correction(s.betas[0]) * new["exp_avg"] / scale, new


def _adamax(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    first, second = s.betas
    mean = first * slots["exp_avg"] + (1 - first) * gradient
    largest = jnp.maximum(second * slots["exp_inf"], jnp.abs(gradient) + s.eps)
    new = {"exp_avg": mean, "exp_inf": largest}
    return -s.lr / at.correction(first) * mean / largest, new


def _nadam(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    new = _means(gradient, slots, s.betas)
    of_gradient, of_mean = at.nesterov()
    scale = jnp.sqrt(new["exp_avg_sq"] / at.correction(s.betas[1])) + s.eps
    return -s.lr * (of_gradient * gradient + of_mean * new["exp_avg"]) / scale, new


def _radam(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    new = _means(gradient, slots, s.betas)
    rectified = at.rectification(s.betas[1])
    adaptive = jnp.sqrt(at.correction(s.betas[1])) / (jnp.sqrt(new["exp_avg_sq"]) + s.eps)
    mean = new["exp_avg"] / at.correction(s.betas[0])
    return -s.lr * mean * jnp.where(rectified > 0, rectified * adaptive, 1.0), new


def _rmsprop(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    squares = s.alpha * slots["square_avg"] + (1 - s.alpha) * gradient**2
    new = {"square_avg": squares}
    if s.centered:
        mean = new["grad_avg"] = s.alpha * slots["grad_avg"] + (1 - s.alpha) * gradient
        squares = squares - mean**2
    update = gradient / (jnp.sqrt(squares) + s.eps)
    if "momentum_buffer" in slots:
        update = new["momentum_buffer"] = s.momentum * slots["momentum_buffer"] + update
    return -s.lr * update, new


def _adagrad(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    total = slots["sum"] + gradient**2
    rate = s.lr / (1 + (at.number - 1) * s.lr_decay)
    return -rate * gradient / (jnp.sqrt(total) + s.eps), {"sum": total}


def _adadelta(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    squares = s.rho * slots["square_avg"] + (1 - s.rho) * gradient**2
    delta = jnp.sqrt(slots["acc_delta"] + s.eps) / jnp.sqrt(squares + s.eps) * gradient
    later = s.rho * slots["acc_delta"] + (1 - s.rho) * delta**2
    return -s.lr * delta, {"square_avg": squares, "acc_delta": later}


def _adafactor(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    small, floor = s.eps
    finfo: Any = jnp.finfo
    small = float(finfo(old.dtype).eps) if small is None else small
    share = at.number**s.beta2_decay
    scale = jnp.maximum(floor, jnp.sqrt(jnp.mean(old**2)))
    alpha = scale * jnp.minimum(s.lr, jax.lax.rsqrt(at.number))
    axes = s.axes or range(gradient.ndim)
    gradient = gradient.transpose(axes)
    squared = gradient**2
    new = dict(slots)
    if gradient.ndim > 1:
        for name, axis in _MEAN_OVER.items():
            mean = jnp.mean(squared, axis, keepdims=True)
            new[name] = slots[name] + share * (mean - slots[name])
        estimate = new["row_var"] * new["col_var"]
        estimate /= jnp.maximum(jnp.mean(new["row_var"], -2, keepdims=True), small)
    else:
        new["variance"] = slots["variance"] + share * (squared - slots["variance"])
        estimate = new["variance"]
    update = gradient * jax.lax.rsqrt(jnp.maximum(estimate, small**2))
    update = update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)) / s.d)
    return -alpha * update.transpose(np.argsort(axes)), new


def _muon(gradient: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    mean = s.momentum * slots["momentum_buffer"] + (1 - s.momentum) * gradient
    update = s.momentum * mean + (1 - s.momentum) * gradient if s.nesterov else mean
    axes = s.axes or (0, 1)
    update = update.transpose(axes)
    height, width = update.shape
    ratio = 1.0
    if s.adjust_lr_fn in (None, "original"):
        ratio = math.sqrt(max(1, height / width))
    elif s.adjust_lr_fn == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(height, width))
    how = s.ns_coefficients, s.ns_steps, s.eps
    flat = _newton_schulz(update.T if height > width else update, *how)
    flat = (flat.T if height > width else flat).astype(gradient.dtype)
    return -(s.lr * ratio) * flat.transpose(np.argsort(axes)), {"momentum_buffer": mean}


def _newton_schulz(x: Any, coefficients: tuple[float, float, float], steps: int, eps: float) -> Any:
    """Orthogonalizes a matrix in bfloat16, rounded where torch rounds."""

    def product(y: Any, z: Any) -> Any:
        return jnp.matmul(y, z, precision="highest")

    def to_bfloat16(y: Any) -> Any:
        # Under jit XLA would leave out a cast to bfloat16 and back.
        return jax.lax.reduce_precision(y.astype(jnp.float32), 8, 7)

    a, b, c = coefficients
    x = to_bfloat16(x)
    x = to_bfloat16(x / jnp.maximum(to_bfloat16(jnp.linalg.norm(x)), to_bfloat16(jnp.asarray(eps))))
    for _ in range(steps):
        gram = to_bfloat16(product(x, x.T))
        x = to_bfloat16(a * x + product(to_bfloat16(b * gram + c * product(gram, gram)), x))
    return x


def _average(weight: Any, old: Any, slots: _Slots, at: Step, s: Any) -> _Result:
    """Averages weights, the first of which is a copy."""
    share = 1.0 / at.number if s.decay is None else 1.0 - s.decay
    if s.kind == "unbiased":  # as `optax.ema` with `debias=True`
        share = share / at.correction(s.decay)
    share = jnp.where(at.count == 1, 1.0, share)
    average = slots["average"] + share * (weight - slots["average"])
    return average, {"average": average}


_RULES = {
    "sgd": _sgd, "adam": _adam, "adamax": _adamax, "nadam": _nadam, "radam": _radam,
    "rmsprop": _rmsprop, "adagrad": _adagrad, "adadelta": _adadelta, "adafactor": _adafactor,
    "muon": _muon, "average": _average,
}  # fmt: skip
