"""Norms that files for PyTorch have, with Flax's arguments; channels are last."""

from __future__ import annotations

import torch
from torch import nn

from fmapper_translate.torch.weights import fill, ones_init, zeros_init


class LayerNorm(nn.LayerNorm):
    """Normalisation of the last dimension with Flax's arguments."""

    source_arrays = {"weight": ("scale", None)}

    def __init__(
        self, num_features, epsilon=1e-6, use_bias=True, use_scale=True, bias_init=None,
        scale_init=None,
    ):  # fmt: skip
        super().__init__(num_features, eps=epsilon, bias=use_bias)
        fill(self, "weight", scale_init or ones_init())
        fill(self, "bias", bias_init or zeros_init())
        if not use_scale:
            self.weight = None


class RMSNorm(nn.RMSNorm):
    """Division of the last dimension by its size, with Flax's arguments."""

    source_arrays = {"weight": ("scale", None)}

    def __init__(self, num_features, epsilon=1e-6, use_scale=True, scale_init=None):
        super().__init__(num_features, eps=epsilon, elementwise_affine=use_scale)
        fill(self, "weight", scale_init or ones_init())


class GroupNorm(nn.GroupNorm):
    """Normalisation of groups of channels, which are last, with Flax's arguments."""

    source_arrays = {"weight": ("scale", None)}

    def __init__(
        self, num_features, num_groups=32, group_size=None, epsilon=1e-6, use_bias=True,
        use_scale=True, bias_init=None, scale_init=None,
    ):  # fmt: skip
        super().__init__(
            num_features // group_size if group_size else num_groups, num_features, epsilon
        )
        fill(self, "weight", scale_init or ones_init())
        fill(self, "bias", bias_init or zeros_init())
        self.weight = self.weight if use_scale else None
        self.bias = self.bias if use_bias else None

    def forward(self, x):
        # PyTorch 2.13 crashes in the backward pass of a channels-last input without gradient
        return super().forward(x.movedim(-1, 1).contiguous()).movedim(1, -1)


class BatchNorm(nn.Module):
    """Normalisation of batches with the channels last, and Flax's averages."""

    source_arrays = {
        "weight": ("scale", None), "running_mean": ("mean", None), "running_var": ("var", None),
    }  # fmt: skip

    def __init__(
        self, num_features, use_running_average=False, momentum=0.99, epsilon=1e-5, use_bias=True,
        use_scale=True, bias_init=None, scale_init=None,
    ):  # fmt: skip
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight = nn.Parameter((scale_init or ones_init())(num_features)) if use_scale else None
        self.bias = nn.Parameter((bias_init or zeros_init())(num_features)) if use_bias else None
        self.running_mean = nn.Buffer(torch.zeros(num_features))
        self.running_var = nn.Buffer(torch.ones(num_features))
        self.training = not use_running_average

    def forward(self, x, use_running_average=None, *, mask=None):
        is_still = not self.training if use_running_average is None else use_running_average
        mean, var = self.running_mean, self.running_var
        if not is_still:
            axes = tuple(range(x.ndim - 1))
            mean, var = x.mean(axes), x.var(axes, correction=0)
            if mask is not None:
                shown = mask.to(x.dtype).broadcast_to(x.shape)
                mean = (x * shown).sum(axes) / shown.sum(axes)
                var = ((x - mean).square() * shown).sum(axes) / shown.sum(axes)
            with torch.no_grad():
                self.running_mean.lerp_(mean, 1 - self.momentum)
                self.running_var.lerp_(var, 1 - self.momentum)
        scale = torch.rsqrt(var + self.epsilon)
        y = (x - mean) * (scale if self.weight is None else scale * self.weight)
        return y if self.bias is None else y + self.bias


class InstanceNorm(nn.Module):
    """Normalisation of each channel of an element, with the channels last."""

    source_arrays = {"weight": ("scale", None)}

    def __init__(
        self, num_features, *, epsilon=1e-6, use_bias=True, use_scale=True, bias_init=None,
        scale_init=None,
    ):  # fmt: skip
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter((scale_init or ones_init())(num_features)) if use_scale else None
        self.bias = nn.Parameter((bias_init or zeros_init())(num_features)) if use_bias else None

    def forward(self, x):
        axes = tuple(range(1, x.ndim - 1))
        var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        y = (x - mean) * torch.rsqrt(var + self.epsilon)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias
