"""Reads pickles in checkpoints of torch without running code: tensors become descriptions.

`torch.load(weights_only=True)` takes a quarter of a millisecond for a tensor without memory, which
is half a minute for 100,000, and has no bounds. Here Python's own unpickler gets stand-ins for the
names that torch allows, once the memory that it would need has been estimated. Each pickle gets new
stand-ins, because a pickle can set attributes of the objects that it names.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmapper.checkpoints import Misfit, check_count
from fmapper_adapters.torch.checkpoints.values import values_beside_tensors, way_out

_LONGEST = 1 << 10  # bytes of an integer: Python prints no more than 4,300 digits
_MOST_LONG = 1000  # integers of more than four bytes, which may all collide as keys of a dict
_MOST_DIMENSIONS = 64
_TEXT = 120
_WEIGHTS = {  # opcode -> bytes of its object, with its slots in the stack and in a container
    b"}": 250,
    b"]": 200,
    b"\x8f": 250,
    b"\x85": 64,
    b"\x86": 72,
    b"\x87": 80,
    b"t": 40,
    b"R": 170,
    b"\x81": 170,
    b"J": 60,
    b"M": 60,
    b"G": 60,
    b"X": _TEXT,
    b"\x8c": _TEXT,
    b"U": _TEXT,
    b"C": _TEXT,
    b"T": _TEXT,
    b"B": _TEXT,
    b"\x8a": 60,
    b"K": 16,
    b"N": 16,
    b"\x88": 16,
    b"\x89": 16,
    b"2": 16,
    b")": 16,
    b"(": 8,
    b"h": 16,
    b"j": 16,
    b"q": 16,
    b"r": 16,
    b"\x94": 16,
}
_LENGTHS = {  # opcodes that are followed by a length -> the bytes of that length
    ord("X"): 4,
    ord("T"): 4,
    ord("B"): 4,
    ord("U"): 1,
    ord("C"): 1,
    0x8A: 1,
    0x8B: 4,
    0x8C: 1,
    0x8D: 8,
    0x8E: 8,
}
_LINES = {ord("c"): 2, ord("I"): 1, ord("L"): 1, ord("F"): 1, ord("S"): 1, ord("V"): 1}
_LINES |= {ord("g"): 1}
_PLAIN = rb"[()012NQRabdelst\]u}\x81\x85-\x89\x8f\x90\x91\x92\x93\x94]"
_FIXED = rb"[Kqh\x80].|M..|[Jj]....|G........|\x95........"


class Dtype(NamedTuple):
    """A dtype of torch, or of a class of storages: its name and bytes."""

    name: str
    size: int


class StoredBytes(NamedTuple):
    """A storage: the key of its member, its dtype, and its number of elements."""

    key: str
    dtype: Dtype
    elements: int


class StoredTensor(NamedTuple):
    """A tensor: its storage, and its offset, shape and strides there, in elements."""

    storage: StoredBytes
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype
    is_conjugate: bool = False
    is_negative: bool = False


class OtherTensor(NamedTuple):
    """A tensor without a single storage, such as a sparse one, and what to save instead."""

    kind: str
    shape: tuple[int, ...]
    dtype: Dtype
    instead: str = "tensor.to_dense()"


Names = Callable[[str, str], Any]


def unpickle(data: bytes, names: Names, storages: dict[Any, StoredBytes] | None = None) -> Any:
    """Returns the object in a pickle.

    Args:
        data: The pickle.
        names: Returns the stand-in for a module and a name; raises for a name that is not allowed.
        storages: Collects the storages that the pickle refers to; None if it must not refer to any.

    Raises:
        Misfit: The pickle is too large, or holds objects that do not occur in checkpoints.
        Exception: The pickle is damaged: the unpickler may raise anything.
    """
    _check(data, storages is not None)
    return _Unpickler(data, names, {} if storages is None else storages).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Names, storages: dict[Any, StoredBytes]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._values: dict[tuple[str, str], Any] = {}
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        value = self._values.get((module, name))
        if value is None:
            value = self._values[module, name] = self._names(module, name)
        return value

    def persistent_load(self, pid: Any) -> StoredBytes:
        storage = self._storages.get(pid)
        if storage is None:
            kind, dtype, key, _, count, *view = pid
            if view not in ([], [None]):  # views of storages before torch 1.6
                raise Misfit("refers to a part of a storage as a separate storage")
            if kind != "storage" or not isinstance(dtype, Dtype) or type(key) is not str:
                raise Misfit("refers to an object that is not a storage")
            if type(count) is not int or count < 0:
                raise Misfit("has a storage without a size")
            storage = self._storages[pid] = StoredBytes(key, dtype, count)
        return storage


def _check(data: bytes, storages: bool) -> None:
    """Raises for a pickle that would need too much memory, or reserves it in advance."""
    takes = len(data)
    for sign, weight in _WEIGHTS.items():
        takes += data.count(sign) * weight
        check_count(takes, "bytes of pickled values")
    end_of_pickle(data, storages)


def end_of_pickle(data: bytes, storages: bool) -> int:
    """Returns the end of the pickle at the beginning of some bytes.

    Raises:
        Misfit: It ends later, or has opcodes that do not occur in checkpoints.
    """
    most = min(len(data) >> 17, 254)  # the largest third byte of an index into the memo
    plain = _PLAIN if storages else _PLAIN.replace(b"Q", b"")
    put = rb"r..[\x00-" + re.escape(bytes([most])) + rb"]\x00"
    run = re.compile(rb"(?:%b|%b|%b)*+" % (plain, _FIXED, put), re.DOTALL).match
    at = long = 0
    while True:
        match: Any = run(data, at)
        at = match.end()
        if at >= len(data):
            raise Misfit("its pickle is truncated")
        code = data[at]
        if code == 0x2E:  # STOP
            end: int = at + 1
            return end
        size = _LENGTHS.get(code)
        if size is not None:
            length = int.from_bytes(data[at + 1 : at + 1 + size], "little")
            at += 1 + size + length
            if code in (0x8A, 0x8B):
                long += 1
                if length > _LONGEST:
                    raise Misfit(f"its pickle has an integer of {length:,} bytes")
        elif code in _LINES:
            for _ in range(_LINES[code]):
                at = data.find(b"\n", at + 1)
                if at < 0:
                    raise Misfit("its pickle is truncated")
            at += 1
        else:
            raise Misfit(f"its pickle has the opcode {code:#x}, which checkpoints do not use")
        if long > _MOST_LONG:
            raise Misfit(f"its pickle has more than {_MOST_LONG} long integers")


class Record:
    """Stands for an object, whose attributes the pickle sets."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.args = args
        vars(self).update(fields)


