"""Sums, products, maxima and other reductions over dimensions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fmapper.programs import DType, Graph
from fmapper_adapters.torch.lax.pointwise.numbers import flip_sign_bit
from fmapper_adapters.torch.lax.table import Avals, lax, reduces
from fmapper_adapters.torch.model.emit import current

Axes = tuple[int, ...]


@lax("reduce_sum", dims=reduces("axes"))
def reduce_sum(x: Any, *, axes: Axes) -> Any:
    if not axes:
        return x
    if x.is_floating_point() or x.is_complex():
        return torch.sum(x, axes)
    return torch.sum(x, axes, dtype=x.dtype)  # wraps around; torch would widen


@lax("reduce_prod", dims=reduces("axes"))
def reduce_prod(x: Any, *, axes: Axes) -> Any:
    dtype = None if x.is_floating_point() or x.is_complex() else x.dtype
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, dtype=dtype) if dtype else torch.prod(x, axis)
    return x


def _extreme(name: str) -> Any:
    function, greatest = getattr(torch, name), name == "amax"

    def extreme(x: Any, *, axes: Axes, avals: Avals) -> Any:
        if not axes:
            return x
        if _is_empty(avals, axes):
            least = _worst(avals.operands[0][0], greatest=greatest)
            return torch.sum(x, axes, dtype=x.dtype) + least if x.dtype is not torch.bool else (
                torch.any(x, axes) ^ least
            )  # fmt: skip
        if x.is_complex():
            return _complex_extreme(x, axes, function, greatest=greatest)
        if x.dtype is torch.bool:
            return torch.any(x, axes) if greatest else torch.all(x, axes)
        if avals.is_unsigned:
            return flip_sign_bit(function(flip_sign_bit(x, x.dtype), axes), x.dtype)
        return function(x, axes)

    return extreme


def _is_empty(avals: Avals, axes: Axes) -> bool:
    """Returns whether a reduction is provably empty."""
    shape = avals.operands[0][1]
    return any(isinstance(shape[axis], int) and shape[axis] == 0 for axis in axes)


def _worst(name: str, *, greatest: bool) -> Any:
    """Returns the identity element of a maximum or minimum, in the dtype that carries it."""
    if name == "bool":
        return not greatest
    if "int" not in name:
        return -torch.inf if greatest else torch.inf
    if name.startswith("u"):
        everything = 255 if name == "uint8" else -1
        return 0 if greatest else everything
    info = torch.iinfo(getattr(torch, name))
    return info.min if greatest else info.max


def _complex_extreme(x: Any, axes: Axes, function: Any, *, greatest: bool) -> Any:
    """Compares by real parts, and by imaginary parts if these are equal."""
    real, imag = torch.real(x), torch.imag(x)
    best = function(real, axes, keepdim=True)
    worst = -torch.inf if greatest else torch.inf
    return torch.complex(
        function(real, axes), function(torch.where(real == best, imag, worst), axes)
    )


lax("reduce_max", takes_avals=True, dims=reduces("axes"))(_extreme("amax"))
lax("reduce_min", takes_avals=True, dims=reduces("axes"))(_extreme("amin"))


@lax("reduce_and", dims=reduces("axes"))
def reduce_and(x: Any, *, axes: Axes) -> Any:
    if x.dtype is torch.bool:
        return torch.all(x, axes) if axes else x
    return _fold(torch.bitwise_and, x, axes, -1)


@lax("reduce_or", dims=reduces("axes"))
def reduce_or(x: Any, *, axes: Axes) -> Any:
    if x.dtype is torch.bool:
        return torch.any(x, axes) if axes else x
    return _fold(torch.bitwise_or, x, axes, 0)


@lax("reduce_xor")
def reduce_xor(x: Any, *, axes: Axes) -> Any:
    if x.dtype is torch.bool:
        if not axes:
            return x
        return (torch.sum(x, axes, dtype=torch.int32) & 1).to(torch.bool)
    return _fold(torch.bitwise_xor, x, axes, 0)


def _fold(function: Any, x: Any, axes: Axes, identity: int) -> Any:
    """Combines integers pairwise, one half with the other, down to a single one."""
    (folded,) = _pairwise(lambda a, b: (function(a[0], b[0]),), [x], axes)
    if folded is None:
        kept = x.sum(axes, dtype=x.dtype)
        return kept + (255 if identity and x.dtype is torch.uint8 else identity)
    return folded


def _pairwise(combine: Any, xs: list[Any], axes: Axes) -> list[Any]:
    """Reduces arrays pairwise by a function of lists of arrays; None if they are empty.

    Raises:
        TypeError: The number of elements is not known before run time.
    """
    if not axes:
        return xs
    rest = [i for i in range(xs[0].ndim) if i not in axes]
    shape = xs[0].shape
    sizes = [shape[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError("it reduces a dimension whose size may vary with a custom function")
    count = 1
    for size in sizes:
        count *= size
    if not count:
        return [None] * len(xs)
    if len(axes) > 1 or axes[0] != 0:
        xs = [x.permute((*axes, *rest)).reshape(count, *(shape[i] for i in rest)) for x in xs]
    while count > 1:
        half = count // 2
        odd = [x[2 * half :] for x in xs]
        firsts, seconds = [x[: 2 * half : 2] for x in xs], [x[1 : 2 * half : 2] for x in xs]
        xs = list(combine(firsts, seconds))
        if count % 2:
            xs = [torch.cat((x, last)) for x, last in zip(xs, odd, strict=True)]
        count = half + count % 2
    return [x[0] for x in xs]


@lax("reduce", takes_avals=True)
def reduce_(*operands: Any, jaxpr: Graph, dimensions: Axes, avals: Avals) -> Any:
    """Reduces arrays by a function of two elements of each, in the order of the elements."""
    half = len(operands) // 2
    arrays, initial = list(operands[:half]), list(operands[half:])
    shapes = [shape for _, shape in avals.operands[:half]]
    rest = tuple(n for i, n in enumerate(shapes[0]) if i not in dimensions)

    def combine(a: list[Any], b: list[Any]) -> tuple[Any, ...]:
        return current().inline(_of_arrays(jaxpr, tuple(a[0].shape)), [*a, *b])

    reduced = _pairwise(combine, arrays, dimensions)
    if reduced[0] is None:
        return tuple(x.expand(rest) for x in initial)
    graph = _of_arrays(jaxpr, rest)
    return current().inline(graph, [*(x.expand(rest) for x in initial), *reduced])


def _of_arrays(graph: Graph, shape: tuple[Any, ...]) -> Graph:
    """Lifts a function of scalars to arrays, element by element."""
    calls = [
        dataclasses.replace(call, result=tuple((dtype, shape) for dtype, _ in call.result))
        for call in graph.calls
    ]
    kinds = tuple((dtype, shape) for dtype, _ in graph.kinds)
    return Graph(graph.inputs, calls, graph.outputs, kinds)


def _index(name: str) -> Any:
    function = getattr(torch, name)

    def index(x: Any, *, axes: Axes, index_dtype: DType, avals: Avals) -> Any:
        (axis,) = axes
        if x.dtype is torch.bool:
            x = x.to(torch.uint8)
        elif avals.is_unsigned:
            x = flip_sign_bit(x, x.dtype)
        places = function(x, axis)
        dtype = current().dtype(index_dtype.name)
        return places if dtype is torch.int64 else places.to(dtype)

    return index


lax("argmax", takes_avals=True, dims=reduces("axes"))(_index("argmax"))
lax("argmin", takes_avals=True, dims=reduces("axes"))(_index("argmin"))
