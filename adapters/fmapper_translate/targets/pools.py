"""Windows and edges of images and sequences, with PyTorch's arguments.

A file takes the source of those that it names; `max_pool`, `avg_pool` and `adaptive_avg_pool` are
functions that it takes along with them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fmapper_translate.targets.functions import ntuple


class Module:
    """Stands for the class of the target's modules."""


class MaxPool2d(Module):
    """The largest values of windows of an image."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    def __init__(
        self, kernel_size, stride=None, padding=0, dilation=1, return_indices=False,
        ceil_mode=False,
    ):  # fmt: skip
        if ntuple(dilation, 2) != (1, 1) or return_indices:
            raise ValueError("a dilation, or indices")
        self.kernel_size, self.stride = ntuple(kernel_size, 2), ntuple(stride or kernel_size, 2)
        self.padding, self.dilation, self.ceil_mode = ntuple(padding, 2), (1, 1), ceil_mode

    def __call__(self, x):
        return max_pool(
            x, self.kernel_size, self.stride, padding=self.padding, ceil_mode=self.ceil_mode
        )


class MaxPool1d(Module):
    """The largest values of windows of a sequence."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    ceil_mode: bool

    def __init__(self, kernel_size, stride=None, padding=0, *, ceil_mode=False):
        self.window, self.strides = (1, kernel_size), (1, stride or kernel_size)
        self.padding, self.ceil_mode = (0, padding), ceil_mode

    def __call__(self, x):
        x = max_pool(
            x[:, :, None], self.window, self.strides, padding=self.padding,
            ceil_mode=self.ceil_mode,
        )  # fmt: skip
        return x[:, :, 0]


class AvgPool2d(Module):
    """The means of windows of an image."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    ceil_mode: bool
    count_padding: bool

    def __init__(
        self, kernel_size, stride=None, padding=0, *, ceil_mode=False, count_include_pad=True
    ):
        self.window, self.strides = ntuple(kernel_size, 2), ntuple(stride or kernel_size, 2)
        self.padding, self.ceil_mode = ntuple(padding, 2), ceil_mode
        self.count_padding = count_include_pad

    def __call__(self, x):
        return avg_pool(
            x, self.window, self.strides, padding=self.padding, ceil_mode=self.ceil_mode,
            count_padding=self.count_padding,
        )  # fmt: skip


class AvgPool1d(Module):
    """The means of windows of a sequence."""

    image: AvgPool2d

    def __init__(
        self, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True
    ):
        self.image = AvgPool2d(
            (1, *ntuple(kernel_size, 1)), (1, *ntuple(stride or kernel_size, 1)),
            (0, *ntuple(padding, 1)), ceil_mode=ceil_mode, count_include_pad=count_include_pad,
        )  # fmt: skip

    def __call__(self, x):
        return self.image(x[..., None, :])[..., 0, :]


class AdaptiveAvgPool1d(Module):
    """The means of a sequence's parts."""

    size: tuple[int, ...]

    def __init__(self, output_size):
        self.size = ntuple(output_size, 1)

    def __call__(self, x):
        if self.size == (1,):
            return x.mean(axis=-1, keepdims=True)
        return adaptive_avg_pool(x, self.size)


class AdaptiveAvgPool2d(Module):
    """The means of an image's parts."""

    size: tuple[int, ...]

    def __init__(self, output_size):
        self.size = ntuple(output_size, 2)

    def __call__(self, x):
        if self.size == (1, 1):
            return x.mean(axis=(-2, -1), keepdims=True)
        sizes = zip(self.size, x.shape[-2:], strict=True)
        return adaptive_avg_pool(x, [size or same for size, same in sizes])


class ConstantPad1d(Module):
    """A sequence with a value before and behind it, or without its ends."""

    rank: ClassVar[int] = 1
    padding: tuple[int, ...]
    value: float

    def __init__(self, padding, value=0.0):
        self.padding, self.value = ntuple(padding, 2 * self.rank), value

    def __call__(self, x):
        starts, stops = self.padding[-2::-2], self.padding[::-2]
        ends = [(start, stop, 0) for start, stop in zip(starts, stops, strict=True)]
        rest = [(0, 0, 0)] * (x.ndim - self.rank)
        return jax.lax.pad(x, jnp.array(self.value, x.dtype), [*rest, *ends])


class ConstantPad2d(ConstantPad1d):
    """An image with a value around it, or without its edges."""

    rank: ClassVar[int] = 2


class ConstantPad3d(ConstantPad1d):
    """A volume with a value around it, or without its faces."""

    rank: ClassVar[int] = 3


class Unfold(Module):
    """The windows of an image, a column for each."""

    window: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    strides: tuple[int, ...]

    def __init__(self, kernel_size, dilation=1, padding=0, stride=1):
        self.window, self.dilation = ntuple(kernel_size, 2), ntuple(dilation, 2)
        self.padding, self.strides = ntuple(padding, 2), ntuple(stride, 2)

    def __call__(self, x):
        y = jax.lax.conv_general_dilated_patches(
            x, self.window, self.strides, [(size, size) for size in self.padding],
            rhs_dilation=self.dilation,
        )  # fmt: skip
        return y.reshape(*y.shape[:2], -1)


def max_pool(*args: Any, **kwargs: Any) -> Any:
    """Stands for the function that files take."""


def avg_pool(*args: Any, **kwargs: Any) -> Any:
    """Stands for the function that files take."""


def adaptive_avg_pool(*args: Any, **kwargs: Any) -> Any:
    """Stands for the function that files take."""
