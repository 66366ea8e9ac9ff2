"""Rewrites copies of rows selected by a mask as selections between two arrays.

`x[mask] = y[mask]` has rows whose number depends on values, which requires fixed sizes and padding.
`torch.where(mask, y, x)` has the same values and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fmapper.programs import Call, Graph, Ref
from fmapper_adapters.torch.from_fx.size_facts import SizeFacts
from fmapper_adapters.torch.passes.static_sizes.row_by_row import plain_sizes

_PUT, _PICK = "aten::index_put.default", "aten::index.Tensor"
_CHECKS = ("sym::", "aten::sym_size", "aten::_assert_scalar", "aten::sym_constrain_range")


def choose_by_masks(graph: Graph, facts: SizeFacts) -> Graph:
    """Replaces copies of masked rows between arrays of one shape, and drops checks of their number.

    Args:
        graph: The graph, which is functional.
        facts: The shapes and dtypes of its arrays.
    """
    made = {call.name: call for call in graph.calls}
    copies = {call.name: call.args[2].name for call in graph.calls if _is_copy(call, made, facts)}
    if not copies:
        return graph
    calls = []
    for call in graph.calls:
        calls += _choose(call, made[copies[call.name]], facts) if call.name in copies else [call]
    for picked in copies.values():
        unused = {picked}
        for call in calls:
            if call.op.startswith(_CHECKS) and not unused.isdisjoint(call.refs()):
                unused.add(call.name)
        left = Graph((), [call for call in calls if call.name not in unused], graph.outputs)
        if unused.isdisjoint(left.uses()):
            calls = left.calls
    return replace(graph, calls=calls)


def _is_copy(put: Call, made: Mapping[str, Call], facts: SizeFacts) -> bool:
    """Returns whether a call writes rows selected by the same mask from an array of its shape."""
    if put.op != _PUT or any(put.args[3:]) or put.kwargs or not isinstance(put.args[2], Ref):
        return False
    x, indices, rows = put.args[:3]
    picked = made.get(rows.name)
    if picked is None or picked.op != _PICK or picked.args[1] != indices:
        return False
    *before, mask = indices
    if mask is None or any(index is not None for index in before):
        return False
    y = picked.args[0]
    is_alike = facts.dtypes[x.name] == facts.dtypes[y.name]
    is_alike = is_alike and facts.shapes[x.name] == facts.shapes[y.name]
    return is_alike and facts.dtypes[mask.name] == "bool"


def _choose(put: Call, picked: Call, facts: SizeFacts) -> list[Call]:
    """Returns the calls that choose between two arrays by a mask of the first dimensions."""
    x, (*before, mask) = put.args[:2]
    shape = plain_sizes(facts.shapes[mask.name])
    calls = []
    for at in range(len(facts.shapes[x.name]) - len(before) - len(shape)):
        shape = (*shape, 1)
        wider = replace(
            put,
            name=f"{put.name}_mask_{at}",
            op="aten::unsqueeze.default",
            args=(mask, -1),
            result=(("bool", shape),),
        )
        calls.append(wider)
        mask = Ref(wider.name)
    return [*calls, replace(put, op="aten::where.self", args=(mask, picked.args[0], x))]
