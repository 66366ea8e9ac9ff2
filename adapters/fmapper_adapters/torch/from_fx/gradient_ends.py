"""Marks the places in a recording where gradients end: `detach` and `torch.no_grad`.

Decompositions remove both, because neither changes a value. So each such place gets a custom
operation, which they keep. This happens before they run, on torch's graph with its in-place
changes.
"""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.from_fx import silent_writes


@torch.library.custom_op("fmapper::stop_gradient", mutates_args=())
def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """Returns the values, detached from gradients."""
    return x.clone()


@stop_gradient.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


STOP: Any = torch.ops.fmapper.stop_gradient.default


def mark(exported: torch.export.ExportedProgram) -> None:
    """Marks where gradients end, in a program before decomposition; changes it."""
    _mark_graph(exported.graph_module)


def _mark_graph(owner: torch.fx.GraphModule) -> None:
    graph = owner.graph
    for node in list(graph.nodes):
        if _is_without_gradients(node):
            silent_writes.inline(owner, node, STOP)
    for node in list(graph.nodes):
        if node.op == "get_attr":
            inner = getattr(owner, str(node.target), None)
            if isinstance(inner, torch.fx.GraphModule):
                _mark_graph(inner)
                if any(_is_without_gradients(user) for user in node.users):
                    _mark_outputs(inner)
    if silent_writes.end_at_detach(graph, STOP):
        owner.recompile()


def _is_without_gradients(node: torch.fx.Node) -> bool:
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    return node.target is wrap and node.args[0] is False


def _mark_outputs(owner: torch.fx.GraphModule) -> None:
    graph = owner.graph
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):

        def end(value: Any) -> Any:
            if value.op == "placeholder" or not isinstance(value.meta.get("val"), torch.Tensor):
                return value
            new = graph.call_function(STOP, (value,))
            new.meta = dict(value.meta)
            return new

        output.args = torch.fx.node.map_arg(output.args, end)
    owner.recompile()
