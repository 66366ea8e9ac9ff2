"""`generator`: a model that generates text in another framework."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.discovery import get_adapter, known_frameworks
from fmapper.backends.models import Models
from fmapper.errors import (
    BackendUnavailableError,
    ConversionError,
    ConversionWarning,
    ProgramInputError,
)
from fmapper.generation import prompts
from fmapper.generation.decoding import Decoding, options_of
from fmapper.generation.generation import Generation
from fmapper.programs.steps import find_target, user_lowerings
from fmapper.progress import step
from fmapper.suggest import did_you_mean
from fmapper.tracebacks import short_traceback
from fmapper.verification.models.owners import source_of
from fmapper.verification.models.turns import in_turn
from fmapper.warn import warn

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules


class Generated(NamedTuple):
    """Tokens with the scores by which they were chosen.

    Attributes:
        tokens: Prompts and answers, as returned by a call without `scores=True`.
        scores: The processed logits from which each new token was chosen, of shape (rows, new
            tokens, vocabulary). With beams: the score of each text, of shape (rows,).
    """

    tokens: Any
    scores: Any


class Generator(ABC):
    """A text generator: a call with prompts returns the prompts followed by their answers.

    Attributes:
        generation: The programs of the model, and facts about it.
        decoding: The decoding options, which a call can override.
    """

    def __init__(self, generation: Generation, decoding: Decoding) -> None:
        self.generation = generation
        self.decoding = decoding

    @property
    def batch(self) -> int:
        """The largest number of prompts in a call."""
        return self.generation.batch // self.decoding.copies

    @property
    def max_length(self) -> int:
        """The number of tokens that the cache holds."""
        return self.generation.max_length

    @short_traceback
    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        key: Any = None,
        scores: bool = False,
        **options: Any,
    ) -> Any:
        """Returns prompts and answers, of shape (rows, width of the prompts + new tokens).

        A stopped row is filled with `pad_token_id`; the array ends when all rows have stopped.
        There are `num_return_sequences` rows for each prompt.

        Args:
            input_ids: Tokens of the prompts, of shape (rows, width), padded on the left; or a list
                of lists or arrays of unequal lengths.
            attention_mask: 1 where there is a token, 0 for padding.
            key: The random key for `do_sample=True`. The numbers of a row depend only on the key
                and the index of the row, not on other rows.
            scores: Whether to return a `Generated`, which includes scores.
            options: Decoding options for this call, see `Decoding`. `eos_token_id` may be a list of
                lists: the stop tokens of each row.

        Raises:
            ProgramInputError: The generator does not accept the prompts; says why.
            ConversionError: Options are incompatible; or `key` or a sampling option is passed
                without `do_sample`, so that it would have no effect.
        """
        decoding, stops = self._settings(options, key)
        given = prompts.read(self.generation, decoding, input_ids, attention_mask)
        self._check_stops(stops, len(given.tokens) // decoding.copies)
        count = self._count(decoding, given)
        return self._run(given, decoding, stops, count, key, scores)

    @short_traceback
    def stream(
        self, input_ids: Any, attention_mask: Any = None, *, key: Any = None, **options: Any
    ) -> Iterator[Any]:
        """Yields the new tokens as they are generated, one per row, of shape (rows,).

        Arguments and tokens are those of a call.

        Raises:
            ProgramInputError: As for a call; or beam search was requested.
        """
        decoding, stops = self._settings(options, key)
        given = prompts.read(self.generation, decoding, input_ids, attention_mask)
        self._check_stops(stops, len(given.tokens) // decoding.copies)
        if decoding.num_beams > 1:
            raise ProgramInputError(
                f"{self.generation.name}: beam search knows its text only at the end. Call the "
                "generator, or pass num_beams=1."
            )
        return self._stream(given, decoding, stops, self._count(decoding, given), key)

    def with_options(self, **options: Any) -> Generator:
        """Returns a generator with the same programs and arrays, but other settings."""
        decoding = self.decoding.with_options(options)
        decoding.check_effect(options)
        return self._with(decoding=decoding)

    @abstractmethod
    def _run(
        self,
        given: prompts.Prompts,
        decoding: Decoding,
        stops: Any,
        count: int,
        key: Any,
        scores: bool,
    ) -> Any:
        """Returns tokens, or `Generated`."""

    @abstractmethod
    def _stream(
        self, given: prompts.Prompts, decoding: Decoding, stops: Any, count: int, key: Any
    ) -> Iterator[Any]:
        """Yields tokens."""

    @abstractmethod
    def _with(self, *, decoding: Decoding) -> Generator:
        """Returns this generator with other settings."""

    @abstractmethod
    def replace(self, *, params: Any = None, buffers: Any = None) -> Generator:
        """Returns this generator with other arrays.

        Args:
            params: Arrays by name, or a converted model with such arrays.
            buffers: Other arrays by name.
        """

    @abstractmethod
    def live_arrays(self) -> dict[str, Any]:
        """Returns the arrays in memory, by the names of the model."""

    @abstractmethod
    def layout(self) -> Rules:
        """Returns the rules from the model's arrays to the stored ones."""

    @abstractmethod
    def hold(self, arrays: Mapping[str, Any]) -> None:
        """Replaces the stored arrays, for later calls.

        Args:
            arrays: All arrays of `live_arrays`, in the same layouts.
        """

    @abstractmethod
    def as_generation(self) -> Generation:
        """Returns the programs with the arrays of this generator, for saving."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes programs, arrays and settings to one safetensors file."""
        from fmapper.generation.file import save_generation

        save_generation(self.as_generation(), self.decoding, path)

    @staticmethod
    def load(path: str | os.PathLike[str], to: str | None = None, **options: Any) -> Generator:
        """Returns the generator in a file; the original model is not needed.

        Raises:
            ProgramFileError: The file holds no generator, or is damaged.
        """
        from fmapper.generation.file import load_generation

        target = _target(to)
        _check_names(target, options)
        return make(load_generation(path), target, options)

    def _settings(self, options: dict[str, Any], key: Any) -> tuple[Decoding, Any]:
        """Returns the settings of a call, and the stop tokens of each row if they differ."""
        stops = options.get("eos_token_id")
        if isinstance(stops, list | tuple) and stops and isinstance(stops[0], list | tuple):
            options = options | {"eos_token_id": [t for row in stops for t in row]}
        else:
            stops = None
        decoding = self.decoding.with_options(options)
        decoding.check()
        decoding.check_effect(options, key)
        return decoding, stops

    def _check_stops(self, stops: Any, rows: int) -> None:
        """Checks that stop tokens per row are passed for every prompt.

        Raises:
            ProgramInputError: The numbers of rows differ.
        """
        if stops is not None and len(stops) != rows:
            raise ProgramInputError(
                f"{self.generation.name}: eos_token_id has stop tokens for {len(stops)} rows, but "
                f"there are {rows} prompts. Pass a list for each, which may be empty."
            )

    def _count(self, decoding: Decoding, given: prompts.Prompts) -> int:
        """Returns the largest number of new tokens.

        Raises:
            ProgramInputError: The cache cannot hold that many.
        """
        start = len(self.generation.start) or given.tokens.shape[1]
        room = self.max_length - start
        count = decoding.max_new_tokens
        if count is None and decoding.max_length is not None:
            count = max(0, decoding.max_length - start)
            return min(count, room)
        if count is None:
            return room
        if count > room:
            raise ProgramInputError(
                f"{self.generation.name}: max_new_tokens={count} after {start} tokens exceeds the "
                f"cache, max_length={self.max_length}. Request {room}, or create the generator "
                f"with max_length={start + count}."
            )
        return count


