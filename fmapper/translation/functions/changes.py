"""Checks that the generated code makes all changes of buffers that the program makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fmapper.errors import ConversionError
from fmapper.programs.program import refs_in
from fmapper.translation.functions.forms import Body, Form
from fmapper.translation.units import Structure


def refuse_lost(
    structure: Structure,
    forms: Mapping[int, Form],
    bodies: Mapping[str, Iterable[tuple[str, Body]]],
    owners: Mapping[str, Any],
) -> None:
    """Raises for changes of buffers that are missing from the generated code.

    Raises:
        ConversionError: There is one, or a parameter that changes; names it.
    """
    program = structure.program
    written = {target for group in bodies.values() for _, body in group for target in body.written}
    layers = tuple(
        f"{unit.path}."
        for unit in structure.root.units()
        if (form := forms.get(id(unit))) is not None and form.layer is not None
    )
    drops = {
        drop
        for group in bodies.values()
        for _, body in group
        for layer in body.layers.values()
        for drop in layer.drops
    }
    for value, output in zip(program.graph.outputs, program.outputs, strict=True):
        target = str(output.target)
        known = target in written or target in owners or target.startswith(layers)
        if output.kind == "parameter":
            raise ConversionError(
                f"a call changes the parameter {target}, which cannot be translated"
            )
        if output.kind == "buffer" and not known and not {*refs_in((value,))} & drops:
            raise ConversionError(
                f"a call changes {target} from outside the submodule that computes the new "
                "value, which cannot be translated yet"
            )
