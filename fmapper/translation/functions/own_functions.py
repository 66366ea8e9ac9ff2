"""The functions of a model's own code that it calls at several places, as the file has them."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmapper.programs.program import Call, Part, refs_in
from fmapper.programs.reading.own_functions import (
    LONG,
    count_computing,
    line_of_result,
)
from fmapper.programs.reading.statements import pick
from fmapper.programs.treespec import Size
from fmapper.translation.functions.forms import Body, Form
from fmapper.translation.functions.parameters import varies
from fmapper.translation.functions.shapes import combine, comment
from fmapper.translation.known_numbers import restate_lines
from fmapper.translation.statements.general_sizes import UNKNOWN, Row, content_of, general
from fmapper.translation.statements.origins import with_comments
from fmapper.translation.units import Structure, Unit, dissolve

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect

Write = Callable[[Structure, Unit], Form]
Spot = tuple[str, str, str]  # a call: the submodule, the function, and the line

_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript, ast.Compare)
_FEWEST = 3  # operations in a function of one statement


def write_functions(
    structure: Structure, forms: dict[int, Form], dialect: Dialect, write: Write
) -> None:
    """Writes the functions that are called at several places; the others are their callers' code.

    Args:
        structure: The program.
        forms: How units are called; those of the functions are added.
        dialect: The target, which gets the functions.
        write: Returns the form of a function in a program.
    """
    taken = {name for part in structure.program.parts for name in part.arguments}
    left = [*structure.root.functions()]
    while left:
        inner = [unit for unit in left if not {*unit.functions()} & {*left}]
        left = [unit for unit in left if unit not in inner]
        groups: dict[Any, list[Unit]] = {}
        for unit in inner:
            groups.setdefault(content_of(structure, unit, forms), []).append(unit)
        found = [(group, _forms(structure, group, forms, write)) for group in groups.values()]
        inlined = {_spot(unit)[1:] for group, made in found if not made for unit in group}
        for group, made in found:
            if inlined & {_spot(unit)[1:] for unit in group}:  # as what other objects do there
                for unit in group:
                    _inline(structure, unit)
                continue
            body = made[0].body
            assert body is not None
            name = _add(group[0].part.function, body, dialect, taken)
            for unit, form in zip(group, made, strict=True):
                forms[id(unit)] = replace(form, function=name)


def _forms(
    structure: Structure, units: Sequence[Unit], forms: Mapping[int, Form], write: Write
) -> list[Form]:
    """Returns the forms of calls of one function; none where they are better inlined."""
    is_several = len({_place(unit) for unit in units}) > 1
    is_long = len(units) == 1 and count_computing(units[0].calls()) >= LONG
    found = general(structure, units, forms) if is_several or is_long else None
    if found is None:
        return []
    wider, unit, names = found
    unit.part = _with_plain_arguments(unit.part)
    form = write(wider, unit)
    keys = [*unit.part.arguments]
    if not _pays(form):
        return []
    return [_form_of(form, one, keys, names, at) for at, one in enumerate(units)]


def _with_plain_arguments(part: Part) -> Part:
    """Returns a call that is given by position what may be other values each time."""
    given = {key: one for key, one in part.arguments.items() if varies(one)}
    return replace(part, arguments=given, prefix=len(given), positional=len(given), masks={})


def _pays(form: Form) -> bool:
    """Returns whether a function is worth its place, and needs nothing of an object."""
    body = form.body
    assert body is not None
    needs = (body.arrays, body.constants, body.holds, body.layers, body.written, body.randoms)
    sizes = [str(one.structure.expression) for one in form.arguments if one.kind == "size"]
    is_told = not any(UNKNOWN in size for size in sizes)
    if any(needs) or not is_told or any(one.is_fixed for one in form.arguments):
        return False
    nodes = [node for one in body.walk() for node in ast.walk(one.node)]
    return len(body.statements) > 1 or sum(isinstance(one, _OPERATIONS) for one in nodes) >= _FEWEST


def _form_of(
    form: Form, unit: Unit, keys: Sequence[str], names: Mapping[str, Row], at: int
) -> Form:
    """Returns how a call gives a function its arguments.

    Args:
        form: How the function is written, for the first call.
        unit: The call.
        keys: The arguments that the function takes.
        names: Names of sizes -> what they are in each call.
        at: Which call it is.
    """
    arguments = []
    for one in form.arguments:
        if one.at < len(keys):
            structure = unit.part.arguments[keys[one.at]]
        else:  # a size that it is given beside
            size = names.get(one.structure.expression, (one.structure.expression,) * (at + 1))[at]
            structure = Size(size) if isinstance(size, str) else size
        arguments.append(replace(one, structure=structure))
    given = tuple((one.name, one.structure) for one in arguments if one.kind == "used")
    return replace(form, given=given, arguments=tuple(arguments), returns=unit.part.result)


def _place(unit: Unit) -> tuple[str, int]:
    """Returns where a function is called: the line, and which of its calls there."""
    assert unit.parent is not None
    others = [one for one in unit.parent.steps if isinstance(one, Unit) and one.is_function]
    same = [one for one in others if one.part.source == unit.part.source]
    return unit.part.source, same.index(unit)


def _spot(unit: Unit) -> Spot:
    return unit.path, unit.part.function or unit.part.method, unit.part.source


def _own_calls(structure: Structure) -> list[Unit]:
    """Returns the calls of functions, and of methods of the submodules that call them."""
    methods = (one for one in structure.root.units() if one.parent and one.part.method)
    own = [one for one in methods if one.parent and one.parent.path == one.path]
    return [*structure.root.functions(), *own]


def spots_of(structure: Structure, forms: Mapping[int, Form]) -> dict[Spot, str]:
    """Maps where a program calls such functions and methods to what the file calls them."""
    return {_spot(unit): forms[id(unit)].function for unit in _own_calls(structure)}


def inline_others(structure: Structure, spots: Collection[Spot] | None) -> None:
    """Makes the code of such functions and methods that of their callers, but at some spots."""
    if spots is None:
        return
    for unit in _own_calls(structure):
        if _spot(unit) not in spots:
            _inline(structure, unit)


def _add(title: str, body: Body, dialect: Dialect, taken: set[str]) -> str:
    """Adds a function to the file, and returns its name."""
    statements = body.lines()
    restate_lines(statements, body.comments, dialect.limit)
    lines = comment(combine(body.shapes), statements)
    for line in statements:
        lines += with_comments(line, body.comments)
    inner = textwrap.indent("\n".join(lines), "    ")

    def code(name: str) -> str:
        return f"def {name}({', '.join(body.parameters)}):\n{inner}"

    return dialect.add_function(title, code, taken)


def _inline(structure: Structure, unit: Unit) -> None:
    """Makes the statements of a function those of its caller."""
    lines, part = structure.program.lines, unit.part
    told = {*refs_in((part.result,))}
    results = [one for one in unit.steps if isinstance(one, Call) and one.name in told]

    def line_of(step: Call) -> str:
        several = [one for one in results if one.source == step.source]
        value = several[0].name if len(several) == 1 else step.name
        named = line_of_result(value, part, part.source, lines)
        place, _, at = named.partition("#")
        if at:
            lines[named] = pick(lines[place], int(at))
        is_variable = not lines.get(step.source, "return").startswith("return")
        return named or (step.source if is_variable else part.source or step.source)

    unit.steps = [
        replace(step, source=line_of(step), module=part.parent) if isinstance(step, Call) else step
        for step in unit.steps
    ]
    dissolve(unit)
