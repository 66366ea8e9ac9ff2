"""Keeps the outputs of a recording in the order of their structure.

Some classes lose the order of their keys when torch's pytree rebuilds them: a `ModelOutput` has a
field that was assigned later at its end, but a rebuilt one has it where the class declares it.
torch flattens such outputs, rebuilds and flattens them again, but keeps the first structure for
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fmapper_adapters.torch._private import pytree


def decompose(
    exported: torch.export.ExportedProgram, table: Mapping[Any, Any]
) -> torch.export.ExportedProgram:
    """Calls `run_decompositions` with the outputs in a list, which keeps their order."""
    spec = exported.call_spec.out_spec
    assert spec is not None
    try:
        _set_spec(exported, pytree.tree_structure([0] * spec.num_leaves))
        decomposed: torch.export.ExportedProgram = exported.run_decompositions(dict(table))
        _set_spec(decomposed, spec)
    finally:
        _set_spec(exported, spec)
    return decomposed


def restore(exported: torch.export.ExportedProgram) -> None:
    """Restores the order of the outputs after a strict export, which has rebuilt them."""
    spec = exported.call_spec.out_spec
    assert spec is not None
    positions = pytree.tree_leaves(pytree.tree_unflatten(range(spec.num_leaves), spec))
    if positions == [*range(spec.num_leaves)]:
        return
    signature, node = exported.graph_signature, exported.graph.output_node()
    outputs, specs = [*node.args[0]], [*signature.output_specs]
    places = [i for i, entry in enumerate(specs) if entry.kind.name == "USER_OUTPUT"]
    pairs = [(outputs[i], specs[i]) for i in places]
    for position, pair in zip(positions, pairs, strict=True):
        outputs[places[position]], specs[places[position]] = pair
    node.args = (tuple(outputs),)
    signature.output_specs[:] = specs
    exported.graph_module.recompile()


def _set_spec(exported: torch.export.ExportedProgram, spec: Any) -> None:
    signature = exported.module_call_graph[0].signature
    assert signature is not None
    signature.out_spec = spec
