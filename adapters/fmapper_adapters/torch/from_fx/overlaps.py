"""Refuses in-place changes that no functional program can represent.

`y *= y[..., :1]` reads elements that may or may not have been changed already, depending on how
many elements a processor handles at a time; torch calls the result undefined. A functional program
reads all elements before it writes any, so its results may differ unpredictably. An operation that
reads only elements that are written at the same time or later (`y[:-1] = y[1:]`) has the same
result either way.

Writes through two kinds of views come out wrong when torch functionalises a recording: through
`expand`, the differences of all copies are added up, and through `unfold`, elements outside of all
windows become zero.

This works on torch's graph, because a program has no strides and no storages.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import GraphModule, Node

from fmapper import ConversionError
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.from_fx import graph

EXPANSIONS = frozenset({
    torch.ops.aten.expand.default,
    torch.ops.aten.expand_as.default,
    torch.ops.aten.broadcast_to.default,
})  # fmt: skip
_MOST = 2**20  # the most elements whose addresses are compared one by one
_UNTAGGED = {"copy_", "copy", "masked_fill_", "fill_", "fill", "where", "__iand__", "__ior__"}
_UNTAGGED |= {"__ixor__", "__ilshift__", "__irshift__", "floor_divide_", "floor_divide"}


class _Layout(NamedTuple):
    """The layout of a tensor in its storage, in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    itemsize: int


def refuse(name: str, exported: torch.export.ExportedProgram) -> None:
    """Checks for writes to overlapping memory, in a program before functionalisation.

    Args:
        name: The module, for the error.
        exported: The program as torch recorded it.

    Raises:
        ConversionError: An operation writes to memory that it also reads as other elements.
    """
    for owner in exported.graph_module.modules():
        if not isinstance(owner, GraphModule):
            continue
        for node in owner.graph.nodes:
            schema = _private.schema_of(node.target)
            if schema is not None and schema.is_mutable and (why := _hazard(node, schema)):
                path, source = graph.place(node)
                at = f" in {path}" if path else ""
                at += f" ({source})" if source else ""
                raise ConversionError(f"{name}: {node.target}{at} {why}")


def _hazard(node: Node, schema: Any) -> str:
    """Describes the hazard of a write and its remedy; empty for none."""
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    written: list[Any] = []
    read: list[Any] = []
    for argument in schema.arguments:
        info = argument.alias_info
        into = written if info is not None and info.is_write else read
        into += pytree.tree_leaves(given.get(argument.name))
    outs = [value for value in map(value_of, written) if isinstance(value, torch.Tensor)]
    reads = [value for value in map(value_of, read) if isinstance(value, torch.Tensor)]
    by_element = _is_by_element(node.target)
    if any(
        _depends_on_order(out, source, by_element=by_element) for out in outs for source in reads
    ):
        return (
            "changes a tensor in place while it reads other elements of it, so the result depends "
            "on the order of these operations, and torch leaves it undefined. Read a copy, as in y "
            "*= y[..., :1].clone(), or write y = y * y[..., :1]."
        )
    if any(map(_is_expanded, outs)) or any(map(_is_part_of_expanded, written)):
        return (
            "changes a tensor in place whose elements share memory, as after `expand` and "
            "`as_strided`. Change a copy, x.expand(...).clone(), or the tensor that was expanded."
        )
    if any(map(_is_in_windows, written)):
        return (
            "changes windows of `unfold` that do not cover the whole tensor; torch would record "
            "zeros for the rest. Change slices of the tensor itself."
        )
    return ""


