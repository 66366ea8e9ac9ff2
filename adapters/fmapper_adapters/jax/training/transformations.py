"""Algorithms that optax has otherwise than torch, or less exactly, as optax transformations.

Each continues a run of `torch.optim` to rounding. The formulas are those of its documentation,
https://docs.pytorch.org/docs/stable/optim.html. optax's own Adam is off by 1e-5 in float32, where
it corrects the bias of the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Moments(NamedTuple):
    """The state of these transformations.

    Attributes:
        count: How many updates there were.
        arrays: Slot -> a tree of arrays like the parameters.
        numbers: State that is one number.
    """

    count: Any
    arrays: dict[str, Any]
    numbers: dict[str, Any]


Rule = Callable[..., tuple[Any, dict[str, Any]]]


def transformation(algorithm: str, settings: Mapping[str, Any]) -> Any:
    """Returns the transformation of an algorithm, whose updates are to be scaled by the rate.

    Args:
        algorithm: A key of `RULES`.
        settings: Those of `fmapper.training.SETTINGS`; with `rate`, a number or a schedule.
    """

    def init_fn(params: Any) -> Moments:
        leaves: list[Any]
        treedef: Any
        leaves, treedef = jax.tree.flatten(params)
        made = [RULES[algorithm][1](leaf, settings) for leaf in leaves]
        names = [*made[0]] if made else []
        arrays = {name: treedef.unflatten([slots[name] for slots in made]) for name in names}
        numbers = {"mu_product": jnp.ones(())} if algorithm == "nadam" else {}
        return Moments(jnp.zeros((), jnp.int32), arrays, numbers)

    def update_fn(updates: Any, state: Moments, params: Any = None) -> tuple[Any, Moments]:
        if params is None:
            raise ValueError("pass the parameters: tx.update(updates, state, params)")
        rule, _ = RULES[algorithm]
        at = Step(state.count + 1, settings, state.numbers)
        leaves: list[Any]
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        olds = treedef.flatten_up_to(params)
        held = {name: treedef.flatten_up_to(tree) for name, tree in state.arrays.items()}
        new_updates, new_slots = [], []
        for place, (gradient, old) in enumerate(zip(leaves, olds, strict=True)):
            slots = {name: arrays[place] for name, arrays in held.items()}
            update, slots = rule(gradient, old, slots, at, **settings)
            new_updates.append(update.astype(gradient.dtype))
            new_slots.append(
                {name: slots[name].astype(arrays[place].dtype) for name, arrays in held.items()}
            )
        arrays = {
            name: treedef.unflatten([slots[name] for slots in new_slots]) for name in state.arrays
        }
        return treedef.unflatten(new_updates), Moments(at.count, arrays, at.numbers())

    return optax.GradientTransformation(init_fn, update_fn)


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

    def correction(self, beta: float) -> Any:
        """Returns `1 - beta ** count`."""
        return -jnp.expm1(self.number * math.log(beta)) if beta else jnp.ones_like(self.number)

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
    gradient: Any, old: Any, slots: Any, at: Step, momentum: float, dampening: float,
    nesterov: bool, **_: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    later = momentum * slots["momentum_buffer"] + (1 - dampening) * gradient
    mean = jnp.where(at.count == 1, gradient, later)
    return gradient + momentum * mean if nesterov else mean, {"momentum_buffer": mean}


def _adam(
    gradient: Any, old: Any, slots: Any, at: Step, betas: Any, eps: float, amsgrad: bool, **_: Any
) -> tuple[Any, dict[str, Any]]:
    new = _moments(gradient, slots, betas)
    squares = new["exp_avg_sq"]
    if amsgrad:
        squares = new["max_exp_avg_sq"] = jnp.maximum(slots["max_exp_avg_sq"], squares)
    mean = new["exp_avg"] / at.correction(betas[0])
    return mean / (jnp.sqrt(squares / at.correction(betas[1])) + eps), new


def _adamax(
    gradient: Any, old: Any, slots: Any, at: Step, betas: Any, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    mean = betas[0] * slots["exp_avg"] + (1 - betas[0]) * gradient
    largest = jnp.maximum(betas[1] * slots["exp_inf"], jnp.abs(gradient) + eps)
    update = mean / at.correction(betas[0]) / largest
    return update, {"exp_avg": mean, "exp_inf": largest}


def _nadam(
    gradient: Any, old: Any, slots: Any, at: Step, betas: Any, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    new = _moments(gradient, slots, betas)
    of_gradient, of_mean = at.nesterov()
    scale = jnp.sqrt(new["exp_avg_sq"] / at.correction(betas[1])) + eps
    return (of_gradient * gradient + of_mean * new["exp_avg"]) / scale, new


def _radam(
    gradient: Any, old: Any, slots: Any, at: Step, betas: Any, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    new = _moments(gradient, slots, betas)
    rectified = at.rectification(betas[1])
    adaptive = jnp.sqrt(at.correction(betas[1])) / (jnp.sqrt(new["exp_avg_sq"]) + eps)
    mean = new["exp_avg"] / at.correction(betas[0])
    return mean * jnp.where(rectified > 0, rectified * adaptive, 1.0), new


def _adagrad(
    gradient: Any, old: Any, slots: Any, at: Step, lr_decay: float, eps: float, **_: Any
) -> tuple[Any, dict[str, Any]]:
    total = slots["sum"] + gradient**2
    rate = 1 / (1 + (at.number - 1) * lr_decay)
    return rate * gradient / (jnp.sqrt(total) + eps), {"sum": total}


def _adafactor(
    gradient: Any, old: Any, slots: Any, at: Step, rate: Any, beta2_decay: float, eps: Any,
    d: float, **_: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    small, floor = eps
    finfo: Any = jnp.finfo
    small = float(finfo(old.dtype).eps) if small is None else small
    lr = rate(at.count - 1) if callable(rate) else rate
    share = at.number**beta2_decay
    scale = jnp.maximum(floor, jnp.sqrt(jnp.mean(old**2)))
    alpha = scale * jnp.minimum(lr, jax.lax.rsqrt(at.number))
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
    return alpha / lr * update, new


def _zeros(*names: str) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
    return lambda leaf, settings: {name: jnp.zeros_like(leaf) for name in names}


def _of_adam(leaf: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * settings["amsgrad"]]
    return {name: jnp.zeros_like(leaf) for name in names}


def _factors(leaf: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the factored second moment of Adafactor, of which a vector has only `variance`."""
    none = jnp.zeros((0,), leaf.dtype)
    if leaf.ndim < 2:
        return {"row_var": none, "col_var": none, "variance": jnp.zeros_like(leaf)}
    *front, height, width = leaf.shape
    return {
        "row_var": jnp.zeros((*front, height, 1), leaf.dtype),
        "col_var": jnp.zeros((*front, 1, width), leaf.dtype),
        "variance": none,
    }


RULES: dict[str, tuple[Rule, Callable[[Any, Mapping[str, Any]], dict[str, Any]]]] = {
    "sgd": (_sgd, _zeros("momentum_buffer")),
    "adam": (_adam, _of_adam),
    "adamax": (_adamax, _zeros("exp_avg", "exp_inf")),
    "nadam": (_nadam, _zeros("exp_avg", "exp_avg_sq")),
    "radam": (_radam, _zeros("exp_avg", "exp_avg_sq")),
    "adagrad": (_adagrad, _zeros("sum")),
    "adafactor": (_adafactor, _factors),
}
