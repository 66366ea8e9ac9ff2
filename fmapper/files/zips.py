"""The members of a zip file; a checkpoint may have 100,000 of them."""

from __future__ import annotations

import struct
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol

from fmapper.files.bounds import WAY_OUT, check_count
from fmapper.files.untrusted import Misfit, show
from fmapper.switches import settings

STORED, DEFLATED = 0, 8
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3I2H")
_LENGTHS = struct.Struct("<2H")  # of the name and the extra field, at the end of the local header
_NEAR = 4096  # bytes of one read
_USUAL_END = 256  # bytes; enough for a file without a comment
_COMMENT = 1 << 16  # bytes that may follow the end
_MOST_LIST = 32_000_000  # bytes
_PIECE = 1 << 20
_PACKED = 1 << 16  # bytes of input that a saved zlib state may still have to unpack
_APART = 8 << 20  # bytes between saved zlib states
_MOST_STATES = 256  # of a member; each takes about 40 kB and its unread input
_FULL = 0xFFFFFFFF
_ENCRYPTED, _UTF_8 = 1, 1 << 11


class _File(Protocol):
    size: int

    def read_into(self, handle: int, out: memoryview, offset: int) -> None: ...


class ZipMember(NamedTuple):
    """A member of a zip file: name, offset, compression, sizes and checksum.

    Attributes:
        name: Its name.
        offset: The offset of its local header in the file.
        method: `ZipMember.STORED`, or the method by which it is compressed.
        packed: Its compressed size in bytes.
        size: Its uncompressed size in bytes.
        checksum: The CRC-32 of its uncompressed bytes.
    """

    name: str
    offset: int
    method: int
    packed: int
    size: int
    checksum: int

    @property
    def is_stored(self) -> bool:
        """Returns whether it is stored without compression."""
        return self.method == STORED


class ZipMembers(dict[str, ZipMember]):
    """The members of a zip file by name.

    `zipfile` creates an object with thirty fields per member, which takes ten microseconds, and has
    no bound on their number.

    Args:
        file: The file or a part of it, an object with `size` and `read_into`.
        handle: The descriptor of the open file.
        most: The maximal number of members; None for the usual bound.

    Raises:
        Misfit: The file is not a zip file, is damaged, or has too many members.
    """

    def __init__(self, file: _File, handle: int, most: int | None = None) -> None:
        super().__init__()
        self._most = most
        self._file, self._handle = file, handle
        self._near, self._near_at = b"", 0
        for member in _members(*self._list()):
            if member.name in self:
                raise Misfit(f"{show(member.name)} occurs twice")
            self[member.name] = member
        _check_apart(self.values())

    @classmethod
    def only(cls, file: _File, handle: int, member: ZipMember) -> ZipMembers:
        """Creates an instance for reading a single member."""
        archive = cls.__new__(cls)
        archive._file, archive._handle = file, handle
        archive._near, archive._near_at = b"", 0
        archive[member.name] = member
        return archive

    def _list(self) -> tuple[bytes, int, int]:
        """Returns the raw list of members, their number, and the offset where their data ends."""
        size = self._file.size
        for length in (_USUAL_END, _COMMENT + _END.size):
            tail = self.bytes_at(max(0, size - length), length)
            at = tail.rfind(b"PK\5\6")
            if at >= 0:
                break
        if at < 0 or at + _END.size > len(tail):
            raise Misfit("is not a zip file, or is truncated: it has no list of members")
        _, _, _, _, count, length, offset, _ = _END.unpack_from(tail, at)
        stop = size - len(tail) + at
        lost = "is a damaged zip file: its list of members is not where it says"
        if at >= _LOCATOR.size and tail.startswith(b"PK\6\7", at - _LOCATOR.size):
            _, _, place, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
            end = self.bytes_at(place, _END_64.size)
            if len(end) < _END_64.size or not end.startswith(b"PK\6\6"):
                raise Misfit(lost)
            count, length, offset = _END_64.unpack(end)[7:]
            stop = place
        if offset + length > stop:
            raise Misfit(lost)
        if self._most is None:
            check_count(count, "members")
        elif count > self._most:
            raise Misfit(f"has {count:,} members, where {self._most} are expected")
        if not _ENTRY.size * count <= length <= (_ENTRY.size + 3 * 65535) * count:
            raise Misfit("is a damaged zip file: the length of its list of members is wrong")
        if length > _MOST_LIST and settings.bounds:
            raise Misfit(f"has a list of members of {length:,} bytes. {WAY_OUT}")
        return self.bytes_at(offset, length), count, offset

    def begin(self, member: ZipMember) -> int:
        """Returns the offset of the bytes of a member in the file.

        Raises:
            Misfit: The file has no such member.
        """
        head = self.bytes_near(member.offset, _LOCAL.size)
        if len(head) < _LOCAL.size or not head.startswith(b"PK\3\4"):
            raise Misfit(f"{show(member.name)} is damaged")
        name, extra = _LENGTHS.unpack_from(head, _LOCAL.size - _LENGTHS.size)
        begin: int = member.offset + _LOCAL.size + name + extra
        if begin + member.packed > self._file.size:
            raise Misfit(f"{show(member.name)} is longer than the file")
        return begin

    def bytes_at(self, start: int, count: int) -> bytes:
        """Returns some bytes of the file, fewer where it ends."""
        out = bytearray(max(0, min(count, self._file.size - start)))
        self._file.read_into(self._handle, memoryview(out), start)
        return bytes(out)

    def bytes_near(self, start: int, count: int) -> bytes:
        """Returns a few bytes of the file; caches those that follow, which are often read next."""
        at = start - self._near_at
        if not 0 <= at <= at + count <= len(self._near):
            self._near, self._near_at, at = self.bytes_at(start, max(count, _NEAR)), start, 0
        return self._near[at : at + count]

    def parts(
        self, member: ZipMember, most: int | None = None, *, check: bool = True
    ) -> Iterator[bytes]:
        """Yields the decompressed bytes of a member, and verifies the checksum at the end.

        Args:
            member: The member.
            most: How many bytes are wanted; None for all.
            check: Whether the file has checksums.

        Raises:
            Misfit: The member is not compressed by deflate, or is damaged.
        """
        if member.method not in (STORED, DEFLATED):
            raise Misfit(f"{show(member.name)} uses a compression that NumPy does not write")
        left = member.size if most is None else min(most, member.size)
        is_whole, checksum = check and left == member.size, 0
        step = min(_PIECE, max(left, _NEAR))  # enough for a header
        try:
            for data in (self._pieces if member.is_stored else self._unpack)(member, step):
                part = data[:left]
                left -= len(part)
                checksum = zlib.crc32(part, checksum) if is_whole else 0
                yield part
                if not left:
                    break
        except zlib.error as error:
            raise Misfit(f"{show(member.name)} is damaged: {error}") from None
        if left:
            raise Misfit(f"{show(member.name)} is shorter than its declared size")
        if is_whole and checksum != member.checksum:
            raise Misfit(f"{show(member.name)} is damaged: the checksum differs")

    def _pieces(self, member: ZipMember, step: int) -> Iterator[bytes]:
        begin = self.begin(member)
        for at in range(0, member.packed, step):
            yield self.bytes_at(begin + at, min(step, member.packed - at))

    def _unpack(self, member: ZipMember, step: int) -> Iterator[bytes]:
        unpack = zlib.decompressobj(-zlib.MAX_WBITS)
        for packed in self._pieces(member, step):
            data = packed
            while data and not unpack.eof:
                yield unpack.decompress(data, step)
                data = unpack.unconsumed_tail
        while not unpack.eof:  # output that zlib still buffers
            rest = unpack.decompress(b"", step)
            if not rest:
                return
            yield rest


