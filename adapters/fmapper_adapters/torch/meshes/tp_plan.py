"""Axes of arrays from the `tp_plan` of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

# Style -> the dimension that it divides of weights, and of biases; None for undivided ones.
_STYLES: dict[str, tuple[int, int | None]] = {
    "colwise": (-2, 0),
    "colwise_rep": (-2, 0),
    "colwise_gather_output": (-2, 0),
    "packed_colwise": (-2, 0),
    "rowwise": (-1, None),
    "rowwise_rep": (-1, None),
    "rowwise_split_input": (-1, None),
    "packed_rowwise": (-1, None),
    "embedding_rowwise": (0, 0),
    "embedding_colwise": (1, None),
}


# With these styles the product is a sum over devices.
_SUMMED = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_rowwise")


def axes(module: Any) -> Sequence[tuple[str, torch.Tensor, tuple[Any, ...]]]:
    """Returns name, parameter and axes of the parameters that a module has a plan for.

    The module is a model of transformers, or was converted from one. The axis of a divided
    dimension is `tensor`. Other styles of a plan define communication between modules, which
    follows from the placement of their arrays.
    """
    if not isinstance(module, torch.nn.Module):
        return ()
    converted = vars(module).get("_mesh_axes")
    if converted:
        named = dict(module.named_parameters(remove_duplicate=False))
        return [(name, named[name], spec) for name, spec in converted.items() if name in named]
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, dict):
        return ()
    result: list[tuple[str, torch.Tensor, tuple[Any, ...]]] = []
    for name, parameter, style in _styles(module, plan):
        last = name.rpartition(".")[2]
        weights, biases = _STYLES[style]
        is_vector = parameter.ndim == 1 or last.endswith("bias")
        at = biases if is_vector else weights
        if at is None:
            result.append((name, parameter, (None,) * parameter.ndim))
        else:
            spec: list[str | None] = [None] * parameter.ndim
            spec[parameter.ndim - 1 if is_vector else at] = "tensor"
            result.append((name, parameter, tuple(spec)))
    return result


def sums(module: Any) -> Sequence[str]:
    """Returns the names of weights whose products are sums over devices, by a module's plan."""
    plan = getattr(module, "tp_plan", None) if isinstance(module, torch.nn.Module) else None
    if not isinstance(plan, dict) or vars(module).get("_mesh_axes"):
        return ()
    return [n for n, p, style in _styles(module, plan) if style in _SUMMED and p.ndim > 1]


def _styles(
    module: torch.nn.Module, plan: Mapping[str, str]
) -> Iterator[tuple[str, torch.nn.Parameter, str]]:
    """Yields name, parameter and style of the parameters in a plan."""
    styles = [(_regex(pattern), style) for pattern, style in plan.items() if style in _STYLES]
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        style = next((s for r, s in styles if r.fullmatch(name) or r.fullmatch(owner)), None)
        if style is not None and parameter.ndim:
            yield name, parameter, style


def axes_below(module: torch.nn.Module) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields name and axes of parameters in the plans of a module and its submodules."""
    for path, part in module.named_modules():
        for name, _, spec in axes(part):
            yield f"{path}.{name}" if path else name, spec


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
