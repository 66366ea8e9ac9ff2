"""Sources of rows whose number depends on values: each is padded to its largest size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]

from fmapper.programs import Call, Ref
from fmapper_adapters.torch.passes.static_sizes.writer import Remains, Writer

Source = Callable[[Writer, Call], bool]
SOURCES: dict[str, Source] = {}
"""Operation -> a function that adds the calls that replace it, and returns whether it did."""


def _source(*names: str) -> Callable[[Source], Source]:
    def enter(source: Source) -> Source:
        SOURCES.update(dict.fromkeys(names, source))
        return source

    return enter


def _enter(writer: Writer, call: Call, mask: Ref, size: Any) -> int:
    """Replaces the row count of a masked call by the asserted number."""
    if not writer.unknowns(size):
        writer.assert_size(writer.count_true(mask), writer.size(size))
        return writer.size(size)
    most = math.prod(writer.static(mask))
    if not isinstance(size, sympy.Symbol) or not most:
        raise Remains(call.op)
    if size not in writer.most:
        writer.most[size] = most
        writer.counts[size] = writer.count_true(mask)
        writer.numbers[writer.counts[size].name] = size
    return writer.most[size]


@_source("nonzero", "argwhere")
def _nonzero(writer: Writer, call: Call) -> bool:
    mask = call.args[0]
    count = _enter(writer, call, mask, writer.facts.shapes[call.name][0])
    writer.keep(
        dataclasses.replace(
            call,
            op="aten::nonzero_static.default",
            kwargs={"size": count, "fill_value": 0},
        )
    )
    return True


@_source("masked_select")
def _masked_select(writer: Writer, call: Call) -> bool:
    x, mask = call.args
    shape = writer.static(x)
    if writer.static(mask) != shape:
        mask = writer.add("aten::expand.default", mask, shape, shape=shape, dtype="bool")
    return _index(writer, dataclasses.replace(call, op="aten::index.Tensor", args=(x, (mask,))))


@_source("index")
def _index(writer: Writer, call: Call) -> bool:
    """Replaces a mask in an index by the indices of its true elements."""
    x, indices = call.args
    masks = [index for index in indices if index is not None and writer.is_mask(index)]
    if not masks:
        return False
    if len(masks) > 1 or any(index is not None for index in indices if index not in masks):
        raise Remains(call.op)
    (mask,) = masks
    if x.name in writer.rows or mask.name in writer.rows:
        raise Remains(call.op)
    dim = indices.index(mask)
    count = _enter(writer, call, mask, writer.facts.shapes[call.name][dim])
    places = writer.positions(mask, count)
    replaced = (*indices[:dim], *places, *indices[dim + 1 :])
    writer.keep(dataclasses.replace(call, args=(x, replaced)))
    return True


@_source("unique_consecutive")
def _unique_consecutive(writer: Writer, call: Call) -> bool:
    """Uses the number of runs if it is asserted."""
    return _unique_of(writer, call, "fmapper::unique_consecutive.static", call.args[0])


@_source("_unique2")
def _unique2(writer: Writer, call: Call) -> bool:
    """Uses the number of values if it is asserted."""
    x = call.args[0]
    shape = (math.prod(writer.static(x)),)
    dtype = writer.dtype(x)
    row = writer.add("aten::view.default", x, shape, shape=shape, dtype=dtype)
    both = writer.add("aten::sort.default", row, 0)
    row = writer.add("sym::getitem", both, 0, shape=shape, dtype=dtype)
    return _unique_of(writer, call, "fmapper::unique.static", row)


@_source("repeat_interleave")
def _repeat_interleave(writer: Writer, call: Call) -> bool:
    """Uses the number of rows if it is asserted."""
    repeats = call.args[:2][-1]
    if (
        not isinstance(repeats, Ref)
        or repeats.name not in writer.shapes
        or writer.padded_refs(call)
    ):
        return False
    if call.kwargs.get("output_size") is not None:
        return False
    dim = call.args[2] if len(call.args) > 2 and call.args[2] is not None else 0
    size = writer.facts.shapes[call.name][dim]
    if writer.unknowns(size) or math.prod(writer.static(repeats)) == 1:
        raise Remains(call.op)
    total = writer.add("aten::sum.default", repeats, shape=(), dtype="int64")
    writer.assert_size(writer.add("aten::item.default", total), writer.size(size))
    kwargs = {**call.kwargs, "output_size": writer.size(size)}
    writer.keep(dataclasses.replace(call, kwargs=kwargs))
    return True


@_source("bincount")
def _bincount(writer: Writer, call: Call) -> bool:
    """Uses the number of bins if it is asserted, or is the least that is asked for."""
    x, weights, least = (*call.args, None, 0)[:3]
    size = writer.named_shape(call.result[0][1])[0]
    if weights is not None or not isinstance(size, int) or not math.prod(writer.static(x)):
        raise Remains(call.op)
    least = call.kwargs.get("minlength", least)
    bins = writer.add("aten::amax.default", x, shape=(), dtype=writer.dtype(x))
    bins = writer.add("aten::add.Tensor", bins, 1, shape=(), dtype="int64")
    bins = writer.add("aten::clamp.default", bins, least, shape=(), dtype="int64")
    writer.assert_size(writer.add("aten::item.default", bins), size)
    zeros = writer.add("aten::full.default", (size,), 0, dtype="int64", shape=(size,))
    ones = writer.add("aten::ones_like.default", x, dtype="int64", shape=writer.static(x))
    call = dataclasses.replace(call, op="aten::index_add.default", args=(zeros, 0, x, ones))
    writer.keep(dataclasses.replace(call, kwargs={}))
    return True


def _unique_of(writer: Writer, call: Call, op: str, x: Ref) -> bool:
    dims = (*call.args[3:], call.kwargs.get("dim")) if "consecutive" in op else ()
    if (
        writer.padded_refs(call)
        or len(writer.shapes[x.name]) != 1
        or any(d is not None for d in dims)
    ):
        raise Remains(call.op)
    size = writer.named_shape(call.result[0][1])[0]
    rows = writer.static(x)[0]
    if not isinstance(size, int) or not rows:
        raise Remains(call.op)
    kind, short = writer.dtype(x), (rows - 1,)
    later = writer.add("aten::slice.Tensor", x, 0, 1, rows, shape=short, dtype=kind)
    sooner = writer.add("aten::slice.Tensor", x, 0, 0, rows - 1, shape=short, dtype=kind)
    other = writer.add("aten::ne.Tensor", later, sooner, shape=short, dtype="bool")
    total = writer.add("aten::sum.default", other, shape=(), dtype="int64")
    writer.assert_size(writer.add("aten::item.default", total), size - 1)
    writer.keep(dataclasses.replace(call, op=op, kwargs={**call.kwargs, "size": size}))
    return True
