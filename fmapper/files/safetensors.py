"""The safetensors format: eight bytes with the length of a JSON header, the header, the arrays.

See https://huggingface.co/docs/safetensors. The library of that name is not used: it reads arrays
whole and not in parts, its functions for NumPy have no float8, and it does not place arrays where
JAX can take them over. Nor is it used for headers alone: it accepts names that occur twice, fields
that the format lacks, and any number of arrays, for each of which it takes a kilobyte; and it opens
a path, which may lead to another file than the one that was checked, or be a URL.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from fmapper.files.bounds import WAY_OUT, check_count, check_name
from fmapper.files.dtypes import DTYPES
from fmapper.files.untrusted import Misfit, no_constant, object_of, show, within
from fmapper.switches import settings

MOST_HEADER = 100_000_000  # bytes, the limit of the format
_MOST_READ = 64_000_000  # bytes, of an untrusted file
_MOST_WIDE = 16_000_000  # bytes of texts that are not ASCII
_LONGEST_ENTRY = 1 << 12  # bytes of the entry of an array in an unusual form
_MOST_DIMENSIONS = 64
MOST_BYTES = 2**63 - 1  # bytes of an array, not counting sizes of zero: NumPy's limit
_ALIGNMENT = 64  # arrays begin at multiples of it, so that JAX need not copy them
_NAMES = {code: name for name, code in DTYPES.items()}
_SIZES = {code: int("".join(filter(str.isdigit, code.split("_")[0])) or 8) // 8 for code in _NAMES}


_METADATA = "__metadata__"
_W = rb"[ \t\n\r]*+"
_CHARACTERS = rb'((?:[^"\\\x00-\x1f]++|\\.)*+)'
_INTEGER = rb"(0|[1-9][0-9]{0,18})"
_FIELD = (
    rb'"(?:dtype"' + _W + rb":" + _W + rb'"(\w++)"'
    rb'|shape"' + _W + rb":" + _W + rb"\[" + _W + rb"([0-9, \t\n\r]{0,2000}+)\]"
    rb'|data_offsets"' + _W + rb":" + _W + rb"\[" + _W
    + _INTEGER + _W + rb"," + _W + _INTEGER + _W + rb"\])"
)  # fmt: skip
_BLANKS = re.compile(_W)
_OPEN = re.compile(_W + rb"\{" + _W + rb"(\}?)")
_KEY = re.compile(_W + rb'"' + _CHARACTERS + rb'"' + _W + rb":" + _W)
_NEXT = re.compile(_W + rb"([,}])")
_TEXT = re.compile(rb'"' + _CHARACTERS + rb'"')
_ENTRY = re.compile(rb"\{" + _W + (_W + rb"," + _W).join([_FIELD] * 3) + _W + rb"\}")
_ARRAY = re.compile(_KEY.pattern + _ENTRY.pattern + _NEXT.pattern)
_USUAL = re.compile(  # as written by safetensors itself and JSON writers in Python and Rust
    rb'"([^"\\\x00-\x1f]{1,4096}+)":\{("dtype":"(?:\w++)","shape":\[(?:[0-9,]{0,2000}+)\]),'
    rb'"data_offsets":\[' + _INTEGER + rb"," + _INTEGER + rb"\]\}([,}])"
)  # fmt: skip
_UNKNOWN: tuple[str, tuple[int, ...], int] = ("", (), -1)  # a form that has not occurred yet
_FORM = re.compile(rb'"dtype":"(\w++)","shape":\[([0-9,]*+)\]')
_CODE = re.compile(r"\w{1,32}", re.ASCII)
_BYTES = "U8"
_LONG_NUMBER = re.compile(r"[0-9]{26,}")
_DECODER = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=no_constant)


class Entry(NamedTuple):
    """The place, dtype and shape of an array in a file; an unknown dtype as the file spells it."""

    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Header:
    """The header of a file.

    Attributes:
        entries: The arrays by name, in the order of the header.
        metadata: Texts by name.
        begin: Where the first array begins.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    begin: int = 0


