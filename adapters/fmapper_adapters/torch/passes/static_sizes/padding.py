"""Operations that combine rows, and how each ignores the padding among them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from fmapper.programs import Call, Ref
from fmapper_adapters.torch.passes.static_sizes.row_by_row import is_row_by_row
from fmapper_adapters.torch.passes.static_sizes.writer import Remains, Writer

Bears = Callable[[Writer, Call], Call | None]
BEARS: dict[str, Bears] = {}
"""Operation -> a function that returns a call that ignores padding; None if it added calls."""


def _bears(*names: str) -> Callable[[Bears], Bears]:
    def enter(bears: Bears) -> Bears:
        BEARS.update(dict.fromkeys(names, bears))
        return bears

    return enter


@_bears("masked_scatter")
def _masked_scatter(writer: Writer, call: Call) -> Call | None:
    """Takes the valid elements, which come first, one for each true element of the mask."""
    x, mask, source = call.args
    dim, size = writer.rows.get(source.name, (1, 0))
    if dim != 0 or x.name in writer.rows or mask.name in writer.rows:
        raise Remains(call.op)
    shape = writer.facts.shapes[call.name]
    whole = writer.add(
        "aten::expand.default", mask, writer.sizes(shape), shape=writer.sizes(shape), dtype="bool"
    )
    wanted = writer.count_true(whole)
    row = math.prod(writer.sizes(writer.shapes[source.name][1:]))
    have = writer.add("sym::mul", writer.count(size), row)
    writer.assert_that(writer.add("sym::le", wanted, have), "masked_scatter has too few elements")
    return call


@_bears("index")
def _index(writer: Writer, call: Call) -> Call | None:
    """Gathers rows; padding reads the first row."""
    x, indices = call.args
    present = [index for index in indices if index is not None]
    if any(writer.is_mask(index) for index in present):
        raise Remains(call.op)
    shape = writer.facts.shapes[call.name]
    padded = [index for index in present if index.name in writer.rows]
    if padded:  # all indices with padding have the same padded rows
        sizes = {writer.rows[index.name] for index in padded}
        ranks = {len(writer.shapes[index.name]) for index in padded}
        if len(sizes) != 1 or len(ranks) != 1:
            raise Remains(call.op)
        for index in present:  # indices broadcast from the end, so no other may have a higher rank
            if len(writer.shapes[index.name]) > max(ranks):
                raise Remains(call.op)
        if writer.padded_dim(shape) is None:
            raise Remains(call.op)
        return _index_rows(writer, call) if x.name in writer.rows else call
    dim, size = writer.rows[x.name]
    target = writer.padded_dim(shape)
    if target is None:  # rows with padding, selected by indices without
        place = _among_rows(writer, indices[dim], size)
        replaced = (*indices[:dim], place, *indices[dim + 1 :])
        return dataclasses.replace(call, args=(x, replaced))
    if target[1] != size or indices[dim : dim + 1] not in ((), (None,)):
        raise Remains(call.op)
    return call


def _index_rows(writer: Writer, call: Call) -> Call:
    """Gathers rows of an array with padding, by an index with padding."""
    x, indices = call.args
    dim, size = writer.rows[x.name]
    index = indices[dim] if dim < len(indices) else None
    if index is None or index.name not in writer.rows:
        raise Remains(call.op)
    place = _zero_padding(writer, _among_rows(writer, index, size))
    return dataclasses.replace(call, args=(x, (*indices[:dim], place, *indices[dim + 1 :])))


@_bears("cumsum", "cumprod")
def _cumulate(writer: Writer, call: Call) -> Call | None:
    """Lets padding, which comes last, have no effect on the elements before it."""
    return call


@_bears("sum")
def _sum(writer: Writer, call: Call) -> Call | None:
    """Sums over valid rows."""
    if is_row_by_row(writer, call):
        return call
    return dataclasses.replace(call, args=(_zero_padding(writer, call.args[0]), *call.args[1:]))


@_bears("any")
def _any(writer: Writer, call: Call) -> Call | None:
    return _sum(writer, call)


@_bears("index_add", "index_copy")
def _index_add(writer: Writer, call: Call) -> Call | None:
    """Adds rows, with zeros for padding, or writes them, with an extra row for padding."""
    x, dim, index, source = call.args[:4]
    dim %= max(len(writer.shapes[x.name]), 1)
    row_dims = {writer.rows.get(index.name), writer.rows.get(source.name)}
    if x.name in writer.rows or index.name not in writer.rows or writer.rows[index.name][0] != 0:
        raise Remains(call.op)
    if writer.rows.get(source.name) != (dim, writer.rows[index.name][1]):
        raise Remains(f"{call.op}: {row_dims}")
    if call.op.startswith("aten::index_add"):  # an extra row could not be divided on a mesh
        rows = _zero_padding(writer, index), _zero_padding(writer, source)
        return dataclasses.replace(call, args=(x, dim, *rows, *call.args[4:]))
    shape = writer.static(x)
    padded, finish = _with_place(writer, call, x, dim)
    places = _beyond(writer, index, shape[dim])
    args = (padded, dim, places, source, *call.args[4:])
    finish(dataclasses.replace(call, args=args))
    return None


@_bears("index_put")
def _index_put(writer: Writer, call: Call) -> Call | None:
    x, indices, values = call.args[:3]
    present = [index for index in indices if index is not None]
    if x.name in writer.rows:
        raise Remains(call.op)
    if len(present) == 1 and writer.is_mask(present[0]):
        return _put_by_mask(writer, call)
    first = indices.index(present[0])
    padded = [index for index in present if index.name in writer.rows]
    if not padded or any(len(writer.shapes[index.name]) != 1 for index in present):
        raise Remains(call.op)
    size = writer.rows[padded[0].name][1]
    if any(writer.rows[index.name][1] != size for index in padded):
        raise Remains(call.op)
    given = writer.rows.get(values.name)
    rank = len(writer.shapes[values.name])
    if given is None and rank and writer.sizes(writer.shapes[values.name])[0] != 1:
        raise Remains(call.op)  # the values would need as many rows
    if given is not None and (given != (0, size) or first != 0):
        raise Remains(call.op)
    at = next(i for i, index in enumerate(indices) if index in padded)
    shape = writer.static(x)
    longer, finish = _with_place(writer, call, x, at)
    places = _beyond(writer, indices[at], shape[at])
    replaced = (*indices[:at], places, *indices[at + 1 :])
    finish(dataclasses.replace(call, args=(longer, replaced, *call.args[2:])))
    return None


def _zero_padding(writer: Writer, ref: Ref) -> Ref:
    """Zeroes the padding of an array."""
    dim, size = writer.rows[ref.name]
    shape = writer.sizes(writer.shapes[ref.name])
    mask = writer.mask(size)
    if len(shape) > 1:
        sides = tuple(-1 if i == dim else 1 for i in range(len(shape)))
        flat = tuple(shape[dim] if i == dim else 1 for i in range(len(shape)))
        mask = writer.add("aten::view.default", mask, sides, shape=flat, dtype="bool")
    dtype = writer.dtype(ref)
    zero = writer.add("aten::zeros_like.default", ref, shape=shape, dtype=dtype)
    return writer.add("aten::where.self", mask, ref, zero, shape=shape, dtype=dtype)


def _beyond(writer: Writer, index: Ref, size: int) -> Ref:
    """Redirects the indices of padding to a position behind the last one."""
    rank = len(writer.shapes[index.name])
    if rank != 1:
        raise Remains("indices of several dimensions")
    rows = writer.sizes(writer.shapes[index.name])
    mask = writer.mask(writer.rows[index.name][1])
    kind = writer.dtype(index)
    negative = writer.add("aten::lt.Scalar", index, 0, shape=rows, dtype="bool")
    shifted = writer.add("aten::add.Tensor", index, size, shape=rows, dtype=kind)
    plain = writer.add("aten::where.self", negative, shifted, index, shape=rows, dtype=kind)
    last = writer.add("aten::full_like.default", index, size, shape=rows, dtype=kind)
    return writer.add("aten::where.self", mask, plain, last, shape=rows, dtype=kind)


def _among_rows(writer: Writer, index: Ref, size: Any) -> Ref:
    """Counts negative indices from the last valid row, and moves padding's indices out of range."""
    shape, kind = writer.sizes(writer.shapes[index.name]), writer.dtype(index)
    count = writer.count(size)

    def add(op: str, *args: Any, dtype: str = "bool") -> Ref:
        return writer.add(f"aten::{op}", *args, shape=shape, dtype=dtype)

    shifted = add("add.Tensor", index, count, dtype=kind)
    plain = add("where.self", add("lt.Scalar", index, 0), shifted, index, dtype=kind)
    inside = add("logical_and.default", add("ge.Scalar", plain, 0), add("lt.Scalar", plain, count))
    outside = add("full_like.default", index, writer.size(size), dtype=kind)
    moved = add("where.self", inside, plain, outside, dtype=kind)
    if index.name in writer.rows:
        writer.rows[moved.name] = writer.rows[index.name]
    return moved


