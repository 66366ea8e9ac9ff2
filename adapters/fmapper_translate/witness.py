"""Runs a file beside its recording: the functions that give something else than in the source."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from fmapper.verification.files.conditions import LIMITS
from fmapper_adapters.flax.translation.build import open_file
from fmapper_translate.expressions import NEW_NAMES
from fmapper_translate.functions import Function
from fmapper_translate.operations import NotTranscribed
from fmapper_translate.recording import Activation, Recording

_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Results = dict[Function, list[Any]]


def functions_that_differ(
    code: str,
    example: str,
    recording: Recording,
    weights: Mapping[str, Any],
    examples: Sequence[Sequence[Any]],
    options: Mapping[str, Any],
) -> dict[Function, str]:
    """Returns the functions whose results differ from the recorded ones, and none that they call.

    Each with the reason.

    Args:
        code: The file.
        example: The code that makes the model.
        recording: What the source did, at first in evaluation.
        weights: The arrays of the source by name.
        examples: What the model was called with, each time.
        options: What it was called with by keyword.
    """
    net = types.ModuleType("transcribed")
    sys.modules[net.__name__] = net  # where dataclasses look their names up
    space = vars(net)
    try:
        exec(f"{code}\n\ndef make_example(*, rngs):\n    return {example}", space)
    except Exception as error:  # the file is new code, which may raise anything
        raise NotTranscribed(f"the file cannot be loaded: {error}") from error
    results: Results = defaultdict(list)
    callers: dict[Function, set[Function]] = defaultdict(set)
    stack: list[Function] = []

    def watch(function: Function, target: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            if stack:
                callers[stack[-1]].add(function)
            at = len(results[function])
            results[function].append(None)
            stack.append(function)
            result = target(*args, **kwargs)
            stack.pop()
            results[function][at] = jax.tree.map(lambda leaf: leaf, result)  # as it is now
            return result

        return call

    for function in recording.functions:
        name = NEW_NAMES.get(function.name, function.name) if function.owner else function.name
        place = space if function.owner is None else space.get(function.owner.__name__)
        known = vars(place).get(name) if isinstance(place, type) else space.get(name)
        if function.owner is None and inspect.isfunction(known):
            space[name] = watch(function, known)
        elif isinstance(place, type) and inspect.isfunction(known) and name != "__init__":
            setattr(place, name, watch(function, known))
    trees = [jax.tree.structure((tuple(inputs), dict(options))) for inputs in examples]
    arrays = [
        [jnp.asarray(item.numpy()) if isinstance(item, torch.Tensor) else item for item in leaves]
        for leaves in (jax.tree.leaves((tuple(inputs), dict(options))) for inputs in examples)
    ]
    numbers = {name: value.numpy() for name, value in weights.items()}
    try:
        model, _ = open_file(net, "make_example", numbers, train=False)
    except Exception as error:
        raise NotTranscribed(f"the model of the file cannot be made: {error}") from error
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, compiler_options=_QUICKLY)
    def run(state: Any, given: list[Any]) -> list[Any]:
        rest = iter(given)
        net = nnx.merge(graph, state)
        for leaves, tree in zip(arrays, trees, strict=True):
            every = [next(rest) if _is_array(item) else item for item in leaves]
            args, kwargs = jax.tree.unflatten(tree, every)
            net(*args, **kwargs)
        return [item for item in jax.tree.leaves([*results.values()]) if _is_array(item)]

    for returned in results.values():
        returned.clear()  # what ran when the model was made
    try:
        computed = iter(run(state, [item for item in jax.tree.leaves(arrays) if _is_array(item)]))
    except Exception as error:  # the file is new code, which may raise anything
        if not stack:
            raise
        first = next(iter(str(error).splitlines()), "")
        return {stack[-1]: f"it does not run: {type(error).__name__}: {first}"}
    results = {
        function: jax.tree.map(
            lambda value: next(computed) if _is_array(value) else value, returned
        )
        for function, returned in results.items()
    }
    recorded: dict[Function, list[Activation]] = defaultdict(list)
    for activation in recording.activations[recording.made :]:
        recorded[activation.function].append(activation)
    wrong = {
        function
        for function, returned in results.items()
        for ours, theirs in zip(returned, recorded[function], strict=False)
        if not _agree(ours, theirs.snapshot)
    }
    return {
        function: "its statements give something else"
        for function in wrong
        if not callers[function] & wrong - {function}
    }


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _agree(ours: Any, theirs: Any) -> bool:
    """Returns whether arrays of a result are those of the other, as far as both are arrays."""
    if isinstance(theirs, tuple | list):
        same = isinstance(ours, tuple | list) and len(ours) == len(theirs)
        return same and all(map(_agree, ours, theirs))
    if isinstance(theirs, dict):
        ours = ours if isinstance(ours, dict) else vars(ours)
        return all(_agree(ours.get(name), value) for name, value in theirs.items())
    if not isinstance(theirs, torch.Tensor):
        return True
    if not isinstance(ours, jax.Array | np.ndarray | nnx.Variable) or ours.shape != theirs.shape:
        return False
    wanted = theirs.detach().numpy().astype(np.complex128)
    apart = np.abs(np.where(wanted == ours, 0, np.asarray(ours) - wanted)).max(initial=0)
    finite = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-6)
    return bool(apart <= LIMITS["outputs"] * finite)
