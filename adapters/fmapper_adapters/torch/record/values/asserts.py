"""Calls whose results depend on values, recorded with known values, which are asserted.

Results with an element for each true element of a condition get a size that is a number, so that
the program can be compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

_Tensor = torch.Tensor
check: Any = torch._check  # untyped in torch
_not: Any = torch.sym_not


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """An observed call of a function.

    Attributes:
        results: The shape of each result, or its value if it is an integer or bool; else None.
        numbers: The values of the tensors used as sizes.
        counts: The number of true elements of each mask in an index.
    """

    results: list[Any]
    numbers: list[int]
    counts: list[int]


def agree(value: Any, fact: int | bool) -> int | bool:
    """Asserts that a number has its known value, and returns that."""
    if isinstance(fact, bool):
        check(value if fact else _not(value))
    else:
        check(value == fact)
    return fact


def with_numbers(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: Callable[[torch.Tensor], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces integer tensors by numbers where a function takes sizes."""
    if func in MASKED:  # only bounds of slices: other tensors may be indices or values
        index = tuple(_numbers(x, number) if isinstance(x, slice) else x for x in _parts(args[1]))
        return (args[0], index, *args[2:]), kwargs
    if func in WITH_PLACES and len(args) > 1 and isinstance(args[1], _Tensor) and args[1].ndim:
        return (args[0], [number(place) for place in args[1].unbind()], *args[2:]), kwargs
    if func not in WITH_SIZES | WITH_PLACES:
        return args, kwargs
    args = (*args[:1], *_numbers(args[1:], number))
    return args, {key: x if key == "input" else _numbers(x, number) for key, x in kwargs.items()}


def _numbers(tree: Any, number: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)(_numbers(inner, number) for inner in tree)
    if isinstance(tree, slice):
        bounds = (tree.start, tree.stop, tree.step)
        return slice(*[_numbers(bound, number) for bound in bounds])
    if isinstance(tree, _Tensor) and tree.ndim == 0 and tree.dtype in (torch.int64, torch.int32):
        return number(tree)
    return tree


def counts_of(index: Any) -> list[int]:
    """Counts the true elements of each mask in an index."""
    return [int(x.sum()) for x in _parts(index) if _is_mask(x)]


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_mask(x: Any) -> bool:
    return isinstance(x, _Tensor) and x.dtype is torch.bool and x.ndim > 0


def _true_ones(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Computes `mask.nonzero()`, with an asserted count."""
    agree(mask.count_nonzero().item(), count)
    return torch.nonzero_static(mask, size=count)


def _unmask(index: Any, counts: list[int]) -> tuple[Any, ...]:
    """Replaces masks in an index by numbers."""
    left = iter(counts)
    indices: list[Any] = []
    for item in _parts(index):
        indices += _true_ones(item, next(left)).unbind(1) if _is_mask(item) else [item]
    return tuple(indices)


def _get(call: Call, x: torch.Tensor, index: Any) -> torch.Tensor:
    picked: torch.Tensor = x[_unmask(index, call.counts) if call.counts else index]
    return picked


def _put(call: Call, x: torch.Tensor, index: Any, value: Any) -> None:
    # For a single value, the number of true elements does not matter.
    several = isinstance(value, _Tensor) and value.ndim > 0
    x[_unmask(index, call.counts) if call.counts and several else index] = value


def _select(call: Call, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    together: Any = torch.broadcast_tensors  # untyped in torch
    x, mask = together(input, mask)
    picked: torch.Tensor = x[_unmask(mask, [call.results[0][0]])]
    return picked


def _nonzero(call: Call, input: torch.Tensor, *, as_tuple: bool = False) -> Any:
    x = input.reshape(1) if as_tuple and not input.ndim else input
    places = _true_ones(x, call.results[0][0])
    return places.unbind(1) if as_tuple else places


def _where(call: Call, condition: torch.Tensor, *values: Any, **named: Any) -> Any:
    if values or named:
        return torch.where(condition, *values, **named)
    return _nonzero(call, condition, as_tuple=True)


def _repeat(
    call: Call,
    input: torch.Tensor,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> torch.Tensor:
    times = input if repeats is None else repeats
    if isinstance(times, _Tensor) and output_size is None:
        output_size = call.results[0][dim or 0]
        total = times.sum()
        if repeats is not None and times.numel() == 1:
            total = total * (input.numel() if dim is None else input.shape[dim])
        agree(total.item(), output_size)
    if repeats is None:
        return torch.repeat_interleave(input, output_size=output_size)
    return torch.repeat_interleave(input, repeats, dim, output_size=output_size)


def _bincount(
    call: Call, input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Computes `bincount`, and asserts the largest number."""
    size = call.results[0][0]
    if input.numel():
        agree((input.max() + 1).clamp(min=minlength).item(), size)
    if weights is None:
        counts = torch.zeros(size, dtype=torch.int64, device=input.device)
        return counts.index_add(0, input, torch.ones_like(input, dtype=torch.int64))
    dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    sums = torch.zeros(size, dtype=dtype, device=input.device)
    return sums.index_add(0, input, weights.to(dtype))


# Functions whose results have an element for each true element of a condition. Functions that are
# missing here can be recorded, but the program cannot be compiled by jax.jit.
MASKED: dict[Callable[..., Any], Callable[..., Any]] = {
    _Tensor.__getitem__: _get,
    _Tensor.__setitem__: _put,
}
SIZED: dict[Callable[..., Any], Callable[..., Any]] = {
    **MASKED,
    torch.masked_select: _select,
    _Tensor.masked_select: _select,
    torch.nonzero: _nonzero,
    _Tensor.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    _Tensor.argwhere: _nonzero,
    torch.where: _where,
    torch.repeat_interleave: _repeat,
    _Tensor.repeat_interleave: _repeat,
    torch.bincount: _bincount,
    _Tensor.bincount: _bincount,
}


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b).all() if a.shape == b.shape else torch.tensor(False)


# Functions that convert tensors to a bool -> the condition as a tensor.
QUESTIONS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    _Tensor.__bool__: lambda x: x != 0,
    _Tensor.is_nonzero: lambda x: x != 0,
    torch.is_nonzero: lambda x: x != 0,
    _Tensor.__contains__: lambda x, element: (x == element).any(),
    _Tensor.equal: _equal,
    torch.equal: _equal,
    _Tensor.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
}
INTEGERS = {_Tensor.__int__, _Tensor.__index__}


def is_written(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether an integer is formatted into a string, as for a module's name."""
    if func is not _Tensor.__format__ or args[0].ndim:
        return False
    return not (args[0].is_floating_point() or args[0].is_complex())


# Functions with sizes after their first argument, which may be tensors.
WITH_SIZES: set[Callable[..., Any]] = {
    torch.nn.functional.pad,
    torch.nn.functional.interpolate,
    torch.multinomial,
    _Tensor.multinomial,
    torch.reshape,
    _Tensor.reshape,
    _Tensor.view,
    _Tensor.expand,
    _Tensor.repeat,
    torch.narrow,
    _Tensor.narrow,
    torch.split,
    _Tensor.split,
    _Tensor.new_zeros,
    _Tensor.new_ones,
    _Tensor.new_empty,
    _Tensor.new_full,
}
# Functions that take a tensor of positions, or a number of parts.
WITH_PLACES: set[Callable[..., Any]] = {torch.tensor_split, _Tensor.tensor_split}
