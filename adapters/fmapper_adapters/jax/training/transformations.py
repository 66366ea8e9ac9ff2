"""The algorithms of `torch.optim` as optax transformations.

Each continues a run of torch to rounding. The formulas are those of its documentation,
https://docs.pytorch.org/docs/stable/optim.html. Those of optax differ in most, and its Adam is off
by 1e-5 in float32, where it corrects the bias of the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

DECOUPLED = ("adafactor", "muon")  # whose weights decay by themselves, not by the gradient


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


Rule = Callable[..., tuple[Any, dict[str, Any]]]


def transformation(
    algorithm: str,
    settings: Mapping[str, Any],
    rates: Mapping[str, Callable[[Any], Any]],
    axes: Sequence[tuple[int, ...]] | None = None,
) -> Any:
    """Returns an algorithm with its rate and decay; its updates are added to the parameters.

    Args:
        algorithm: A key of `RULES`.
        settings: Those of `fmapper.training.SETTINGS`, and `lr`.
        rates: Those that change: functions of how many updates there were.
        axes: Of each parameter, its axes in the order in which the algorithm takes them; for those
            that distinguish rows and columns. None where they have it.
    """

    def init_fn(params: Any) -> Moments:
        leaves: list[Any]
        treedef: Any
        leaves, treedef = jax.tree.flatten(params)
        made = [
            RULES[algorithm][1](leaf, settings if axes is None else {**settings, "axes": axes[at]})
            for at, leaf in enumerate(leaves)
        ]
        names = [*made[0]] if made else []
        arrays = {name: treedef.unflatten([slots[name] for slots in made]) for name in names}
        numbers = {"mu_product": jnp.ones(())} if algorithm == "nadam" else {}
        zero = jnp.zeros((), jnp.int32)
        return Moments(zero, zero, arrays, numbers)

    def update_fn(updates: Any, state: Moments, params: Any = None) -> tuple[Any, Moments]:
        if params is None:
            raise ValueError("pass the parameters: tx.update(updates, state, params)")
        now = _settings_at(settings, rates, state.position)
        at = Step(state.count + 1, now, state.numbers)
        leaves: list[Any]
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        olds = treedef.flatten_up_to(params)
        held = {name: treedef.flatten_up_to(tree) for name, tree in state.arrays.items()}
        new_updates, new_slots = [], []
        for place, (gradient, old) in enumerate(zip(leaves, olds, strict=True)):
            slots = {name: arrays[place] for name, arrays in held.items()}
            chosen = now if axes is None else {**now, "axes": axes[place]}
            update, slots = _update(algorithm, gradient, old, slots, at, chosen)
            new_updates.append(update.astype(gradient.dtype))
            new_slots.append(
                {name: slots[name].astype(arrays[place].dtype) for name, arrays in held.items()}
            )
        arrays = {
            name: treedef.unflatten([slots[name] for slots in new_slots]) for name in state.arrays
        }
        new = Moments(at.count, state.position + 1, arrays, at.numbers())
        return treedef.unflatten(new_updates), new

    return optax.GradientTransformation(init_fn, update_fn)


def _settings_at(
    settings: Mapping[str, Any], rates: Mapping[str, Callable[[Any], Any]], position: Any
) -> dict[str, Any]:
    """Returns settings with the values that those which change have at a position."""
    values = {name: rate(position) for name, rate in rates.items()}
    if "momentum" in values and "betas" in settings:
        values["betas"] = (values.pop("momentum"), settings["betas"][1])
    return {**settings, **values}


def _update(
    algorithm: str,
    gradient: Any,
    old: Any,
    slots: Mapping[str, Any],
    at: Step,
    settings: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Returns what is added to a parameter, and its new moments."""
    decay = settings["weight_decay"]
    is_decoupled = settings.get("decoupled", algorithm in DECOUPLED)
    if settings["maximize"]:
        gradient = -gradient
    if decay and not is_decoupled:
        gradient = gradient + decay * old
    update, new = RULES[algorithm][0](gradient, old, slots, at, **settings)
    if decay and is_decoupled:
        update = update - settings["lr"] * decay * old
    return update, new


