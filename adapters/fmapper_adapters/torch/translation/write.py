"""Writes programs for torch."""

from __future__ import annotations

import dataclasses

from fmapper import ConversionError, translation
from fmapper.programs import Program
from fmapper.translation import Source
from fmapper_adapters.torch.translation.dialect import TorchDialect
from fmapper_adapters.torch.translation.restate import restate


def write(program: Program) -> Source:
    """Returns a program that was recorded from JAX with its parts as a file for torch.

    What it does in training is written where its layers do that in torch, too; else what it does
    in evaluation alone.

    Raises:
        ConversionError: Something in it cannot be written.
    """
    if program.evaluation is None:
        return _write(program)
    try:
        return _write_training(program)
    except ConversionError:
        return _write(dataclasses.replace(
            program.evaluation, parameters=program.parameters, buffers=program.buffers
        ))  # fmt: skip


def _write_training(program: Program) -> Source:
    """Returns the file of a program for training, if all that differs there is in layers."""
    random = {name for name, kind in program.variable_types.items() if "Rng" in kind}
    buffers = {name: array for name, array in program.buffers.items() if name not in random}
    found = _write(dataclasses.replace(program, evaluation=None, buffers=buffers))
    if ".copy_(" in found.code.partition("def load_weights")[0]:
        raise ConversionError("it changes buffers otherwise than layers of torch do")
    return found


def _write(program: Program) -> Source:
    restated, functions = restate(program)
    return translation.write(restated, TorchDialect(functions))
