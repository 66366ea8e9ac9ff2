"""Records a module for the values of its examples, where what it does depends on values.

The module is run once to see which values it reads from tensors and which sizes depend on values.
While it is recorded it gets the same ones, and the program asserts each of them: for inputs that
give other values it raises.
"""

from __future__ import annotations

import collections
import copy
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fmapper_adapters.torch import _faithful

# What was seen of the calls of a function in a line of code, in order: of each of the results its
# shape, or the number that it is.
_Place = tuple[str, str, int]
_Seen = dict[_Place, collections.deque[list[Any]]]

_Tensor = torch.Tensor
_check: Any = torch._check  # untyped in torch, as is the next one
_not: Any = torch.sym_not
_TORCH = os.path.dirname(torch.__file__) + os.sep


def recorded(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """The program of a module for the values that the examples lead to.

    Raises:
        Exception: What torch raises where it cannot record it so either.
    """
    seen = _seen(module, args, kwargs)
    forward = module.forward

    @functools.wraps(forward)
    def informed(*args: Any, **kwargs: Any) -> Any:
        # Inside of what torch.export does with calls, which takes some of them apart.
        with _Informer(copy.deepcopy(seen)):
            return forward(*args, **kwargs)

    own = "forward" in vars(module)
    module.forward = informed
    try:
        return torch.export.export(
            module, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


def _seen(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Seen:
    """What a call of the module reads; the module is afterwards as it was."""
    args, kwargs = copy.deepcopy((args, dict(kwargs)))
    observer = _Observer()
    with torch.no_grad(), _faithful.undone(module), torch.random.fork_rng(devices=[]), observer:
        module(*args, **kwargs)
    return observer.seen


class _Observer(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: _Seen = collections.defaultdict(collections.deque)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = _counts(args[1]) if func in _MASKED else None  # before it may assign to the mask
        result = func(*args, **kwargs)
        facts = _facts(result) if facts is None else facts
        self.seen[_place(func)].append(facts)
        if func is _Tensor.tolist:  # while it is recorded, torch calls item for each
            for fact in facts:
                self.seen[_place(_Tensor.item)].append([fact])
        return result


class _Informer(TorchFunctionMode):
    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = self._seen.get(_place(func))
        facts = known.popleft() if known else None
        kwargs = kwargs or {}
        if facts is None:
            return func(*args, **kwargs)
        if func in _QUESTIONS:
            return _agreed(_QUESTIONS[func](*args, **kwargs).item(), facts[0])
        if func in _INTEGERS and not args[0].is_floating_point():
            return _agreed(args[0].item(), facts[0])
        if func in _SIZED:
            return _SIZED[func](facts, *args, **kwargs)
        leaves, spec = pytree.tree_flatten(func(*args, **kwargs))
        if len(leaves) == len(facts):
            leaves = [_told(leaf, fact) for leaf, fact in zip(leaves, facts, strict=True)]
        return pytree.tree_unflatten(leaves, spec)


def _place(func: Any) -> _Place:
    """A function and the line that calls it: a module may call others while it is recorded."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return getattr(func, "__name__", str(func)), frame.f_code.co_filename, frame.f_lineno


def _facts(result: Any) -> list[Any]:
    leaves = pytree.tree_leaves(result)
    return [tuple(x.shape) if isinstance(x, _Tensor) else x for x in leaves]


def _told(result: Any, fact: Any) -> Any:
    """A result of which torch now knows what it did not know, and asserts it."""
    if isinstance(result, _Tensor):
        if not free_unbacked_symbols(result) or len(fact) != result.ndim:
            return result
        for size, value in zip(result.shape, fact, strict=True):
            if free_unbacked_symbols(size):
                _check(size == value)
        # A size of 1 stays a symbol in spite of that.
        return result.reshape(fact) if free_unbacked_symbols(result) else result
    if isinstance(result, torch.SymInt | torch.SymBool) and free_unbacked_symbols(result):
        return _agreed(result, fact)
    return result  # floats that are computed in another framework are not the same to the last bit


def _agreed(value: Any, fact: int | bool) -> int | bool:
    """The known value of a number, which is asserted to be this one."""
    if isinstance(fact, bool):
        _check(value if fact else _not(value))
    else:
        _check(value == fact)
    return fact


def _counts(index: Any) -> list[Any]:
    """How many elements are true, of each mask in an index."""
    return [int(x.sum()) for x in _parts(index) if _is_mask(x)]


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_mask(x: Any) -> bool:
    return isinstance(x, _Tensor) and x.dtype is torch.bool and x.ndim > 0


def _true_ones(mask: torch.Tensor, count: int) -> torch.Tensor:
    """As `mask.nonzero()`, where it is asserted how many there are."""
    _agreed(mask.count_nonzero().item(), count)
    return torch.nonzero_static(mask, size=count)


def _unmasked(index: Any, counts: list[int]) -> tuple[Any, ...]:
    """An index with numbers instead of masks."""
    left = iter(counts)
    found: list[Any] = []
    for one in _parts(index):
        found += _true_ones(one, next(left)).unbind(1) if _is_mask(one) else [one]
    return tuple(found)


def _get(counts: list[int], x: torch.Tensor, index: Any) -> torch.Tensor:
    return x[_unmasked(index, counts)] if counts else x[index]


def _put(counts: list[int], x: torch.Tensor, index: Any, value: Any) -> None:
    # Where a single number is put, it does not matter to how many places.
    several = isinstance(value, _Tensor) and value.ndim > 0
    x[_unmasked(index, counts) if counts and several else index] = value


def _select(facts: list[Any], input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    together: Any = torch.broadcast_tensors  # untyped in torch
    x, mask = together(input, mask)
    return _get([facts[0][0]], x, mask)


def _nonzero(facts: list[Any], input: torch.Tensor, *, as_tuple: bool = False) -> Any:
    found = _true_ones(input.reshape(1) if as_tuple and not input.ndim else input, facts[0][0])
    return found.unbind(1) if as_tuple else found


def _where(facts: list[Any], condition: torch.Tensor, *values: Any, **named: Any) -> Any:
    if values or named:
        return torch.where(condition, *values, **named)
    return _nonzero(facts, condition, as_tuple=True)


def _repeated(
    facts: list[Any],
    input: torch.Tensor,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> torch.Tensor:
    times = input if repeats is None else repeats
    if isinstance(times, _Tensor) and output_size is None:
        output_size = facts[0][dim or 0]
        total = times.sum()
        if repeats is not None and times.numel() == 1:
            total = total * (input.numel() if dim is None else input.shape[dim])
        _agreed(total.item(), output_size)
    if repeats is None:
        return torch.repeat_interleave(input, output_size=output_size)
    return torch.repeat_interleave(input, repeats, dim, output_size=output_size)


# The functions whose results have as many elements as some condition has true ones. Those that
# are not here do not hinder a recording, but they hinder jax.jit.
_MASKED: dict[Callable[..., Any], Callable[..., Any]] = {
    _Tensor.__getitem__: _get,
    _Tensor.__setitem__: _put,
}
_SIZED: dict[Callable[..., Any], Callable[..., Any]] = {
    **_MASKED,
    torch.masked_select: _select,
    _Tensor.masked_select: _select,
    torch.nonzero: _nonzero,
    _Tensor.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    _Tensor.argwhere: _nonzero,
    torch.where: _where,
    torch.repeat_interleave: _repeated,
    _Tensor.repeat_interleave: _repeated,
}


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b).all() if a.shape == b.shape else torch.tensor(False)


# The functions that make a bool of tensors, as tensors.
_QUESTIONS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    _Tensor.__bool__: lambda x: x != 0,
    _Tensor.is_nonzero: lambda x: x != 0,
    torch.is_nonzero: lambda x: x != 0,
    _Tensor.__contains__: lambda x, element: (x == element).any(),
    _Tensor.equal: _equal,
    torch.equal: _equal,
    _Tensor.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
}
_INTEGERS = {_Tensor.__int__, _Tensor.__index__}
