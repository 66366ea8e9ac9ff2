"""Fills pinned pieces of memory, and empties them, by several threads at once.

One thread reads a file, or writes memory for the first time, at a fraction of the rate of the link.
So each of several threads carries one piece at a time, with all that happens to it, on the caller's
stream, and waits for it: this bounds the pinned memory. On the host they copy bytes by address,
which takes neither the GIL nor torch's own threads.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Final

import torch

from fmapper import BatchError
from fmapper.backends import Reader, populate_range, threads_for_memory

PIECE: Final = 8 << 20  # bytes that a thread has pinned at a time


class Workers:
    """Threads that work on the caller's stream of a device; use it as a context.

    At the end of the context all work is done, or, after an error, what had begun.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.accelerator.current_stream(device)
        self._is_inference = torch.is_inference_mode_enabled()
        self._pool = ThreadPoolExecutor(threads_for_memory(), initializer=self._begin)
        self._jobs: deque[tuple[int, Future[object]]] = deque()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        self._jobs.clear()

    def start(self, index: int, job: Callable[[], object]) -> None:
        """Starts a job that belongs to one of the caller's tensors."""
        try:
            self._jobs.append((index, self._pool.submit(self._run, job)))
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            job()

    def finish(self) -> None:
        """Waits for all jobs.

        Raises:
            BatchError: One failed; the index is that of its tensor.
        """
        while self._jobs:
            index, job = self._jobs.popleft()
            error = job.exception()
            del job  # it holds the error, whose frames hold tensors
            if isinstance(error, BatchError):
                index, error = error.index, error.__cause__ or error
            if error is not None:
                raise BatchError(index) from error.with_traceback(None)

    def wait(self) -> None:
        """Waits for the copies that have been started so far."""
        event = torch.Event(self.device)
        event.record(self._stream)
        event.synchronize()

    def _begin(self) -> None:
        torch.accelerator.set_stream(self._stream)

    def _run(self, job: Callable[[], object]) -> None:
        with torch.inference_mode(self._is_inference), torch.no_grad():
            job()


def fill(readers: Sequence[Reader], device: torch.device) -> list[torch.Tensor]:
    """Reads arrays from files into new tensors on a device.

    They are read in the order of the files, and small ones cross together. The tensors may be used
    on the current stream.

    Raises:
        BatchError: An array could not be read, or the device has not enough memory.
    """
    results: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    work: Callable[[], object] | None = None
    try:
        for at, reader in enumerate(readers):  # all before the first is read, as that takes long
            try:
                dtype = _dtype_of(reader.dtype)
                results.append(torch.empty(reader.shape, dtype=dtype, device=device))
            except Exception as error:
                raise BatchError(at) from error.with_traceback(None)
        places += [result.view(-1).view(torch.uint8) for result in results]
        with Workers(device) as workers:
            for group in _groups(readers):
                if len(group) > 1:
                    work = partial(_fill_many, workers, readers, places, group)
                    workers.start(group[0], work)
                    continue
                (at,) = group
                for start in range(0, readers[at].nbytes, PIECE):
                    part = slice(start, start + PIECE)
                    work = partial(_fill_part, workers, readers[at], places[at][part], start)
                    workers.start(at, work)
            workers.finish()
    except BatchError:
        work = None  # it holds a part of a result
        results.clear()
        places.clear()
        raise
    return results


@cache
def _dtype_of(dtype: Any) -> torch.dtype:
    torch_dtype: torch.dtype = getattr(torch, dtype.name)
    return torch_dtype


def _groups(readers: Sequence[Reader]) -> Iterator[list[int]]:
    """Yields the indices of arrays to read together, in the order of the files."""
    group: list[int] = []
    nbytes = 0
    for at in sorted(range(len(readers)), key=lambda at: readers[at].extent):
        size = readers[at].nbytes
        if group and nbytes + size > PIECE:
            yield group
            group, nbytes = [], 0
        group.append(at)
        nbytes += size
    if group:
        yield group


def _fill_part(workers: Workers, reader: Reader, place: torch.Tensor, start: int) -> None:
    piece = _pinned_bytes(place.numel())
    reader.read_bytes(_buffer(piece), start)
    place.copy_(piece, non_blocking=True)
    workers.wait()


def _fill_many(
    workers: Workers,
    readers: Sequence[Reader],
    places: Sequence[torch.Tensor],
    group: Sequence[int],
) -> None:
    """Reads arrays one after the other, and distributes them on the device."""
    sizes = [readers[at].nbytes for at in group]
    piece = _pinned_bytes(sum(sizes))
    buffer, start = _buffer(piece), 0
    for at, size in zip(group, sizes, strict=True):
        try:
            readers[at].read_bytes(buffer[start : start + size], 0)
        except Exception as error:
            raise BatchError(at) from error
        start += size
    # CUDA divides by the size of what it splits, so empty tensors are left out.
    if full := [places[at] for at in group if readers[at].nbytes]:
        staged = piece.to(workers.device, non_blocking=True)
        torch.split_with_sizes_copy(staged, [part.numel() for part in full], out=full)
        workers.wait()


def fetch(workers: Workers, block: torch.Tensor, place: torch.Tensor, result: torch.Tensor) -> None:
    """Copies a block of a device to memory of the host that nobody may have written to yet.

    Args:
        workers: The threads, of which this is one.
        block: Flat elements on the device.
        place: Their place on the host, flat.
        result: The tensor of which the place is a part.
    """
    start, nbytes = place.data_ptr(), place.nbytes
    piece = _pinned_bytes(nbytes)
    piece.view(block.dtype).copy_(block, non_blocking=True)
    begin = result.data_ptr()
    populate_range((start, start + nbytes), (begin, begin + result.nbytes))  # meanwhile
    workers.wait()
    ctypes.memmove(start, piece.data_ptr(), nbytes)


def _pinned_bytes(nbytes: int) -> torch.Tensor:
    """Allocates pinned bytes; torch reuses them only when the copies that use them are done."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _buffer(piece: torch.Tensor) -> memoryview:
    array: Any = piece.numpy()
    return memoryview(array)
