"""Names the effects of training that a recording for evaluation leaves out."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch import _private

_MODES = ("train", "training", "use_input_stats")  # the arguments of operations that switch it


def left_out_of(module: torch.nn.Module, exported: torch.export.ExportedProgram) -> str:
    """Says what of a module's training a recording for evaluation leaves out; empty for nothing.

    Operations of torch have their mode as an argument. Attention is given a rate of zero instead.
    """
    graphs = [one.graph for one in exported.graph_module.modules() if hasattr(one, "graph")]
    effects = {_effect_in_training(node) for graph in graphs for node in graph.nodes} - {""}
    attentions = [one for one in module.modules() if isinstance(one, torch.nn.MultiheadAttention)]
    if any(one.dropout for one in attentions):
        effects.add("dropout")
    return f"what it leaves out is {' and '.join(sorted(effects))}" if effects else ""


def _effect_in_training(node: torch.fx.Node) -> str:
    """Names the additional effect that an operation recorded for evaluation has in training."""
    schema = _private.schema_of(node.target)
    if schema is None:
        return ""
    given: dict[str, Any] = {one.name: one.default_value for one in schema.arguments}
    given |= {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    if next((given[name] for name in _MODES if name in given), None) is not False:
        return ""
    if "running_mean" in given:
        return "batch statistics"
    rate = given.get("p", given.get("dropout"))
    if rate is None:
        return "random numbers"
    is_single = given.get("num_layers") == 1  # which has no layer that a dropout would follow
    return "dropout" if rate and not is_single else ""
