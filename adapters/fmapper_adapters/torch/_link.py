"""Tensors over the link between host and GPU, in batches.

A copy costs some 10 us however small it is, and a GPU reads pageable memory through a buffer of the
driver, at a fraction of the rate of the link. So everything goes through chunks of pinned memory:

* Small tensors are packed. Those of one dtype, shape and strides go side by side, so that one
  `torch.stack` fills the chunk and one `unbind` takes it apart; the chunk crosses in one copy.
* Large tensors cross in pieces, straight to where they belong. Threads fill the next chunk while
  the last ones are under way.

Every tensor gets memory of its own on the other side. Views of one chunk would be as right to
compute with, but safetensors refuses tensors that share a storage, `torch.save` writes all of it
with each, and the last one alive keeps 32 MiB. What the split costs is in the notes on `SPLIT`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, Protocol

import torch
from torch.utils.dlpack import from_dlpack

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (to, from)

CHUNK: Final = 32 << 20
"""Bytes of a pinned buffer: 0.6 ms of a fast link, a hundred times what starting a copy costs."""

BUFFERS: Final = 4
"""Pinned buffers of the process: 128 MiB in all, however large the model."""

AHEAD: Final = 3
"""Buffers up to which a new one is pinned, some 10 ms, rather than waiting for a copy, 0.6 ms."""

SMALL: Final = 512 << 10
"""Bytes up to which a tensor is packed: a copy of its own costs as long as these take to cross."""

PIECE: Final = CHUNK // 4
"""Bytes of the copies in which a large tensor crosses."""

ALIGN: Final = 256
"""Where a packed tensor starts: as `cudaMalloc` aligns, so that every kernel may load vectors."""

SPLIT: Literal["copy", "dlpack"] = "copy"
"""How packed tensors get storages of their own on the GPU.

"copy" allocates each and copies all with fused kernels: `empty_like` 1.2 us a tensor measured on a
CPU, some 0.5 more expected of the CUDA allocator, `_foreach_copy_` 0.3 us and 1/64 of a launch.
"dlpack" makes each a storage that is a slice of the chunk: 1.4 us and no kernel. But such a tensor
keeps its chunk alive, its storage cannot be resized (as FSDP does) or shared between processes, and
`record_stream` does nothing for it. One copy on the GPU per tensor would cost some 5 us.
"""

SIDE_STREAM: bool = True
"""Whether copies have a stream of their own, or go to the caller's."""

_FEW: Final = 4  # so few tensors, of together so many bytes, are not worth a pinned buffer
_LITTLE: Final = 4 << 20
_STACKED: Final = 64 << 10  # bytes from which a bare memmove beats the packing in torch
_SERIAL: Final = 32_767  # elements up to which torch.stack is one loop, not a copy_ per tensor
_SLICE: Final = 4 << 20  # bytes that a thread copies at a time
_THREADS: Final = 8  # one fills 8 to 12 GB/s; a link takes 55

