"""Writes that autograd does not see: to the results of `detach`, and in `torch.no_grad`.

A tensor and its detached alias share memory but have separate gradients. Decompositions know only
one gradient per memory. So the alias becomes a copy, and each write to one of them is followed by a
write of the same values to the others, which leaves their gradients unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fmapper_adapters.torch import _private


@torch.library.custom_op("fmapper::overwrite", mutates_args=())
def overwrite(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns `value` with the gradient of `x`, as after a write that autograd does not see."""
    return value.clone()


@overwrite.register_fake
def _(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


def _backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


overwrite.register_autograd(_backward)
_DETACH: Any = torch.ops.aten.detach.default
_DETACH_IN_PLACE: Any = torch.ops.aten.detach_.default
_CONSTANT: Any = torch.ops.aten.lift_fresh_copy.default
# Operations whose results have new memory; schemas miss some, as `dropout` can return its input.
_NAMES = """
add addmm baddbmm bmm clamp clone conv1d conv2d conv3d cos div empty exp full gelu linear log
log_softmax masked_fill matmul max mean min mm mul neg new_zeros ones ones_like pow relu rsub
sigmoid silu sin softmax softplus sqrt sub sum tanh where zeros zeros_like
"""
_NEW = frozenset(_NAMES.split())
OVERWRITE: Any = torch.ops.fmapper.overwrite.default
_COPY: Any = torch.ops.aten.copy_.default


def inline(owner: GraphModule, call: Node, stop: Any) -> None:
    """Inlines a part without gradients if it writes to tensors; leaves others unchanged.

    Tensors that it writes to get only the values, not the gradients. Tensors that it creates have
    no gradients, since these end at its results; they are written to directly.

    Args:
        owner: The module with the graph of the call.
        call: The call of the part.
        stop: The operation that ends gradients.
    """
    inner = getattr(owner, str(getattr(call.args[1], "target", "")), None)
    if not isinstance(inner, GraphModule) or not any(_writes(node) for node in inner.graph.nodes):
        return
    graph = owner.graph
    given = iter(call.args[2:])
    values: dict[Node, Any] = {}
    copies: set[Node] = set()
    results: Any = ()
    with graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                results = torch.fx.node.map_arg(node.args[0], values.__getitem__)
            elif node.op == "get_attr":
                values[node] = _adopt(owner, call, inner, node)
            else:
                values[node] = _copy(graph, node, values, copies, stop)
        outer = set(call.all_input_nodes)  # a write to an operand returns the operand
        ends = [result if result in outer else _end(graph, result) for result in results]
    for user in list(call.users):
        at: Any = user.args[1]
        user.replace_all_uses_with(ends[at])
        graph.erase_node(user)
    part: Any = call.args[1]
    graph.erase_node(call)
    if not part.users:
        graph.erase_node(part)
    owner.recompile()


def _adopt(owner: GraphModule, call: Node, inner: GraphModule, node: Node) -> Node:
    """Moves a module or constant of the part to its owner."""
    name = f"{call.name}_{node.target}".replace(".", "_")
    setattr(owner, name, getattr(inner, str(node.target)))
    new = owner.graph.get_attr(name)
    new.meta = dict(node.meta)
    return new


def _copy(graph: Graph, node: Node, values: dict[Node, Any], copies: set[Node], stop: Any) -> Node:
    """Copies an operation; writes go to a detached copy, whose values are then copied on.

    Args:
        graph: The graph that the copy is added to.
        node: The operation.
        values: The values of the part -> those in the graph; extended.
        copies: Values whose memory belongs to the part alone; extended.
        stop: The operation that ends gradients.
    """
    new = graph.node_copy(node, values.__getitem__)
    written = list(_writes(new))
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    if name in _NEW or (written and copies.issuperset(written)):
        copies.add(new)
    for target in (tensor for tensor in written if tensor not in copies):
        with graph.inserting_before(new):
            apart = graph.call_function(stop, (target,))
            apart.meta = _meta_of(target, new)
        _replace_written(new, target, apart)
        _overwrite(graph, target, apart, new)
        new = target  # the operation returns its target
    return new


def _replace_written(node: Node, old: Node, new: Node) -> None:
    schema = _private.schema_of(node.target)
    args = list(node.args)
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if at < len(args) and args[at] is old:
            args[at] = new
        elif node.kwargs.get(argument.name) is old:
            node.kwargs = {**node.kwargs, argument.name: new}
    node.args = tuple(args)


def _end(graph: Graph, value: Any) -> Any:
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    end = graph.call_function(_DETACH, (value,))
    end.meta = dict(value.meta)
    return end


def _overwrite(graph: Graph, target: Node, source: Node, write: Node) -> Node:
    """Adds a write of one tensor's values to another, as part of a write."""
    value = graph.call_function(OVERWRITE, (target, source))
    copy = graph.call_function(_COPY, (target, value))
    value.meta, copy.meta = _meta_of(target, write), _meta_of(target, write)
    return copy


def _meta_of(tensor: Node, call: Node) -> dict[str, Any]:
    """Returns the metadata of a tensor, with the module and the line of a call."""
    keys = ("nn_module_stack", "stack_trace")
    return {**tensor.meta, **{key: call.meta[key] for key in keys if key in call.meta}}


def end_at_detach(graph: Graph, stop: Any) -> bool:
    """Ends gradients at each `detach`, also if its memory is written; returns if one was found.

    Args:
        graph: The graph, which is changed.
        stop: The operation that ends gradients.
    """
    for node in list(graph.nodes):
        if node.target is _DETACH_IN_PLACE and node.args[0].target is not _CONSTANT:
            node.target = _DETACH
    order = {node: i for i, node in enumerate(graph.nodes)}
    detached = [node for node in order if node.target is _DETACH]
    branches = {node: _branch(node, detached) for node in order}
    sources: dict[Node, Node] = {node: node.args[0] for node in detached}
    writes = [(node, branches[target]) for node in order for target in _writes(node)]
    for write, branch in writes if detached else ():
        earlier = [node for node in detached if order[node] < order[write]]
        seen, todo, last = {branch}, [branch], write
        while todo:
            current = todo.pop(0)
            pairs = [
                (node, sources[node]) for node in earlier if branches[sources[node]] is current
            ]
            if current in sources:
                pairs.append((sources[current], current))
            for target, source in pairs:
                if branches[target] not in seen:
                    seen.add(branches[target])
                    todo.append(branches[target])
                    with graph.inserting_after(last):
                        value = graph.call_function(OVERWRITE, (target, source))
                    with graph.inserting_after(value):
                        last = graph.call_function(_COPY, (target, value))
                    value.meta, last.meta = _meta_of(target, write), _meta_of(target, write)
    for node in detached:
        node.target = stop
    return bool(detached)


def _branch(node: Node, detached: list[Node]) -> Node:
    """Returns the base of a view: a tensor with its own memory, or a detached one."""
    while node not in detached:
        base = _base_of(node)
        if base is None:
            break
        node = base
    return node


def _base_of(node: Node) -> Node | None:
    """Returns the base of a view, or the target of a write."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return node.args[0]  # results of a split
    schema = _private.schema_of(node.target)
    for argument, given in zip(schema.arguments if schema else (), node.args, strict=False):
        if argument.alias_info is not None and isinstance(given, Node):
            return given
    return None


def _writes(node: Node) -> Iterator[Node]:
    """Yields the tensors that a call writes to."""
    schema = _private.schema_of(node.target)
    for at, argument in enumerate(schema.arguments if schema else ()):
        given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        info = argument.alias_info
        if info is not None and info.is_write and isinstance(given, Node):
            yield given
