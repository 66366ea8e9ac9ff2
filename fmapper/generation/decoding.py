"""How the next token is chosen, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fmapper.errors import ConversionError
from fmapper.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are chosen; the names are those of `GenerationConfig` in transformers.

    What is done to the logits is done in the order of these attributes.

    Attributes:
        repetition_penalty: Divides the logits of tokens that are there already; 1 for nothing.
        no_repeat_ngram_size: No sequence of so many tokens comes twice; 0 for nothing.
        min_length: How many tokens there are, with the prompt, before a stop token may come.
        min_new_tokens: How many, without the prompt.
        forced_bos_token_id: The token that comes first.
        forced_eos_token_id: The one that comes last, where no stop token came.
        suppress_tokens: Tokens that never come.
        begin_suppress_tokens: Tokens that do not come first.
        do_sample: Whether tokens are drawn; else the likeliest comes.
        temperature: Divides the logits.
        top_k: How many tokens may come, the likeliest; 0 for all.
        top_p: As many as have this probability together; 1 for all.
        min_p: Those that have this share of the highest probability; 0 for all.
        typical_p: Those whose surprise is nearest to the mean, until they have this probability
            together; 1 for all.
        epsilon_cutoff: Those with this probability; 0 for all.
        max_new_tokens: How many may come; None for as many as the cache holds.
        max_length: How many there may be, with the prompt; `max_new_tokens` goes first.
        eos_token_id: The tokens after which a row stops.
        pad_token_id: What a row has after that, and the padding of a prompt that has no mask. None:
            the first of the stop tokens, and no padding.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    max_new_tokens: int | None = None
    max_length: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def with_options(self, options: Mapping[str, Any]) -> Decoding:
        """Returns this with some of it changed.

        Raises:
            TypeError: There is no such option.
            ValueError: It has no such value.
        """
        changed: dict[str, Any] = {}
        for name, value in options.items():
            if name in _REFUSED and value not in (None, _REFUSED[name][0]):
                raise ConversionError(f"{name}={value!r}: {_REFUSED[name][1]}")
            if name in _REFUSED:
                continue
            if name not in _READERS:
                raise TypeError(f"there is no option {name!r}.{did_you_mean(name, list(_READERS))}")
            changed[name] = _READERS[name](name, value)
        return replace(self, **changed)


def read_config(config: Mapping[str, Any]) -> tuple[Decoding, tuple[str, ...]]:
    """Reads what a model says of its own about generating.

    Args:
        config: As `GenerationConfig.to_dict()` gives it.

    Returns:
        How tokens are chosen, and a sentence for everything that it asks for and is not done.
    """
    known: dict[str, Any] = {}
    missing: list[str] = []
    for name, value in config.items():
        if value is None or name.startswith("_") or name in _ABOUT:
            continue
        if name in _READERS:
            known[name] = value
        elif name in _REFUSED:
            if value != _REFUSED[name][0]:
                missing.append(f"{name}={value!r}: {_REFUSED[name][1]}")
        elif name not in _IDLE or value != _IDLE[name]:
            missing.append(f"{name}={value!r}: nothing does that here")
    if known.get("pad_token_id") is None and known.get("eos_token_id") is not None:
        stops = known["eos_token_id"]
        known["pad_token_id"] = stops if isinstance(stops, int) else stops[0]
    if not known.get("do_sample"):  # where nothing is drawn these do nothing
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"):
            known.pop(name, None)
    return Decoding().with_options(known), tuple(missing)


# What is refused, with the value that asks for nothing, and the way out.
_REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (
        1,
        "beam search is not done here: pass num_beams=1 for greedy search or sampling, or call "
        "generate of the model in its own framework",
    ),
    "num_beam_groups": (1, "beam search is not done here: leave it out"),
    "num_return_sequences": (1, "give a prompt in as many rows as there are to be answers to it"),
}

# What does nothing here, as long as it has this value.
_IDLE: dict[str, Any] = {
    "assistant_confidence_threshold": 0.4,
    "assistant_early_exit": None,
    "assistant_lookbehind": 10,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "is_assistant": False,
    "length_penalty": 1.0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "token_healing": False,
    "top_h": None,
}
# What says nothing about which tokens come.
_ABOUT = frozenset({
    "bos_token_id", "cache_config", "cache_implementation", "compile_config",
    "decoder_start_token_id", "disable_compile", "low_memory", "max_cache_len",
    "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "prefill_chunk_size", "return_dict_in_generate", "target_lookbehind", "transformers_version",
    "use_cache", "use_mtp",
})  # fmt: skip


def _positive(name: str, value: Any) -> float:
    return _number(name, value, low=0.0, open_low=True)


def _share(name: str, value: Any) -> float:
    return _number(name, value, low=0.0, high=1.0)


def _number(
    name: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False
) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r}: a number is wanted")
    if not (low < value if open_low else low <= value) or not value <= high:
        raise ValueError(f"{name}={value!r} is out of range")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not finite")
    return float(value)


def _count(name: str, value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{name}={value!r}: a number of tokens is wanted")
    return value


def _limit(name: str, value: Any) -> int | None:
    return None if value is None else _count(name, value)


def _token(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{name}={value!r}: a token is wanted, a number from 0 on")
    return value


def _maybe_token(name: str, value: Any) -> int | None:
    return None if value is None else _token(name, value)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    each: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
    return tuple(_token(name, one) for one in each)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: True or False is wanted")
    return value


_READERS: dict[str, Any] = {
    "repetition_penalty": _positive,
    "no_repeat_ngram_size": _count,
    "min_length": _count,
    "min_new_tokens": _count,
    "forced_bos_token_id": _maybe_token,
    "forced_eos_token_id": _tokens,
    "suppress_tokens": _tokens,
    "begin_suppress_tokens": _tokens,
    "do_sample": _flag,
    "temperature": _positive,
    "top_k": _count,
    "top_p": _share,
    "min_p": _share,
    "typical_p": _share,
    "epsilon_cutoff": _share,
    "max_new_tokens": _limit,
    "max_length": _limit,
    "eos_token_id": _tokens,
    "pad_token_id": _maybe_token,
}
assert set(_READERS) == {one.name for one in fields(Decoding)}
