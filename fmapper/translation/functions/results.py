"""The structure of what a program gives, with the objects in it as records of the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fmapper.programs.program import Program
from fmapper.programs.treespec import TreeSpec
from fmapper.translation.code import identifier
from fmapper.translation.functions.forms import Made, kind_of_field

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
    cls = identifier(re.sub(r"\W", "_", spec.name) or "Output")
    fields = dict(zip(keys, map(kind_of_field, children), strict=True))
    if records.get(cls, fields) != fields:
        cls = identifier(cls, records)
    records[cls] = fields
    return Made(cls, dict(zip(keys, children, strict=True)))
