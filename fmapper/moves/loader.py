"""`DeviceLoader`: moves batches to the device ahead of their use."""

from __future__ import annotations

import atexit
import contextvars
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from fmapper.backends.arrays import Arrays
from fmapper.backends.discovery import adapter_of, adapters
from fmapper.errors import FmapperWarning
from fmapper.tree.walk import visit
from fmapper.warn import Warned, keeping_warnings, warn

_PATIENCE = 2.0  # seconds for which the end of the program waits for all threads together


class DeviceLoader:
    """Batches from any iterable, moved ahead of their use while the program computes.

    `for batch in DeviceLoader(batches, to_gpu)` sees the same batches in the same order as
    `for batch in map(to_gpu, batches)`. A thread reads the source and moves what it gives, up to
    `prefetch` batches ahead: with the one in use, `prefetch + 1` batches are on the device. It is a
    thread and not a look ahead in the same one, because a transfer that runs by itself is only a
    part of the work: reading, decoding, casting, checking and copying into the buffers that a GPU
    reads from keep the caller busy. They run beside the program this way, mostly without the GIL.

    The thread takes along what belongs to the thread that started the iteration, as it was then:
    context variables; in torch the current CUDA device, default device, grad and inference mode; in
    JAX `enable_x64`, `default_device` and the transfer guards. `use_backend` belongs to the whole
    program. On a GPU, torch copies on a stream of its own, and a batch is handed to the stream that
    is current where it is received, so it can be used like any other tensor.

    An error in the source or in the mover is raised where its batch would have been, with a note
    saying which it was, and ends the iteration. Warnings of fmapper come with their batch too. A
    loop that is left early, an iterator that is dropped and the end of the program stop the thread;
    what a source that can be read only once has given by then is lost. The next iteration waits
    until the thread of the last one has let go of the source.

    The source is read at moments that are not fixed, so it must not look at what the loop does with
    earlier batches, and should draw from a random generator of its own if runs are to repeat
    (`DataLoader(..., generator=...)`). CUDA tensors that a mover of your own hides in an object
    without children are not handed over. An iteration belongs to one process: start it after a
    fork, not before.

    Attributes:
        batches: An iterable of trees of arrays: a list, a generator, a torch `DataLoader`. Every
            iteration asks it for a new iterator, and `len(loader)` is its length.
        mover: What is called with each batch: `to_gpu`, `to_jax(dtype="bfloat16")`, a function.
        prefetch: How many batches are moved ahead; 0 moves each when it is asked for, without a
            thread.

    Examples:
        >>> import numpy as np
        >>> from fmapper import DeviceLoader, to_torch
        >>> batches = [{"x": np.full(2, i)} for i in range(3)]
        >>> loader = DeviceLoader(batches, to_torch, prefetch=2)
        >>> len(loader)
        3
        >>> for batch in loader:
        ...     print(batch["x"])
        tensor([0, 0])
        tensor([1, 1])
        tensor([2, 2])
    """

    def __init__(
        self, batches: Iterable[Any], mover: Callable[[Any], Any], prefetch: int = 2
    ) -> None:
        if not callable(mover):
            raise TypeError(
                f"expected a function of a batch, such as a mover, not {mover!r}. Write "
                "fmapper.to_gpu, or fmapper.to_device(...) for a device by name."
            )
        self.batches = batches
        self.mover = mover
        self.prefetch = operator.index(prefetch)
        if self.prefetch < 0:
            raise ValueError(f"prefetch is a number of batches, 0 or more, not {prefetch}.")
        self._reading = threading.Lock()
        self._last: _Worker | None = None

    def __iter__(self) -> Iterator[Any]:
        """Starts to read and to move, each iteration in a thread of its own."""
        if not self.prefetch:
            return _move_here(iter(self.batches), self.mover)
        if self._last is not None and self._last.stopped:
            self._last.thread.join()  # it may be reading still, and two in one source tear it apart
        source = iter(self.batches)
        reading = self._reading if source is self.batches else threading.Lock()
        self._last = _Worker(source, self.mover, self.prefetch, reading)
        return _Batches(self._last)

    def __len__(self) -> int:
        """Returns the number of batches, where the source knows it."""
        if not isinstance(self.batches, Sized):
            raise TypeError(f"{type(self.batches).__name__} does not know how many batches it has")
        return len(self.batches)

    def __repr__(self) -> str:
        return f"DeviceLoader({self.batches!r}, {self.mover!r}, prefetch={self.prefetch})"


_END = object()


def _read(source: Iterator[Any], number: int) -> Any:
    try:
        return next(source, _END)
    except BaseException as error:
        error.add_note(f"while a DeviceLoader read batch {number} from its source")
        raise


def _move(mover: Callable[[Any], Any], batch: Any, number: int) -> Any:
    try:
        return mover(batch)
    except StopIteration as error:  # it would end the loop as if there were no more batches
        raise RuntimeError(f"the mover raised StopIteration at batch {number}") from error
    except BaseException as error:
        error.add_note(f"while a DeviceLoader moved batch {number}")
        raise


