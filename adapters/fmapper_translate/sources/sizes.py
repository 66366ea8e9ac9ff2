"""Inputs of other sizes, which show what in a model depends on sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmapper import fleaves, fmap


def of_other_sizes(inputs: Any, runs: Callable[[Any], bool]) -> Any:
    """Returns inputs like others, in which every size is another one that may be.

    Dimensions of equal sizes are taken for the same one; of size 1, those in the same place. Values
    are repeated, so that indices stay in their range.

    Args:
        inputs: A tree with tensors.
        runs: Whether the model takes inputs.

    Returns:
        The inputs; None if the model takes no other sizes.
    """
    tensors = [x for x in fleaves(inputs) if isinstance(x, torch.Tensor)]
    sizes = {_key(x, dim) for x in tensors for dim in range(x.ndim) if x.shape[dim]}
    new: dict[tuple[int, int], int] = {}
    for key in sorted(sizes, key=lambda key: (-key[0], key[1])):
        for other in (key[0] + 1, 2 * key[0]):
            if runs(_resize(inputs, {**new, key: other})):
                new[key] = other
                break
    return _resize(inputs, new) if new else None


def _key(x: torch.Tensor, dim: int) -> tuple[int, int]:
    """Returns what dimensions that vary together have in common."""
    return x.shape[dim], dim if x.shape[dim] == 1 else 0


def _resize(inputs: Any, sizes: dict[tuple[int, int], int]) -> Any:
    def resize(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for dim, key in enumerate([_key(x, dim) for dim in range(x.ndim)]):
            if key in sizes:
                x = x.index_select(dim, torch.arange(sizes[key]) % key[0])
        return x

    return fmap(resize, inputs)
