"""The safetensors format: eight bytes with the length of a JSON header, the header, the arrays.

See https://huggingface.co/docs/safetensors. The library of that name is not used: it reads arrays
whole and not in parts, its functions for NumPy have no float8, what it accepts has no bounds but
that of the header, and it does not place arrays where JAX can take them over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from fmapper.files.untrusted import Misfit, read_json, show

MOST_HEADER = 100_000_000  # bytes, the limit of the format
_MOST_ARRAYS = 1_000_000
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 4096
MOST_BYTES = 2**63 - 1  # of an array, sizes that are zero left out: NumPy makes no larger ones
_ALIGNMENT = 64  # arrays begin at multiples of it, as JAX likes it
DTYPES = {
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
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
"""Dtypes that checkpoints hold, by fmapper's name and that of safetensors."""
_NAMES = {code: name for name, code in DTYPES.items()}
_SIZES = {code: int("".join(filter(str.isdigit, code.split("_")[0])) or 8) // 8 for code in _NAMES}


class Entry(NamedTuple):
    """The place, dtype and shape of an array in a file."""

    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Header:
    """The header of a file.

    Attributes:
        entries: The arrays by name, in the order of the header.
        metadata: Texts by name; not checked.
        begin: Where the first array begins.
    """

    entries: dict[str, Entry]
    metadata: dict[str, Any] = field(default_factory=dict)
    begin: int = 0


def read_header(file: BinaryIO, size: int) -> Header:
    """Reads the header of a file of so many bytes, open at its beginning.

    Every array lies behind the one before it, without holes, and the last one ends with the file.

    Raises:
        Misfit: The file is not one, or is damaged.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8:
        raise Misfit("is not a safetensors file: it is too short")
    if length > min(MOST_HEADER, size - 8):
        raise Misfit("is not a safetensors file: its header would be too long")
    try:
        fields = read_json(file.read(length).decode())
    except (Misfit, UnicodeDecodeError) as error:
        raise Misfit(f"is not a safetensors file: its header {error}") from None
    if type(fields) is not dict:
        raise Misfit("is not a safetensors file: its header is not an object")
    metadata = fields.pop("__metadata__", {})
    if type(metadata) is not dict:
        raise Misfit("is not a safetensors file: its metadata are not an object")
    if len(fields) > _MOST_ARRAYS:
        raise Misfit("holds more arrays than any model has")
    begin = 8 + length
    entries = {}
    for name, entry in fields.items():
        try:
            entries[name] = _entry(name, entry, begin)
        except Misfit as error:
            error.place.append(ascii(name)[1:-1][:60])
            raise
    position = begin
    for name, entry in sorted(entries.items(), key=lambda item: item[1][:2]):
        if entry.end > size:
            break
        if entry.start != position:
            raise Misfit(f"is damaged at {show(name)}: its offsets do not fit its size")
        position = entry.end
    if position != size:
        raise Misfit("is damaged: it is longer or shorter than its header says")
    return Header(entries, metadata, begin)


def _entry(name: str, entry: Any, begin: int) -> Entry:
    if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Misfit("is not an array")
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise Misfit("has a name that is too long, or not for reading")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(code) is not str or code not in _NAMES:
        raise Misfit(f"is of an unknown dtype {show(code)}")
    if type(shape) is not list or type(offsets) is not list:
        raise Misfit("has no shape, or no place")
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise Misfit("has an invalid size")
    if len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise Misfit("has no place")
    if offsets[1] - offsets[0] != math.prod(shape) * _SIZES[code]:
        raise Misfit("is damaged: its offsets do not fit its size")
    if math.prod(filter(None, shape)) * _SIZES[code] > MOST_BYTES:
        raise Misfit("is larger than any memory")
    return Entry(begin + offsets[0], begin + offsets[1], _NAMES[code], tuple(shape))


def lay_out(
    arrays: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """Returns the header of a file for arrays of these names, dtypes and shapes, in order.

    The arrays begin at a multiple of 64. They follow in the order given, each at the place that
    the header has for it.

    Raises:
        Misfit: The format lacks a dtype, or the header would be too long.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, Entry] = {}
    start = 0
    for name, dtype, shape in arrays:
        if dtype not in DTYPES:
            raise Misfit(f"{name}: safetensors has no {dtype}; cast it before saving")
        end = start + math.prod(shape) * _SIZES[DTYPES[dtype]]
        fields[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        places[name] = Entry(start, end, dtype, shape)
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > MOST_HEADER:
        raise Misfit("the header is longer than safetensors allows")
    begin = 8 + len(text)
    places = {
        name: entry._replace(start=begin + entry.start, end=begin + entry.end)
        for name, entry in places.items()
    }
    return len(text).to_bytes(8, "little") + text, Header(places, dict(metadata or {}), begin)
