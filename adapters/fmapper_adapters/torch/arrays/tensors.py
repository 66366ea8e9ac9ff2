"""Tensors on the host: their memory, and their exchange with NumPy without a copy."""

from __future__ import annotations

import hashlib
import importlib
import operator
from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fmapper import BatchError
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import FakeTensor
from fmapper_adapters.torch.arrays import wrappers

if TYPE_CHECKING:  # torch runs without NumPy as long as nothing leaves it
    import numpy as np

# NumPy has these only through ml_dtypes: they are exchanged as integers of the same width.
_BITS = {1: (torch.uint8, "uint8"), 2: (torch.int16, "int16")}
_FREED = "the storage of the tensor was freed, so its values are gone"
_mirrors = _private.is_functional
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_FOREIGN = {
    dtype: (_BITS[dtype.itemsize][0], name)
    for name in ("bfloat16", *(name for name in dir(torch) if name.startswith("float8_")))
    if isinstance(dtype := getattr(torch, name), torch.dtype)
}
_FOREIGN_NAMES = {
    name: (str(bits).removeprefix("torch."), dtype) for dtype, (bits, name) in _FOREIGN.items()
}
_NUMBERS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.complex64, torch.complex128}
)
_nbytes = attrgetter("nbytes")
_dtype = attrgetter("dtype")


