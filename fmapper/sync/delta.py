"""Deltas of bits: the elements of an array that differ from those of another, in few bytes.

Between two steps of training in bfloat16 some 99 % of the elements stay as they are, bit for bit.
A code has the number of elements that differ in each block of 65,536, as uint32; then the new
values of all of these; then their places in their blocks, as uint16. Where that would take as many
bytes as the array, the code is the new array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from fmapper.checkpoints.formats.writer import in_order
from fmapper.errors import CheckpointError
from fmapper.machine import threads_for_memory

if TYPE_CHECKING:
    import numpy as np

    from fmapper.checkpoints.lazy import LazyArray

    Array = np.ndarray[Any, Any]

T = TypeVar("T")
PART = 8 << 20  # bytes that a thread compares or hashes at a time, of whole blocks
BLOCK = 1 << 16


def bits_of(array: LazyArray) -> LazyArray:
    """Returns the bits of an array as one dimension of unsigned integers."""
    return array.reshape((array.size,)).view(f"uint{8 * min(array.dtype.itemsize, 8)}")


def digest(bits: LazyArray) -> str:
    """Returns 32 digits that tell bits apart: SHA-256 of that of each 8 MiB, hashed in threads."""
    whole = hashlib.sha256()
    for part in _in_threads(lambda part: hashlib.sha256(part(bits).data).digest(), bits):
        whole.update(part)
    return whole.hexdigest()[:32]


def encode(base: LazyArray, new: LazyArray) -> LazyArray:
    """Encodes the difference between the bits of two arrays, from `bits_of`, as uint8."""
    import numpy as np

    from fmapper.checkpoints.lazy import LazyArray

    def compare(part: Callable[[LazyArray], Array]) -> tuple[Array, ...]:
        old, values = part(base), part(new)
        places = np.flatnonzero(old != values)
        counts = np.bincount(places // BLOCK, minlength=-(-old.size // BLOCK))
        return counts.astype("<u4"), values[places], (places % BLOCK).astype("<u2")

    kinds = zip(*_in_threads(compare, base), strict=True)
    pieces = [piece.view(np.uint8) for kind in kinds for piece in kind]
    if sum(piece.size for piece in pieces) >= new.nbytes:
        return new.view("uint8")
    return LazyArray.of(np.concatenate(pieces))


def _in_threads(work: Callable[[Callable[[LazyArray], Array]], T], bits: LazyArray) -> Iterable[T]:
    """Yields the results of a function, in order; it is given a function that reads a part."""
    most = PART // bits.dtype.itemsize
    ends = ((at, min(at + most, bits.size)) for at in range(0, bits.size, most))
    parts = (lambda array, part=part: array.read((part,)) for part in ends)
    return in_order(work, parts, threads_for_memory()) if bits.nbytes > PART else map(work, parts)


class Changes:
    """A decoded difference, checked against the size of the array.

    Raises:
        CheckpointError: The code is damaged, or of another array.
    """

    def __init__(self, code: LazyArray, size: int, dtype: np.dtype[Any]) -> None:
        import numpy as np

        if code.size == size * dtype.itemsize:
            self._places, self._values = None, code.view(dtype)
            return
        data, blocks = code.read(), -(-size // BLOCK)
        end = 4 * blocks
        counts = data[:end].view("<u4") if data.size >= end else np.zeros(0, np.uint32)
        count = int(counts.sum(dtype=np.int64))
        last = end + count * dtype.itemsize
        if data.size != last + 2 * count:
            raise CheckpointError("the delta is damaged, or of an array of another size")
        self._new = data[end:last].view(dtype)
        places = np.repeat(np.arange(blocks) * BLOCK, counts) + data[last:].view("<u2")
        if count and (places[-1] >= size or (places[1:] <= places[:-1]).any()):
            raise CheckpointError("the delta is damaged: it names elements that are not there")
        self._places = places

    def apply(self, bits: Array, start: int = 0) -> None:
        """Writes the new values into a range of the bits, from element `start` on."""
        import numpy as np

        if self._places is None:
            self._values.read(((start, start + bits.size),), bits)
            return
        low, high = np.searchsorted(self._places, (start, start + bits.size))
        bits[self._places[low:high] - start] = self._new[low:high]
