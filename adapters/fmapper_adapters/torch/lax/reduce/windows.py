"""Reductions over sliding windows, and selections in them.

Maxima and minima of floats use torch's pooling, whose gradient goes to the first of equal elements,
as in JAX. So do sums over two or three dimensions. Others are reductions of views with a dimension
for the elements of windows (`unfold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmapper import ConversionError
from fmapper.programs import Graph
from fmapper_adapters.torch.lax.layout import indices
from fmapper_adapters.torch.lax.layout.dims import are_equal, inverse, permute, product
from fmapper_adapters.torch.lax.layout.shapes import pad_with
from fmapper_adapters.torch.lax.reduce import element_functions
from fmapper_adapters.torch.lax.table import Avals, dimensions, lax
from fmapper_adapters.torch.model.emit import current

_MOST_IN_TURN = 1024  # the most elements of a window to combine one after the other
_MAX_POOL: dict[int, Any] = {
    1: torch.nn.functional.max_pool1d,
    2: torch.nn.functional.max_pool2d,
    3: torch.nn.functional.max_pool3d,
}


@dataclass(frozen=True)
class Windows:
    """Windows, dimension by dimension.

    Attributes:
        sizes: The sizes of a window.
        strides: The distances between windows.
        padding: The padding before and after the elements.
        base: The distance between elements, with padding in between.
        dilation: The distance between elements of a window.
    """

    sizes: Sequence[int]
    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    base: Sequence[int]
    dilation: Sequence[int]

    @property
    def moving(self) -> list[int]:
        """The dimensions in which windows are not single adjacent elements."""
        return [
            d for d, pair in enumerate(zip(self.sizes, self.strides, strict=True)) if pair != (1, 1)
        ]

    def pad(self, x: Any, value: Any) -> Any:
        """Pads a tensor; the result needs no further padding."""
        config = [
            (low, high, base - 1) for (low, high), base in zip(self.padding, self.base, strict=True)
        ]
        return pad_with(x, value, config)

    def views(self, x: Any) -> Any:
        """Returns the windows of a padded tensor, in a last dimension for each of `moving`."""
        for d in self.moving:
            span = (self.sizes[d] - 1) * self.dilation[d] + 1
            x = x.unfold(d, span, self.strides[d])
            if self.dilation[d] > 1:
                x = x[..., :: self.dilation[d]]
        return x


def _windows(
    rank: int,
    window_dimensions: Any,
    window_strides: Any,
    padding: Any,
    base_dilation: Any = None,
    window_dilation: Any = None,
) -> Windows:
    ones = (1,) * rank
    return Windows(
        tuple(window_dimensions),
        tuple(window_strides),
        tuple((low, high) for low, high in padding),
        tuple(base_dilation or ones),
        tuple(window_dilation or ones),
    )


def lowest(dtype: torch.dtype, *, unsigned: bool = False) -> Any:
    """Returns a lower bound of all numbers, in the dtype that carries them."""
    if dtype is torch.bool:
        return False
    if dtype.is_floating_point:
        return float("-inf")
    return 0 if unsigned else torch.iinfo(dtype).min


def highest(dtype: torch.dtype, *, unsigned: bool = False) -> Any:
    """Returns an upper bound of all numbers, in the dtype that carries them."""
    if dtype is torch.bool:
        return True
    if dtype.is_floating_point:
        return float("inf")
    return -1 if unsigned else torch.iinfo(dtype).max


def _is_empty(avals: Avals) -> bool:
    return 0 in avals.results[0][1]


def _nothing(avals: Avals) -> Any:
    dtype, shape = avals.results[0]
    return current().make(torch.zeros, shape, dtype=current().dtype(dtype))


@lax("reduce_window_sum", takes_avals=True, dims=dimensions.window)
def reduce_window_sum(x: Any, *, avals: Avals, **numbers: Any) -> Any:
    return _reduce("add", x, _windows(x.ndim, **numbers), avals)


@lax("reduce_window_max", takes_avals=True, dims=dimensions.window)
def reduce_window_max(x: Any, *, avals: Avals, **numbers: Any) -> Any:
    return _reduce("max", x, _windows(x.ndim, **numbers), avals)


@lax("reduce_window_min", takes_avals=True, dims=dimensions.window)
def reduce_window_min(x: Any, *, avals: Avals, **numbers: Any) -> Any:
    return _reduce("min", x, _windows(x.ndim, **numbers), avals)


def _reduce(kind: str, x: Any, windows: Windows, avals: Avals) -> Any:
    """Reduces windows by a named operation: `add`, `mul`, `max`, `min`; for bools `and`, `or`."""
    if _is_empty(avals):
        return _nothing(avals)
    if x.dtype is torch.bool:
        kind = {"and": "min", "or": "max", "mul": "min", "add": "max"}.get(kind, kind)
    pooled = x.is_floating_point() and x.dtype.itemsize > 1 and 0 not in x.shape
    if pooled and kind in ("max", "min"):
        return _pool(x, windows) if kind == "max" else -_pool(-x, windows)
    if kind == "add":
        if pooled and _can_average(windows):
            return _sum(x, windows)
        views = windows.views(windows.pad(x, 0))
        dims = tuple(range(x.ndim, views.ndim))
        return torch.sum(views, dims, dtype=x.dtype) if dims else views
    if kind == "mul":
        views = windows.views(windows.pad(x, 1))
        return _product(views, x.ndim)
    if x.is_complex():
        return _complex_extreme(kind, x, windows)
    return _extreme(kind, x, windows, avals)


def _extreme(kind: str, x: Any, windows: Windows, avals: Avals) -> Any:
    dtype, unsigned = x.dtype, avals.is_unsigned
    x = windows.pad(x, (lowest if kind == "max" else highest)(dtype, unsigned=unsigned))
    if unsigned:  # flipping the first bit maps unsigned to signed order
        x = x ^ torch.iinfo(dtype).min
    elif dtype is torch.bool:
        x = x.to(torch.uint8)
    values = windows.views(x)
    dims = tuple(range(x.ndim, values.ndim))
    if dims:
        values = (torch.amax if kind == "max" else torch.amin)(values, dims)
    if unsigned:
        return values ^ torch.iinfo(dtype).min
    return values.to(torch.bool) if dtype is torch.bool else values


def _complex_extreme(kind: str, x: Any, windows: Windows) -> Any:
    """Returns maxima of complex numbers, which are ordered by their real parts first."""
    choose = element_functions.larger if kind == "max" else element_functions.smaller
    beyond = float("-inf") if kind == "max" else float("inf")
    values = windows.views(windows.pad(x, beyond))
    if values.ndim == x.ndim:
        return values
    values = values.flatten(x.ndim)
    total = values.select(-1, 0)
    for i in range(1, product(windows.sizes)):
        total = choose(total, values.select(-1, i))
    return total


def _product(views: Any, rank: int) -> Any:
    for d in reversed(range(rank, views.ndim)):
        views = torch.prod(views, d, dtype=views.dtype)
    return views


def _pool(x: Any, windows: Windows) -> Any:
    """Computes maxima of floats by pooling, at most three dimensions at a time."""
    moving = windows.moving
    if any(b != 1 for b in windows.base):
        x = windows.pad(x, float("-inf"))
        padding = [(0, 0)] * x.ndim
    else:
        still = [
            (0, 0, 0) if d in moving and _is_inner(windows, d) else (*windows.padding[d], 0)
            for d in range(x.ndim)
        ]
        padding = [
            pair if d in moving and _is_inner(windows, d) else (0, 0)
            for d, pair in enumerate(windows.padding)
        ]
        x = pad_with(x, float("-inf"), still)
    while moving:
        moving, part = moving[:-3], moving[-3:]
        x = _pool_over(x, part, windows, [padding[d][0] for d in part])
    return x


def _is_inner(windows: Windows, d: int) -> bool:
    """Returns whether torch's pooling supports the padding of a dimension."""
    low, high = windows.padding[d]
    return isinstance(low, int) and are_equal(low, high) and 0 <= low <= windows.sizes[d] // 2


