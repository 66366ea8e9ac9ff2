"""Convolutions and batch norms of `DTensor`s, which torch shards incorrectly or not at all.

torch's convolutions raise for an input with divided channels, and return wrong shapes if weights
are divided or transposed; its batch norm divides channels of an input that is divided along the
batch. The layers here compute with the shards of their process, and sum over processes if products
are divided along their inputs. `localize` gives a layer such a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from fmapper_adapters.torch import _private

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_CONVOLVE: Any = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSE: Any = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def localize(layer: Any) -> None:
    """Makes a convolution or batch norm compute with shards; leaves other layers unchanged."""
    cls = _LOCAL.get(type(layer))
    if cls is not None:
        layer.__class__ = cls


def is_local(layer: Any) -> bool:
    """Returns whether a layer computes with shards."""
    return isinstance(layer, _Convolution | _Transposed | _BatchNorm)


class _Shards:
    """The placements of one call, of the input and of a weight on the same mesh.

    Args:
        x: The input; its batch or channels may be divided, other dimensions are gathered.
        weight: The weight.
        outputs: The dimension of the weight that counts output channels.
        groups: The groups of channels.
    """

    def __init__(self, x: Any, weight: Any, outputs: int, groups: int) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        self.mesh = weight.device_mesh
        parts = [self.mesh.size(at) for at in range(self.mesh.ndim)]
        whole, rows, features, sums = Replicate(), Shard(0), Shard(1), Partial()
        first, second = (1, 0) if outputs else (0, 1)  # dimensions of outputs and inputs
        self.x: list[Placement] = []
        self.weight: list[Placement] = []
        self.bias: list[Placement] = []
        self.out: list[Placement] = []
        self.x_gradient: list[Placement] = []
        self.weight_gradient: list[Placement] = []
        self.bias_gradient: list[Placement] = []
        left = groups
        for at, (of_x, of_weight) in enumerate(zip(x.placements, weight.placements, strict=True)):
            if of_x == rows or not of_weight.is_shard() or of_weight.dim > 1:
                row = of_x if of_x == rows else whole
                kinds = row, whole, whole, row, row, *[sums if row == rows else whole] * 2
            elif groups > 1 and of_weight.dim == 0 and left % parts[at] == 0:
                left //= parts[at]
                shard = Shard(0)
                kinds = features, shard, shard, features, features, shard, shard
            elif groups == 1 and of_weight.dim == first:
                kinds = whole, of_weight, Shard(0), features, sums, of_weight, Shard(0)
            elif groups == 1 and of_weight.dim == second:
                kinds = features, of_weight, whole, sums, features, of_weight, whole
            else:
                kinds = whole, whole, whole, whole, whole, whole, whole
            named = (self.x, self.weight, self.bias, self.out, self.x_gradient,
                     self.weight_gradient, self.bias_gradient)  # fmt: skip
            for list_, kind in zip(named, kinds, strict=True):
                list_.append(kind)
        self.groups = left
        self.is_sum = sums in self.out

    def local(self, tensor: Any, wanted: Any, gradient: Any) -> Any:
        return tensor.redistribute(self.mesh, wanted).to_local(grad_placements=gradient)


def _compute(layer: Any, x: Any, outputs: int, call: Any) -> Any:
    """Calls a convolution with the shards of this process.

    Args:
        layer: The convolution.
        x: Its input, with a batch.
        outputs: The dimension of the weight that counts output channels.
        call: Called with the shards of input, weight and bias, and the number of groups.
    """
    from torch.distributed.tensor import DTensor, Replicate, zeros

    weight, bias = layer.weight, layer.bias
    if not isinstance(x, DTensor):  # torch raises unless x is declared replicated
        x = x + zeros((), device_mesh=weight.device_mesh, dtype=x.dtype)
    shards = _Shards(x, weight, outputs, layer.groups)
    local = shards.local(x, shards.x, shards.x_gradient)
    parts = shards.local(weight, shards.weight, shards.weight_gradient)
    added = None
    if bias is not None and not shards.is_sum:
        added = shards.local(bias, shards.bias, shards.bias_gradient)
    y = call(local, parts, added, shards.groups)
    channels = weight.shape[1] * layer.groups if outputs else weight.shape[0]
    shape = (x.shape[0], channels, *y.shape[2:])
    made: Any = DTensor.from_local(
        y.contiguous(), shards.mesh, shards.out, run_check=False, shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip
    if not shards.is_sum:
        return made
    wanted = [Replicate() if kind.is_partial() else kind for kind in shards.out]
    made = made.redistribute(shards.mesh, wanted)
    return made if bias is None else made + bias.view(-1, *[1] * (x.ndim - 2))


class _Convolution:
    """A convolution of shards."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layer: Any = self
        count = len(layer.kernel_size)
        if input.ndim == count + 1:
            return cast("torch.Tensor", layer.forward(input[None])[0])

        def call(x: Any, weight: Any, bias: Any, groups: int) -> Any:
            padding = layer.padding
            if layer.padding_mode != "zeros":
                x = functional.pad(x, _around(layer), mode=layer.padding_mode)
                padding = 0
            convolve = _CONVOLVE[count]
            return convolve(x, weight, bias, layer.stride, padding, layer.dilation, groups)

        return cast("torch.Tensor", _compute(layer, input, 0, call))


