"""A model made of the source code that was written for it."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import to_torch
from fmapper.programs import Program
from fmapper.translation import Source, run_file, whole_arrays


def build(program: Program, source: Source) -> Any:
    """Returns the module that a file makes, with the arrays of its program."""
    module = run_file(source)
    model: Any = module[source.name]()
    module["load_weights"](model, whole_arrays(program, to_torch, torch.stack))
    model.train(program.starts_in_training)
    return model
