"""Generators as files: program files with a second program and the decoding options.

The program of a step is stored like one for evaluation: it has its own constants, and shares
parameters and buffers with the other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fmapper.errors import ConversionError
from fmapper.files.bounded_json import read_json
from fmapper.files.untrusted import Misfit, show
from fmapper.generation.decoding import Decoding
from fmapper.generation.generation import Generation
from fmapper.programs.file import read_file, write_file
from fmapper.programs.program import Program
from fmapper.programs.treespec import Ref, TreeSpec
from fmapper.tracebacks import short_traceback

_KEY = "fmapper.generator"
_VERSION = 1
_MOST = 1 << 28  # positions of tokens in all rows together
_MOST_TOKENS = 1 << 20  # tokens of a list
_LONGEST_NAME = 200


def save_generation(
    generation: Generation, decoding: Decoding, path: str | os.PathLike[str]
) -> None:
    """Writes the programs, arrays and settings of a generator to one file.

    Raises:
        ConversionError: An array has a dtype that the format lacks.
    """
    first = generation.prefill
    program = generation.step
    if first is not None:
        rest = replace(generation.step, parameters={}, buffers={})
        program = replace(first, evaluation=rest)
    about = {
        "version": _VERSION,
        "has_prefill": first is not None,
        "max_length": generation.max_length,
        "batch": generation.batch,
        "vocabulary": generation.vocabulary,
        "columns": generation.columns,
        "padding": generation.padding,
        "start": list(generation.start),
        "lengths": list(generation.lengths),
        "decoding": {name: _as_lists(value) for name, value in asdict(decoding).items()},
    }
    if generation.name:
        about["name"] = generation.name
    if generation.counts_padding:  # missing in older files
        about["counts_padding"] = True
    write_file(program, path, {_KEY: about})


@short_traceback
def load_generation(path: str | os.PathLike[str]) -> Generation:
    """Reads a file that `save_generation` has written.

    The file need not be trusted; see `load_program`.

    Raises:
        ProgramFileError: The file holds no generator, or is damaged; says where.
    """
    return read_file(path, _generation)


def _generation(program: Program, metadata: Mapping[str, Any]) -> Generation:
    if type(metadata.get(_KEY)) is not str:
        raise Misfit("contains a program, not a generator: read it with load_program")
    about = read_json(metadata[_KEY])
    if type(about) is not dict or _get(about, "version", int) != _VERSION:
        raise Misfit("has an unsupported version", _KEY)
    has_prefill = _get(about, "has_prefill", bool)
    if has_prefill != (program.evaluation is not None):
        raise Misfit("does not contain the number of programs that it declares", _KEY)
    padding = _get(about, "padding", str)
    if padding not in ("left", "right"):
        raise Misfit(f"{show(padding)} is neither left nor right", _KEY)
    vocabulary = _size(about, "vocabulary")
    generation = Generation(
        prefill=replace(program, evaluation=None) if has_prefill else None,
        step=program if program.evaluation is None else program.evaluation,
        decoding=_read_decoding(_get(about, "decoding", dict), vocabulary),
        unsupported=(),
        max_length=_size(about, "max_length"),
        batch=_size(about, "batch"),
        vocabulary=vocabulary,
        columns=_size(about, "columns"),
        padding=padding,
        start=_integers(about, "start", vocabulary),
        counts_padding=_get({"counts_padding": False, **about}, "counts_padding", bool),
        lengths=_integers(about, "lengths", _MOST),
        name=_read_name(about, program.name),
    )
    if (
        generation.max_length * generation.batch > _MOST
        or generation.columns * generation.batch > _MOST
    ):
        raise Misfit("the cache is too large for any memory", _KEY)
    if generation.lengths != tuple(sorted({*generation.lengths} - {0})):
        raise Misfit("the lengths are not in order", _KEY)
    if len(generation.start) >= generation.max_length:
        raise Misfit("the cache has no room after the first tokens", _KEY)
    _check_together(generation)
    return generation


def _get(about: Mapping[str, Any], key: str, kind: type) -> Any:
    if type(about.get(key)) is not kind:
        raise Misfit(f"{key} has the invalid value {show(about.get(key))}", _KEY)
    return about[key]


def _size(about: Mapping[str, Any], key: str) -> int:
    value: int = _get(about, key, int)
    if not 0 < value < _MOST:
        raise Misfit(f"{key} has the invalid value {value}", _KEY)
    return value


def _integers(about: Mapping[str, Any], key: str, below: int) -> tuple[int, ...]:
    values = _get(about, key, list)
    if len(values) > _MOST_TOKENS or not all(type(v) is int and 0 <= v < below for v in values):
        raise Misfit(f"{key} is not a list of numbers below {below}", _KEY)
    return tuple(values)


def _read_name(about: Mapping[str, Any], otherwise: str) -> str:
    name: str = _get({"name": otherwise, **about}, "name", str)  # missing in older files
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise Misfit("name is too long, or contains control characters", _KEY)
    return name


def _read_decoding(given: Mapping[str, Any], vocabulary: int) -> Decoding:
    if not set(given) <= set(asdict(Decoding())):  # older files have fewer
        raise Misfit("the decoding options have unexpected names", _KEY)
    if any(type(v) is list and len(v) > _MOST_TOKENS for v in given.values()):
        raise Misfit("a list of tokens is too long", _KEY)
    try:
        decoding = Decoding().with_options(given)
        decoding.check()
    except (TypeError, ValueError, ConversionError) as error:
        raise Misfit(str(error), _KEY) from None
    return decoding


def _as_lists(value: Any) -> Any:
    return list(map(_as_lists, value)) if isinstance(value, tuple) else value


def _check_together(generation: Generation) -> None:
    """Checks that the outputs of one program match the inputs of the other.

    Raises:
        Misfit: They do not.
    """
    step = generation.step
    cache = _part(step.in_spec, 0, 1)
    users = [i for i in step.inputs if i.kind == "user"]
    if any(i.kind == "static" for i in step.inputs) or not users or cache is None:
        raise Misfit("the program of a step has inputs other than a token and a cache")
    if users[0].shape != (generation.batch,) or len(users) != 1 + len(cache.leaf_paths()):
        raise Misfit("the program of a step has another batch size")
    columns = (
        [i for i in generation.prefill.inputs if i.kind == "user"] if generation.prefill else []
    )
    for program in filter(None, (generation.prefill, step)):
        if program.out_spec.kind != "dict" or program.out_spec.keys != ("logits", "cache"):
            raise Misfit("a program does not return logits and a cache")
        if program.out_spec.children[0].kind != "leaf" or program.out_spec.children[1] != cache:
            raise Misfit("the cache that a program returns differs from the one that a step takes")
        logits = {call.name: call.result for call in program.graph.calls}.get(
            _name_of_logits(program)
        )
        if not logits or logits[0][1] != (generation.batch, generation.vocabulary):
            raise Misfit(
                "a program returns logits of a different shape than the generator declares"
            )
        if any(output.kind != "user" for output in program.outputs):
            raise Misfit("a program changes the model")
    if generation.prefill and (len(columns) != 2 or columns[0].shape != columns[1].shape):
        raise Misfit("the program of a prompt has inputs other than tokens and a mask")


def _name_of_logits(program: Program) -> str:
    first = program.graph.outputs[0] if program.graph.outputs else None
    return first.name if isinstance(first, Ref) else ""


def _part(spec: TreeSpec, *at: int) -> TreeSpec | None:
    for i in at:
        if i >= len(spec.children):
            return None
        spec = spec.children[i]
    return spec
