"""What a graph computes from nothing, computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_LARGEST = 1 << 22  # elements; what is larger is made anew in each call
_SMALL = 1 << 16
_FACTORIES = {torch.arange, torch.full, torch.zeros, torch.ones, torch.empty}


def hoisted(graph: fx.Graph, prefix: str) -> dict[str, torch.Tensor]:
    """Takes tensors out of a graph that depend on none of its inputs.

    Args:
        graph: The graph; it gets attributes of the module in their places.
        prefix: What the names of those attributes begin with.

    Returns:
        The tensors by the names of the attributes, on the CPU.
    """
    known = _known(graph)
    found: dict[str, torch.Tensor] = {}
    values: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node not in known or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if all(user in known for user in node.users) or node.meta["val"].numel() > _LARGEST:
            continue
        name = f"{prefix}{len(found)}"
        value = _value(node, values)
        # a view of one number takes the memory of one number, but is no tensor to be saved
        found[name] = value.contiguous() if value.numel() < _SMALL else value
        with graph.inserting_before(node):
            constant = graph.create_node("get_attr", name, (), {}, name=node.name)
        constant.meta.update(node.meta)
        values[constant] = found[name]
        node.replace_all_uses_with(constant)
    for node in list(graph.nodes):
        if node.target is torch.where and _is_true(node.args[0], found):
            chosen = node.args[1]
            if isinstance(chosen, fx.Node) and (chosen.meta["val"].shape == node.meta["val"].shape):
                node.replace_all_uses_with(chosen)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    return {name: tensor for name, tensor in found.items() if name in used}


def _is_true(condition: Any, found: dict[str, torch.Tensor]) -> bool:
    return (
        condition.op == "get_attr"
        and condition.target in found
        and bool(found[condition.target].all())
    )


def _known(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no input, except for the device of one."""
    known: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        sources = node.all_input_nodes
        if _is_device(node):
            known.add(node)
            continue
        is_plain = bool(sources or node.target in _FACTORIES) and not _is_special(node)
        if is_plain and all(source in known for source in sources):
            known.add(node)
    return known


def _is_device(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1:] == ("device",)


def _is_special(node: fx.Node) -> bool:
    """Whether a call is of a function that is no plain one of torch's, as a loop."""
    return bool(getattr(node.target, "is_control_flow", False))


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node not in values:
        if _is_device(node):
            values[node] = torch.device("cpu")
        else:
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda source: _value(source, values)
            )
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                target: Any = node.target
                values[node] = target(*args, **kwargs)
    return values[node]
