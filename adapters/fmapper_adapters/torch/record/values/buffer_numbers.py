"""Asserts the numbers that a program reads only from buffers and uses as sizes.

    self.padding = nn.Buffer(torch.tensor(kernel_size - stride))
    ...
    x = F.pad(x, (self.padding, 0))

The size of the result does not depend on the inputs. Once the number is asserted, the program has
no size that depends on values, and compiles.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fmapper_adapters.torch import _private

_aten = torch.ops.aten
_READS = (_aten.item.default, _aten._local_scalar_dense.default)
_UNKNOWN: Any = object()


def assert_numbers(exported: torch.export.ExportedProgram) -> None:
    """Adds an assertion after each such read."""
    graph = exported.graph
    reads = [node for node in graph.nodes if node.target in _READS and _symbols(node.meta["val"])]
    if not reads:
        return
    sizes = {
        symbol
        for node in graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        for symbol in _symbols(node.meta["val"])
    }
    values = _values_of_buffers(exported)
    for node in reads:
        if _symbols(node.meta["val"]) <= sizes:
            number = _value(node, values)
            if type(number) is int:
                _assert(graph, node, number)


def _symbols(value: Any) -> set[Any]:
    is_integer = isinstance(value, torch.Tensor | torch.SymInt)
    return set(free_unbacked_symbols(value)) if is_integer else set()


def _values_of_buffers(exported: torch.export.ExportedProgram) -> dict[Node, Any]:
    """Returns the arrays of buffers and constants that the program does not change."""
    arrays = {**exported.constants, **exported.state_dict}
    inputs = [node for node in exported.graph.nodes if node.op == "placeholder"]
    values = {
        node: arrays.get(spec.target)
        for node, spec in zip(inputs, exported.graph_signature.input_specs, strict=True)
        if spec.kind.name in ("BUFFER", "CONSTANT_TENSOR")
    }
    changed = _find_writes(exported.graph)
    return {
        node: array
        for node, array in values.items()
        if node not in changed
        and isinstance(array, torch.Tensor)
        and not isinstance(array, _private.FakeTensor)
        and not array.is_meta
    }


def _find_writes(graph: torch.fx.Graph) -> set[Node]:
    """Returns the nodes to which an operation may write, through any view."""
    todo: list[Node] = []
    for node in graph.nodes:
        schema = _private.schema_of(node.target)
        if schema is not None and schema.is_mutable:
            todo += node.all_input_nodes
    written: set[Node] = set()
    while todo:
        node = todo.pop()
        if node not in written:
            written.add(node)
            todo += node.all_input_nodes
    return written


def _value(node: Node, values: dict[Node, Any]) -> Any:
    """Computes the value of a node from the values of buffers, if it depends on nothing else."""
    todo = [node]
    while todo:
        at = todo[-1]
        left = [source for source in at.all_input_nodes if source not in values]
        if at in values:
            todo.pop()
        elif left and _is_pure(at):
            todo += left
        elif not _is_pure(at):
            values[at] = _UNKNOWN
        else:
            values[at] = _compute(at, values)
    return values[node]


def _compute(node: Any, values: dict[Node, Any]) -> Any:
    if any(values[source] is _UNKNOWN for source in node.all_input_nodes):
        return _UNKNOWN
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _is_pure(node: Node) -> bool:
    """Returns whether a node is a call whose result depends only on its operands."""
    if node.op != "call_function" or any(
        source.op == "get_attr" for source in node.all_input_nodes
    ):
        return False
    schema = _private.schema_of(node.target)
    if schema is None:
        return getattr(node.target, "__module__", "") == "_operator"
    tags = getattr(node.target, "tags", ())
    return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags


def _assert(graph: torch.fx.Graph, node: Node, number: int) -> None:
    meta = {key: value for key, value in node.meta.items() if key != "custom"}
    with graph.inserting_after(node):
        equal = graph.call_function(operator.eq, (node, number))
    equal.meta = {**meta, "val": node.meta["val"] == number}
    message = f"a number that is read from buffers is {number}"
    with graph.inserting_after(equal):
        check: Any = _aten._assert_scalar.default
        graph.call_function(check, (equal, message)).meta = {**meta, "val": None}
