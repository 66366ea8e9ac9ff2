"""Slices of arrays whose sizes vary, which JAX gathers: `x[:, 0]`, `x[:, :-1]`, `x[:, -1]`."""

from __future__ import annotations

import re
from typing import Any

from fmapper.programs import Call, Polynomial, Size
from fmapper_adapters.torch.fuse.graph_index import GraphIndex
from fmapper_adapters.torch.fuse.rewriter import Rewriter

_AT_LEAST = re.compile(r"max\(0, (\w+ - \d+)\)")
_AT_MOST = re.compile(r"min\((\w+), (\d+)\)")


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Recognises a gather of one window at a position given by sizes and numbers."""
    if call.op != "lax::gather" or call.kwargs["mode"] != "promise_in_bounds":
        return None
    index, numbers = rewriter.index, call.kwargs["dimension_numbers"]
    x, indices = call.args
    full, widths = index.shape(x), call.kwargs["slice_sizes"]
    shape = call.result[0][1]
    if numbers["operand_batching_dims"] or len(index.shape(indices)) != 1:
        return None
    if tuple(numbers["offset_dims"]) != tuple(range(len(shape))) or not full:
        return None
    parts = [indices]
    joined = index.call(indices, "concatenate")
    if joined is not None and all(index.shape(part) == (1,) for part in joined.args):
        parts = list(joined.args)
    starts = dict(zip(numbers["start_index_map"], parts, strict=False))
    if len(parts) != len(numbers["start_index_map"]):
        return None
    window: list[Any] = []
    for dim, (size, width) in enumerate(zip(full, widths, strict=True)):
        start = _start(index, starts[dim]) if dim in starts else 0
        item = None if start is None else _item(start, _plain(width), size)
        if item is None:
            return None
        window.append(item[0] if dim in numbers["collapsed_slice_dims"] else item)
    return rewriter.call("torch::window", x, window=tuple(window), shape=shape,
                         dtype=call.result[0][0])  # fmt: skip


def _start(index: GraphIndex, value: Any) -> int | str | None:
    """Returns an index as a number or size; None for others."""
    number = index.number(value)
    if number is not None:
        return int(number)
    call = index.call(value, "broadcast_in_dim", "reshape", "convert_element_type")
    while call is not None:
        value = call.args[0]
        call = index.call(value, "broadcast_in_dim", "reshape", "convert_element_type")
    size = index.call(value, "dim_as_value")
    return None if size is None else str(size.kwargs["dim"].expression)


def _plain(size: Any) -> int | str:
    return str(size.expression) if isinstance(size, Size) else size


def _item(start: int | str, width: int | str, size: int | str) -> tuple[Any, Any] | None:
    """Returns start and end of a window, counted from the end if it lies there.

    Examples:
        >>> _item("s1 - 1", 1, "s1"), _item(0, "s1 - 1", "s1"), _item(1, "s1 - 1", "s1")
        ((-1, None), (0, -1), (1, None))
        >>> _item(1, "max(0, s1 - 2)", "s1"), _item(0, "min(s1, 3)", "s1")
        ((1, -1), (0, 3))
        >>> _item("2*s1 - 1", 1, "2*s1"), _item(0, "s0*s1 - 1", "s1*s0")
        ((-1, None), (0, -1))
    """
    least, most = _AT_LEAST.fullmatch(str(width)), _AT_MOST.fullmatch(str(width))
    if least is not None and isinstance(start, int):  # as in Python's slices
        width = least[1]
    if most is not None:
        return (0, int(most[2])) if (start, most[1]) == (0, size) else None
    begin, length, whole = map(Polynomial.read, (start, width, size))
    first, from_end = begin.number, (begin - whole).number
    if first is None and from_end is not None and from_end < 0:
        first = from_end
    elif first is None or first < 0:
        return None
    end = begin + length
    beyond = (end - whole).number
    if beyond is not None:
        return (first, beyond or None) if beyond <= 0 else None
    return (first, end.number) if first >= 0 and end.number is not None else None


def find_repeats(rewriter: Rewriter, call: Call) -> Any | None:
    """Recognises repeated rows of a dimension, as in enlarged images.

    That is `jax.image.resize(x, shape, "nearest")` for a multiple of a size: row `i` is the one at
    `floor((i + 0.5) * size / length)`.
    """
    if call.op != "lax::gather":
        return None
    index, numbers = rewriter.index, call.kwargs["dimension_numbers"]
    x, indices = call.args
    full, shape = index.shape(x), call.result[0][1]
    if len(numbers["start_index_map"]) != 1 or numbers["operand_batching_dims"]:
        return None
    (dim,) = numbers["start_index_map"]
    others = [size for i, size in enumerate(full) if i != dim]
    widths = [_plain(width) for i, width in enumerate(call.kwargs["slice_sizes"]) if i != dim]
    rest = tuple(i for i in range(len(shape)) if i != dim)
    is_one = tuple(numbers["collapsed_slice_dims"]) == (dim,) and widths == others
    if not is_one or tuple(numbers["offset_dims"]) != rest or len(index.shape(indices)) != 2:
        return None
    count = _multiple(shape[dim], full[dim])
    if count is None or not _is_nearest(index, indices, full[dim], shape[dim]):
        return None
    return rewriter.call("torch::repeat", x, dim=dim, count=count, shape=shape,
                         dtype=call.result[0][0])  # fmt: skip


def _multiple(length: int | str, size: int | str) -> int | None:
    """Returns the quotient of a length and a size."""
    whole = Polynomial.read(length)
    for factors, number in Polynomial.read(size).items():
        count = whole.get(factors, 0) // number
        return count if Polynomial.product([count, size]) == whole else None
    return None


def _is_nearest(index: GraphIndex, indices: Any, size: int | str, length: int | str) -> bool:
    chosen = index.call(index.origin(indices)[0], "select_n")
    row = indices if chosen is None else chosen.args[1]  # the other case is for negative indices
    whole = index.call(index.origin(row)[0], "convert_element_type")
    floor = None if whole is None else index.call(whole.args[0], "floor")
    quotient = None if floor is None else index.call(floor.args[0], "div")
    product = None if quotient is None else index.call(quotient.args[0], "mul")
    middle = None if product is None else index.call(product.args[0], "add")
    if quotient is None or product is None or middle is None:
        return False
    sizes = _size_of(index, product.args[1]), _size_of(index, quotient.args[1])
    if sizes != (size, length) or index.number(middle.args[1]) != 0.5:
        return False
    counted = index.call(middle.args[0])
    for op, neutral in (("lax::add", 0), ("lax::mul", 1)):
        if counted is not None and counted.op == op and index.number(counted.args[0]) == neutral:
            counted = index.call(counted.args[1])
    return counted is not None and counted.op == "lax::iota" and counted.result[0][1] == (length,)


def _size_of(index: GraphIndex, value: Any) -> int | str | None:
    """Returns a number as a size."""
    number = index.number(value)
    return _start(index, value) if number is None else int(number) if number % 1 == 0 else None
