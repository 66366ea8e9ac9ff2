"""Lowerings of fused calls: functions of torch that JAX expands into primitives."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from fmapper_adapters.torch.lax.matrices import wide_products
from fmapper_adapters.torch.lax.table import TABLE, Avals
from fmapper_adapters.torch.model import fast_attention
from fmapper_adapters.torch.model.emit import current

lowering = TABLE.lowering


@lowering("torch::softmax")
def softmax(x: Any, *, axis: int) -> Any:
    return torch.softmax(x, axis)


@lowering("torch::log_softmax")
def log_softmax(x: Any, *, axis: int) -> Any:
    return torch.log_softmax(x, axis)


@lowering("torch::mean")
def mean(x: Any, *, axes: tuple[int, ...], keep: bool) -> Any:
    return torch.mean(x, axes, keepdim=True) if keep else torch.mean(x, axes)


@lowering("torch::window")
def window(x: Any, *, window: tuple[Any, ...]) -> Any:
    index = [
        slice(item[0] or None, item[1]) if isinstance(item, tuple) else item for item in window
    ]
    while index and index[-1] == slice(None):
        index.pop()
    if not index:
        return x
    return x[index[0] if len(index) == 1 else tuple(index)]


@lowering("torch::repeat")
def repeat(x: Any, *, dim: int, count: int) -> Any:
    return x.repeat_interleave(count, dim)


@lowering("torch::layer_norm")
def layer_norm(x: Any, scale: Any, bias: Any, *, eps: float, count: int) -> Any:
    return F.layer_norm(x, x.shape[-count:], scale, bias, eps)


@lowering("torch::rms_norm")
def rms_norm(x: Any, scale: Any, bias: None, *, eps: float, count: int) -> Any:
    return F.rms_norm(x, x.shape[-count:], scale, eps)


@lowering("torch::batch_norm")
def batch_norm(
    x: Any, mean: Any, variance: Any, scale: Any, bias: Any, *, eps: float, channel: int
) -> Any:
    moved = x if channel == 1 else x.movedim(channel, 1)
    y = F.batch_norm(moved, mean, variance, scale, bias, False, 0.0, eps)
    return y if channel == 1 else y.movedim(1, channel)


@lowering("torch::silu")
def silu(x: Any) -> Any:
    return F.silu(x)


@TABLE.lowering("torch::gelu", takes_avals=True)
def gelu(x: Any, *, approximate: str, avals: Avals) -> Any:
    if approximate == "none":
        return current().call_as(avals.results, fast_attention.exact_gelu, x)[0]
    return F.gelu(x, approximate=approximate)


@lowering("torch::dense")
def dense(x: Any, w: Any, bias: Any, *, transposed: bool, summed: int, made: Any) -> Any:
    if summed > 1:
        x = x.flatten(-summed)
    several = len(made) > 1
    if several:
        bias = bias.flatten()
    if len(w.shape) > 2:
        width = math.prod(made)
        w = w.reshape((width, -1) if transposed else (-1, width))
    if {x.dtype, w.dtype, bias.dtype} in ({half} for half in wide_products.HALVES):
        y = current().call(wide_products.dense, x, w.t() if transposed else w, bias)
    elif transposed:
        y = F.linear(x, w, bias)
    else:
        y = torch.addmm(bias, x, w) if x.ndim == 2 else F.linear(x, w.t(), bias)
    return y.unflatten(-1, made) if several else y


@TABLE.lowering("torch::attention", takes_avals=True)
def attention(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, *, scale: float, fill: float, avals: Avals
) -> Any:
    missing = max(0, 4 - q.ndim)  # torch's fast attention needs a batch and heads
    for _ in range(missing):
        q, k, v, mask, bias = (None if x is None else x.unsqueeze(0) for x in (q, k, v, mask, bias))
    emitter = current()
    results = tuple((dtype, (1,) * missing + shape) for dtype, shape in avals.results)
    options = {"mask": mask, "bias": bias, "scale": scale, "fill": fill}
    y = emitter.call_as(results, fast_attention.attend, q, k, v, **options)[0]
    for _ in range(missing):
        y = y.squeeze(0)
    return y
