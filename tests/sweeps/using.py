"""What the uses of converted models share: inputs, programs under `jax.jit`, and distances."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from sweeps import sweeping

Found = dict[str, Any]
Arrays = dict[str, Any]

TOLERANCE = 1e-4  # of the largest element of an output
TIMES = 4  # how much more than torch's own rounding ours may be


class CannotError(Exception):
    """What is asked cannot be done by torch either."""


def arrays(tree: Any) -> Any:
    """Inputs as JAX arrays."""
    import torch

    import fmapper

    return fmapper.fmap(
        lambda x: fmapper.to_jax(x.detach().clone()) if torch.is_tensor(x) else x, tree
    )


def floating(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Inputs with other floating tensors."""
    import torch

    import fmapper

    return fmapper.fmap(
        lambda x: change(x) if torch.is_tensor(x) and x.is_floating_point() else x, tree
    )


def split(inputs: Arrays) -> tuple[list[Any], Callable[[list[Any]], Arrays]]:
    """The arrays among inputs, and what puts others in their places: `jax.jit` takes no strings."""
    import jax

    leaves, tree = jax.tree.flatten(inputs)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def joined(numbers: list[Any]) -> Arrays:
        given = [*leaves]
        for place, number in zip(places, numbers, strict=True):
            given[place] = number
        found: Arrays = jax.tree.unflatten(tree, given)
        return found

    return [leaves[i] for i in places], joined


def jitted(model: Any, inputs: Arrays, **options: Any) -> Any:
    """What a model gives under `jax.jit`, where it and its inputs are arguments."""
    numbers, joined = split(inputs)

    def run(model: Any, numbers: Any, options: Any) -> Any:
        return tuple(model.call((), joined(numbers), **options)[:2])

    return compiled(run, model)(model, numbers, options)


def compiled(function: Any, model: Any) -> Any:
    """A function of a converted model under `jax.jit`, unless sizes in it depend on values."""
    import jax

    return function if model._code.concrete else jax.jit(function)


def in_torch(model: Any, inputs: Arrays) -> Any:
    """What a module gives.

    Raises:
        CannotError: It gives an error.
    """
    import torch

    torch.manual_seed(3)
    try:
        with torch.no_grad():
            return model(**copy.deepcopy(inputs))
    except Exception as error:
        raise CannotError(sweeping.reason(error)) from error


def paired(got: Any, want: Any) -> Iterator[tuple[Any, Any]]:
    """Floating arrays beside the tensors that they should be; caches are left out."""
    import torch

    if torch.is_tensor(want):
        if want.is_floating_point():
            yield got, want
    elif isinstance(want, dict):
        for key, value in want.items():
            yield from paired(got[key], value)
    elif isinstance(want, list | tuple):
        for one, value in zip(got, want, strict=True):
            yield from paired(one, value)


def wide(array: Any) -> Any:
    """A tensor or an array in NumPy's float64."""
    import numpy as np
    import torch

    if torch.is_tensor(array):
        return array.detach().double().numpy()
    return np.asarray(array).astype(np.float64)


def distance(a: Any, b: Any) -> float:
    """The largest difference of finite elements; infinite where others are not finite."""
    import numpy as np

    a, b = wide(a), wide(b)
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    plain = np.isfinite(b) & (np.abs(b) < 1e30)  # the fill of masks would hide everything else
    return float(np.abs(a[plain] - b[plain]).max(initial=0))


def largest(array: Any) -> float:
    import numpy as np

    array = wide(array)
    plain = np.isfinite(array) & (np.abs(array) < 1e30)
    return float(np.abs(array[plain]).max(initial=0))
