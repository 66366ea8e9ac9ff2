"""Tensors on the host: to NumPy and back without a copy, and what hangs on a tensor."""

from __future__ import annotations

import hashlib
import importlib
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fmapper import BatchError
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import FakeTensor
from fmapper_adapters.torch.arrays import wrappers
from fmapper_adapters.torch.compute import parameter_standin

if TYPE_CHECKING:  # torch runs without NumPy as long as nothing leaves it
    import numpy as np

# NumPy knows these only through ml_dtypes: they cross as integers of the same width.
_BITS = {1: (torch.uint8, "uint8"), 2: (torch.int16, "int16")}
_PART = 1 << 18  # elements whose cast is checked at a time: the check needs memory, too
# The least magnitudes that round to more than the largest number, or to what comes behind it.
_LIMITS = {
    torch.float8_e4m3fn: 464.0 * (1 + 2.0**-23),  # 464 itself is a tie and goes to even
    torch.float8_e5m2: 61440.0,
    torch.float8_e4m3fnuz: 248.0,
    torch.float8_e5m2fnuz: 61440.0,
    torch.float8_e8m0fnu: 1.5 * 2.0**127,
}
_FREED = "the storage of the tensor was freed: nothing is left of its values"
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
Step = Callable[[], object]
_nbytes = attrgetter("nbytes")
_dtype = attrgetter("dtype")


