"""Decides whether torch must trace a recorded program again before it can be read.

It need not if all operations are in their final form, or are variants that `passes/one_form.py`
canonicalizes. The decision needs facts that only torch's graph has: strides, devices, and which
operation writes to which array.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fmapper_adapters.torch import _private
from fmapper_adapters.torch.from_fx.decompositions import Decompositions
from fmapper_adapters.torch.from_fx.gradient_ends import STOP
from fmapper_adapters.torch.from_fx.overlaps import EXPANSIONS
from fmapper_adapters.torch.passes.one_form import (
    FORMS,
    IN_PLACE,
    WITHOUT_GRADIENTS,
    WRITES,
)

_aten: Any = torch.ops.aten
_METADATA: Any = _aten._assert_tensor_metadata.default
_SET_GRAD: Any = torch.ops.higher_order.wrap_with_set_grad_enabled
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_KEPT = (operator.getitem, _SET_GRAD, STOP, _METADATA, _aten._assert_scalar.default)
_TOGETHER = (_aten.meshgrid.default, _aten.meshgrid.indexing, _aten.broadcast_tensors.default)
_DROPOUT = (_aten.dropout.default, _aten.feature_dropout.default, _aten.alpha_dropout.default)


def drop_idle_dropout(exported: torch.export.ExportedProgram) -> None:
    """Removes dropout that is switched off; changes the program.

    Torch's decompositions would insert a copy, which is wrong if either is changed in place.
    """
    owner = exported.graph_module
    idle = [node for node in owner.graph.nodes if node.target in _DROPOUT and not node.args[2]]
    for node in idle:
        exported.graph_signature.replace_all_uses(node.name, node.args[0].name)
        node.replace_all_uses_with(node.args[0])
        owner.graph.erase_node(node)
    if idle:
        owner.recompile()


def drop_idle_slices(exported: torch.export.ExportedProgram) -> None:
    """Removes slices of whole dimensions, as in `x[:, :n]`; changes the program.

    For an in-place change of such a slice, torch would rewrite the whole array per dimension.
    """
    owner = exported.graph_module
    if not any(_is_mutable(node) for node in owner.graph.nodes):
        return
    idle = [node for node in owner.graph.nodes if _is_whole(node)]
    for node in idle:
        _replace(exported, node, node.args[0])
    if idle:
        owner.recompile()


def _is_whole(node: Node) -> bool:
    """Returns whether a node is a slice from the beginning to the end, without steps."""
    if node.target is not _aten.slice.Tensor or node.kwargs:
        return False
    start, end, step = (*node.args, None, None, None, None)[2:5]
    return start in (None, 0) and end in (None, sys.maxsize) and step in (None, 1)


def write_idle_expansions(exported: torch.export.ExportedProgram) -> None:
    """Rewrites `expand`s that repeat nothing as unsqueezes; changes the program.

    After an in-place change of an `expand`, torch adds the sum of all differences to the original,
    which loses infinities, NaN and the digits of large numbers.
    """
    owner = exported.graph_module
    if not any(_is_mutable(node) for node in owner.graph.nodes):
        return
    graph = owner.graph
    parts = [node for node in graph.nodes if _is_idle_part(node)]
    for node in parts:
        source = _part_of(node)
        with graph.inserting_before(node):
            made = graph.call_function(_aten.view.default, (source, [*_value(node).shape]))
        made.meta = dict(node.meta)
        _replace(exported, node, made)
    idle = [
        node
        for node in graph.nodes
        if node.target in EXPANSIONS and _is_idle(_value(node), _value(node.args[0]))
    ]
    for node in idle:
        made = node.args[0]
        with graph.inserting_before(node):
            for _ in range(_value(node).dim() - _value(made).dim()):
                value = _value(made).unsqueeze(0)
                made = graph.call_function(_aten.unsqueeze.default, (made, 0))
                made.meta = {**node.meta, "val": value}
        _replace(exported, node, made)
    if idle or parts:
        owner.recompile()


def _replace(exported: torch.export.ExportedProgram, node: Node, made: Node) -> None:
    exported.graph_signature.replace_all_uses(node.name, made.name)
    node.replace_all_uses_with(made)
    exported.graph_module.graph.erase_node(node)


def _is_idle(value: torch.Tensor, made: torch.Tensor) -> bool:
    """Returns whether an `expand` only adds dimensions of size one.

    Inside `torch.vmap` the answer is False, because its values cannot be used afterwards.
    """
    if _private.is_wrapped(made):
        return False
    new = value.dim() - made.dim()
    return value.shape[new:] == made.shape and all(size == 1 for size in value.shape[:new])


def _is_idle_part(node: Node) -> bool:
    """Returns whether a node is a result of a joint expansion that repeats nothing."""
    whole: Any = node.args[0] if node.args else None
    if node.target is not operator.getitem or whole.target not in _TOGETHER:
        return False
    sizes = _value(node).shape, _value(_part_of(node)).shape
    fixed = all(isinstance(size, int) for shape in sizes for size in shape)
    return fixed and math.prod(sizes[0]) == math.prod(sizes[1]) > 0


def _part_of(node: Any) -> Any:
    """Returns the operand that a result of a joint expansion expands."""
    whole, at = node.args
    return whole.args[0][at]


def _is_mutable(node: Node) -> bool:
    schema = _private.schema_of(node.target) if node.op == "call_function" else None
    return schema is not None and bool(schema.is_mutable)


def other_forms(
    exported: torch.export.ExportedProgram, table: Decompositions
) -> frozenset[str] | None:
    """Finds operations that are variants of others; None if the program must be traced again.

    Args:
        exported: The program as torch recorded it.
        table: Torch's decompositions without those of operations that are lowered whole.
    """
    forms: set[str] = set()
    return frozenset(forms) if _look(exported.graph_module, table, forms) else None


def _look(owner: GraphModule, table: Decompositions, forms: set[str]) -> bool:
    """Returns whether all operations are in final form, or variants."""
    order = {node: i for i, node in enumerate(owner.graph.nodes)}
    for node in owner.graph.nodes:
        if node.op == "get_attr":
            inner = getattr(owner, str(node.target), None)
            if not isinstance(inner, GraphModule) or not _look(inner, table, forms):
                return False
            if any(user.target is not _SET_GRAD for user in node.users):
                return False
        elif node.op == "call_function":
            op = _form_of(node, order)
            if op is not None and not table.leave(node.target):
                forms.add(op)
            elif not (_is_kept(node) or table.leave(node.target)):
                return False
            if node.target is _SET_GRAD:
                forms.add(WITHOUT_GRADIENTS)
        elif node.op not in ("placeholder", "output"):
            return False
        if not _is_plain(node.meta.get("val")):
            return False
    return True


def _is_kept(node: Node) -> bool:
    """Returns whether a call that is not lowered stays as it is, such as arithmetic on sizes."""
    if node.target in _KEPT:
        return True
    return isinstance(node.meta.get("val"), _SYMBOLIC) and (
        node.target is _aten.sym_size.int
        or getattr(node.target, "__module__", "") in ("_operator", "math")
    )


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a dense real array, or several of these."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return value is None or isinstance(value, (bool, int, float, str, *_SYMBOLIC))
    is_dense = value.layout is torch.strided and not value.is_complex()
    return is_dense and value.device.type != "meta"


def _form_of(node: Node, order: dict[Node, int]) -> str | None:
    """Returns the operation that a call is a variant of; None for others."""
    op = _FORMS.get(node.target)
    if op is None:
        return None
    is_fit = _ONLY.get(op)
    if op in IN_PLACE:
        return op if _is_seen_once(node, order) and _keeps_kind(node) else None
    return op if is_fit is None or is_fit(node, *node.args, **node.kwargs) else None


def _is_on_one_device(node: Node, x: Node, *args: Any, **kwargs: Any) -> bool:
    """Returns whether a cast stays on the same device."""
    if kwargs.get("copy") or kwargs.get("memory_format") or True in args:
        return False
    if any(isinstance(arg, torch.memory_format) for arg in args):
        return False
    return bool(_value(x).device == _value(node).device)


def _is_fixed(
    node: Node, x: Node, weight: Any, bias: Any, mean: Any, variance: Any, train: bool, *_: Any
) -> bool:
    """Returns whether a batch norm uses the given statistics."""
    return not train and mean is not None and variance is not None


def _has_fixed_parts(node: Node, x: Node, number: Any, dim: int = 0) -> bool:
    """Returns whether the parts into which an array is split have fixed sizes."""
    return all(type(part.shape[dim]) is int for part in _value(node))


_ONLY: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(
        ("aten::to.device", "aten::to.dtype", "aten::to.dtype_layout", "aten::type_as.default"),
        _is_on_one_device,
    ),
    "aten::transpose.int": lambda node, x, *_: _value(x).dim() > 0,
    "aten::t.default": lambda node, x: _value(x).dim() == 2,
    "aten::batch_norm.default": _is_fixed,
    "aten::rsub.Scalar": lambda node, *args: len(args) == 2,  # without a factor
    **dict.fromkeys(("aten::chunk.default", "aten::split.Tensor"), _has_fixed_parts),
}


# --- changes in place ----------------------------------------------------------------------------


def _is_seen_once(node: Node, order: dict[Node, int]) -> bool:
    """Returns whether no other result sees an operation's in-place change."""
    root: Any = node.args[0]
    while _is_in_place(root):
        root = root.args[0]
    names = [root]
    for name in names:
        names += [
            writer for writer in name.users if _is_in_place(writer) and writer.args[0] is name
        ]
    return root.target in _NEW and all(
        order[user] > order[node] or user is node or user.target in _NEW or _is_in_place(user)
        for name in names
        for user in name.users
    )


