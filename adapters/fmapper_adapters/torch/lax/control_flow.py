"""Loops and branches."""

from __future__ import annotations

from typing import Any

import torch

from fmapper.programs import Graph
from fmapper_adapters.torch.fuse import find_gru, find_lstm
from fmapper_adapters.torch.lax import dimensions, recurrent
from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model import control_flow
from fmapper_adapters.torch.model.emit import current

# Loops with at most this number of calls in all are unrolled for torch.compile and torch.export.
_UNROLLED = 600


@lax("scan", takes_avals=True, dims=dimensions.scan)
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
        results = current().inline(jaxpr, (*constants, *carry, *(x[0] for x in xs)))
        return (*results[:num_carry], *(y.unsqueeze(0) for y in results[num_carry:]))
    steps = sum(1 for _ in jaxpr.walk()) * length if isinstance(length, int) else None
    function: Any = control_flow.scan
    weights: dict[str, Any] = {}
    if current().fused:
        arrays = dict(zip(jaxpr.inputs, constants, strict=False))
        lstm = find_lstm(jaxpr, num_consts, num_carry)
        gru = find_gru(jaxpr, num_consts, num_carry)
        if lstm is not None:
            function = control_flow.lstm
            weights = {"weights": recurrent.of_lstm(lstm, arrays), "cell": lstm.cell}
        elif gru is not None:
            function = control_flow.gru
            weights = {"weights": recurrent.of_gru(gru, arrays)}
        else:
            jaxpr, xs = recurrent.with_products_of_all_rows(
                jaxpr, constants, (*constants, *carry), xs
            )
    return _unpack(
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


@lax("loop_begin", takes_avals=True)
def loop_begin(carry: Any, xs: Any, *, length: Any, reverse: bool, avals: Avals) -> Any:
    """Begins the iterations of a loop in a program that will be written as a file."""
    return _unpack(control_flow.loop_begin, avals, carry, xs, length=length, reverse=reverse)


@lax("loop_end", takes_avals=True)
def loop_end(given: Any, carry: Any, ys: Any, *, length: Any, reverse: bool, avals: Avals) -> Any:
    """Ends the iterations of a loop in a program that will be written as a file."""
    return _unpack(control_flow.loop_end, avals, given, carry, ys, length=length, reverse=reverse)


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
    return _unpack(
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
    return _unpack(control_flow.switch, avals, index, modules, operands)


@lax("error_if", takes_avals=True)
def error_if(index: Any, *operands: Any, message: str, wrong: int, avals: Avals) -> Any:
    """Adds a check that raises if `index` is `wrong`; returns the checked values."""
    inner = current().is_inner
    return _unpack(
        control_flow.check, avals, index == wrong, operands, message=message, inner=inner
    )


def _unpack(function: Any, avals: Avals, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Unpacks a call that returns a tuple."""
    results = current().call(function, *args, **kwargs)
    return tuple(results[i] for i in range(len(avals.results)))