def read_header(file: BinaryIO, size: int, *, unknown: bool = False) -> Header:
    """Reads the header of a file of `size` bytes, open at its beginning.

    Each array begins where the previous one ends, and the last one ends with the file.

    Args:
        file: The file.
        size: Its size in bytes.
        unknown: Whether arrays may have dtypes that are unknown.

    Raises:
        Misfit: The file is not a safetensors file, or is damaged.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8:
        raise Misfit("is not a safetensors file: it is too short")
    if length > min(MOST_HEADER, size - 8):
        raise Misfit("is not a safetensors file: its header would be too long")
    if length > _MOST_READ and settings.bounds:
        raise Misfit(f"has a header of {length:,} bytes; files may have {_MOST_READ:,}. {WAY_OUT}")
    parser = _Parser(file.read(length), 8 + length, unknown=unknown)
    try:
        parser.header()
    except UnicodeDecodeError:
        raise Misfit("is not a safetensors file: its header is not UTF-8") from None
    entries = parser.entries
    position = _end(entries.values(), 8 + length)
    if position != size:  # perhaps the header has another order than the data
        order = sorted(entries.items(), key=lambda item: item[1][:2])
        position = 8 + length
        for name, (start, end, _, _) in order:
            if end > size:
                position = end
                break
            if start != position:
                raise Misfit(f"is damaged at {show(name)}: its offsets do not fit its size")
            position = end
    if position != size:
        raise Misfit("is damaged: it is longer or shorter than its header says")
    return Header(entries, parser.metadata, 8 + length)


def _end(entries: Iterable[Entry], position: int) -> int:
    """Returns the end of arrays of which each begins where the previous one ends; else -1."""
    for start, end, _, _ in entries:
        if start != position:
            return -1
        position = end
    return position


class _Parser:
    """Parses a header one array at a time.

    A JSON parser would first create dicts and lists of ten times its length.
    """

    def __init__(self, data: bytes, begin: int, *, unknown: bool) -> None:
        self._data = data
        self._unknown = unknown
        self._begin = begin
        self._at = 0
        self._forms: dict[tuple[bytes, bytes], tuple[str, tuple[int, ...], int]] = {}
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}

    def header(self) -> None:
        """Parses the whole header.

        Raises:
            Misfit: The header is malformed; the message names the array, if any.
        """
        count = self._data.count(b"data_offsets")  # texts may contain this word, too
        check_count(count, "arrays")
        is_open = self._open()
        while is_open:
            if self._usual():
                break
            match = _ARRAY.match(self._data, self._at)
            if match is not None and self._is_added(*_in_order(match)):
                self._at = match.end()
                is_open = match[14] == b","
                continue
            name = self._key()
            with within(ascii(name)[1:-1][:60]):
                if name in self.entries or (name == _METADATA and self.metadata):
                    raise Misfit("is not a safetensors file: its header has a key twice")
                if name == _METADATA:
                    self.metadata = self._texts()
                else:
                    check_name(name)
                    self.entries[name] = self._unusual()
            is_open = self._is_more()
        if _BLANKS.match(self._data, self._at).end() != len(self._data):  # type: ignore[union-attr]
            raise self._misfit("does not end with the object that it is")

    def _misfit(self, message: str) -> Misfit:
        return Misfit(f"is not a safetensors file: its header {message}")

    def _open(self) -> bool:
        """Enters the object at the current position; returns whether it has entries."""
        match = _OPEN.match(self._data, self._at)
        if match is None:
            raise self._misfit("is not an object")
        self._at = match.end()
        return not match[1]

    def _key(self) -> str:
        match = _KEY.match(self._data, self._at)
        if match is None:
            raise self._misfit(f"is not JSON at byte {self._at}")
        self._at = match.end()
        return _unescape(match[1])

    def _is_more(self) -> bool:
        """Returns whether the object continues after a value."""
        match = _NEXT.match(self._data, self._at)
        if match is None:
            raise self._misfit(f"is not JSON at byte {self._at}")
        self._at = match.end()
        return match[1] == b","

    def _usual(self) -> bool:
        """Adds the next arrays in usual form; returns whether the object ends after them."""
        data, at, begin, entries = self._data, self._at, self._begin, self.entries
        match, new_entry = _USUAL.match, Entry.__new__
        forms: dict[bytes, tuple[str, tuple[int, ...], int]] = {}  # most arrays share a few
        last, stop = 0, b"0"
        while (array := match(data, at)) is not None:
            key, form, start, end, more = array.groups()
            name = key.decode()
            first = last if start == stop else int(start)
            last, stop = int(end), end
            dtype, shape, nbytes = forms.get(form, _UNKNOWN)
            if (
                last - first == nbytes
                and name not in entries
                and name.isprintable()
                and name != _METADATA
            ):
                entries[name] = new_entry(Entry, begin + first, begin + last, dtype, shape)
            else:
                code, sizes = _FORM.fullmatch(form).groups()  # type: ignore[union-attr]
                if not self._is_added(key, code, sizes, start, end):
                    break
                forms[form] = self._forms[code, sizes]
            self._at = at = array.end()
            if more == b"}":
                return True
        return False

    def _is_added(self, key: bytes, dtype: bytes, shape: bytes, start: bytes, stop: bytes) -> bool:
        """Adds an array if its entry has the usual form; returns whether it has."""
        if not (dtype and start) or shape is None or b"\\" in key:
            return False
        name = key.decode()
        if name in self.entries or name == _METADATA:
            return False
        try:
            form = self._forms.get((dtype, shape)) or self._form(dtype, shape)
            check_name(name)
        except (Misfit, ValueError):
            return False
        first, last = int(start), int(stop)
        if last - first != form[2]:
            return False  # the slow parser raises an error with the reason
        begin = self._begin
        self.entries[name] = Entry(begin + first, begin + last, form[0], form[1])
        return True

    def _form(self, dtype: bytes, shape: bytes) -> tuple[str, tuple[int, ...], int]:
        """Parses dtype, shape and bytes, with a cache because many arrays share them."""
        sizes = json.loads(b"[%b]" % shape)
        form = _check_form(dtype.decode(), sizes)
        self._forms[dtype, shape] = form
        return form

    def _unusual(self) -> Entry:
        """Reads an array in an unusual form, or raises with the reason."""
        entry = self._value(_LONGEST_ENTRY)
        if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise Misfit("is not an array")
        code, offsets = entry["dtype"], entry["data_offsets"]
        is_known = not (self._unknown and type(code) is str and _CODE.fullmatch(code))
        is_known = is_known or code in _NAMES
        dtype, shape, nbytes = _check_form(code if is_known else _BYTES, entry["shape"])
        if type(offsets) is not list:
            raise Misfit("lacks a shape or data_offsets")
        if len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
            raise Misfit("lacks data_offsets")
        if offsets[1] < offsets[0] or (is_known and offsets[1] - offsets[0] != nbytes):
            raise Misfit("is damaged: its offsets do not fit its size")
        dtype = dtype if is_known else code
        return Entry(self._begin + offsets[0], self._begin + offsets[1], dtype, shape)

    def _value(self, longest: int) -> Any:
        """Parses a value of at most `longest` bytes."""
        piece = self._data[self._at : self._at + longest]
        text = codecs.getincrementaldecoder("utf-8")().decode(piece)  # may end inside one
        for number in _LONG_NUMBER.finditer(text):
            raise Misfit(f"has a number with too many digits: {len(number[0])}")
        try:
            value, end = _DECODER.raw_decode(text)
        except RecursionError:
            raise Misfit("is nested too deeply") from None
        except ValueError as error:
            if len(piece) == longest:
                raise Misfit(f"is longer than {longest:,} bytes, or not JSON") from None
            raise self._misfit(f"is not JSON: {error}") from None
        self._at += len(text[:end].encode())
        return value

    def _texts(self) -> dict[str, str]:
        """Reads the metadata: texts by name, or null."""
        if self._data.startswith(b"null", self._at):
            self._at += 4
            return {}
        if self._data[self._at : self._at + 1] != b"{":
            raise self._misfit("has metadata that are not an object")
        texts: dict[str, str] = {}
        wide = 0
        is_open = self._open()
        while is_open:
            check_count(len(texts) + 1, "values")
            key = self._key()
            if key in texts:
                raise Misfit("is not a safetensors file: its header has a key twice")
            match = _TEXT.match(self._data, self._at)
            if match is None:
                raise self._misfit("has metadata that are not texts")
            if b"\\u" in match[1] or not match[1].isascii():  # takes four bytes per character
                wide += len(match[1])
                if wide > _MOST_WIDE and settings.bounds:
                    raise Misfit(f"has more than {_MOST_WIDE:,} bytes of text. {WAY_OUT}")
            texts[key] = _unescape(match[1])
            self._at = match.end()
            is_open = self._is_more()
        return texts


def _in_order(match: re.Match[bytes]) -> tuple[bytes, ...]:
    """Returns key, dtype, shape and offsets of an array whose fields may have any order."""
    key, a, b, c, d, e, f, g, h, i, j, k, m, _ = match.groups()
    shape = b if b is not None else f if f is not None else j
    return key, a or e or i, shape, c or g or k, d or h or m


def _unescape(text: bytes) -> str:
    if b"\\" not in text:
        return text.decode()
    try:
        decoded: str = json.loads(b'"%b"' % text)
    except ValueError as error:
        raise Misfit(f"is not a safetensors file: its header is not JSON: {error}") from None
    return decoded


def _check_form(code: Any, shape: Any) -> tuple[str, tuple[int, ...], int]:
    """Checks a dtype and a shape; returns the dtype's name, the shape, and the array's bytes."""
    if type(code) is not str or code not in _NAMES:
        raise Misfit(f"has the unknown dtype {show(code)}")
    if type(shape) is not list:
        raise Misfit("lacks a shape or data_offsets")
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise Misfit("has an invalid size")
    nbytes = math.prod(shape) * _SIZES[code]
    if not nbytes and math.prod(filter(None, shape)) * _SIZES[code] > MOST_BYTES:
        raise Misfit("is too large for any memory")
    return _NAMES[code], tuple(shape), nbytes


def lay_out(
    arrays: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """Returns the header for arrays of the given names, dtypes and shapes, in order.

    The arrays begin at a multiple of 64. Write them in the given order, each at its place in the
    header.

    Raises:
        Misfit: The format does not support a dtype, or the header would be too long.
    """
    fields: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    places: dict[str, Entry] = {}
    start = 0
    for name, dtype, shape in arrays:
        if dtype not in DTYPES:
            raise Misfit(f"{name}: safetensors has no {dtype}; cast it before saving")
        if name == _METADATA:
            raise Misfit(f"{name}: safetensors keeps its metadata under this name; rename it")
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