class Unpacking:
    """Random access to the unpacked bytes of a compressed member.

    Since zlib has to unpack everything before a position, its state is saved at intervals.

    Args:
        member: The member.
    """

    def __init__(self, member: ZipMember) -> None:
        self._member = member
        self._every = max(_APART, member.size // _MOST_STATES)
        self._lock = threading.Lock()
        self._states: list[tuple[int, int, Any]] = [(0, 0, zlib.decompressobj(-zlib.MAX_WBITS))]

    def parts(self, archive: ZipMembers, start: int, count: int) -> Iterator[bytes]:
        """Yields `count` bytes from `start` on.

        Raises:
            Misfit: The member is damaged.
        """
        with self._lock:
            index = bisect_right(self._states, start, key=itemgetter(0)) - 1
            at, packed_at, state = self._states[index]
            unpack = state.copy()
        begin, stop = archive.begin(self._member), start + count
        while at < stop:
            packed = unpack.unconsumed_tail
            if not packed:
                size = min(_PACKED, self._member.packed - packed_at)
                packed = archive.bytes_at(begin + packed_at, size)
                packed_at += len(packed)
            try:
                data = unpack.decompress(packed, _PIECE)
            except zlib.error as error:
                raise Misfit(f"{show(self._member.name)} is damaged: {error}") from None
            if not data and (unpack.eof or not packed):
                raise Misfit(f"{show(self._member.name)} is shorter than its declared size")
            if at + len(data) > start:
                yield data[max(0, start - at) : stop - at]
            at += len(data)
            with self._lock:
                if at - self._states[-1][0] >= self._every:
                    self._states.append((at, packed_at, unpack.copy()))


def _members(data: bytes, count: int, limit: int) -> Iterator[ZipMember]:
    at = 0
    for _ in range(count):
        fields = _ENTRY.unpack_from(data, at) if at + _ENTRY.size <= len(data) else (b"",) * 19
        flags, method, checksum, packed, size = fields[5], fields[6], *fields[9:12]
        length, extra, comment, offset = *fields[12:15], fields[18]
        at += _ENTRY.size
        if fields[0] != b"PK\1\2" or at + length + extra + comment > len(data):
            raise Misfit("is a damaged zip file: its list of members is truncated")
        try:
            name = data[at : at + length].decode("utf-8" if flags & _UTF_8 else "cp437")
        except UnicodeDecodeError:
            raise Misfit("has a member with a name that is not text") from None
        if _FULL in (packed, size, offset):
            more = data[at + length : at + length + extra]
            size, packed, offset = _large(more, size, packed, offset)
        at += length + extra + comment
        if offset + packed > limit:
            raise Misfit(f"{show(name)} is longer than the file")
        if method == STORED and packed != size:
            raise Misfit(f"{show(name)} is damaged: its sizes differ")
        if flags & _ENCRYPTED:
            raise Misfit(f"{show(name)} is encrypted")
        yield ZipMember(name, offset, method, packed, size, checksum)


def _check_apart(members: Iterable[ZipMember]) -> None:
    """Raises if members overlap, as in zip bombs."""
    end = 0
    for member in sorted(members, key=_offset):
        if member.offset < end:
            raise Misfit(f"{show(member.name)} overlaps another member")
        end = member.offset + _LOCAL.size + member.packed


_offset = attrgetter("offset")


def _large(extra: bytes, *numbers: int) -> list[int]:
    """Returns the sizes and the offset of a member, from its 64-bit fields if it has them."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            whole = extra[at + 4 : at + 4 + length]
            long = struct.iter_unpack("<Q", whole[: len(whole) // 8 * 8])
            return [next(long, (n,))[0] if n == _FULL else n for n in numbers]
        at += 4 + length
    return [*numbers]
