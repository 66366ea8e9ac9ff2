"""The adapter for NumPy."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fmapper import Device
from fmapper.backends import Adapter, Exchange, Memory
from fmapper_adapters.numpy.stand_in import StandIn

if TYPE_CHECKING:
    from fmapper.checkpoints import Recorder, Recording

CPU = Device("numpy", "cpu")
_dtype = attrgetter("dtype")
_base = attrgetter("base")
_place = attrgetter("shape", "dtype")
_NO_NUMBERS = (np.flexible, np.datetime64, np.timedelta64, np.object_)
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_ALIGNMENT = 64  # bytes
_PART = 1 << 18  # elements that are cast and checked at a time
_NARROW = ("bfloat16", "float8", "float4", "int4", "uint4", "int2", "uint2")


class NumpyAdapter(Adapter):
    """The adapter for `np.ndarray` and NumPy's numeric scalars; the only device is the CPU."""

    name: ClassVar[str] = "numpy"
    host_only: ClassVar[bool] = True
    keeps_memory: ClassVar[bool] = True
    read_only: ClassVar[bool] = True
    array_types: ClassVar[tuple[type, ...]] = (np.ndarray,)

    @cached_property
    def functional(self) -> Any:
        """Loaded when first asked for."""
        return importlib.import_module("fmapper_adapters.numpy.functional")

    @cached_property
    def random(self) -> Any:
        """Loaded when first asked for."""
        return importlib.import_module("fmapper_adapters.numpy.random")

    def is_array_type(self, cls: type) -> bool:
        """Returns whether instances of a class are arrays or numeric scalars, not text or dates."""
        if issubclass(cls, np.generic):
            return not issubclass(cls, _NO_NUMBERS)
        return issubclass(cls, np.ndarray | StandIn)

    def is_interned_type(self, cls: type) -> bool:
        """Returns whether a class is `np.bool_`, which has only two instances."""
        return issubclass(cls, np.bool_)

    def is_number(self, array: Any) -> bool:
        """Returns whether an array is a scalar of NumPy."""
        return isinstance(array, np.generic)

    def recorder(self, recording: Recording) -> Recorder:
        """Returns the recorder for arrays of NumPy."""
        from fmapper_adapters.numpy.recording import NumpyRecorder  # rarely needed

        return NumpyRecorder(recording)

    def device(self, array: Any) -> Device:
        """Returns the host, always."""
        return CPU

    def dtype(self, array: Any) -> str:
        """Returns the name of the dtype, without the byte order."""
        return str(array.dtype.name)

    def shape(self, array: Any) -> tuple[int, ...]:
        """Returns `array.shape`."""
        return tuple(array.shape)

    def devices(self) -> Sequence[Device]:
        """Returns the host."""
        return [CPU]

    def why_not(self, kind: str, index: int | None) -> str:
        """Explains, for `meta`, which backends have it."""
        if kind == "meta":
            return (
                "NumPy has no arrays without values, but other backends do: "
                "to_torch(device='meta') or to_jax(device='meta')"
            )
        return super().why_not(kind, index)

    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterator[Any]:
        """Copies arrays; memory order and subclass are kept."""
        for array in arrays:
            yield array.copy() if isinstance(array, np.generic) else array.copy(order="K")

    def overwrite(self, arrays: Sequence[Any], values: Sequence[Any]) -> None:
        """Copies values into arrays; raises for a read-only array."""
        for array, value in zip(arrays, values, strict=True):
            np.copyto(array, value)

    def nbytes(self, array: Any) -> int:
        """Returns `array.nbytes`; for objects, only their pointers."""
        return int(array.nbytes)

    def signatures(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the dtypes, including the byte order."""
        return list(map(_dtype, arrays))

    def places(self, arrays: Sequence[Any]) -> Iterator[Any]:
        """Yields shapes and dtypes."""
        return map(_place, arrays)

    def check(self, array: Any) -> None:
        """Checks that an array is a plain array of numbers.

        Raises:
            TypeError: The array is of another kind, which the message names.
        """
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                "a masked array would lose its mask; move array.filled(...) or its data and mask"
            )
        kind = array.dtype.kind
        if kind in "OSUMm" or array.dtype.names is not None:
            raise TypeError(f"an array of dtype {array.dtype} has no counterpart in other backends")

    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Returns views; arrays in foreign byte order are copied."""
        data: list[Any] = []
        private: list[int] = []
        for dtype in set(map(_dtype, arrays)):
            if dtype.kind not in "biufc" or not dtype.isnative:
                break
        else:
            if {*map(type, arrays)} <= {np.ndarray}:
                return Exchange(arrays)
        for at, array in enumerate(arrays):
            self.check(array)
            plain = np.asarray(array)
            if not plain.dtype.isnative:
                plain = plain.astype(plain.dtype.newbyteorder("="))
                private.append(at)
            elif isinstance(array, np.generic):
                private.append(at)
            data.append(plain)
        return Exchange(data, private=frozenset(private))

    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Returns the arrays themselves; those exported as frozen are already read-only."""
        return exchange.data

    def storable(self, dtype: str) -> str | None:
        """Returns NumPy's own dtypes, and those of ml_dtypes where it is installed."""
        try:
            np_dtype(dtype)
        except TypeError:
            return None
        return dtype

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """Casts by `astype` in memory order, in parts, so that the check needs little memory."""
        target = np_dtype(dtype)
        source = array.real if array.dtype.kind == "c" and target.kind != "c" else array
        if {dtype, source.dtype.name} & {"float8_e8m0fnu"} and source.dtype.itemsize == 1:
            source = source.astype(np.float32)  # ml_dtypes has no direct cast
        with np.errstate(all="ignore"):
            if array.size <= _PART or not (array.flags.c_contiguous or array.flags.f_contiguous):
                options = {} if isinstance(array, np.generic) else {"order": "K"}
                new = source.astype(target, **options)
                return new, has_survived(np.asarray(array), np.asarray(new))
            new = _aligned_like(source, target)
            parts = zip(_parts(source), _parts(array), _parts(new), strict=True)
            for values, old, part in parts:
                np.copyto(part, values, casting="unsafe")
                if not has_survived(old, part):
                    return new, False
            return new, True

    def generator_device(self, x: Any) -> Device | None:
        """Returns the host, of `np.random.Generator`, `RandomState` and bit generators."""
        return CPU if issubclass(type(x), _GENERATORS) else None

    def generator_to(self, generator: Any, device: Device) -> Any:
        """Copies a generator with its state."""
        return copy.deepcopy(generator)

    def may_share_memory(self, arrays: Sequence[Any]) -> bool:
        """Returns whether some array does not own its memory."""
        return set(map(type, map(_base, arrays))) != {type(None)}

    def memory(self, array: Any) -> Memory | None:
        """Returns the memory of arrays with elements at whole strides."""
        if not isinstance(array, np.ndarray) or array.dtype.hasobject or not array.nbytes:
            return None
        size = array.dtype.itemsize
        if any(stride % size for stride in array.strides):
            return None
        return Memory(
            array.__array_interface__["data"][0],
            tuple(stride // size for stride in array.strides),
            size,
        )

    def addresses(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns addresses and strides."""
        return [(x.ctypes.data, x.strides) if isinstance(x, np.ndarray) else id(x) for x in arrays]

    def shares_elements(self, a: Any, b: Any) -> bool:
        """Calls `np.shares_memory`; True if that would take too long."""
        try:
            return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True

    def view(
        self, base: Any, shape: Sequence[int], strides: Sequence[int], offset: int, like: Any
    ) -> Any:
        """Returns an array on the dense memory of `base`."""
        size = base.itemsize
        memory = base.ravel(order="K").view(np.uint8)  # dtypes of ml_dtypes do not support buffers
        steps = [stride * size for stride in strides]
        return np.ndarray(tuple(shape), base.dtype, memory, offset * size, steps)


def np_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name; bfloat16 and the narrow types come from ml_dtypes.

    Raises:
        TypeError: There is no such dtype, or ml_dtypes is not installed.
    """
    if name.startswith(_NARROW):
        try:
            scalar_type = getattr(importlib.import_module("ml_dtypes"), name, None)
        except ImportError:
            raise TypeError(
                f"NumPy needs ml_dtypes for {name}, which is not installed: pip install ml_dtypes"
            ) from None
        if scalar_type is None:
            raise TypeError(f"ml_dtypes has no {name}")
        made: np.dtype[Any] = np.dtype(scalar_type)
        return made
    return np.dtype(name)


def _aligned_like(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Allocates an array like a dense one, aligned for XLA."""
    raw = np.empty(array.size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    order: Any = "C" if array.flags.c_contiguous else "F"
    new: np.ndarray[Any, Any] = np.ndarray(array.shape, dtype, raw, start, order=order)
    return new.view(type(array)) if type(array) is not np.memmap else new


def _parts(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yields flat views of a dense array, in memory order, a part at a time."""
    flat = np.asarray(array).reshape(-1, order="A")
    return (flat[start : start + _PART] for start in range(0, flat.size, _PART))


# The largest numbers of dtypes that have every smaller one, of both signs, up to rounding.
_LARGEST = {"float16": 65504.0, "bfloat16": 255 * 2.0**120, "float32": (2 - 2.0**-23) * 2.0**127}


def has_survived(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bool:
    """Returns whether a cast has kept every integer and made no finite value infinite."""
    if new.dtype.kind in "iub":
        return bool(((new.astype(old.dtype) == old) & ((new < 0) == (old < 0))).all())
    if old.dtype.kind in "iu":
        wide = new.real.astype(np.float64)
        with np.errstate(invalid="ignore"):  # of casts of what is too large
            is_same = wide.astype(old.dtype) == old
        return bool((is_same & (wide < float(int(np.iinfo(old.dtype).max) + 1))).all())
    if old.dtype.kind == "c" and new.dtype.kind != "c":
        return not old.imag.any() and has_survived(old.real, new)
    if new.dtype.kind == "c":
        return has_survived(old.real, new.real) and has_survived(old.imag, new.imag)
    if new.dtype.name in _LARGEST and old.dtype.kind == "f" and old.size:
        low, high = float(old.min()), float(old.max())
        if max(-low, high) <= _LARGEST[new.dtype.name]:
            return True  # three times as fast as what follows
    lost = ~np.isfinite(new)
    return not lost.any() or not bool((lost & np.isfinite(old)).any())
