"""Follows operations on NumPy arrays without data.

An array is a view of a `Storage`. Its shadow, an array of single bytes whose memory is never read,
lets NumPy compute the shape and strides of views.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fmapper.checkpoints import (
    LazyArray,
    Recorder,
    Storage,
    StorageView,
    Unwritten,
    put,
    stack,
    take,
)
from fmapper_adapters.numpy.recorded_functions import HANDLERS
from fmapper_adapters.numpy.stand_in import StandIn

T = TypeVar("T")

_VIEWS = {
    np.transpose,
    np.swapaxes,
    np.moveaxis,
    np.rollaxis,
    np.squeeze,
    np.expand_dims,
    np.broadcast_to,
    np.split,
    np.array_split,
    np.hsplit,
    np.vsplit,
    np.dsplit,
    np.flip,
    np.fliplr,
    np.flipud,
    np.rot90,
    np.atleast_1d,
    np.atleast_2d,
    np.atleast_3d,
    np.diagonal,
    np.unstack,
    np.matrix_transpose,
    np.permute_dims,
}
_BY_POSITION = {np.take, np.repeat, np.tile, np.roll, np.delete, np.resize, np.take_along_axis}
_FILLED = {"empty": None, "zeros": 0, "ones": 1}
_ABOUT = {np.shape: "shape", np.ndim: "ndim", np.size: "size"}
_UFUNCS: dict[Any, Callable[..., LazyArray]] = {
    np.add: Recorder.add,
    np.subtract: Recorder.subtract,
    np.multiply: Recorder.multiply,
    np.true_divide: Recorder.divide,
    np.negative: lambda x: Recorder.multiply(x, -1),
    np.positive: lambda x: x,
}


class NumpyRecorder(Recorder):
    """Represents arrays by objects with the interface of NumPy's arrays."""

    def run(self, body: Callable[[], T]) -> T:
        """Runs a function while constructors of NumPy accept and return arrays without data."""
        names = ["array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray"]
        kept = {name: getattr(np, name) for name in (*names, *_FILLED, "full")}
        try:
            for name in names:
                setattr(np, name, self._conversion(kept[name], copies=name == "array"))
            for name, value in _FILLED.items():
                setattr(np, name, self._constructor(kept[name], value))
            np.full = self._full_constructor(kept["full"])
            return body()
        finally:
            for name, function in kept.items():
                setattr(np, name, function)

    def stand_in(self, array: LazyArray) -> _Recorded:
        """Returns an array of NumPy that stands for a lazy one."""
        return _Recorded.of(array, self)

    def lazy(self, array: Any) -> LazyArray | None:
        """Returns the lazy array that an array currently stands for."""
        return array.lazy() if type(array) is _Recorded else None

    def to_lazy(self, value: Any) -> LazyArray:
        """Returns an array of any kind, a number, or a list of them as a lazy array."""
        if isinstance(value, LazyArray):
            return value
        lazy = self.recording.lazy(value)
        if lazy is not None:
            return lazy
        if isinstance(value, list | tuple) and self._has_stand_in(value):
            return stack([self.to_lazy(item) for item in value])
        return LazyArray.of(np.asarray(value))

    def _has_stand_in(self, value: Any) -> bool:
        if type(value) in (list, tuple):
            return any(map(self._has_stand_in, value))
        return self.recording.lazy(value) is not None

    def _conversion(self, original: Any, copies: bool) -> Callable[..., Any]:
        def convert(value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            if Recorder.is_library(sys._getframe(1)) and not isinstance(value, StandIn):
                return original(value, dtype, *args, **kwargs)
            if not self._has_stand_in(value):
                return original(value, dtype, *args, **kwargs)
            plain = type(value) is _Recorded and dtype in (None, value.dtype)
            if plain and not copies and not kwargs.get("copy"):
                return value
            array = self.to_lazy(value)
            wanted = array.dtype if dtype is None else np.dtype(dtype)
            return self.stand_in(Recorder.cast(array, wanted))

        return convert

    def _constructor(self, original: Any, value: float | None) -> Callable[..., Any]:
        def make(shape: Any, dtype: Any = float, *args: Any, **kwargs: Any) -> Any:
            if Recorder.is_library(sys._getframe(1)) or np.dtype(dtype).kind not in "biufcV":
                return original(shape, dtype, *args, **kwargs)
            return self.full(shape, value, np.dtype(dtype))

        return make

    def _full_constructor(self, original: Any) -> Callable[..., Any]:
        def full(shape: Any, fill_value: Any, dtype: Any = None, **kwargs: Any) -> Any:
            if Recorder.is_library(sys._getframe(1)):
                return original(shape, fill_value, dtype, **kwargs)
            filled = original((), fill_value, dtype)
            return self.full(shape, filled.item(), filled.dtype)

        return full

    def full(self, shape: Any, value: float | None, dtype: Any) -> _Recorded:
        """Returns an array of one value, or without values if `value` is missing."""
        sizes = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        if value is None:
            return self.stand_in(Unwritten(sizes, dtype))
        return self.stand_in(LazyArray.full(sizes, value, dtype))


class _Recorded(StandIn):
    """A view of memory that does not exist, with the interface of `np.ndarray`."""

    __slots__ = ("_recorder", "_shadow", "_start", "_storage", "dtype")

    dtype: np.dtype[Any]

    def __init__(
        self, storage: Storage, shadow: np.ndarray[Any, Any], start: int, recorder: NumpyRecorder
    ) -> None:
        self._storage, self._shadow, self._start = storage, shadow, start
        self._recorder = recorder
        self.dtype = storage.content.dtype

    @classmethod
    def of(cls, array: LazyArray, recorder: NumpyRecorder) -> _Recorded:
        """Returns a view of the whole of a new storage."""
        strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        byte = np.ndarray(1, np.int8)
        shadow = as_strided(byte, array.shape, strides)
        return cls(Storage(array), shadow, _address(shadow), recorder)

    def view_of(self, shadow: np.ndarray[Any, Any]) -> _Recorded:
        """Returns the view that corresponds to a view of the shadow."""
        return _Recorded(self._storage, shadow, self._start, self._recorder)

    def new(self, array: LazyArray) -> _Recorded:
        """Returns an array with its own storage."""
        return _Recorded.of(array, self._recorder)

    def place(self) -> StorageView:
        """Returns the view of the storage that this array is."""
        offset = _address(self._shadow) - self._start if self._shadow.size else 0
        return StorageView(offset, self._shadow.shape, self._shadow.strides)

    def lazy(self) -> LazyArray:
        """Returns the current elements."""
        return self._storage.read(self.place())

    def write(self, value: Any) -> None:
        """Replaces the elements."""
        self._storage.write(self.place(), Recorder.broadcast(self._cast(value), self.shape))

    def _cast(self, value: Any) -> LazyArray:
        """Casts values to be written to the dtype of this array, as NumPy does."""
        if isinstance(value, LazyArray) or self._recorder._has_stand_in(value):
            return Recorder.cast(self._recorder.to_lazy(value), self.dtype)
        return LazyArray.of(np.asarray(value).astype(self.dtype))

    # properties

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._shadow.shape
        return shape

    @property
    def ndim(self) -> int:
        return self._shadow.ndim

    @property
    def size(self) -> int:
        return self._shadow.size

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(int(step) * self.dtype.itemsize for step in self._shadow.strides)

    @property
    def flags(self) -> Any:
        return self._shadow.flags

    def __len__(self) -> int:
        return len(self._shadow)

    def __iter__(self) -> Iterator[_Recorded]:
        return (self[at] for at in range(len(self)))

    def __repr__(self) -> str:
        return f"array(<{self.dtype}{list(self.shape)} without data>)"

    # views

    @property
    def T(self) -> _Recorded:
        return self.view_of(self._shadow.T)

    @property
    def mT(self) -> _Recorded:
        return self.view_of(self._shadow.mT)

    def transpose(self, *axes: Any) -> _Recorded:
        return self.view_of(self._shadow.transpose(*axes))

    def swapaxes(self, first: int, second: int) -> _Recorded:
        return self.view_of(self._shadow.swapaxes(first, second))

    def squeeze(self, axis: Any = None) -> _Recorded:
        return self.view_of(self._shadow.squeeze(axis))

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> _Recorded:
        if order not in ("C", "A"):
            back = self.transpose().reshape(*_sizes(shape)[::-1])
            return back.transpose()
        try:
            return self.view_of(self._shadow.reshape(_sizes(shape), copy=False))
        except ValueError:
            return self.new(self.lazy().reshape(_sizes(shape)))

    def ravel(self, order: str = "C") -> _Recorded:
        return self.reshape(-1, order=order)

    def flatten(self, order: str = "C") -> _Recorded:
        return self.reshape(-1, order=order).copy()

    def copy(self, order: str = "C") -> _Recorded:
        return self.new(self.lazy())

    def __copy__(self) -> _Recorded:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> _Recorded:
        return self.copy()

    def astype(self, dtype: Any, *args: Any, copy: bool = True, **kwargs: Any) -> _Recorded:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return self.new(Recorder.cast(self.lazy(), np.dtype(dtype)))

    def fill(self, value: Any) -> None:
        self.write(value)

    def take(self, indices: Any, axis: int | None = None) -> _Recorded:
        return self.by_position(lambda positions: positions.take(indices, axis))

    def repeat(self, repeats: Any, axis: int | None = None) -> _Recorded:
        return self.by_position(lambda positions: positions.repeat(repeats, axis))

    def __getitem__(self, index: Any) -> _Recorded:
        if _is_basic(index):
            return self.view_of(self._shadow[_with_ellipsis(index)])
        if self._recorder._has_stand_in(index):
            raise Recorder.refusal("an index")
        return self.by_position(lambda positions: positions[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        if not _is_basic(index):
            if self._recorder._has_stand_in(index):
                raise Recorder.refusal("an index")
            self.write_at(np.arange(self.size).reshape(self.shape)[index], value)
            return
        self.view_of(self._shadow[_with_ellipsis(index)]).write(value)

    def by_position(self, move: Callable[[Any], Any]) -> _Recorded:
        """Applies a function that only moves elements."""
        positions = move(np.arange(self.size).reshape(self.shape))
        return self.new(take(self.lazy(), np.asarray(positions)))

    def write_at(self, places: Any, value: Any) -> None:
        """Replaces the elements at positions."""
        if len(np.unique(places)) != np.size(places):
            raise Recorder.refusal("writing to an element twice")
        array = self._cast(value)
        storage = Storage(self.lazy())
        put(storage, places, Recorder.broadcast(array, places.shape))
        self.write(storage.content.reshape(self.shape))

    # the protocols of NumPy

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _ABOUT and len(args) == 1 and not kwargs:
            return getattr(args[0], _ABOUT[func])
        array = args[0] if args else None
        if func in HANDLERS:
            return HANDLERS[func](self._recorder, *args, **kwargs)
        if isinstance(array, _Recorded) and len(args) >= 1:
            if func in _VIEWS:
                result = func(array._shadow, *args[1:], **kwargs)
                if isinstance(result, list | tuple):
                    return type(result)(map(array.view_of, result))
                return array.view_of(result)
            if func in _BY_POSITION and not self._recorder._has_stand_in(args[1:]):
                return array.by_position(lambda positions: func(positions, *args[1:], **kwargs))
        raise Recorder.refusal(f"np.{func.__name__}")

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kw: Any
    ) -> Any:
        if method != "__call__" or ufunc not in _UFUNCS or kw:
            raise Recorder.refusal(f"np.{ufunc.__name__}")
        probes = [np.ndarray(0, x.dtype) if isinstance(x, _Recorded) else x for x in inputs]
        probes = [x.reshape(-1)[:0] if isinstance(x, np.ndarray) else x for x in probes]
        dtype = ufunc(*probes).dtype
        shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
        operands = [self._operand(x, dtype, shape) for x in inputs]
        result = _UFUNCS[ufunc](*operands)
        if out is None:
            return self.new(result)
        out[0].write(result)
        return out[0]

    def _operand(self, value: Any, dtype: Any, shape: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, np.generic):
            return value
        array = self._recorder.to_lazy(value)
        if self._recorder.recording.lazy(value) is None:
            array = LazyArray.of(array.read().astype(dtype))
            number = Recorder.number(array)
            if not isinstance(number, LazyArray):
                return number
        return Recorder.broadcast(Recorder.cast(array, dtype), shape)

    def __jax_array__(self) -> Any:
        return self._recorder.recording.recorders["jax"].stand_in(self.lazy())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise Recorder.refusal("a library that takes a NumPy array")

    def __getattr__(self, name: str) -> Any:
        if hasattr(np.ndarray, name) and not name.startswith("__"):
            raise Recorder.refusal(f"ndarray.{name}")
        raise AttributeError(f"ndarray has no attribute {name!r}")

    def _refuse(self, *args: Any) -> Any:
        raise Recorder.refusal("a number or truth value")

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __contains__ = _refuse


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    return (
        tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else tuple(shape)
    )


def _is_basic(index: Any) -> bool:
    if isinstance(index, tuple):
        return all(map(_is_basic, index))
    return (isinstance(index, slice | int | np.integer) and not isinstance(index, bool)) or (
        index is None or index is Ellipsis
    )


def _with_ellipsis(index: Any) -> Any:
    """Returns an index that gives a view, also of a single element."""
    parts = index if isinstance(index, tuple) else (index,)
    return parts if any(part is Ellipsis for part in parts) else (*parts, ...)
