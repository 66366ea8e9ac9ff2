"""Weights of recurrent networks in torch's layout, and products moved out of loops."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fmapper.programs import Call, Graph, Ref, substitute
from fmapper_adapters.torch.fuse import Gate, Gru, Lstm, Part
from fmapper_adapters.torch.model.emit import current


def of_lstm(lstm: Lstm, constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the two matrices of an LSTM and the sum of its biases."""
    return (
        _matrix([gate.x for gate in lstm.gates], lstm.size, constants),
        _matrix([gate.h for gate in lstm.gates], lstm.size, constants),
        torch.cat([_bias(gate, lstm.size, constants) for gate in lstm.gates], 0),
    )


def of_gru(gru: Gru, constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the two matrices of a GRU and its two biases."""
    gates = [gru.reset, gru.update, gru.new]
    biases = [_bias(gate, gru.size, constants) for gate in gates]
    inner = Gate(gru.new.x, gru.hidden, gru.hidden_biases, gru.hidden_number)
    zeros = torch.zeros_like(biases[0])
    return (
        _matrix([gate.x for gate in gates], gru.size, constants),
        _matrix([gru.reset.h, gru.update.h, gru.hidden], gru.size, constants),
        torch.cat(biases, 0),
        torch.cat([zeros, zeros, _bias(inner, gru.size, constants)], 0),
    )


def _matrix(parts: Sequence[Part], size: int, constants: Mapping[str, Any]) -> Any:
    """Stacks the matrices of gates."""
    first = parts[0]
    whole = constants[first.name]
    turned = whole if first.units_first else whole.t()
    same = {(part.name, part.rows, part.units_first) for part in parts}
    if len(same) == 1 and [p.start for p in parts] == [size * i for i in range(len(parts))]:
        row, count = first.rows
        is_all = turned.fake.shape == (len(parts) * size, count)
        return turned if is_all else turned.narrow(0, 0, len(parts) * size).narrow(1, row, count)

    def matrix(part: Part) -> Any:
        whole = constants[part.name]
        turned = whole if part.units_first else whole.t()
        return turned.narrow(0, part.start, size).narrow(1, *part.rows)

    return torch.cat([matrix(part) for part in parts], 0)


def _bias(gate: Gate, size: int, constants: Mapping[str, Any]) -> Any:
    parts = [constants[part.name].narrow(0, part.start, size) for part in gate.biases]
    if not parts:
        return constants[gate.x.name].new_full((size,), gate.number)
    total = functools.reduce(operator.add, parts)
    return total + gate.number if gate.number else total


def with_products_of_all_rows(
    body: Graph, constants: Sequence[Any], others: Sequence[Any], xs: Sequence[Any]
) -> tuple[Graph, tuple[Any, ...]]:
    """Rewrites a loop so that products of its rows with constants become one product.

    Args:
        body: The graph of a step.
        constants: The values of its first inputs.
        others: The values of its inputs before the rows.
        xs: The arrays whose rows are its inputs.

    Returns:
        The new step, and the arrays whose rows are its inputs.
    """
    weights = dict(zip(body.inputs, constants, strict=False))
    rows = dict(zip(body.inputs[len(others) :], xs, strict=True))
    names: list[str] = []
    made: list[Any] = []
    kinds: list[Any] = []
    for call in body.calls:
        product = _of_rows(call, rows, weights)
        if product is not None:
            names.append(call.name)
            made.append(product)
            kinds.append(call.result[0])
    if not names:
        return body, tuple(xs)
    taken = {*body.inputs, *(call.name for call in body.calls)}
    inputs = [next(n for i in range(len(taken) + 1) if (n := f"{name}_row{i}") not in taken)
              for name in names]  # fmt: skip
    refs = {name: Ref(new) for name, new in zip(names, inputs, strict=True)}
    calls = [
        replace(call, args=substitute(call.args, refs), kwargs=substitute(call.kwargs, refs))
        for call in body.calls
        if call.name not in refs
    ]
    graph = Graph(
        (*body.inputs, *inputs), calls, substitute(body.outputs, refs), (*body.kinds, *kinds)
    )
    return graph, (*xs, *made)


def _of_rows(call: Call, rows: Mapping[str, Any], weights: Mapping[str, Any]) -> Any | None:
    """Multiplies all rows at once by a constant matrix."""
    if call.op != "lax::dot_general" or len(call.args) != 2 or len(set(call.args)) != 2:
        return None
    row, weight = call.args
    (of_row, of_weight), (batch, _) = call.kwargs["dimension_numbers"]
    turned = isinstance(weight, Ref) and weight.name in rows
    if turned:
        row, weight, of_row, of_weight = weight, row, of_weight, of_row
    if batch or not isinstance(row, Ref) or not isinstance(weight, Ref):
        return None
    if row.name not in rows or weight.name not in weights or len(of_row) != 1:
        return None
    x, w = rows[row.name], weights[weight.name]
    if x.dtype is not w.dtype or x.dtype not in (torch.float32, torch.float64) or w.ndim != 2:
        return None
    if call.kwargs.get("precision") is not None or call.result[0][0] != _name(x):
        return None
    if (turned and x.ndim != 2) or of_row[0] != x.ndim - 2:
        return None
    return current().call(torch.matmul, x, w if of_weight[0] == 0 else w.t())


def _name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")
