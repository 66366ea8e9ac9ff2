"""Inverted bottlenecks scaled by coefficients, as repositories of small image models write them."""

import math
from collections import namedtuple

import torch
from torch import nn
from torch.nn import functional as F

Scale = namedtuple("Scale", ["width", "depth", "divisor", "drop_rate"])
Stage = namedtuple("Stage", ["repeats", "kernel", "stride", "expand", "inputs", "outputs"])


def scale_width(channels, scale):
    """Multiplies channels, and keeps them divisible."""
    channels *= scale.width
    rounded = max(scale.divisor, int(channels + scale.divisor / 2) // scale.divisor * scale.divisor)
    if rounded < 0.9 * channels:  # by no more than a tenth
        rounded += scale.divisor
    return int(rounded)


def drop_samples(x, rate, training):
    if not training or rate == 0.0:
        return x
    keep = 1 - rate
    mask = torch.floor(keep + torch.rand([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device))
    return x / keep * mask


class SamePadConv2d(nn.Conv2d):
    """A convolution whose padding follows from the size of the image."""

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, groups=1, bias=False):
        super().__init__(in_channels, out_channels, kernel_size, stride, 0, 1, groups, bias)

    def forward(self, x):
        pads = []
        for size, kernel, stride in zip(x.shape[-2:], self.weight.shape[-2:], self.stride):
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            pads = [total // 2, total - total // 2, *pads]
        if any(pads):
            x = F.pad(x, pads)
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class Bottleneck(nn.Module):
    def __init__(self, stage, drop_rate):
        super().__init__()
        self.stage = stage
        self.drop_rate = drop_rate
        inner = stage.inputs * stage.expand
        if stage.expand != 1:
            self.widen = SamePadConv2d(stage.inputs, inner, 1)
            self.norm0 = nn.BatchNorm2d(inner, eps=1e-3, momentum=0.01)
        self.depthwise = SamePadConv2d(inner, inner, stage.kernel, stage.stride, groups=inner)
        self.norm1 = nn.BatchNorm2d(inner, eps=1e-3, momentum=0.01)
        self.narrow = SamePadConv2d(inner, stage.outputs, 1)
        self.norm2 = nn.BatchNorm2d(stage.outputs, eps=1e-3, momentum=0.01)

    def forward(self, x):
        y = x
        if self.stage.expand != 1:
            y = F.silu(self.norm0(self.widen(y)))
        y = F.silu(self.norm1(self.depthwise(y)))
        y = self.norm2(self.narrow(y))
        if self.stage.stride == 1 and self.stage.inputs == self.stage.outputs:
            y = drop_samples(y, self.drop_rate, self.training) + x
        return y


class ScaledNet(nn.Module):
    def __init__(self, stages, scale, classes=5):
        super().__init__()
        self.stem = SamePadConv2d(3, scale_width(8, scale), 3, stride=2)
        self.blocks = nn.ModuleList([])
        for stage in stages:
            inputs, outputs = scale_width(stage.inputs, scale), scale_width(stage.outputs, scale)
            stage = stage._replace(inputs=inputs, outputs=outputs)
            for _ in range(math.ceil(scale.depth * stage.repeats)):
                rate = scale.drop_rate * len(self.blocks) / 4
                self.blocks.append(Bottleneck(stage, rate))
                stage = stage._replace(inputs=stage.outputs, stride=1)
        self.head = nn.Linear(stage.outputs, classes)

    def forward(self, x):
        x = F.silu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean([2, 3]))


def build(width=1.0):
    stages = [Stage(1, 3, 1, 1, 8, 8), Stage(2, 3, 2, 2, 8, 16)]
    kwargs = dict(stages=stages, scale=Scale(width, 1.0, 8, 0.2))
    return ScaledNet(**kwargs), (torch.randn(2, 3, 12, 12),), ((), kwargs)
