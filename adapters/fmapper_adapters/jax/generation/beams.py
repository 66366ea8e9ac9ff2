"""Beam search: the best texts of each prompt, as in `generate` of transformers.

Rows of a batch are prompts times beams. A text that is finished is kept, and the others continue;
the rows of a cache move with their texts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.generation import choose, ranking
from fmapper_adapters.jax.generation.choose import Fixed, Knobs

State = dict[str, Any]

_NEVER = -1.0e9  # as in transformers: the score of no text


def start(fixed: Fixed, knobs: Knobs, state: State, done: Any) -> State:
    """Returns the state before the first token.

    Args:
        fixed: The settings that are compiled.
        knobs: The other settings.
        state: The state, with the tokens of each prompt repeated for its beams.
        done: The rows of the batch that no prompt uses.
    """
    tokens = state["tokens"]
    prompts = len(tokens) // fixed.beams
    later = jnp.arange(tokens.shape[1]) >= knobs["prompt"]
    tokens = jnp.where(later, knobs["fill"], tokens)
    shape = (prompts, fixed.beams)
    unasked = done[: prompts * fixed.beams].reshape(shape)
    return (
        state
        | {
            "tokens": tokens,
            "running": jnp.zeros(shape).at[:, 1:].set(_NEVER),  # all beams are alike so far
            "best": tokens[: prompts * fixed.beams].reshape(*shape, -1),
            "best_scores": jnp.full(shape, _NEVER),
            "best_lengths": jnp.zeros(shape, jnp.int32),
            "is_text": unasked,
            "open": ~unasked[:, 0],
            "asked": ~unasked[:, 0],
            "source": jnp.arange(len(tokens)),
        }
    )


def advance(fixed: Fixed, knobs: Knobs, logits: Any, state: State) -> State:
    """Returns the state after one more token of all beams.

    Its `source` is the row that each row continues.
    """
    at, count, tokens = state["at"], state["count"], state["tokens"]
    prompts, beams = state["running"].shape
    rows = prompts * beams
    logs = jax.nn.log_softmax(logits)
    logs = choose.process(logs, fixed, knobs, tokens, at, state.get("seen"))
    total = logs[:rows].reshape(prompts, beams, -1) + state["running"][..., None]
    vocabulary = total.shape[-1]
    scores, chosen = ranking.top_k(total.reshape(prompts, -1), fixed.candidates)
    source, token = chosen // vocabulary, (chosen % vocabulary).astype(jnp.int32)
    texts = _take(tokens[:rows].reshape(prompts, beams, -1), source)
    texts = jax.lax.dynamic_update_slice(texts, token[..., None], (0, 0, at))
    first = jnp.arange(prompts)[:, None] * beams
    ends = knobs["stops"][first, token] | (at + 1 >= knobs["end"]) | ~state["asked"][:, None]

    running, goes_on = jax.lax.top_k(scores + ends * _NEVER, beams)
    origin = jnp.arange(len(tokens)).at[:rows].set((_take(source, goes_on) + first).reshape(-1))
    new = dict(state)
    new["running"], new["source"] = running, origin
    new["tokens"] = tokens.at[:rows].set(_take(texts, goes_on).reshape(rows, -1))
    new["last"] = tokens[:, 0].at[:rows].set(_take(token, goes_on).reshape(-1))
    new["at"], new["count"] = at + 1, count + 1
    new |= _keep_best(fixed, knobs, state, texts, scores, ends)
    guess = knobs.get("longest", knobs["lengths"][count + 1])
    worst = new["best_scores"].min(1, keepdims=True)
    worst = jnp.where(new["is_text"], worst, _NEVER)
    new["open"] = state["open"] & (running[:, :1] / guess > worst).any(-1)
    is_full = new["is_text"].all() & (fixed.stop_early is True)
    over = ~new["open"].any() | is_full | ends.all()
    new["done"] = jnp.broadcast_to(over, state["done"].shape)
    if "seen" in state:
        every = jnp.arange(len(tokens))
        new["seen"] = state["seen"][origin].at[every, new["last"]].set(True)
    return new


def _keep_best(
    fixed: Fixed, knobs: Knobs, state: State, texts: Any, scores: Any, ends: Any
) -> State:
    """Returns the best finished texts, old and new."""
    beams, length = fixed.beams, state["count"] + 1
    is_new = ends & (jnp.arange(scores.shape[1]) < beams)
    is_full = state["is_text"].all(-1, keepdims=True) & (fixed.stop_early is True)
    scores = scores / knobs["lengths"][length]
    for barred in (is_full, ~state["open"][:, None], ~is_new):
        scores = scores + barred * _NEVER
    both = {
        "best": (state["best"], texts),
        "best_scores": (state["best_scores"], scores),
        "best_lengths": (state["best_lengths"], jnp.broadcast_to(length, scores.shape)),
        "is_text": (state["is_text"], is_new),
    }
    whole = {name: jnp.concatenate(pair, 1) for name, pair in both.items()}
    order = jax.lax.top_k(whole["best_scores"], beams)[1]
    return {name: _take(array, order) for name, array in whole.items()}


def _take(values: Any, which: Any) -> Any:
    """Selects some of the beams of each prompt."""
    more = (1,) * (values.ndim - 2)
    return jnp.take_along_axis(values, which.reshape(*which.shape, *more), 1)


def reorder(cache: Any, before: Any, source: Any) -> Any:
    """Reorders the rows of a cache by their beams.

    Args:
        cache: The cache after a step.
        before: The cache before it; entries that a step does not change are equal for all beams.
        source: The row that each row continues.
    """

    def move(new: Any, old: Any) -> Any:
        if new is old or new.ndim == 0 or new.shape[0] != len(source):
            return new
        return new[source]

    return jax.tree.map(move, cache, before)