def _with_place(writer: Writer, call: Call, x: Ref, dim: int) -> tuple[Ref, Callable[[Call], None]]:
    """Appends a row to an array; returns it and a function that removes the row."""
    shape = writer.static(x)
    longer = (*shape[:dim], shape[dim] + 1, *shape[dim + 1 :])
    pads = [0, 0] * (len(shape) - 1 - dim) + [0, 1]
    dtype = writer.dtype(x)
    op = "aten::constant_pad_nd.default"
    padded = writer.add(op, x, tuple(pads), 0, shape=longer, dtype=dtype)

    def finish(inner: Call) -> None:
        written = writer.add(inner.op, *inner.args, shape=longer, dtype=dtype, **inner.kwargs)
        args = (written, dim, 0, shape[dim])
        writer.keep(dataclasses.replace(call, op="aten::slice.Tensor", args=args, kwargs={}))

    return padded, finish


def _put_by_mask(writer: Writer, call: Call) -> Call | None:
    """Writes rows at the true elements of a mask, in order."""
    x, indices, values = call.args[:3]
    mask = next(index for index in indices if index is not None)
    if indices.index(mask) != 0 or mask.name in writer.rows or any(call.args[3:]):
        raise Remains(call.op)
    if writer.rows.get(values.name, (1,))[0] != 0:
        raise Remains(call.op)
    size = writer.rows[values.name][1]
    rows, marked = writer.size(size), writer.static(mask)
    same = writer.add("sym::eq", writer.count_true(mask), writer.count(size))
    writer.assert_that(same, "as many rows are put as there are places for them")
    most = math.prod(marked)
    shape = writer.static(x)
    flat = (most, *shape[len(marked) :])
    dtype = writer.dtype(x)
    row = writer.add("aten::view.default", mask, (most,), shape=(most,), dtype="bool")
    order = writer.add("aten::cumsum.default", row, 0, shape=(most,), dtype="int64")
    order = writer.add("aten::sub.Tensor", order, 1, shape=(most,), dtype="int64")
    order = writer.add("aten::clamp.default", order, 0, rows - 1, shape=(most,), dtype="int64")
    taken = writer.add("aten::index.Tensor", values, (order,), shape=flat, dtype=dtype)
    taken = writer.add("aten::view.default", taken, shape, shape=shape, dtype=dtype)
    sides = (*marked, *[1] * (len(shape) - len(marked)))
    wide = writer.add("aten::view.default", mask, sides, shape=sides, dtype="bool")
    writer.keep(dataclasses.replace(call, op="aten::where.self", args=(wide, taken, x), kwargs={}))
    return None
