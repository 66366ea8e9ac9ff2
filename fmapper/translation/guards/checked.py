"""Conditions that layers check themselves, when they are called."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator, Mapping

from fmapper.programs.program import Guard
from fmapper.programs.sizes import size_of
from fmapper.translation.dialect import Dialect, Layer
from fmapper.translation.functions.forms import Form
from fmapper.translation.units import Structure

_SAMPLES, _LARGEST = 40, 4000


def not_checked(
    guards: Iterable[Guard],
    forms: Iterable[Form],
    dialect: Dialect,
    structure: Structure,
) -> list[Guard]:
    """Returns the conditions but those on the rows of a layer, which refuses others.

    After a view as `x.reshape(-1, 84)` rows are what the layer wants, whatever the sizes are.

    Args:
        guards: The conditions.
        forms: The forms of units, among which layers are.
        dialect: Says which layers take rows.
        structure: The program, and what is known of its values.
    """
    layers = (form.layer for form in forms if form.layer is not None)
    values, forced = structure.values, {*_rows_of_views(structure)}
    rows = {*_rows((one for one in layers if one.kind in dialect.takes_rows), values)}
    rows = {row for row in rows if row[0] not in forced}
    return [one for one in guards if not any(_is_same(one, *row) for row in rows)]


def _rows_of_views(structure: Structure) -> Iterator[str]:
    """Yields the last sizes of views whose code has a number there."""
    for call in structure.program.graph.walk():
        _, shape = structure.values.get(call.name, ("", ()))
        wanted = [one[-1:] for one in call.args if isinstance(one, list | tuple)]
        last = wanted[-1][0] if wanted and wanted[-1] else -1
        if isinstance(last, int) and last > 0 and shape and isinstance(shape[-1], str):
            yield shape[-1]


def _rows(
    layers: Iterable[Layer], values: Mapping[str, tuple[str, tuple[int | str, ...]]]
) -> Iterator[tuple[str, int]]:
    for layer in layers:
        size = values[layer.inputs[0]][1][-1] if values[layer.inputs[0]][1] else 0
        wanted = layer.made.args[0] if isinstance(layer.made, ast.Call) else None
        if isinstance(size, str) and isinstance(wanted, ast.Constant):
            yield size, int(wanted.value)  # type: ignore[arg-type]


def _is_same(guard: Guard, size: str, wanted: int) -> bool:
    """Returns whether an equality says that a size is a number.

    Both sides are then off in one proportion, whatever the sizes are.

    Examples:
        >>> _is_same(Guard("n*m - 2*n", "==", 5), "4*n*m - 8*n", 20)
        True
        >>> _is_same(Guard("n*m - 2*n", "==", 5), "4*n*m - 8*n", 24)
        False
    """
    if guard.relation != "==":
        return False
    names = sorted({*re.findall(r"[A-Za-z_]\w*", f"{guard.expression} {size}")})
    draw = random.Random(0)
    ratio: tuple[int, int] | None = None
    for _ in range(_SAMPLES):
        sizes = {name: draw.randrange(1, _LARGEST) for name in names}
        known, own = size_of(guard.expression, sizes), size_of(size, sizes)
        if known is None or own is None:
            return False
        off = known - guard.value, own - wanted
        ratio = ratio or off
        if 0 in off or off[0] * ratio[1] != off[1] * ratio[0]:
            return False
    return ratio is not None
