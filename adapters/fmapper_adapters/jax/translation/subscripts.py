"""Subscripts of arrays, one for several of PyTorch's slices and new dimensions."""

from __future__ import annotations

import ast
from typing import Any

from fmapper.translation import Value, expr, literal

Items = list[ast.expr]


def subscript(x: Value, items: Items) -> ast.expr:
    """Subscripts an array; trailing whole dimensions are left out."""
    while items and _is_whole(items[-1]):
        items = items[:-1]
    if not items:
        return literal(x)
    return _write_subscript(x.node, items, x.ndim)


def insert(x: Value, dim: int) -> ast.expr:
    """Returns an array with a new dimension of size one."""
    base, items = _split_subscript(x)
    at, left = 0, dim
    while at < len(items) and (left > 0 or _is_index(items[at])):
        left -= not _is_index(items[at])
        at += 1
    return _write_subscript(base, [*items[:at], ast.Constant(None), *items[at:]], _ndim(x, items))


def replace(x: Value, dim: int, item: Any) -> ast.expr:
    """Returns an array with a slice or an index of one dimension."""
    base, items = _split_subscript(x)
    places = [i for i, one in enumerate(items) if not _is_index(one)]
    if not _is_whole(items[places[dim]]):
        base, items = x.node, [_whole() for _ in range(x.ndim)]
        places = list(range(x.ndim))
    items = list(items)
    items[places[dim]] = item
    return _write_subscript(base, items, _ndim(x, items))


def pick(x: Value, dim: int) -> ast.expr | None:
    """Returns an array without a dimension that is a slice of one element: `x[0]` for `x[:1]`."""
    base, items = _split_subscript(x)
    places = [i for i, one in enumerate(items) if not _is_index(one)]
    item = items[places[dim]]
    if not isinstance(item, ast.Slice) or _is_whole(item) or item.step is not None:
        return None
    if item.lower is not None and not _is_known(item.lower):
        return None
    items = list(items)
    items[places[dim]] = item.lower or ast.Constant(0)
    return _write_subscript(base, items, _ndim(x, items))


def slice_of(start: Any, stop: Any, step: Any = None) -> ast.expr:
    """Returns a slice; None leaves a bound out."""
    return ast.Slice(*(None if bound is None else literal(bound) for bound in (start, stop, step)))


def _whole() -> ast.expr:
    return ast.Slice()


def _is_whole(item: ast.expr) -> bool:
    return isinstance(item, ast.Slice) and item.lower is item.upper is item.step is None


def _is_new(item: ast.expr) -> bool:
    return isinstance(item, ast.Constant) and item.value is None


def _is_index(item: ast.expr) -> bool:
    return not isinstance(item, ast.Slice) and not _is_new(item)


def _is_known(item: ast.expr) -> bool:
    if isinstance(item, ast.UnaryOp):
        item = item.operand
    return isinstance(item, ast.Slice) or _is_new(item) or (
        isinstance(item, ast.Constant) and isinstance(item.value, int)
    )  # fmt: skip


def _ndim(x: Value, items: Items) -> int:
    return sum(not _is_new(item) for item in items)


def _split_subscript(x: Value) -> tuple[ast.expr, Items]:
    """Splits a subscript into the array and one item per dimension."""
    node = x.node
    if isinstance(node, ast.Subscript):
        index = node.slice
        items = list(index.elts) if isinstance(index, ast.Tuple) else [index]
        dots = [
            i for i, one in enumerate(items) if isinstance(one, ast.Constant) and one.value is ...
        ]
        known = [one for i, one in enumerate(items) if i not in dots]
        if all(map(_is_known, known)) and not all(map(_is_index, known)):
            missing = x.ndim - sum(not _is_index(one) for one in known)
            at = dots[0] if dots else len(items)
            more = [_whole() for _ in range(missing)]
            return node.value, [*items[:at], *more, *items[at + 1 :]]
    return node, [_whole() for _ in range(x.ndim)]


def _write_subscript(base: ast.expr, items: Items, ndim: int) -> ast.expr:
    """Writes a subscript as short as possible."""
    first = next((i for i, one in enumerate(items) if not _is_whole(one)), len(items))
    last = max((i for i, one in enumerate(items) if not _is_whole(one)), default=-1)
    if last < 0:
        return literal(base)
    behind = len(items) - 1 - last
    if first and not behind and (first > 1 or _is_new(items[first])):
        items = [ast.Constant(...), *items[first:]]
    else:
        items = items[: last + 1]
    index = items[0] if len(items) == 1 else ast.Tuple(items, ast.Load())
    return ast.Subscript(literal(base), index, ast.Load())


def swap(x: Value) -> ast.expr:
    """Returns `x.T`, or `x` for what is `x.T` already, as the kernel of a layer."""
    is_flipped = isinstance(x.node, ast.Attribute) and x.node.attr == "T"
    return x.node.value if is_flipped else expr("{0}.T", x)  # type: ignore[attr-defined]
