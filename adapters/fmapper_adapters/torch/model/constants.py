"""Hoists constants: values that do not depend on an input are computed once, if that is cheap.

Like `fx_passes`, it works on torch's graph, the output of lowerings, and not on the program.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fmapper_adapters.torch.model import fx_passes

_LARGEST = 1 << 22  # elements; larger tensors are recomputed in each call
_SMALL = 1 << 16
_MOST_WORK = 1 << 27  # element operations for all constants of a graph
_MOST_BYTES = 1 << 27
_FACTORIES = {torch.arange, torch.full, torch.zeros, torch.ones, torch.empty}
_PRODUCTS = ("mm", "matmul", "einsum", "dot", "linear", "addmv", "outer")
_SORTS = ("sort", "topk", "median", "quantile", "unique", "cum")


def hoist(graph: fx.Graph, prefix: str) -> dict[str, torch.Tensor]:
    """Moves tensors that do not depend on an input out of a graph.

    A graph may come from an untrusted file: tensors that are large, or take long, stay in it.

    Args:
        graph: The graph, in which attributes of the module replace them.
        prefix: The prefix of the names of those attributes.

    Returns:
        The tensors by the names of the attributes, on the CPU.
    """
    constants = _constant_nodes(graph)
    tensors: dict[str, torch.Tensor] = {}
    chosen = [
        node
        for node in graph.nodes
        if node in constants
        and isinstance(node.meta.get("val"), torch.Tensor)
        and any(user not in constants for user in node.users)
    ]
    for node, value in _values(graph, chosen):
        name = f"{prefix}{len(tensors)}"
        # a broadcast view is small, but cannot be saved as a tensor
        tensors[name] = value.contiguous() if value.numel() < _SMALL else value
        with graph.inserting_before(node):
            constant = graph.create_node("get_attr", name, (), {}, name=node.name)
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant)
    for node in list(graph.nodes):
        if node.target is torch.where and _is_true(node.args[0], tensors):
            taken = node.args[1]
            if isinstance(taken, fx.Node) and (taken.meta["val"].shape == node.meta["val"].shape):
                node.replace_all_uses_with(taken)
    graph.eliminate_dead_code(fx_passes.is_kept)
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    return {name: tensor for name, tensor in tensors.items() if name in used}


def _is_true(condition: Any, tensors: dict[str, torch.Tensor]) -> bool:
    return (
        condition.op == "get_attr"
        and condition.target in tensors
        and bool(tensors[condition.target].all())
    )


def _constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns cheap nodes that depend on inputs only for the device."""
    constants: set[fx.Node] = set()
    work = size = 0
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        sources = node.all_input_nodes
        if _is_device(node):
            constants.add(node)
            continue
        is_plain = bool(sources or node.target in _FACTORIES) and not _is_special(node)
        if not is_plain or not all(source in constants for source in sources):
            continue
        elements = _elements(node)
        if elements > _LARGEST:
            continue
        takes = work + _work(node, elements), size + elements * 8
        if takes[0] <= _MOST_WORK and takes[1] <= _MOST_BYTES:
            constants.add(node)
            work, size = takes
    return constants


def _elements(node: fx.Node) -> int:
    """Counts the elements of the results of a node."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else (value,)
    return sum(int(x.numel()) for x in tensors if isinstance(x, torch.Tensor))


def _work(node: fx.Node, elements: int) -> int:
    """Returns an upper estimate of the number of steps of a node."""
    given = [max(1, _elements(source)) for source in node.all_input_nodes]
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    module = "" if isinstance(target, str) else getattr(target, "__module__", None) or ""
    largest = max([elements, *given])
    if "conv" in name:
        return elements * math.prod(given[1:])
    if any(part in name for part in _PRODUCTS):
        return math.isqrt(max(1, elements) * math.prod(given))
    if "linalg" in module or "linalg" in name:
        return 64 * largest * math.isqrt(largest)
    if module.startswith("fmapper") or any(part in name for part in _SORTS):
        return 64 * largest  # random bits, loops
    return largest


def _is_device(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1:] == ("device",)


def _is_special(node: fx.Node) -> bool:
    """Returns whether a call is a loop, a check, or draws random numbers."""
    is_loop = bool(getattr(node.target, "is_control_flow", False))
    return is_loop or fx_passes.draws(node) or fx_passes.is_kept(node)


def _values(graph: fx.Graph, chosen: list[fx.Node]) -> list[tuple[fx.Node, torch.Tensor]]:
    """Computes the values of some nodes, and frees intermediates."""
    left: dict[fx.Node, int] = {}  # number of pending users of each node
    todo = list(chosen)
    while todo:
        node = todo.pop()
        if node not in left:
            left[node] = 0
            todo += _sources(node)
    for node in left:
        for source in _sources(node):
            left[source] += 1
    values: dict[fx.Node, Any] = {}
    results = []
    wanted = set(chosen)
    for node in graph.nodes:
        if node not in left:
            continue
        values[node] = _value(node, values)
        if node in wanted:
            results.append((node, values[node]))
        for source in _sources(node):
            left[source] -= 1
            if not left[source]:
                del values[source]
    return results


def _sources(node: fx.Node) -> list[fx.Node]:
    return [] if _is_device(node) else node.all_input_nodes


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if _is_device(node):
        return torch.device("cpu")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)
