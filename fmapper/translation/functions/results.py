"""Structures of results, with objects as records of the file; calls that do not need them all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmapper.programs.bind import names_of_arguments
from fmapper.programs.program import Part, Program, refs_in
from fmapper.programs.treespec import Other, Ref, TreeSpec
from fmapper.translation.code import identifier
from fmapper.translation.functions.forms import (
    Body,
    Form,
    Made,
    is_lost,
    kind_of_field,
    with_objects,
)

if TYPE_CHECKING:
    from fmapper.translation.units import Unit

Records = dict[str, dict[str, str]]


def results_of(program: Program, records: Records) -> Any:
    """Returns the structure of values that a program gives.

    Args:
        program: The program.
        records: Classes of the file -> their fields, and what those are if no array; is added to.
    """
    values = [
        value
        for value, output in zip(program.graph.outputs, program.outputs, strict=True)
        if output.kind == "user"
    ]
    return _unflatten(program.out_spec, iter(values), records)


def _unflatten(spec: TreeSpec, leaves: Iterator[Any], records: Records) -> Any:
    if spec.kind == "leaf":
        return next(leaves)
    children = [_unflatten(one, leaves, records) for one in spec.children]
    if spec.kind == "dict":
        return dict(zip(spec.keys, children, strict=True))
    if spec.kind != "record":
        return tuple(children)
    keys: tuple[str, ...] = ()
    for key in spec.keys:  # no field of a named tuple begins with an underscore
        keys = (*keys, identifier(str(key).lstrip("_") or "field", keys))
    return _make(spec.name, dict(zip(keys, children, strict=True)), records)


def _make(kind: str, held: dict[str, Any], records: Records) -> Made:
    """Returns an object of a class of the file, which is among its records then."""
    cls = identifier(re.sub(r"\W", "_", kind) or "Output")
    fields = {key: kind_of_field(one) for key, one in held.items()}
    if records.get(cls, fields) != fields:
        cls = identifier(cls, records)
    records[cls] = fields
    return Made(cls, held)


def with_given_objects(program: Program, part: Part, records: Records) -> Part:
    """Returns the call of a model with the objects that it is given, which parts do not note.

    Those without names for what they hold stay as they are.

    Args:
        program: The program.
        part: The call.
        records: As for `results_of`.
    """
    held = zip(program.graph.inputs, program.inputs, strict=True)
    given = [(value, one) for value, one in held if one.kind in ("user", "static")]
    leaves = iter([Ref(value) if one.kind == "user" else one.value for value, one in given])
    positional, keyword = program.in_spec.children
    names = [re.sub(r"\[(\d+)\]$", r"_\1", str(one)) for one in names_of_arguments(program)]
    arguments = dict(part.arguments)
    for name, spec in (
        *zip(names, positional.children, strict=True),
        *zip(keyword.keys, keyword.children, strict=True),
    ):
        whole = _unflatten_given(spec, leaves)
        if name in arguments:
            arguments[name] = _with_given(arguments[name], whole, records)
    return replace(part, arguments=arguments)


def _unflatten_given(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    """Returns the structure of an argument; objects without names for what they hold are none."""
    if spec.kind == "leaf":
        return next(leaves)
    children = [_unflatten_given(one, leaves) for one in spec.children]
    if spec.kind in ("tuple", "list"):
        return tuple(children)
    keys = [*map(str, spec.keys)]
    held = dict(zip(keys, children, strict=True))
    if spec.kind == "dict":
        return held
    is_named = all(key.isidentifier() and key[0] != "_" for key in keys)
    is_named = is_named and keys != [f"field{i}" for i in range(len(keys))]
    return Made(spec.name, held | dict(spec.fixed)) if is_named else None


def _with_given(noted: Any, whole: Any, records: Records) -> Any:
    """Returns an argument as it was noted, with the objects that it lacks."""
    if isinstance(noted, tuple) and isinstance(whole, tuple) and len(noted) == len(whole):
        pairs = zip(noted, whole, strict=True)
        return tuple(_with_given(one, inner, records) for one, inner in pairs)
    if isinstance(noted, Mapping) and isinstance(whole, Mapping):
        return {key: _with_given(one, whole.get(key), records) for key, one in noted.items()}
    is_lost = noted is None or isinstance(noted, Other)
    return _declare(whole, records) if is_lost and isinstance(whole, Made) else noted


def _declare(whole: Any, records: Records) -> Any:
    """Returns a structure of which the objects are of records of the file."""
    if isinstance(whole, tuple):
        return tuple(_declare(one, records) for one in whole)
    if not isinstance(whole, Mapping):
        return whole
    held = {key: _declare(one, records) for key, one in whole.items()}
    return _make(whole.cls, held, records) if isinstance(whole, Made) else held


def results_of_unit(unit: Unit, root: Unit, objects: Sequence[Made]) -> Any:
    """Returns the structure of values that a part gives, with what others read of it beside.

    Args:
        unit: The call of the part.
        root: That of the model.
        objects: Those that the model gives.
    """
    result = with_objects(unit.own_result(root), objects)
    told = set(refs_in((result,)))
    if told & {*unit.gives} and not is_lost(result):
        hidden = tuple(Ref(value) for value in unit.gives if value not in told)
        if not hidden:
            return result
        return (*(result if isinstance(result, tuple) else (result,)), *hidden)
    return Ref(unit.gives[0]) if len(unit.gives) == 1 else tuple(map(Ref, unit.gives))


def find_method(known: Sequence[tuple[str, Body]], form: Form) -> str | None:
    """Returns the method of a submodule that does what a call does; None where there is none yet.

    Args:
        known: The methods of the submodule.
        form: A call of it.
    """
    body = form.body
    assert body is not None
    for method, other in known:
        if other.parameters != body.parameters:
            continue
        if other.lines() == body.lines():
            other.shapes += body.shapes
            return method
    return None
