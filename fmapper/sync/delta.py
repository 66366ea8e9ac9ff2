"""Deltas of bits: the elements of an array that differ from those of another, in few bytes.

Between two steps of training in bfloat16 some 99 % of the elements stay as they are, bit for bit.
A code consists of a head, a table with a row for each chunk of 1 MiB, and the chunks: the distances
between the elements that have changed, and then their new values. The distances are of one or two
bytes, whichever takes less; the largest number of that width stands for as many elements that have
not changed, and continues. A chunk that would take more than its values is these values.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fmapper.checkpoints.formats.writer import in_order
from fmapper.errors import CheckpointError
from fmapper.moves.host_copy import threads_for_memory

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

T = TypeVar("T")
CHUNK = 1 << 20  # bytes of an array that are compared, and hashed, at a time
PART = 8 << 20  # bytes that a thread compares or hashes at a time
_VERSION = 1
_HEAD = struct.Struct("<IIQ")  # version, bytes of an element, elements
_ROW = [("width", "u1"), ("gaps", "<u4"), ("values", "<u4")]
_ROW_BYTES = 9


def encode(base: Array, new: Array) -> Array:
    """Returns the code that makes of one array another one.

    Args:
        base: A one-dimensional array of unsigned integers: the bits of any array.
        new: An array of the same shape and dtype.

    Returns:
        The code as a uint8 array: at most a few bytes for each MiB more than `new` has.

    Raises:
        ValueError: The arrays are something else, or not alike.

    Examples:
        >>> import numpy as np
        >>> base, new = np.zeros(1000, np.uint16), np.zeros(1000, np.uint16)
        >>> new[[3, 700]] = 5
        >>> decode(base, encode(base, new))[700], len(encode(base, new))
        (np.uint16(5), 33)
    """
    import numpy as np

    _check_bits(base)
    _check_bits(new)
    if (base.shape, base.dtype) != (new.shape, new.dtype):
        raise ValueError(f"{new.dtype}{[*new.shape]} has no delta to {base.dtype}{[*base.shape]}")
    begin = head_bytes(base.size, base.itemsize)
    out = np.empty(begin + base.nbytes, np.uint8)  # memory that is not written to takes no room
    rows, at = [], begin
    ranges = (slice(*ends) for ends in ranges_of(base.size, base.itemsize))
    found = in_threads(lambda range: list(chunks(base[range], new[range])), ranges, base.nbytes)
    for row, parts in itertools.chain.from_iterable(found):
        rows.append(row)
        for part in parts:
            out[at : at + part.nbytes] = part.view(np.uint8)
            at += part.nbytes
    out[:begin] = head(base.size, base.itemsize, rows)
    out.resize(at, refcheck=False)  # no view of it is left
    return out


def ranges_of(size: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of elements that are compared by one thread each."""
    most = PART // itemsize
    return ((at, min(at + most, size)) for at in range(0, size, most))


def in_threads(work: Callable[[Any], T], items: Iterable[Any], nbytes: int) -> Iterable[T]:
    """Yields `work(item)` in order, computed in threads where that is worth starting them."""
    return in_order(work, items, threads_for_memory()) if nbytes > PART else map(work, items)


def decode(base: Array, delta: Array) -> Array:
    """Returns the array that `encode` was given as `new`.

    Raises:
        CheckpointError: The code is damaged, or of an array of another size.
    """
    new = base.copy()
    apply(new, delta)
    return new


def apply(base: Array, delta: Array) -> None:
    """Changes an array in place to the one that `encode` was given as `new`.

    Args:
        base: The array that the code was made from, in C order.
        delta: The code.

    Raises:
        CheckpointError: The code is damaged, or of an array of another size; nothing has changed.
    """
    _check_bits(base)
    layout = Layout.of(delta[: head_bytes(base.size, base.itemsize)], delta.size, base)
    for at in range(len(layout)):
        layout.check(at, delta[slice(*layout.ends(at))])
    for at in range(len(layout)):
        layout.patch(at, delta[slice(*layout.ends(at))], base[layout.place(at)])