class Step:
    """Factors that depend on the count of updates alone.

    Without 64-bit floats `1 - beta ** count` loses four digits: it is computed by `expm1`.

    Args:
        count: The count, with this update.
        settings: The settings of the algorithm.
        numbers: Its state that is one number.
    """

    def __init__(self, count: Any, settings: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        self.count = count
        self.number = count.astype(jnp.result_type(float))
        self._settings, self._numbers = settings, numbers

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
        power = (self.number + ahead) * self._settings["momentum_decay"]
        return self._settings["betas"][0] * (1.0 - 0.5 * jnp.exp(power * math.log(0.96)))

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


def _moments(gradient: Any, slots: Mapping[str, Any], betas: tuple[float, float]) -> dict[str, Any]:
    first, second = betas
    return {
        "exp_avg": first * slots["exp_avg"] + (1 - first) * gradient,
        "exp_avg_sq": second * slots["exp_avg_sq"] + (1 - second) * gradient**2,
    }


def _sgd(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, momentum: float, dampening: float,
    nesterov: bool, **_: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    if "momentum_buffer" not in slots:
        return -lr * gradient, {}
    later = momentum * slots["momentum_buffer"] + (1 - dampening) * gradient
    mean = jnp.where(at.count == 1, gradient, later) if dampening else later
    update = gradient + momentum * mean if nesterov else mean
    return -lr * update, {"momentum_buffer": mean}


def _adam(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, betas: Any, eps: float,
    amsgrad: bool, **_: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    new = _moments(gradient, slots, betas)
    squares = new["exp_avg_sq"]
    if amsgrad:
        squares = new["max_exp_avg_sq"] = jnp.maximum(slots["max_exp_avg_sq"], squares)
    scale = jnp.sqrt(squares) / jnp.sqrt(at.correction(betas[1])) + eps
    return -lr / at.correction(betas[0]) * new["exp_avg"] / scale, new


def _adamax(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, betas: Any, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    mean = betas[0] * slots["exp_avg"] + (1 - betas[0]) * gradient
    largest = jnp.maximum(betas[1] * slots["exp_inf"], jnp.abs(gradient) + eps)
    new = {"exp_avg": mean, "exp_inf": largest}
    return -lr / at.correction(betas[0]) * mean / largest, new


def _nadam(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, betas: Any, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    new = _moments(gradient, slots, betas)
    of_gradient, of_mean = at.nesterov()
    scale = jnp.sqrt(new["exp_avg_sq"] / at.correction(betas[1])) + eps
    return -lr * (of_gradient * gradient + of_mean * new["exp_avg"]) / scale, new


def _radam(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, betas: Any, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    new = _moments(gradient, slots, betas)
    rectified = at.rectification(betas[1])
    adaptive = jnp.sqrt(at.correction(betas[1])) / (jnp.sqrt(new["exp_avg_sq"]) + eps)
    mean = new["exp_avg"] / at.correction(betas[0])
    return -lr * mean * jnp.where(rectified > 0, rectified * adaptive, 1.0), new


def _rmsprop(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, alpha: float, eps: float,
    momentum: float, centered: bool, **_: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    squares = alpha * slots["square_avg"] + (1 - alpha) * gradient**2
    new = {"square_avg": squares}
    if centered:
        mean = new["grad_avg"] = alpha * slots["grad_avg"] + (1 - alpha) * gradient
        squares = squares - mean**2
    update = gradient / (jnp.sqrt(squares) + eps)
    if "momentum_buffer" in slots:
        update = new["momentum_buffer"] = momentum * slots["momentum_buffer"] + update
    return -lr * update, new


def _adagrad(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, lr_decay: float, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    total = slots["sum"] + gradient**2
    rate = lr / (1 + (at.number - 1) * lr_decay)
    return -rate * gradient / (jnp.sqrt(total) + eps), {"sum": total}


def _adadelta(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, rho: float, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    squares = rho * slots["square_avg"] + (1 - rho) * gradient**2
    delta = jnp.sqrt(slots["acc_delta"] + eps) / jnp.sqrt(squares + eps) * gradient
    later = rho * slots["acc_delta"] + (1 - rho) * delta**2
    return -lr * delta, {"square_avg": squares, "acc_delta": later}


def _adafactor(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, beta2_decay: float, eps: Any,
    d: float, axes: Sequence[int] | None = None, **_: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    small, floor = eps
    finfo: Any = jnp.finfo
    small = float(finfo(old.dtype).eps) if small is None else small
    share = at.number**beta2_decay
    scale = jnp.maximum(floor, jnp.sqrt(jnp.mean(old**2)))
    alpha = scale * jnp.minimum(lr, jax.lax.rsqrt(at.number))
    axes = range(gradient.ndim) if axes is None else axes
    gradient = gradient.transpose(axes)
    squared = gradient**2
    new = dict(slots)
    if gradient.ndim > 1:
        for name, axis in (("row_var", -1), ("col_var", -2)):
            mean = jnp.mean(squared, axis, keepdims=True)
            new[name] = slots[name] + share * (mean - slots[name])
        estimate = new["row_var"] * new["col_var"]
        estimate /= jnp.maximum(jnp.mean(new["row_var"], -2, keepdims=True), small)
    else:
        new["variance"] = slots["variance"] + share * (squared - slots["variance"])
        estimate = new["variance"]
    update = gradient * jax.lax.rsqrt(jnp.maximum(estimate, small**2))
    update = update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)) / d)
    return -alpha * update.transpose(np.argsort(axes)), new


def _muon(
    gradient: Any, old: Any, slots: Any, at: Step, /, lr: Any, momentum: float, nesterov: bool,
    ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float,
    adjust_lr_fn: str | None, axes: Sequence[int] = (0, 1), **_: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    mean = momentum * slots["momentum_buffer"] + (1 - momentum) * gradient
    update = momentum * mean + (1 - momentum) * gradient if nesterov else mean
    update = update.transpose(axes)
    height, width = update.shape
    ratio = 1.0
    if adjust_lr_fn in (None, "original"):
        ratio = math.sqrt(max(1, height / width))
    elif adjust_lr_fn == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(height, width))
    flat = _newton_schulz(update.T if height > width else update, ns_coefficients, ns_steps, eps)
    flat = (flat.T if height > width else flat).astype(gradient.dtype)
    return -(lr * ratio) * flat.transpose(np.argsort(axes)), {"momentum_buffer": mean}


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


def _some(*names: str, **conditions: str) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
    """Makes slots, and others that a setting of some name asks for."""

    def make(leaf: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        chosen = [*names, *(slot for name, slot in conditions.items() if settings[name])]
        return {name: jnp.zeros_like(leaf) for name in chosen}

    return make


def _factors(leaf: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the factored second moment of Adafactor, of which a vector has only `variance`."""
    none = jnp.zeros((0,), leaf.dtype)
    if leaf.ndim < 2:
        return {"row_var": none, "col_var": none, "variance": jnp.zeros_like(leaf)}
    *front, height, width = (leaf.shape[axis] for axis in settings.get("axes", range(leaf.ndim)))
    return {
        "row_var": jnp.zeros((*front, height, 1), leaf.dtype),
        "col_var": jnp.zeros((*front, 1, width), leaf.dtype),
        "variance": none,
    }


RULES: dict[str, tuple[Rule, Callable[[Any, Mapping[str, Any]], dict[str, Any]]]] = {
    "sgd": (_sgd, _some(momentum="momentum_buffer")),
    "adam": (_adam, _some("exp_avg", "exp_avg_sq", amsgrad="max_exp_avg_sq")),
    "adamax": (_adamax, _some("exp_avg", "exp_inf")),
    "nadam": (_nadam, _some("exp_avg", "exp_avg_sq")),
    "radam": (_radam, _some("exp_avg", "exp_avg_sq")),
    "rmsprop": (
        _rmsprop,
        _some("square_avg", centered="grad_avg", momentum="momentum_buffer"),
    ),
    "adagrad": (_adagrad, _some("sum")),
    "adadelta": (_adadelta, _some("square_avg", "acc_delta")),
    "adafactor": (_adafactor, _factors),
    "muon": (_muon, _some("momentum_buffer")),
}
