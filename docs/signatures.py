"""Gives each function of the reference one signature, with its options as keyword parameters.

Overloads tell a type checker what comes back; a reader wants what can be given.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

UNPACKED = re.compile(r"Unpack\[(\w+)\]")


class OneSignature(griffe.Extension):
    """Replaces overloads by the implementation, and `**options` by what typed dicts list."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Goes over a package once it is loaded."""
        self._visit(pkg)

    def _visit(self, parent: griffe.Module | griffe.Class) -> None:
        for member in parent.members.values():
            if member.is_alias:
                continue
            if isinstance(member, griffe.Module | griffe.Class):
                self._visit(member)
            elif isinstance(member, griffe.Function):
                self._merge(member, parent)

    def _merge(
        self, function: griffe.Function, parent: griffe.Module | griffe.Class
    ) -> None:
        given = [*function.parameters]
        given += [
            p
            for overload in function.overloads or ()
            for p in overload.parameters
        ]
        names = {
            match
            for p in given
            for match in UNPACKED.findall(str(p.annotation))
        }
        function.overloads = None
        rest = [
            p
            for p in function.parameters
            if p.kind is griffe.ParameterKind.var_keyword
        ]
        if not names or not rest:
            return
        variadic = rest[0].name
        del function.parameters[variadic]
        text = (parent if function.name == "__init__" else function).docstring
        if text:
            entry = rf"(?m)^    {variadic}:.*\n?(?:     +.*\n?)*"
            text.value = re.sub(entry, "", text.value)
        for name in sorted(names):
            for field, annotation in fields_of(parent, name).items():
                if field not in function.parameters:
                    function.parameters.add(keyword(field, annotation))


def fields_of(
    scope: griffe.Module | griffe.Class, name: str
) -> dict[str, str]:
    """Returns the fields of a typed dict and of those that it extends, with their types."""
    options = scope.modules_collection[scope.resolve(name)]
    fields: dict[str, str] = {}
    for base in options.bases:
        if str(base) != "TypedDict":
            fields |= fields_of(options.module, str(base))
    for attribute in options.attributes.values():
        fields[attribute.name] = re.sub(
            r"^Required\[(.*)\]$", r"\1", str(attribute.annotation)
        )
    return fields


def keyword(name: str, annotation: str) -> griffe.Parameter:
    """Returns a keyword parameter that can be left out."""
    switch = re.fullmatch(r"Literal\[(True|False)\]", annotation)
    return griffe.Parameter(
        name,
        annotation="bool" if switch else annotation,
        default="...",
        kind=griffe.ParameterKind.keyword_only,
    )