def names_of_tensors() -> Names:
    """Returns stand-ins for one pickle, for what `torch.load(weights_only=True)` allows.

    Values that training scripts save with tensors have stand-ins as well.
    """
    count = 0

    def tensor(
        storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any, dtype: Any = None
    ) -> StoredTensor | OtherTensor:
        nonlocal count
        count += 1
        check_count(count, "tensors")
        flags = rest[2] if len(rest) > 2 else None
        if flags and (type(flags) is not dict or not flags.keys() <= {"conj", "neg"}):
            raise Misfit("has a tensor with attributes that are not known")
        if not len(shape) == len(strides) <= _MOST_DIMENSIONS:  # all tensors may share them
            raise Misfit("has a tensor with an invalid size")
        for number in (offset, *shape, *strides):
            if type(number) is not int or number < 0:
                raise Misfit("has a tensor with an invalid size")
        shape, strides = tuple(shape), tuple(strides)
        views = (flags.get("conj") is True, flags.get("neg") is True) if flags else ()
        return StoredTensor(storage, offset, shape, strides, dtype or storage.dtype, *views)

    def other(kind: str, shape: Any, dtype: Any, *instead: str) -> OtherTensor:
        nonlocal count
        count += 1
        check_count(count, "tensors")
        if len(shape) > _MOST_DIMENSIONS or not isinstance(dtype, Dtype):
            raise Misfit("has a tensor with an invalid size")
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in shape):
            raise Misfit("has a tensor with an invalid size")
        return OtherTensor(kind, tuple(shape), dtype, *instead)

    def sparse(layout: Any, data: Any) -> OtherTensor:
        at = [type(part) for part in data].index(tuple)  # the shape follows the values
        return other(str(layout), data[at], data[at - 1].dtype)

    def tensor_v3(
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        grad: Any,
        hooks: Any,
        dtype: Any,
        *rest: Any,
    ) -> StoredTensor | OtherTensor:
        return tensor(storage, offset, shape, strides, grad, hooks, *rest, dtype=dtype)

    class OrderedDict(dict[Any, Any]):
        """A dict that accepts attributes, like that of `collections`."""

    calls: dict[str, Any] = {
        "torch._utils._rebuild_tensor": tensor,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_tensor_v3": tensor_v3,
        "torch._utils._rebuild_parameter": lambda data, *rest: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
        "torch._tensor._rebuild_from_type_v2": lambda make, kind, args, state: make(*args),
        "torch._utils._rebuild_sparse_tensor": sparse,
        "torch._utils._rebuild_sparse_csr_tensor": sparse,
        "torch._utils._rebuild_qtensor": lambda storage, offset, shape, *rest: other(
            "a quantised tensor", shape, storage.dtype, "tensor.dequantize()"
        ),
        "torch._utils._rebuild_nested_tensor": lambda buffer, *rest: other(
            "a nested tensor", buffer.shape, buffer.dtype, "tensor.unbind()"
        ),
        "torch._utils._rebuild_meta_tensor_no_storage": lambda dtype, shape, *rest: other(
            "a tensor without memory", shape, dtype, "a tensor with values"
        ),
        "torch.serialization._get_layout": lambda name: name,
        "torch.Size": lambda sizes=(): tuple(sizes),
        "torch.device": lambda *args: None,
        "torch.Tensor": type("Tensor", (Record,), {}),
        "torch.nn.parameter.Parameter": lambda data, *rest: data,
        "collections.OrderedDict": OrderedDict,
        "collections.Counter": OrderedDict,
        "builtins.set": lambda items=(): None,
        "__builtin__.set": lambda items=(): None,
        "builtins.complex": lambda *args: None,
        "__builtin__.complex": lambda *args: None,
        **values_beside_tensors(),
    }

    def find(module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in calls:
            return calls[full]
        dtype = dtype_of(module, name)
        if dtype is None:
            raise NotAllowed(way_out(module, name))
        return dtype

    return find


class NotAllowed(Exception):
    """Raised with the name of an object that is not read, and a way out."""


def dtype_of(module: str, name: str) -> Dtype | None:
    """Returns the stand-in for a dtype of torch or a class of storages; None for another name."""
    if module == "torch.storage" and name in ("UntypedStorage", "TypedStorage"):
        return Dtype("uint8", 1)
    if module not in ("torch", "torch.cuda"):
        return None
    if name.endswith("Storage"):
        cls: Any = vars(torch).get(name)
        dtype = getattr(cls, "_dtype", None) if isinstance(cls, type) else None
        if dtype is None and name == "UntypedStorage":
            return Dtype("uint8", 1)
    else:
        dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        return Dtype("qscheme", 0) if isinstance(dtype, torch.qscheme) else None
    return Dtype(str(dtype).removeprefix("torch."), dtype.itemsize)
