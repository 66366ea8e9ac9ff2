"""Follows operations on tensors without memory, which stand for lazy arrays.

A tensor is a view of its storage; the storage has a `Storage`. Views need no rules: torch itself
computes their offsets and strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fmapper.checkpoints import (
    LazyArray,
    Recorder,
    Storage,
    StorageView,
    Unwritten,
    concatenate,
    numpy_dtype,
    put,
    stack,
    take,
)
from fmapper_adapters.torch._private import TorchDispatchMode, identity_of, pytree

T = TypeVar("T")

_aten = torch.ops.aten
_COPIES = {_aten.clone, _aten.contiguous, _aten._to_copy, _aten.lift_fresh, _aten.lift}
_SHAPES = {_aten._unsafe_view, _aten.reshape, _aten.view_copy, _aten._reshape_copy}
_BY_POSITION = {
    _aten.flip,
    _aten.index_select,
    _aten.index,
    _aten.repeat,
    _aten.repeat_interleave,
    _aten.roll,
    _aten.take,
    _aten.gather,
    _aten.rot90,
    _aten.expand_copy,
    _aten.permute_copy,
}
_FILLED = {
    _aten.zeros: 0,
    _aten.zeros_like: 0,
    _aten.new_zeros: 0,
    _aten.ones: 1,
    _aten.ones_like: 1,
    _aten.new_ones: 1,
}
_WITH_VALUES = {_aten.arange, _aten.linspace, _aten.eye, _aten.scalar_tensor}
_EMPTY = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided}
_ARITHMETIC: dict[Any, Callable[..., LazyArray]] = {
    _aten.add: Recorder.add,
    _aten.sub: Recorder.subtract,
    _aten.rsub: lambda a, b: Recorder.subtract(b, a),
    _aten.mul: Recorder.multiply,
    _aten.div: Recorder.divide,
    _aten.neg: lambda a: Recorder.multiply(a, -1),
}
_IN_PLACE = {
    _aten.add_: _aten.add,
    _aten.sub_: _aten.sub,
    _aten.mul_: _aten.mul,
    _aten.div_: _aten.div,
    _aten.neg_: _aten.neg,
}
_CONVERSIONS = ("from_numpy", "tensor", "as_tensor", "asarray")


class TorchRecorder(Recorder):
    """Stands in for arrays with tensors on the meta device."""

    def __init__(self, recording: Any = None) -> None:
        super().__init__(recording)
        self._memories: dict[int, tuple[Any, Storage]] = {}  # storages stay alive

    def run(self, body: Callable[[], T]) -> T:
        """Runs a function while operations on tensors are followed."""
        with self._borders(), _Mode(self), torch.no_grad():
            return body()

    def stand_in(self, array: LazyArray) -> torch.Tensor:
        """Returns a tensor without memory that stands for a lazy array."""
        dtype = getattr(torch, array.dtype.name, None)
        if not isinstance(dtype, torch.dtype):
            raise self.refusal(f"a tensor of {array.dtype.name}, which torch has not,")
        tensor = torch.empty(array.shape, dtype=dtype, device="meta")
        self._keep(tensor, array)
        return tensor

    def lazy(self, array: Any) -> LazyArray | None:
        """Returns the lazy array that a tensor currently stands for."""
        if not isinstance(array, torch.Tensor) or array.layout != torch.strided:
            return None
        memory = self._memory(array)
        return None if memory is None else memory.read(_view(array, memory))

    def explain(self, error: Exception) -> str | None:
        """Explains that tensors without memory have no values."""
        if isinstance(error, RuntimeError) and ("meta" in str(error) or "unalloc" in str(error)):
            return f"an operation ({str(error).partition('.')[0]})"
        if isinstance(error, TypeError) and "incompatible tensor type" in str(error):
            return "setting .data of a parameter with memory (make the module on the meta device)"
        return None

    def _memory(self, tensor: torch.Tensor) -> Storage | None:
        kept = self._memories.get(identity_of(tensor.untyped_storage()))
        return None if kept is None else kept[1]

    def _keep(self, tensor: torch.Tensor, array: LazyArray) -> None:
        storage = tensor.untyped_storage()
        self._memories[identity_of(storage)] = storage, Storage(array)

    def _write(self, target: torch.Tensor, value: LazyArray) -> torch.Tensor:
        """Replaces the elements of a tensor; refuses a tensor with memory."""
        memory = self._memory(target)
        if memory is None:
            storage = target.untyped_storage()
            flat = target.new_empty(0).set_(storage)
            kind = numpy_dtype(_name(target.dtype))
            meta = target.is_meta
            content = Unwritten(flat.shape, kind) if meta else LazyArray.of(_numpy(flat.detach()))
            memory = Storage(content)
            self._memories[identity_of(storage)] = storage, memory
        value = self.broadcast(self.cast(value, memory.content.dtype), target.shape)
        memory.write(_view(target, memory), value)
        return target

    def _to_lazy(self, value: torch.Tensor) -> LazyArray:
        lazy = self.lazy(value)
        if lazy is None and value.is_meta:
            return Unwritten(value.shape, numpy_dtype(_name(value.dtype)))
        return LazyArray.of(_numpy(value)) if lazy is None else lazy

    # operations

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follows an operation of ATen."""
        packet = func.overloadpacket
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if packet in _FILLED or packet in _EMPTY or packet in (_aten.full, _aten.full_like):
            return self._make(func, packet, args, kwargs)
        tracked = [self._memory(x) is not None for x in tensors]
        if not any(tracked):
            if packet in _WITH_VALUES and kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            out = func(*args, **kwargs)
            if packet in (_aten.fill_, _aten.zero_) and args[0].is_meta:
                self._write(args[0], self._fill_value(packet, args))
            elif packet is _aten._to_copy and out.is_meta and not args[0].is_meta:
                kind = numpy_dtype(_name(out.dtype))
                self._keep(out, LazyArray.of(_numpy(args[0]).astype(kind)))
            return out
        if func.is_view:
            return func(*args, **kwargs)
        if packet in _COPIES or packet in _SHAPES:
            return self._copy(func, args, kwargs)
        if packet is _aten.copy_:
            return self._write(args[0], self._to_lazy(args[1]))
        if packet in (_aten.fill_, _aten.zero_):
            return self._write(args[0], self._fill_value(packet, args))
        if packet in (_aten.cat, _aten.stack):
            return self._join(packet, *args, **kwargs)
        if packet in _BY_POSITION:
            return self._by_position(func, args, kwargs)
        if packet in (_aten.index_put_, _aten.index_copy_):
            return self._put(func, *args, **kwargs)
        if func is _aten.sum.dim_IntList and kwargs.get("dtype") in (None, args[0].dtype):
            keeps = len(args) > 2 and args[2]
            summed = self.total(self._to_lazy(args[0]), args[1] or ())
            return self.stand_in(summed.reshape(func(*args, **kwargs).shape) if keeps else summed)
        if packet is _aten.constant_pad_nd:
            return self._pad(*args)
        if packet in _ARITHMETIC or packet in _IN_PLACE:
            return self._compute(packet, args, kwargs)
        name = "item" if packet is _aten._local_scalar_dense else packet.__name__
        raise self.refusal(f"torch.{name}")

    def _make(self, func: Any, packet: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Creates a tensor, and records its value if it is a meta tensor with a fill value."""
        out: torch.Tensor = func(*args, **kwargs)
        if out.is_meta and packet not in _EMPTY:
            value = _FILLED.get(packet, args[1] if len(args) > 1 else 0)
            self._keep(out, LazyArray.full(out.shape, value, numpy_dtype(_name(out.dtype))))
        return out

    def _fill_value(self, packet: Any, args: Any) -> LazyArray:
        value = 0 if packet is _aten.zero_ else args[1]
        if isinstance(value, torch.Tensor):
            return self._to_lazy(value)
        return LazyArray.full(args[0].shape, value, numpy_dtype(_name(args[0].dtype)))

    def _copy(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        array = self._to_lazy(args[0])
        if func.overloadpacket in _SHAPES:
            return self.stand_in(array.reshape(args[1]))
        dtype = kwargs.get("dtype")
        return self.stand_in(
            array if dtype is None else self.cast(array, numpy_dtype(_name(dtype)))
        )

    def _join(self, packet: Any, tensors: Any, dim: int = 0) -> torch.Tensor:
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
        kind = numpy_dtype(_name(dtype))
        arrays = [self.cast(self._to_lazy(x), kind) for x in tensors]
        if packet is _aten.stack:
            return self.stand_in(stack(arrays, dim))
        arrays = [x for x in arrays if x.shape != (0,)] or arrays[:1]
        return self.stand_in(concatenate(arrays, dim))

    def _by_position(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        tensor = args[0]
        positions = torch.arange(tensor.numel()).reshape(tensor.shape)
        rest, options = pytree.tree_map(self._index, (args[1:], kwargs))
        moved = func(positions, *rest, **options)
        return self.stand_in(take(self._to_lazy(tensor), moved.numpy()))

    def _put(self, func: Any, target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Writes at indices, whose positions torch finds by indexing positions."""
        value = args[-1] if func.overloadpacket is _aten.index_copy_ else args[1]
        if kwargs.get("accumulate") or (len(args) > 2 and args[2] is True):
            raise self.refusal("adding at indices")
        rest = [pytree.tree_map(self._index, x) for x in args if x is not value]
        shape = target.shape
        if func.overloadpacket is _aten.index_put_:
            places = _aten.index(torch.arange(target.numel()).reshape(shape), rest[0])
        else:
            places = torch.arange(target.numel()).reshape(shape).index_select(*rest[:2])
        if places.unique().numel() != places.numel():
            raise self.refusal("writing to an element twice")
        memory = Storage(self._to_lazy(target))
        array = self.cast(self._to_lazy(value), memory.content.dtype)
        put(memory, places.numpy(), self.broadcast(array, places.shape))
        return self._write(target, memory.content.reshape(shape))

    def _index(self, value: Any) -> Any:
        """Returns an index tensor with its values; other arguments unchanged."""
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        array = self.lazy(value)
        if array is None or not array.has_values:
            raise self.refusal("an index")
        return torch.from_numpy(array.read().copy())

    def _pad(self, tensor: torch.Tensor, widths: Any, value: float = 0) -> torch.Tensor:
        low, high = widths[::2][::-1], widths[1::2][::-1]
        first = tensor.ndim - len(low)
        shape, box = list(tensor.shape), [slice(None)] * tensor.ndim
        for axis, (before, after) in enumerate(zip(low, high, strict=True), first):
            if min(before, after) < 0:
                raise self.refusal("a padding that cuts")
            shape[axis] += before + after
            box[axis] = slice(before, before + tensor.shape[axis])
        kind = numpy_dtype(_name(tensor.dtype))
        out = self.stand_in(LazyArray.full(shape, value, kind))
        self._write(out[tuple(box)], self._to_lazy(tensor))
        return out

    def _compute(self, packet: Any, args: Any, kwargs: Any) -> torch.Tensor:
        operation = _ARITHMETIC[_IN_PLACE.get(packet, packet)]
        first, others = args[0], args[1:2]
        alpha = kwargs.get("alpha", 1)
        if "rounding_mode" in kwargs or len(args) > 2:
            raise self.refusal(f"torch.{packet.__name__}")
        dtype = torch.result_type(first, others[0]) if others else first.dtype
        shape = np.broadcast_shapes(*(tuple(getattr(x, "shape", ())) for x in (first, *others)))
        kind = numpy_dtype(_name(dtype))
        wide = numpy_dtype("float32") if dtype in (torch.bfloat16, torch.float16) else kind
        operands = [self._operand(x, kind, shape) for x in (first, *others)]
        numbers = [x for x in operands if not isinstance(x, LazyArray)]
        if all(float(wide.type(x)) == float(kind.type(x)) for x in numbers):
            wide = kind
        operands = [self.cast(x, wide) if isinstance(x, LazyArray) else x for x in operands]
        if alpha != 1:
            operands[1] = operands[1] * alpha if numbers else self.multiply(operands[1], alpha)
        value = self.cast(operation(*operands), kind)
        return self._write(first, value) if packet in _IN_PLACE else self.stand_in(value)

    def _operand(self, value: Any, dtype: Any, shape: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if self._memory(value) is None and not value.is_meta:
            number = self.number(LazyArray.of(_numpy(value)))
            if not isinstance(number, LazyArray):
                return number
        return self.broadcast(self.cast(self._to_lazy(value), dtype), shape)

    # borders to other frameworks

    @contextmanager
    def _borders(self) -> Iterator[None]:
        """Lets conversions accept arrays of other frameworks, and return those of NumPy."""
        kept = {name: getattr(torch, name) for name in _CONVERSIONS}
        kept_numpy, kept_array = torch.Tensor.numpy, torch.Tensor.__array__
        methods: dict[str, Any] = {
            "numpy": lambda tensor, **options: self._to_numpy(tensor, kept_numpy, **options),
            "__array__": lambda tensor, *args, **kw: self._to_numpy(tensor, kept_array, *args),
            "data_ptr": self._address,
        }
        before = {name: vars(torch.Tensor).get(name) for name in methods}
        try:
            for name, original in kept.items():
                setattr(torch, name, self._conversion(original))
            for name, method in methods.items():
                setattr(torch.Tensor, name, method)
            with _RealIndices():
                yield
        finally:
            for name, original in kept.items():
                setattr(torch, name, original)
            for name, method in before.items():
                if method is None:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, method)

    def _conversion(self, original: Any) -> Callable[..., Any]:
        def convert(value: Any, *args: Any, dtype: Any = None, **options: Any) -> Any:
            array = self._lazy_of(value)
            if array is None:
                given = {} if dtype is None else {"dtype": dtype}
                if torch.device(options.get("device") or "cpu").type == "meta":
                    options["device"] = "cpu"
                return original(value, *args, **given, **options)
            kind = array.dtype if dtype is None else numpy_dtype(_name(dtype))
            return self.stand_in(self.cast(array, kind))

        return convert

    def _lazy_of(self, value: Any) -> LazyArray | None:
        if type(value) in (list, tuple):
            arrays = [self._lazy_of(item) for item in value]
            lazy = [x for x in arrays if x is not None]
            return stack(lazy) if lazy and len(lazy) == len(arrays) else None
        return None if self.recording is None else self.recording.lazy(value)

    def _to_numpy(self, tensor: torch.Tensor, original: Any, *args: Any, **options: Any) -> Any:
        array = self.lazy(tensor)
        if array is None:
            return original(tensor, *args, **options)
        return self.recording.recorders["numpy"].stand_in(array)

    def _address(self, tensor: torch.Tensor) -> int:
        """Returns an address, which is unique also for tensors without memory."""
        storage = tensor.untyped_storage()
        start = identity_of(storage) << 32 if tensor.is_meta else storage.data_ptr()
        return start + int(tensor.storage_offset()) * tensor.element_size()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: TorchRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(func, args, kwargs or {})


def _view(tensor: torch.Tensor, memory: Storage) -> StorageView:
    if numpy_dtype(_name(tensor.dtype)) != memory.content.dtype:
        raise Recorder.refusal(f"a view as {_name(tensor.dtype)}")
    return StorageView(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


class _RealIndices(TorchFunctionMode):
    """Lets tensors be indexed by arrays of other frameworks.

    Setting `Tensor.__getitem__` would leave torch changed: Python fills a slot of the class for it,
    which deleting the attribute does not empty, and `x[rows, columns] = 0` fails from then on.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], _real_index(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _real_index(index: Any) -> Any:
    """Replaces lists in an index by tensors, which torch would create on the array's device."""
    if isinstance(index, tuple):
        return tuple(map(_real_index, index))
    if isinstance(index, list) and not any(isinstance(x, slice | None) for x in index):
        return torch.tensor(index)
    return index


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numpy(tensor: torch.Tensor) -> Any:
    """Returns the values of a tensor with memory."""
    plain = tensor.detach().cpu()
    if plain.dtype is torch.bfloat16 or _name(plain.dtype).startswith("float8"):
        kind = numpy_dtype(_name(plain.dtype))
        words = plain.view(torch.int16 if kind.itemsize == 2 else torch.uint8)
        return torch.Tensor.numpy(words).view(kind)
    return torch.Tensor.numpy(plain)
