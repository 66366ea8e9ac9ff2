"""The facet of an adapter whose framework has arrays: what they are, and how they move."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from fmapper.backends.framework import Framework
from fmapper.errors import DeviceUnavailableError
from fmapper.files.dtypes import itemsize

if TYPE_CHECKING:
    import numpy as np

DEVICE_KINDS: Final = {
    **{kind: kind for kind in ("cpu", "gpu", "tpu", "mps", "xpu", "hpu", "npu", "meta")},
    **dict.fromkeys(("cuda", "rocm"), "gpu"),
}
"""Kinds of devices -> the general name of the same hardware.

Frameworks' devices are matched by the general name. Adapters may add other kinds.
"""

USUAL_GPU: Final = next(word for word, general in DEVICE_KINDS.items() if word != general)
"""The most common kind of GPU in frameworks that do not call it `gpu`."""


@dataclass(frozen=True, slots=True)
class Device:
    """The place of an array: backend, kind of device, index and memory.

    Attributes:
        backend: numpy, torch, jax, or a backend that an adapter adds.
        kind: cpu, cuda, gpu, mps, tpu, meta ... as the backend names it.
        index: Its index; None if it is the only one; a tuple for an array spread over several.
        memory: Which of its memories, such as JAX's `pinned_host`; None for the default.

    Examples:
        >>> print(Device("torch", "cuda", 0), Device("jax", "gpu", 0, "pinned_host"))
        torch:cuda:0 jax:gpu:0/pinned_host
    """

    backend: str
    kind: str
    index: int | tuple[int, ...] | None = None
    memory: str | None = None

    @property
    def is_accelerator(self) -> bool:
        """Whether the device computes and is not the CPU."""
        return self.kind not in ("cpu", "meta")

    def __str__(self) -> str:
        index = self.index if isinstance(self.index, tuple | None) else (self.index,)
        parts = [self.backend, self.kind, *([",".join(map(str, index))] if index else ())]
        return ":".join(parts) + (f"/{self.memory}" if self.memory else "")


HOST: Final = Device("numpy", "cpu")
"""The memory of the host: every framework reads arrays there, so that exchanges go through it."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A description of a device at one moment; None for unknown fields.

    Attributes:
        device: The device.
        name: The name that its manufacturer gives it, such as "NVIDIA H200".
        total: Bytes of memory that its backend could use if nothing else used the device.
        free: Bytes of memory that are not in use now.
    """

    device: Device
    name: str | None = None
    total: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """Arrays on their way from one backend to another.

    Attributes:
        data: NumPy arrays on the host (bfloat16 and float8 as in ml_dtypes), among them `Reader`s
            for a target that `reads`; or, if `device` is set, objects with `__dlpack__` there.
        private: The indices of those that do not share memory with the exported array. Nobody else
            holds that memory, unless it is read-only.
        frozen: Nobody can ever write to the memory of the others; host arrays on it are read-only.
        device: The device of DLPack exporters; None for host arrays.
        owners: The arrays themselves, for importers that can share more through DLPack than `data`
            allows.
    """

    data: Sequence[Any]
    private: Collection[int] = ()
    frozen: bool = False
    device: Device | None = None
    owners: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory layout of a strided array, by which views are recognised.

    Attributes:
        start: Address of the element with index zero in every dimension.
        strides: Step per dimension, in elements.
        itemsize: Bytes per element.
        plain: Whether the memory holds the values as they are, not lazy conjugates or negatives.
    """

    start: int
    strides: tuple[int, ...]
    itemsize: int
    plain: bool = True


