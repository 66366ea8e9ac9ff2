"""A model made of the source code that was written for it."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax

from fmapper.programs import Program
from fmapper.translation import Source, run_file
from fmapper_adapters.jax.libraries import ProgramArrays


def build(program: Program, source: Source) -> Any:
    """Returns the module that a file makes, with the arrays of its program."""
    module = run_file(source)
    model = module[source.name](key=jax.random.key(0))
    arrays = ProgramArrays(program)
    source.weights.keep_rest(arrays)
    return module["load_weights"](model, arrays)


def for_evaluation(model: Any) -> Any:
    """Returns a model whose layers and classes are in evaluation mode."""
    return eqx.nn.inference_mode(model)
