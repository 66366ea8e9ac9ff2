"""A model made of the source code that was written for it."""

from __future__ import annotations

from typing import Any

from flax import nnx

from fmapper import to_jax
from fmapper.programs import Program
from fmapper.translation import Source, run_file


def build(program: Program, source: Source) -> Any:
    """Returns the module that a file makes, with the arrays of its program."""
    module = run_file(source)
    model = module[source.name](rngs=nnx.Rngs(0))
    arrays = to_jax({**program.parameters, **program.buffers})
    module["load_weights"](model, arrays)
    if not program.starts_in_training:
        model.eval()
    return model