def digest(arrays: Iterable[Array]) -> bytes:
    """Returns 32 bytes that tell arrays apart: a hash of the bits and sizes of each, in order.

    It is SHA-256 of SHA-256 of each MiB, computed in threads: 1 GB/s a core where the processor has
    instructions for it, which BLAKE2 does not reach.

    Args:
        arrays: Arrays of any shape and dtype, in C order.
    """
    whole = hashlib.sha256()
    for hashes in in_order(_hash, _batches(arrays), threads_for_memory()):
        whole.update(hashes)
    return whole.digest()


def _batches(arrays: Iterable[Array]) -> Iterator[list[memoryview]]:
    """Yields chunks of the bytes of arrays, a batch for each task of a thread."""
    batch: list[memoryview] = []
    room = PART
    for array in arrays:
        bits = memoryview(array.reshape(-1).view("u1").data)
        batch.append(memoryview(len(bits).to_bytes(8, "little")))
        for part in _split(bits):
            batch.append(part)
            room -= len(part)
            if room <= 0:
                yield batch
                batch, room = [], PART
    yield batch


def _split(bits: memoryview) -> Iterator[memoryview]:
    return (bits[at : at + CHUNK] for at in range(0, len(bits), CHUNK))


def _hash(batch: Iterable[memoryview]) -> bytes:
    return b"".join(hashlib.sha256(part).digest() for part in batch)


def hash_chunks(bits: Array) -> bytes:
    """Returns the hash of each MiB of an array, one after the other."""
    return _hash(_split(memoryview(bits.view("u1").data)))


# --- chunks ---------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The form of a chunk: the bytes of a distance, 0 for values alone, and how many there are."""

    width: int
    gaps: int
    values: int


def chunks(base: Array, new: Array) -> Iterator[tuple[Row, tuple[Array, ...]]]:
    """Yields the form and the parts of each chunk of a code."""
    import numpy as np

    most = CHUNK // base.itemsize
    differs = np.empty(min(most, base.size), bool)
    for start in range(0, base.size, most):
        old, values = base[start : start + most], new[start : start + most]
        yield _chunk(np.not_equal(old, values, out=differs[: old.size]), values)