def _is_in_place(node: Node) -> bool:
    return _FORMS.get(node.target) in IN_PLACE


def _keeps_kind(node: Node) -> bool:
    """Returns whether the out-of-place operation gives the same dtype and shape."""
    if node.target in _WRITES:
        return True
    given = [_value(source) for source in node.all_input_nodes]
    if any(free_unbacked_symbols(value) for value in given):  # torch would compare these sizes
        return all(getattr(value, "dtype", None) is _value(node).dtype for value in given)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value)
    wanted = _value(node)
    with wanted.fake_mode:
        result = _overload(IN_PLACE[_FORMS[node.target]])(*args, **kwargs)
    return bool(result.dtype == wanted.dtype and result.shape == wanted.shape)


def _value(node: Node) -> Any:
    return node.meta["val"]


def _overload(op: str) -> Any:
    name, _, overload = op.removeprefix("aten::").partition(".")
    return getattr(getattr(_aten, name), overload)


_FORMS: dict[Any, str] = {_overload(op): op for op in FORMS}

# Changes of single elements, which keep dtype and shape.
_WRITES = frozenset(map(_overload, WRITES))

# Operations whose results are new arrays, not views of their operands.
_NEW = frozenset(map(_overload, IN_PLACE.values())) | {
    _aten.zeros_like.default,
    _aten.zeros.default,
    _aten.new_zeros.default,
    _aten.batch_norm.default,
    _aten.index.Tensor,
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