class Arrays(Framework):
    """A framework with arrays.

    A subclass implements the abstract methods; the defaults of the others suit a framework with one
    device, without views and random generators. The suite that it must pass is
    `tests/support/conformance.py`.

    Attributes:
        aliases: Other names of device kinds, such as `{"gpu": "cuda"}`.
        host_only: Its arrays are never on an accelerator; `to_gpu` takes them to another backend.
        keeps_memory: `take` makes arrays that use the given host memory, so that it must be given
            memory that nobody else holds. False if it always copies.
        frozen: Nobody can write to the memory of its arrays.
        read_only: It never writes to the memory of an array, or can be told not to, so that it can
            share arrays whose memory nobody can write to.
        order: The memory order in which it takes host arrays: `K` for that of the source, `C` for
            row by row.
        takes_host_arrays: Its functions take NumPy arrays, too.
        keeps_of_a_gpu: How much GPU memory it reserves, and the setting that reserves less, in
            words.
        widened_by: The code that enables dtypes of 64 bits, if they are off by default.
        array_types: The classes of its usual arrays, which a table maps to this adapter, so that
            compilers can trace the lookup.
    """

    lacking = "arrays of its own"
    aliases: ClassVar[dict[str, str]] = {}
    host_only: ClassVar[bool] = False
    keeps_memory: ClassVar[bool] = False
    frozen: ClassVar[bool] = False
    read_only: ClassVar[bool] = False
    order: ClassVar[Literal["K", "C"]] = "K"
    takes_host_arrays: ClassVar[bool] = False
    keeps_of_a_gpu: ClassVar[str] = ""
    widened_by: ClassVar[str] = ""
    array_types: ClassVar[tuple[type, ...]] = ()

    # arrays

    @abstractmethod
    def is_array_type(self, cls: type) -> bool:
        """Returns whether instances of a class are arrays of this backend."""

    def is_interned_type(self, cls: type) -> bool:
        """Returns whether equal arrays of a class are one object, such as `np.True_`."""
        return False

    def is_number(self, array: Any) -> bool:
        """Returns whether an array is an immutable number, such as `np.float64(0.5)`."""
        return False

    @abstractmethod
    def device(self, array: Any) -> Device:
        """Returns the device of an array."""

    @abstractmethod
    def dtype(self, array: Any) -> str:
        """Returns the name of a dtype: float32, bfloat16, float8_e4m3fn, int64, complex64, bool."""

    @abstractmethod
    def shape(self, array: Any) -> tuple[int, ...]:
        """Returns the shape of an array."""

    def nbytes(self, array: Any) -> int:
        """Returns the bytes that an array's values take, or would take if it had any."""
        return math.prod(self.shape(array)) * itemsize(self.dtype(array))

    def signatures(self, arrays: Sequence[Any]) -> Sequence[Hashable]:
        """Returns one key per array, equal for arrays of one dtype on one device.

        Faster than asking each array for both. All arrays are of one class.
        """
        return [(self.device(array), self.dtype(array)) for array in arrays]

    def places(self, arrays: Sequence[Any]) -> Iterator[Any]:
        """Yields one value per array: its shape, dtype and layout; faster than asking each."""
        layout = getattr(self, "layout", lambda _: None)
        return ((self.shape(a), self.dtype(a), self.device(a), layout(a)) for a in arrays)

    def stays(self, array: Any) -> str | None:
        """Explains why an array must stay in its backend, such as a PRNG key; None if it may leave.

        A mover to another backend raises for such an array; with `strict=False` it leaves it as is.
        """
        return None

    def portable(self, array: Any) -> Any:
        """Returns the plain array that represents one which `stays`, such as the data of a key."""
        return array

    def from_portable(self, array: Any, old: Any) -> Any:
        """Returns an array of the kind of `old` from the plain array that represents it."""
        return array

    def unusable(self, arrays: Sequence[Any]) -> int | None:
        """Returns the index of the first array whose values are gone, which no mover may return."""
        return None

    def is_freed(self, array: Any) -> bool:
        """Returns whether the memory of an array was freed, so that nothing may read it."""
        return False

    def check(self, array: Any) -> None:
        """Refuses an array that can neither leave its backend nor be copied within it.

        Raises:
            TypeError: It is such an array; says why, and what to do.
        """

    # devices

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """Returns every available device of this backend, the CPU first."""

    def known_devices(self) -> Sequence[Device]:
        """Returns the devices that are known without initialising a platform.

        Starting an accelerator may take most of its memory, which a message must not do.
        """
        return self.devices()

    def may_have_gpu(self) -> bool:
        """Returns whether an accelerator is, or may be, available, without starting one.

        NumPy arrays that move to a GPU need another backend; only the chosen one is started.
        """
        return any(device.is_accelerator for device in self.known_devices())

    def as_device(self, device: Any) -> Device | None:
        """Converts a device object of the framework; returns None for other objects."""
        return None

    def device_info(self, device: Device) -> DeviceInfo:
        """Returns the name and the memory of a device; the default knows the host."""
        if device.kind != "cpu":
            return DeviceInfo(device)
        from fmapper.machine import host_memory, processor_name

        return DeviceInfo(device, processor_name(), *host_memory())

    def why_not(self, kind: str, index: int | None) -> str:
        """Explains why a device is missing: no driver, a CPU-only build, an index too high."""
        have = [device for device in self.devices() if device.kind == kind]
        if have and index is not None:
            return f"the index is too high, {self.name} sees {len(have)} of kind {kind}"
        return f"{self.name} has no device of kind {kind} here"

    def find_device(self, kind: str, index: int | None) -> Device:
        """Resolves a kind and an index to a device of this backend.

        A `gpu` is any available accelerator, unless the backend has a kind of that name.

        Raises:
            DeviceUnavailableError: It is not available; says why, and lists the available devices.
        """
        native = self.aliases.get(kind, kind)
        devices = self.devices()
        matches = [device for device in devices if device.kind == native]
        if kind == "gpu" and not matches:
            matches = [device for device in devices if device.is_accelerator]
        for device in matches:
            if index in (None, 0 if device.index is None else device.index):
                return device
        listed = ", ".join(map(str, devices)) or "nothing"
        wanted = Device(self.name, matches[0].kind if matches else native, index)
        raise DeviceUnavailableError(
            f"{wanted} is not available: {self.why_not(wanted.kind, index)}. Here: {listed}."
        )

    def in_memory(self, device: Device, memory: str | None) -> Device:
        """Returns a device with one of its memories; the default memory for None.

        Raises:
            DeviceUnavailableError: The device has no such memory; lists those that it has.
        """
        if memory is None:
            return replace(device, memory=None)
        raise DeviceUnavailableError(
            f"{replace(device, memory=memory)} is not available: {self.name} has one memory there."
        )

    def host_memory(self, device: Device) -> Device | None:
        """Returns the host memory from which a device copies asynchronously; None if there is none.

        Arrays in it are still arrays of this backend.
        """
        return None

    @abstractmethod
    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterable[Any]:
        """Brings arrays of this backend to one of its devices, one result per array, in order.

        Yield the results one by one, or raise a `BatchError`, so that an error can name the array
        that failed. An array that is already on the device is passed only with `copy=True`, and
        must be copied.
        """

    def is_traced(self, array: Any) -> bool:
        """Returns whether an array is a tracer of a program that is being recorded.

        It has no device yet; that is decided by the arrays with which the program runs.
        """
        return False

    def abstract(self, shape: Sequence[int], dtype: str) -> Any:
        """Returns an array on a device of kind `meta`, with a shape and a dtype but no values.

        Raises:
            TypeError: This backend has no such arrays.
        """
        raise TypeError(f"{self.name} has no arrays without values")

    def wait(self, device: Device, results: Any) -> None:
        """Waits until all work on one of its devices has finished.

        Args:
            device: The device.
            results: The results of that work, an array or a tree with arrays.
        """

    # threads

    def thread_settings(self) -> Callable[[], AbstractContextManager[object]]:
        """Copies the settings of this thread, to restore them in another one.

        Called in the thread that asks for arrays. The thread that makes them does so inside the
        context that the returned function creates.
        """
        return nullcontext

    def hand_over(self, arrays: Sequence[Any]) -> Callable[[], object] | None:
        """Gives arrays of this backend to another thread.

        Called in the thread that made them. The thread that receives them calls the returned
        function before it uses them. None if there is nothing to wait for.
        """
        return None

    # exchange

    @abstractmethod
    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Exports arrays for another backend, without a copy where possible.

        Raises:
            TypeError: The values of an array cannot be exported; see `check`.
        """

    def read_box(self, array: Any, box: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
        """Copies a box of an array, one range per dimension, into new host memory."""
        (data,) = self.export([array], HOST).data
        index = tuple(slice(start, stop) for start, stop in box)
        values: np.ndarray[Any, Any] = data[(*index, ...)].copy()
        return values

    def is_view(self, data: Any, array: Any) -> bool:
        """Returns whether an export that is not private shares the array's memory.

        Called only for `copy=False`, because frameworks may copy without saying so.
        """
        return True

    @abstractmethod
    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Makes arrays of this backend from exported ones, one per array, in order.

        If `device` is on the host and the adapter `keeps_memory`, all host memory in `exchange` is
        private, frozen, or meant to be shared. All other memory, including that of accelerators,
        must be copied; it may be read only until the last result is yielded.

        Args:
            exchange: The arrays.
            device: The device of the results.
            share: Whether the results must use the memory of the exchange itself.

        Raises:
            BufferError: With `share`, they cannot.
        """

    def overwrite(self, arrays: Sequence[Any], values: Sequence[Any]) -> None:
        """Copies values into arrays in place; called only if arrays are not `frozen`.

        Args:
            arrays: Arrays on any device.
            values: For each array one of the same shape and dtype, of NumPy or of this backend.
        """
        raise TypeError(f"arrays of {self.name} cannot be written to")

    def note_writes(self, arrays: Sequence[Any]) -> None:
        """Tells the framework that the memory of arrays was written to from outside."""

    # dtypes

    def storable(self, dtype: str) -> str | None:
        """Returns the dtype in which `dtype` is stored: the same, a narrower one, or None."""
        return dtype

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """Returns a new array of another dtype, and whether every value has survived.

        An integer survives if it stays equal, a floating value if it is rounded but stays finite.
        """
        raise TypeError(f"the {self.name} adapter cannot cast {self.dtype(array)} to {dtype}")

    def casts(self, arrays: Sequence[Any], dtype: str) -> Iterable[tuple[Any, bool]]:
        """Casts many arrays at once, in order, where that is faster than `cast` for each.

        An error concerns the array that is cast next, unless it is a `BatchError`.
        """
        return (self.cast(array, dtype) for array in arrays)

    # replacements of arrays

    def like(self, new: Any, old: Any) -> Any:
        """Wraps `new` as `old` is wrapped: as a parameter, for example."""
        return new

    def swap(self, old: Any, new: Any) -> tuple[Callable[[], object], Callable[[], object]] | None:
        """Returns functions that replace the contents of an array in place, and undo that.

        Returns:
            A function that gives `old` the contents of `new`, and one that undoes it, even if it
            was interrupted; None if arrays of this kind are replaced by new ones instead.
        """
        return None

    # random generators

    def generator_device(self, x: Any) -> Device | None:
        """Returns the device of a random generator; None for objects of other kinds."""
        return None

    def generator_to(self, generator: Any, device: Device) -> Any:
        """Returns a new generator on a device, which may be that of the old one.

        If the device draws the same numbers from the same state, it continues like the old one.
        """
        raise TypeError(f"{self.name} has no random generators")

    # ties by view

    def may_share_memory(self, arrays: Sequence[Any]) -> bool:
        """Returns whether two of the arrays may share memory: a quick check, True if in doubt."""
        return True

    def memory(self, array: Any) -> Memory | None:
        """Returns the memory layout of a strided array; None if it cannot have views."""
        return None

    def addresses(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns values that stay equal while all arrays lie where they are."""
        return [self.memory(array) or id(array) for array in arrays]

    def shares_elements(self, a: Any, b: Any) -> bool:
        """Returns whether two arrays have an element in common, not only overlapping spans."""
        return True

    def view(
        self, base: Any, shape: Sequence[int], strides: Sequence[int], offset: int, like: Any
    ) -> Any:
        """Returns a view of `base`: strides and offset in elements, counted from its first one.

        `like` is the view that the new one replaces.

        Raises:
            TypeError: This backend has no such views, for example with negative strides.
        """
        raise TypeError(f"{self.name} has no views")

    # training

    def is_trainable(self, array: Any) -> bool:
        """Returns whether an array may be trained: it is not marked as frozen."""
        return True
