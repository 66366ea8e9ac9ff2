"""Takes a recorded program apart without tracing it again, where that needs little.

`run_decompositions` traces a program twice more, which takes longer than recording it did. Yet most
of what it changes in one that changes nothing in place are views, casts and flags by other names.
Those are renamed here, as it renames them; a program that holds anything else is left to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fmapper_adapters.torch.from_fx.decompositions import Decompositions

_aten: Any = torch.ops.aten
_fmapper: Any = torch.ops.fmapper
_METADATA: Any = torch.ops.aten._assert_tensor_metadata.default
_SET_GRAD: Any = torch.ops.higher_order.wrap_with_set_grad_enabled
_DROPOUT = (_aten.dropout.default, _aten.feature_dropout.default, _aten.alpha_dropout.default)
Emit = Callable[..., Node]


def drop_idle_dropout(exported: torch.export.ExportedProgram) -> None:
    """Leaves out dropout that is switched off, which gives its very input; changes the program.

    Torch's decompositions give a copy, which is something else if either is changed in place.
    """
    owner = exported.graph_module
    idle = [node for node in owner.graph.nodes if node.target in _DROPOUT and not node.args[2]]
    for node in idle:
        exported.graph_signature.replace_all_uses(node.name, node.args[0].name)
        node.replace_all_uses_with(node.args[0])
        owner.graph.erase_node(node)
    if idle:
        owner.recompile()


def decompose(exported: torch.export.ExportedProgram, table: Decompositions) -> bool:
    """Tells whether it could be done. If not, the program still computes what it did.

    Args:
        exported: As torch has recorded it; it is changed.
        table: Torch's decompositions less those of what is lowered whole.
    """
    owner = exported.graph_module
    if exported.range_constraints or not _is_simple(owner, table):
        return False
    _inline(owner)
    for node in list(owner.graph.nodes):
        if node.target in _REWRITES and not table.leave(node.target):
            new = _rewrite(owner, node)
            if new is None:
                return False
            replaced = [node]
            if node.target in _IN_PLACE:
                replaced.append(node.args[0])
            later = _later(owner, node)
            for one in replaced:
                exported.graph_signature.replace_all_uses(one.name, new.name)
                one.replace_all_uses_with(new, later.__contains__)
            owner.graph.erase_node(node)
    owner.recompile()
    return True


def _is_simple(owner: GraphModule, table: Decompositions) -> bool:
    """Tells whether all sizes are known and every operation stays as it is or has a rewrite."""
    for node in owner.graph.nodes:
        if node.op == "get_attr":
            inner = getattr(owner, str(node.target), None)
            if not isinstance(inner, GraphModule) or not _is_simple(inner, table):
                return False
            if any(user.target is not _SET_GRAD for user in node.users):
                return False
        elif node.op == "call_function":
            if node.target in (operator.getitem, _SET_GRAD, _fmapper.stop_gradient.default):
                continue
            if node.target in _IN_PLACE and not _is_seen_once(owner, node):
                return False
            if node.target not in _REWRITES and not (
                node.target is _METADATA or table.leave(node.target)
            ):
                return False
        elif node.op not in ("placeholder", "output"):
            return False
        if not _is_plain(node.meta.get("val")):
            return False
    return True


def _is_seen_once(owner: GraphModule, node: Node) -> bool:
    """Tells whether no other result shows what an operation changes: then it can give it."""
    root: Any = node.args[0]
    while root.target in _IN_PLACE:
        root = root.args[0]
    names = [root]
    for name in names:
        names += [one for one in name.users if one.target in _IN_PLACE and one.args[0] is name]
    later = _later(owner, node)
    return root.target in _NEW and all(
        user in later or user is node or user.target in _NEW or user.target in _IN_PLACE
        for name in names
        for user in name.users
    )


def _later(owner: GraphModule, node: Node) -> set[Node]:
    nodes = list(owner.graph.nodes)
    return set(nodes[nodes.index(node) + 1 :])


def _is_plain(value: Any) -> bool:
    """Tells whether a value is one of dense arrays of real numbers, whose sizes are known."""
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


def _rewrite(owner: GraphModule, node: Node) -> Node | None:
    """Returns what replaces a node, before it; None if nothing gives what it gives."""
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


def _fill(number: int) -> Callable[..., Node]:
    def full(emit: Emit, wanted: Any, size: Any, **_: Any) -> Node:
        return emit(_aten.full.default, size, number, dtype=wanted.dtype, device=wanted.device)

    return full


def _arange(emit: Emit, wanted: Any, *bounds: Any, **kwargs: Any) -> Node:
    start, end = bounds if len(bounds) == 2 else (0, *bounds)
    kwargs.setdefault("layout", torch.strided)
    return emit(_aten.arange.start_step, start, end, **kwargs)


def _rename(target: Any) -> Callable[..., Node]:
    return lambda emit, wanted, *args, **kwargs: emit(target, *args, **kwargs)


def _same(emit: Emit, wanted: Any, x: Node) -> Node:
    return x


def _copy(emit: Emit, wanted: Any, x: Node) -> Node:
    return emit(_aten.clone.default, x)


def _to(emit: Emit, wanted: Any, x: Node, *_: Any, **kwargs: Any) -> Node | None:
    """Casts; all that is on one device stays there."""
    value = _value(x)
    if kwargs.get("copy") or kwargs.get("memory_format") or True in _ or _has_format(_):
        return None
    return _cast(emit, wanted, x) if value.device == wanted.device else None


def _has_format(args: tuple[Any, ...]) -> bool:
    return any(isinstance(one, torch.memory_format) for one in args)


def _transpose(emit: Emit, wanted: Any, x: Node, first: int, second: int) -> Node | None:
    order = list(range(_value(x).dim()))
    if not order:
        return None
    order[first], order[second] = order[second], order[first]
    return emit(_aten.permute.default, x, order)


def _transpose_matrix(emit: Emit, wanted: Any, x: Node) -> Node | None:
    return emit(_aten.permute.default, x, [1, 0]) if _value(x).dim() == 2 else None


def _contiguous(emit: Emit, wanted: Any, x: Node) -> Node:
    if _value(x).is_contiguous():
        return x
    return emit(_aten.clone.default, x, memory_format=torch.contiguous_format)


def _reshape(emit: Emit, wanted: Any, x: Node, shape: Any) -> Node:
    try:
        _value(x).view(shape)
    except (RuntimeError, ValueError):  # torch's ways to say that the elements lie otherwise
        x = emit(_aten.clone.default, x, memory_format=torch.contiguous_format)
        shape = list(wanted.shape)
    return emit(_aten.view.default, x, shape)


def _flatten(emit: Emit, wanted: Any, x: Node, *_: int) -> Node:
    return _reshape(emit, wanted, x, list(wanted.shape))


def _split(emit: Emit, wanted: Any, x: Node, _: Any, dim: int = 0) -> Node:
    sizes = [one.shape[dim] for one in wanted]
    return emit(_aten.split_with_sizes.default, x, sizes, *([dim] if dim else []))


def _squeeze(emit: Emit, wanted: Any, x: Node, dim: int | None = None) -> Node:
    dims = list(range(_value(x).dim())) if dim is None else [dim]
    return emit(_aten.squeeze.dims, x, dims)


def _choose(emit: Emit, wanted: Any, where: Node, x: Any, y: Any) -> Node:
    """Chooses with a number for one of both."""
    kind = {"dtype": wanted.dtype, "layout": wanted.layout, "device": wanted.device}
    x, y = (
        one if isinstance(one, Node) else emit(_aten.scalar_tensor.default, one, **kind)
        for one in (x, y)
    )
    return emit(_aten.where.self, where, _cast(emit, wanted, x), _cast(emit, wanted, y))


def _cast(emit: Emit, wanted: Any, x: Node) -> Node:
    if _value(x).dtype == wanted.dtype:
        return x
    return emit(_aten._to_copy.default, x, dtype=wanted.dtype)


def _stack(emit: Emit, wanted: Any, parts: Any, dim: int = 0) -> Node:
    at = dim % wanted.dim()
    if at == wanted.dim() - 1:
        parts = [emit(_aten.unsqueeze.default, one, at) for one in parts]
        return emit(_aten.cat.default, parts, dim)
    joined = emit(_aten.cat.default, parts, *([at] if at else []))
    return emit(_aten.view.default, joined, list(wanted.shape))


def _normalise(
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


def _pool(emit: Emit, wanted: Any, *args: Any) -> Node:
    return emit(operator.getitem, emit(_aten.max_pool2d_with_indices.default, *args), 0)


def _subtract(emit: Emit, wanted: Any, x: Node, number: Any) -> Node:
    return emit(_aten.sub.Tensor, number, x)


_REWRITES: dict[Any, Callable[..., Node | None]] = {
    _aten.arange.default: _arange,
    _aten.arange.start: _arange,
    _aten.zeros.default: _fill(0),
    _aten.ones.default: _fill(1),
    _aten.lift_fresh_copy.default: _copy,
    _aten.detach_.default: _same,  # what is constant has no gradients
    _aten.to.device: _to,
    _aten.to.dtype: _to,
    _aten.to.dtype_layout: _to,
    _aten.type_as.default: _to,
    _aten.transpose.int: _transpose,
    _aten.t.default: _transpose_matrix,
    _aten.contiguous.default: _contiguous,
    _aten.reshape.default: _reshape,
    _aten.flatten.using_ints: _flatten,
    _aten.chunk.default: _split,
    _aten.split.Tensor: _split,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.default: _squeeze,
    _aten.stack.default: _stack,
    _aten.where.ScalarOther: _choose,
    _aten.where.ScalarSelf: _choose,
    _aten.__and__.Tensor: _rename(_aten.bitwise_and.Tensor),
    _aten.__or__.Tensor: _rename(_aten.bitwise_or.Tensor),
    _aten.min.other: _rename(_aten.minimum.default),
    _aten.max.other: _rename(_aten.maximum.default),
    _aten.batch_norm.default: _normalise,
    _aten.max_pool2d.default: _pool,
    _aten.rsub.Scalar: _subtract,
}

# Changes in place, and what gives the same without.
_IN_PLACE: dict[Any, Any] = {
    _aten.add_.Tensor: _aten.add.Tensor,
    _aten.sub_.Tensor: _aten.sub.Tensor,
    _aten.mul_.Tensor: _aten.mul.Tensor,
    _aten.div_.Tensor: _aten.div.Tensor,
    _aten.relu_.default: _aten.relu.default,
    _aten.silu_.default: _aten.silu.default,
    _aten.sigmoid_.default: _aten.sigmoid.default,
    _aten.tanh_.default: _aten.tanh.default,
    _aten.hardtanh_.default: _aten.hardtanh.default,
    _aten.hardswish_.default: _aten.hardswish.default,
    _aten.leaky_relu_.default: _aten.leaky_relu.default,
    _aten.masked_fill_.Scalar: _aten.masked_fill.Scalar,
}
_REWRITES.update({changing: _rename(target) for changing, target in _IN_PLACE.items()})

# Operations whose results are arrays of their own, and no views of what they are given.
_NEW: frozenset[Any] = frozenset(_IN_PLACE.values()) | {
    _aten.batch_norm.default,
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.layer_norm.default,
    _aten.linear.default,
    _aten.matmul.default,
    _aten.max_pool2d.default,
    _aten.mul.Scalar,
    _aten.where.self,
}