# Copied as what they are. The others go as integers: a copy of a float16 by way of float32, as
# kernels like to do it, does not keep the bits of a NaN, and some dtypes have no kernel.
_EXACT: Final = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float32, torch.float64, torch.complex64, torch.complex128}
)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LinkError(RuntimeError):
    """A tensor could not be brought over; nothing that was made for the call is left.

    The cause has lost its traceback, whose frames would keep what was allocated alive.

    Attributes:
        index: Which of the tensors that were given.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def upload(
    tensors: Sequence[torch.Tensor], device: torch.device, *, link: Link | None = None
) -> list[torch.Tensor]:
    """Brings tensors from the host to a device; the results are new tensors.

    The caller may change the sources as soon as this returns, and use the results on the stream
    that was current when it was called. Strides are those that `tensor.to(device)` gives.

    Args:
        tensors: Strided tensors on the CPU that require no gradient.
        device: Where they are wanted. CUDA gets the batched path, other devices `tensor.to`.
        link: Instead of the one that belongs to the device.

    Returns:
        One tensor per tensor, in order.

    Raises:
        LinkError: A tensor could not be brought over, for want of memory for example.
    """
    if link is None:
        if device.type != "cuda" or _is_little(tensors):
            return _one_by_one(tensors, device)
        link = CudaLink(device)
    return _made(_Upload(tensors, link))


def download(tensors: Sequence[torch.Tensor], *, link: Link | None = None) -> list[torch.Tensor]:
    """Brings tensors from their devices to pageable memory of the host; the results are new.

    It waits for the values: the results are there, and the sources free, when it returns.

    Args:
        tensors: Strided tensors that require no gradient, on one device or on several.
        link: Instead of those that belong to their devices.

    Returns:
        One CPU tensor per tensor, in order, with the strides that `tensor.to("cpu")` gives.

    Raises:
        LinkError: A tensor could not be brought over.
    """
    if link is not None:
        return _made(_Download(tensors, link))
    results: list[Any] = [None] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    for device, indices in places.items():
        group = [tensors[index] for index in indices]
        try:
            if device.type != "cuda" or _is_little(group):
                found = _one_by_one(group, torch.device("cpu"))
            else:
                found = _made(_Download(group, CudaLink(device)))
        except LinkError as error:
            error.index = indices[error.index]
            raise
        for index, result in zip(indices, found, strict=True):
            results[index] = result
    return results


def release() -> None:
    """Gives up the pinned buffers that no call is using, and the threads that fill them.

    The memory goes back to torch's own cache of pinned memory, which others use as well.
    """
    _pinned.release()
    _copiers.release()


def _is_little(tensors: Sequence[torch.Tensor]) -> bool:
    return len(tensors) < _FEW and sum(tensor.nbytes for tensor in tensors) <= _LITTLE


def _one_by_one(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    try:
        for tensor in tensors:
            results.append(tensor.to(device, copy=True))
    except Exception as error:
        index = len(results)
        results.clear()
        raise LinkError(str(error), index) from error.with_traceback(None)
    return results


def _made(trip: _Trip) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    try:
        trip.run()
    except Exception as error:
        _fail(trip, error)
    finally:
        results, trip.results = trip.results, []
    return results


def _fail(trip: _Trip, error: Exception) -> NoReturn:
    trip.results.clear()
    raise LinkError(str(error), trip.failed) from error.with_traceback(None)


# --- what is to cross together -------------------------------------------------------------------


@dataclass(slots=True)
class _Pack:
    """Small tensors of one dtype, shape and strides, side by side."""

    indices: list[int]
    offset: int  # bytes, in the chunk
    step: int  # bytes, from one to the next
    nbytes: int  # of one, without what fills it up
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of the results
    is_dense: bool  # whether the sources lie in memory as the results will

    def over(self, chunk: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All of them as one tensor on the bytes of a chunk, the first dimension being which.

        A dtype of the same size instead of their own shows their bits.
        """
        count = len(self.indices)
        place = chunk[self.offset : self.offset + count * self.step].view(dtype or self.dtype)
        step = self.step // self.dtype.itemsize
        return place.as_strided((count, *self.shape), (step, *self.strides))


@dataclass(slots=True)
class _Piece:
    """Part of a large tensor: a block of the source, in the order in which the result lies."""

    index: int
    block: torch.Tensor
    start: int  # elements, in the memory of the result
    offset: int  # bytes, in the chunk

    def over(self, chunk: torch.Tensor) -> torch.Tensor:
        """It, as a tensor of the block's shape on the bytes of a chunk."""
        place = chunk[self.offset : self.offset + self.block.nbytes]
        return place.view(self.block.dtype).view(self.block.shape)

    def within(self, result: torch.Tensor) -> torch.Tensor:
        """Its place in the result, as a tensor of the block's shape."""
        flat = result.as_strided((result.numel(),), (1,))
        return flat[self.start : self.start + self.block.numel()].view(self.block.shape)


