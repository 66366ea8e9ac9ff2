"""Functions within a program that have a derivative of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from fmapper.programs import Graph, Ref, Scalar
from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model import derivatives
from fmapper_adapters.torch.model.emit import current


@lax(
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_linear_solve",
    "linear_solve",
    "random_gamma",
    takes_numbers=True,
    takes_avals=True,
)
def custom_call(
    *operands: Any,
    call_jaxpr: Graph,
    function: str,
    differentiable: tuple[int, ...],
    cotangents: tuple[int, ...],
    backward: Graph | str,
    constants: tuple[int, int] = (0, 0),
    avals: Avals,
) -> Any:
    emitter = current()
    own, more = constants
    known = _KNOWN.get(function)
    if known is not None and differentiable and _graph_text(call_jaxpr) == known[0]:
        found = known[1](*operands)
        if found is not None:
            return (found,)
    tensors = tuple(
        emitter.make(torch.full, (), x, dtype=emitter.dtype(dtype))
        if isinstance(x, bool | int | float | complex)
        else x
        for x, (dtype, _) in zip(operands, avals.operands, strict=True)
    )
    if not differentiable or not cotangents:
        return emitter.inline(call_jaxpr, (*tensors[:own], *tensors[own + more :]))
    options = {"constants": constants} if own or more else {}
    results = emitter.call(
        derivatives.call_with_derivative,
        emitter.submodule(call_jaxpr, "function"),
        f"{function}: {backward}"
        if isinstance(backward, str)
        else emitter.submodule(backward, "backward"),
        tensors,
        differentiable=differentiable,
        cotangents=cotangents,
        **options,
    )
    return tuple(results[i] for i in range(len(avals.results)))


def _graph_text(graph: Graph) -> str:
    """Returns a graph as text, to recognise it by."""

    def text(value: Any) -> str:
        if isinstance(value, Ref):
            return value.name
        return str(value.value) if isinstance(value, Scalar) else str(value)

    calls = [
        f"{call.name} = {call.op.removeprefix('lax::')}({', '.join(map(text, call.args))})"
        for call in graph.calls
        if not call.kwargs
    ]
    return "; ".join([*calls, ", ".join(map(text, graph.outputs))])


# What torch has whole, with the derivative that JAX gives it: relu' is 0 at 0, relu6' at 0 and 6.
_KNOWN: dict[str, tuple[str, Callable[..., Any]]] = {}


def _recognise(name: str, written: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _KNOWN[f"jax::{name}"] = written, function
        return function

    return add


@_recognise("relu", "max = max(in_0, 0.0); max")
def _relu(x: Any) -> Any:
    return functional.threshold(x, 0.0, 0.0)  # torch's relu of -0.0 is -0.0


@_recognise("relu6", "max = max(in_0, 0.0); min = min(max, 6.0); min")
def _relu6(x: Any) -> Any:
    return functional.hardtanh(functional.threshold(x, 0.0, 0.0), 0.0, 6.0)


@_recognise(
    "logaddexp",
    "max = max(in_0, in_1); sub = sub(in_0, in_1); ne = ne(sub, sub); add = add(in_0, in_1); "
    "abs = abs(sub); neg = neg(abs); exp = exp(neg); log1p = log1p(exp); "
    "add_1 = add(max, log1p); select_n = select_n(ne, add_1, add); select_n",
)
def _softplus(x: Any, y: Any) -> Any:
    """Emits softplus: torch's `logaddexp` has another derivative where both are infinite."""
    if isinstance(x, int | float) or not isinstance(y, int | float) or y != 0:
        return None
    # beyond the threshold it is x itself: in 64 bits that is so later
    return (
        functional.softplus(x, threshold=40) if x.dtype is torch.float64 else functional.softplus(x)
    )
