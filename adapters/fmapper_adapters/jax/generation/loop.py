"""The compiled parts: a prompt, the first token, and the loop over all following ones.

The state of the loop is a dict of arrays. Its cache is donated: each step reuses the memory of the
one before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten import types
from fmapper_adapters.jax.generation import beams, choose
from fmapper_adapters.jax.generation.choose import Fixed, Knobs
from fmapper_adapters.jax.model import check_inputs, execute, meshes
from fmapper_adapters.jax.model.static_program import StaticProgram

State = dict[str, Any]
Arrays = dict[str, Any]


def pick(code: StaticProgram, params: Arrays, buffers: Arrays) -> tuple[Any, Any]:
    """Returns the arrays of a program as a flat list, which makes calls cheaper."""
    return code.pick_params(params), code.pick_buffers(buffers)


def run_program(
    code: StaticProgram, precision: str | None, arrays: tuple[Any, Any], *given: Any
) -> tuple[Any, Any, Any]:
    """Runs a program: returns logits, cache, and whether its assertions hold."""
    leaves, _ = check_inputs.check(code, code.program.bind(given, {}))
    users, _, _, checks = execute.run_program(code, (), precision, *arrays, leaves, None)
    values = iter(users)
    outputs = [next(values) if fixed is None else fixed[0] for fixed in code.fixed_outputs]
    output = code.program.out_spec.unflatten(outputs)
    holds = jnp.ones((len(code.checks),), bool) if checks is None else checks
    return output["logits"], output["cache"], holds


@partial(jax.jit, static_argnums=(0, 1))
def prefill(
    code: StaticProgram, precision: str | None, arrays: Any, tokens: Any, mask: Any
) -> tuple[Any, Any, Any]:
    """Runs prompts: returns logits, cache, and whether assertions hold."""

    def keep(shapes: Any) -> Any:
        """Shards logits and cache like the weights that they come from: a cache along its heads."""
        weights = dict(zip(code.names["parameter"], arrays[0], strict=True))
        axes = iter(meshes.output_axes(code.output_dimensions, weights))
        outputs = [next(axes) if fixed is None else None for fixed in code.fixed_outputs]
        result = code.program.out_spec.unflatten(outputs)
        return result["logits"], result["cache"], None

    run = partial(run_program, code, precision)
    result: tuple[Any, Any, Any] = _on_mesh(run, (arrays, tokens, mask), keep)
    return result


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def prefill_by_steps(
    code: StaticProgram, precision: str | None, arrays: Any, prompts: Any, cache: Any
) -> tuple[Any, Any, Any]:
    """Does what `prefill` does, one token after the other.

    While a row has no token yet, its rows of the cache do not change. Other parts of the cache,
    such as counters, change for all rows.

    Args:
        code: The program of a step.
        precision: The precision of matrix products.
        arrays: The result of `pick`.
        prompts: Tokens and mask, both of shape (batch, columns), and the number of columns.
        cache: An empty cache.
    """
    tokens, mask, count = prompts
    batch = tokens.shape[0]

    def body(state: Any) -> Any:
        at, logits, cache, holds = state
        here = jax.lax.dynamic_index_in_dim(mask, at, 1, keepdims=False) > 0
        token = jax.lax.dynamic_index_in_dim(tokens, at, 1, keepdims=False)
        new, after, check = run_program(code, precision, arrays, token, cache)

        def keep(value: Any, old: Any) -> Any:
            if value.ndim == 0 or value.shape[0] != batch:
                return value
            return jnp.where(here.reshape(-1, *(1,) * (value.ndim - 1)), value, old)

        return at + 1, keep(new, logits), jax.tree.map(keep, after, cache), holds & check

    shapes = jax.eval_shape(partial(run_program, code, precision), arrays, tokens[:, 0], cache)
    logits, holds = jnp.zeros(shapes[0].shape, shapes[0].dtype), jnp.ones(shapes[2].shape, bool)
    start = (jnp.int32(0), logits, cache, holds)
    return jax.lax.while_loop(lambda state: state[0] < count, body, start)[1:]


@partial(jax.jit, static_argnums=(0,))
def begin(
    fixed: Fixed, knobs: Knobs, key: Any, logits: Any, tokens: Any, mask: Any, done: Any
) -> State:
    """Returns the state after the first token, without the cache.

    Args:
        fixed: The settings that are compiled.
        knobs: The other settings.
        key: The key of the random numbers; None if none are drawn.
        logits: The logits after the prompts.
        tokens: Positions for all tokens, of shape (batch, positions), filled with the prompts.
        mask: The positions that are tokens.
        done: The rows of the batch that no prompt uses.
    """

    def run(knobs: Knobs, key: Any, logits: Any, tokens: Any, mask: Any, done: Any) -> State:
        state: State = {"tokens": tokens, "at": knobs["prompt"], "done": done}
        state["count"] = jnp.int32(0)
        if "repetition_penalty" in knobs:
            rows = jnp.arange(tokens.shape[0])[:, None]
            seen = jnp.zeros(logits.shape, bool)
            state["seen"] = seen.at[rows, tokens].max(mask)
        if fixed.beams > 1:
            state = beams.start(fixed, knobs, state, done)
        elif fixed.scores:
            state["scores"] = jnp.zeros((logits.shape[0], tokens.shape[1], logits.shape[1]))
        return _choose(fixed, knobs, key, logits, state)

    result: State = _on_mesh(run, (knobs, key, logits, tokens, mask, done), _outputs_of_nothing)
    return result


def _choose(fixed: Fixed, knobs: Knobs, key: Any, logits: Any, state: State) -> State:
    """Returns the state after one more token."""
    at, count, done = state["at"], state["count"], state["done"]
    logits = logits.astype(jnp.float32)
    if fixed.beams > 1:
        return beams.advance(fixed, knobs, logits, state)
    logits = choose.process(logits, fixed, knobs, state["tokens"], at, state.get("seen"))
    token = jnp.where(done, knobs["pad"], choose.pick(logits, fixed, key, count))
    rows = jnp.arange(len(token))
    new = dict(state)
    new["tokens"] = jax.lax.dynamic_update_slice(state["tokens"], token[:, None], (0, at))
    new["done"] = done | knobs["stops"][rows, token]
    new["last"], new["at"], new["count"] = token, at + 1, count + 1
    if "seen" in state:
        new["seen"] = state["seen"].at[rows, token].set(True)
    if "scores" in state:
        new["scores"] = jax.lax.dynamic_update_slice(
            state["scores"], logits[:, None], (0, count, 0)
        )
    return new


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4,))
def loop(
    code: StaticProgram,
    precision: str | None,
    fixed: Fixed,
    arrays: Any,
    state: State,
    knobs: Knobs,
    key: Any,
    until: Any,
) -> State:
    """Generates until there are `until` tokens, or all rows have stopped."""

    def run(arrays: Any, state: State, knobs: Knobs, key: Any, until: Any) -> State:
        def goes_on(state: State) -> Any:
            return (state["count"] < until) & ~state["done"].all()

        rows = jax.tree.map(_is_single_row, state["cache"])

        def body(state: State) -> State:
            before = jax.tree.map(_with_row, state["cache"], rows)
            logits, cache, holds = run_program(code, precision, arrays, state["last"], before)
            new = _choose(fixed, knobs, key, logits, state)
            if fixed.beams > 1:
                cache = beams.reorder(cache, before, new["source"])
            cache = jax.tree.map(_without_row, cache, rows)
            return new | {"cache": cache, "holds": state["holds"] & holds}

        carried = jax.tree.map(_without_row, state["cache"], rows)
        result: State = jax.lax.while_loop(goes_on, body, state | {"cache": carried})
        return result | {"cache": jax.tree.map(_with_row, result["cache"], rows)}

    given = (arrays, state, knobs, key, until)
    result: State = _on_mesh(run, given, lambda shapes: state)
    return result


def _is_single_row(x: Any) -> bool:
    """Returns whether the loop carries an array without its dimension of one row.

    XLA drops this dimension in products of attention, and would write a cache twice to restore it.
    """
    return x.ndim > 2 and x.shape[0] == 1 and not any(jax.typeof(x).sharding.spec)


def _without_row(x: Any, is_single: bool) -> Any:
    return x.reshape(x.shape[1:]) if is_single else x


def _with_row(x: Any, is_single: bool) -> Any:
    return x[None] if is_single else x


def _on_mesh(function: Any, given: Any, keep: Any) -> Any:
    """Runs a function where its arrays are, also on an Explicit mesh."""
    return meshes.run(function, given, batch=[], keep=keep)


def _outputs_of_nothing(shapes: Any) -> Any:
    return jax.tree.map(lambda _: None, shapes)


def empty_cache(code: StaticProgram) -> Any:
    """Returns an empty cache for a step."""
    spec = code.program.in_spec.children[0].children[1]
    users = code.users[1:]
    return spec.unflatten([jnp.zeros(entry.shape, types.dtype_of(entry.dtype)) for entry in users])
