"""An optax transformation, and its state, for an optimizer that is given as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fmapper import ConversionError
from fmapper.training import Group, OptimizerState, Schedule
from fmapper_adapters.jax.training.transformations import Moments, transformation

FROZEN = "frozen"


class Rate:
    """A learning rate by the count of updates, as optax takes it.

    Args:
        base: The rate that the schedule scales.
        schedule: The schedule.
    """

    def __init__(self, base: float, schedule: Schedule) -> None:
        self.base, self.schedule = base, schedule

    def __call__(self, count: Any) -> Any:
        """Returns the rate for an update."""
        step = jnp.asarray(count, jnp.result_type(float))  # a quotient of int32 is float32
        return self.schedule.rate(self.base, step, _Namespace)

    def __repr__(self) -> str:
        return f"Rate({self.base}, {self.schedule.kind!r}, {dict(self.schedule.settings)})"


class _Namespace:
    where, cos, floor, log = jnp.where, jnp.cos, jnp.floor, jnp.log
    minimum, maximum, power = jnp.minimum, jnp.maximum, jnp.power

    @staticmethod
    def take(values: Any, at: Any) -> Any:
        return jnp.asarray(values)[at.astype(int)]


# Where the states of optax hold what torch calls otherwise: algorithm -> state -> field -> slot.
_ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq"}
SLOTS: dict[str, dict[str, dict[str, str]]] = {
    "sgd": {"TraceState": {"trace": "momentum_buffer"}},
    "adam": {"ScaleByAdamState": _ADAM},
    "adamax": {"ScaleByAdamState": {"mu": "exp_avg", "nu": "exp_inf"}},
    "rmsprop": {
        "ScaleByRmsState": {"nu": "square_avg"},
        "ScaleByRStdDevState": {"mu": "grad_avg", "nu": "square_avg"},
        "TraceState": {"trace": "momentum_buffer"},
    },
    "adadelta": {"ScaleByAdaDeltaState": {"e_g": "square_avg", "e_x": "acc_delta"}},
    "lion": {"ScaleByLionState": {"mu": "exp_avg"}},
}


def build(params: Any, state: OptimizerState) -> tuple[Any, Any]:
    """Returns a transformation and its state for a tree of parameters.

    Parameters that no group has are not updated. Where there are several groups, or some are not
    updated, it is an `optax.partition`.

    Raises:
        ConversionError: A parameter has an array of a slot in another shape than optax expects.
    """
    leaves, treedef = jax.tree.flatten(params)
    labels = [FROZEN] * len(leaves)
    for number, group in enumerate(state.groups):
        for at in group.members:
            labels[at] = str(number)
    parts = {
        str(number): _chain(state.algorithm, group.settings, state.schedule)
        for number, group in enumerate(state.groups)
    }
    if len({*labels}) == 1 and FROZEN not in labels:
        tx = parts[labels[0]]
    else:
        if FROZEN in labels:
            parts[FROZEN] = optax.set_to_zero()

        # A function, as Flax hands in parameters with and without their boxes.
        def label(tree: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(tree), labels)

        tx = optax.partition(parts, label)
    return tx, _fill(tx.init(params), state, treedef, None)


def _chain(algorithm: str, settings: Mapping[str, Any], schedule: Schedule | None) -> Any:
    """Returns the transformation of a group."""
    lr = settings["lr"]
    rate: Any = lr if schedule is None else Rate(lr, schedule)
    decay = settings["weight_decay"]
    decays = [optax.add_decayed_weights(decay)] if decay else []
    is_decoupled = settings.get("decoupled") or algorithm in ("adafactor", "lion")
    return optax.chain(
        *[optax.scale(-1.0)] * bool(settings["maximize"]),
        *([] if is_decoupled else decays),
        *_core(algorithm, {**settings, "rate": rate}),
        *(decays if is_decoupled else []),
        optax.scale_by_learning_rate(rate),
    )


def _core(algorithm: str, settings: Mapping[str, Any]) -> list[Any]:
    """Returns the transformations that make an update of a gradient."""
    momentum = settings.get("momentum", 0.0)
    match algorithm:
        case "sgd" if not settings["dampening"] or not momentum:
            return [optax.trace(momentum, settings["nesterov"])] if momentum else []
        case "rmsprop":
            scale = optax.scale_by_stddev if settings["centered"] else optax.scale_by_rms
            how = {"decay": settings["alpha"], "eps": settings["eps"], "eps_in_sqrt": False}
            return [scale(**how), *[optax.trace(momentum)] * bool(momentum)]
        case "adadelta":
            return [optax.scale_by_adadelta(settings["rho"], settings["eps"])]
        case "lion":
            return [optax.scale_by_lion(*settings["betas"])]
    own = {name: value for name, value in settings.items() if name not in ("lr", "maximize")}
    return [transformation(algorithm, own)]


def _fill(made: Any, state: OptimizerState, treedef: Any, group: Group | None) -> Any:
    """Puts the arrays and counts of a state into one that optax has made.

    Args:
        made: The state of optax, or a part of it.
        state: The state.
        treedef: The structure of the parameters.
        group: The group that the part is for; None for the only one.
    """
    if hasattr(made, "inner_states"):
        return made._replace(inner_states={
            label: inner if label == FROZEN else _fill(
                inner, state, treedef, state.groups[int(label)]
            )
            for label, inner in made.inner_states.items()
        })  # fmt: skip
    if hasattr(made, "inner_state"):
        return made._replace(inner_state=_fill(made.inner_state, state, treedef, group))
    if not hasattr(made, "_fields"):
        return tuple(_fill(part, state, treedef, group) for part in made)
    group = state.groups[0] if group is None else group
    if type(made).__name__ == "ScaleByScheduleState":
        position = state.schedule.position if state.schedule else 0
        return made._replace(count=jnp.asarray(position, jnp.int32))
    count = {"count": jnp.asarray(group.step, jnp.int32)} if "count" in made._fields else {}
    if isinstance(made, Moments):
        arrays = {
            slot: _put(tree, state.slots.get(slot, {}), slot, treedef)
            for slot, tree in made.arrays.items()
        }
        numbers = {
            name: jnp.asarray(x, jnp.result_type(float)) for name, x in group.numbers.items()
        }
        return made._replace(arrays=arrays, numbers=made.numbers | numbers, **count)
    fields = SLOTS.get(state.algorithm, {}).get(type(made).__name__, {})
    return made._replace(
        **{
            field: _put(getattr(made, field), state.slots.get(slot, {}), slot, treedef)
            for field, slot in fields.items()
        },
        **count,
    )


def _put(tree: Any, arrays: Mapping[int, Any], slot: str, treedef: Any) -> Any:
    """Puts arrays into a tree of a state; places that are masked stay so."""
    old, structure = jax.tree.flatten(tree, is_leaf=is_masked)
    new = []
    for at, leaf in enumerate(old):
        array = arrays.get(at)
        if is_masked(leaf) or array is None:
            new.append(leaf)
            continue
        if jnp.shape(array) != leaf.shape:
            raise ConversionError(
                f"{slot} of parameter {at} has the shape {jnp.shape(array)}, and {leaf.shape} here"
            )
        new.append(jnp.asarray(array, leaf.dtype))
    return jax.tree.unflatten(structure, new)


def is_masked(x: Any) -> bool:
    """Returns whether something stands for a parameter of another group."""
    return type(x).__name__ == "MaskedNode"
