"""Averages of the weights: `optax.ema` of parameters, and those of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fmapper import ConversionError
from fmapper.training import Group, OptimizerState


def average(kind: str, decay: float | None) -> Any:
    """Returns a transformation of parameters into their average; the first update is a copy.

    Args:
        kind: `ema`, `unbiased` (as `optax.ema` with `debias=True`) or `equal`, the mean of all.
        decay: That of the first two.
    """

    def init_fn(params: Any) -> optax.EmaState:
        return optax.EmaState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update_fn(updates: Any, state: optax.EmaState, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count.astype(jnp.result_type(float))
        share = 1.0 / (count + 1.0) if decay is None else 1.0 - decay
        if kind == "unbiased":
            share = share / (1.0 - decay ** (count + 1.0))
        share = jnp.where(state.count == 0, 1.0, share)
        made = jax.tree.map(
            lambda old, new: (old + share * (new - old)).astype(old.dtype), state.ema, updates
        )
        return made, optax.EmaState(state.count + 1, made)

    return optax.GradientTransformation(init_fn, update_fn)


def read(settings: Mapping[str, Any], state: Any, leaves: Sequence[Any]) -> OptimizerState:
    """Returns an average as plain data.

    Args:
        settings: The variables that the transformation holds.
        state: Its state.
        leaves: The parameters.

    Raises:
        ConversionError: It is not an average that begins with the first parameters.
    """
    count, decay = int(state.count), settings["decay"]
    kind = settings.get("kind") or ("unbiased" if settings["debias"] else "ema")
    arrays = jax.tree.leaves(state.ema)
    if not count and settings.get("debias") is False:
        raise ConversionError(
            "ema with debias=False begins at 0, and torch's averages with the first parameters: "
            "use debias=True, or update it once"
        )
    if "debias" in settings and settings["debias"] and count:
        arrays = [array / (1 - decay**count) for array in arrays]
    if [(x.shape, x.dtype) for x in arrays] != [(x.shape, x.dtype) for x in leaves]:
        raise ConversionError("ema: its arrays are not those of parameters of the model")
    group = Group(tuple(range(len(leaves))), {"kind": kind, "decay": decay}, count)
    return OptimizerState("average", (group,), {"average": dict(enumerate(arrays))})


def build(params: Any, state: OptimizerState) -> tuple[Any, Any]:
    """Returns a transformation and its state."""
    (group,) = state.groups
    arrays = [state.slots["average"][at] for at in range(len(group.members))]
    tree = jax.tree.unflatten(jax.tree.structure(params), map(jnp.asarray, arrays))
    return average(**group.settings), optax.EmaState(jnp.asarray(group.step, jnp.int32), tree)