def _is_backed(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor's memory is still there: a storage can shrink under its views."""
    size = tensor.untyped_storage().nbytes()
    if not tensor.storage_offset() and tensor.is_contiguous():
        return bool(size >= tensor.nbytes)
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + 1
    last += sum(map(operator.mul, tensor.stride(), (n - 1 for n in tensor.shape)))
    return bool(size >= last * tensor.element_size())


def has_memory(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor is strided and its elements are in memory."""
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


def is_mirror(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor stands for another one in a program that is being made functional."""
    return _mirrors(tensor)


def check(tensor: torch.Tensor) -> None:
    """Refuses a tensor that has no values, or not as strided memory.

    Raises:
        TypeError: Says what it is.
    """
    if not has_memory(tensor):
        raise TypeError(_why_not(tensor))


def plain(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Returns the values as a plain strided tensor, and whether that is a private copy.

    Raises:
        TypeError: The tensor has no values, or not as strided memory.
    """
    check(tensor)
    bare = tensor.detach()
    if type(bare) is not torch.Tensor:
        bare = bare.as_subclass(torch.Tensor)
    copied = bare.is_conj() or bare.is_neg()
    return (bare.resolve_conj().resolve_neg() if copied else bare), copied


def quick_views(tensors: Sequence[torch.Tensor]) -> list[Any] | None:
    """Returns NumPy views of plain CPU tensors; None if one of them needs a closer look."""
    if not are_whole(tensors):
        return None
    try:
        try:
            return list(map(torch.Tensor.numpy, tensors))
        except (TypeError, RuntimeError):  # parameters, or a dtype that NumPy does not have
            bare = [t.detach() if t.requires_grad else t for t in tensors]
        (dtype,) = set(map(_dtype, bare))
        if dtype not in _FOREIGN:
            return list(map(torch.Tensor.numpy, bare))
        bits, name = _FOREIGN[dtype]
        numbers = [t.view(bits).numpy() for t in bare]
        found = ml_dtype(name)
        return [a.view(found) for a in numbers]
    except (TypeError, ValueError, RuntimeError):  # several dtypes, a lazy conjugate, sparse ...
        pass
    return None


def are_whole(tensors: Sequence[torch.Tensor]) -> bool:
    """Tells whether all are dense and have the memory that they say; False if in doubt."""
    if not _PLAIN.issuperset(map(type, tensors)):
        return False
    try:
        if any(map(_mirrors, tensors)) or any(map(torch.Tensor.storage_offset, tensors)):
            return False
        storages = map(torch.Tensor.untyped_storage, tensors)
        held = map(torch.UntypedStorage.nbytes, storages)
        if not all(map(operator.ge, held, map(_nbytes, tensors))):  # freed, or shrunk
            return False
        return all(map(torch.Tensor.is_contiguous, tensors))  # others may reach further
    except RuntimeError:  # sparse, or inside a transform
        return False


def generator_on(old: torch.Generator, device: torch.device) -> torch.Generator:
    """Returns a generator with the state of another one, or with a seed made from that state.

    Each kind of device has an algorithm of its own, so a state means nothing on another kind.
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
    """Tells whether two tensors may have memory in common; True if in doubt."""
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
        return False  # the quicker answer, where all are small
    ends = sorted(map(operator.add, starts, sizes))
    # Each ends before the next one begins: nowhere have two begun and not ended.
    return any(map(operator.gt, ends, ordered[1:]))


def shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor.

    Raises:
        TypeError: It has none.
    """
    try:
        return tuple(tensor.shape)
    except RuntimeError as error:
        raise TypeError(_why_not(tensor)) from error


def nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor of any layout, and of those inside of a wrapper.

    Raises:
        TypeError: It has no size yet.
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
    """Tells why a tensor cannot be an argument of a function that failed; None for any other."""
    is_lazy = isinstance(tensor, UninitializedParameter | UninitializedBuffer)
    if is_lazy and "uninitialized" in str(error):
        return _LAZY
    is_nested = not is_lazy and tensor.is_nested and tensor.layout is torch.strided
    if is_nested and isinstance(error, RuntimeError):  # torch's own
        return "torch has little for such nested tensors: make it with layout=torch.jagged"
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
    """Returns the NumPy dtype that ml_dtypes has under a name.

    Raises:
        TypeError: It has none, or is not installed.
    """
    import numpy as np

    try:
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise TypeError(f"NumPy holds {name} through ml_dtypes: pip install ml_dtypes") from None
    return found


def from_numpy(array: np.ndarray[Any, Any], *, must_share: bool = False) -> torch.Tensor:
    """Returns a tensor on the memory of a NumPy array, or a copy where torch has no such strides.

    Raises:
        BufferError: It must share the memory and cannot.
        TypeError: torch has no such dtype.
    """
    if not must_share:
        try:
            return torch.from_numpy(array if array.flags.writeable else _writable(array))
        except (TypeError, ValueError):  # dtype, strides
            pass
    dtype = array.dtype
    known = getattr(torch, dtype.name, None)
    if not isinstance(known, torch.dtype):
        raise TypeError(f"torch has no dtype {dtype.name}")
    reason = None
    if must_share and not array.flags.writeable:
        reason = "the NumPy array is read-only and torch could write to it"
    elif any(stride < 0 or stride % array.itemsize for stride in array.strides):
        reason = f"torch cannot stride like {array.strides} bytes"
    if reason is not None:
        if must_share:
            raise BufferError(reason)
        array = array.copy(order="K")
    if dtype.kind == "V" or dtype.name.startswith(("bfloat16", "float8")):
        return torch.from_numpy(array.view(_BITS[array.itemsize][1])).view(known)
    return torch.from_numpy(array)


def all_from_numpy(
    arrays: Sequence[np.ndarray[Any, Any]], *, must_share: bool
) -> Iterable[torch.Tensor]:
    """Applies `from_numpy` to many arrays; those that are not to be shared can be written to."""
    if not must_share:
        made: list[torch.Tensor] = []
        try:
            made.extend(map(torch.from_numpy, arrays))
        except (TypeError, ValueError):  # one of them has a dtype or strides of its own
            known = {dtype.name: dtype for dtype in {array.dtype for array in arrays}}
            if len(known) == 1 and (name := next(iter(known))) in _FOREIGN_NAMES:
                bits, dtype = _FOREIGN_NAMES[name]
                return (torch.from_numpy(array.view(bits)).view(dtype) for array in arrays)
        except Exception as error:
            raise BatchError(len(made)) from error
        else:
            return made
    return (from_numpy(array, must_share=must_share) for array in arrays)


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the memory without the mark that torch would warn of: it is only read from."""
    import numpy as np

    layout = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    holder = type("Holder", (), {"__array_interface__": layout, "array": array})()
    return np.asarray(holder)


def same_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor.

    Raises:
        BufferError: It is on another device.
    """
    if tensor.device != device:
        raise BufferError(f"memory on {tensor.device} cannot be shared with {device}")
    return tensor


def shares_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether two tensors have an element in common; their memory is not looked at."""
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
    """Refuses a parameter of a lazy module that has not run, and memory that was freed.

    Raises:
        TypeError: It has no values.
    """
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise TypeError(_why_not(tensor))
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.device.type != "meta":
        plain_memory = not (tensor.is_quantized or tensor.is_nested or is_transformed(tensor))
        if plain_memory and not is_mirror(tensor) and not _is_backed(tensor):
            raise TypeError(_FREED)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor stands for others inside grad or vmap."""
    return _private.is_wrapped(tensor)


def is_replaceable(tensor: torch.Tensor) -> bool:
    """Tells whether a new leaf of autograd may take the place of a tensor.

    Not in that of one with a history, and not where a gradient is being taken by it: the new leaf
    would cut that off.
    """
    if is_transformed(tensor) or not tensor.is_leaf:
        return False
    return not (parameter_standin.here.depth and tensor.requires_grad)


def casts(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Casts, and tells whether every value has survived; looks at many small tensors at once.

    Raises:
        BatchError: One of them cannot be cast.
    """
    trusted = are_whole(tensors)
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = 0
    for at, tensor in enumerate(tensors):
        try:
            new = cast(tensor, dtype, check=not trusted)
        except Exception as error:
            raise BatchError(at) from error
        if size + new.numel() > _PART:  # so that a large one is looked at alone
            yield from _judge(waiting, trusted)
            waiting, size = [], 0
        waiting.append((tensor, new))
        size += new.numel()
    yield from _judge(waiting, trusted)


def _judge(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], trusted: bool
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yields the new ones of (old, new) pairs, each with whether every value has survived.

    Args:
        pairs: Tensors of any kind; the new ones are of one dtype.
        trusted: They are whole, so that a look at all at once may do.
    """
    have_survived = trusted and len(pairs) > 1 and _have_survived(pairs)
    for old, new in pairs:
        yield new, have_survived or has_survived(old.detach(), new.detach())


def _have_survived(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Tells whether all values of some small dense tensors survived a cast; False if in doubt."""
    (new,) = {new.dtype for _, new in pairs}
    dtypes = {old.dtype for old, _ in pairs}
    if all(_holds_all_of(new, old) for old in dtypes):
        return True
    if new.itemsize == 1 or not all(dtype.is_floating_point for dtype in (new, *dtypes)):
        return False  # torch makes no infinities of what is too large for float8
    try:
        with torch.no_grad():
            values = torch.cat([tensor.view(-1) for _, tensor in pairs])
            return math.isfinite(values.sum(dtype=torch.float64).item())
    except RuntimeError:  # no values: meta, or inside a transform
        return False


def cast(tensor: torch.Tensor, dtype: torch.dtype, *, check: bool = True) -> torch.Tensor:
    """Casts a tensor, which stays a leaf of autograd and a parameter if it was one."""
    if check:
        check_filled(tensor)

    def change(values: torch.Tensor) -> torch.Tensor:
        real = values.real if values.is_complex() and not dtype.is_complex else values
        new = real.to(dtype)
        if dtype is torch.float8_e4m3fn and has_memory(values):
            # It has no infinity; torch takes the largest number, but what was none stays none.
            wide = real.detach().float()
            new.detach().view(torch.uint8).masked_fill_(wide.isinf(), 0x7F)
        return new

    if not is_replaceable(tensor):
        return change(tensor)
    grad = None if tensor.grad is None else change(tensor.grad)
    return replace(tensor, change(tensor.detach() if tensor.requires_grad else tensor), grad)


def replace(
    old: torch.Tensor, values: torch.Tensor, grad: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns what replaces a leaf of autograd: new values, and all that hung on the old ones."""
    if isinstance(old, torch.nn.Parameter):
        return as_parameter(values, old, grad)
    if old.requires_grad:
        values.requires_grad_()
    _carry(old, values, grad)
    return values


def swap(old: torch.Tensor, new: Any) -> tuple[Step, Step] | None:
    """Tells how a parameter gets values and gradient of another one, by the rules of `Module.to`.

    Returns:
        What does that, and what takes it back; None where `Module.to` would replace the parameter,
        too.
    """
    is_tied = isinstance(old, torch.nn.Parameter) or (old.is_leaf and old.requires_grad)
    if not (is_tied and isinstance(new, torch.Tensor)):
        return None
    if torch.__future__.get_swap_module_params_on_conversion():
        return _exchange(old, new)
    if wrappers.is_wrapper(old) or wrappers.is_wrapper(new):
        referred = weakref.getweakrefs(old) or weakref.getweakrefs(new)  # torch cannot swap those
        return None if referred else _exchange(old, new)
    if torch.__future__.get_overwrite_module_params_on_conversion():
        return None
    pairs = [(old, new)]
    if old.grad is not None and new.grad is not None:
        pairs.append((old.grad, new.grad))
    if not all(_private.may_take_values_of(a, b) for a, b in pairs):
        return None
    before = [(a, a.data) for a, _ in pairs]

    def set_values(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, values in pairs:
            tensor.data = values

    return partial(set_values, [(a, b.data) for a, b in pairs]), partial(set_values, before)


def _exchange(old: torch.Tensor, new: torch.Tensor) -> tuple[Step, Step]:
    """Exchanges two tensors, and exchanges them back if that was done."""
    content: Any = old
    is_before = partial(operator.eq, _private.identity_of(content))

    def swap() -> None:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]

    def undo() -> None:
        if not is_before(_private.identity_of(content)):
            swap()

    return swap, undo


def as_parameter(
    values: torch.Tensor, old: torch.nn.Parameter, grad: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns a parameter with new values and all else of the old one, but for its gradient."""
    cls, trained = parameter_standin.stands_for(old) or (type(old), old.requires_grad)
    grows = trained and (values.is_floating_point() or values.is_complex())
    new: torch.Tensor
    if type(values) is torch.Tensor:  # what Parameter does, too, but for that it takes its time
        made = torch.nn.Parameter if wrappers.dispatches(cls) else cls
        new = _private.make_parameter(made, values, grows)
    else:
        new = torch.nn.Parameter(values.detach(), requires_grad=grows)
        if not wrappers.dispatches(type(values)):
            new.__class__ = cls
    _carry(old, new, grad)
    if cls is not type(old):
        parameter_standin.forget(new)
    return new


def _carry(old: torch.Tensor, new: torch.Tensor, grad: torch.Tensor | None) -> None:
    if old.__dict__ and (type(old) is type(new) or not wrappers.dispatches(type(old))):
        own = new.__dict__  # what a class that computes by itself has made is not overwritten
        own.update((name, value) for name, value in old.__dict__.items() if name not in own)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        found = getattr(old, hooks)
        if found and new.requires_grad:
            setattr(new, hooks, found.copy())
    if grad is not None:
        new.grad = grad


def has_survived(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Tells whether a cast has kept every integer and made no finite value infinite."""
    if _holds_all_of(new.dtype, old.dtype):
        return True
    if old.layout is torch.sparse_coo:
        return has_survived(old._values(), new._values())
    if old.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return has_survived(old.values(), new.values())
    if wrappers.is_wrapper(old):
        return all(has_survived(a, b) for a, b in wrappers.inner_pairs(old, new))
    if not has_memory(old):
        return True
    if old.numel() > _PART and old.is_contiguous() and new.is_contiguous():
        olds, news = old.view(-1), new.view(-1)
        return all(
            has_survived(olds[start : start + _PART], news[start : start + _PART])
            for start in range(0, old.numel(), _PART)
        )
    if not (new.is_floating_point() or new.is_complex()):
        return bool((new.to(old.dtype) == old).all())
    if old.is_complex() and not new.is_complex():
        return not bool(old.imag.any()) and has_survived(old.real, new)
    if new.is_complex():
        was = old if old.is_complex() else torch.complex(old, torch.zeros_like(old))
        return has_survived(was.real, new.real) and has_survived(was.imag, new.imag)
    if new.element_size() == 1:  # torch saturates to float8 instead of making infinities
        wide = old.float() if old.element_size() <= 2 else old
        if torch.finfo(new.dtype).min > 0 and bool((wide <= 0).any()):
            return False
        limit = _LIMITS.get(new.dtype)
        if limit is None:
            return True
        return not bool((torch.isfinite(wide) & (wide.abs() >= limit)).any())
    if math.isfinite(new.sum(dtype=torch.float64).item()):  # then each of them is
        return True
    return not bool((~torch.isfinite(new) & torch.isfinite(old)).any())


@cache
def _holds_all_of(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Tells whether every value of a floating or complex dtype is one of another, for certain."""
    inexact = narrow.is_floating_point or narrow.is_complex
    if not inexact or narrow.itemsize == 1 or wide.itemsize < narrow.itemsize:
        return False
    return torch.promote_types(wide, narrow) == wide
