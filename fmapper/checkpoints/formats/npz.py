"""Checkpoints as NumPy's `.npz`: a zip file with one `.npy` for each array."""

from __future__ import annotations

import io
import json
import math
import re
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from fmapper.checkpoints.boxes import Box
from fmapper.checkpoints.formats.format import Contents, Format
from fmapper.checkpoints.formats.safetensors import about_from_text, about_to_text
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.stored import SourceFile, StoredArray
from fmapper.checkpoints.unusual import SwappedArray, UnreadableArray
from fmapper.errors import CheckpointError
from fmapper.files.bounded_json import read_json
from fmapper.files.bounds import check_count, check_name
from fmapper.files.checksums import Checksum
from fmapper.files.dtypes import STORED_DTYPES, name_of_dtype, numpy_dtype
from fmapper.files.untrusted import Misfit, reason_of, show, within
from fmapper.files.zips import DEFLATED, STORED, Unpacking, ZipMember, ZipMembers

_ABOUT = "__fmapper__.json"
_MOST_ABOUT = 32_000_000  # bytes
_MOST_RATIO = 100  # of these bytes to their compressed size
_MOST_HEADER = 65_536  # bytes of a header of .npy
_HEADERS = {(1, 0): "read_array_header_1_0", (2, 0): "read_array_header_2_0"}
_USUAL = re.compile(  # as NumPy writes it
    rb"\{'descr': '([<>|=]?[biufc][0-9]{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9]{1,19},|[0-9]{1,19}(?:, [0-9]{1,19}){1,63}|)\), \}[ \n]*"
)
_AS_INTEGERS = STORED_DTYPES | {  # dtypes that NumPy lacks
    "int4",
    "uint4",
    "int2",
    "uint2",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
}
_LOCAL = 30  # bytes before the name of a member
_LONGEST_NAME = 1 << 12
_FIRST = 192  # bytes of a member that are read first: NumPy's headers have 128
_DAMAGED = (  # errors of NumPy's parser of headers
    EOFError,
    KeyError,
    RecursionError,
    MemoryError,
    UnicodeError,
    OverflowError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
)