def _pool_over(x: Any, part: list[int], windows: Windows, padding: list[int]) -> Any:
    chosen = [[settings[d] for d in part] for settings in (windows.sizes, windows.strides)]
    dilation = [windows.dilation[d] for d in part]
    pool = _MAX_POOL[len(part)]
    return _over_last(x, part, lambda a: pool(a, *chosen, padding, dilation))


def _over_last(x: Any, part: list[int], function: Any) -> Any:
    """Applies a function of (batch, features, *space) to some dimensions of a tensor."""
    rest = [d for d in range(x.ndim) if d not in part]
    order = [*rest, *part]
    x = permute(x, order)
    sizes = x.shape[: len(rest)]
    lead = len(rest)
    if lead < 2:
        for _ in range(2 - lead):
            x = x.unsqueeze(0)
    elif lead > 2:
        x = x.flatten(0, lead - 2)
    x = function(x)
    if lead < 2:
        for _ in range(2 - lead):
            x = x.squeeze(0)
    elif lead > 2:
        x = x.unflatten(0, sizes[:-1])
    return permute(x, inverse(order))


def _can_average(windows: Windows) -> bool:
    moving = windows.moving
    plain = all(windows.dilation[d] == 1 for d in moving)
    return plain and 1 <= len(moving) <= 3


