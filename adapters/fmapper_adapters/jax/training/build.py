"""An optax transformation, and its state, for an optimizer that is given as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fmapper import ConversionError
from fmapper.training import Group, OptimizerState, Schedule
from fmapper_adapters.jax.training.transformations import Moments, transformation

_FROZEN = "frozen"


class Rate:
    """A learning rate or another setting by the count of updates, as optax takes it.

    Args:
        base: The value that the schedule scales.
        schedule: The schedule.
    """

    def __init__(self, base: float, schedule: Schedule) -> None:
        self.base, self.schedule = base, schedule

    def __call__(self, count: Any) -> Any:
        """Returns the value for an update."""
        count = jnp.asarray(count) // self.schedule.every
        step = count.astype(jnp.result_type(float))  # a quotient of int32 is float32
        return self.schedule.rate(self.base, step, _NAMESPACE)


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

    Parameters that no group has are not updated. Where there are several groups, or some are not
    updated, it is an `optax.partition`.

    Raises:
        ConversionError: A parameter has an array of a slot in another shape than the transformation
            expects.
    """
    labels = [_FROZEN] * len(jax.tree.leaves(params))
    parts = {}
    for number, group in enumerate(state.groups):
        for at in group.members:
            labels[at] = str(number)
        rates = {}
        for name, schedule in group.schedules.items():
            key = "betas" if name == "momentum" and "betas" in group.settings else name
            base = group.settings[key]
            rates[name] = Rate(base[0] if key == "betas" else base, schedule)
        parts[str(number)] = transformation(state.algorithm, group.settings, rates)
    if len({*labels}) == 1 and _FROZEN not in labels:
        tx = parts[labels[0]]
        return tx, _fill(tx.init(params), state, state.groups[0])
    if _FROZEN in labels:
        parts[_FROZEN] = optax.set_to_zero()

    # A function, as Flax hands in parameters with and without their boxes.
    def label(tree: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), labels)

    tx = optax.partition(parts, label)
    made = tx.init(params)
    inner_states = dict(made.inner_states)
    for number, group in enumerate(state.groups):
        masked = inner_states[str(number)]
        inner = _fill(masked.inner_state, state, group)
        inner_states[str(number)] = masked._replace(inner_state=inner)
    return tx, made._replace(inner_states=inner_states)


def _fill(made: Moments, state: OptimizerState, group: Group) -> Moments:
    """Puts the arrays and counts of a state into that of a transformation."""
    position = next((x.position for x in group.schedules.values()), group.step)
    numbers = {name: jnp.asarray(x, jnp.result_type(float)) for name, x in group.numbers.items()}
    return Moments(
        jnp.asarray(group.step, jnp.int32),
        jnp.asarray(position, jnp.int32),
        {slot: _put(tree, state.slots.get(slot, {}), slot) for slot, tree in made.arrays.items()},
        made.numbers | numbers,
    )


def _put(tree: Any, arrays: Mapping[int, Any], slot: str) -> Any:
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
