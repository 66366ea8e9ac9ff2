"""Chooses tokens from logits by the rules of transformers' processors, in their order.

The settings are a dict of arrays: a processor without an entry does not run, and values may change
from call to call without recompilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fmapper.generation import Decoding
from fmapper_adapters.jax.generation import ranking

Knobs = dict[str, Any]


class Fixed(NamedTuple):
    """The settings that are compiled into the loop.

    Attributes:
        sample: Whether tokens are drawn.
        top_k: The number of tokens to choose from; 0 for all.
        ngram: The length of sequences that may not occur twice; 0 for none.
        valid: Whether NaN and infinity are replaced.
        normalized: Whether logits become logarithms of probabilities.
        scores: Whether the logits are kept.
        beams: The number of beams for each prompt; 1 without beam search.
        candidates: The number of continuations that are considered for each prompt.
        stop_early: The value of `early_stopping`.
    """

    sample: bool
    top_k: int = 0
    ngram: int = 0
    valid: bool = False
    normalized: bool = False
    scores: bool = False
    beams: int = 1
    candidates: int = 2
    stop_early: bool | str = False


def static_settings(decoding: Decoding, stops: Any, *, scores: bool = False) -> Fixed:
    """Returns the settings that are compiled into a loop.

    Args:
        decoding: The decoding options.
        stops: The stop tokens of each row; None for those of `decoding`.
        scores: Whether the logits are kept.
    """
    many = max(map(len, stops)) if stops else len(decoding.eos_token_id)
    is_search = decoding.num_beams > 1
    return Fixed(
        sample=decoding.do_sample,
        top_k=decoding.top_k if decoding.do_sample else 0,
        ngram=decoding.no_repeat_ngram_size,
        valid=decoding.remove_invalid_values,
        normalized=decoding.renormalize_logits,
        scores=scores,
        beams=decoding.num_beams,
        candidates=max(2, 1 + many) * decoding.num_beams if is_search else 1,
        stop_early=decoding.early_stopping if is_search else False,
    )


def settings(
    decoding: Decoding,
    stops: Any,
    shape: tuple[int, int],
    vocabulary: int,
    prompt: int,
    end: int,
    asked: Any = None,
) -> Knobs:
    """Returns the settings that are arrays, and so arguments of a loop.

    Args:
        decoding: The decoding options.
        stops: The stop tokens of each row; None for those of `decoding`.
        shape: The number of rows, and of positions for tokens.
        vocabulary: The size of the vocabulary.
        prompt: The number of columns of tokens before the first new one.
        end: The largest number of columns.
        asked: The tokens of the prompts with their padding, of shape (rows, width).
    """
    batch, places = shape

    def among(tokens: Any) -> Any:
        mask = np.zeros(vocabulary, bool)
        mask[[token for token in tokens if token < vocabulary]] = True
        return mask

    rows = [among(row) for row in stops] if stops else []
    rest = among(decoding.eos_token_id)
    knobs: Knobs = {
        "prompt": np.int32(prompt),
        "pad": np.int32(_pad(decoding)),
        "stops": np.stack(rows + [rest] * (batch - len(rows))),
    }
    if decoding.sequence_bias:
        knobs["bias"] = _biases(decoding.sequence_bias, vocabulary)
    if decoding.encoder_repetition_penalty != 1:
        knobs["prompt_penalty"] = np.float32(1 / decoding.encoder_repetition_penalty)
        knobs["asked"] = np.zeros((batch, vocabulary), bool)
        knobs["asked"][np.arange(len(asked))[:, None], asked] = True
    if 0 < decoding.encoder_no_repeat_ngram_size <= places:
        size = decoding.encoder_no_repeat_ngram_size
        knobs["prompt_ngrams"] = _ngrams(asked, size, batch)
    if decoding.bad_words_ids:
        lone = {(token,) for token in decoding.eos_token_id}  # these may stop a row
        words = [(word, -math.inf) for word in decoding.bad_words_ids if word not in lone]
        knobs["bad_words"] = _biases(words, vocabulary)
    if decoding.repetition_penalty != 1:
        knobs["repetition_penalty"] = np.float32(decoding.repetition_penalty)
    if decoding.min_length > 0 or decoding.min_new_tokens > 0:
        knobs["least"] = np.int32(max(decoding.min_length, prompt + decoding.min_new_tokens))
    if decoding.forced_bos_token_id is not None:
        knobs["forced_first"] = np.int32(decoding.forced_bos_token_id)
    if decoding.forced_eos_token_id:
        knobs["forced_last"] = among(decoding.forced_eos_token_id)
        knobs["end"] = np.int32(end)
    if decoding.exponential_decay_length_penalty is not None:
        begin, factor = decoding.exponential_decay_length_penalty
        late = np.maximum(np.arange(places) - begin - prompt, 0)
        with np.errstate(over="ignore"):
            knobs["rise"] = np.float32(np.float64(factor) ** late - 1)
    if decoding.suppress_tokens:
        knobs["suppressed"] = among(decoding.suppress_tokens)
    if decoding.begin_suppress_tokens:
        knobs["suppressed_first"] = among(decoding.begin_suppress_tokens)
        later = prompt == 1 and decoding.forced_bos_token_id is not None
        knobs["begin"] = np.int32(prompt + later)
    if decoding.do_sample:
        for name, idle in (
            ("temperature", 1.0),
            ("top_p", 1.0),
            ("min_p", 0.0),
            ("typical_p", 1.0),
            ("top_h", None),
            ("epsilon_cutoff", 0.0),
            ("eta_cutoff", 0.0),
        ):
            if getattr(decoding, name) != idle:
                knobs[name] = np.float32(getattr(decoding, name))
    if decoding.num_beams > 1:
        knobs["end"] = np.int32(end)
        knobs["fill"] = np.int32(decoding.pad_token_id or (*decoding.eos_token_id, 0)[0])
        sizes = np.maximum(np.arange(places + 1, dtype=np.float64), 1)
        knobs["lengths"] = np.float32(sizes**decoding.length_penalty)
        if decoding.early_stopping == "never" and decoding.length_penalty > 0:
            knobs["longest"] = knobs["lengths"][end - prompt]
    return knobs


def _biases(pairs: Iterable[tuple[tuple[int, ...], float]], vocabulary: int) -> Any:
    """Returns the biases of single tokens, and those of longer sequences by their length.

    Raises:
        ValueError: A token is not in the vocabulary.
    """
    single = np.zeros(vocabulary, np.float32)
    groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for tokens, bias in pairs:
        if max(tokens) >= vocabulary:
            raise ValueError(f"{list(tokens)}: the vocabulary has only {vocabulary} tokens")
        if len(tokens) == 1:
            single[tokens[0]] = bias
        else:
            groups.setdefault(len(tokens), []).append((tokens, bias))
    longer = [
        (
            np.array([tokens[:-1] for tokens, _ in group], np.int32),
            np.array([tokens[-1] for tokens, _ in group], np.int32),
            np.array([bias for _, bias in group], np.float32),
        )
        for group in groups.values()
    ]
    return single, longer


def _ngrams(tokens: Any, size: int, batch: int) -> Any:
    """Returns the n-grams of each row: their beginnings, and their last tokens."""
    rows, width = tokens.shape
    count = max(width - size + 1, 0)
    room = max(16, 1 << (width - 1).bit_length())  # otherwise each width would compile a program
    ngrams = np.full((batch, room, size), -1, np.int32)
    ngrams[:rows, :count] = tokens[:, np.arange(count)[:, None] + np.arange(size)]
    return ngrams


def _pad(decoding: Decoding) -> int:
    """Returns the token that fills a row that has stopped."""
    if decoding.pad_token_id is None:
        return (*decoding.eos_token_id, 0)[0]
    return decoding.pad_token_id


def process(logits: Any, fixed: Fixed, knobs: Knobs, tokens: Any, at: Any, seen: Any) -> Any:
    """Processes logits; tokens that are ruled out become minus infinity.

    Args:
        logits: Of shape (batch, vocabulary).
        fixed: The settings that are compiled.
        knobs: The other settings, from `settings`.
        tokens: The tokens so far, of shape (batch, positions).
        at: The position of the next token.
        seen: The tokens that occur in each row, of shape (batch, vocabulary); None if not needed.
    """
    never = -jnp.inf
    if "bias" in knobs:
        logits = _add_biases(logits, knobs["bias"], tokens, at)
    if "prompt_penalty" in knobs:
        penalty = knobs["prompt_penalty"]
        other = jnp.where(logits < 0, logits * penalty, logits / penalty)
        logits = jnp.where(knobs["asked"], other, logits)
    if "repetition_penalty" in knobs:
        penalty = knobs["repetition_penalty"]
        logits = jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    if fixed.ngram:
        logits = jnp.where(_find_repeats(tokens, at, fixed.ngram, logits.shape[1]), never, logits)
    if "prompt_ngrams" in knobs:
        ngrams = knobs["prompt_ngrams"]
        logits = jnp.where(_find_prompt_repeats(ngrams, tokens, at, logits.shape[1]), never, logits)
    if "bad_words" in knobs:
        logits = _add_biases(logits, knobs["bad_words"], tokens, at)
    if "least" in knobs:
        logits = jnp.where(knobs["stops"] & (at < knobs["least"]), never, logits)
    if "forced_first" in knobs:
        is_forced = jnp.arange(logits.shape[1]) == knobs["forced_first"]
        logits = jnp.where(at == 1, jnp.where(is_forced, 0.0, never), logits)
    if "forced_last" in knobs:
        forced = jnp.where(knobs["forced_last"], 0.0, never)
        logits = jnp.where(at == knobs["end"] - 1, forced, logits)
    if fixed.valid:
        largest = float(np.finfo(np.float32).max)
        logits = jnp.nan_to_num(logits, nan=0.0, posinf=largest, neginf=-largest)
    if "rise" in knobs:
        raised = jnp.where(jnp.isfinite(logits), jnp.abs(logits) * knobs["rise"][at], 0.0)
        logits = jnp.where(knobs["stops"], logits + raised, logits)
    if "suppressed" in knobs:
        logits = jnp.where(knobs["suppressed"], never, logits)
    if "suppressed_first" in knobs:
        logits = jnp.where(knobs["suppressed_first"] & (at == knobs["begin"]), never, logits)
    if fixed.sample:
        logits = _warp(logits, fixed, knobs)
    return jax.nn.log_softmax(logits) if fixed.normalized else logits


def _warp(logits: Any, fixed: Fixed, knobs: Knobs) -> Any:
    """Warps logits for sampling."""
    never = -jnp.inf
    if "temperature" in knobs:
        logits = logits / knobs["temperature"]
    if "top_h" in knobs:
        logits = _of_entropy(logits, knobs["top_h"])
    if fixed.top_k:
        least = ranking.kth_largest(logits, min(fixed.top_k, logits.shape[1]))
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
    if "eta_cutoff" in knobs:
        least = knobs["eta_cutoff"]
        least = jnp.minimum(least, jnp.sqrt(least) * jnp.exp(-_entropy(logits)))
        best = logits >= logits.max(-1, keepdims=True)
        logits = jnp.where((jax.nn.softmax(logits) < least) & ~best, never, logits)
    return logits


def pick(logits: Any, fixed: Fixed, key: Any, count: Any) -> Any:
    """Returns a token per row.

    Args:
        logits: The result of `process`.
        fixed: The settings that are compiled.
        key: The key of the random numbers.
        count: The number of tokens that were chosen before.
    """
    if not fixed.sample:
        return ranking.argmax(logits)
    step_key = jax.random.fold_in(key, count)
    rows = jax.vmap(lambda row: jax.random.fold_in(step_key, row))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(rows, logits).astype(jnp.int32)


def _nucleus(logits: Any, share: Any) -> Any:
    """Keeps the likeliest tokens that together reach a probability (top-p), ties included."""
    least = ranking.least_of_share(logits, jax.nn.softmax(logits), 1 - share)
    return jnp.where(logits < least, -jnp.inf, logits)


def _typical(logits: Any, share: Any) -> Any:
    """Keeps the tokens whose surprise is nearest to the mean, up to a total share (typical p)."""
    logs = jax.nn.log_softmax(logits)
    order = jnp.argsort(jnp.abs(-logs - _entropy(logits)), axis=-1)
    sums = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1)), -1)
    dropped = jnp.roll(sums >= share, 1, axis=-1).at[:, 0].set(False)
    return jnp.where(_put_back(dropped, order), -jnp.inf, logits)


def _entropy(logits: Any) -> Any:
    logs = jax.nn.log_softmax(logits)
    return -jnp.where(jnp.isfinite(logs), logs * jnp.exp(logs), 0.0).sum(-1, keepdims=True)


def _of_entropy(logits: Any, share: Any) -> Any:
    """Keeps the likeliest of 100 tokens that together reach a share of the entropy."""
    top = jax.lax.top_k(logits, min(100, logits.shape[1]))[0]
    logs = jax.nn.log_softmax(top)
    parts = -jnp.where(jnp.isfinite(logs), logs * jnp.exp(logs), 0.0)
    kept = jnp.cumsum(parts, -1) <= share * parts.sum(-1, keepdims=True)
    count = jnp.maximum(kept.sum(-1), 1)
    order = jnp.argsort(-logits, axis=-1, stable=True)
    dropped = jnp.arange(logits.shape[1]) >= count[:, None]
    return jnp.where(_put_back(dropped, order), -jnp.inf, logits)


def _put_back(ordered: Any, order: Any) -> Any:
    """Undoes an ordering of values."""
    return jnp.take_along_axis(ordered, jnp.argsort(order, axis=-1), -1)


def _find_repeats(tokens: Any, at: Any, size: int, vocabulary: int) -> Any:
    """Finds the tokens that would repeat an n-gram."""
    places = tokens.shape[1]
    if size > places:
        return jnp.zeros((len(tokens), vocabulary), bool)
    batch = jnp.arange(tokens.shape[0])[:, None]
    starts = jnp.arange(max(places - size + 1, 0))
    same = jnp.broadcast_to(starts + size - 1 < at, (tokens.shape[0], len(starts)))
    for i in range(size - 1):
        last = jnp.take(tokens, jnp.maximum(at - size + 1 + i, 0), axis=1)[:, None]
        same &= tokens[:, i : i + len(starts)] == last
    same &= at + 1 >= size
    following = tokens[:, size - 1 : size - 1 + len(starts)]
    barred = jnp.zeros((tokens.shape[0], vocabulary), bool)
    return barred.at[batch, following].max(same)


def _last(tokens: Any, at: Any, count: int) -> Any:
    """Returns the last `count` tokens before a position."""
    return jax.lax.dynamic_slice_in_dim(tokens, jnp.maximum(at - count, 0), count, 1)


def _find_prompt_repeats(ngrams: Any, tokens: Any, at: Any, vocabulary: int) -> Any:
    """Finds the tokens that would repeat an n-gram of the prompt.

    Args:
        ngrams: The n-grams of each prompt, of shape (batch, n-grams, tokens).
        tokens: The tokens so far.
        at: The position of the next token.
        vocabulary: The size of the vocabulary.
    """
    size = ngrams.shape[2] - 1
    same = (ngrams[..., :-1] == _last(tokens, at, size)[:, None]).all(-1)
    same &= (at >= size) & (ngrams[..., -1] >= 0)
    barred = jnp.zeros((len(tokens), vocabulary), bool)
    return barred.at[jnp.arange(len(tokens))[:, None], ngrams[..., -1]].max(same)


def _add_biases(logits: Any, biases: Any, tokens: Any, at: Any) -> Any:
    """Adds the biases of sequences whose last token is still to come."""
    single, longer = biases
    bias = jnp.broadcast_to(single, logits.shape)
    for beginnings, last, added in longer:
        size = beginnings.shape[1]
        if size > tokens.shape[1]:
            continue
        same = (_last(tokens, at, size)[:, None] == beginnings).all(-1) & (at >= size)
        bias = bias.at[:, last].add(jnp.where(same, added, 0.0))
    return logits + bias
