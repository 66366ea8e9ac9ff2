"""Merges chains of transpositions, and of dimensions of size 1, into a single one."""

from __future__ import annotations

from typing import Any

from fmapper.programs import Call, Ref
from fmapper_adapters.torch.fuse.graph_index import MOVES
from fmapper_adapters.torch.fuse.rewriter import Rewriter


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Merges moves of dimensions that do not broadcast."""
    index = rewriter.index
    if call.op not in MOVES or getattr(index.call(call.args[0]), "op", "") not in MOVES:
        return None
    dtype, shape = call.result[0]
    source, at = index.origin(Ref(call.name))
    current = index.shape(source)
    large = [i for i, n in enumerate(current) if n != 1]
    if source in (call.args[0], Ref(call.name)) or sorted(at) != large:
        return None
    if sorted(at.values()) != [j for j, n in enumerate(shape) if n != 1]:
        return None
    order = sorted(large, key=lambda i: at[i])
    value = source
    if order != large:
        if len(large) != len(current):
            if current != tuple(shape[at[i]] if i in at else 1 for i in range(len(current))):
                return None
            rest = [i for i in range(len(current)) if i not in at]
            order = _weave(order, rest, at, shape)
        moved = tuple(current[i] for i in order)
        value = rewriter.call(
            "lax::transpose", value, permutation=tuple(order), shape=moved, dtype=dtype
        )
        current = moved
    if current == tuple(shape):
        return value
    return rewriter.call("lax::reshape", value, new_sizes=shape, shape=shape, dtype=dtype)


def _weave(order: list[int], rest: list[int], at: dict[int, int], shape: Any) -> list[int]:
    """Returns an order of all dimensions, with those of size 1 as in the result."""
    woven: list[int] = []
    left, large = list(rest), list(order)
    for n in shape:
        if n != 1 and large:
            woven.append(large.pop(0))
        elif left:
            woven.append(left.pop(0))
    return woven + left + large
