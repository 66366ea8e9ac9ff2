"""Checkpoints as NumPy's `.npz`: a zip file with one `.npy` for each array."""

from __future__ import annotations

import errno
import json
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

from fmapper.checkpoints.boxes import Box
from fmapper.checkpoints.formats.format import Contents, Format
from fmapper.checkpoints.formats.safetensors import about_from_text, about_to_text
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.stored import SourceFile, StoredArray
from fmapper.errors import CheckpointError
from fmapper.files.dtypes import numpy_dtype
from fmapper.files.untrusted import Misfit, read_json, show

_ABOUT = "__fmapper__.json"
_MOST_ABOUT = 100_000_000  # bytes
_MOST_MEMBERS = 1_000_000
_MOST_HEADER = 65_536  # bytes of a header of .npy
_HEADERS = {(1, 0): "read_array_header_1_0", (2, 0): "read_array_header_2_0"}
_LOCAL = struct.Struct("<4s5H3I2H")  # what stands before a member of a zip file
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    OSError,
    NotImplementedError,
    RuntimeError,
    UnicodeError,
    OverflowError,
    SyntaxError,
    ValueError,
    tokenize.TokenError,
)


class Npz(Format):
    """One file, not compressed. Dtypes that NumPy lacks lie there as integers of their width."""

    name: ClassVar[str] = "npz"
    endings: ClassVar[tuple[str, ...]] = (".npz",)

    def is_at(self, path: Path) -> bool:
        """Returns whether a file ends with .npz or is a zip file of `.npy` members."""
        if not path.is_file():
            return False
        if path.suffix in self.endings:
            return True
        with path.open("rb") as file:
            if file.read(4) != b"PK\3\4":
                return False
        try:
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith(".npy") for name in archive.namelist())
        except _DAMAGED:
            return False

    def read(self, path: Path) -> Contents:
        """Reads the list of members and the header of each."""
        try:
            return _read(path)
        except (*_DAMAGED, Misfit) as error:
            if isinstance(error, CheckpointError):
                raise
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise CheckpointError(f"{path}: {str(error) or type(error).__name__}") from None

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes a member for each array, as it lies in memory."""
        import numpy as np

        strange = {}
        with out.open() as target, zipfile.ZipFile(target, "w") as archive:
            for name, array in contents.arrays.items():
                dtype = array.dtype
                if not hasattr(np, dtype.name):  # of ml_dtypes
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
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS:
            raise Misfit("holds more arrays than any model has")
        for member in members:
            _check(file, member)
            if member.filename == _ABOUT:
                if member.file_size > _MOST_ABOUT:
                    raise Misfit(f"{_ABOUT} is too long")
                with archive.open(member) as stream:
                    about = _about(b"".join(_parts(stream, member.file_size)))
        dtypes = about.get("dtypes", {})
        for member in members:
            name = member.filename.removesuffix(".npy")
            if member.filename == _ABOUT:
                continue
            if name in arrays:
                raise Misfit(f"{show(name)} occurs twice")
            arrays[name] = _member(archive, file, member, dtypes.get(name))
    ties, values = about_from_text(about.get("about", ""), arrays)
    return Contents(arrays, ties, values, about.get("metadata", {}), (path,))


def _check(file: SourceFile, member: zipfile.ZipInfo) -> None:
    """Raises for a compression that is not bounded: the library bounds only deflate."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Misfit(f"{show(member.filename)} is compressed in a way that NumPy does not write")
    if member.header_offset < 0 or member.header_offset + member.compress_size > file.size:
        raise Misfit(f"{show(member.filename)} is longer than the file")


def _about(data: bytes) -> dict[str, Any]:
    about = read_json(data.decode())
    if type(about) is not dict or type(about.get("about", "")) is not str:
        raise Misfit(f"{_ABOUT} is not an object")
    for key in ("dtypes", "metadata"):
        texts = about.get(key, {})
        if type(texts) is not dict or not all(type(text) is str for text in texts.values()):
            raise Misfit(f"{_ABOUT}: {key} are not texts")
    return about


