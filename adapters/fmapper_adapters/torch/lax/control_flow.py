"""Loops and branches."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from fmapper.programs import Graph
from fmapper_adapters.torch.fuse import Gate, Lstm, Part, find_lstm
from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model import control_flow
from fmapper_adapters.torch.model.emit import current

# Calls in all steps of a loop, up to which torch.compile and torch.export are given each of them.
_UNROLLED = 600


@lax("scan", takes_avals=True)
def scan(
    *operands: Any,
    jaxpr: Graph,
    length: Any,
    reverse: bool,
    num_consts: int,
    num_carry: int,
    avals: Avals,
) -> Any:
    constants = operands[:num_consts]
    carry = operands[num_consts : num_consts + num_carry]
    xs = operands[num_consts + num_carry :]
    if isinstance(length, int) and length == 0:
        make = current().make
        empty = [
            make(torch.zeros, shape, dtype=current().dtype(dtype))
            for dtype, shape in avals.results[num_carry:]
        ]
        return (*carry, *empty)
    if isinstance(length, int) and length == 1:
        found = current().inline(jaxpr, (*constants, *carry, *(x[0] for x in xs)))
        return (*found[:num_carry], *(y.unsqueeze(0) for y in found[num_carry:]))
    steps = sum(1 for _ in jaxpr.walk()) * length if isinstance(length, int) else None
    lstm = find_lstm(jaxpr, num_consts, num_carry) if current().fused else None
    function: Any = control_flow.scan
    weights: dict[str, Any] = {}
    if lstm is not None:
        function = control_flow.lstm
        weights = {"weights": _weights(lstm, dict(zip(jaxpr.inputs, constants, strict=False)))}
        weights["cell"] = lstm.cell
    return _unpacked(
        function,
        avals,
        current().submodule(jaxpr, "scan"),
        constants,
        carry,
        xs,
        **weights,
        length=length,
        reverse=reverse,
        outputs=tuple(current().dtype(dtype) for dtype, _ in avals.results[num_carry:]),
        unroll=steps is not None and steps <= _UNROLLED,
    )


def _weights(lstm: Lstm, constants: dict[str, Any]) -> tuple[Any, ...]:
    """The two matrices of an LSTM and the sum of its biases, as torch has them."""
    size = lstm.size

    def matrix(parts: list[Part]) -> Any:
        first = parts[0]
        whole = constants[first.name]
        turned = whole if first.units_first else whole.t()
        same = {(part.name, part.rows, part.units_first) for part in parts}
        if len(same) == 1 and [part.start for part in parts] == [size * i for i in range(4)]:
            row, count = first.rows
            is_all = turned.fake.shape == (4 * size, count)
            return turned if is_all else turned.narrow(0, 0, 4 * size).narrow(1, row, count)
        return torch.cat([one(part) for part in parts], 0)

    def one(part: Part) -> Any:
        whole = constants[part.name]
        turned = whole if part.units_first else whole.t()
        return turned.narrow(0, part.start, size).narrow(1, *part.rows)

    def bias(gate: Gate) -> Any:
        parts = [constants[part.name].narrow(0, part.start, size) for part in gate.biases]
        if not parts:
            like = constants[gate.x.name]
            return like.new_full((size,), gate.number)
        total = functools.reduce(operator.add, parts)
        return total + gate.number if gate.number else total

    return (
        matrix([gate.x for gate in lstm.gates]),
        matrix([gate.h for gate in lstm.gates]),
        torch.cat([bias(gate) for gate in lstm.gates], 0),
    )


@lax("while", takes_avals=True)
def while_loop(
    *operands: Any,
    cond_jaxpr: Graph,
    cond_nconsts: int,
    body_jaxpr: Graph,
    body_nconsts: int,
    avals: Avals,
) -> Any:
    split = cond_nconsts + body_nconsts
    return _unpacked(
        control_flow.while_loop,
        avals,
        current().submodule(cond_jaxpr, "condition"),
        current().submodule(body_jaxpr, "body"),
        operands[:cond_nconsts],
        operands[cond_nconsts:split],
        operands[split:],
    )


@lax("cond", takes_avals=True)
def cond(index: Any, *operands: Any, branches: tuple[Graph, ...], avals: Avals) -> Any:
    if len(branches) == 1:
        return current().inline(branches[0], operands)
    modules = tuple(current().submodule(branch, "branch") for branch in branches)
    return _unpacked(control_flow.switch, avals, index, modules, operands)


@lax("error_if", takes_avals=True)
def error_if(index: Any, *operands: Any, message: str, wrong: int, avals: Avals) -> Any:
    """A check, which raises where `index` is `wrong`, and what it lets through."""
    inner = current().is_inner
    return _unpacked(
        control_flow.checked, avals, index == wrong, operands, message=message, inner=inner
    )


def _unpacked(function: Any, avals: Avals, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """A call of a function that gives a tuple, as a tuple of what it gives."""
    found = current().call(function, *args, **kwargs)
    return tuple(found[i] for i in range(len(avals.results)))
