"""Inputs of other sizes, which show what in a model depends on sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fmapper import fleaves, fmap
from fmapper.programs import size_of
from fmapper_adapters.jax.record.dynamic_shapes import read_sizes
from fmapper_translate.walk.errors import NotTranscribed

Shape = tuple[int | str, ...]


def of_other_sizes(inputs: Any, runs: Callable[[Any], bool]) -> Any:
    """Returns inputs like others, in which every size is another one that may be.

    Dimensions of equal sizes are taken for the same one; of size 1, those in the same place. Values
    are repeated, so that indices stay in their range.

    Args:
        inputs: A tree with arrays.
        runs: Whether the model takes inputs.

    Returns:
        The inputs; None if the model takes no other sizes.
    """
    arrays = [x for x in fleaves(inputs) if hasattr(x, "shape")]
    keys = {(n, dim if n == 1 else 0) for x in arrays for dim, n in enumerate(x.shape) if n}
    names = {
        key: f"s{at}" for at, key in enumerate(sorted(keys, key=lambda key: (-key[0], key[1])))
    }
    shapes = [
        tuple(names[n, dim if n == 1 else 0] if n else 0 for dim, n in enumerate(x.shape))
        for x in arrays
    ]
    sizes = {name: n for (n, _), name in names.items()}
    new = _vary(inputs, shapes, sizes, {name: (n + 1, 2 * n) for name, n in sizes.items()}, runs)
    return None if new == sizes else _resize(inputs, shapes, new)


def of_given_sizes(
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    names: Sequence[str],
    dynamic_shapes: Any,
    runs: Callable[[Any], bool],
) -> Any:
    """Returns inputs like others, in which every size that is to vary is another one.

    Args:
        inputs: What a model is called with, by position and by keyword.
        names: The names of its parameters.
        dynamic_shapes: Which sizes vary, as for `convert`.
        runs: Whether the model takes inputs.

    Returns:
        The inputs; None if none is to vary.

    Raises:
        NotTranscribed: A size is to vary, and the model takes no other one.
        ConversionError: The sizes do not fit the inputs.
    """
    shapes, bounds = read_sizes(*inputs, list(names), dynamic_shapes)
    arrays = [x for x in fleaves(inputs) if hasattr(x, "shape")]
    sizes = {
        name: n
        for x, shape in zip(arrays, shapes, strict=True)
        for n, name in zip(x.shape, shape, strict=True)
        if isinstance(name, str) and name in bounds
    }
    others = {
        name: [m for m in (n + 1, 2 * n, n - 1) if (low or 1) <= m <= (high or m)]
        for name, (low, high) in bounds.items()
        for n in [sizes[name]]
    }
    new = _vary(inputs, shapes, sizes, others, runs)
    for name, size in new.items():
        if others[name] and size == sizes[name]:
            tried = ", ".join(map(str, others[name]))
            raise NotTranscribed(
                f"dynamic_shapes lets {name} vary, which is {size}, and the model takes none of "
                f"{tried} in its place"
            )
    return _resize(inputs, shapes, new) if new else None


def _vary(
    inputs: Any,
    shapes: Sequence[Shape],
    sizes: Mapping[str, int],
    others: Mapping[str, Sequence[int]],
    runs: Callable[[Any], bool],
) -> dict[str, int]:
    """Returns sizes of which each is the first of others that a model takes, or as it was."""
    new = dict(sizes)
    for name, candidates in others.items():
        for size in candidates:
            if runs(_resize(inputs, shapes, {**new, name: size})):
                new[name] = size
                break
    return new


def _resize(inputs: Any, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Any:
    rest = iter(shapes)

    def resize(x: Any) -> Any:
        if not hasattr(x, "shape"):
            return x
        for dim, name in enumerate(next(rest)):
            size: Any = size_of(name, sizes) if isinstance(name, str) else name
            if size != x.shape[dim]:
                x = x[(slice(None),) * dim + (np.arange(size) % x.shape[dim],)]
        return x

    return fmap(resize, inputs, cache=None)


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """Copies a tensor, and returns anything else as it is: a model may write into its inputs."""
    return x.clone() if isinstance(x, torch.Tensor) else x
