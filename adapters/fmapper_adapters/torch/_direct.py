"""Takes a recorded program apart without tracing it again, where that needs little.

`run_decompositions` traces a program twice more, which takes longer than recording it did. Yet most
of what it changes in one that changes nothing in place are views, casts and flags by other names.
Those are renamed here, as it renames them; a program that holds anything else is left to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

_aten: Any = torch.ops.aten
_fmapper: Any = torch.ops.fmapper
_OVERLOAD = type(torch.ops.aten.add.Tensor)  # torch has no public name for it
_SET_GRAD: Any = torch.ops.higher_order.wrap_with_set_grad_enabled
Emit = Callable[..., Node]


def taken_apart(
    exported: torch.export.ExportedProgram, table: Mapping[Any, Any], kept: frozenset[str]
) -> bool:
    """Whether it could be done. If not, the program still computes what it did.

    Args:
        exported: As torch has recorded it; it is changed.
        table: Torch's decompositions without those of what is lowered whole.
        kept: The names of what is lowered whole.
    """
    owner = exported.graph_module
    if exported.range_constraints or not _is_simple(owner, table, kept):
        return False
    _inline(owner)
    for node in list(owner.graph.nodes):
        if node.op == "call_function" and node.target in _REWRITES:
            new = _rewritten(owner, node)
            if new is None:
                return False
            if node.meta.get("val") is not None:
                exported.graph_signature.replace_all_uses(node.name, new.name)
            node.replace_all_uses_with(new)
            owner.graph.erase_node(node)
    owner.recompile()
    return True


def _is_simple(owner: GraphModule, table: Mapping[Any, Any], kept: frozenset[str]) -> bool:
    """Whether all sizes are known and every operation stays as it is or has a rewrite."""
    for node in owner.graph.nodes:
        if node.op == "get_attr":
            inner = getattr(owner, str(node.target), None)
            if not isinstance(inner, GraphModule) or not _is_simple(inner, table, kept):
                return False
            if any(user.target is not _SET_GRAD for user in node.users):
                return False
        elif node.op == "call_function":
            if node.target in (operator.getitem, _SET_GRAD, _fmapper.stop_gradient.default):
                continue
            if node.target not in _REWRITES and not _stays(node.target, table, kept):
                return False
        elif node.op not in ("placeholder", "output"):
            return False
        if not _is_plain(node.meta.get("val")):
            return False
    return True


def _stays(target: Any, table: Mapping[Any, Any], kept: frozenset[str]) -> bool:
    """Whether decompositions leave an operation as it is."""
    if not isinstance(target, _OVERLOAD) or target.namespace != "aten" or target in table:
        return False
    if target._schema.is_mutable:
        return False
    if target is _aten._assert_tensor_metadata.default:
        return True
    name = target.overloadpacket.__name__
    return name in kept or torch.Tag.core in target.tags


def _is_plain(value: Any) -> bool:
    """Whether a value is one of dense arrays of real numbers, whose sizes are known."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    if not isinstance(value, torch.Tensor):
        return value is None or type(value) in (bool, int, float, str)
    if value.layout is not torch.strided or value.is_complex() or value.device.type == "meta":
        return False
    return all(type(size) is int for size in (*value.shape, *value.stride()))


def _inline(owner: GraphModule) -> None:
    """Puts what runs without gradients in its place; where they end is marked already."""
    graph = owner.graph
    for node in list(graph.nodes):
        if node.target is not _SET_GRAD:
            continue
        inner: Any = getattr(owner, str(node.args[1].target))
        _inline(inner)
        names = [one for one in inner.graph.nodes if one.op == "placeholder"]
        given = dict(zip(names, node.args[2:], strict=True))
        with graph.inserting_before(node):
            found: Any = graph.graph_copy(inner.graph, given)
        for user in list(node.users):
            user.replace_all_uses_with(found[user.args[1]])
            graph.erase_node(user)
        function = node.args[1]
        graph.erase_node(node)
        if not function.users:
            graph.erase_node(function)


def _rewritten(owner: GraphModule, node: Node) -> Node | None:
    """What stands for a node, before it; None if there is nothing that gives what it gives."""
    made: list[Node] = []

    def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
        new = owner.graph.call_function(target, args, kwargs)
        made.append(new)
        given, named = torch.fx.node.map_arg((args, kwargs), _value)
        new.meta = {**node.meta, "val": target(*given, **named)}
        return new

    wanted = node.meta["val"]
    mode = next(iter(_tensors(wanted))).fake_mode
    with owner.graph.inserting_before(node), mode:
        new: Any = _REWRITES[node.target](emit, wanted, *node.args, **node.kwargs)
    if new is None or _kinds(_value(new)) != _kinds(wanted):
        for one in reversed(made):
            owner.graph.erase_node(one)
        return None
    found: Node = new
    return found


def _value(node: Node) -> Any:
    return node.meta["val"]