def _sum(x: Any, windows: Windows) -> Any:
    """Sums windows by average pooling with divisor 1."""
    moving = windows.moving
    inner = all(b == 1 for b in windows.base) and all(
        pair == (0, 0) if d not in moving else _is_inner(windows, d)
        for d, pair in enumerate(windows.padding)
    )
    if not inner:
        x = windows.pad(x, 0)
    sizes = [windows.sizes[d] for d in moving]
    strides = [windows.strides[d] for d in moving]
    padding = [windows.padding[d][0] if inner else 0 for d in moving]
    if len(moving) == 3:
        return _over_last(
            x,
            moving,
            lambda a: torch.nn.functional.avg_pool3d(
                a, sizes, strides, padding, divisor_override=1
            ),
        )
    if len(moving) == 1:  # torch's pooling of one dimension always divides

        def along(a: Any) -> Any:
            average = torch.nn.functional.avg_pool2d(
                a.unsqueeze(-2), [1, *sizes], [1, *strides], [0, *padding], divisor_override=1
            )
            return average.squeeze(-2)

        return _over_last(x, moving, along)
    return _over_last(
        x,
        moving,
        lambda a: torch.nn.functional.avg_pool2d(a, sizes, strides, padding, divisor_override=1),
    )


@lax("reduce_window", takes_avals=True, dims=dimensions.window)
def reduce_window(
    *operands: Any,
    jaxpr: Graph,
    consts: tuple[Any, ...] = (),
    avals: Avals,
    **numbers: Any,
) -> Any:
    """Reduces windows by a function of elements, without padding.

    Raises:
        ConversionError: The windows are too large for a function that is not a named operation.
    """
    if consts:
        raise ConversionError(
            "reduce_window with a function that captures arrays, which is not supported"
        )
    count = len(operands) // 2
    xs, starts = operands[:count], operands[count:]
    windows = _windows(xs[0].ndim, **numbers)
    if _is_empty(avals):
        return tuple(
            current().make(torch.zeros, shape, dtype=current().dtype(dtype))
            for dtype, shape in avals.results
        )
    kind = element_functions.reduction_of(jaxpr)
    named = {"add", "mul", "max", "min"}
    if xs[0].dtype is torch.bool:
        named |= {"and", "or"}
    if count == 1 and kind is not None and kind in named:
        reduced = _reduce(kind, xs[0], windows, avals)
        if xs[0].is_complex() and kind in ("max", "min"):
            choose = element_functions.larger if kind == "max" else element_functions.smaller
            return (choose(starts[0], reduced),)
        if _is_neutral(kind, starts[0], xs[0].dtype, avals):
            return (reduced,)
        return element_functions.apply(jaxpr, (starts[0].expand(reduced.shape), reduced))
    return _in_turn(xs, starts, jaxpr, windows)