def _is_expanded(tensor: torch.Tensor) -> bool:
    layout = _layout(tensor)
    if layout is None:
        return False
    reach = 0  # reach of the dimensions so far, densest first
    for stride, size in sorted(zip(layout.strides, layout.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    count = math.prod(layout.shape)
    return count > _MOST or len(np.unique(_addresses(layout))) < count


def _is_part_of_expanded(node: Any) -> bool:
    """Returns whether a value is a view of a tensor through an `expand` that repeats elements."""
    return any(
        made.target in EXPANSIONS and value_of(made).numel() != value_of(made.args[0]).numel()
        for made in bases_of(node)
    )


def _is_in_windows(node: Any) -> bool:
    """Returns whether a value is a view of a tensor through an `unfold` that does not cover it."""
    for made in bases_of(node):
        if made.target == torch.ops.aten.unfold.default:
            base, dim, size, step = made.args
            shape = base.meta["val"].shape  # type: ignore[union-attr]
            length = _number(shape[dim]) if shape else 1
            if length is None or step > size or (length - size) % step:  # type: ignore[operator]
                return True
    return False


def bases_of(node: Any) -> Iterator[Node]:
    """Yields a view and its bases, up to the first tensor."""
    while isinstance(node, Node):
        yield node
        if node.op != "call_function":
            return
        schema = _private.schema_of(node.target)
        if node.target is operator.getitem:  # one of the results of `split`
            node = node.args[0]
        elif schema is None or not any(result.alias_info for result in schema.returns):
            return
        else:
            node = node.args[0] if node.args else None


def value_of(argument: Any) -> Any:
    """Returns the fake value of a node; None for others."""
    return argument.meta.get("val") if isinstance(argument, Node) else None


def _is_by_element(target: Any) -> bool:
    """Returns whether an operation is pointwise; not all of these have torch's tag."""
    name = target.overloadpacket.__name__
    packets = (target.overloadpacket, getattr(torch.ops.aten, name.removesuffix("_"), None))
    return name in _UNTAGGED or any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
    )


def _depends_on_order(out: torch.Tensor, source: torch.Tensor, *, by_element: bool) -> bool:
    """Returns whether a write may change what the same operation reads.

    Elements are assumed to be written in the order of their addresses.
    """
    try:
        if _private.identity_of(out.untyped_storage()) != _private.identity_of(
            source.untyped_storage()
        ):
            return False
    except (NotImplementedError, RuntimeError):  # sparse, or of a class without a storage
        return False
    first, second = _layout(out), _layout(source)
    if first is None or second is None or not _share(first, second):
        return False
    wide = _broadcast(second, first.shape)
    if not by_element or wide is None or first.itemsize != second.itemsize:
        return True
    moving = [i for i, size in enumerate(first.shape) if size > 1]
    if all(first.strides[i] == wide.strides[i] for i in moving):
        return wide.start < first.start
    if math.prod(first.shape) > _MOST:
        return True
    writes, reads = _addresses(first), _addresses(wide)
    return bool((np.isin(reads, writes) & (reads < writes)).any())


def _layout(tensor: torch.Tensor) -> _Layout | None:
    """Returns the layout for the sizes of the examples; None if unknown or empty."""
    sizes = tuple(map(_number, tensor.shape))
    strides = tuple(map(_number, tensor.stride()))
    offset = _number(tensor.storage_offset())
    if offset is None or None in sizes or None in strides or 0 in sizes:
        return None
    width = tensor.element_size()
    scaled = tuple(stride * width for stride in strides if stride is not None)
    return _Layout(tuple(n for n in sizes if n is not None), scaled, offset * width, width)


def _number(size: Any) -> int | None:
    """Returns a size as a number, without a guard by torch."""
    return size if isinstance(size, int) else getattr(size.node, "hint", None)


def _broadcast(layout: _Layout, shape: tuple[int, ...]) -> _Layout | None:
    """Broadcasts a layout to a shape; returns None if that is impossible."""
    missing = len(shape) - len(layout.shape)
    if missing < 0:
        return None
    strides = [0] * missing
    for size, wanted, stride in zip(layout.shape, shape[missing:], layout.strides, strict=True):
        if size not in (wanted, 1):
            return None
        strides.append(stride if size == wanted else 0)
    return layout._replace(shape=shape, strides=tuple(strides))


def _share(first: _Layout, second: _Layout) -> bool:
    """Returns whether two layouts of one storage have an element in common."""

    def geometry(layout: _Layout) -> Any:
        interface = {
            "version": 3,
            "data": (1 + layout.start, True),  # so that no address is 0
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.itemsize}",
        }
        return np.asarray(type("Geometry", (), {"__array_interface__": interface})())

    try:
        return bool(np.shares_memory(geometry(first), geometry(second), max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _addresses(layout: _Layout) -> Any:
    """Returns the address of every element, in the order of the elements."""
    addresses = np.full((1,) * len(layout.shape), layout.start, np.int64)
    for axis, (size, stride) in enumerate(zip(layout.shape, layout.strides, strict=True)):
        along = [1] * len(layout.shape)
        along[axis] = size
        addresses = addresses + (np.arange(size) * stride).reshape(along)
    return addresses.reshape(-1)
