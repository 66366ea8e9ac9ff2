"""Runs a file beside its recording: the functions that give something else than in the source."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import get_opaque_trace_state

from fmapper_translate.expressions import NEW_NAMES
from fmapper_translate.functions import Function
from fmapper_translate.printing import rows
from fmapper_translate.recording import Recording
from fmapper_translate.targets import Target
from fmapper_translate.walk.witness import UNSEEN, Watch, run_file

_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def functions_that_differ(
    code: str,
    example: str,
    recording: Recording,
    target: Target,
    weights: Mapping[str, Any],
    examples: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
) -> dict[Function, str]:
    """Returns the functions whose results differ from the recorded ones, and none that they call.

    Each with the reason.

    Args:
        code: The file.
        example: The code that makes the model.
        recording: What the source did, at first in evaluation.
        target: The framework of the file.
        weights: The arrays of the source by name.
        examples: What the model was called with, each time, by position and by keyword.
    """
    space = run_file(
        code.replace(rows.READ, rows.READ_BY_WITNESS),
        f"def make_example(*, {target.random}):\n    return {example}",
    )
    trace: list[Any] = []
    state_of_trace: Any = get_opaque_trace_state

    def keep(result: Any) -> Any:
        is_here = trace == [state_of_trace()]
        return jax.tree.map(lambda x: x, result) if is_here else UNSEEN

    watch = Watch(space, recording, NEW_NAMES, keep)
    given = [(tuple(inputs), dict(options)) for inputs, options in examples]
    trees = [*map(jax.tree.structure, given)]
    arrays = [
        [jnp.asarray(item.numpy()) if isinstance(item, torch.Tensor) else item for item in leaves]
        for leaves in map(jax.tree.leaves, given)
    ]
    numbers = {name: value.numpy() for name, value in weights.items()}
    try:
        state, make = target.open(sys.modules["transcribed"], "make_example", numbers)
    except Exception as error:
        return watch.failure(error)

    @functools.partial(jax.jit, compiler_options=_QUICKLY)
    def run(state: Any, given: list[Any]) -> list[Any]:
        trace[:] = [state_of_trace()]
        rest = iter(given)
        net = make(state)
        for leaves, tree in zip(arrays, trees, strict=True):
            every = [next(rest) if _is_array(item) else item for item in leaves]
            args, kwargs = jax.tree.unflatten(tree, every)
            net(*args, **kwargs)
        return [item for item in jax.tree.leaves([*watch.results.values()]) if _is_array(item)]

    watch.begin()
    try:
        computed = iter(run(state, [item for item in jax.tree.leaves(arrays) if _is_array(item)]))
    except Exception as error:  # the file is new code, which may raise anything
        return watch.failure(error)
    watch.results = {
        function: jax.tree.map(
            lambda value: next(computed) if _is_array(value) else value, returned
        )
        for function, returned in watch.results.items()
    }
    return watch.compare(_numbers, has_rows=bool(rows.Places(recording)))


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    return np.asarray(value) if hasattr(value, "__jax_array__") or _is_array(value) else value
