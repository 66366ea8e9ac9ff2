"""Programs as files: one file in the safetensors format, with the calls in its metadata.

The arrays are stored under the names of the state dict, so any reader of safetensors gets the
weights. The format is that of https://huggingface.co/docs/safetensors: eight bytes with the length
of a JSON header, the header, and the arrays one after the other. The library of that name is not
used: its functions for NumPy have no float8, and do not place arrays where JAX can take them over.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fmapper._errors import ConversionError
from fmapper._move import to_numpy
from fmapper._program import (
    Call,
    DType,
    Graph,
    Input,
    Output,
    Parameter,
    Program,
    Ref,
    Scalar,
    Size,
)
from fmapper._trees import TreeSpec

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
_PLAIN = {Call, Input, Output, Parameter, Scalar, Size, TreeSpec}


def save_program(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes a program and its arrays to a file, from which `load_program` reads it.

    Neither the framework that it comes from nor the one that it runs in is needed to read it.

    Args:
        program: The program; its arrays may be of any backend.
        path: The file, by custom with the ending `.safetensors`. It is replaced as a whole.

    Raises:
        ConversionError: An array has a dtype that the format lacks.
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
        "program": _encode_program(program),
        "parameters": list(program.parameters),
        "buffers": list(program.buffers),
        "constants": list(program.constants),
    }
    if program.evaluation is not None:
        about["evaluation"] = _encode_program(program.evaluation)
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
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for array in arrays.values():
                file.write(_bytes(array))
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def load_program(path: str | os.PathLike[str]) -> Program:
    """Reads a program that `save_program` has written; `convert(program, "jax")` makes it run.

    Returns:
        The program, with NumPy arrays.

    Raises:
        ConversionError: The file is none of a program, or is damaged.
    """
    import numpy as np

    source = Path(path)
    with source.open("rb") as file:
        header, begin = _header(file, source)
        metadata = header.pop("__metadata__", {})
        if _KEY not in metadata:
            raise ConversionError(f"{source}: holds arrays, but no program of fmapper's")
        about = json.loads(metadata[_KEY])
        if about["version"] > _VERSION:
            raise ConversionError(
                f"{source}: written by a later fmapper, as version {about['version']} of the format"
            )
        arrays = {}
        for name, dtype, shape, start, end in list(_checked(header, source, begin)):
            file.seek(begin + start)
            data = file.read(end - start)
            arrays[name] = np.frombuffer(data, _numpy_dtype(dtype)).reshape(shape)
    program = _decode_program(about["program"])
    program.parameters = {name: arrays[name] for name in about["parameters"]}
    program.buffers = {name: arrays[name] for name in about["buffers"]}
    program.constants = {name: arrays[_CONSTANT + name] for name in about["constants"]}
    if "evaluation" in about:
        program.evaluation = _decode_program(about["evaluation"])
        program.evaluation.constants = {
            name: arrays[_IN_EVALUATION + name] for name in about["evaluation_constants"]
        }
    return program


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


def _header(file: Any, source: Path) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(file.read(8), "little")
    if size > min(_MOST_HEADER, source.stat().st_size):
        raise ConversionError(f"{source}: is no safetensors file: its header would be too long")
    try:
        header = json.loads(file.read(size))
    except ValueError as error:
        raise ConversionError(f"{source}: is no safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise ConversionError(f"{source}: is no safetensors file: its header is no object")
    return header, 8 + size


def _checked(
    header: Mapping[str, Any], source: Path, begin: int
) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """The arrays of a header, which must lie one after the other and end with the file."""
    position = 0
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    for name, entry in entries:
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = _NAMES.get(entry["dtype"])
        if dtype is None:
            raise ConversionError(f"{source}: {name} is of an unknown dtype {entry['dtype']}")
        size = math.prod(shape) * _numpy_dtype(dtype).itemsize
        if start != position or end - start != size or any(s < 0 for s in shape):
            raise ConversionError(
                f"{source}: is damaged at {name}: its place does not fit its size"
            )
        position = end
        yield name, dtype, shape, start, end
    if begin + position != source.stat().st_size:
        raise ConversionError(f"{source}: is damaged: it is longer or shorter than its header says")


# --- the program as JSON --------------------------------------------------------------------------


def _encode_program(program: Program) -> dict[str, Any]:
    left_out = {"parameters", "buffers", "constants", "evaluation"}
    return {
        field.name: _encode(getattr(program, field.name))
        for field in fields(program)
        if field.name not in left_out
    }


def _decode_program(data: Mapping[str, Any]) -> Program:
    return Program(**{name: _decode(value) for name, value in data.items()})


def _encode(value: Any) -> Any:
    """Plain JSON; what JSON lacks is an object with one key, which says what it is."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_encode(value.real), _encode(value.imag)]}
    if isinstance(value, tuple | list):
        return [_encode(inner) for inner in value]
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, Graph):
        parts = (value.inputs, tuple(value.calls), value.outputs, value.kinds)
        return {"graph": [_encode(part) for part in parts]}
    if isinstance(value, Mapping):
        return {"map": [[_encode(key), _encode(inner)] for key, inner in value.items()]}
    if type(value) in _PLAIN:
        return {type(value).__name__: [_encode(getattr(value, f.name)) for f in fields(value)]}
    raise ConversionError(f"{type(value).__name__} cannot be written to a file")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_decode(inner) for inner in data)
    if not isinstance(data, dict):
        return data
    ((what, value),) = data.items()
    if what == "map":
        return {_decode(key): _decode(inner) for key, inner in value}
    if what == "graph":
        inputs, calls, *rest = map(_decode, value)
        return Graph(inputs, list(calls), *rest)
    simple = {"ref": Ref, "dtype": DType, "float": float}
    if what in simple:
        return simple[what](value)
    parts = _decode(value)
    if what == "complex":
        return complex(*parts)
    return next(cls for cls in _PLAIN if cls.__name__ == what)(*parts)
