"""Models of half precision, whose files are those of single precision and cast."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import torch
from torch import nn

from fmapper import fleaves, to_numpy
from fmapper.verification.arrays import HALVES, dtype_of
from fmapper_adapters.torch.record.modes import mode
from fmapper_adapters.torch.record.patches.restore import restore_after
from fmapper_translate.targets import Target
from fmapper_translate.walk.errors import NotTranscribed
from fmapper_translate.walk.witness import run_file


def half_of(model: nn.Module) -> str:
    """Returns the half precision of all arrays of a model; empty if none is of half precision.

    Raises:
        NotTranscribed: Some are, and others are not.
    """
    every = itertools.chain(model.named_parameters(), model.named_buffers())
    names = {dtype_of(x): name for name, x in every if x.is_floating_point()}
    half = next((dtype for dtype in names if dtype in HALVES), "")
    if half and len(names) > 1:
        other = next(dtype for dtype in names if dtype != half)
        raise NotTranscribed(
            f"{names[half]} is of {half} and {names[other]} of {other}; a file has one dtype"
        )
    return half


def check_dtypes(
    code: str,
    maker: str,
    target: Target,
    weights: Mapping[str, Any],
    model: nn.Module,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> None:
    """Checks that a file gives arrays of the dtypes of its model.

    Raises:
        NotTranscribed: It does not.
    """
    run_file(code)
    numbers = {name: to_numpy(x) for name, x in weights.items()}
    arrays, make = target.open(sys.modules["transcribed"], maker, numbers)
    leaves, tree = jax.tree.flatten(example)
    shape: Any = jax.ShapeDtypeStruct  # untyped in JAX
    shapes = [shape(x.shape, dtype_of(x)) for x in leaves if isinstance(x, torch.Tensor)]

    def run(arrays: Any, given: list[Any]) -> list[Any]:
        rest = iter(given)
        every = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(tree, every)
        return [x for x in jax.tree.leaves(make(arrays)(*args, **kwargs)) if hasattr(x, "dtype")]

    ours = [str(x.dtype) for x in jax.eval_shape(run, arrays, shapes)]
    args, kwargs = example
    with mode(model, train=False), restore_after(model), torch.no_grad():
        results = fleaves(model(*args, **kwargs))
    theirs = [dtype_of(x) for x in results if isinstance(x, torch.Tensor)]
    pairs = zip(ours, theirs, strict=False)
    if wrong := next(((a, b) for a, b in pairs if a != b and b.startswith(("float", "bf"))), None):
        raise NotTranscribed("the file gives {} where the model gives {}".format(*wrong))
