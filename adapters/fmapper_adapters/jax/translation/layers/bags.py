"""Bags of rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array
from fmapper_adapters.jax.translation.layers.site import keywords

_MODES = ("sum", "mean")


def bag(structure: Structure, unit: Unit, calls: Sequence[Call]) -> Layer | None:
    """Returns a layer that adds or averages the rows of each bag, for bags of equal size."""
    found = [call for call in calls if call.op == "aten::embedding_bag.padding_idx"]
    if len(found) != 1 or len(calls) != 4 or len(unit.gives) != 1:
        return None
    (call,) = found
    made = {one.name: one for one in calls}
    weight, flat, offsets, by_count, mode, _, weights, has_last, padding = call.args
    view, starts, result = made.get(flat.name), made.get(offsets.name), made[unit.gives[0]]
    is_first = result.op == "sym::getitem" and result.args == (Ref(call.name), 0)
    if view is None or starts is None or not is_first or by_count or weights or has_last:
        return None
    local = local_array(structure, unit, weight.name)
    if local is None or mode >= len(_MODES) or not _are_whole(structure, view, starts):
        return None
    dtype, (count, features) = structure.values[weight.name]
    options = f"mode={_MODES[mode]!r}, " + ("" if padding is None else f"padding_idx={padding}, ")
    code = expr(f"EmbeddingBag({count}, {features}, {options}{keywords(dtype)}rngs=rngs)")
    arrays: dict[str, Any] = {weight.name: ("embedding", None)}
    return Layer(code, (view.args[0].name,), unit.gives[0], arrays, "EmbeddingBag", "embed")


def _are_whole(structure: Structure, view: Call, starts: Call) -> bool:
    """Returns whether the bags are the rows of a matrix, which was flattened."""
    is_flat = len(structure.values[view.name][1]) == 1
    if not is_flat or not view.op.startswith(("aten::view.", "aten::reshape.")):
        return False
    shape = tuple(map(str, structure.values[view.args[0].name][1]))
    if starts.op != "aten::arange.start_step" or len(shape) != 2 or starts.args[0] != 0:
        return False
    end, step = (
        structure.sizes.get(one.name, "") if isinstance(one, Ref) else str(one)
        for one in (*starts.args[1:3], 1)[:2]  # without a step, bags have one index
    )
    rows, columns = shape
    whole = {f"({rows})*({columns})", f"({columns})*({rows})"}
    if rows.isdigit() and columns.isdigit():
        whole = {str(int(rows) * int(columns))}
    return step == columns and end in whole
