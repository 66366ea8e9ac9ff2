"""A model made of the source code that was written for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
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


def open_file(
    net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
) -> tuple[Any, dict[str, Any]]:
    """Returns the module of a file in a mode, and no options; see `Models.open_file`."""
    model: torch.nn.Module = getattr(net, name)()
    net.load_weights(model, {key: to_torch(x, copy=True) for key, x in weights.items()})
    return model.train(train), {}
