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

_PATIENCE = 2.0  # seconds that the exit of the program waits for all threads together


class DeviceLoader:
    """Batches from any iterable, moved ahead of their use while the program computes.

    `for batch in DeviceLoader(batches, to_gpu)` sees the same batches in the same order as `for
    batch in map(to_gpu, batches)`. A thread reads the source and moves its batches, up to
    `prefetch` of them ahead: with the one in use, `prefetch + 1` batches are on the device. It is a
    thread, because the asynchronous transfer is only a part of the work: reading, decoding,
    casting, checking and copying into pinned buffers would keep the caller busy. In a thread they
    run beside the program, mostly without the GIL.

    The thread inherits the settings of the thread that started the iteration: context variables; in
    torch the current CUDA device, default device, grad and inference mode; in JAX `enable_x64`,
    `default_device` and the transfer guards. `use_backend` belongs to the whole program. On a GPU,
    torch copies on a stream of its own, and a batch is handed to the stream that is current where
    it is received, so it can be used like any other tensor.

    An error in the source or in the mover is raised where its batch would have been, with a note
    saying which it was, and ends the iteration. Warnings of fmapper are shown with their batch,
    too. Leaving the loop early, dropping the iterator or ending the program stops the thread;
    batches that it has already read from a one-time source are lost. The next iteration waits until
    the thread of the last one has released the source.

    The source is read at unpredictable times, so it must not depend on what the loop does with
    earlier batches, and should draw from a random generator of its own if runs are to repeat
    (`DataLoader(..., generator=...)`). CUDA tensors that a custom mover puts into objects without
    children are not synchronized. An iteration belongs to one process: start it after a fork, not
    before.

    Attributes:
        batches: An iterable of trees of arrays: a list, a generator, a torch `DataLoader`. Every
            iteration asks it for a new iterator, and `len(loader)` is its length.
        mover: The function that is called with each batch: `to_gpu`, `to_jax(dtype="bfloat16")` ...
        prefetch: How many batches to move ahead; 0 moves each on request, without a thread.

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
        """Starts a thread that reads and moves the batches of this iteration."""
        if not self.prefetch:
            return _move_here(iter(self.batches), self.mover)
        if self._last is not None and self._last.stopped:
            self._last.thread.join()  # two threads must not read from one source
        source = iter(self.batches)
        reading = self._reading if source is self.batches else threading.Lock()
        self._last = _Worker(source, self.mover, self.prefetch, reading)
        return _Batches(self._last)

    def __len__(self) -> int:
        """Returns the number of batches, if the source has a length."""
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
    except StopIteration as error:  # it would end the loop like an exhausted source
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
    """The consumer's side: the thread stops when nobody holds this object any more."""

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
            except FmapperWarning:  # a user's filter has made the warning an error
                self.close()
                raise
        if parcel.batch is _END:
            self.close()
            if parcel.error is None:
                raise StopIteration
            try:
                raise parcel.error
            finally:
                del parcel  # the error refers to this frame
        for receive in parcel.receive:
            receive()
        return parcel.batch

    def close(self) -> None:
        """Stops the thread and ends the iteration."""
        self._is_over = True
        self._worker.stop()


class _Worker:
    """The thread's side: reads and moves batches as long as it gets permits, one per batch.

    Both sides share `SimpleQueue`s, because a finalizer may put to them at any moment, even if it
    interrupts this thread inside the same queue, where a lock or semaphore would deadlock.
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
        atexit.unregister(_stop_all)  # to run before the frameworks shut down, because the
        atexit.register(_stop_all)  # newest entry is called first
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
            self._clear()  # parcels that arrived while it was being stopped

    def _send_one(
        self,
        source: Iterator[Any],
        mover: Callable[[Any], Any],
        reading: threading.Lock,
        number: int,
    ) -> bool:
        """Sends one parcel when permitted; returns whether to go on.

        It is a separate function so that no batch is referenced while the thread waits.
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
        """Returns the next batch, the end, or an error.

        An error refers to the frames that it went through and their callers. None of them may refer
        to the error in turn: that cycle would keep batches alive until the garbage collector runs.
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
    """Returns functions that the consumer must call before it uses the arrays of a batch."""
    groups: dict[str, tuple[Arrays, list[Any]]] = {}
    for _, leaf, node_type in visit(batch, once=True):
        adapter = adapter_of(leaf) if node_type is None else None
        if adapter is not None:
            groups.setdefault(adapter.name, (adapter, []))[1].append(leaf)
    receivers = [adapter.hand_over(arrays) for adapter, arrays in groups.values()]
    return [receive for receive in receivers if receive is not None]


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _stop_all() -> None:
    """Stops all threads before the frameworks that they use shut down."""
    workers = list(_workers)
    for worker in workers:
        worker.stop()
    until = time.monotonic() + _PATIENCE
    for worker in workers:
        worker.thread.join(max(until - time.monotonic(), 0))
