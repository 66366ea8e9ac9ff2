"""The proof of translated source: what is compared with its model, and how it is called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fmapper.backends.models import Models
from fmapper.errors import ConversionError, FmapperError
from fmapper.moves.mover import to_numpy
from fmapper.programs.bind import bind
from fmapper.translation.code import identifier
from fmapper.translation.functions.forms import Made
from fmapper.translation.loading import whole_arrays

if TYPE_CHECKING:
    from fmapper.programs.program import Program
    from fmapper.translation.source_file import Source
    from fmapper.verification.files.proof import Proof
    from fmapper.verification.models.trial import Trial


class HalfPrecisionError(ConversionError):
    """The parameters of a model are too coarse for a proof."""


def prove(
    source: Source,
    program: Program,
    model: Any,
    origin: Models,
    target: Models,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    only_evaluation: bool = False,
) -> Proof:
    """Measures the distance of a file's outputs, gradients and five steps from its model's.

    Args:
        source: The file.
        program: The program that it was written from.
        model: The model.
        origin: The adapter of its framework.
        target: The adapter of the file's framework.
        args: What the model is called with, by position.
        kwargs: What it is called with by keyword.
        only_evaluation: Compare nothing but the outputs in evaluation.

    Raises:
        ConversionError: The file does not run; says what the process said.
        HalfPrecisionError: The model has parameters of half precision.
    """
    import numpy as np

    from fmapper.verification.files.proof import File

    _refuse_halves(program, source.name)
    arrays: dict[str, Any] = {}
    by_name = _arguments(source, program, args, kwargs)
    inputs = [_describe(arg, arrays, origin.as_argument, source.objects) for arg in ((), by_name)]
    weights = whole_arrays(program, to_numpy, np.stack)
    file = File(
        source.code, source.name, source.modes, target.name, program.aliases, weights, inputs,
        arrays, origin.sorts_keys, _find_halves(program),
    )  # fmt: skip

    def trial(train: bool) -> Trial:
        return origin.trial(model, args, kwargs, train=train, parts=True)

    return file.prove(trial, only_evaluation=only_evaluation)


def _arguments(
    source: Source, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of the file, by name."""
    keywords = {identifier(name): arg for name, arg in kwargs.items() if _holds_arrays(arg)}
    for name, arg in kwargs.items():  # options such as Linen's keys, where the file draws
        if isinstance(arg, Mapping):
            keywords |= {f"{name}_{key}": value for key, value in arg.items()}
    by_name = {name: keywords[name] for name in source.parameters if name in keywords}
    by_name |= {n: arg for n, arg in zip(source.positional, args, strict=False) if n}
    leaves = bind(program, args, kwargs) if source.leaves else []
    return by_name | {name: leaves[at] for name, at in source.leaves.items()}


_HALVES = ("bfloat16", "float16")


def _find_halves(program: Program) -> str:
    """Returns a dtype of half precision that a model computes in, and where."""
    calls = [
        (dtype, call.source)
        for call in program.graph.walk()
        for dtype, _ in call.result
        if dtype in _HALVES
    ]
    for dtype, place in calls:
        if place and not place.startswith("<"):
            return f"{dtype} at {place}"
    return calls[0][0] if calls else ""


def _refuse_halves(program: Program, name: str) -> None:
    """Raises for parameters whose roundings hide what a proof looks for.

    Raises:
        HalfPrecisionError: There is one; names it.
    """
    for path, array in program.parameters.items():
        dtype = str(array.dtype).rpartition(".")[2]
        if dtype in _HALVES:
            raise HalfPrecisionError(
                f"{name}: {path} is of {dtype}, in which results agree to two or three digits, too "
                "few to compare a file with its model. Translate the model in float32; or write "
                "this one for evaluation, without a proof, by fmapper.source"
            )


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return any(map(_holds_arrays, value))
    return hasattr(value, "shape")


def _describe(
    value: Any, arrays: dict[str, Any], given: Callable[[Any], Any], structure: Any = None
) -> Any:
    """Encodes arguments as JSON; arrays go to `arrays`, objects are those in the structure.

    Raises:
        ConversionError: It holds another object of a class of its own.
    """
    if isinstance(structure, Made):
        held = {key: getattr(value, key) for key in structure}
        return {"record": structure.cls, "held": _describe(held, arrays, given, {**structure})}
    if value is None or isinstance(value, str | bool) or isinstance(structure, int | float):
        return value
    if isinstance(value, Mapping):
        inner = structure if isinstance(structure, Mapping) else {}
        return {
            "dict": {
                str(key): _describe(one, arrays, given, inner.get(str(key)))
                for key, one in value.items()
            }
        }
    if isinstance(value, tuple | list):
        items = structure if isinstance(structure, tuple) else ()
        pairs = itertools.zip_longest(value, items[: len(value)])
        return [_describe(one, arrays, given, inner) for one, inner in pairs]
    try:
        array = to_numpy(given(value))
    except FmapperError as error:
        raise ConversionError(f"a file cannot be given a {type(value).__name__}: {error}") from None
    number = sum(key.startswith("input.") for key in arrays)
    arrays[f"input.{number}"] = array
    return {"array": number}
