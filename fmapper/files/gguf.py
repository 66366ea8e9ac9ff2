"""The GGUF format: values by name, arrays by name, and then the arrays.

See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf` package is
not used: it makes objects for every element of a list, seconds for a vocabulary, and what it
accepts has no bounds. The sizes of the blocks are the package's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from fmapper.files.untrusted import Misfit, show

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER = 100_000_000  # bytes
_MOST_ARRAYS = 100_000
_MOST_VALUES = 100_000
_MOST_STRINGS = 2_000_000  # in lists; vocabularies have less than half a million
_LONGEST_NAME = 4096
_LONGEST_TEXT = 1 << 24
_MOST_DIMENSIONS = 8
_NUMBERS = {  # types of values, as `struct` has them
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _LIST = 8, 9
_ALIGNMENT = "general.alignment"


class GgufEntry(NamedTuple):
    """An array: where it begins in the file, the number of its type, and its shape, as NumPy's."""

    start: int
    type: int
    shape: tuple[int, ...]


@dataclass
class GgufHeader:
    """The header of a file.

    Attributes:
        values: Numbers, bools and texts by name; lists are left out.
        arrays: The arrays by name.
    """

    values: dict[str, Any]
    arrays: dict[str, GgufEntry]


def read_gguf_header(file: BinaryIO, size: int) -> GgufHeader:
    """Reads the header of an open file of so many bytes.

    Raises:
        Misfit: It is not GGUF, or damaged.
    """
    head = _Head(file, min(size, _MOST_HEADER))
    if head.take(4) != MAGIC:
        raise Misfit("does not begin as GGUF does")
    version = head.number("<I")
    if version not in _VERSIONS:
        raise Misfit(f"is GGUF of the version {version}, or of machines with the other byte order")
    arrays, values = head.number("<Q"), head.number("<Q")
    if arrays > _MOST_ARRAYS or values > _MOST_VALUES:
        raise Misfit(f"says that it has {arrays} arrays and {values} values")
    header = GgufHeader({}, {})
    for _ in range(values):
        name = head.text(_LONGEST_NAME)
        if name in header.values:
            raise Misfit(f"has the value {show(name)} twice")
        header.values[name] = head.value(head.number("<I"))
    header.values = {name: value for name, value in header.values.items() if value is not None}
    places: dict[str, GgufEntry] = {}
    for _ in range(arrays):
        name = head.text(_LONGEST_NAME)
        count = head.number("<I")
        if name in places or not name or count > _MOST_DIMENSIONS:
            raise Misfit(f"has the array {show(name)} twice, or with {count} dimensions")
        shape = tuple(head.number("<Q") for _ in range(count))[::-1]
        if any(length > 1 << 40 for length in shape) or math.prod(shape) > 1 << 48:
            raise Misfit(f"the array {show(name)} is too large")
        kind = head.number("<I")
        places[name] = GgufEntry(head.number("<Q"), kind, shape)
    alignment = header.values.get(_ALIGNMENT, 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise Misfit(f"has an alignment of {show(alignment)}")
    begin = -(-head.at // alignment) * alignment
    for name, entry in places.items():
        if entry.start % alignment or begin + entry.start > size:
            raise Misfit(f"the array {show(name)} begins where it cannot")
        header.arrays[name] = entry._replace(start=begin + entry.start)
    return header


class _Head:
    """Reads a header from its beginning, and no further than it may be long."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file = file
        self._most = most
        self._strings = 0
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > self._most - self.at:
            raise Misfit("has a header that is cut off, or too long")
        data = self._file.read(count)
        self.at += len(data)
        if len(data) != count:
            raise Misfit("has a header that is cut off")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, longest: int) -> str:
        count = self.number("<Q")
        if count > longest:
            raise Misfit(f"has a text of {count} bytes")
        try:
            return self.take(count).decode()
        except UnicodeDecodeError:
            raise Misfit("has a text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """Reads a value; lists are skipped and give None."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text(_LONGEST_TEXT)
        if kind != _LIST:
            raise Misfit(f"has a value of the type {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _NUMBERS:
            self.take(count * struct.calcsize(_NUMBERS[inner]))
            return None
        self._strings += count
        if inner != _STRING or self._strings > _MOST_STRINGS:
            raise Misfit(f"has a list of {count} values of the type {inner}")
        for _ in range(count):
            self.take(self.number("<Q"))
        return None
