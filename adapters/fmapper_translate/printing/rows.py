"""Rows that a function picks by values: those of elements of a mask that hold.

`torch.where(mask)` gives as many rows as that are. A compiled file needs the number beforehand: it
has as many rows as the mask has elements, of which the last have indices beyond the end. JAX writes
nothing there, so that the result is the same where each row is computed by itself and then written
to its place. The witness reads NaN there, which would reach a result that depends on these rows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fmapper.translation import expr
from fmapper_translate.recording import Event, Operation, Recording
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions

_SOURCES = frozenset({"aten::nonzero", "aten::nonzero_numpy", "aten::where"})
_FOLLOWING = frozenset({  # whose results are indices, too
    "aten::select", "aten::slice", "aten::squeeze", "aten::unsqueeze", "aten::view",
    "aten::reshape", "aten::flatten", "aten::unbind", "aten::to", "aten::clone",
    "aten::contiguous", "aten::alias", "aten::detach", "aten::add", "aten::sub", "aten::mul",
    "aten::floor_divide", "aten::div",
})  # fmt: skip
_WRITING = frozenset({"aten::index", "aten::index_put", "aten::index_add"})
READ, READ_BY_WITNESS = ".get(mode='clip')", ".get(mode='fill', fill_value=jnp.nan)"
_READ_INTEGERS = ".at[{1}].get(mode='fill', fill_value=0)"
_PLAIN = "[{1}]"
_UNTESTED = "all elements of the mask hold in all examples; give one in which some do not"


class Places:
    """Tensors of a recording that are indices of elements that hold.

    Args:
        recording: What the source did.
    """

    def __init__(self, recording: Recording) -> None:
        self._tensors: set[int] = set()
        for operation in recording.operations:
            if _is_source(operation) or (_name(operation) in _FOLLOWING and self._takes(operation)):
                self._tensors.update(id(item) for item in _tensors_in(operation.result))

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._tensors

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def _takes(self, operation: Operation) -> bool:
        return any(item in self for item in _tensors_in(operation.args))

    def check(self, events: Sequence[Event]) -> None:
        """Refuses an expression that computes with indices, or whose rows no example has tested.

        Raises:
            NotTranscribed: It does.
        """
        if not self._tensors:
            return
        operations = [operation for event in events for operation in event.operations]
        for name in (_name(operation) for operation in operations if self._takes(operation)):
            if name not in _FOLLOWING | _WRITING:
                raise NotTranscribed(f"{name} computes with rows whose number depends on values")
        sources = [item for item in operations if _is_source(item)]
        masks = [(item.args[0], next(_tensors_in(item.result))) for item in sources]
        if masks and all(len(rows) == mask.numel() for mask, rows in masks):
            raise NotTranscribed(_UNTESTED)


def pick(expressions: Expressions, node: ast.Subscript, made: ast.Subscript, event: Event) -> Any:
    """Returns the code for `x[index]` where the index is a mask or indices of its elements.

    Args:
        expressions: The printer of the function.
        node: The expression.
        made: Its code as it is for other indices.
        event: An evaluation.

    Raises:
        NotTranscribed: All elements of the mask hold in all examples.
    """
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    values = [event.parts[part].value if part in event.parts else None for part in parts]
    index, read = place(expressions.file.places, made.slice, values)
    if index is made.slice and read == _PLAIN:
        return made
    masks = [item for part in parts for item in expressions.values(part) if is_mask(item)]
    if masks and all(map(torch.all, masks)):
        raise NotTranscribed(_UNTESTED)
    is_number = event.value.is_floating_point() or event.value.is_complex()
    return expr(f"{{0}}{read if is_number else _READ_INTEGERS}", made.value, index)


def place(places: Places, index: ast.expr, values: list[Any]) -> tuple[ast.expr, str]:
    """Returns an index with indices of elements in the place of masks, and how it is read.

    Args:
        places: Such indices.
        index: The code for the index.
        values: Its values, one for each dimension.
    """
    if not any(is_mask(value) or value in places for value in values):
        return index, _PLAIN
    if not isinstance(index, ast.Tuple):
        return (expr("nonzero({0})", index) if is_mask(values[0]) else index), f".at[{{1}}]{READ}"
    elements = [
        ast.Starred(expr("nonzero({0})", item), ast.Load()) if is_mask(value) else item
        for item, value in zip(index.elts, values, strict=True)
    ]
    return ast.Tuple(elements, ast.Load()), f".at[{{1}}]{READ}"


def is_mask(value: Any) -> bool:
    """Returns whether an index is a mask."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.ndim > 0


def picks_rows(step: Operation | Event) -> bool:
    """Returns whether an operation gives as many rows as elements of a mask hold."""
    if isinstance(step, Event):
        return False
    is_masked = _name(step) == "aten::index" and any(map(is_mask, step.args[1]))
    return is_masked or _is_source(step)


def _is_source(operation: Operation) -> bool:
    return _name(operation) in _SOURCES and len(operation.args) == 1


def _name(operation: Operation) -> str:
    return operation.name.partition(".")[0].removesuffix("_")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
