"""JAX's attention and GELU by torch's fast kernels, where results cannot differ.

torch's fast GELU on a CPU is NaN where JAX's is infinite. Its fast attention adds a mask to the
scores, which does not remove infinite ones, skips keys that JAX multiplies by zero, and returns
zeros where JAX returns NaN. None of this can happen if all numbers are of moderate size, which each
call checks; the check takes a small part of the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import FakeTensor
from fmapper_adapters.torch.arrays import devices
from fmapper_adapters.torch.model import bits

Tensor = torch.Tensor

# Up to this score, sums of exponentials are as exact as JAX's, forward and backward.
_LARGEST_SCORE = 1e4
_LARGEST_VALUE = 1e30
_NOTHING = 800.0  # scores this far below the largest have weight zero, even in float64


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    fill: float,
    is_causal: bool = False,
) -> tuple[Tensor]:
    """Computes `softmax(where(mask, scale * q @ k.T + bias, fill)) @ v`.

    Args:
        q: Batch, heads, rows, depth.
        k: Batch, heads, columns, depth.
        v: Batch, heads, columns, any number.
        mask: The columns that each row attends to; broadcasts against batch, heads, rows, columns.
        bias: Numbers to add to the scores, of a shape like the mask; not both are allowed.
        scale: The factor of the products.
        fill: The score of masked columns, far below zero.
        is_causal: Whether the mask lets each row attend to the columns up to its own.

    Returns:
        A tuple of one tensor: batch, heads, rows, and the last dimension of `v`.
    """
    given = [x for x in (mask, bias) if x is not None]
    options: Any = mask is not None, scale, fill, is_causal
    if _is_plain(q, k, v):
        return (_spelt_out(options, q, k, v, *given),)
    if torch.compiler.is_compiling():

        def fast(*operands: Tensor) -> Tensor:
            return _fast(options, *operands).clone(memory_format=torch.contiguous_format)

        def slow(*operands: Tensor) -> Tensor:
            return _spelt_out(options, *operands).clone(memory_format=torch.contiguous_format)

        y: Tensor = torch.cond(_is_moderate(options, q, k, v, bias), fast, slow,
                                   (q, k, v, *given))  # fmt: skip
        return (y,)
    chosen = _fast if _is_moderate(options, q, k, v, bias) else _spelt_out
    return (chosen(options, q, k, v, *given),)


attend.is_control_flow = True  # type: ignore[attr-defined]


def exact_gelu(x: Tensor) -> tuple[Tensor]:
    """Returns a tuple of one tensor, `x * erfc(-x / sqrt(2)) / 2`."""
    y = functional.gelu(x)
    if not x.is_cpu or torch.compiler.is_compiling():  # torch computes this formula there
        return (y,)
    if _has_values(x) and x.detach().amax().item() < _LARGEST_VALUE:
        return (y,)
    large = x >= _LARGEST_VALUE
    return (torch.where(large, x, functional.gelu(torch.where(large, 0.0, x))),)


exact_gelu.is_control_flow = True  # type: ignore[attr-defined]


def _is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether values cannot be read, or torch's fast attention lacks an option."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    if q.is_cpu and type(q).__module__.startswith("torch.distributed.tensor"):
        return True  # torch's attention for CPUs rejects DTensors; reading values would send them
    return _private.is_dual() or not all(map(_has_values, (q, k, v)))


def is_quick_on_cpu(*tensors: Tensor) -> bool:
    """Returns whether fast functions without a forward derivative can be used for tensors."""
    return not _private.is_dual() and all(x.is_cpu and _has_values(x) for x in tensors)


def _has_values(x: Tensor) -> bool:
    """Returns whether a tensor has elements that can be read now."""
    return not (
        x.numel() == 0
        or x.is_meta
        or isinstance(x, FakeTensor)
        or bits.is_batched(x)
        or devices.is_capturing(x)
    )


def _is_moderate(options: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
    """Returns whether no score and no value is large, infinite or NaN."""
    is_masked, scale, fill, _ = options
    limit = min(_LARGEST_SCORE, -fill - _NOTHING) if is_masked else _LARGEST_SCORE
    factor = q.shape[-1] * max(1.0, abs(scale))
    # On a CPU numbers are faster than small tensors.
    size: Any = _size if q.is_cpu and not torch.compiler.is_compiling() else _size_of
    scores = size(q) * size(k) * factor
    if bias is not None:
        scores = scores + size(bias)
    return (scores < limit) & (size(v) < _LARGEST_VALUE)


def _size(x: Tensor) -> float:
    """Returns the largest absolute value; NaN if there is one."""
    x = x.detach()
    return max(-x.amin().item(), x.amax().item())  # both are NaN if any element is


def _size_of(x: Tensor) -> Tensor:
    x = x.detach()
    return torch.maximum(-x.amin(), x.amax())


def _fast(options: Any, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
    is_masked, scale, _, is_causal = options
    if is_causal:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    added = given[0] if given else None
    if is_masked:
        # As in JAX, a row that is masked everywhere gives the mean, and has no gradient.
        visible = given[0].any(-1, keepdim=True)
        q = torch.where(visible, q, 0.0)
        added = torch.logical_or(given[0], torch.logical_not(visible))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)


def _spelt_out(options: Any, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
    is_masked, scale, fill, _ = options
    scores = torch.matmul(q, k.transpose(-1, -2))
    if scale != 1.0:
        scores = scores * scale
    if is_masked:
        scores = torch.where(given[0], scores, fill)
    elif given:
        scores = scores + given[0]
    return torch.matmul(torch.softmax(scores, -1), v)
