"""Loops and branches."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import Graph
from fmapper_adapters.torch import _loops
from fmapper_adapters.torch._emit import current
from fmapper_adapters.torch.lax._table import About, lax

# Calls in all steps of a loop, up to which torch.compile and torch.export are given each of them.
_UNROLLED = 600


@lax("scan", about=True)
def scan(
    *operands: Any,
    jaxpr: Graph,
    length: Any,
    reverse: bool,
    num_consts: int,
    num_carry: int,
    about: About,
) -> Any:
    constants = operands[:num_consts]
    carry = operands[num_consts : num_consts + num_carry]
    xs = operands[num_consts + num_carry :]
    if isinstance(length, int) and length == 0:
        make = current().make
        empty = [
            make(torch.zeros, shape, dtype=current().dtype(dtype))
            for dtype, shape in about.results[num_carry:]
        ]
        return (*carry, *empty)
    if isinstance(length, int) and length == 1:
        found = current().inline(jaxpr, (*constants, *carry, *(x[0] for x in xs)))
        return (*found[:num_carry], *(y.unsqueeze(0) for y in found[num_carry:]))
    steps = sum(1 for _ in jaxpr.walk()) * length if isinstance(length, int) else None
    return _unpacked(
        _loops.scan,
        about,
        current().submodule(jaxpr, "scan"),
        constants,
        carry,
        xs,
        length=length,
        reverse=reverse,
        outputs=tuple(current().dtype(dtype) for dtype, _ in about.results[num_carry:]),
        unroll=steps is not None and steps <= _UNROLLED,
    )


@lax("while", about=True)
def while_loop(
    *operands: Any,
    cond_jaxpr: Graph,
    cond_nconsts: int,
    body_jaxpr: Graph,
    body_nconsts: int,
    about: About,
) -> Any:
    split = cond_nconsts + body_nconsts
    return _unpacked(
        _loops.while_loop,
        about,
        current().submodule(cond_jaxpr, "condition"),
        current().submodule(body_jaxpr, "body"),
        operands[:cond_nconsts],
        operands[cond_nconsts:split],
        operands[split:],
    )


@lax("cond", about=True)
def cond(index: Any, *operands: Any, branches: tuple[Graph, ...], about: About) -> Any:
    if len(branches) == 1:
        return current().inline(branches[0], operands)
    modules = tuple(current().submodule(branch, "branch") for branch in branches)
    return _unpacked(_loops.switch, about, index, modules, operands)


def _unpacked(function: Any, about: About, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """A call of a function that gives a tuple, as a tuple of what it gives."""
    found = current().call(function, *args, **kwargs)
    return tuple(found[i] for i in range(len(about.results)))
