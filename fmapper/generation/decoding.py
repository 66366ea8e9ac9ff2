"""The decoding options, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from fmapper.errors import ConversionError
from fmapper.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Decoding:
    """The options of generation, with the names of transformers' `GenerationConfig`.

    The logits are processed in the order of these attributes.

    Attributes:
        sequence_bias: Numbers to add to the logit of the last token of a sequence if the others
            precede it: pairs of tokens and a number.
        encoder_repetition_penalty: Multiplies the logits of tokens of the prompt; 1 for no effect.
        repetition_penalty: Divides the logits of tokens that have already occurred; 1 for no
            effect.
        no_repeat_ngram_size: No sequence of this many tokens occurs twice; 0 for no effect.
        encoder_no_repeat_ngram_size: No sequence of this many tokens of the prompt is repeated; 0
            for no effect.
        bad_words_ids: Sequences of tokens that are never generated.
        min_length: The minimal number of tokens, with the prompt, before a stop token.
        min_new_tokens: The same, without the prompt.
        forced_bos_token_id: The first new token.
        forced_eos_token_id: The last token, if no stop token was generated.
        remove_invalid_values: NaN becomes 0, and infinity the largest number.
        exponential_decay_length_penalty: The number of new tokens after which the logits of stop
            tokens rise, and the factor per token; None for never.
        suppress_tokens: Tokens that are never generated.
        begin_suppress_tokens: Tokens that are not generated first.
        do_sample: Whether tokens are sampled; otherwise the likeliest is chosen.
        temperature: Divides the logits.
        top_h: Keeps the likeliest tokens with this total share of the entropy; None for all.
        top_k: Keeps this many of the likeliest tokens; 0 for all.
        top_p: Keeps the likeliest tokens with this total probability; 1 for all.
        min_p: Keeps tokens with at least this share of the highest probability; 0 for all.
        typical_p: Keeps tokens with a surprise nearest to the mean, up to this total probability; 1
            for all.
        epsilon_cutoff: Keeps tokens with at least this probability; 0 for all.
        eta_cutoff: Keeps tokens with at least this probability, or less if the entropy is high; 0
            for all.
        renormalize_logits: Whether logits finally become logarithms of probabilities.
        num_beams: The number of beams per prompt in beam search; 1 for none.
        length_penalty: The power of a text's length by which its score is divided in beam search.
        early_stopping: When beam search stops with as many finished texts as beams: True at once,
            False if an estimate says that they cannot improve, `"never"` if that is certain.
        num_return_sequences: The number of answers per prompt: the best of beam search, or samples.
        max_new_tokens: The maximal number of new tokens; None for as many as the cache holds.
        max_length: The maximal number with the prompt; `max_new_tokens` takes precedence.
        eos_token_id: The tokens after which a row stops.
        pad_token_id: The token that fills a row after that, and pads prompts without a mask. None:
            the first of the stop tokens, and no padding.
    """

    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    encoder_repetition_penalty: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_h: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    renormalize_logits: bool = False
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    max_new_tokens: int | None = None
    max_length: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def copies(self) -> int:
        """The number of rows of a batch for each prompt."""
        return max(self.num_beams, self.num_return_sequences)

    def check(self) -> None:
        """Checks that these options are compatible.

        Raises:
            ConversionError: They are not; says what to write instead.
        """
        if self.num_beams > 1 and self.do_sample:
            raise ConversionError(
                f"do_sample=True with num_beams={self.num_beams}: beam search with sampling is "
                f"not supported: pass do_sample=False, or num_beams=1"
            )
        if self.num_beams > 1 and self.num_return_sequences > self.num_beams:
            raise ConversionError(
                f"num_return_sequences={self.num_return_sequences} is more than "
                f"num_beams={self.num_beams}: beam search returns at most num_beams sequences"
            )
        if self.num_beams == 1 and self.num_return_sequences > 1 and not self.do_sample:
            raise ConversionError(
                f"num_return_sequences={self.num_return_sequences}: greedy search returns a single "
                "sequence. Pass do_sample=True, or num_beams"
            )

    def check_effect(self, options: Mapping[str, Any], key: Any = None) -> None:
        """Checks that sampling options, or a key, are not passed without sampling.

        Args:
            options: The options that were passed in addition to the model's configuration.
            key: The random key of a call.

        Raises:
            ConversionError: They have no effect, because `do_sample` is False.
        """
        if self.do_sample:
            return
        neutral = Decoding()
        given = [
            name
            for name in _OF_SAMPLES
            if name in options and getattr(self, name) != getattr(neutral, name)
        ]
        given += ["key"] * (key is not None)
        if given:
            raise ConversionError(
                f"{', '.join(f'{name}=' for name in given)} has no effect on "
                f"{'beam' if self.num_beams > 1 else 'greedy'} search: pass do_sample=True to draw "
                "tokens, or omit it"
            )

    def with_options(self, options: Mapping[str, Any]) -> Decoding:
        """Returns a copy with some options changed.

        Raises:
            TypeError: An option does not exist.
            ValueError: An option has an invalid value.
            ConversionError: transformers has the option, but it is not supported here.
        """
        changed: dict[str, Any] = {}
        for name, value in options.items():
            if name in _REFUSED and not _is_idle(name, value):
                raise ConversionError(f"{name}={value!r}: {_REFUSED[name][1]}")
            if name in _REFUSED:
                continue
            if name not in _READERS:
                raise TypeError(f"there is no option {name!r}.{did_you_mean(name, list(_READERS))}")
            changed[name] = _READERS[name](name, value)
        return replace(self, **changed)


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the decoding options."""
    return {name: x for name, x in given.items() if name in _READERS or name in _REFUSED}


