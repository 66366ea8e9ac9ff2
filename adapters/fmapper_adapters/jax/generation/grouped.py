"""Attention of a single token whose heads share keys and values, without repeating these.

Models repeat keys and values for each head of the queries: the whole cache, at every step. For a
single token, the heads of a group are equivalent to several queries of one head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fmapper.programs import Call, Graph, Program, Ref
from fmapper_adapters.jax.model.static_program import StaticProgram

_ATTENTION = "aten::scaled_dot_product_attention.default"


def group(program: Program) -> Program:
    """Rewrites a program so that the heads of a group are queries of one head."""
    calls = {call.name: call for call in program.graph.calls}
    grouped: list[Call] = []
    for call in program.graph.calls:
        shared = _find_shared(call, calls)
        if shared is None:
            grouped.append(call)
            continue
        keys, values, shape = shared
        (dtype, whole), queries = call.result[0], f"{call.name}_grouped"
        args = (Ref(queries), Ref(keys), Ref(values), *call.args[3:])
        kind = ((dtype, (*shape, whole[-1])),)
        view = "aten::view.default"
        before = Call(queries, view, (call.args[0], (*shape, _width(call, calls))), {})
        inner = dataclasses.replace(call, name=f"{call.name}_of_groups", args=args, result=kind)
        after = dataclasses.replace(call, op=view, args=(Ref(inner.name), whole), kwargs={})
        grouped += [
            dataclasses.replace(before, module=call.module, source=call.source),
            inner,
            after,
        ]
    graph = Graph(program.graph.inputs, grouped, program.graph.outputs, program.graph.kinds)
    return dataclasses.replace(program, graph=graph.without_dead_calls(_is_kept))


def code(original: StaticProgram) -> StaticProgram:
    """Returns code that runs a program with grouped heads."""
    return StaticProgram(group(original.program), original.lowerings, original.constants)


def _is_kept(call: Call) -> bool:
    return not call.op.startswith(("aten::view", "aten::expand", "aten::unsqueeze"))


def _width(call: Call, calls: dict[str, Call]) -> Any:
    """Returns the width of a head of the queries."""
    return calls[call.args[0].name].result[0][1][-1]


def _find_shared(call: Call, calls: dict[str, Call]) -> tuple[str, str, tuple[int, ...]] | None:
    """Returns the keys and values that heads share, and rows, groups and heads in a group."""
    if call.op != _ATTENTION or len(call.args) > 4 or call.kwargs.get("is_causal"):
        return None
    if not set(call.kwargs) <= {"scale", "is_causal", "dropout_p", "attn_mask"}:
        return None
    queries = calls.get(getattr(call.args[0], "name", ""))
    pair = [_find_repeat(operand, calls) for operand in call.args[1:3]]
    if queries is None or pair[0] is None or pair[1] is None:
        return None
    shape, mask = queries.result[0][1], call.kwargs.get("attn_mask", (*call.args, None)[3])
    if len(shape) != 4 or shape[2] != 1 or pair[0][1] != pair[1][1]:
        return None
    rows, groups, heads = pair[0][1]
    if (shape[0], shape[1]) != (rows, groups * heads) or not _is_of_all_heads(mask, calls):
        return None
    return pair[0][0], pair[1][0], (rows, groups, heads)


def _is_of_all_heads(mask: Any, calls: dict[str, Call]) -> bool:
    if mask is None:
        return True
    made = calls.get(getattr(mask, "name", ""))
    return made is not None and len(made.result[0][1]) == 4 and made.result[0][1][1:3] == (1, 1)


def _find_repeat(value: Any, calls: dict[str, Call]) -> tuple[str, tuple[int, ...]] | None:
    """Recognises `view(expand(unsqueeze(x, 2)))`; returns x and how often it is repeated."""
    ops = ("aten::view.default", "aten::expand.default", "aten::unsqueeze.default")
    shapes: list[Any] = []
    for op in ops:
        call = calls.get(getattr(value, "name", ""))
        if call is None or call.op != op:
            return None
        shapes.append(call.result[0][1])
        value = call.args[0]
    whole, repeated, single = shapes
    if len(repeated) != 5 or single[2] != 1 or any(type(s) is not int for s in repeated):
        return None
    rows, groups, heads = repeated[:3]
    if single != (rows, groups, 1, *repeated[3:]) or whole != (rows, groups * heads, *repeated[3:]):
        return None
    return (value.name, (rows, groups, heads)) if isinstance(value, Ref) else None