class Npz(Format):
    """The format of an uncompressed file. Dtypes that NumPy lacks are stored as integers."""

    name: ClassVar[str] = "npz"
    endings: ClassVar[tuple[str, ...]] = (".npz",)

    def is_at(self, path: Path) -> bool:
        """Returns whether a file ends with .npz or is a zip file that begins with a `.npy`."""
        if not path.is_file():
            return False
        if path.suffix in self.endings:
            return True
        with path.open("rb") as file:
            head = file.read(_LOCAL + _LONGEST_NAME)
        length = int.from_bytes(head[26:28], "little")  # length of the name of the first member
        name = head[_LOCAL : _LOCAL + length]
        return head.startswith(b"PK\3\4") and name.endswith(b".npy")

    def read(self, path: Path) -> Contents:
        """Reads the list of members and the header of each."""
        try:
            return _read(path)
        except (*_DAMAGED, Misfit) as error:
            if isinstance(error, CheckpointError):
                raise
            text = str(error) if isinstance(error, Misfit) else reason_of(error)
            raise CheckpointError(f"{path}: {text}") from None

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes a member for each array, in its memory order."""
        import numpy as np

        strange = {}
        with out.open() as target, zipfile.ZipFile(target, "w") as archive:
            for name, array in contents.arrays.items():
                dtype = array.dtype
                if dtype.hasobject or not hasattr(np, dtype.name):  # a dtype of ml_dtypes
                    if dtype.name not in _AS_INTEGERS:
                        raise CheckpointError(f"{name}: npz has no {dtype.name}")
                    strange[name] = dtype.name
                    dtype = np.dtype(f"u{dtype.itemsize}")
                member = zipfile.ZipInfo(f"{name}.npy")
                large = array.nbytes > zipfile.ZIP64_LIMIT // 2
                with archive.open(member, "w", force_zip64=large) as file:
                    header = {
                        "descr": np.lib.format.dtype_to_descr(dtype),
                        "fortran_order": False,
                        "shape": array.shape,
                    }
                    np.lib.format.write_array_header_1_0(file, header)
                    for part in out.bytes_of(name, array):
                        file.write(part)
            text = about_to_text(contents)
            if strange or text:
                about = {"dtypes": strange, "metadata": contents.metadata, "about": text}
                archive.writestr(_ABOUT, json.dumps(about))


def _read(path: Path) -> Contents:
    file = SourceFile(path)
    arrays: dict[str, LazyArray] = {}
    about: dict[str, Any] = {}
    with file.handle() as handle:
        archive = ZipMembers(file, handle)
        for member in archive.values():
            if member.name == _ABOUT:
                is_bomb = member.method == DEFLATED and member.size > _MOST_RATIO * member.packed
                if member.size > _MOST_ABOUT or is_bomb:
                    raise Misfit(f"{_ABOUT} is too long")
                about = _about(b"".join(archive.parts(member)))
        dtypes = about.get("dtypes", {})
        headers = _Headers()
        for member in archive.values():
            if member.name == _ABOUT:
                continue
            name = member.name.removesuffix(".npy")
            if name in arrays:
                raise Misfit(f"{show(name)} occurs twice")
            with within(ascii(name)[1:-1][:60]):
                check_name(name)
            arrays[name] = _member(file, archive, member, dtypes.get(name), headers)
    ties, values, objects = about_from_text(about.get("about", ""), arrays)
    return Contents(arrays, ties, values, about.get("metadata", {}), (path,), objects)


def _about(data: bytes) -> dict[str, Any]:
    about = read_json(data.decode())
    if type(about) is not dict or type(about.get("about", "")) is not str:
        raise Misfit(f"{_ABOUT} is not an object")
    for key in ("dtypes", "metadata"):
        texts = about.get(key, {})
        if type(texts) is not dict or not all(type(text) is str for text in texts.values()):
            raise Misfit(f"{_ABOUT}: the {key} are not texts")
    return about


class _Headers:
    """A cache of `.npy` headers, because many arrays share them."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[tuple[int, ...], bool, Any]] = {}
        self._unusual = self._length = 0

    def read(self, name: str, head: bytes) -> tuple[tuple[int, ...], bool, Any, int]:
        """Returns shape, Fortran order, dtype and length of the header of a member."""
        if not head.startswith(b"\x93NUMPY"):
            raise Misfit(f"{show(name)} is not an array")
        version = head[6:8]
        begin = {b"\1\0": 10, b"\2\0": 12}.get(version)
        if begin is None:
            raise Misfit(f"{show(name)} has an unknown version")
        length = int.from_bytes(head[8:begin], "little")
        if length > _MOST_HEADER:
            raise Misfit(f"{show(name)} has a header that is too long")
        text = head[begin : begin + length]
        if len(text) < length:
            self._length += length
            check_count(self._length, "bytes of long headers")
            raise _CutOff(begin + length)
        if text not in self._known:
            self._known[text] = self._parse(name, head[: begin + length], text)
        return *self._known[text], begin + length

    def _parse(self, name: str, head: bytes, text: bytes) -> tuple[tuple[int, ...], bool, Any]:
        import numpy as np

        match = _USUAL.fullmatch(text)
        if match is not None:
            dtype = np.dtype(match[1].decode())
            shape = (
                tuple(map(int, match[3].replace(b" ", b"").strip(b",").split(b",")))
                if match[3]
                else ()
            )
            return shape, match[2] == b"True", dtype
        self._unusual += 1
        check_count(self._unusual, "unusual headers")
        stream = io.BytesIO(head)
        read = _HEADERS[np.lib.format.read_magic(stream)]
        parse: Any = getattr(np.lib.format, read)
        try:
            shape, fortran, dtype = parse(stream, max_header_size=_MOST_HEADER)
        except _DAMAGED as error:
            raise Misfit(f"{show(name)} has a damaged header: {reason_of(error)}") from None
        if any(type(n) is not int or n < 0 for n in shape) or len(shape) > 64:
            raise Misfit(f"{show(name)} has an invalid size")
        return shape, fortran, dtype


class _CutOff(Exception):
    """Raised for a truncated header, with the number of bytes that it needs."""