def read_config(config: Mapping[str, Any]) -> tuple[Decoding, tuple[str, ...]]:
    """Reads the generation settings of a model.

    Args:
        config: The result of `GenerationConfig.to_dict()`.

    Returns:
        The decoding options, and a sentence for each unsupported setting.
    """
    options: dict[str, Any] = {}
    missing: list[str] = []
    for name, value in config.items():
        if value is None or name.startswith("_") or name in _ABOUT:
            continue
        if name in _READERS:
            options[name] = value
        elif name in _REFUSED:
            if not _is_idle(name, value):
                missing.append(f"{name}={value!r}: {_REFUSED[name][1]}")
        elif name not in _IDLE or value != _IDLE[name]:
            missing.append(f"{name}={value!r}: this is not supported")
    missing += _drop_negative_tokens(options)
    if options.get("pad_token_id") is None and options.get("eos_token_id") is not None:
        stops = options["eos_token_id"]
        options["pad_token_id"] = stops if isinstance(stops, int) else stops[0]
    if not options.get("do_sample"):  # calls may set it, but these values were not checked
        for name in _OF_SAMPLES:
            if name in options and not _is_valid(name, options[name]):
                del options[name]
    return Decoding().with_options(options), tuple(missing)


def _drop_negative_tokens(options: dict[str, Any]) -> list[str]:
    """Removes -1, which means no token in old configurations; returns unsupported settings."""
    stops = options.get("eos_token_id")
    if isinstance(stops, int) and stops < 0:
        del options["eos_token_id"]
    elif isinstance(stops, list | tuple):
        options["eos_token_id"] = [t for t in stops if not (isinstance(t, int) and t < 0)] or None
    pad = options.get("pad_token_id")
    if not isinstance(pad, int) or pad >= 0:
        return []
    del options["pad_token_id"]
    return [f"pad_token_id={pad}: this is not a token, so rows that have stopped get another"]


def _is_valid(name: str, value: Any) -> bool:
    try:
        _READERS[name](name, value)
    except ValueError:
        return False
    return True


