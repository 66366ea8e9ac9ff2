"""The CRC-32 of bytes that are read in parts, in any order and by several threads."""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from functools import lru_cache
from operator import itemgetter

from fmapper.files.untrusted import Misfit

_POLYNOMIAL = 0xEDB88320  # of CRC-32, the coefficient of x**31 in the lowest bit
_ONE, _EIGHTH = 1 << 31, 1 << 23  # the polynomials 1 and x**8
_lock = threading.Lock()  # one for all: a file has many, and holds it for microseconds
_MOST_PARTS = 4096  # of a file that are kept apart


class Checksum:
    """Verifies the CRC-32 of a range of bytes as soon as each of them has been read once.

    A range of which some bytes are never read is not verified.

    Args:
        name: The name of the range, for the error.
        size: The number of bytes.
        expected: Their CRC-32.
        head: The first bytes, which have been read before.

    Raises:
        Misfit: The range is complete, and its checksum differs.
    """

    __slots__ = ("_expected", "_name", "_parts", "_size")

    def __init__(self, name: str, size: int, expected: int, head: bytes = b"") -> None:
        self._name, self._size, self._expected = name, size, expected
        self._parts = [(0, len(head), zlib.crc32(head))]  # begin, end, CRC-32: in order and apart
        self._verify()

    def add(self, data: bytes | memoryview, start: int) -> None:
        """Adds bytes that begin at `start` to the checksum, except those that were added before.

        Raises:
            Misfit: The range is complete, and its checksum differs.
        """
        while (gap := self._gap(start, start + len(data))) is not None:
            begin, stop = gap
            self._insert(begin, stop, zlib.crc32(data[begin - start : stop - start]))
        self._verify()

    def _verify(self) -> None:
        _, stop, checksum = self._parts[0]
        if stop == self._size and checksum != self._expected:
            raise Misfit(f"{self._name} is damaged: the checksum differs")

    def _gap(self, start: int, stop: int) -> tuple[int, int] | None:
        """Returns the first run of bytes in a range that has not been read."""
        with _lock:
            at = bisect_right(self._parts, start, key=itemgetter(0))
            start = max(start, self._parts[at - 1][1])
            if at < len(self._parts):
                stop = min(stop, self._parts[at][0])
        return (start, stop) if start < stop else None

    def _insert(self, start: int, stop: int, checksum: int) -> None:
        """Adds a part and joins it to its neighbours."""
        with _lock:
            parts = self._parts
            at = bisect_right(parts, start, key=itemgetter(0))
            if parts[at - 1][1] > start or (at < len(parts) and parts[at][0] < stop):
                return  # another thread has read some of these bytes meanwhile
            if at < len(parts) and parts[at][0] == stop:
                _, end, other = parts.pop(at)
                checksum = join_checksums(checksum, other, end - stop)
                stop = end
            if parts[at - 1][1] == start:
                at -= 1
                begin, _, other = parts.pop(at)
                checksum = join_checksums(other, checksum, stop - start)
                start = begin
            if len(parts) > _MOST_PARTS:
                del parts[1:]  # a range that is read in many places is not read whole
                return
            parts.insert(at, (start, stop, checksum))


def join_checksums(first: int, second: int, length: int) -> int:
    """Combines the CRC-32 of two runs of bytes into that of both, like zlib's `crc32_combine`.

    Args:
        first: The CRC-32 of the first run.
        second: The CRC-32 of the second run.
        length: The number of bytes of the second run.

    Examples:
        >>> import zlib
        >>> join_checksums(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True
    """
    return _multiply(_shift(length), first) ^ second


@lru_cache(256)
def _shift(length: int) -> int:
    """Returns x**(8 * length) modulo the polynomial."""
    power, product = _EIGHTH, _ONE
    while length:
        if length & 1:
            product = _multiply(power, product)
        power = _multiply(power, power)
        length >>= 1
    return product


def _multiply(a: int, b: int) -> int:
    """Multiplies two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