class _Transposed:
    """A transposed convolution of shards."""

    def forward(self, input: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        layer: Any = self
        count = len(layer.kernel_size)
        if input.ndim == count + 1:
            return cast("torch.Tensor", layer.forward(input[None], output_size)[0])

        def call(x: Any, weight: Any, bias: Any, groups: int) -> Any:
            more = layer.output_padding
            if output_size is not None:
                more = _output_padding(layer, x.shape[-count:], output_size[-count:])
            return _TRANSPOSE[count](
                x, weight, bias, layer.stride, layer.padding, more, groups, layer.dilation
            )

        return cast("torch.Tensor", _compute(layer, input, 1, call))


class _BatchNorm:
    """A batch norm of shards, over the whole batch of all processes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layer: Any = self
        _private.check_input_dim(layer, input)
        channels = _Channels(layer, input)
        x = channels.x
        shape = (1, -1, *[1] * (x.ndim - 2))
        if layer.training or layer.running_mean is None:
            dims = [at for at in range(x.ndim) if at != 1]
            count = input.numel() // input.shape[1]
            mean = channels.add_up(x.sum(dims)) / count
            variance = channels.add_up(((x - mean.view(shape)) ** 2).sum(dims)) / count
        else:
            mean, variance = map(channels.local, (layer.running_mean, layer.running_var))
        if layer.training and layer.track_running_stats:
            unbiased = variance * (count / max(count - 1, 1))
            with torch.no_grad():
                layer.num_batches_tracked += 1
                part = layer.momentum
                if part is None:
                    part = 1 / int(_whole(layer.num_batches_tracked))
                channels.follow(layer.running_mean, mean, part)
                channels.follow(layer.running_var, unbiased, part)
        new = (x - mean.view(shape)) * torch.rsqrt(variance + layer.eps).view(shape)
        if layer.weight is not None:
            new = new * channels.local(layer.weight).view(shape)
            new = new + channels.local(layer.bias).view(shape)
        result: torch.Tensor = channels.output(new)
        return result


class _Channels:
    """The placements of one call of a batch norm, of its input and of vectors over channels.

    Attributes:
        x: The shard of the input.
    """

    def __init__(self, layer: Any, x: Any) -> None:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, zeros

        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        self.mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
        if not isinstance(x, DTensor):  # torch raises unless x is declared replicated
            x = x + zeros((), device_mesh=self.mesh, dtype=x.dtype)
        self.shape = x.shape
        rows, features = Shard(0), Shard(1)
        self.kinds = [kind if kind.is_shard() else Replicate() for kind in x.placements]
        self.vector = [rows if kind == features else Replicate() for kind in self.kinds]
        self.sums = [
            rows if kind == features else Partial() if kind.is_shard() else Replicate()
            for kind in self.kinds
        ]
        self.x = x.redistribute(self.mesh, self.kinds).to_local(grad_placements=self.kinds)

    def add_up(self, sums: torch.Tensor) -> Any:
        """Returns the sums of all processes."""
        made = self._join(sums, self.sums).redistribute(self.mesh, self.vector)
        return made.to_local(grad_placements=self.sums)

    def local(self, vector: Any) -> Any:
        """Returns the part of a vector over channels that this process needs."""
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(vector, DTensor):
            vector = DTensor.from_local(vector, self.mesh, [Replicate()] * self.mesh.ndim)
        return vector.redistribute(self.mesh, self.vector).to_local(grad_placements=self.sums)

    def follow(self, old: Any, new: torch.Tensor, part: float) -> None:
        """Moves running statistics towards new ones by the fraction `part`."""
        made = self._join(new.detach(), self.vector)
        old.mul_(1 - part).add_(made.redistribute(old.device_mesh, old.placements) * part)

    def output(self, shard: torch.Tensor) -> Any:
        """Returns an output as a `DTensor` of its shards."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            shard, self.mesh, self.kinds, run_check=False, shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )  # fmt: skip

    def _join(self, vector: torch.Tensor, kinds: Any) -> Any:
        from torch.distributed.tensor import DTensor

        shape = torch.Size([self.shape[1]])
        return DTensor.from_local(
            vector, self.mesh, kinds, run_check=False, shape=shape, stride=(1,)
        )


def _around(layer: Any) -> list[int]:
    """Returns the padding of a convolution for `functional.pad`, the last dimension first.

    The sides differ if an even kernel keeps the size.
    """
    padding: list[int] = []
    for at in reversed(range(len(layer.kernel_size))):
        if isinstance(layer.padding, str):
            total = layer.dilation[at] * (layer.kernel_size[at] - 1) * (layer.padding == "same")
            padding += [total // 2, total - total // 2]
        else:
            padding += [layer.padding[at]] * 2
    return padding


def _output_padding(layer: Any, sizes: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Returns the output padding with which a transposed convolution has the requested sizes.

    Raises:
        ValueError: The sizes are not possible.
    """
    extra = []
    settings = (layer.stride, layer.padding, layer.dilation, layer.kernel_size)
    for size, target, stride, padding, dilation, kernel in zip(
        sizes, wanted, *settings, strict=True
    ):
        least = (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
        if not least <= target < least + stride:
            raise ValueError(
                f"output_size has {target}; it can be from {least} to {least + stride - 1} there"
            )
        extra.append(target - least)
    return extra


def _whole(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedConv1d(_Convolution, torch.nn.Conv1d):
    """A `Conv1d` of shards."""


class ShardedConv2d(_Convolution, torch.nn.Conv2d):
    """A `Conv2d` of shards."""


class ShardedConv3d(_Convolution, torch.nn.Conv3d):
    """A `Conv3d` of shards."""


class ShardedConvTranspose1d(_Transposed, torch.nn.ConvTranspose1d):
    """A `ConvTranspose1d` of shards."""


class ShardedConvTranspose2d(_Transposed, torch.nn.ConvTranspose2d):
    """A `ConvTranspose2d` of shards."""


class ShardedConvTranspose3d(_Transposed, torch.nn.ConvTranspose3d):
    """A `ConvTranspose3d` of shards."""


class ShardedBatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """A `BatchNorm1d` of shards."""


class ShardedBatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """A `BatchNorm2d` of shards."""


class ShardedBatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """A `BatchNorm3d` of shards."""


_LOCAL: dict[type, type] = {
    cls.__mro__[2]: cls
    for cls in (
        *(ShardedConv1d, ShardedConv2d, ShardedConv3d),
        *(ShardedConvTranspose1d, ShardedConvTranspose2d, ShardedConvTranspose3d),
        *(ShardedBatchNorm1d, ShardedBatchNorm2d, ShardedBatchNorm3d),
    )
}
