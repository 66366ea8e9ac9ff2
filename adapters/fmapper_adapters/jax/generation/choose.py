"""Chooses tokens from logits, as the processors of transformers do, in their order.

What is asked for is a dict of arrays: what is not in it is not done, and its values may change
from call to call without anything being compiled anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fmapper.generation import Decoding

Knobs = dict[str, Any]


class Fixed(NamedTuple):
    """What is compiled into the loop."""

    sample: bool
    top_k: int
    ngram: int
    scores: bool


def settings(
    decoding: Decoding, stops: Any, batch: int, vocabulary: int, prompt: int, end: int
) -> Knobs:
    """Returns the arrays that say how tokens are chosen.

    Args:
        decoding: What is asked for.
        stops: The stop tokens of each row; None where they are those of `decoding`.
        batch: How many rows.
        vocabulary: How many tokens there are.
        prompt: How many columns of tokens there are before the first new one.
        end: How many there may be.
    """

    def among(tokens: Any) -> Any:
        found = np.zeros(vocabulary, bool)
        found[[token for token in tokens if token < vocabulary]] = True
        return found

    own = [among(row) for row in stops] if stops else []
    rest = among(decoding.eos_token_id)
    found: Knobs = {
        "prompt": np.int32(prompt),
        "pad": np.int32(_pad(decoding)),
        "stops": np.stack(own + [rest] * (batch - len(own))),
    }
    if decoding.repetition_penalty != 1:
        found["repetition_penalty"] = np.float32(decoding.repetition_penalty)
    if decoding.min_length > 0 or decoding.min_new_tokens > 0:
        found["least"] = np.int32(max(decoding.min_length, prompt + decoding.min_new_tokens))
    if decoding.forced_bos_token_id is not None:
        found["forced_first"] = np.int32(decoding.forced_bos_token_id)
    if decoding.forced_eos_token_id:
        found["forced_last"] = among(decoding.forced_eos_token_id)
        found["end"] = np.int32(end)
    if decoding.suppress_tokens:
        found["suppressed"] = among(decoding.suppress_tokens)
    if decoding.begin_suppress_tokens:
        found["suppressed_first"] = among(decoding.begin_suppress_tokens)
        later = prompt == 1 and decoding.forced_bos_token_id is not None
        found["begin"] = np.int32(prompt + later)
    if decoding.do_sample:
        for name, idle in (
            ("temperature", 1.0),
            ("top_p", 1.0),
            ("min_p", 0.0),
            ("typical_p", 1.0),
            ("epsilon_cutoff", 0.0),
        ):
            if getattr(decoding, name) != idle:
                found[name] = np.float32(getattr(decoding, name))
    return found


def _pad(decoding: Decoding) -> int:
    """Returns what a row that has stopped is filled with."""
    if decoding.pad_token_id is None:
        return (*decoding.eos_token_id, 0)[0]
    return decoding.pad_token_id


def process(logits: Any, fixed: Fixed, knobs: Knobs, tokens: Any, at: Any, seen: Any) -> Any:
    """Returns the logits from which a token is chosen: those that may not come are minus infinity.

    Args:
        logits: Of shape (batch, vocabulary).
        fixed: What is compiled.
        knobs: As `settings` gives them.
        tokens: Those that there are, of shape (batch, places).
        at: The place of the next one.
        seen: Which tokens a row has, of shape (batch, vocabulary); None if nobody asks.
    """
    never = -jnp.inf
    if "repetition_penalty" in knobs:
        penalty = knobs["repetition_penalty"]
        logits = jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    if fixed.ngram:
        logits = jnp.where(_repeated(tokens, at, fixed.ngram, logits.shape[1]), never, logits)
    if "least" in knobs:
        logits = jnp.where(knobs["stops"] & (at < knobs["least"]), never, logits)
    if "forced_first" in knobs:
        one = jnp.arange(logits.shape[1]) == knobs["forced_first"]
        logits = jnp.where(at == 1, jnp.where(one, 0.0, never), logits)
    if "forced_last" in knobs:
        forced = jnp.where(knobs["forced_last"], 0.0, never)
        logits = jnp.where(at == knobs["end"] - 1, forced, logits)
    if "suppressed" in knobs:
        logits = jnp.where(knobs["suppressed"], never, logits)
    if "suppressed_first" in knobs:
        logits = jnp.where(knobs["suppressed_first"] & (at == knobs["begin"]), never, logits)
    if not fixed.sample:
        return logits
    if "temperature" in knobs:
        logits = logits / knobs["temperature"]
    if fixed.top_k:
        least = jax.lax.top_k(logits, min(fixed.top_k, logits.shape[1]))[0][:, -1:]
        logits = jnp.where(logits < least, never, logits)
    if "top_p" in knobs:
        logits = _nucleus(logits, knobs["top_p"])
    if "min_p" in knobs:
        shares = jax.nn.softmax(logits)
        least = knobs["min_p"] * shares.max(-1, keepdims=True)
        logits = jnp.where(shares < least, never, logits)
    if "typical_p" in knobs:
        logits = _typical(logits, knobs["typical_p"])
    if "epsilon_cutoff" in knobs:
        shares = jax.nn.softmax(logits)
        best = logits >= logits.max(-1, keepdims=True)
        logits = jnp.where((shares < knobs["epsilon_cutoff"]) & ~best, never, logits)
    return logits


def pick(logits: Any, fixed: Fixed, key: Any, count: Any) -> Any:
    """Returns a token per row.

    Args:
        logits: As `process` gives them.
        fixed: What is compiled.
        key: Where random numbers come from.
        count: How many tokens were chosen before.
    """
    if not fixed.sample:
        return logits.argmax(-1).astype(jnp.int32)
    own = jax.random.fold_in(key, count)
    rows = jax.vmap(lambda row: jax.random.fold_in(own, row))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(rows, logits).astype(jnp.int32)


def _nucleus(logits: Any, share: Any) -> Any:
    """Keeps the likeliest tokens that have a share together."""
    ascending = jnp.argsort(logits, axis=-1)
    ordered = jnp.take_along_axis(logits, ascending, -1)
    below = jnp.cumsum(jax.nn.softmax(ordered), -1) <= 1 - share
    below = below.at[:, -1].set(False)
    dropped = _put_back(below, ascending)
    return jnp.where(dropped, -jnp.inf, logits)


def _typical(logits: Any, share: Any) -> Any:
    """Keeps the tokens whose surprise is nearest to the mean, until they have a share together."""
    logs = jax.nn.log_softmax(logits)
    mean = -jnp.where(jnp.isfinite(logs), logs * jnp.exp(logs), 0.0).sum(-1, keepdims=True)
    order = jnp.argsort(jnp.abs(-logs - mean), axis=-1)
    sums = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1)), -1)
    dropped = jnp.roll(sums >= share, 1, axis=-1).at[:, 0].set(False)
    return jnp.where(_put_back(dropped, order), -jnp.inf, logits)


def _put_back(ordered: Any, order: Any) -> Any:
    """Returns values that were put into an order in the one before."""
    return jnp.take_along_axis(ordered, jnp.argsort(order, axis=-1), -1)


def _repeated(tokens: Any, at: Any, size: int, vocabulary: int) -> Any:
    """Tells which tokens would make a sequence that is there already."""
    places = tokens.shape[1]
    batch = jnp.arange(tokens.shape[0])[:, None]
    starts = jnp.arange(max(places - size + 1, 0))
    same = jnp.broadcast_to(starts + size - 1 < at, (tokens.shape[0], len(starts)))
    for i in range(size - 1):
        own = jnp.take(tokens, jnp.maximum(at - size + 1 + i, 0), axis=1)[:, None]
        same &= tokens[:, i : i + len(starts)] == own
    same &= at + 1 >= size
    following = tokens[:, size - 1 : size - 1 + len(starts)]
    found = jnp.zeros((tokens.shape[0], vocabulary), bool)
    return found.at[batch, following].max(same)
