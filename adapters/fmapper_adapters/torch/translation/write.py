"""Writes programs for torch."""

from __future__ import annotations

import dataclasses

from fmapper import translation
from fmapper.programs import Program
from fmapper.translation import Source
from fmapper_adapters.torch.translation.dialect import TorchDialect
from fmapper_adapters.torch.translation.restate import restate


def write(program: Program) -> Source:
    """Returns a program that was recorded from JAX with its parts as a file for torch.

    Raises:
        ConversionError: Something in it cannot be written.
    """
    if program.evaluation is not None:
        program = dataclasses.replace(
            program.evaluation, parameters=program.parameters, buffers=program.buffers
        )
    restated, functions = restate(program)
    return translation.write(restated, TorchDialect(functions))