def _member(
    archive: zipfile.ZipFile, file: SourceFile, member: zipfile.ZipInfo, dtype: str | None
) -> LazyArray:
    """Returns the array in a member, from its header."""
    import numpy as np

    name = member.filename
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = _HEADERS.get(version)
        if read is None:
            raise Misfit(f"{show(name)} is of an unknown version")
        shape, fortran, found = getattr(np.lib.format, read)(stream, max_header_size=_MOST_HEADER)
        header_size = stream.tell()
    if found.hasobject or found.kind not in "biufcV":
        raise Misfit(f"{show(name)} holds objects or text, and pickles are not read")
    if dtype is not None:
        wanted = numpy_dtype(_check_dtype(dtype))
        if wanted.itemsize != found.itemsize:
            raise Misfit(f"{show(name)} is not of dtype {show(dtype)}")
        found = wanted
    if found.kind == "V" and dtype is None:
        raise Misfit(f"{show(name)} has a dtype that is not numeric")
    if any(type(n) is not int or n < 0 for n in shape) or len(shape) > 64:
        raise Misfit(f"{show(name)} has an invalid size")
    if header_size + math.prod(shape) * found.itemsize != member.file_size:
        raise Misfit(f"{show(name)}: its offsets do not fit its size")
    stored_shape = shape[::-1] if fortran else shape
    if found.byteorder == ">":
        raise Misfit(f"{show(name)} has the most significant byte first")
    if member.compress_type == zipfile.ZIP_STORED:
        offset = _offset(file, member) + header_size
        array: LazyArray = StoredArray(file, offset, stored_shape, found.name)
    else:
        array = _Packed(file, member, header_size, stored_shape, found)
    return array.transpose(tuple(range(len(shape)))[::-1]) if fortran and len(shape) > 1 else array


def _check_dtype(dtype: str) -> str:
    from fmapper.files.safetensors import DTYPES

    if dtype not in DTYPES and dtype not in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
        raise Misfit(f"{show(dtype)} is an unknown dtype")
    return dtype


def _offset(file: SourceFile, member: zipfile.ZipInfo) -> int:
    """Returns the offset of a member that is stored uncompressed."""
    with file.handle() as handle:
        data = bytearray(_LOCAL.size)
        file.read_into(handle, memoryview(data), member.header_offset)
    fields = _LOCAL.unpack(data)
    if fields[0] != b"PK\3\4" or member.flag_bits & 1 or member.compress_size != member.file_size:
        raise Misfit(f"{show(member.filename)} is damaged, or encrypted")
    return int(member.header_offset + _LOCAL.size + fields[-2] + fields[-1])


class _Packed(LazyArray):
    """An array that is compressed: to read a part is to read all that stands before."""

    def __init__(
        self,
        file: SourceFile,
        member: zipfile.ZipInfo,
        header: int,
        shape: tuple[int, ...],
        dtype: Any,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._member, self._header = file, member, header

    def _read(self, box: Box) -> Any:
        import numpy as np

        row = self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes
        start, stop = box[0] if box else (0, 1)
        out = np.empty((stop - start, *self.shape[1:]) if box else (), self.dtype)
        with self._file.handle() as handle, open(handle, "rb", closefd=False) as raw:
            try:
                with zipfile.ZipFile(raw) as archive, archive.open(self._member) as stream:
                    for _ in _parts(stream, self._header + start * row):
                        pass
                    view: Any = out.reshape(-1).view("u1")
                    at = 0
                    for part in _parts(stream, out.nbytes):
                        view[at : at + len(part)] = np.frombuffer(part, "u1")
                        at += len(part)
            except _DAMAGED as error:
                raise CheckpointError(f"{self._file.path}: {error}") from None
        return out[(slice(None), *(slice(*pair) for pair in box[1:]))] if box else out


def _parts(stream: IO[bytes], nbytes: int) -> Iterator[bytes]:
    """Yields the next bytes of a member."""
    while nbytes:
        part = stream.read(min(nbytes, 1 << 20))
        if not part:
            raise zipfile.BadZipFile("a member is shorter than it says")
        nbytes -= len(part)
        yield part