def _is_neutral(kind: str, start: Any, dtype: torch.dtype, avals: Avals) -> bool:
    """Returns whether an initial value is provably neutral."""
    if start.node.target is not torch.full:
        return False
    neutral = {"add": 0, "or": False, "mul": 1, "and": True}
    if kind in ("max", "min"):
        neutral[kind] = (lowest if kind == "max" else highest)(dtype, unsigned=avals.is_unsigned)
    return bool(start.node.args[1] == neutral[kind])


def _in_turn(xs: Any, starts: Any, graph: Graph, windows: Windows) -> tuple[Any, ...]:
    """Reduces windows element by element, in order."""
    count = product(windows.sizes)
    if count > _MOST_IN_TURN:
        raise ConversionError(
            f"reduce_window over {count} elements with a custom function; use add, mul, max or min"
        )
    rank = xs[0].ndim
    views = [windows.views(windows.pad(x, 0)) for x in xs]
    views = [v.flatten(rank) if v.ndim > rank else v.unsqueeze(-1) for v in views]
    inside: Any = None
    if any(pair != (0, 0) for pair in windows.padding) or any(b != 1 for b in windows.base):
        ones = current().make(torch.ones, tuple(xs[0].shape), dtype=torch.bool)
        inside = windows.views(windows.pad(ones, False)).flatten(rank)
    shape = tuple(views[0].shape[:-1])
    total = [s.expand(shape) for s in starts]
    for i in range(count):
        new = element_functions.apply(graph, (*total, *(v.select(-1, i) for v in views)))
        if inside is None:
            total = list(new)
        else:
            valid = inside.select(-1, i)
            total = [torch.where(valid, n, t) for n, t in zip(new, total, strict=True)]
    return tuple(total)


@lax("select_and_scatter_add", takes_avals=True)
def select_and_scatter_add(
    source: Any, x: Any, *, select_prim: str, avals: Avals, **numbers: Any
) -> Any:
    """Adds each element of the source to the largest, or smallest, element of its window."""
    windows = _windows(x.ndim, **numbers)
    if _is_empty(avals) or 0 in source.shape:
        return _nothing(avals)
    grown = windows.pad(x, _beyond(x.dtype, select_prim, avals))
    at = _places(grown, windows, select_prim, avals)
    flat = grown.new_zeros(product(grown.shape)) if source.dtype is grown.dtype else None
    assert flat is not None
    if source.dtype is torch.bool:
        ones = flat.to(torch.uint8).scatter_reduce(
            0, at.flatten(), source.flatten().to(torch.uint8), "amax"
        )
        flat = ones.to(torch.bool)
    else:
        flat = torch.scatter_add(flat, 0, at.flatten(), source.flatten())
    result = flat.view(tuple(grown.shape))
    back = [(-low, -high, 0) for low, high in windows.padding]
    return pad_with(result, 0, back)


@lax("select_and_gather_add", takes_avals=True)
def select_and_gather_add(
    tangents: Any, x: Any, *, select_prim: str, avals: Avals, **numbers: Any
) -> Any:
    """Gathers the elements at the largest, or smallest, element of each window."""
    windows = _windows(x.ndim, **numbers)
    if _is_empty(avals):
        return _nothing(avals)
    grown = windows.pad(x, _beyond(x.dtype, select_prim, avals))
    at = _places(grown, windows, select_prim, avals)
    return torch.take(windows.pad(tangents, 0), at)


def _beyond(dtype: torch.dtype, select: str, avals: Avals) -> Any:
    return (lowest if select == "ge" else highest)(dtype, unsigned=avals.is_unsigned)


def _places(x: Any, windows: Windows, select: str, avals: Avals) -> Any:
    """Returns the place of the largest or smallest element of each padded window."""
    places = indices.steps(product(x.shape)).view(tuple(x.shape))
    if not windows.moving:
        return places
    if avals.is_unsigned:
        x = x ^ torch.iinfo(x.dtype).min
    elif x.dtype is torch.bool:
        x = x.to(torch.uint8)
    values = windows.views(x).flatten(x.ndim)
    chosen = (torch.argmax if select == "ge" else torch.argmin)(values, -1, keepdim=True)
    return torch.gather(windows.views(places).flatten(x.ndim), -1, chosen).squeeze(-1)
