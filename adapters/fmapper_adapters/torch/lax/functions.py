"""Functions within a program that have custom derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from fmapper.programs import Graph, Ref, Scalar, substitute
from fmapper_adapters.torch.lax.table import Avals, dimensions, lax
from fmapper_adapters.torch.model import derivatives
from fmapper_adapters.torch.model.emit import current

_ONCE = (
    "the gradient of {0} cannot be differentiated: JAX would differentiate its forward rule, which "
    "does not call {0} itself. Let it do so, as in `return {0}(x), x`"
)
_NUMBERS = bool | int | float | complex


@lax(
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_linear_solve",
    "linear_solve",
    "random_gamma",
    takes_numbers=True,
    takes_avals=True,
    dims=dimensions.inner,
)
def custom_call(
    *operands: Any,
    call_jaxpr: Graph,
    function: str,
    differentiable: tuple[int, ...],
    cotangents: tuple[int, ...],
    backward: Graph | str,
    constants: tuple[int, int] = (0, 0),
    once: bool = False,
    avals: Avals,
) -> Any:
    emitter = current()
    count, more = constants
    entry = _KNOWN.get(function)
    if entry is not None and differentiable and _graph_text(call_jaxpr) == entry[0]:
        result = entry[1](*operands)
        if result is not None:
            return (result,)
    if function == "jax::_slogdet_lu" and len(operands) == 1:  # torch has this function
        result = torch.linalg.slogdet(operands[0])
        return result[0], result[1]
    tensors = tuple(
        emitter.make(torch.full, (), x, dtype=emitter.dtype(dtype))
        if isinstance(x, _NUMBERS)
        else x
        for x, (dtype, _) in zip(operands, avals.operands, strict=True)
    )
    if not differentiable or not cotangents:
        return emitter.inline(call_jaxpr, (*tensors[:count], *tensors[count + more :]))
    numbers = {
        i: Scalar(x, dtype)
        for i, (x, (dtype, _)) in enumerate(zip(operands, avals.operands, strict=True))
        if isinstance(x, _NUMBERS) and i - count - more not in differentiable
    }
    places = [i - count - more for i in range(count + more, len(operands)) if i not in numbers]
    left = (
        sum(i not in numbers for i in range(count)),
        sum(i not in numbers for i in range(count, count + more)),
    )
    body = _with_numbers(
        call_jaxpr,
        {i - more * (i >= count): x for i, x in numbers.items() if not count <= i < count + more},
    )
    if not isinstance(backward, str):
        backward = _with_numbers(backward, {i - count: x for i, x in numbers.items() if i >= count})
    results = emitter.call(
        derivatives.call_with_derivative,
        emitter.submodule(body, "function"),
        f"{function}: {backward}"
        if isinstance(backward, str)
        else emitter.submodule(backward, "backward"),
        tuple(x for i, x in enumerate(tensors) if i not in numbers),
        differentiable=tuple(map(places.index, differentiable)),
        cotangents=cotangents,
        **({"constants": left} if any(left) else {}),
        **({"once": _ONCE.format(function)} if once else {}),
    )
    results.node.meta["function"] = function
    return tuple(results[i] for i in range(len(avals.results)))


def _with_numbers(graph: Graph, numbers: Mapping[int, Scalar]) -> Graph:
    """Returns a graph with numbers in the places of some inputs, by their positions."""
    if not numbers:
        return graph
    values = {graph.inputs[i]: number for i, number in numbers.items()}
    calls = [
        dataclasses.replace(
            call, args=substitute(call.args, values), kwargs=substitute(call.kwargs, values)
        )
        for call in graph.calls
    ]
    kept = [i for i in range(len(graph.inputs)) if i not in numbers]
    inputs, kinds = tuple(graph.inputs[i] for i in kept), tuple(graph.kinds[i] for i in kept)
    return Graph(inputs, calls, substitute(graph.outputs, values), kinds)


def _graph_text(graph: Graph) -> str:
    """Returns a graph as text, which identifies known functions."""

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


# Functions of torch with JAX's derivative: that of relu is 0 at 0, that of relu6 at 0 and 6.
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
    """Emits softplus: torch's `logaddexp` has another derivative if both arguments are infinite."""
    if isinstance(x, int | float) or not isinstance(y, int | float) or y != 0:
        return None
    # softplus(x) == x beyond the threshold, which is higher for 64 bits
    return (
        functional.softplus(x, threshold=40) if x.dtype is torch.float64 else functional.softplus(x)
    )
