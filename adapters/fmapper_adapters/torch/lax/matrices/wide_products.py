"""Products of halves in float32, without a float32 copy of the weights.

On a CPU torch cannot multiply bfloat16 or float16 to float32, and on processors without
instructions for halves its product of halves is many times slower than in float32. So a matrix is
cast for its product, in blocks if it is large. Autograd saves the halves; otherwise it would save
float32 copies of all weights.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional

from fmapper_adapters.torch import _private
from fmapper_adapters.torch.model import fast_attention

Tensor = torch.Tensor

HALVES = (torch.bfloat16, torch.float16)
_LARGE = 1 << 16  # elements; smaller matrices may be kept twice
_BLOCK = 1 << 20  # elements that are cast at once, which fit into a processor's caches
_WORTH = 1 << 15  # the fewest multiplications for which a cast pays
_FEW = 4  # rows for which torch's product with a transposed matrix is fast


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Returns the product of two arrays of halves in float32; the second is a matrix."""
    if torch.compiler.is_compiling() or not (_is_large(y) and _is_castable(x, y)):
        return torch.matmul(x.float(), y.float())
    product: Tensor = _Product.apply(x, y, torch.float32)
    return product


def matmul_of_halves(x: Tensor, y: Tensor) -> Tensor:
    """Returns the product of two arrays of halves of one dtype in that dtype, rounded once."""
    if torch.compiler.is_compiling() or not _is_faster_cast(x, y):
        return torch.matmul(x, y)
    product: Tensor = _Product.apply(x, y, x.dtype)
    return product


def dense(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Computes `x @ w + bias` of halves of one dtype."""
    if not torch.compiler.is_compiling() and _is_faster_cast(x, w):
        product: Tensor = _Product.apply(x, w, torch.float32) + bias  # rounded once, as by torch
        return product.to(x.dtype)
    return torch.addmm(bias, x, w) if x.ndim == 2 else functional.linear(x, w.t(), bias)


def _is_large(y: Tensor) -> bool:
    return y.ndim == 2 and y.numel() >= _LARGE


def _is_castable(x: Tensor, y: Tensor) -> bool:
    """Returns whether both operands can be cut into blocks."""
    return (
        x.ndim > 0 and not _private.is_in_transformation() and fast_attention.is_quick_on_cpu(x, y)
    )


def _is_faster_cast(x: Tensor, y: Tensor) -> bool:
    """Returns whether torch's own product of halves is slower."""
    if not (x.is_cpu and y.ndim > 1 and x.ndim > 0 and x.dtype in HALVES) or _has_own(x.dtype):
        return False
    depth = max(1, y.shape[-2])
    if x.numel() * y.shape[-1] < _WORTH or not _is_castable(x, y):
        return False
    is_transposed = y.stride(-2) == 1 and y.stride(-1) == depth
    rows = x.numel() // depth if y.ndim == 2 else x.shape[-2]
    return not (is_transposed and rows <= _FEW)


@functools.cache
def _has_own(dtype: torch.dtype) -> bool:
    """Returns whether torch multiplies halves of a dtype with instructions of the processor."""
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    supports = _private.get_support(name)
    return supports is not None and bool(supports())


def _in_blocks(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies by columns or matrices of the second operand, as many at a time as fit a block."""
    if y.numel() <= _BLOCK:
        return torch.matmul(x.float(), y.float()).to(dtype)
    if y.ndim > 2:
        return _by_matrices(x, y, dtype)
    wide = x.float()
    result = wide.new_empty((*x.shape[:-1], y.shape[1]), dtype=dtype)
    width = max(1, _BLOCK // max(1, y.shape[0]))
    for start in range(0, y.shape[1], width):
        part = slice(start, start + width)
        result[..., part] = torch.matmul(wide, y[:, part].float())
    return result


def _by_matrices(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the products of two stacks with the same number of matrices."""
    stack = y.shape[:-2]
    x, y = x.flatten(0, -3), y.flatten(0, -3)
    result = x.new_empty((math.prod(stack), x.shape[-2], y.shape[-1]), dtype=dtype)
    count = max(1, _BLOCK // max(1, y[0].numel()))
    for start in range(0, y.shape[0], count):
        part = slice(start, start + count)
        result[part] = torch.matmul(x[part].float(), y[part].float())
    return result.unflatten(0, stack)


class _Product(torch.autograd.Function):
    """A product that saves the halves for its derivative, which is computed in blocks, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, y)
        return _in_blocks(x, y, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, y = ctx.saved_tensors
        of_x = of_y = None
        if y.ndim > 2 and torch.is_grad_enabled():
            of_x = torch.matmul(gradient.float(), y.float().mT).to(x.dtype)
            return of_x, torch.matmul(x.float().mT, gradient.float()).to(y.dtype), None
        if y.ndim > 2:
            return _in_blocks(gradient, y.mT, x.dtype), _in_blocks(x.mT, gradient, y.dtype), None
        rows, over = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, y.shape[1])
        if torch.is_grad_enabled():  # for a second derivative
            of_x = torch.matmul(gradient.float(), y.float().t()).to(x.dtype)
            return of_x, torch.matmul(rows.float().t(), over.float()).to(y.dtype), None
        if ctx.needs_input_grad[0]:
            of_x = _in_blocks(gradient, y.t(), x.dtype)
        if ctx.needs_input_grad[1]:
            of_y, wide = torch.empty_like(y), rows.float().t()
            width = max(1, _BLOCK // max(1, y.shape[0]))
            for start in range(0, y.shape[1], width):
                part = slice(start, start + width)
                of_y[:, part] = torch.matmul(wide, over[:, part].float())
        return of_x, of_y, None