@dataclass(slots=True)
class _Chunk:
    """What crosses in one buffer: packs first, then pieces."""

    packs: list[_Pack] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    packed: int = 0  # bytes of the packs
    size: int = 0  # bytes of all


def _chunks(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> Iterator[_Chunk]:
    """Distributes tensors that are not empty over chunks."""
    alike: dict[Any, list[int]] = {}
    large: list[int] = []
    for index in indices:
        tensor = tensors[index]
        if tensor.nbytes > SMALL:
            large.append(index)
        else:
            key = tensor.dtype, tensor.shape, tensor.stride()
            alike.setdefault(key, []).append(index)
    chunk = _Chunk()
    for (dtype, shape, strides), members in alike.items():
        first = tensors[members[0]]
        step = _round_up(first.nbytes)
        is_dense = _is_dense(shape, strides)
        to_strides = strides if is_dense else torch.empty_like(first, device="meta").stride()
        done = 0
        while done < len(members):
            some = members[done : done + (CHUNK - chunk.size) // step]
            if not some:
                yield chunk
                chunk = _Chunk()
                continue
            pack = _Pack(
                some, chunk.size, step, first.nbytes, dtype, tuple(shape), to_strides, is_dense
            )
            chunk.packs.append(pack)
            chunk.size = chunk.packed = chunk.size + len(some) * step
            done += len(some)
    for index in large:
        tensor = tensors[index]
        start = 0
        for block in _blocks(_in_memory_order(tensor), PIECE // tensor.element_size()):
            if chunk.size + block.nbytes > CHUNK:
                yield chunk
                chunk = _Chunk()
            chunk.pieces.append(_Piece(index, block, start, chunk.size))
            chunk.size = min(chunk.size + _round_up(block.nbytes), CHUNK)
            start += block.numel()
    if chunk.size:
        yield chunk


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps and overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose elements, row by row, come as they will lie in the result."""
    if _is_dense(tensor.shape, tensor.stride()):
        return tensor.as_strided((tensor.numel(),), (1,))
    strides = torch.empty_like(tensor, device="meta").stride()
    return tensor.permute(sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True))


def _blocks(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Views of at most so many elements that follow each other in row order."""
    if tensor.numel() <= limit:
        yield tensor
        return
    rows = max(1, limit // tensor[0].numel())
    rest = [len(tensor) % rows] if len(tensor) % rows else []
    for part in tensor.split_with_sizes([rows] * (len(tensor) // rows) + rest):
        if part.numel() <= limit:
            yield part
        else:
            yield from _blocks(part[0], limit)


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether the values are the bytes from the first to the last element."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bits(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same size that is copied bit by bit."""
    return dtype if dtype in _EXACT else _BITS[dtype.itemsize]


def _as_bits(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors of one dtype in one that is copied bit by bit."""
    dtype = tensors[0].dtype
    bits = _bits(dtype)
    return tensors if bits is dtype else [tensor.view(bits) for tensor in tensors]


# --- the two ways --------------------------------------------------------------------------------


class _Trip(ABC):
    """One call: its results, and how far it is, so that a failure can be put down to a tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor], link: Link, target: torch.device) -> None:
        self.tensors = tensors
        self.link = link
        self.target = target
        self.results: list[Any] = [None] * len(tensors)
        self.failed = 0  # the tensor at which it failed
        self._about: Sequence[int] = (0,)
        self._made: list[torch.Tensor] = []

    def at(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Says that these tensors are next; the list is to take the results as they are made."""
        self._about, self._made = indices, []
        return self._made

    def run(self) -> None:
        """Fills in the results; whatever happens, nothing that is in flight is let go of."""
        try:
            self._run()
        except BaseException:
            # What has been made so far is freed; copies under way must come first on the stream
            # whose memory it is.
            self.link.end()
            self.failed = self._about[min(len(self._made), len(self._about) - 1)]
            self.results.clear()
            self._made.clear()
            raise

    @abstractmethod
    def _run(self) -> None:
        """Does it."""

    def _others(self) -> list[int]:
        """The tensors that have elements; the empty ones are made at once."""
        found = []
        for index, tensor in enumerate(self.tensors):
            if tensor.numel():
                found.append(index)
            else:
                self.at((index,))
                self.results[index] = torch.empty_like(tensor, device=self.target)
        return found

    def _result(self, index: int) -> torch.Tensor:
        """The result of a large tensor, made with its first piece."""
        found: torch.Tensor | None = self.results[index]
        if found is None:
            self.at((index,))
            found = torch.empty_like(self.tensors[index], device=self.target)
            self.results[index] = found
        return found


class _Upload(_Trip):
    def __init__(self, tensors: Sequence[torch.Tensor], link: Link) -> None:
        super().__init__(tensors, link, link.device)

    def _run(self) -> None:
        others = self._others()
        sizes = [self.tensors[index].nbytes for index in others]
        direct = [
            index
            for index, nbytes in zip(others, sizes, strict=True)
            if nbytes > SMALL and self._is_ready(self.tensors[index])
        ]
        for index in direct:
            result = self._result(index)
            self.link.begin()
            self.link.copy([(result, self.tensors[index])])
            self.link.end()
        mark = self.link.mark() if direct else None
        rest = [index for index in others if self.results[index] is None] if direct else others
        for chunk in _chunks(self.tensors, rest):
            self.at(chunk.packs[0].indices if chunk.packs else (chunk.pieces[0].index,))
            buffer = self.link.pool.take()
            try:
                self._send(chunk, buffer)
            finally:
                self.link.pool.give(buffer)
        if mark is not None:  # these sources are read by the GPU, not by this call
            mark.synchronize()

    def _is_ready(self, tensor: torch.Tensor) -> bool:
        return (
            self.link.is_pinned(tensor)
            and _is_dense(tensor.shape, tensor.stride())
            and not tensor.is_conj()
            and not tensor.is_neg()
        )

    def _send(self, chunk: _Chunk, buffer: Buffer) -> None:
        """Fills a buffer and starts its copies."""
        self._start_filling(chunk, buffer)
        staged, outs, views = self._allocate(chunk)  # while threads fill the buffer
        targets = [piece.within(self._result(piece.index)) for piece in chunk.pieces]
        self._stack(chunk, buffer)
        buffer.join()
        pairs: Pairs = []
        if staged is not None:
            pairs.append((staged, buffer.memory[: chunk.packed]))
        pairs += zip(targets, (p.over(buffer.memory) for p in chunk.pieces), strict=True)
        self.link.begin()
        try:
            self.link.copy(pairs)
        finally:
            buffer.mark = self.link.mark()
        for dtype, some in outs.items():
            self.link.copy_all(some, views[dtype])
        self.link.end()  # before `staged` is freed, and given to somebody on the current stream

    def _start_filling(self, chunk: _Chunk, buffer: Buffer) -> None:
        base = buffer.memory.data_ptr()
        moves: list[_Move] = []
        for pack in chunk.packs:
            if not self._is_stacked(pack):
                place = base + pack.offset
                for index in pack.indices:
                    moves.append((place, self.tensors[index].data_ptr(), pack.nbytes))
                    place += pack.step
        for piece in chunk.pieces:
            if _is_bare(piece.block):
                moves.append((base + piece.offset, piece.block.data_ptr(), piece.block.nbytes))
        buffer.work = _copiers.start(moves, self.tensors)

    def _is_stacked(self, pack: _Pack) -> bool:
        return (
            pack.nbytes < _STACKED
            or not pack.is_dense
            or any(self.tensors[i].is_conj() or self.tensors[i].is_neg() for i in pack.indices)
        )

    def _stack(self, chunk: _Chunk, buffer: Buffer) -> None:
        """Fills in what is not simply moved."""
        for pack in chunk.packs:
            if self._is_stacked(pack):
                place = pack.over(buffer.memory)
                count = max(1, _SERIAL * pack.dtype.itemsize // pack.nbytes)
                for first in range(0, len(pack.indices), count):
                    some = [self.tensors[i] for i in pack.indices[first : first + count]]
                    torch.stack(some, out=place[first : first + count])
        for piece in chunk.pieces:
            if not _is_bare(piece.block):
                piece.over(buffer.memory).copy_(piece.block)

    def _allocate(
        self, chunk: _Chunk
    ) -> tuple[
        torch.Tensor | None,
        dict[torch.dtype, list[torch.Tensor]],
        dict[torch.dtype, list[torch.Tensor]],
    ]:
        """The chunk on the device, and what is to be copied from it, to and from by dtype."""
        outs: dict[torch.dtype, list[torch.Tensor]] = {}
        views: dict[torch.dtype, list[torch.Tensor]] = {}
        if not chunk.packed:
            return None, outs, views
        self.at(chunk.packs[0].indices)
        staged = torch.empty(chunk.packed, dtype=torch.uint8, device=self.target)
        for pack in chunk.packs:
            made = self.at(pack.indices)
            bits = _bits(pack.dtype)
            parts = pack.over(staged, bits).unbind(0)
            if bits is not pack.dtype:
                made.extend(torch.empty_like(part, dtype=pack.dtype) for part in parts)
            elif SPLIT == "dlpack":
                made.extend(from_dlpack(torch._C._to_dlpack(part)) for part in parts)
                parts = ()
            else:
                made.extend(map(torch.empty_like, parts))
            if parts:
                outs.setdefault(bits, []).extend(_as_bits(made))
                views.setdefault(bits, []).extend(parts)
            for index, result in zip(pack.indices, made, strict=True):
                self.results[index] = result
        return staged, outs, views


class _Download(_Trip):
    def __init__(self, tensors: Sequence[torch.Tensor], link: Link) -> None:
        super().__init__(tensors, link, torch.device("cpu"))
        self._coming: deque[tuple[_Chunk, Buffer]] = deque()

    def _run(self) -> None:
        pool = self.link.pool
        try:
            for chunk in _chunks(self.tensors, self._others()):
                self.at(chunk.packs[0].indices if chunk.packs else (chunk.pieces[0].index,))
                # Who waits for a buffer must hold none, or two calls could wait for each other.
                buffer = pool.take_if_any()
                if buffer is None:
                    while self._coming:
                        self._receive()
                    buffer = pool.take()
                self._coming.append((chunk, buffer))
                self._fetch(chunk, buffer)
                if len(self._coming) > 1:
                    self._receive()
            while self._coming:
                self._receive()
        finally:
            for _, buffer in self._coming:
                pool.give(buffer)
            self._coming.clear()

    def _fetch(self, chunk: _Chunk, buffer: Buffer) -> None:
        """Starts the copies into a buffer."""
        link = self.link
        pairs: Pairs = []
        to: dict[torch.dtype, list[torch.Tensor]] = {}
        sources: dict[torch.dtype, list[torch.Tensor]] = {}
        if chunk.packed:
            self.at(chunk.packs[0].indices)
            staged = torch.empty(chunk.packed, dtype=torch.uint8, device=link.device)
            for pack in chunk.packs:
                bits = _bits(pack.dtype)
                to.setdefault(bits, []).extend(pack.over(staged, bits).unbind(0))
                some = [_resolved(self.tensors[index]) for index in pack.indices]
                sources.setdefault(bits, []).extend(_as_bits(some))
            pairs.append((buffer.memory[: chunk.packed], staged))
        for piece in chunk.pieces:
            block = piece.block
            if not _is_bare(block):
                self.at((piece.index,))
                block = torch.empty(block.shape, dtype=block.dtype, device=link.device)
                block.copy_(piece.block)
            pairs.append((piece.over(buffer.memory), block))
        link.begin()
        try:
            for dtype, places in to.items():
                link.copy_all(places, sources[dtype])
            link.copy(pairs)
        finally:
            buffer.mark = link.mark()
        link.end()  # before `staged` and the blocks are freed

    def _receive(self) -> None:
        """Takes the oldest buffer apart, and gives it back."""
        chunk, buffer = self._coming[0]
        buffer.wait()
        base = buffer.memory.data_ptr()
        moves: list[_Move] = []
        results: list[torch.Tensor] = []
        for piece in chunk.pieces:
            result = self._result(piece.index)
            results.append(result)
            to = result.data_ptr() + piece.start * result.element_size()
            moves.append((to, base + piece.offset, piece.block.nbytes))
        buffer.work = _copiers.start(moves, results)
        for pack in chunk.packs:
            made = self.at(pack.indices)
            made.extend(map(torch.clone, pack.over(buffer.memory).unbind(0)))
            for index, result in zip(pack.indices, made, strict=True):
                self.results[index] = result
        buffer.join()
        self._coming.popleft()
        self.link.pool.give(buffer)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


# --- threads that copy on the host ---------------------------------------------------------------

_Move = tuple[int, int, int]  # to and from, as addresses; bytes


class _Copiers:
    """Threads that copy memory. `memmove` lets go of the interpreter, so that they run at once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the threads: after a fork there are none."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def start(self, moves: Sequence[_Move], owners: object) -> list[Future[None]]:
        """Starts copying; the owners of the memory are kept until it is done."""
        jobs = _shares(moves, _threads())
        if len(jobs) <= 1 and sum(nbytes for _, _, nbytes in moves) < _SLICE // 4:
            _move_all(moves, owners)  # sooner done than handed over
            return []
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_threads(), thread_name_prefix="fmapper-copy")
            return [self._pool.submit(_move_all, job, owners) for job in jobs]

    def release(self) -> None:
        """Lets the threads end."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def _threads() -> int:
    available = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return min(_THREADS, len(available(0)) if available else os.cpu_count() or 1)


def _shares(moves: Sequence[_Move], threads: int) -> list[list[_Move]]:
    """Distributes copies over threads, in about equal shares, the long ones cut up."""
    share = max(_SLICE, -(-sum(nbytes for _, _, nbytes in moves) // threads))
    jobs: list[list[_Move]] = []
    room = 0
    for to, source, nbytes in moves:
        done = 0
        while done < nbytes:
            if not room:
                jobs.append([])
                room = share
            part = min(room, nbytes - done)
            jobs[-1].append((to + done, source + done, part))
            done += part
            room -= part
    return jobs


def _move_all(moves: Sequence[_Move], owners: object) -> None:
    for to, source, nbytes in moves:
        ctypes.memmove(to, source, nbytes)


# --- pinned memory -------------------------------------------------------------------------------


class Mark(Protocol):
    """A point in the work of a link, as `torch.cuda.Event` is one."""

    def synchronize(self) -> object:
        """Waits until all work before it is done."""

    def query(self) -> bool:
        """Whether all work before it is done."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Staging memory, and the point from which on it may be written again."""

    memory: torch.Tensor
    mark: Mark | None = None
    work: list[Future[None]] = field(default_factory=list)

    def is_free(self) -> bool:
        """Whether no copy uses it."""
        on_the_way = self.mark is not None and not self.mark.query()
        return not on_the_way and all(future.done() for future in self.work)

    def join(self) -> None:
        """Waits until threads have copied what they were told to."""
        wait(self.work)
        for future in self.work:
            future.result()
        self.work = []

    def wait(self) -> None:
        """Waits until no copy uses it, not even one of a call that was interrupted."""
        wait(self.work)
        self.work = []
        if self.mark is not None:
            self.mark.synchronize()
            self.mark = None


class Pool:
    """A bounded number of buffers, made when they are needed and kept; for any number of threads.

    Attributes:
        made: How many buffers there are.
    """

    def __init__(self, make: Callable[[int], torch.Tensor], limit: int = BUFFERS) -> None:
        self._make = make
        self._limit = limit
        self.reset()

    def reset(self) -> None:
        """Starts anew."""
        self._changed = threading.Condition()
        self._idle: deque[Buffer] = deque()
        self.made = 0

    def take(self) -> Buffer:
        """A buffer that no copy uses; waits for one where all are in other hands."""
        buffer = self._take(wait=True)
        assert buffer is not None
        return buffer

    def take_if_any(self) -> Buffer | None:
        """A buffer that no copy uses; None where all are in other hands."""
        return self._take(wait=False)

    def _take(self, *, wait: bool) -> Buffer | None:
        with self._changed:
            while True:
                free = next((buffer for buffer in self._idle if buffer.is_free()), None)
                if free is None and self.made < min(AHEAD if self._idle else BUFFERS, self._limit):
                    self.made += 1
                    break
                if free is None and self._idle:
                    free = self._idle[0]  # the oldest, so the first to be done
                if free is not None:
                    self._idle.remove(free)
                    break
                if not wait:
                    return None
                self._changed.wait()
        try:
            buffer = free or Buffer(self._make(CHUNK))
            buffer.wait()
        except BaseException:
            with self._changed:
                self.made -= 1
                self._changed.notify()
            raise
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back, which copies may still use."""
        with self._changed:
            self._idle.append(buffer)
            self._changed.notify()

    def release(self) -> None:
        """Frees the buffers that are not in somebody's hands, as soon as no copy uses them."""
        with self._changed:
            idle, self._idle = self._idle, deque()
            self.made -= len(idle)
            self._changed.notify_all()
        for buffer in idle:
            buffer.wait()


def _pin(nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):  # others will write to it outside of it
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


_pinned = Pool(_pin)
_copiers = _Copiers()
_parents: list[object] = []


def _after_fork() -> None:
    # CUDA is dead in the child: its buffers must not be used there, nor freed.
    _parents.append(_pinned._idle)
    _pinned.reset()
    _copiers.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- what is CUDA about it -----------------------------------------------------------------------


class Link(ABC):
    """The way to a device and back: a queue of copies that are done later, in order.

    Attributes:
        device: What is at the other end.
        pool: Where staging memory comes from.
    """

    device: torch.device
    pool: Pool

    @abstractmethod
    def begin(self) -> None:
        """What is queued from now on comes after all that the caller has queued on the device."""

    @abstractmethod
    def end(self) -> None:
        """What the caller queues on the device from now on comes after all that is queued here."""

    @abstractmethod
    def copy(self, pairs: Pairs) -> None:
        """Queues copies between staging memory and the device, each (to, from)."""

    @abstractmethod
    def copy_all(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """Queues copies within the device, between tensors of one dtype, by as few kernels."""

    @abstractmethod
    def mark(self) -> Mark:
        """The point that is reached when all that is queued so far is done."""

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the device can read this memory of the host by itself."""


_new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream  # torch types neither
_new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event


class CudaLink(Link):
    """A CUDA device, and a stream of its own.

    Results and what is staged on the device are allocated on the stream that was current when the
    link was made, not on the link's: so they need no `record_stream`, and are freed to where they
    are used. Their memory may have been given up by work that is still queued there, and what is
    freed may be given out there at once. Hence the rule: `begin` between allocating and copying,
    `end` between copying and freeing.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.pool = _pinned
        self._current = torch.cuda.current_stream(self.device)
        self._stream = _new_stream(self.device) if SIDE_STREAM else self._current

    def begin(self) -> None:
        """The stream waits for the current one."""
        self._stream.wait_stream(self._current)

    def end(self) -> None:
        """The current stream waits for this one."""
        self._current.wait_stream(self._stream)

    def copy(self, pairs: Pairs) -> None:
        """One `cudaMemcpyAsync` each."""
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def copy_all(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """One kernel for 64 tensors, where the layouts are alike."""
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(to), list(source))

    def mark(self) -> Mark:
        """An event."""
        event: torch.cuda.Event = _new_event()
        event.record(self._stream)
        return event

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """As torch knows it: of its own pinned memory, and of what was registered by others."""
        return tensor.is_pinned()
