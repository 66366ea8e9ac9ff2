"""Kernels of `fmapper.nn.functional` for torch, by `torch.nn.functional`."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from fmapper_adapters.torch.arrays import tensors

Tensor = torch.Tensor
Sizes: TypeAlias = tuple[int, ...]
Pads: TypeAlias = tuple[tuple[int, int], ...]

_CONV: Any = (None, F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: Any = (None, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_MAX: Any = (None, F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE: Any = (None, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_EXACT = 40.0  # above, log(1 + exp(x)) == x even in float64

linear = F.linear
relu = F.relu
leaky_relu = F.leaky_relu
elu = F.elu
silu = F.silu
sigmoid = torch.sigmoid
softmax = torch.softmax
log_softmax = torch.log_softmax
logsumexp = torch.logsumexp


def embedding(x: Tensor, weight: Tensor) -> Tensor:
    """Computes `F.embedding`."""
    return F.embedding(x if x.dtype in (torch.int64, torch.int32) else x.long(), weight)


def one_hot(x: Tensor, num_classes: int, dtype: Any) -> Tensor:
    """Compares with all classes: an index out of range gives zeros, and vmap works."""
    kind = x.dtype if dtype is None else _dtype(dtype)
    return (x[..., None] == torch.arange(num_classes, device=x.device)).to(kind)


def _dtype(dtype: Any) -> torch.dtype:
    resolved = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(resolved, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype!r}")
    return resolved


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Pads,
    dilation: Sizes,
    groups: int,
) -> Tensor:
    """Computes `F.conv1d` and so on, with asymmetric padding added beforehand."""
    even = [low for low, high in padding if low == high]
    if len(even) < len(padding):
        even = [min(pair) for pair in padding]
        pairs = [
            n - same
            for pair, same in zip(reversed(padding), reversed(even), strict=True)
            for n in pair
        ]
        x = F.pad(x, pairs)
    y: Tensor = _CONV[len(stride)](x, weight, bias, stride, even, dilation, groups)
    return y


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes,
    extra: Sizes,
    groups: int,
    dilation: Sizes,
) -> Tensor:
    """Computes `F.conv_transpose1d` and so on."""
    y: Tensor = _TRANSPOSED[len(stride)](x, weight, bias, stride, padding, extra, groups, dilation)
    return y


def max_pool(x: Tensor, window: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """Computes `F.max_pool1d` and so on."""
    y: Tensor = _MAX[len(window)](x, window, stride, padding)
    return y


def avg_pool(
    x: Tensor, window: Sizes, stride: Sizes, padding: Sizes, count_include_pad: bool
) -> Tensor:
    """Computes `F.avg_pool1d` and so on."""
    pool = _AVERAGE[len(window)]
    if len(window) == 3 and x.is_cpu and x.dtype.itemsize < 4:  # torch lacks this kernel
        wide = pool(x.float(), window, stride, padding, count_include_pad=count_include_pad)
        narrow: Tensor = wide.to(x.dtype)
        return narrow
    y: Tensor = pool(x, window, stride, padding, count_include_pad=count_include_pad)
    return y


def gelu(x: Tensor, by_tanh: bool) -> Tensor:
    """Computes `F.gelu`."""
    return F.gelu(x, approximate="tanh" if by_tanh else "none")


def softplus(x: Tensor, beta: float) -> Tensor:
    """Computes `F.softplus`, with its linear part only where this is exact."""
    return F.softplus(x, beta, _EXACT)


def layer_norm(
    x: Tensor, shape: Sizes, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Computes `F.layer_norm`."""
    return F.layer_norm(x, shape, weight, bias, eps)


def rms_norm(x: Tensor, shape: Sizes, weight: Tensor | None, eps: float | None) -> Tensor:
    """Computes `F.rms_norm`."""
    return F.rms_norm(x, shape, weight, torch.finfo(x.dtype).eps if eps is None else eps)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Computes `F.group_norm`."""
    return F.group_norm(x, groups, weight, bias, eps)


def batch_norm_with(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Computes `F.batch_norm` outside of training."""
    return F.batch_norm(x, mean.detach(), var.detach(), weight, bias, eps=eps)


def batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `F.batch_norm` in training, on copies of the running values."""
    compiling = torch.compiler.is_compiling()
    if compiling or any(map(tensors.is_transformed, (x, mean, var))):  # nothing in place under vmap
        out = F.batch_norm(x, None, None, weight, bias, True, eps=eps)
        new_var, new_mean = torch.var_mean(x.detach(), [0, *range(2, x.ndim)])
        return out, _mix(mean, new_mean, momentum), _mix(var, new_var, momentum)
    mean, var = mean.detach().clone(), var.detach().clone()
    out = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    return out, mean, var


def _mix(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    return (1 - momentum) * old.detach() + (momentum * new).to(old.dtype)


def dropout(x: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Puts zero where elements are dropped, whatever was there."""
    return torch.where(kept, x * factor, torch.zeros((), dtype=x.dtype, device=x.device))


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Computes `F.scaled_dot_product_attention`; zeros where a bool mask lets nothing through."""
    y = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    if mask is None or mask.dtype is not torch.bool:
        return y
    # Not every kernel of torch does so.
    return torch.where(mask.any(-1, keepdim=True), y, torch.zeros_like(y))


def cross_entropy(
    x: Tensor, target: Tensor, axis: int, ignore: int, reduction: str, smoothing: float
) -> Tensor:
    """Computes `F.cross_entropy` of indices."""
    indices = target if target.dtype is torch.int64 else target.long()
    return F.cross_entropy(
        x, indices, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing
    )


def soft_cross_entropy(
    x: Tensor, target: Tensor, axis: int, reduction: str, smoothing: float
) -> Tensor:
    """Computes `F.cross_entropy` of probabilities."""
    return F.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing)


def mse_loss(x: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Computes `F.mse_loss`."""
    return F.mse_loss(x, target, reduction=reduction)