@short_traceback
def generator(
    model: Any,
    *,
    max_length: int,
    batch: int = 1,
    to: str | None = None,
    check: bool = True,
    **options: Any,
) -> Generator:
    """Creates a text generator that runs a model in another framework.

    Its programs for a prompt and for one more token are recorded once each, with a cache of fixed
    size. Prompts are padded to a few lengths, for each of which a program is compiled; all later
    tokens share one program.

    Args:
        model: A model of transformers that has `generate`: causal, or with an encoder. Or a
            `torch.nn.Module` with two methods: `prefill(tokens, mask)` takes the tokens of prompts
            that are padded on the left and a mask, 1 for tokens, both of shape (batch, columns);
            `step(tokens, cache)` takes one token per row. Each returns the logits, of shape (batch,
            vocabulary), and the cache: tuples, lists and dicts of tensors with constant shapes. Or
            a folder in the Hub's layout, as for `from_pretrained`, whose `generation_config.json`
            has the decoding options.
        max_length: The number of tokens that the cache holds, including the prompt.
        batch: The maximal number of prompts per call, with the number of beams or answers per
            prompt in `options`.
        to: The framework that computes; None for the one that can.
        check: Whether to compare the recording with the model.
        options: Decoding options, see `Decoding`, that override the model's own
            `generation_config`; and options of the framework.

    Raises:
        ConversionError: The model cannot be recorded, or an option is not supported.
    """
    for name, value in (("max_length", max_length), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
            raise ConversionError(f"{name}={value!r} must be an integer, at least 1")
    max_length, batch = int(max_length), int(batch)
    if max_length < 2:
        raise ConversionError("max_length=1 leaves no room for a new token")
    Decoding().with_options(options_of(options))  # raises before the slow recording
    target = _target(to)
    _check_names(target, options)
    if isinstance(model, str | os.PathLike):
        from fmapper.checkpoints.pretrained import from_pretrained

        model = from_pretrained(model, None)
    source = source_of(model)
    if source is None:
        raise ConversionError(
            f"{type(model).__name__} is not a model of a loaded framework, so no generator can be "
            f"created from it"
        )
    with step(f"recording {type(model).__name__} for {target.name}"):
        generation = _record(source, target, model, max_length, batch, check, options_of(options))
    return make(generation, target, options)


@in_turn
def _record(
    source: Models,
    target: Models,
    model: Any,
    max_length: int,
    batch: int,
    check: bool,
    options: dict[str, Any],
) -> Generation:
    whole = target.lowers_whole(user_lowerings(target))
    return source.export_generation(
        model, max_length=max_length, batch=batch, check=check, whole=whole, options=options
    )


@in_turn
def make(generation: Generation, target: Models, options: dict[str, Any]) -> Generator:
    """Builds the generator of a target framework, and warns of settings that have no effect.

    Raises:
        ConversionError: Options are incompatible or unsupported.
    """
    settings = options_of(options)
    others = {name: value for name, value in options.items() if name not in settings}
    decoding = generation.decoding.with_options(settings)
    decoding.check()
    decoding.check_effect(settings)
    left = [line for line in generation.unsupported if line.partition("=")[0] not in settings]
    if left:
        lines = "\n".join(f"  {line}" for line in left)
        warn(
            f"{generation.name}: its generation_config requests unsupported options:\n{lines}",
            ConversionWarning,
        )
    return target.from_generation(generation, decoding, user_lowerings(target), **others)


def _check_names(target: Models, options: Mapping[str, Any]) -> None:
    """Checks that every option is one of decoding, or of the target.

    Raises:
        TypeError: An option does not exist.
    """
    accepted = target.conversion_options
    others = [name for name in options if name not in options_of(options)]
    if accepted is not None and any(name not in accepted for name in others):
        name = next(name for name in others if name not in accepted)
        names = [*accepted, *(field.name for field in fields(Decoding))]
        raise TypeError(f"there is no option {name!r}.{did_you_mean(name, names)}")


def _target(to: str | None) -> Models:
    """Returns the target framework.

    Raises:
        BackendUnavailableError: No installed framework supports generators.
    """
    if to is not None:
        target, variant = find_target(to)
        if variant or not _generates(target):
            raise BackendUnavailableError(f"{to} has no generators")
        return target
    for name in known_frameworks():
        try:
            adapter = get_adapter(name, Models)
        except BackendUnavailableError:
            continue
        if _generates(adapter):
            return adapter
    raise BackendUnavailableError("no installed framework supports generators")


def _generates(adapter: Models) -> bool:
    return type(adapter).from_generation is not Models.from_generation