def _is_backed(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's storage still covers it: storages can shrink under views."""
    size = tensor.untyped_storage().nbytes()
    if not tensor.storage_offset() and tensor.is_contiguous():
        return bool(size >= tensor.nbytes)
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + 1
    last += sum(map(operator.mul, tensor.stride(), (n - 1 for n in tensor.shape)))
    return bool(size >= last * tensor.element_size())


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is strided and its elements are in memory."""
    return not isinstance(tensor, FakeTensor | UninitializedParameter | UninitializedBuffer) and (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not _private.is_wrapped(tensor)
        and not is_mirror(tensor)
        and not wrappers.is_wrapper(tensor)
        and _is_backed(tensor)
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Returns whether a strided tensor reaches beyond its storage."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not (
        is_transformed(tensor) or is_mirror(tensor) or tensor.device.type == "meta"
        or _is_backed(tensor)
    )  # fmt: skip


def is_mirror(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a functional wrapper of another one."""
    return _mirrors(tensor)


def check(tensor: torch.Tensor) -> None:
    """Checks that a tensor has values in strided memory.

    Raises:
        TypeError: The tensor has none; the message says what it is.
    """
    if not has_memory(wrappers.local_values(tensor)):
        raise TypeError(_why_not(tensor))


def plain(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Returns the values as a plain strided tensor, and whether that is a private copy.

    Raises:
        TypeError: The tensor has no values, or not as strided memory.
    """
    tensor = wrappers.local_values(tensor)
    check(tensor)
    bare = tensor.detach()
    if type(bare) is not torch.Tensor:
        bare = bare.as_subclass(torch.Tensor)
    copied = bare.is_conj() or bare.is_neg()
    return (bare.resolve_conj().resolve_neg() if copied else bare), copied


def quick_views(tensors: Sequence[torch.Tensor]) -> list[Any] | None:
    """Returns NumPy views of plain CPU tensors; None if any is not plain, or may not be."""
    if not are_whole(tensors):
        return None
    try:
        try:
            return list(map(torch.Tensor.numpy, tensors))
        except (TypeError, RuntimeError):  # a parameter, or a dtype that NumPy lacks
            bare = [t.detach() if t.requires_grad else t for t in tensors]
        return list(map(to_numpy, bare))
    except (TypeError, ValueError, RuntimeError):  # a lazy conjugate, sparse ...
        return None


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether all tensors are of torch's own classes."""
    return _PLAIN.issuperset(map(type, tensors))


def are_whole(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether all tensors are dense with intact memory; False if in doubt."""
    if not are_plain(tensors):
        return False
    try:
        if any(map(_mirrors, tensors)) or any(map(torch.Tensor.storage_offset, tensors)):
            return False
        storages = map(torch.Tensor.untyped_storage, tensors)
        held = map(torch.UntypedStorage.nbytes, storages)
        if not all(map(operator.ge, held, map(_nbytes, tensors))):  # freed, or shrunk
            return False
        return all(map(torch.Tensor.is_contiguous, tensors))  # dense ones only
    except RuntimeError:  # sparse, or inside a transform
        return False


def are_bare(tensors: Sequence[torch.Tensor], is_cpu: bool) -> bool:
    """Returns whether all tensors are whole, dense and not lazy, and on the CPU or not.

    It asks one question at a time of all tensors, which takes a tenth of `has_memory`.
    """
    if not all(d in _NUMBERS or d.is_floating_point for d in set(map(_dtype, tensors))):
        return False  # quantized, for example
    try:
        return (
            are_whole(tensors)
            and all(map(is_cpu.__eq__, map(attrgetter("is_cpu"), tensors)))
            and not any(map(attrgetter("is_nested"), tensors))
            and not any(map(torch.Tensor.is_neg, tensors))
            and not any(map(torch.Tensor.is_conj, tensors))
        )
    except RuntimeError:  # inside a transform
        return False


def generator_on(old: torch.Generator, device: torch.device) -> torch.Generator:
    """Returns a generator with the state of another one, or with a seed made from that state.

    Each kind of device has its own algorithm, so a state has no meaning on another kind.
    """
    new = torch.Generator(device)
    state = old.get_state()
    if old.device.type == device.type:
        new.set_state(state)
    else:
        digest = hashlib.blake2b(bytes(state.tolist()), digest_size=7).digest()
        new.manual_seed(int.from_bytes(digest, "little"))
    return new


def may_share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether two tensors may share memory; True if in doubt."""
    if not _PLAIN.issuperset(map(type, tensors)):
        return True
    try:
        if not all(map(torch.Tensor.is_contiguous, tensors)):
            return True
        starts = list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # no strided memory
        return True
    sizes = list(map(_nbytes, tensors))
    ordered = sorted(starts)
    if min(map(operator.sub, ordered[1:], ordered), default=0) >= max(sizes, default=0):
        return False  # a quick answer for small tensors
    ends = sorted(map(operator.add, starts, sizes))
    # Disjoint if each tensor ends before the next one begins.
    return any(map(operator.gt, ends, ordered[1:]))


def shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor.

    Raises:
        TypeError: The tensor has no shape.
    """
    try:
        return tuple(tensor.shape)
    except RuntimeError as error:
        raise TypeError(_why_not(tensor)) from error


def nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor of any layout, inner tensors of wrappers included.

    Raises:
        TypeError: The tensor has no size yet.
    """
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise TypeError(_why_not(tensor))
    inner = wrappers.inner_names(tensor)
    if inner:
        return sum(nbytes(getattr(tensor, name)) for name in inner)
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor]
    return sum(map(_nbytes, parts))


_LAZY = "a lazy parameter has no values yet: run the module once first"


def why_untransformable(tensor: torch.Tensor, error: Exception) -> str | None:
    """Explains why a tensor cannot be an argument of a transformed function, or returns None."""
    is_lazy = isinstance(tensor, UninitializedParameter | UninitializedBuffer)
    if is_lazy and "uninitialized" in str(error):
        return _LAZY
    is_nested = not is_lazy and tensor.is_nested and tensor.layout is torch.strided
    if is_nested and isinstance(error, RuntimeError):  # torch's own
        return "torch barely supports such nested tensors: create it with layout=torch.jagged"
    return None


def _why_not(tensor: torch.Tensor) -> str:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return _LAZY
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return "a meta or fake tensor has a shape but no values: fill it with fmapper.materialize"
    if tensor.is_quantized:
        return "a quantized tensor has no counterpart elsewhere: move tensor.dequantize()"
    if tensor.is_nested:
        return "a nested tensor has no counterpart elsewhere: move tensor.unbind()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} is not strided: move tensor.to_dense()"
    if wrappers.is_wrapper(tensor):
        return wrappers.why_not(tensor)
    if not is_transformed(tensor) and not is_mirror(tensor):
        return _FREED
    return "a tensor inside a torch.func transform has no values outside: move it before or after"


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a NumPy view of a plain CPU tensor."""
    if tensor.dtype not in _FOREIGN:
        return tensor.numpy()
    bits, name = _FOREIGN[tensor.dtype]
    return tensor.view(bits).numpy().view(ml_dtype(name))


@cache
def ml_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name in ml_dtypes.

    Raises:
        TypeError: ml_dtypes does not have the dtype, or is not installed.
    """
    import numpy as np

    try:
        dtype: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise TypeError(f"NumPy needs ml_dtypes for {name}: pip install ml_dtypes") from None
    return dtype


def from_numpy(array: np.ndarray[Any, Any], *, must_share: bool = False) -> torch.Tensor:
    """Returns a tensor on the memory of a NumPy array, or a copy if torch has no such strides.

    Raises:
        BufferError: The memory must be shared and cannot be.
        TypeError: torch has no such dtype.
    """
    if not must_share:
        try:
            return torch.from_numpy(array if array.flags.writeable else _writable(array))
        except (TypeError, ValueError):  # unsupported dtype or strides
            pass
    dtype = array.dtype
    torch_dtype = getattr(torch, dtype.name, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {dtype.name}")
    reason = None
    if must_share and not array.flags.writeable:
        reason = "the NumPy array is read-only, but torch could write to it"
    elif any(stride < 0 or stride % array.itemsize for stride in array.strides):
        reason = f"torch does not support strides of {array.strides} bytes"
    if reason is not None:
        if must_share:
            raise BufferError(reason)
        array = array.copy(order="K")
    if dtype.kind == "V" or dtype.name.startswith(("bfloat16", "float8")):
        return torch.from_numpy(array.view(_BITS[array.itemsize][1])).view(torch_dtype)
    return torch.from_numpy(array)


def all_from_numpy(
    arrays: Sequence[np.ndarray[Any, Any]], *, must_share: bool
) -> Iterable[torch.Tensor]:
    """Applies `from_numpy` to many arrays; results that are not shared are writable."""
    if not must_share:
        made: list[torch.Tensor] = []
        try:
            made.extend(map(torch.from_numpy, arrays))
        except (TypeError, ValueError):  # a dtype or strides that torch lacks
            dtypes = {dtype.name: dtype for dtype in {array.dtype for array in arrays}}
            if len(dtypes) == 1 and (name := next(iter(dtypes))) in _FOREIGN_NAMES:
                bits, dtype = _FOREIGN_NAMES[name]
                return (torch.from_numpy(array.view(bits)).view(dtype) for array in arrays)
        except Exception as error:
            raise BatchError(len(made)) from error
        else:
            return made
    return (from_numpy(array, must_share=must_share) for array in arrays)


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the memory without the read-only flag that torch would warn of."""
    import numpy as np

    layout = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    holder = type("Holder", (), {"__array_interface__": layout, "array": array})()
    return np.asarray(holder)


def same_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor.

    Raises:
        BufferError: The tensor is on another device.
    """
    if tensor.device != device:
        raise BufferError(f"memory on {tensor.device} cannot be shared with {device}")
    return tensor


def shares_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors of one storage have an element in common."""
    import numpy as np

    def geometry(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        size = tensor.element_size()
        layout = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }
        return np.asarray(type("Geometry", (), {"__array_interface__": layout})())

    if a.device != b.device:
        return False
    try:
        return bool(np.shares_memory(geometry(a), geometry(b), max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def check_filled(tensor: torch.Tensor) -> None:
    """Checks that a tensor is not an uninitialised lazy parameter, and its memory is not freed.

    Raises:
        TypeError: The tensor has no values.
    """
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise TypeError(_why_not(tensor))
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.device.type != "meta":
        plain_memory = not (tensor.is_quantized or tensor.is_nested or is_transformed(tensor))
        if plain_memory and not is_mirror(tensor) and not _is_backed(tensor):
            raise TypeError(_FREED)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a wrapper inside grad or vmap."""
    return _private.is_wrapped(tensor)
