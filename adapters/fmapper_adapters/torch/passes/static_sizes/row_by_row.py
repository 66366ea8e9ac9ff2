"""Operations that compute each row of the result from that row of the operands alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from fmapper.meshes import dimension_rule, follow_rows, pointwise
from fmapper.programs import Call
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.from_fx.size_facts import Sizes
from fmapper_adapters.torch.passes.static_sizes.writer import Writer


def is_row_by_row(writer: Writer, call: Call) -> bool:
    """Returns whether each row of the result depends only on the same row of the operands."""
    if call.op == "sym::getitem":
        return True
    names = writer.padded_refs(call)
    rows = {name: writer.rows[name] for name in names}
    if len({size for _, size in rows.values()}) > 1:
        return False
    shape = writer.facts.shapes.get(call.name)
    kept = follow_rows(
        call if shape is None else replace(call, result=(("", plain_sizes(shape)),)),
        {name: plain_sizes(writer.shapes[name]) for name in call.refs() if name in writer.shapes},
        {name: dim for name, (dim, _) in rows.items()},
        dimension_rule(call.op) or (pointwise if is_pointwise(call.op) else None),
    )
    if kept is None or shape is None:
        return kept is not None
    target = writer.padded_dim(shape)
    return target is not None and kept == [target[0]]


def plain_sizes(shape: Sizes) -> tuple[int | str, ...]:
    """Returns the sizes of a shape as a program has them."""
    return tuple(size if isinstance(size, int) else str(size) for size in shape)


def is_pointwise(op: str) -> bool:
    """Returns whether torch tags an operation as pointwise."""
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    function = getattr(packet, overload, None)
    return isinstance(function, _private.OpOverload) and torch.Tag.pointwise in function.tags
