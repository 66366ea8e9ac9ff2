"""A model made of the source code that was written for it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fmapper import to_torch
from fmapper.programs import Program
from fmapper.translation import Source, run_file, whole_arrays


def build(program: Program, source: Source) -> Any:
    """Returns the module that a file makes, with the arrays of its program."""
    module = run_file(source)
    model: Any = module[source.name]()
    arrays = whole_arrays(program, to_torch, torch.stack)
    source.weights.keep_rest(arrays)  # such as generators, which a file for evaluation lacks
    rest = source.weights.rest
    module["load_weights"](model, {n: x for n, x in arrays.items() if n not in rest})
    names = program.source_names
    source.weights = source.weights.rename(lambda name: names.get(name, name))
    model.train(program.starts_in_training and not source.lacks_training)
    return model


def outcome(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
) -> Callable[..., tuple[list[Any], dict[str, Any]]] | None:
    """Prepares a call of a converted model; see `Models.outcome`.

    A module of classes that were written for it is called in training where it has that, and draws
    no random numbers there, which are others than those of its source.
    """
    written = getattr(sys.modules.get(type(model).__module__), "__fmapper_source__", None)
    if written is not None:
        if train and (written.lacks_training or _draws(model, args, kwargs)):
            return None
        return lambda off, **_: (_outputs(model, args, kwargs, train=train), {})
    run = getattr(model, "outcome", None)
    if run is None or not hasattr(model, "as_program"):
        return None
    return lambda off, **_: run(args, kwargs, train=train)


def options_of(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of its source, of which such a module takes no others.

    It has no keys for layers that draw by themselves, and no flags for modes.
    """
    if not hasattr(sys.modules.get(type(model).__module__), "__fmapper_source__"):
        return dict(kwargs)
    known = inspect.signature(model.forward).parameters
    options = dict(kwargs)
    for name, several in kwargs.items():  # such as Linen's keys, each an argument of the file
        if isinstance(several, Mapping):
            options |= {f"{name}_{key}": value for key, value in several.items()}
    return {key: value for key, value in options.items() if key in known}


def _draws(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether such a module draws random numbers in training."""
    with torch.random.fork_rng(devices=()):
        state = torch.get_rng_state()
        _outputs(model, args, kwargs, train=True)
        return not torch.equal(state, torch.get_rng_state())


def _outputs(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
) -> list[Any]:
    """Returns the outputs of such a module, in the order of its source."""
    given = options_of(model, kwargs)
    was_training = model.training
    held = {name: array.clone() for name, array in model.named_buffers()}
    model.train(train)
    try:
        with torch.no_grad():
            return _leaves(model(*args, **given))
    finally:
        model.train(was_training)
        with torch.no_grad():
            for name, array in model.named_buffers():
                array.copy_(held[name])


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # as JAX has flattened it
        value = [value[key] for key in sorted(value)]
    if isinstance(value, tuple | list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [] if value is None else [value]