def _move_here(source: Iterator[Any], mover: Callable[[Any], Any]) -> Iterator[Any]:
    """Yields each batch, moved in the consumer's thread."""
    number = 0
    while (batch := _read(source, number)) is not _END:
        batch = _move(mover, batch, number)
        yield batch
        number += 1


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A message to the consumer: a batch, an error, or the end."""

    batch: Any = _END
    error: BaseException | None = None
    warned: Sequence[Warned] = ()
    receive: Sequence[Callable[[], object]] = ()


class _Batches:
    """The consumer's end: the thread stops when nobody holds this any more."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._is_over = False
        # Nothing that the thread holds may hold this object, or it would never be dropped.
        weakref.finalize(self, worker.stop).atexit = False

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        parcel = self._worker.receive()
        for message, category in parcel.warned:
            try:
                warn(message, category)
            except FmapperWarning:  # the user has made it an error, and with it the batch
                self.close()
                raise
        if parcel.batch is _END:
            self.close()
            if parcel.error is None:
                raise StopIteration
            try:
                raise parcel.error
            finally:
                del parcel  # this frame is one of those that the error holds
        for receive in parcel.receive:
            receive()
        return parcel.batch

    def close(self) -> None:
        """Stops the thread; there are no more batches."""
        self._is_over = True
        self._worker.stop()


class _Worker:
    """The thread's end: reads and moves as long as there are permits, one for each batch ahead.

    What both ends share are `SimpleQueue`s: a finalizer may put to one at any moment, also while it
    interrupts this very thread inside of the same queue. A lock or semaphore would be stuck then.
    """

    def __init__(
        self,
        source: Iterator[Any],
        mover: Callable[[Any], Any],
        ahead: int,
        reading: threading.Lock,
    ) -> None:
        self.stopped = False
        self._ready: SimpleQueue[_Parcel] = SimpleQueue()
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(ahead):
            self._permits.put(None)
        settings = [adapter.thread_settings() for adapter in adapters(Arrays)]
        self.thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run, source, mover, reading, settings),
            name="fmapper.DeviceLoader",
            daemon=True,  # a source that waits forever must not keep the program from ending
        )
        _workers.add(self)
        atexit.unregister(_stop_all)  # to come before the frameworks take themselves down, the
        atexit.register(_stop_all)  # newest entry being the first to be called
        self.thread.start()

    def receive(self) -> _Parcel:
        """Returns the next parcel as soon as it is ready, and permits another one."""
        parcel = self._ready.get()
        self._permits.put(None)
        return parcel

    def stop(self) -> None:
        """Lets the thread end after its current batch, and drops the batches that are ready."""
        self.stopped = True
        self._permits.put(None)
        self._clear()

    def _clear(self) -> None:
        with suppress(Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(_Parcel())  # for another thread that waits for a batch of this iteration

    def _run(
        self,
        source: Iterator[Any],
        mover: Callable[[Any], Any],
        reading: threading.Lock,
        settings: Sequence[Callable[[], AbstractContextManager[object]]],
    ) -> None:
        try:
            with ExitStack() as stack:
                for entered in settings:
                    stack.enter_context(entered())
                number = 0
                while self._send_one(source, mover, reading, number):
                    number += 1
        except BaseException as error:
            self._ready.put(_Parcel(error=error))
        if self.stopped:
            self._clear()  # what came while it was being stopped

    def _send_one(
        self,
        source: Iterator[Any],
        mover: Callable[[Any], Any],
        reading: threading.Lock,
        number: int,
    ) -> bool:
        """Sends one parcel when permitted; returns whether to go on.

        It is a call of its own so that no batch is held while the thread waits.
        """
        self._permits.get()
        with keeping_warnings() as warned:
            parcel = self._next_parcel(source, mover, reading, number, warned)
        more = parcel.batch is not _END
        self._ready.put(parcel)
        del parcel
        return more

    def _next_parcel(
        self,
        source: Iterator[Any],
        mover: Callable[[Any], Any],
        reading: threading.Lock,
        number: int,
        warned: Sequence[Warned],
    ) -> _Parcel:
        """Returns the next batch, the end, or the error that came instead.

        An error holds the frames that it came through and those that called them. None of them may
        hold the error in turn: that cycle would keep batches until the garbage collector comes by.
        """
        try:
            with reading:
                batch = _END if self.stopped else _read(source, number)
            if batch is _END:
                return _Parcel(warned=warned)
            batch = _move(mover, batch, number)
            return _Parcel(batch, None, warned, _hand_over(batch))
        except BaseException as error:
            return _Parcel(error=error, warned=warned)


def _hand_over(batch: Any) -> list[Callable[[], object]]:
    """Returns the function that the consumer calls before it uses the arrays of a batch."""
    found: dict[str, tuple[Arrays, list[Any]]] = {}
    for _, leaf, node_type in visit(batch, once=True):
        adapter = adapter_of(leaf) if node_type is None else None
        if adapter is not None:
            found.setdefault(adapter.name, (adapter, []))[1].append(leaf)
    made = [adapter.hand_over(arrays) for adapter, arrays in found.values()]
    return [receive for receive in made if receive is not None]


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _stop_all() -> None:
    """Ends all threads before the frameworks that they use shut down."""
    workers = list(_workers)
    for worker in workers:
        worker.stop()
    until = time.monotonic() + _PATIENCE
    for worker in workers:
        worker.thread.join(max(until - time.monotonic(), 0))
