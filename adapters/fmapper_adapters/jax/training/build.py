"""An optax transformation, and its state, for an optimizer that is given as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fmapper import ConversionError
from fmapper.training import Group, OptimizerState, Schedule
from fmapper_adapters.jax.training.transformations import Moments, transformation

_FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class Rate:
    """A setting by the count of updates, as optax takes it: a schedule that scales a base value."""

    base: float
    schedule: Schedule

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

    Where there are several groups, or parameters that no group has, it is an `optax.partition`.

    Raises:
        ConversionError: An array of a slot has another shape than the transformation expects.
    """
    labels = [_FROZEN] * len(jax.tree.leaves(params))
    parts, begun = {}, {}
    for number, group in enumerate(state.groups):
        for at in group.members:
            labels[at] = str(number)
        rates = {}
        for name, schedule in group.schedules.items():
            betas = group.settings.get("betas") if name == "momentum" else None
            rates[name] = Rate(betas[0] if betas else group.settings[name], schedule)
        tx = parts[str(number)] = transformation(state.algorithm, group.settings, rates)
        begun[str(number)] = tx._replace(init=partial(_begin, tx, state, group))
    if _FROZEN in labels:
        parts[_FROZEN] = begun[_FROZEN] = optax.set_to_zero()
    elif len({*labels}) == 1:
        return parts[labels[0]], begun[labels[0]].init(params)

    # A function, as Flax hands in parameters with and without their boxes.
    def label(tree: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), labels)

    return optax.partition(parts, label), optax.partition(begun, label).init(params)


def _begin(tx: Any, state: OptimizerState, group: Group, params: Any) -> Moments:
    """Returns the state of a transformation of a group, with what was gathered before."""
    made: Moments = tx.init(params)
    arrays = {}
    for slot, tree in made.arrays.items():
        leaves, held = jax.tree.leaves(tree), state.slots.get(slot, {})
        for place, at in enumerate(sorted(group.members)):
            old, new = held.get(at), leaves[place]
            if old is not None and jnp.shape(old) != new.shape:
                shapes = f"{jnp.shape(old)}, and {new.shape} here"
                raise ConversionError(f"{slot} of parameter {at} has the shape {shapes}")
            leaves[place] = new if old is None else jnp.asarray(old, new.dtype)
        arrays[slot] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    position = next((x.position for x in group.schedules.values()), group.step)
    counts = [jnp.asarray(count, jnp.int32) for count in (group.step, position)]
    numbers = {name: jnp.asarray(x, jnp.result_type(float)) for name, x in group.numbers.items()}
    return Moments(*counts, arrays, made.numbers | numbers)
