"""Inputs of other sizes, which show what in a model depends on sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmapper import fleaves, fmap


def of_other_sizes(inputs: Any, runs: Callable[[Any], bool]) -> Any:
    """Returns inputs like others, in which every size is another one that may be.

    Dimensions of equal sizes are taken for the same one. Values are repeated, so that indices stay
    in their range.

    Args:
        inputs: A tree with tensors.
        runs: Whether the model takes inputs.

    Returns:
        The inputs; None if the model takes no other sizes.
    """
    tensors = [x for x in fleaves(inputs) if isinstance(x, torch.Tensor)]
    sizes = sorted({size for x in tensors for size in x.shape if size > 1}, reverse=True)
    new: dict[int, int] = {}
    for size in sizes:
        for other in (size + 1, 2 * size):
            if runs(_resize(inputs, {**new, size: other})):
                new[size] = other
                break
    return _resize(inputs, new) if new else None


def _resize(inputs: Any, sizes: dict[int, int]) -> Any:
    def resize(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for dim, size in enumerate(x.shape):
            if size in sizes:
                x = x.index_select(dim, torch.arange(sizes[size]) % size)
        return x

    return fmap(resize, inputs)
