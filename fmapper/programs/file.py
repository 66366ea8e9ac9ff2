"""Programs as files: one file in the safetensors format, with the calls in its metadata.

The arrays are stored under the names of the state dict, so any reader of safetensors gets the
weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fmapper.errors import ConversionError, ProgramFileError
from fmapper.files.arrays import read_arrays, write_arrays
from fmapper.files.bounded_json import MOST_PROGRAM, read_json
from fmapper.files.safetensors import Header, read_header
from fmapper.files.untrusted import Misfit, open_regular, path_problem, show, within
from fmapper.moves.mover import to_numpy
from fmapper.programs.file_grammar import check_array_name, check_program, check_shape
from fmapper.programs.file_json import decode_program, encode_program
from fmapper.programs.program import Program
from fmapper.progress import step
from fmapper.tracebacks import short_traceback

T = TypeVar("T")

_KEY = "fmapper.program"
_TARGET = "fmapper.target"
_LONGEST_TARGET = 100
_VERSION = 1
_CONSTANT = "constant/"
_IN_EVALUATION = "evaluation/constant/"


@short_traceback
def save_program(program: Program, path: str | os.PathLike[str], *, to: str | None = None) -> None:
    """Writes a program and its arrays to a file, from which `load` and `load_program` read it.

    Reading it requires neither the framework of its source nor one to run it.

    Args:
        program: The program; its arrays may be of any backend.
        path: The file, usually with the ending `.safetensors`. It is replaced as a whole: the new
            file is beside it as `NAME.PID-THREAD.tmp` until it is complete. The next `save` to this
            path removes the remains of a killed process.
        to: The target to which `load` converts the program by default.

    Raises:
        ConversionError: An array has a dtype that the format lacks, no file can have this name, or
            the program belongs to a converted model, which holds the arrays itself.
    """
    if not isinstance(program, Program):
        raise TypeError(
            f"save_program takes a Program, not a {type(program).__name__}. Save a converted "
            f"model with model.save(path); load_program reads both."
        )
    program.check_has_arrays()
    write_file(program, path, {} if to is None else {_TARGET: {"to": to}})


def write_file(
    program: Program, path: str | os.PathLike[str], notes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Writes a program to a file, with notes: plain data under another key.

    Raises:
        ConversionError: An array has a dtype that the format lacks, or no file can have this name.
    """
    arrays: dict[str, Any] = to_numpy(
        {
            **program.parameters,
            **program.buffers,
            **{_CONSTANT + name: array for name, array in program.constants.items()},
            **{_IN_EVALUATION + name: array for name, array in _in_evaluation(program).items()},
        }
    )
    about = {
        "version": _VERSION,
        "program": encode_program(program),
        "parameters": list(program.parameters),
        "buffers": list(program.buffers),
        "constants": list(program.constants),
    }
    if program.evaluation is not None:
        about["evaluation"] = encode_program(program.evaluation)
        about["evaluation_constants"] = list(program.evaluation.constants)
    target = _path(path)
    if not target.name:
        raise ProgramFileError(f"{target}: is a folder; a program is saved to a file")
    keyed = [*notes.items(), (_KEY, about)]
    try:
        write_arrays(target, arrays, {key: json.dumps(x, allow_nan=False) for key, x in keyed})
    except Misfit as error:
        raise ConversionError(str(error)) from None


def _path(path: str | os.PathLike[str]) -> Path:
    """Returns the path.

    Raises:
        ProgramFileError: No file can have this name.
    """
    if problem := path_problem(path):
        raise ProgramFileError(problem)
    return Path(path)


@short_traceback
def load_program(path: str | os.PathLike[str]) -> Program:
    """Reads a program that `save_program` has written, for `convert`.

    The file need not be trusted: every field is checked, nothing in it is run, and no file that it
    names is opened. Time and memory are proportional to its length.

    Returns:
        The program, with NumPy arrays.

    Raises:
        ProgramFileError: The file holds no program, or is damaged; says where. No other error
            depends on the contents. Or no file can have this name.
        OSError: The file does not exist, or may not be read.
    """
    return read_file(path, _alone)


def _alone(program: Program, metadata: Mapping[str, Any]) -> Program:
    """Returns a program from a file without notes."""
    for key in metadata:
        if key.startswith("fmapper.") and key not in (_KEY, _TARGET):
            raise Misfit(f"contains more than a program: {show(key)} has its own reader")
    return program