_OF_SAMPLES = (
    "temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip

# Unsupported options, each with the value that has no effect, and the way out.
_REFUSED: dict[str, tuple[Any, str]] = {
    "num_beam_groups": (1, "groups of beams are not supported: omit it"),
    "diversity_penalty": (0.0, "groups of beams are not supported: omit it"),
    "guidance_scale": (
        1.0,
        "guidance needs a second run of the model: omit it, or write a module whose prefill and "
        "step implement it",
    ),
    "stop_strings": (
        None,
        "a generator has no tokenizer: pass the tokens as eos_token_id, or stop a stream",
    ),
    "max_time": (None, "a compiled loop has no clock: stop a stream instead"),
    "watermarking_config": (None, "watermarking is not supported: omit it"),
    "penalty_alpha": (None, "contrastive search is not supported: omit it"),
    "dola_layers": (None, "contrasting layers is not supported: omit it"),
    "prompt_lookup_num_tokens": (None, "drafting several tokens is not supported: omit it"),
    "token_healing": (False, "a generator has no tokenizer: heal the prompt first"),
    "constraints": (None, "constraints on beams are not supported: omit it"),
    "force_words_ids": (None, "constraints on beams are not supported: omit it"),
}


def _is_idle(name: str, value: Any) -> bool:
    return value is None or value == _REFUSED[name][0]


# Options that have no effect here with this value.
_IDLE: dict[str, Any] = {
    "assistant_confidence_threshold": 0.4,
    "assistant_early_exit": None,
    "assistant_lookbehind": 10,
    "is_assistant": False,
}
# Options that do not affect which tokens are chosen.
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


def _temperature(name: str, value: Any) -> float:
    if value == 0:
        raise ValueError(f"{name}={value!r} is out of range: pass do_sample=False instead")
    return _positive(name, value)


def _share(name: str, value: Any) -> float:
    return _number(name, value, low=0.0, high=1.0)


def _number(
    name: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False
) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r} must be a number")
    number = float(value)  # perhaps from a NumPy number
    if not (low < number if open_low else low <= number) or not number <= high:
        raise ValueError(f"{name}={value!r} is out of range")
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r} is not finite")
    return number


def _whole(value: Any) -> int | None:
    """Converts a whole number, at least 0, to a Python int; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value) if 0 <= int(value) < 1 << 31 else None


def _power(name: str, value: Any) -> float:
    return _number(name, value, low=-math.inf)


def _share_of_entropy(name: str, value: Any) -> float | None:
    return None if value is None else _number(name, value, low=0.0, high=1.0, open_low=True)


def _count(name: str, value: Any) -> int:
    if value is None:
        return 0
    number = _whole(value)
    if number is None:
        raise ValueError(f"{name}={value!r} must be a number of tokens")
    return number


def _copies(name: str, value: Any) -> int:
    return max(1, _count(name, value))


def _limit(name: str, value: Any) -> int | None:
    return None if value is None else _count(name, value)


def _token(name: str, value: Any) -> int:
    number = _whole(value)
    if number is None:
        raise ValueError(f"{name}={value!r} must be a token, an integer of at least 0")
    return number


def _maybe_token(name: str, value: Any) -> int | None:
    return None if value is None else _token(name, value)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    tokens: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
    return tuple(_token(name, token) for token in tokens)


def _sequence(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} has {value!r}, which must be a list of tokens")
    return tuple(_token(name, token) for token in value)


def _sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}={value!r} must be a list of lists of tokens")
    return tuple(_sequence(name, item) for item in value)


def _biases(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        raise ValueError(f"{name}={value!r} must be pairs of a list of tokens and a number")
    biases = {_sequence(name, tokens): _number(name, bias, low=-math.inf) for tokens, bias in pairs}
    return tuple(biases.items())


def _decay(name: str, value: Any) -> tuple[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be a number of tokens and a factor")
    return _count(name, value[0]), _number(name, value[1], low=-math.inf)


def _check_stopping(name: str, value: Any) -> bool | str:
    if value is None or isinstance(value, bool):
        return bool(value)
    if value != "never":
        raise ValueError(f"{name}={value!r} must be True, False or 'never'")
    return "never"


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")
    return value


_READERS: dict[str, Any] = {
    "sequence_bias": _biases,
    "encoder_repetition_penalty": _positive,
    "repetition_penalty": _positive,
    "no_repeat_ngram_size": _count,
    "encoder_no_repeat_ngram_size": _count,
    "bad_words_ids": _sequences,
    "min_length": _count,
    "min_new_tokens": _count,
    "forced_bos_token_id": _maybe_token,
    "forced_eos_token_id": _tokens,
    "remove_invalid_values": _flag,
    "exponential_decay_length_penalty": _decay,
    "suppress_tokens": _tokens,
    "begin_suppress_tokens": _tokens,
    "do_sample": _flag,
    "temperature": _temperature,
    "top_h": _share_of_entropy,
    "top_k": _count,
    "top_p": _share,
    "min_p": _share,
    "typical_p": _share,
    "epsilon_cutoff": _share,
    "eta_cutoff": _share,
    "renormalize_logits": _flag,
    "num_beams": _copies,
    "length_penalty": _power,
    "early_stopping": _check_stopping,
    "num_return_sequences": _copies,
    "max_new_tokens": _limit,
    "max_length": _limit,
    "eos_token_id": _tokens,
    "pad_token_id": _maybe_token,
}
assert set(_READERS) == {one.name for one in fields(Decoding)}
