"""Products of halves in float32, which keep no float32 copy of the weights.

On a CPU torch has no product of bfloat16 or float16 that gives float32, so a matrix is cast for its
product. What autograd keeps are the halves, where it would keep the copies of all weights; a matrix
that is very large is cast in blocks.
"""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.model import fast_attention

Tensor = torch.Tensor

HALVES = (torch.bfloat16, torch.float16)
_LARGE = 1 << 16  # elements of a matrix; what is smaller may be kept twice
_BLOCK = 1 << 23  # elements that are cast at once


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """The product of two arrays of halves in float32; the second is a matrix."""
    if torch.compiler.is_compiling() or not _is_large(x, y):
        return torch.matmul(x.float(), y.float())
    found: Tensor = _Product.apply(x, y)
    return found


def _is_large(x: Tensor, y: Tensor) -> bool:
    """Whether the second is much, and both are what blocks can be taken of."""
    return (
        y.ndim == 2
        and y.numel() >= _LARGE
        and x.ndim > 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and fast_attention.is_quick_on_cpu(x, y)
    )


def _in_blocks(x: Tensor, y: Tensor) -> Tensor:
    """The product of an array and a matrix of halves, as many columns at a time as fit a block."""
    wide = x.float()
    if y.numel() <= _BLOCK:
        return torch.matmul(wide, y.float())
    found = wide.new_empty((*x.shape[:-1], y.shape[1]))
    width = max(1, _BLOCK // max(1, y.shape[0]))
    for start in range(0, y.shape[1], width):
        part = slice(start, start + width)
        found[..., part] = torch.matmul(wide, y[:, part].float())
    return found


class _Product(torch.autograd.Function):
    """It keeps the halves for its derivative, which is computed in blocks, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return _in_blocks(x, y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, y = ctx.saved_tensors
        of_x = of_y = None
        rows, over = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, y.shape[1])
        if torch.is_grad_enabled():  # it is to be differentiated again
            of_x = torch.matmul(gradient, y.float().t()).to(x.dtype)
            return of_x, torch.matmul(rows.float().t(), over).to(y.dtype)
        if ctx.needs_input_grad[0]:
            of_x = _in_blocks(gradient, y.t()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_y, wide = torch.empty_like(y), rows.float().t()
            width = max(1, _BLOCK // max(1, y.shape[0]))
            for start in range(0, y.shape[1], width):
                part = slice(start, start + width)
                of_y[:, part] = torch.matmul(wide, over[:, part])
        return of_x, of_y
