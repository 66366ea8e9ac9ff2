"""Runs a file for PyTorch beside its recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from fmapper import to_torch
from fmapper_translate.functions import Function
from fmapper_translate.recording import Recording
from fmapper_translate.torch.expressions import NEW_NAMES
from fmapper_translate.torch.tables import is_random
from fmapper_translate.walk import witness as walk


def functions_that_differ(
    code: str,
    example: str,
    recording: Recording,
    weights: Mapping[str, Any],
    examples: Sequence[Sequence[Any]],
    options: Mapping[str, Any],
) -> dict[Function, str]:
    """Returns the functions whose results differ from the recorded ones, and none that they call.

    Each with the reason; see `fmapper_translate.witness`.
    """
    space = walk.run_file(code, f"def make_example():\n    return {example}")
    watch = walk.Watch(space, recording, NEW_NAMES, _keep)
    try:
        model = space["make_example"]()
        space["load_weights"](model, {n: to_torch(x, copy=True) for n, x in weights.items()})
        watch.begin()
        with torch.no_grad():
            for inputs in examples:
                args, kwargs = _to_torch((tuple(inputs), dict(options)))
                model.eval()(*args, **kwargs)
    except Exception as error:  # the file is new code, which may raise anything
        return watch.failure(error)
    return watch.compare(_numbers)


def _to_torch(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: torch.from_numpy(np.array(x)) if isinstance(x, jax.Array | np.ndarray) else x,
        tree,
    )


def _keep(result: Any) -> Any:
    return jax.tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, result)


def _numbers(value: Any) -> Any:
    if isinstance(value, nnx.Variable):
        value = value.get_raw_value()
    if isinstance(value, torch.Tensor):
        try:
            return value.detach().numpy()
        except RuntimeError:  # within a `vmap`
            return value
    is_known = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return np.asarray(value) if is_known and not is_random(value) else value
