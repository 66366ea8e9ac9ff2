"""Computes with parameters that pack several arrays side by side, each sharded by itself.

Such a parameter is stored block by block (`PackedArray`), and so are results computed from it, up
to the calls that split it into the arrays: only these calls change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fmapper.meshes import Packing
from fmapper.programs import Call, Graph
from fmapper_adapters.jax.arrays.packed import PackedArray, in_order, interleave

Counts = tuple[int, ...]  # the number of blocks of the parameters of each packing; 1 for plain ones
_BLOCKS = ("fmapper::in_blocks", "fmapper::in_each_block")


def counts(packings: Sequence[Packing], params: Mapping[str, Any]) -> Counts:
    """Returns into how many blocks the parameters of each packing are divided."""

    def count(packing: Packing) -> int:
        layouts = {
            (array.count, array.dim % array.ndim == packed.dim, array.sizes == packed.sizes)
            for name, packed in packing.parameters.items()
            if isinstance(array := params[name], PackedArray)
        }
        blocks, *fits = layouts.pop() if len(layouts) == 1 else (1, False)
        return blocks if all(fits) else 1

    return tuple(map(count, packings))


def arrange(
    packings: Sequence[Packing], counts: Counts, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the parameters, packed ones in the given numbers of blocks."""
    new = dict(params)
    for packing, count in zip(packings, counts, strict=True):
        for name, packed in packing.parameters.items() if count > 1 else ():
            array = new[name]
            if isinstance(array, PackedArray):
                new[name] = array.flat()
            else:
                new[name] = interleave(array, packed.dim, packed.sizes, count)
    return {name: in_order(array) for name, array in new.items()}


def with_blocks(graph: Graph, packings: Sequence[Packing], counts: Counts) -> Graph:
    """Returns the graph with calls that split blocks instead of whole parameters."""
    pairs = zip(packings, counts, strict=True)
    cuts = {
        name: (cut.at, cut.sizes, count, cut.chosen)
        for packing, count in pairs
        if count > 1
        for name, cut in packing.cuts.items()
    }
    return _replace(graph, cuts) if cuts else graph


def _replace(graph: Graph, cuts: Mapping[str, tuple[Any, ...]]) -> Graph:
    def new(call: Call) -> Call:
        if call.name in cuts and call.op not in _BLOCKS:
            args = (call.args[0], *cuts[call.name])
            op = "fmapper::take_apart" if len(cuts[call.name][-1]) > 1 else "fmapper::take_part"
            return replace(call, op=op, args=args, kwargs={})
        if call.op not in _BLOCKS:
            return call
        inner = [_replace(arg, cuts) if isinstance(arg, Graph) else arg for arg in call.args]
        return replace(call, args=tuple(inner))

    return Graph(graph.inputs, [*map(new, graph.calls)], graph.outputs, graph.kinds)