def holds_program(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a safetensors file with this metadata holds a program."""
    return _KEY in metadata


@short_traceback
def load_model(path: str | os.PathLike[str], to: str | None = None) -> Any:
    """Reads a program from a file and converts it to a target.

    Args:
        path: The file.
        to: The target; None for the one for which the file was written.

    Raises:
        ProgramFileError: The file holds no program, holds more than one, or names no target.
        UnsupportedOpsError: The program has operations without a lowering.
        BackendUnavailableError: The target does not exist, or is not installed.
    """
    from fmapper.programs.convert import convert_with_arrays  # it imports this module

    program, target = read_file(path, lambda *parts: (_alone(*parts), _target_in(parts[1])))
    if to is None and target is None:
        raise ProgramFileError(
            f"{path}: holds a program that was saved for no particular framework: pass to=, such "
            "as to='torch', for its model, or read it with load_program"
        )
    return convert_with_arrays(program, to or target or "", (), None)


def _target_in(metadata: Mapping[str, Any]) -> str | None:
    """Returns the target that the metadata of a file names."""
    if _TARGET not in metadata:
        return None
    with within(_TARGET):
        about = read_json(metadata[_TARGET])
        target = about.get("to") if type(about) is dict else None
        if type(target) is not str or not target.isidentifier() or len(target) > _LONGEST_TARGET:
            raise Misfit(f"{show(target)} is not the name of a target")
        return target


def read_file(path: str | os.PathLike[str], make: Callable[[Program, Mapping[str, Any]], T]) -> T:
    """Reads a program and its notes from a file, and returns the result of `make` for them.

    Args:
        path: The file.
        make: Takes the program and the metadata, as texts by key; may raise `Misfit`.

    Raises:
        ProgramFileError: The file holds no program, or is damaged; says where.
        OSError: The file does not exist, or may not be read.
    """
    source = _path(path)
    try:
        with open_regular(source) as file, step(f"reading {source.name}"):
            return make(*_read(file, os.fstat(file.fileno()).st_size))
    except Misfit as error:
        raise ProgramFileError(f"{source}: {error}") from None


def read_program(file: BinaryIO, size: int) -> Program:
    """Reads the program from an open file of `size` bytes.

    Raises:
        Misfit: It holds no program, or is damaged.
    """
    return _read(file, size)[0]


def _read(file: BinaryIO, size: int) -> tuple[Program, Mapping[str, Any]]:
    try:
        return _program(file, size)
    except RecursionError:  # the caller is already deep in the stack
        raise Misfit("is nested too deeply") from None


def _program(file: BinaryIO, size: int) -> tuple[Program, Mapping[str, Any]]:
    header = read_header(file, size)
    metadata = header.metadata
    if type(metadata.get(_KEY)) is not str:
        raise Misfit("contains arrays, but no program of fmapper")
    with within(_KEY):
        about = read_json(metadata[_KEY], MOST_PROGRAM)
        if type(about) is not dict or type(about.get("version")) is not int:
            raise Misfit("has no version")
        if about["version"] > _VERSION:
            raise Misfit(
                f"was written by a newer fmapper, as version {show(about['version'])} of the format"
            )
        program = _decode(about, "program")
        if "evaluation" in about:
            program.evaluation = _decode(about, "evaluation")
    arrays = _arrays(file, header, _names(about))
    program.parameters = _arrays_by_name(about, "parameters", arrays)
    program.buffers = _arrays_by_name(about, "buffers", arrays)
    program.constants = _arrays_by_name(about, "constants", arrays, _CONSTANT)
    if program.evaluation is not None:
        program.evaluation.constants = _arrays_by_name(
            about, "evaluation_constants", arrays, _IN_EVALUATION
        )
    with within("program"):
        check_program(program)
    return program, metadata


def _decode(about: Mapping[str, Any], key: str) -> Program:
    with within(key):
        return decode_program(about.get(key))


def _arrays_by_name(
    about: Mapping[str, Any], key: str, arrays: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Returns the arrays that a list of the program names."""
    names = about.get(key)
    with within(key):
        if type(names) is not list:
            raise Misfit("is not a list of names")
        named = {}
        for i, name in enumerate(names):
            if type(name) is not str or prefix + name not in arrays or name in named:
                raise Misfit(f"there is no array {show(name)}, or it occurs twice", i)
            named[name] = arrays[prefix + name]
    return named


def _in_evaluation(program: Program) -> Mapping[str, Any]:
    return {} if program.evaluation is None else program.evaluation.constants


def _names(about: Mapping[str, Any]) -> set[str]:
    """Returns the arrays that a program names; errors in it are reported later."""
    named = set()
    for key, prefix in (
        ("parameters", ""),
        ("buffers", ""),
        ("constants", _CONSTANT),
        ("evaluation_constants", _IN_EVALUATION),
    ):
        names = about.get(key)
        if type(names) is list:
            named |= {prefix + name for name in names if type(name) is str}
    return named


def _arrays(file: BinaryIO, header: Header, wanted: Collection[str]) -> dict[str, Any]:
    """Reads the requested arrays of a header; the file may hold others, of any size."""
    for name, entry in header.entries.items():
        with within(ascii(name)[1:-1][:60]):
            check_array_name(name)
            check_shape(entry.shape, fixed=True)
    return read_arrays(file, {n: entry for n, entry in header.entries.items() if n in wanted})