def _chunk(differs: Array, values: Array) -> tuple[Row, tuple[Array, ...]]:
    import numpy as np

    whole = Row(0, 0, values.size), (values,)
    count = int(np.count_nonzero(differs))
    if not count:
        return Row(1, 0, 0), ()
    if count * (1 + values.itemsize) >= values.nbytes:
        return whole
    places = np.flatnonzero(differs)
    gaps = places.copy()  # elements between those that differ
    gaps[1:] -= places[:-1] + 1
    skips = {width: gaps // _escape(width) for width in (1, 2)}
    width = min(skips, key=lambda width: width * int(skips[width].sum() + count))
    ends = np.cumsum(skips[width] + 1)
    if int(ends[-1]) * width + count * values.itemsize >= values.nbytes:
        return whole
    codes = np.full(ends[-1], _escape(width), f"<u{width}")
    codes[ends - 1] = gaps - skips[width] * _escape(width)
    return Row(width, codes.size, count), (codes, values[places])


def _escape(width: int) -> int:
    return (1 << 8 * width) - 1


# --- the head, and what it says of the chunks -----------------------------------------------------


def head_bytes(size: int, itemsize: int) -> int:
    """Returns the bytes of head and table of a code."""
    return _HEAD.size + _ROW_BYTES * -(-size * itemsize // CHUNK)


def head(size: int, itemsize: int, rows: list[Row]) -> Array:
    """Returns head and table of a code."""
    import numpy as np

    data = _HEAD.pack(_VERSION, itemsize, size) + np.array(rows, _ROW).tobytes()
    return np.frombuffer(data, np.uint8)


class Layout:
    """The chunks of a code, whose form and sizes have been checked."""

    def __init__(self, rows: Array, starts: list[int], size: int, most: int) -> None:
        self._rows, self._starts, self._size, self._most = rows, starts, size, most

    @classmethod
    def of(cls, head: Array, nbytes: int, bits: Any) -> Layout:
        """Reads the table of a code.

        Args:
            head: The first `head_bytes` bytes of the code, or fewer if it has not so many.
            nbytes: The bytes of the code.
            bits: The array that it is of, for size and dtype.

        Raises:
            CheckpointError: It is not the table of a code for this array.
        """
        import numpy as np

        size, itemsize = bits.size, bits.dtype.itemsize
        is_code = head.dtype == np.uint8 and head.ndim == 1 and head.flags.c_contiguous
        if not is_code or head.size < head_bytes(size, itemsize):
            raise CheckpointError("the delta is damaged, or of a smaller array")
        version, *found = _HEAD.unpack_from(head[: _HEAD.size].tobytes())
        if version != _VERSION:
            raise CheckpointError(f"the delta has the format {version}; this version reads 1")
        if found != [itemsize, size]:
            raise CheckpointError(
                f"the delta is of {found[1]:,} elements of {found[0]} bytes, the array has "
                f"{size:,} of {itemsize}"
            )
        rows = head[_HEAD.size :].view(_ROW)
        most = CHUNK // itemsize
        sizes = np.full(len(rows), most)
        sizes[-1:] -= len(rows) * most - size
        width, gaps, values = (rows[name].astype(np.int64) for name, _ in _ROW)
        whole = (width == 0) & (gaps == 0) & (values == sizes)
        sparse = ((width == 1) | (width == 2)) & (values <= gaps) & (gaps <= sizes)
        sparse &= (gaps == 0) == (values == 0)
        starts = np.cumsum([head.size, *(gaps * width + values * itemsize)])
        if not (whole | sparse).all() or starts[-1] != nbytes:
            raise CheckpointError("the delta is damaged: its sizes do not fit the array")
        return cls(rows, starts.tolist(), size, most)

    def __len__(self) -> int:
        """Returns the number of chunks."""
        return len(self._rows)

    def ends(self, at: int) -> tuple[int, int]:
        """Returns where a chunk begins and ends in the code."""
        return self._starts[at], self._starts[at + 1]

    def place(self, at: int) -> slice:
        """Returns the elements that a chunk is of."""
        return slice(at * self._most, min((at + 1) * self._most, self._size))

    def _gaps(self, at: int, chunk: Array) -> Array:
        width, gaps, _ = self._rows[at].item()
        found: Array = chunk[: gaps * width].view(f"<u{width}")
        return found

    def check(self, at: int, chunk: Array) -> None:
        """Checks that the distances of a chunk end within it, and are as many as its values.

        Raises:
            CheckpointError: They do not, or are not.
        """
        import numpy as np

        width, gaps, values = self._rows[at].item()
        if not width or not gaps:
            return
        codes, place = self._gaps(at, chunk), self.place(at)
        steps = codes != _escape(width)
        last = int(codes.sum(dtype=np.int64)) + values - 1
        if not steps[-1] or np.count_nonzero(steps) != values or last >= place.stop - place.start:
            raise CheckpointError("the delta is damaged: it names elements that are not there")

    def patch(self, at: int, chunk: Array, out: Array) -> None:
        """Writes the values of a chunk, which has been checked, into its elements of an array."""
        import numpy as np

        width, gaps, _ = self._rows[at].item()
        values = chunk[gaps * width :].view(out.dtype)
        if not width:
            out[:] = values
        elif gaps:
            codes = self._gaps(at, chunk)
            steps = codes != _escape(width)
            out[(np.cumsum(codes.astype(np.int64) + steps) - 1)[steps]] = values


def _check_bits(array: Array) -> None:
    is_dense = array.ndim == 1 and array.flags.c_contiguous
    if not (is_dense and array.dtype.kind == "u" and array.dtype.isnative):
        raise ValueError(
            f"a delta is of one-dimensional arrays of unsigned integers in C order, not of "
            f"{array.dtype}{[*array.shape]}: use array.reshape(-1).view('u2')"
        )
