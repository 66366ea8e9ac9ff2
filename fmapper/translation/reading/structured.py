"""Models of the files that are written in the words of their source."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fmapper.backends.models import Models
from fmapper.errors import ConversionError, ConversionWarning
from fmapper.moves.mover import mover_to, to_numpy
from fmapper.programs import check_source
from fmapper.states.state import arrays_by_name, named_arrays
from fmapper.states.transient import transient_in
from fmapper.translation.reading.files import run_file
from fmapper.translation.reading.weights import Place, Weights
from fmapper.translation.source_file import Source
from fmapper.warn import warn

if TYPE_CHECKING:
    from fmapper.translation.source import Transcription


def build_transcribed(
    model: Any,
    source: Models,
    target: Models,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool,
    check: bool,
    arguments: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = "auto",
    scan: bool = False,
) -> Any:
    """Returns a model of a file in the words of its source, with the arrays of that.

    It starts in the mode in which the call of the source runs.

    Args:
        model: The model.
        source: The adapter of its framework.
        target: The adapter of the file's framework.
        args: What it is called with, by position.
        kwargs: What it is called with by keyword.
        train: Whether it must train as the model does.
        check: Whether to compare both in evaluation, and in training if that is asked for or what
            the call does.
        arguments: What its constructor was given, by name; None to find it.
        dynamic_shapes: At which sizes functions of the file are compared; see `source`.
        scan: Whether blocks are called by scans.

    Raises:
        ConversionError: It cannot be written so, or differs; says what and where.
    """
    from fmapper.translation import source as files
    from fmapper.verification.comparison import compare

    name = type(model).__name__
    trains = train or source.has_training(model, args, kwargs)
    modes = {*source.modes(model, args, kwargs).values()} if trains else set()
    if len(modes) > 1:
        raise ConversionError(f"{name}: this call is neither its training nor its evaluation")
    asked = model, target.name, args, kwargs, arguments, dynamic_shapes
    found, *_ = files.transcribe(*asked, scan=scan)
    reason = found.only_evaluation
    if train and reason:
        raise ConversionError(reason)
    made = _make(model, source, target, found, train=True in modes and not reason)
    if check:
        given = model, source, made, target, args, kwargs
        check_source.refuse_difference(*given, train=False)
        if (train or True in modes) and not reason:
            report = compare(model, made, args, dict(kwargs), train=True)
            if not report:
                raise ConversionError(f"{name}: training differs from the model's: {report}")
    target.finish(made, trains=trains and not reason, reason=reason)
    if True in modes and reason:
        warn(
            f"{name} was passed in training mode, but was converted for evaluation alone. "
            f"train=True makes this an error. {reason}",
            ConversionWarning,
        )
    return made


def _make(model: Any, source: Models, target: Models, found: Transcription, *, train: bool) -> Any:
    """Returns the model of a file in a mode."""
    built = Source(found.whole, found.name, Weights(), (0, 0), {})
    built.lacks_training = found.only_evaluation
    space = run_file(built)
    arrays = {key: to_numpy(array) for key, array in found.weights.items()}
    net = sys.modules[space["__name__"]]
    made, _ = target.open_file(net, found.maker, arrays, train=train)
    found.finish(made)
    built.weights = _weights(model, source, target, made, found, space)
    return made


def _weights(
    model: Any,
    source: Models,
    target: Models,
    made: Any,
    found: Transcription,
    space: Mapping[str, Any],
) -> Weights:
    """Returns where the arrays of a model of a file are in its source.

    Raises:
        ConversionError: An array has another dtype than in the source.
    """
    theirs = arrays_by_name(model)
    with warnings.catch_warnings(action="ignore"):  # of what narrows dtypes, as the file does
        moved = mover_to(target)(theirs, strict=False)
    held: dict[int, tuple[str, tuple[int, ...]]] = {}
    aliases = dict(found.aliases)
    for path, array, axes in found.places(made, space):
        name = found.aliases.get(path, path)
        if _block(name, itertools.repeat(0)) not in found.weights:
            continue  # a second path to a part, which the source does not have
        if id(array) in held:
            if name != held[id(array)][0]:
                aliases[name] = held[id(array)][0]
            continue
        held[id(array)] = name, tuple(axes or ())
    weights = Weights(scanned={_own(path, found.scans): n for path, n in found.scans.items()})
    for own, (_, array) in named_arrays(made).items():
        for part, at in weights.blocks_of(own):
            shape = tuple(array.shape)[len(at) :]
            if id(array) not in held:
                name = _BLOCK.sub(r".\1.", part)
                if name in theirs and tuple(moved[name].shape) == shape:  # not saved
                    weights.arrays[part] = Place(name, None, shape)
                continue
            name, axes = held[id(array)]
            name, axes = _block(name, at), tuple(axis - len(at) for axis in axes[len(at) :])
            if axes:
                shape = tuple(shape[axes.index(axis)] for axis in range(len(axes)))
            weights.arrays[part] = Place(name, axes or None, shape)
            if moved[name].dtype != array.dtype:
                raise ConversionError(
                    f"{type(model).__name__}: {name} is of {theirs[name].dtype}, and the file has "
                    f"it in {array.dtype}"
                )
    skipped = transient_in(model)
    weights.aliases, weights.origin = aliases, source.origin_of(model)
    weights.transient = [name for name, array in theirs.items() if id(array) in skipped]
    known = {id(theirs[place.name]) for place in weights.arrays.values()}
    weights.keep_rest({name: moved[name] for name, x in theirs.items() if id(x) not in known})
    return weights


_BLOCK = re.compile(r"\.(\d+)\.block\.")  # of a stack, whose arrays are those of one block


def _block(name: str, numbers: Iterable[int]) -> str:
    """Returns the name in the source of an array of one block, for the `*` of a stack."""
    for number in itertools.islice(numbers, name.count("*")):
        name = name.replace("*", str(number), 1)
    return name


def _own(path: str, scans: Mapping[str, int]) -> str:
    """Returns the path in a model of a list of the source that is a stack there."""
    steps = path.split(".")
    own: list[str] = []
    for at, step in enumerate(steps):
        own += [step, "block"] if ".".join(steps[:at]) in scans else [step]
    return ".".join(own)
