"""Uniform numbers, which JAX creates by writing random bits into the mantissas of floats."""

from __future__ import annotations

import math
from typing import Any

import torch

from fmapper.programs import Call, Scalar
from fmapper_adapters.torch.fuse.graph_index import GraphIndex
from fmapper_adapters.torch.fuse.rewriter import Rewriter

# Bits that are drawn, their shift to the mantissa, and the bit pattern of 1.
_LAYOUTS = {
    "float64": (64, 12, 0x3FF0000000000000),
    "float32": (32, 9, 0x3F800000),
    "float16": (16, 6, 0x3C00),
    "bfloat16": (8, 1, 0x3F80),
}


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Recognises uniform numbers in [0, 1), and those scaled to other bounds."""
    index = rewriter.index
    dtype, shape = call.result[0] if len(call.result) == 1 else ("", ())
    if call.op == "lax::sub" and dtype in _LAYOUTS:
        bits = _bits(index, call, dtype)
        if bits is None:
            return None
        drawn = bits.kwargs
        return rewriter.call(
            "torch::uniform",
            bits.args[0],
            dims=drawn["shape"],
            partitionable=drawn["partitionable"],
            shape=shape,
            dtype=dtype,
        )
    if call.op != "lax::max" or dtype not in _LAYOUTS:
        return None
    for low, value in (call.args, call.args[::-1]):
        source = index.call(value, "reshape")
        scaled = value
        if source is not None and index.shape(source.args[0]) == tuple(shape):
            scaled = source.args[0]
        fused = _between(rewriter, low, scaled, dtype, shape)
        if fused is not None:
            return fused
    return None


def _bits(index: GraphIndex, call: Call, dtype: str) -> Call | None:
    """Returns the random bits behind a subtraction of 1 from numbers in [1, 2)."""
    width, steps, one = _LAYOUTS[dtype]
    cast = index.call(call.args[0], "bitcast_convert_type")
    either = index.call(cast.args[0], "or") if cast is not None else None
    if either is None or index.number(call.args[1]) != 1 or index.number(either.args[1]) != one:
        return None
    shift = index.call(either.args[0], "shift_right_logical")
    if shift is None or index.number(shift.args[1]) != steps:
        # eight bits already have the width of the mantissa
        return None
    source = shift.args[0]
    wide = index.call(source, "convert_element_type")
    bits = index.call(wide.args[0] if wide is not None else source, "random_bits")
    if bits is None or bits.kwargs["bit_width"] != width or bits.kwargs["impl"] != "threefry2x32":
        return None
    return bits


def _between(rewriter: Rewriter, low: Any, value: Any, dtype: str, shape: Any) -> Any | None:
    """Finds `max(low, unit * (high - low) + low)`, whose product and sum XLA rounds once."""
    index = rewriter.index
    total = index.call(value, "add")
    product, start = (total.args[0], total.args[1]) if total is not None else (value, None)
    factors = index.call(product, "mul")
    unit, span = factors.args if factors is not None else (product, Scalar(1.0, dtype))
    source = index.call(unit)
    if source is None or source.op != "torch::uniform":
        return None
    if start is not None and not index.same(start, low):
        return None
    bottom, width = _number(index, low, dtype), _number(index, span, dtype)
    if start is None and bottom != 0:
        return None
    if width is not None and bottom is not None and width > 0:
        if bottom == 0:
            return unit if width == 1 else product
        if math.frexp(width)[0] == 0.5:  # the product is exact
            return value
    if dtype not in ("float32", "float64") or start is None:
        return None
    return rewriter.call("torch::uniform_between", unit, span, low, shape=shape, dtype=dtype)


def _number(index: GraphIndex, value: Any, dtype: str) -> float | None:
    """Returns a constant, or the difference of two, in the value's dtype."""
    number = index.number(value)
    if number is not None:
        return float(number)
    source, _ = index.origin(value)
    difference = index.call(source, "sub")
    if difference is None:
        return None
    ends = [index.number(arg) for arg in difference.args]
    if None in ends:
        return None
    kind = getattr(torch, dtype)
    return float(torch.tensor(ends[0], dtype=kind) - torch.tensor(ends[1], dtype=kind))
