"""Programs as files: one file in the safetensors format, with the calls in its metadata.

The arrays are stored under the names of the state dict, so any reader of safetensors gets the
weights. The format is that of https://huggingface.co/docs/safetensors: eight bytes with the length
of a JSON header, the header, and the arrays one after the other. The library of that name is not
used: its functions for NumPy have no float8, and do not place arrays where JAX can take them over.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fmapper.errors import ConversionError, ProgramFileError
from fmapper.moves.mover import to_numpy
from fmapper.programs.file_grammar import check_array_name, check_program, check_shape
from fmapper.programs.file_json import Misfit, decode_program, encode_program, read_json, show
from fmapper.programs.program import Program
from fmapper.progress import step
from fmapper.tracebacks import short_traceback

_KEY = "fmapper.program"
_VERSION = 1
_MOST_HEADER = 100_000_000  # bytes, the limit of the format
_CONSTANT = "constant/"
_IN_EVALUATION = "evaluation/constant/"
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
_NAMES = {code: name for name, code in _DTYPES.items()}


@short_traceback
def save_program(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes a program and its arrays to a file, from which `load_program` reads it.

    Neither the framework that it comes from nor the one that it runs in is needed to read it.

    Args:
        program: The program; its arrays may be of any backend.
        path: The file, by custom with the ending `.safetensors`. It is replaced as a whole: what is
            written lies beside it as `NAME.PID-THREAD.tmp` until it is complete. What a process
            that was killed has left there goes at the next `save` to this path.

    Raises:
        ConversionError: An array has a dtype that the format lacks.
    """
    if not isinstance(program, Program):
        raise TypeError(
            f"save_program takes a Program, and not a {type(program).__name__}: a converted model "
            "saves itself with model.save(path); load_program reads both."
        )
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
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(about, allow_nan=False)}}
    start = 0
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES:
            raise ConversionError(
                f"{name}: safetensors has no {array.dtype.name}; cast it before saving"
            )
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)  # the arrays begin at a multiple of 64, as JAX likes it
    target = Path(path)
    _clean_up(target)
    beside = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    beside.unlink(missing_ok=True)  # of an earlier process of this number
    try:
        with beside.open("xb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for array in arrays.values():
                file.write(_bytes(array))
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


@short_traceback
def load_program(path: str | os.PathLike[str]) -> Program:
    """Reads a program that `save_program` has written; `convert(program, "jax")` makes it run.

    The file may be of anybody: every field is checked, nothing in it is run, and nothing that it
    names is opened. Time and memory are in proportion to its length.

    Returns:
        The program, with NumPy arrays.

    Raises:
        ProgramFileError: The file holds no program, or is damaged; says where. The only error,
            whatever is in the file.
        OSError: There is no file of this name, or it may not be read.
    """
    source = Path(path)
    try:
        with _open_regular(source) as file, step(f"reading {source.name}"):
            return read_program(file, os.fstat(file.fileno()).st_size)
    except Misfit as error:
        raise ProgramFileError(f"{source}: {error}") from None


def read_program(file: BinaryIO, size: int) -> Program:
    """Returns the program in a file that is open and has so many bytes.

    Raises:
        Misfit: It holds none, or is damaged.
    """
    try:
        return _program(file, size)
    except RecursionError:  # whoever calls this is deep down the stack already
        raise Misfit("is nested too deeply") from None


def _program(file: BinaryIO, size: int) -> Program:
    header, begin = _header(file, size)
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or type(metadata.get(_KEY)) is not str:
        raise Misfit("holds arrays, but no program of fmapper's")
    with _within(_KEY):
        about = read_json(metadata[_KEY])
        if type(about) is not dict or type(about.get("version")) is not int:
            raise Misfit("has no version")
        if about["version"] > _VERSION:
            raise Misfit(
                f"written by a later fmapper, as version {show(about['version'])} of the format"
            )
        program = _decode(about, "program")
        if "evaluation" in about:
            program.evaluation = _decode(about, "evaluation")
    arrays = _arrays(file, header, begin, size)
    program.parameters = _arrays_by_name(about, "parameters", arrays)
    program.buffers = _arrays_by_name(about, "buffers", arrays)
    program.constants = _arrays_by_name(about, "constants", arrays, _CONSTANT)
    if program.evaluation is not None:
        program.evaluation.constants = _arrays_by_name(
            about, "evaluation_constants", arrays, _IN_EVALUATION
        )
    with _within("program"):
        check_program(program)
    return program


@contextlib.contextmanager
def _within(key: str) -> Iterator[None]:
    try:
        yield
    except Misfit as error:
        error.place.append(key)
        raise


def _decode(about: Mapping[str, Any], key: str) -> Program:
    with _within(key):
        return decode_program(about.get(key))


def _arrays_by_name(
    about: Mapping[str, Any], key: str, arrays: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Returns the arrays that a list of the program names."""
    names = about.get(key)
    with _within(key):
        if type(names) is not list:
            raise Misfit("is not a list of names")
        found = {}
        for i, name in enumerate(names):
            if type(name) is not str or prefix + name not in arrays or name in found:
                raise Misfit(f"there is no array {show(name)}, or it is there twice", i)
            found[name] = arrays[prefix + name]
    return found


@contextlib.contextmanager
def _open_regular(source: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading, if it is one: a pipe would wait, a device never ends."""
    if not stat.S_ISREG(source.stat().st_mode):
        raise Misfit("is not a regular file")
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(source, "rb", opener=lambda path, _: os.open(path, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it was replaced meanwhile
            raise Misfit("is not a regular file")
        yield file


def _clean_up(target: Path) -> None:
    """Removes what processes that are no more have left beside a file."""
    if os.name != "posix":  # elsewhere there is no asking whether a process lives
        return
    left = re.compile(re.escape(target.name) + r"\.(\d{1,9})(?:-\d+)?\.tmp")
    with os.scandir(target.parent) as entries:
        found = [(entry, left.fullmatch(entry.name)) for entry in entries]
    for entry, match in found:
        if match and entry.is_file(follow_symlinks=False) and not _is_alive(int(match[1])):
            with contextlib.suppress(OSError):  # of others, or gone already
                os.unlink(entry.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def _in_evaluation(program: Program) -> Mapping[str, Any]:
    return {} if program.evaluation is None else program.evaluation.constants


def _bytes(array: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _numpy_dtype(name: str) -> Any:
    import numpy as np

    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name).newbyteorder("<")


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8:
        raise Misfit("is not a safetensors file: it is too short")
    if length > min(_MOST_HEADER, size - 8):
        raise Misfit("is not a safetensors file: its header would be too long")
    try:
        header = read_json(file.read(length).decode())
    except (Misfit, UnicodeDecodeError) as error:
        raise Misfit(f"is not a safetensors file: its header {error}") from None
    if type(header) is not dict:
        raise Misfit("is not a safetensors file: its header is not an object")
    return header, 8 + length


def _arrays(file: BinaryIO, header: Mapping[str, Any], begin: int, size: int) -> dict[str, Any]:
    """Returns the arrays of a header, which must lie one after the other and end with the file."""
    entries = []
    for name, entry in header.items():
        with _within(ascii(name)[1:-1][:60]):
            entries.append((*_entry(name, entry), name))
    arrays: dict[str, Any] = {}
    position = 0
    for start, end, dtype, shape, name in sorted(entries, key=lambda entry: entry[:2]):
        wanted = math.prod(shape) * _numpy_dtype(dtype).itemsize
        if begin + end > size:
            break
        if start != position or end - start != wanted:
            raise Misfit(f"is damaged at {show(name)}: its place does not fit its size")
        position = end
        arrays[name] = _array(file, begin + start, wanted, dtype).reshape(shape)
    if begin + position != size:
        raise Misfit("is damaged: it is longer or shorter than its header says")
    return arrays


def _entry(name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """Tells where an array begins and ends, its dtype and its shape."""
    check_array_name(name)
    if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Misfit("is not an array")
    if type(entry["dtype"]) is not str or entry["dtype"] not in _NAMES:
        raise Misfit(f"is of an unknown dtype {show(entry['dtype'])}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if type(shape) is not list or type(offsets) is not list:
        raise Misfit("has no shape, or no place")
    check_shape(tuple(shape), fixed=True)
    if len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise Misfit("has no place")
    return offsets[0], offsets[1], _NAMES[entry["dtype"]], tuple(shape)


def _array(file: BinaryIO, start: int, length: int, dtype: str) -> Any:
    import numpy as np

    file.seek(start)
    data = file.read(length)
    if len(data) != length:
        raise Misfit("is damaged: it became shorter")
    if dtype == "bool" and data.translate(None, b"\0\1"):
        raise Misfit("is damaged: a bool is neither true nor false")
    return np.frombuffer(data, _numpy_dtype(dtype))
