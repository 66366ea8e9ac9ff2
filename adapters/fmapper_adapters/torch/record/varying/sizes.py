"""Translates the users' names of varying sizes to the form of torch.export."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch._private import pytree

ShapesCollection: Any = torch.export.ShapesCollection  # untyped in torch
_FIXED = ("_", "", "...")
_MOST = 60  # operations in a size; Swin has hundreds, which torch takes minutes to compare
_limited: ContextVar[bool] = ContextVar("limited", default=False)


class TooManyOperations(ConversionError):
    """Raised for a size that is computed from input sizes by too many operations."""


@contextlib.contextmanager
def limit() -> Iterator[None]:
    """Ends a recording at the first size with too many operations."""
    before = _limited.set(True)
    try:
        yield
    finally:
        _limited.reset(before)


def check(result: Any) -> None:
    """Checks the sizes of a tensor within a `limit` block.

    Raises:
        TooManyOperations: A size has too many operations.
    """
    if torch.compiler.is_dynamo_compiling():  # in branches of torch.cond
        return
    if not _limited.get() or not isinstance(result, torch.Tensor):
        return
    for size in result.shape:
        if isinstance(size, torch.SymInt) and (count := _operations(size.node.expr)) > _MOST:
            raise TooManyOperations(f"a size has {count} operations")


@lru_cache(maxsize=1000)
def _operations(expression: Any) -> int:
    return int(expression.count_ops())


def as_torch_takes_them(dynamic_shapes: Any, inputs: Any, *, only_first: bool = False) -> Any:
    """Translates `dynamic_shapes` such as `auto` and `["batch, _"]` to torch's dimensions.

    Args:
        dynamic_shapes: The sizes that may vary, as the user wrote them.
        inputs: The examples.
        only_first: Whether `auto` means only the first size of each tensor.

    Raises:
        ConversionError: A word is neither `auto` nor names of sizes.
    """
    if dynamic_shapes is None or isinstance(dynamic_shapes, ShapesCollection):
        return dynamic_shapes
    if isinstance(dynamic_shapes, str):
        return _all_sizes(dynamic_shapes, inputs, only_first=only_first)
    words = [leaf for leaf in pytree.tree_leaves(dynamic_shapes) if isinstance(leaf, str)]
    if not words:
        return dynamic_shapes
    uses = Counter(name for word in words for name in _names(word) if name not in _FIXED)
    # Equal names mean equal sizes, which torch can express only for named dimensions.
    sizes = {
        name: torch.export.Dim(name) if count > 1 else torch.export.Dim.AUTO
        for name, count in uses.items()
    }
    return pytree.tree_map(
        lambda leaf: (
            {at: sizes[name] for at, name in enumerate(_names(leaf)) if name in sizes}
            if isinstance(leaf, str)
            else leaf
        ),
        dynamic_shapes,
    )


def _names(word: str) -> list[str]:
    """Splits `batch, _` into the names of its sizes."""
    names = [name.strip() for name in word.strip().strip("()").split(",")]
    for name in names:
        if name not in _FIXED and not name.isidentifier():
            raise ConversionError(
                f"dynamic_shapes has {word!r}: for torch a size is a name, as in "
                f"'batch, _', not {name!r}. torch.export.Dim allows more: {{0: Dim('batch')}}."
            )
    return names


def _all_sizes(word: str, inputs: Any, *, only_first: bool) -> Any:
    """Makes every size of every tensor dynamic, or the first."""
    if word != "auto":
        raise ConversionError(
            f"dynamic_shapes={word!r} is not valid: write 'auto', a list with a string for each "
            "input, as in ['batch, _'], or the form that torch.export.export accepts"
        )
    shapes = ShapesCollection()
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            varying = range(1 if only_first else leaf.ndim)
            shapes[leaf] = dict.fromkeys(varying, torch.export.Dim.AUTO)
    return shapes
