"""The facet of an adapter whose framework has arrays: what they are, and how they travel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
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
"""Words for kinds of devices, and the general word for the same hardware.

Where frameworks call one device by two words, arrays find their way by the general one. Adapters
may have other kinds.
"""

USUAL_GPU: Final = next(word for word, general in DEVICE_KINDS.items() if word != general)
"""The most common word of frameworks that do not say gpu."""


@dataclass(frozen=True, slots=True)
class Device:
    """The place of an array: backend, kind of device, index and memory.

    Attributes:
        backend: numpy, torch, jax, or what an adapter adds.
        kind: cpu, cuda, gpu, mps, tpu, meta ... in the words of the backend.
        index: Which one; None where there is only one; a tuple for an array spread over several.
        memory: Which of its memories, as JAX's `pinned_host`; None for the usual one.

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
        """Whether it computes, and is not the CPU."""
        return self.kind not in ("cpu", "meta")

    def __str__(self) -> str:
        index = self.index if isinstance(self.index, tuple | None) else (self.index,)
        parts = [self.backend, self.kind, *([",".join(map(str, index))] if index else ())]
        return ":".join(parts) + (f"/{self.memory}" if self.memory else "")


HOST: Final = Device("numpy", "cpu")
"""The memory of the host, whose arrays every framework reads: what is exchanged goes through it."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A description of a device at one moment; None for unknown fields.

    Attributes:
        device: The device.
        name: What its maker calls it, as "NVIDIA H200".
        total: Bytes of memory that its backend could use there if nothing else did.
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
        data: NumPy arrays on the host (bfloat16 and float8 as ml_dtypes has them), or, where
            `device` is set, objects with `__dlpack__` on that device.
        private: Which of them, by index, are not in the memory of the array that was given. Nobody
            else holds that memory, unless it is read-only.
        frozen: Nobody can ever write to the memory of the others; host arrays on it are read-only.
        device: The device of DLPack exporters; None for host arrays.
        owners: The arrays themselves, for takers that can share more through DLPack than `data`
            allows.
    """

    data: Sequence[Any]
    private: Collection[int] = ()
    frozen: bool = False
    device: Device | None = None
    owners: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a strided array, in bytes, by which views are recognised.

    Attributes:
        start: Address of the element with index zero in every dimension.
        strides: Step per dimension, in elements.
        itemsize: Bytes per element.
        plain: The values are what lies there; False for lazy conjugates and negatives.
    """

    start: int
    strides: tuple[int, ...]
    itemsize: int
    plain: bool = True


class Arrays(Framework):
    """A framework with arrays.

    A subclass answers the abstract methods; the others have defaults that are right for one device,
    no views and no random generators. The suite that it must pass is
    `tests/support/conformance.py`.

    Attributes:
        aliases: Other words for device kinds, as `{"gpu": "cuda"}`.
        host_only: Its arrays are never on an accelerator; `to_gpu` takes them to another backend.
        keeps_memory: `take` lays arrays on the host memory that it is given; then it is given
            memory that nobody else holds. Where it copies anyway this is False.
        frozen: Nobody can write to the memory of its arrays.
        read_only: It never writes to the memory of an array, or can be told not to; then arrays
            whose memory nobody can write to are shared.
        order: How it wants host memory: `K` as the source has it, `C` row by row.
        portion: How many bytes `export` gives at a time, where it makes memory for them; None for
            any number.
        takes_host_arrays: Its functions take NumPy arrays, too.
        keeps_of_a_gpu: How much memory of a GPU it keeps from others, and the setting for less.
        widened_by: The code after which it holds dtypes of 64 bits, where it does not anyway.
        array_types: The classes of its usual arrays, which are then known without a look; a
            compiler that traces the lookup finds them in a table.
    """

    lacking = "arrays of its own"
    aliases: ClassVar[dict[str, str]] = {}
    host_only: ClassVar[bool] = False
    keeps_memory: ClassVar[bool] = False
    frozen: ClassVar[bool] = False
    read_only: ClassVar[bool] = False
    order: ClassVar[Literal["K", "C"]] = "K"
    portion: ClassVar[int | None] = None
    takes_host_arrays: ClassVar[bool] = False
    keeps_of_a_gpu: ClassVar[str] = ""
    widened_by: ClassVar[str] = ""
    array_types: ClassVar[tuple[type, ...]] = ()

    # arrays

    @abstractmethod
    def is_array_type(self, cls: type) -> bool:
        """Returns whether instances of a class are arrays of this backend."""

    def is_interned_type(self, cls: type) -> bool:
        """Returns whether equal arrays of a class are one object, as `np.True_` is, so not tied."""
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
        """Returns the bytes that its values take, or would take if it had any."""
        return math.prod(self.shape(array)) * itemsize(self.dtype(array))

    def signatures(self, arrays: Sequence[Any]) -> Sequence[Hashable]:
        """Returns one key per array, equal for arrays of one dtype on one device.

        A quicker way to sort many arrays than to ask for both; the arrays are of one class.
        """
        return [(self.device(array), self.dtype(array)) for array in arrays]

    def stays(self, array: Any) -> str | None:
        """Explains why an array must stay in its backend, as a PRNG key must; None if it may leave.

        Then a mover to another backend raises, and with `strict=False` leaves it as it is.
        """
        return None

    def portable(self, array: Any) -> Any:
        """Returns the plain array that represents one which `stays`, such as the data of a key."""
        return array

    def from_portable(self, array: Any, old: Any) -> Any:
        """Returns an array of the kind of `old` from the plain array that represents it."""
        return array

    def unusable(self, arrays: Sequence[Any]) -> int | None:
        """Returns the first array whose values are gone, so that it is not even left as it is."""
        return None

    def is_freed(self, array: Any) -> bool:
        """Returns whether to compute with an array would read memory that is not its own."""
        return False

    def check(self, array: Any) -> None:
        """Refuses an array that can neither leave its backend nor be copied there.

        Raises:
            TypeError: Says why, and what to do.
        """

    # devices

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """Returns every device of this backend that is here, the CPU first."""

    def known_devices(self) -> Sequence[Device]:
        """Returns the devices that are known without initialising a platform.

        To start an accelerator may take most of its memory; a message does not need that.
        """
        return self.devices()

    def may_have_gpu(self) -> bool:
        """Returns whether there is, or may be, an accelerator: as far as is known without a start.

        NumPy arrays that go to the GPU need a backend; only the one that is chosen is started.
        """
        return any(device.is_accelerator for device in self.known_devices())

    def as_device(self, device: Any) -> Device | None:
        """Returns the device that an object of the framework's own stands for, or None."""
        return None

    def device_info(self, device: Device) -> DeviceInfo:
        """Returns the name and the memory of a device; every adapter knows the host."""
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

        A `gpu` is whatever accelerator there is, unless there is one of that name.

        Raises:
            DeviceUnavailableError: There is none; says what is missing and what is there.
        """
        own = self.aliases.get(kind, kind)
        known = self.devices()
        there = [device for device in known if device.kind == own]
        if kind == "gpu" and not there:
            there = [device for device in known if device.is_accelerator]
        for device in there:
            if index in (None, 0 if device.index is None else device.index):
                return device
        here = ", ".join(map(str, known)) or "nothing"
        wanted = Device(self.name, there[0].kind if there else own, index)
        raise DeviceUnavailableError(
            f"{wanted} is not available: {self.why_not(wanted.kind, index)}. Here: {here}."
        )

    def in_memory(self, device: Device, memory: str | None) -> Device:
        """Returns one of the memories of a device; the usual one for None.

        Raises:
            DeviceUnavailableError: There is no memory of that name; says which there are.
        """
        if memory is None:
            return replace(device, memory=None)
        raise DeviceUnavailableError(
            f"{replace(device, memory=memory)} is not available: {self.name} has one memory there."
        )

    def host_memory(self, device: Device) -> Device | None:
        """Returns memory of the host from which a device copies by itself; None if there is none.

        Arrays there are still arrays of this backend, and wait for their use.
        """
        return None

    @abstractmethod
    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterable[Any]:
        """Brings arrays of this backend to one of its devices, one result per array, in order.

        Results that are yielded one by one let an error name the array that failed; so does a
        `BatchError`. An array that is there already is only given for `copy=True`, and must be
        copied then.
        """

    def is_traced(self, array: Any) -> bool:
        """Returns whether an array is a tracer of a program that is being recorded.

        It is nowhere yet, and will be where the arrays are that the program is run with.
        """
        return False

    def abstract(self, shape: Sequence[int], dtype: str) -> Any:
        """Returns an array on the device of kind `meta`: it has a shape and a dtype, but no values.

        Raises:
            TypeError: There are no such arrays here.
        """
        raise TypeError(f"{self.name} has no arrays without values")

    def wait(self, device: Device, results: Any) -> None:
        """Waits until all work on one of its devices has finished.

        Args:
            device: The device.
            results: What the runs gave, an array or a tree with some.
        """

    # threads

    def thread_settings(self) -> Callable[[], AbstractContextManager[object]]:
        """Copies the settings of this thread, to be restored in another one.

        Called where arrays are wanted; what it returns is called once in the thread that makes
        them, which does so inside that context.
        """
        return nullcontext

    def hand_over(self, arrays: Sequence[Any]) -> Callable[[], object] | None:
        """Gives arrays of this backend to another thread.

        Called in the thread that made them; what it returns is called in the thread that is going
        to use them, before it does. None if there is nothing to wait for.
        """
        return None

    # exchange

    @abstractmethod
    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Gives arrays to the exchange, without a copy where that can be.

        Raises:
            TypeError: The values of one of them cannot leave; see `check`.
        """

    def read_box(self, array: Any, box: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
        """Copies a box of an array, a range per dimension, into new memory of the host."""
        (data,) = self.export([array], HOST).data
        index = tuple(slice(start, stop) for start, stop in box)
        found: np.ndarray[Any, Any] = data[(*index, ...)].copy()
        return found

    def is_view(self, data: Any, array: Any) -> bool:
        """Returns whether an export that is not private shares the array's memory.

        Asked for `copy=False` only: frameworks that copy on their own tell nobody.
        """
        return True

    @abstractmethod
    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Makes arrays of this backend from the exchange, one per array, in order.

        For `device` on the host and an adapter that `keeps_memory`, all host memory in `exchange`
        is private, or frozen, or to be shared. Other memory, that of accelerators too, is copied;
        it may be read until the last result is given, not longer.

        Args:
            exchange: The arrays.
            device: Where the results are to be.
            share: The results must lie in the very memory of the exchange.

        Raises:
            BufferError: They cannot.
        """

    def overwrite(self, arrays: Sequence[Any], values: Sequence[Any]) -> None:
        """Copies values into arrays, in place; asked for where they are not `frozen`.

        Args:
            arrays: Arrays on any device.
            values: One of the same shape and dtype for each, of NumPy or of this backend.
        """
        raise TypeError(f"arrays of {self.name} cannot be written to")

    def place(self, array: Any) -> Hashable:
        """Returns a key that is another one once a view of an array is not its values any more.

        None where a view may become invalid without that.
        """
        return None

    def note_writes(self, arrays: Sequence[Any]) -> None:
        """Tells the framework that the memory of arrays was written to from outside."""

    # dtypes

    def storable(self, dtype: str) -> str | None:
        """Returns the dtype in which this backend holds `dtype`: itself, a narrower one, None."""
        return dtype

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """Returns a new array of another dtype, and whether every value has survived.

        An integer survives if it is equal, a floating value if it is rounded but not made infinite.
        """
        raise TypeError(f"the {self.name} adapter cannot cast {self.dtype(array)} to {dtype}")

    def casts(self, arrays: Sequence[Any], dtype: str) -> Iterable[tuple[Any, bool]]:
        """Casts many arrays at once, in order, where that is faster than `cast` for each.

        An error is about the array whose turn it is, or a `BatchError`.
        """
        return (self.cast(array, dtype) for array in arrays)

    # what takes the place of an array

    def like(self, new: Any, old: Any) -> Any:
        """Wraps `new` as `old` is wrapped: as a parameter, for example."""
        return new

    def swap(self, old: Any, new: Any) -> tuple[Callable[[], object], Callable[[], object]] | None:
        """Returns a function that gives an array, in place, the contents of another one.

        Returns:
            What does that, and what takes it back, also half of it; None where arrays of this kind
            are replaced by new ones instead.
        """
        return None

    # random generators

    def generator_device(self, x: Any) -> Device | None:
        """Returns the device of a random generator; None for objects of other kinds."""
        return None

    def generator_to(self, generator: Any, device: Device) -> Any:
        """Returns a new generator on a device, which may be that of the old one.

        It goes on as the old one would where the device draws the same numbers from the same state.
        """
        raise TypeError(f"{self.name} has no random generators")

    # ties by view

    def may_share_memory(self, arrays: Sequence[Any]) -> bool:
        """Returns whether two of the arrays may share memory: a quick check, True if in doubt."""
        return True

    def memory(self, array: Any) -> Memory | None:
        """Returns the address range of a strided array; None where it cannot have views."""
        return None

    def shares_elements(self, a: Any, b: Any) -> bool:
        """Returns whether two arrays have an element in common, not only overlapping spans."""
        return True

    def view(
        self, base: Any, shape: Sequence[int], strides: Sequence[int], offset: int, like: Any
    ) -> Any:
        """Returns a view of `base`: strides and offset in elements, counted from its first one.

        `like` is the view that it replaces.

        Raises:
            TypeError: There are no such views here, with negative strides for example.
        """
        raise TypeError(f"{self.name} has no views")

    # training

    def is_trainable(self, array: Any) -> bool:
        """Returns whether an array may be trained, as far as it says itself: it is not frozen."""
        return True
