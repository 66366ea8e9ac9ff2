"""Keeps in a recorded program where gradients end: `detach` and `torch.no_grad`.

Decompositions forget both, since neither changes a value. Before they run, each such place gets an
operation of fmapper's own, which they leave alone.

So this changes torch's graph, in which tensors are still changed in place; a program comes later.
"""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch import _private


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
    changed = False
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            inner = getattr(owner, str(node.target), None)
            if isinstance(inner, torch.fx.GraphModule):
                _mark_graph(inner)
                if any(_is_without_gradients(user) for user in node.users):
                    _mark_outputs(inner)
        elif node.target is torch.ops.aten.detach.default and not _is_written_to(node, order):
            node.target = STOP
            changed = True
    if changed:
        owner.recompile()


def _is_without_gradients(node: torch.fx.Node) -> bool:
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    return node.target is wrap and node.args[0] is False


def _mark_outputs(owner: torch.fx.GraphModule) -> None:
    graph = owner.graph
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):

        def end(value: Any) -> Any:
            if not isinstance(value.meta.get("val"), torch.Tensor):
                return value
            new = graph.call_function(STOP, (value,))
            new.meta = dict(value.meta)
            return new

        output.args = torch.fx.node.map_arg(output.args, end)
    owner.recompile()


def _is_written_to(node: torch.fx.Node, order: dict[torch.fx.Node, int]) -> bool:
    """Returns whether a view is written to later, so that it must stay a view."""
    base = node
    while (seen_through := _base_of(base)) is not None:
        base = seen_through
    todo, seen = [base], {base}
    while todo:
        value = todo.pop()
        for user in value.users:
            schema = _private.schema_of(user.target)
            if schema is None:
                continue
            for argument, given in zip(schema.arguments, user.args, strict=False):
                info = argument.alias_info
                if given is not value or info is None:
                    continue
                if info.is_write and order[user] > order[node]:
                    return True
                if user not in seen:  # a view
                    seen.add(user)
                    todo.append(user)
    return False


def _base_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Returns the base of a view."""
    schema = _private.schema_of(node.target)
    for argument, given in zip(schema.arguments if schema else (), node.args, strict=False):
        if argument.alias_info is not None and isinstance(given, torch.fx.Node):
            return given
    return None
