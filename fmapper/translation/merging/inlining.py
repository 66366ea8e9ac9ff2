"""Parts that have no class, since their callers read better with what they do."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fmapper.programs.program import Call
from fmapper.translation.code import expr, text
from fmapper.translation.functions.parameters import varies
from fmapper.translation.units import (
    Structure,
    Unit,
    dissolve,
    is_of_library,
    is_own,
    with_inner,
)

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect
    from fmapper.translation.functions.forms import Body

_SHAPING = {"flatten", "unflatten", "reshape", "view", "permute", "t"}


def inline_functions(
    structure: Structure, dialect: Dialect, forms: Container[int], sequences: Container[str]
) -> None:
    """Inlines units that are a single expression of one value, without arrays.

    And those of a library that are one layer and what says its shape, as `DenseGeneral`.

    Args:
        structure: The program.
        dialect: The target.
        forms: The units that are layers, by id.
        sequences: The paths of those that call their parts in order.
    """
    counts = Counter(unit.path for unit in structure.root.units())
    for unit in list(structure.root.units()):
        if id(unit) in forms or unit.parent is None or unit.parent.path in sequences:
            continue
        calls = [step for step in unit.steps if isinstance(step, Call)]
        if len(unit.gives) != 1 or len(calls) != len(unit.steps):
            continue
        is_layer = counts[unit.path] == 1 and _is_shaped_layer(structure, dialect, unit, calls)
        if is_layer or _is_expression(structure, unit, calls):
            unit.steps = [_move(call, unit) for call in calls]
            dissolve(unit)


def find_functions(
    bodies: Mapping[str, Sequence[tuple[str, Body]]], sequences: Container[str]
) -> dict[str, ast.expr]:
    """Returns the parts of sequences that are a single expression without arrays, as functions.

    Args:
        bodies: The paths of submodules -> the methods that they have.
        sequences: The paths of those that call their parts in order.
    """
    found: dict[str, ast.expr] = {}
    for path, methods in bodies.items():
        if path.rpartition(".")[0] not in sequences or not path or len(methods) != 1:
            continue
        body = methods[0][1]
        if len(body.statements) > 1 or body.layers or body.arrays:
            continue
        code, parameter = body.statements[0].node, body.parameters[0]
        if any(isinstance(one, ast.Name) and one.id == "self" for one in ast.walk(code)):
            continue
        found[path] = expr(f"lambda {parameter}: {{0}}", code)
        if isinstance(code, ast.Call) and [*map(text, [*code.args, *code.keywords])] == [parameter]:
            found[path] = code.func
    return found


def _is_expression(structure: Structure, unit: Unit, calls: list[Call]) -> bool:
    arrays = [value for value in unit.given if value in structure.inputs]
    is_small = len(calls) == len([*with_inner(calls)]) <= 3
    is_small &= sum(map(varies, unit.part.arguments.values())) <= 1
    return is_small and not any(is_own(structure, unit, value) for value in arrays)


def _is_shaped_layer(structure: Structure, dialect: Dialect, unit: Unit, calls: list[Call]) -> bool:
    """Returns whether a unit of a library is a layer with other shapes before or after it."""
    if not is_of_library(structure, unit):
        return False
    others = [call for call in calls if not dialect.layer_of_call(structure, unit, call)]
    names = {call.op.partition("::")[2] for call in others}
    return len(calls) == len(others) + 1 and names <= _SHAPING


def _move(call: Call, unit: Unit) -> Call:
    """Returns a call as one of the unit's caller."""
    return replace(call, source=unit.part.source or call.source, module=unit.part.parent)
