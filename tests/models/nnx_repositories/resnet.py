"""A residual network whose class of blocks is an argument, as ports of torchvision write it."""

import jax.numpy as jnp
from flax import nnx
from jax import random


class BasicBlock(nnx.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1, *, rngs):
        self.conv1 = nnx.Conv(
            in_planes, planes, (3, 3), strides=stride, padding=1, use_bias=False, rngs=rngs
        )
        self.bn1 = nnx.BatchNorm(planes, rngs=rngs)
        self.conv2 = nnx.Conv(planes, planes, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.bn2 = nnx.BatchNorm(planes, rngs=rngs)
        if stride != 1 or in_planes != self.expansion * planes:
            self.shortcut = nnx.Sequential(
                nnx.Conv(
                    in_planes,
                    self.expansion * planes,
                    (1, 1),
                    strides=stride,
                    use_bias=False,
                    rngs=rngs,
                ),
                nnx.BatchNorm(self.expansion * planes, rngs=rngs),
            )
        else:
            self.shortcut = None

    def __call__(self, x):
        out = nnx.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.shortcut is None else self.shortcut(x)
        return nnx.relu(out)


class ResNet(nnx.Module):
    def __init__(self, block, num_blocks, num_classes=10, width=64, *, rngs):
        self.in_planes = width
        self.conv1 = nnx.Conv(3, width, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(width, rngs=rngs)
        self.layer1 = self._make_layer(block, width, num_blocks[0], stride=1, rngs=rngs)
        self.layer2 = self._make_layer(block, 2 * width, num_blocks[1], stride=2, rngs=rngs)
        self.linear = nnx.Linear(2 * width * block.expansion, num_classes, rngs=rngs)

    def _make_layer(self, block, planes, num_blocks, stride, rngs):
        strides = [stride] + [1] * (num_blocks - 1)
        layers = []
        for stride in strides:
            layers.append(block(self.in_planes, planes, stride, rngs=rngs))
            self.in_planes = planes * block.expansion
        return nnx.Sequential(*layers)

    def __call__(self, x):
        out = nnx.relu(self.bn1(self.conv1(x)))
        out = nnx.max_pool(out, (2, 2), strides=(2, 2))
        out = self.layer1(out)
        out = self.layer2(out)
        out = out.mean(axis=(1, 2))
        return self.linear(out)


def build():
    """Returns a small model, its inputs, and the arguments of its class."""
    x = random.normal(random.key(1), (2, 8, 8, 3), jnp.float32)
    arguments = (BasicBlock, [2, 1], 4, 4)
    return ResNet(*arguments, rngs=nnx.Rngs(0)), (x,), (arguments, {})