def _tensors(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _kinds(value: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(one.dtype, tuple(one.shape)) for one in _tensors(value)]


# --- the rewrites: with the value that is wanted, and the arguments of the operation --------------

def _filled(number: int) -> Callable[..., Node]:
    def full(emit: Emit, wanted: Any, size: Any, **_: Any) -> Node:
        return emit(_aten.full.default, size, number, dtype=wanted.dtype, device=wanted.device)

    return full


def _arange(emit: Emit, wanted: Any, *bounds: Any, **kwargs: Any) -> Node:
    start, end = bounds if len(bounds) == 2 else (0, *bounds)
    kwargs.setdefault("layout", torch.strided)
    return emit(_aten.arange.start_step, start, end, **kwargs)


def _renamed(target: Any) -> Callable[..., Node]:
    return lambda emit, wanted, *args: emit(target, *args)


def _same(emit: Emit, wanted: Any, x: Node) -> Node:
    return x


def _copied(emit: Emit, wanted: Any, x: Node) -> Node:
    return emit(_aten.clone.default, x)


def _dropout(emit: Emit, wanted: Any, x: Node, rate: float, train: bool) -> Node | None:
    return None if train else emit(_aten.clone.default, x)


def _to(emit: Emit, wanted: Any, x: Node, *_: Any, **kwargs: Any) -> Node | None:
    """Casts; all that is on one device stays there."""
    value = _value(x)
    if kwargs.get("copy") or kwargs.get("memory_format") or True in _ or _has_format(_):
        return None
    if value.device != wanted.device:
        return None
    if value.dtype == wanted.dtype:
        return x
    return emit(_aten._to_copy.default, x, dtype=wanted.dtype)


def _has_format(args: tuple[Any, ...]) -> bool:
    return any(isinstance(one, torch.memory_format) for one in args)


def _transposed(emit: Emit, wanted: Any, x: Node, first: int, second: int) -> Node | None:
    order = list(range(_value(x).dim()))
    if not order:
        return None
    order[first], order[second] = order[second], order[first]
    return emit(_aten.permute.default, x, order)


def _turned(emit: Emit, wanted: Any, x: Node) -> Node | None:
    return emit(_aten.permute.default, x, [1, 0]) if _value(x).dim() == 2 else None


def _contiguous(emit: Emit, wanted: Any, x: Node) -> Node:
    if _value(x).is_contiguous():
        return x
    return emit(_aten.clone.default, x, memory_format=torch.contiguous_format)


def _reshaped(emit: Emit, wanted: Any, x: Node, shape: Any) -> Node:
    try:
        _value(x).view(shape)
    except (RuntimeError, ValueError):  # torch's ways to say that the elements lie otherwise
        x = emit(_aten.clone.default, x, memory_format=torch.contiguous_format)
        shape = list(wanted.shape)
    return emit(_aten.view.default, x, shape)


def _flattened(emit: Emit, wanted: Any, x: Node, *_: int) -> Node:
    return _reshaped(emit, wanted, x, list(wanted.shape))


def _split(emit: Emit, wanted: Any, x: Node, _: Any, dim: int = 0) -> Node:
    sizes = [one.shape[dim] for one in wanted]
    return emit(_aten.split_with_sizes.default, x, sizes, dim)


def _squeezed(emit: Emit, wanted: Any, x: Node, dim: int | None = None) -> Node:
    dims = list(range(_value(x).dim())) if dim is None else [dim]
    return emit(_aten.squeeze.dims, x, dims)


def _chosen(emit: Emit, wanted: Any, where: Node, x: Any, y: Any) -> Node:
    """With a number for one of both, of the dtype that the result has."""
    x, y = (
        one
        if isinstance(one, Node)
        else emit(_aten.scalar_tensor.default, one, dtype=wanted.dtype, device=wanted.device)
        for one in (x, y)
    )
    return emit(_aten.where.self, where, x, y)


def _stacked(emit: Emit, wanted: Any, parts: Any, dim: int = 0) -> Node:
    at = dim % wanted.dim()
    return emit(_aten.cat.default, [emit(_aten.unsqueeze.default, one, at) for one in parts], dim)


def _normalised(
    emit: Emit, wanted: Any, x: Node, weight: Any, bias: Any, mean: Any, variance: Any,
    train: bool, momentum: float, eps: float, _: bool,
) -> Node | None:  # fmt: skip
    if train or mean is None or variance is None:
        return None
    found = emit(
        _aten._native_batch_norm_legit_no_training.default,
        x, weight, bias, mean, variance, momentum, eps,
    )  # fmt: skip
    return emit(operator.getitem, found, 0)


def _pooled(emit: Emit, wanted: Any, *args: Any) -> Node:
    return emit(operator.getitem, emit(_aten.max_pool2d_with_indices.default, *args), 0)


def _subtracted(emit: Emit, wanted: Any, x: Node, number: Any) -> Node:
    return emit(_aten.sub.Tensor, number, x)


_REWRITES: dict[Any, Callable[..., Node | None]] = {
    _aten.arange.default: _arange,
    _aten.arange.start: _arange,
    _aten.zeros.default: _filled(0),
    _aten.ones.default: _filled(1),
    _aten.lift_fresh_copy.default: _copied,
    _aten.detach_.default: _same,  # what is constant has no gradients
    _aten.dropout.default: _dropout,
    _aten.to.device: _to,
    _aten.to.dtype: _to,
    _aten.to.dtype_layout: _to,
    _aten.type_as.default: _to,
    _aten.transpose.int: _transposed,
    _aten.t.default: _turned,
    _aten.contiguous.default: _contiguous,
    _aten.reshape.default: _reshaped,
    _aten.flatten.using_ints: _flattened,
    _aten.chunk.default: _split,
    _aten.split.Tensor: _split,
    _aten.squeeze.dim: _squeezed,
    _aten.squeeze.default: _squeezed,
    _aten.stack.default: _stacked,
    _aten.where.ScalarOther: _chosen,
    _aten.where.ScalarSelf: _chosen,
    getattr(_aten, "__and__").Tensor: _renamed(_aten.bitwise_and.Tensor),
    getattr(_aten, "__or__").Tensor: _renamed(_aten.bitwise_or.Tensor),
    _aten.min.other: _renamed(_aten.minimum.default),
    _aten.max.other: _renamed(_aten.maximum.default),
    _aten.batch_norm.default: _normalised,
    _aten.max_pool2d.default: _pooled,
    _aten.rsub.Scalar: _subtracted,
}
