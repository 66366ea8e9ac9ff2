"""Helpers for sizes and dimensions in lowerings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fmapper_adapters.torch.model.emit import VaryingSize


def are_equal(a: Any, b: Any) -> bool:
    """Returns whether two sizes are surely equal; a varying size equals only itself."""
    if isinstance(a, VaryingSize) or isinstance(b, VaryingSize):
        return isinstance(a, VaryingSize) and a == b
    return isinstance(a, int) and isinstance(b, int) and a == b


def permute(x: Any, order: Sequence[int]) -> Any:
    """Permutes the dimensions of a tensor; returns it unchanged if the order is the same."""
    return x if list(order) == list(range(len(order))) else x.permute(tuple(order))


def flatten(x: Any, start: int, count: int) -> Any:
    """Flattens `count` adjacent dimensions to one; inserts a dimension of size 1 for none."""
    if count == 1:
        return x
    if count == 0:
        return x.unsqueeze(start)
    return x.flatten(start, start + count - 1)


def unflatten(x: Any, dimension: int, sizes: Sequence[Any]) -> Any:
    """Splits one dimension into several, or drops it for none."""
    if len(sizes) == 1:
        return x
    if not sizes:
        return x.squeeze(dimension)
    return x.unflatten(dimension, tuple(sizes))


def inverse(order: Sequence[int]) -> list[int]:
    """Returns the inverse of a permutation."""
    return sorted(range(len(order)), key=lambda i: order[i])


def product(sizes: Sequence[Any]) -> Any:
    """Returns the product of sizes."""
    return math.prod(sizes)
