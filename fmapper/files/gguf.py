"""The GGUF format: metadata values by name, array headers by name, then the data of the arrays.

See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf` package is
not used: it creates an object for every element of a list, which takes seconds for a vocabulary,
and has no bounds. The block sizes are those of the package.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from fmapper.files.bounds import check_count, check_name
from fmapper.files.untrusted import Misfit, show

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LONGEST_TEXT = 1 << 20  # bytes of a text that is kept; chat templates have some thousands
_MOST_TEXT = 1 << 26  # bytes of all texts that are kept
_LONGEST_NAME = 1 << 14  # bytes
_BLOCK = 1 << 20  # bytes that are read at a time
_MOST_DIMENSIONS = 8
_NUMBERS = {  # value types, as formats of `struct`
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
    """An array: its offset in the file, the number of its type, and its shape in NumPy's order."""

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
    """Reads the header of an open file of `size` bytes.

    Raises:
        Misfit: The file is not GGUF, or is damaged.
    """
    head = _Head(file, size)
    if head.take(4) != MAGIC:
        raise Misfit("does not begin with the magic number of GGUF")
    version = head.number("<I")
    if version not in _VERSIONS:
        raise Misfit(f"has version {version} of GGUF, which is not supported, or is big-endian")
    arrays, values = head.number("<Q"), head.number("<Q")
    check_count(arrays, "arrays")
    check_count(values, "values")
    header = GgufHeader({}, {})
    for _ in range(values):
        name = head.name()
        if name in header.values:
            raise Misfit(f"contains the value {show(name)} twice")
        header.values[name] = head.value(head.number("<I"))
    header.values = {name: value for name, value in header.values.items() if value is not None}
    places: dict[str, GgufEntry] = {}
    for _ in range(arrays):
        name = head.name()
        count = head.number("<I")
        if not name:
            raise Misfit("has an array without a name")
        if name in places:
            raise Misfit(f"contains the array {show(name)} twice")
        if count > _MOST_DIMENSIONS:
            raise Misfit(f"the array {show(name)} has {count} dimensions")
        shape = head.numbers(f"<{count}Q")[::-1]
        if any(length > 1 << 40 for length in shape) or math.prod(shape) > 1 << 48:
            raise Misfit(f"the array {show(name)} is too large")
        kind, start = head.numbers("<IQ")
        places[name] = GgufEntry(start, kind, shape)
    alignment = header.values.get(_ALIGNMENT, 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise Misfit(f"has the invalid alignment {show(alignment)}")
    begin = -(-head.at // alignment) * alignment
    for name, entry in places.items():
        if entry.start % alignment or begin + entry.start > size:
            raise Misfit(f"the array {show(name)} begins at an invalid offset")
        header.arrays[name] = entry._replace(start=begin + entry.start)
    return header


class _Head:
    """Reads a header from its beginning, in blocks."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._block = b""
        self._begin = 0  # of the block in the file
        self._texts = self._kept = 0
        self.at = 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def take(self, count: int) -> bytes:
        start = self.at - self._begin
        if start + count > len(self._block):
            self._load(count)
            start = 0
        self.at += count
        return self._block[start : start + count]

    def _load(self, count: int) -> None:
        """Reads a block of at least `count` bytes from the current position."""
        if count > self._size - self.at:
            raise Misfit("the header is truncated or too long")
        self._file.seek(self.at)
        self._begin, self._block = self.at, self._file.read(max(count, _BLOCK))
        if len(self._block) < count:
            raise Misfit("the header is truncated")

    def _skip(self, count: int) -> None:
        if count > self._size - self.at:
            raise Misfit("the header is truncated or too long")
        self.at += count

    def name(self) -> str:
        count = self.number("<Q")
        if count > _LONGEST_NAME:
            raise Misfit(f"has a name of {count} bytes, which is too long")
        name = _decode(self.take(count))
        check_name(name)
        return name

    def value(self, kind: int) -> Any:
        """Reads a value; skips lists and long texts and returns None for them."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            count = self.number("<Q")
            if count > _LONGEST_TEXT:
                return self._skip(count)
            self._kept += count
            if self._kept > _MOST_TEXT:
                raise Misfit(f"has more than {_MOST_TEXT} bytes of text")
            return _decode(self.take(count))
        if kind != _LIST:
            raise Misfit(f"has a value of unknown type {kind}")
        inner, count = self.numbers("<IQ")
        if inner in _NUMBERS:
            return self._skip(count * struct.calcsize(_NUMBERS[inner]))
        if inner != _STRING:
            raise Misfit(f"has a list of {count} values of unknown type {inner}")
        self._texts += count
        check_count(self._texts, "texts in lists")
        return self._skip_texts(count)

    def _skip_texts(self, count: int) -> None:
        read = struct.Struct("<Q").unpack_from
        block, at = self._block, self.at - self._begin
        for _ in range(count):
            if at + 8 > len(block):
                self.at = self._begin + at
                self._load(8)
                block, at = self._block, 0
            at += 8 + read(block, at)[0]
        self.at = self._begin + at
        self._skip(0)


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Misfit("has text that is not UTF-8") from None