def _member(
    file: SourceFile, archive: ZipMembers, member: ZipMember, dtype: str | None, headers: _Headers
) -> LazyArray:
    """Returns the array in a member, from its header."""
    name = member.name
    begin = 0

    def head(most: int) -> bytes:
        nonlocal begin
        if member.method != STORED:
            return b"".join(archive.parts(member, most))
        begin = begin or archive.begin(member)
        return archive.bytes_near(begin, min(most, member.size))

    first = head(_FIRST)
    try:
        shape, fortran, actual, header_size = headers.read(name, first)
    except _CutOff as error:
        first = head(error.args[0])
        try:
            shape, fortran, actual, header_size = headers.read(name, first)
        except _CutOff:
            raise Misfit(f"{show(name)} is truncated") from None
    if actual.hasobject or (actual.kind not in "biufc" and dtype is None):
        kind = "is a pickle of objects" if actual.hasobject else "contains text or records"
        return UnreadableArray(
            shape, actual, f"{file.path}: {show(name)}: {kind}, not numbers, and is not read"
        )
    if dtype is not None:
        wanted = numpy_dtype(_check_dtype(dtype))
        if wanted.itemsize != actual.itemsize:
            raise Misfit(f"{show(name)} is not of dtype {show(dtype)}")
        actual = wanted
    if header_size + math.prod(shape) * actual.itemsize != member.size:
        raise Misfit(f"{show(name)}: its offsets do not fit its size")
    stored_shape = shape[::-1] if fortran else shape
    is_swapped = actual.byteorder == ">"
    actual = actual.newbyteorder("<") if is_swapped else actual
    checksum = Checksum(show(name), member.size, member.checksum, first[:header_size])
    if member.method == STORED:
        array: LazyArray = StoredArray(
            _MemberFile(file, begin, checksum),
            begin + header_size,
            stored_shape,
            name_of_dtype(actual),
        )
    else:
        array = _Packed(file, member, header_size, stored_shape, actual, checksum)
    array = SwappedArray(array) if is_swapped else array
    return array.transpose(tuple(range(len(shape)))[::-1]) if fortran and len(shape) > 1 else array


def _check_dtype(dtype: str) -> str:
    if dtype not in _AS_INTEGERS:
        raise Misfit(f"{show(dtype)} is an unknown dtype")
    return dtype


class _MemberFile(SourceFile):
    """The file of a stored member, whose checksum is verified once all of it has been read."""

    __slots__ = ("_begin", "_checksum")

    is_copied = False

    def __init__(self, file: SourceFile, begin: int, checksum: Checksum) -> None:
        self.path, self.size, self._known = file.path, file.size, file._known
        self._begin, self._checksum = begin, checksum

    def read_into(self, handle: int, out: memoryview, offset: int) -> None:
        """Fills a buffer with the bytes at an offset."""
        super().read_into(handle, out, offset)
        try:
            self._checksum.add(out, offset - self._begin)
        except Misfit as error:
            raise CheckpointError(f"{self.path}: {error}") from None


class _Packed(LazyArray):
    """A compressed array: reading a part means unpacking what precedes it."""

    def __init__(
        self,
        file: SourceFile,
        member: ZipMember,
        header: int,
        shape: tuple[int, ...],
        dtype: Any,
        checksum: Checksum,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._member, self._header = file, member, header
        self._unpacking = Unpacking(member)
        self._checksum = checksum

    def _read(self, box: Box) -> Any:
        import numpy as np

        row = self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes
        start, stop = box[0] if box else (0, 1)
        out = np.empty((stop - start, *self.shape[1:]) if box else (), self.dtype)
        view: Any = out.reshape(-1).view("u1")
        place, at = self._header + start * row, 0
        with self._file.handle() as handle:
            try:
                archive = ZipMembers.only(self._file, handle, self._member)
                for part in self._parts(archive, place, out.nbytes):
                    view[at : at + len(part)] = np.frombuffer(part, "u1")
                    at += len(part)
            except Misfit as error:
                raise CheckpointError(f"{self._file.path}: {error}") from None
        return out[(slice(None), *(slice(*pair) for pair in box[1:]))] if box else out

    def _parts(self, archive: ZipMembers, start: int, count: int) -> Iterator[bytes]:
        if start > self._header or start + count < self._member.size:
            for part in self._unpacking.parts(archive, start, count):
                self._checksum.add(part, start)
                yield part
                start += len(part)
            return
        for part in archive.parts(self._member):  # the whole member, with its checksum
            yield part[start:]
            start = max(0, start - len(part))
