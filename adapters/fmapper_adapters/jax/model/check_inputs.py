"""Checks the leaves of a call against the inputs of a program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ProgramInputError
from fmapper.programs import Input, Program
from fmapper_adapters.jax.aten import types
from fmapper_adapters.jax.model import narrow_ints
from fmapper_adapters.jax.model.static_program import StaticProgram


def check(code: StaticProgram, leaves: list[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Checks leaves against the program's inputs; returns the arrays and numbers.

    Raises:
        ProgramInputError: The program was recorded for other inputs; the message names the input.
    """
    arrays: list[Any] = []
    numbers: list[Any] = []
    sizes: dict[str, Any] = {}
    for spec, path, leaf in zip(code.users, code.paths, leaves, strict=True):
        where = f"{code.program.name}: {path}"
        if spec.kind == "static":
            if not spec.accepts(leaf):
                raise ProgramInputError(
                    f"{where} is {leaf!r}, but the program was recorded for {spec.value!r}. "
                    "Convert the model with the new value."
                )
        elif spec.is_array():
            arrays.append(_checked_array(code.program, spec, where, leaf, sizes))
        else:
            numbers.append(_checked_number(code.program, spec, where, leaf, sizes))
    problem = code.program.size_problem(sizes)
    if problem:
        raise ProgramInputError(
            f"{code.program.name}: the inputs are inconsistent: {code.program.name_sizes(problem)}"
        )
    return arrays, tuple(numbers)


def _checked_array(
    program: Program, spec: Input, where: str, leaf: Any, sizes: dict[str, Any]
) -> Any:
    if isinstance(leaf, bool | int | float | complex) and not spec.shape:
        leaf = jnp.asarray(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise ProgramInputError(
            f"{where}: expected a JAX or NumPy array, got {type(leaf).__name__}; "
            "convert it with fmapper.to_jax"
        )
    if types.category(leaf.dtype) != types.category(types.dtype_of(spec.dtype)):
        raise ProgramInputError(
            f"{where}: expected an array of {spec.dtype}, got {leaf.dtype.name}"
        )
    problem = program.shape_problem(spec.shape, leaf.shape, sizes)
    if problem:
        raise ProgramInputError(f"{where}: {program.name_sizes(problem)}")
    return narrow_ints.narrow(leaf, where)


def _checked_number(
    program: Program, spec: Input, where: str, leaf: Any, sizes: dict[str, Any]
) -> Any:
    if type(leaf).__name__ != spec.dtype:
        raise ProgramInputError(
            f"{where}: expected a Python {spec.dtype}, got {type(leaf).__name__}"
        )
    problem = program.shape_problem((str(spec.value),), (leaf,), sizes)
    if problem:
        raise ProgramInputError(f"{where}: {program.name_sizes(problem)}")
    return leaf
