"""Files of `flax.serialization`: nested dicts in msgpack, with an extension type for arrays.

The library reads a whole file into memory, and without bounds. This module finds the positions of
the arrays, refuses files with inconsistent sizes, and writes a file one array after the other.
Arrays have the form of `flax.serialization.msgpack_serialize`.
"""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from fmapper import CheckpointError
from fmapper.checkpoints import (
    STORED_DTYPES,
    Contents,
    Format,
    LazyArray,
    Misfit,
    SourceFile,
    StoredArray,
    UnreadableArray,
    Writer,
    check_count,
    check_depth,
    check_name,
    concatenate,
    nest,
    show,
    tied_to_text,
    unite_tied,
)

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types of Flax
_TIES = 77  # the extension type of fmapper
_CHUNKED = "__msgpack_chunked_array__"
_MOST_CHUNK = 1 << 30  # bytes of an array that Flax leaves in one piece
_LONGEST = 1 << 20  # bytes of a text
_BUFFER = 1 << 16
_MOST_TIES = 32 << 20  # bytes of the description of ties


class Msgpack(Format):
    """A file of `flax.serialization.to_bytes`. Names are keys joined by dots.

    Flax reads an array under each of its names, so a tied array is written once per name. Ties are
    described under the first key, which is repeated with its own value afterwards: msgpack keeps
    the last of two values of a key, so Flax never sees the description.
    """

    name: ClassVar[str] = "msgpack"
    other_names: ClassVar[tuple[str, ...]] = ("flax",)
    endings: ClassVar[tuple[str, ...]] = (".msgpack",)

    def is_at(self, path: Path) -> bool:
        """Returns whether a file has the ending of this format, which has no magic number."""
        return path.is_file() and path.suffix in self.endings

    def read(self, path: Path) -> Contents:
        """Finds the arrays."""
        file = SourceFile(path)
        with file.handle() as handle:
            reader = _Reader(file, handle)
            contents = Contents({}, files=(path,))
            try:
                reader.value(None, contents)
                if reader.at != file.size:
                    raise Misfit("has trailing bytes")
                if reader.ties:
                    unite_tied(contents, reader.ties.decode())
            except (Misfit, CheckpointError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path}: at byte {reader.at}: {error}") from None
        return contents

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes nested maps with the arrays in them."""
        tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
        tree = nest({**contents.arrays, **tied, **contents.values})
        ties = tied_to_text(contents).encode() if contents.ties else b""
        with out.open() as file:
            _write(out, file, tree, None, ties)


class _Reader:
    """Parses a file once, without reading the arrays."""

    def __init__(self, file: SourceFile, handle: int) -> None:
        self.file, self.handle = file, handle
        self.at = 0
        self.count = self.depth = self.length = 0
        self.ties = b""
        self._name = ""
        self._buffer, self._start = b"", 0

    def take(self, size: int) -> bytes:
        """Returns the next bytes."""
        if size > _LONGEST or self.at + size > self.file.size:
            raise Misfit("is damaged: a value is longer than the file or too long")
        begin = self.at - self._start
        if begin < 0 or begin + size > len(self._buffer):
            self._buffer = os.pread(self.handle, max(size, _BUFFER), self.at)
            self._start, begin = self.at, 0
            if len(self._buffer) < size:
                raise Misfit("became shorter while it was read")
        self.at += size
        return self._buffer[begin : begin + size]

    def number(self, code: str) -> Any:
        form = _FORMS[code]
        return form.unpack(self.take(form.size))[0]

    def value(self, place: str | None, contents: Contents) -> None:
        """Reads a value, and records the arrays in it under their names; None is the root."""
        self._name = place or ""
        item = self.item(place, contents)
        if item is None or item is _ENTERED:
            return
        name = place or ""
        check_name(name)
        self.length += len(name)
        check_count(self.length, "bytes of names")
        if name in contents.arrays or name in contents.values:
            raise Misfit(f"{show(name)} occurs twice")
        if isinstance(item, LazyArray):
            contents.arrays[name] = item
            check_count(len(contents.arrays), "arrays")
        else:
            contents.values[name] = item
            check_count(len(contents.values), "values")

    def item(self, name: str | None, contents: Contents | None) -> Any:
        """Reads a value; returns `_ENTERED` for a container, whose arrays are recorded.

        Without contents, containers are not allowed.
        """
        tag = self.take(1)[0]
        if tag <= 0x7F:
            return tag
        if tag >= 0xE0:
            return tag - 256
        if tag in _FIXED:
            return _FIXED[tag]
        if tag in _NUMBERS:
            return self.number(_NUMBERS[tag])
        if 0xA0 <= tag <= 0xBF or tag in _TEXTS:
            return self._text(tag & 31 if tag <= 0xBF else self.number(_TEXTS[tag]))
        if contents is None:
            raise Misfit("contains a list, map or array in place of a text or number")
        if 0x90 <= tag <= 0x9F or tag in _LISTS:
            size = tag & 15 if tag <= 0x9F else self.number(_LISTS[tag])
            self._enter(size)
            for at in range(size):
                self.value(_join(name, at), contents)
            self.depth -= 1
            return _ENTERED
        if 0x80 <= tag <= 0x8F or tag in _MAPS:
            return self._map(tag & 15 if tag <= 0x8F else self.number(_MAPS[tag]), name, contents)
        if tag in _EXTENSIONS:
            size = _EXTENSIONS[tag]
            length = size if isinstance(size, int) else self.number(size)
            return self._extension(self.number("b"), length)
        raise Misfit(f"contains a value of kind {tag:#x}, which checkpoints do not have")

    def _enter(self, size: int) -> None:
        """Reads a list or map with this number of values."""
        if size > self.file.size - self.at:  # each takes at least one byte
            raise Misfit("is damaged: it has fewer values than it declares")
        self.depth += 1
        self.count += size + 1
        check_depth(self.depth)
        check_count(self.count, "parts")

    def _text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise Misfit("contains text that is not UTF-8") from None

    def _map(self, size: int, name: str | None, contents: Contents) -> Any:
        inner = Contents({})
        names = set()
        self._enter(size)
        for _ in range(size):
            key = self.item("", None)
            if type(key) is int:
                key = str(key)
            if name is None and self._ties():
                continue
            if not isinstance(key, str) or key in names:
                raise Misfit("contains a key that is not text or occurs twice")
            names.add(key)
            if _CHUNKED in names:
                self.value(key, inner)
                continue
            full = _join(name, key)
            check_name(full)
            self.value(full, contents)
        self.depth -= 1
        return self._unite(inner) if _CHUNKED in names else _ENTERED

    def _ties(self) -> bool:
        """Reads the description of ties; returns whether there is one."""
        at = self.at
        if self.take(1)[0] == _EXTENSION_32:
            length, kind = self.number("I"), self.number("b")
            if kind == _TIES and len(self.ties) + length <= _MOST_TIES:
                self.ties += self.take(length)
                return True
        self.at = at
        return False

    def _unite(self, inner: Contents) -> LazyArray:
        """Joins an array that Flax has split into chunks."""
        shape = [inner.values.get(f"shape.{at}") for at in range(len(inner.values) - 1)]
        pieces = [inner.arrays.get(f"chunks.{at}") for at in range(len(inner.arrays))]
        if not pieces or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise Misfit("contains an array in pieces that do not fit together")
        if any(piece is None or len(piece.shape) != 1 for piece in pieces):
            raise Misfit("contains an array in pieces that do not fit together")
        if sum(piece.shape[0] for piece in pieces if piece) != math.prod(shape):  # type: ignore[arg-type]
            raise Misfit("contains an array in pieces that do not fit together")
        return concatenate(pieces, 0).reshape(shape)  # type: ignore[arg-type]

    def _extension(self, kind: int, length: int) -> Any:
        end = self.at + length
        if end > self.file.size:
            raise Misfit("is damaged: an array is longer than the file")
        if kind == _COMPLEX:
            raise Misfit("contains a complex number, which is not supported")
        if kind not in (_ARRAY, _SCALAR):
            raise Misfit(f"contains an extension of type {kind}, which Flax does not use")
        array = self._usual(end)
        if array is None:
            array = self._unusual(end)
        self.at = end
        return array

    def _usual(self, end: int) -> LazyArray | None:
        """Reads an array whose header has the short form, which nearly all have."""
        begin = self.at - self._start
        if begin < 0 or begin + _LONGEST_HEAD > len(self._buffer):
            self._buffer = os.pread(self.handle, _BUFFER, self.at)
            self._start, begin = self.at, 0
        match = _HEAD.match(self._buffer, begin)
        if match is None:
            return None
        sizes, dtype = match[1], match[2][1:].decode("latin1")
        if match[2][0] - 0xA0 != len(dtype) or dtype not in STORED_DTYPES:
            return None
        shape, at = [], 1
        while at < len(sizes):
            tag = sizes[at]
            width = _WIDTHS.get(tag, 0)
            shape.append(int.from_bytes(sizes[at + 1 : at + 1 + width], "big") if width else tag)
            at += 1 + width
        if len(shape) != sizes[0] - 0x90:
            return None
        place = self._start + match.end()
        array = StoredArray(self.file, place, shape, dtype)
        size = int.from_bytes(match[3][1:], "big")
        return array if size == array.nbytes and place + size == end else None

    def _unusual(self, end: int) -> LazyArray:
        """Reads the header of an array piece by piece, and reports what is wrong with it."""
        if self.take(1)[0] != 0x93:
            raise Misfit("contains an array without shape, dtype and values")
        shape = self._shape()
        dtype = self.item("", None)
        is_known = dtype in STORED_DTYPES
        if not isinstance(dtype, str) or not (is_known or _DTYPE.fullmatch(dtype)):
            raise Misfit(f"contains an array of unknown dtype {show(dtype)}")
        tag = self.take(1)[0]
        if tag not in (0xC4, 0xC5, 0xC6):
            raise Misfit("contains an array without values")
        size = self.number({0xC4: "B", 0xC5: "H", 0xC6: "I"}[tag])
        if self.at + size != end:
            raise Misfit("is damaged: an array does not fit its offsets")
        if not is_known:
            return UnreadableArray.of_unknown(self.file.path, self._name, shape, dtype)
        array = StoredArray(self.file, self.at, shape, dtype)
        if array.nbytes != size:
            raise Misfit("is damaged: an array does not fit its size")
        return array

    def _shape(self) -> list[int]:
        tag = self.take(1)[0]
        if not 0x90 <= tag <= 0x9F and tag not in _LISTS:
            raise Misfit("contains an array without a shape")
        size = tag & 15 if tag <= 0x9F else self.number(_LISTS[tag])
        if size > 64:
            raise Misfit("contains an array of too many dimensions")
        shape = [self.item("", None) for _ in range(size)]
        if not all(type(n) is int and n >= 0 for n in shape):
            raise Misfit("contains an array with an invalid size")
        return shape


_ENTERED = object()  # the value of a list or map whose arrays were recorded

_FIXED: dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    0xCA: "f",
    0xCB: "d",
    0xCC: "B",
    0xCD: "H",
    0xCE: "I",
    0xCF: "Q",
    0xD0: "b",
    0xD1: "h",
    0xD2: "i",
    0xD3: "q",
}
_HEAD = re.compile(  # sizes, dtype, number of bytes that follow
    rb"\x93([\x90-\x9f](?:[\x00-\x7f]|\xcc.|\xcd..|\xce....)*)"
    rb"([\xa1-\xbf][a-z0-9_]+)(\xc4.|\xc5..|\xc6....)",
    re.DOTALL,
)
_DTYPE = re.compile(r"[a-z][\w\[\]]{1,31}", re.ASCII)  # as in NumPy and ml_dtypes
_LONGEST_HEAD = 128
_WIDTHS = {0xCC: 1, 0xCD: 2, 0xCE: 4}
_FORMS = {code: struct.Struct(f">{code}") for code in "fdBHIQbhiq"}
_TEXTS = {0xD9: "B", 0xDA: "H", 0xDB: "I"}
_LISTS = {0xDC: "H", 0xDD: "I"}
_MAPS = {0xDE: "H", 0xDF: "I"}
_EXTENSION_32 = 0xC9
_EXTENSIONS: dict[int, int | str] = {
    0xD4: 1,
    0xD5: 2,
    0xD6: 4,
    0xD7: 8,
    0xD8: 16,
    0xC7: "B",
    0xC8: "H",
    _EXTENSION_32: "I",
}


def _join(name: str | None, key: object) -> str:
    return str(key) if name is None else f"{name}.{key}"


def _write(out: Writer, target: BinaryIO, value: Any, name: str | None, ties: bytes = b"") -> None:
    import msgpack

    if isinstance(value, dict):
        packer = msgpack.Packer()
        parts = [ties[at : at + _LONGEST] for at in range(0, len(ties), _LONGEST)]
        target.write(packer.pack_map_header(len(value) + len(parts)))
        for part in parts:
            target.write(packer.pack(next(iter(value))))
            target.write(struct.pack(">BIb", _EXTENSION_32, len(part), _TIES) + part)
        for key, child in value.items():
            target.write(packer.pack(key))
            _write(out, target, child, _join(name, key))
    elif not isinstance(value, LazyArray):
        target.write(_packed_value(name or "", value))
    elif value.dtype.name not in STORED_DTYPES:
        raise CheckpointError(f"{name}: msgpack of Flax has no {value.dtype.name}")
    elif value.nbytes <= _MOST_CHUNK:
        _write_array(out, target, value, name or "")
    else:
        packer = msgpack.Packer()
        step = _MOST_CHUNK // value.dtype.itemsize
        flat = value.reshape((math.prod(value.shape),))
        starts = range(0, flat.shape[0], step)
        target.write(packer.pack_map_header(3))
        target.write(packer.pack(_CHUNKED) + packer.pack(True) + packer.pack("shape"))
        target.write(packer.pack({str(at): n for at, n in enumerate(value.shape)}))
        target.write(packer.pack("chunks") + packer.pack_map_header(len(starts)))
        for at, start in enumerate(starts):
            target.write(packer.pack(str(at)))
            chunk = flat.slice(start, min(start + step, flat.shape[0]))
            _write_array(out, target, chunk, name or "")


def _packed_value(name: str, value: Any) -> bytes:
    import msgpack

    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise CheckpointError(f"{show(name)}: msgpack has no integers of more than 64 bits")
    if isinstance(value, str) and len(value.encode()) > _LONGEST:
        raise CheckpointError(f"{show(name)}: is a text of more than {_LONGEST:,} bytes")
    packed: bytes = msgpack.packb(value)
    return packed


def _write_array(out: Writer, target: BinaryIO, array: LazyArray, name: str) -> None:
    import msgpack

    about = b"\x93" + msgpack.packb(array.shape) + msgpack.packb(array.dtype.name)
    about += b"\xc6" + struct.pack(">I", array.nbytes)
    target.write(b"\xc9" + struct.pack(">Ib", len(about) + array.nbytes, _ARRAY) + about)
    out.put(target, name, array)
