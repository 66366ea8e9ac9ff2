"""Networks for images and sequences written twice: in torch, and as others would write them."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch.nn import functional as F


def channels_last(x: Any) -> Any:
    return x.transpose(0, 2, 3, 1)


def batch_norm(n: int, rngs: Any) -> Any:
    return nnx.BatchNorm(n, use_running_average=True, epsilon=1e-5, rngs=rngs)


# ResNet


class BasicBlock(torch.nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(b)
        self.conv2 = torch.nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(b)
        self.downsample = None
        if stride > 1:
            self.downsample = torch.nn.Sequential(
                torch.nn.Conv2d(a, b, 1, stride, bias=False), torch.nn.BatchNorm2d(b)
            )

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(torch.nn.Module):
    """With the names of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(8)
        self.layer1 = torch.nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = torch.nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.fc = torch.nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class NnxResBlock(nnx.Module):
    def __init__(self, a: int, b: int, stride: int, rngs: Any) -> None:
        conv = {"use_bias": False, "rngs": rngs}
        self.conv_1 = nnx.Conv(a, b, (3, 3), strides=(stride, stride), padding=1, **conv)
        self.norm_1 = batch_norm(b, rngs)
        self.conv_2 = nnx.Conv(b, b, (3, 3), padding=1, **conv)
        self.norm_2 = batch_norm(b, rngs)
        self.projects = stride > 1
        if self.projects:
            self.conv_proj = nnx.Conv(a, b, (1, 1), strides=(2, 2), padding="VALID", **conv)
            self.norm_proj = batch_norm(b, rngs)

    def __call__(self, x: Any) -> Any:
        y = self.norm_2(self.conv_2(jax.nn.relu(self.norm_1(self.conv_1(x)))))
        return jax.nn.relu(y + (self.norm_proj(self.conv_proj(x)) if self.projects else x))


class NnxResNet(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.conv_init = nnx.Conv(3, 8, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.norm_init = batch_norm(8, rngs)
        sizes = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1)]
        self.blocks = nnx.List([NnxResBlock(*size, rngs) for size in sizes])
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(self.norm_init(self.conv_init(channels_last(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class LinenResBlock(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        norm = {"use_running_average": True, "epsilon": 1e-5}
        y = nn.Conv(self.width, (3, 3), self.stride, padding=1, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(**norm)(y))
        y = nn.BatchNorm(**norm)(nn.Conv(self.width, (3, 3), padding=1, use_bias=False)(y))
        if self.stride > 1:
            conv = nn.Conv(self.width, (1, 1), self.stride, use_bias=False, name="conv_proj")
            x = nn.BatchNorm(**norm, name="norm_proj")(conv(x))
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    """With the names of Flax's examples."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(8, (3, 3), padding=1, use_bias=False, name="conv_init")(channels_last(x))
        norm = nn.BatchNorm(use_running_average=True, epsilon=1e-5, name="bn_init")
        x = nn.relu(norm(x))
        for width, stride in ((8, 1), (8, 1), (16, 2), (16, 1)):
            x = LinenResBlock(width, stride)(x)
        return nn.Dense(5)(x.mean((1, 2)))


def linen_resnet() -> Any:
    module = LinenResNet()
    return module, jax.eval_shape(
        module.init, jax.random.key(0), jax.ShapeDtypeStruct((2, 3, 8, 8), jnp.float32)
    )


# ConvNeXt


class ConvNeXtBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dwconv = torch.nn.Conv2d(12, 12, 7, padding=3, groups=12)
        self.norm = torch.nn.LayerNorm(12, eps=1e-6)
        self.pwconv1 = torch.nn.Linear(12, 48)
        self.pwconv2 = torch.nn.Linear(48, 12)
        self.gamma = torch.nn.Parameter(torch.ones(12))

    def forward(self, x: Any) -> Any:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 12, 2, 2)
        self.stages = torch.nn.Sequential(ConvNeXtBlock(), ConvNeXtBlock())
        self.norm = torch.nn.LayerNorm(12, eps=1e-6)
        self.head = torch.nn.Linear(12, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.stages(self.stem(x)).mean((2, 3))))


class NnxConvNeXtBlock(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.depthwise = nnx.Conv(12, 12, (7, 7), feature_group_count=12, rngs=rngs)
        self.norm = nnx.LayerNorm(12, rngs=rngs)
        self.mlp_in = nnx.Linear(12, 48, rngs=rngs)
        self.mlp_out = nnx.Linear(48, 12, rngs=rngs)
        self.layer_scale = nnx.Param(jnp.ones(12))

    def __call__(self, x: Any) -> Any:
        y = jax.nn.gelu(self.mlp_in(self.norm(self.depthwise(x))), approximate=False)
        return x + self.layer_scale[...] * self.mlp_out(y)


class NnxConvNeXt(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.patchify = nnx.Conv(3, 12, (2, 2), strides=(2, 2), padding="VALID", rngs=rngs)
        self.blocks = nnx.List([NnxConvNeXtBlock(rngs) for _ in range(2)])
        self.final_norm = nnx.LayerNorm(12, rngs=rngs)
        self.classifier = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.patchify(channels_last(x))
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.final_norm(x.mean((1, 2))))


# MLP-Mixer


class Mlp(torch.nn.Module):
    def __init__(self, size: int, wide: int) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(size, wide)
        self.fc2 = torch.nn.Linear(wide, size)

    def forward(self, x: Any) -> Any:
        return self.fc2(F.gelu(self.fc1(x)))


class MixerBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(16, eps=1e-6)
        self.mlp_tokens = Mlp(16, 24)
        self.norm2 = torch.nn.LayerNorm(16, eps=1e-6)
        self.mlp_channels = Mlp(16, 24)

    def forward(self, x: Any) -> Any:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(torch.nn.Module):
    """With as many patches as channels: both mlps of a block have the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 2, 2)
        self.blocks = torch.nn.Sequential(MixerBlock(), MixerBlock())
        self.norm = torch.nn.LayerNorm(16, eps=1e-6)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class LinenMlp(nn.Module):
    wide: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.gelu(nn.Dense(self.wide)(x), approximate=False)
        return nn.Dense(x.shape[-1])(y)


class LinenMixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(LinenMlp(24, name="token_mixing")(y), 1, 2)
        return x + LinenMlp(24, name="channel_mixing")(nn.LayerNorm()(x))


class LinenMixer(nn.Module):
    """With the names of its authors."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(16, (2, 2), strides=(2, 2), name="stem")(channels_last(x))
        x = x.reshape(x.shape[0], -1, 16)
        for i in range(2):
            x = LinenMixerBlock(name=f"MixerBlock_{i}")(x)
        return nn.Dense(5, name="head")(nn.LayerNorm(name="pre_head_layer_norm")(x).mean(1))


def linen_mixer() -> Any:
    module = LinenMixer()
    return module, jax.eval_shape(
        module.init, jax.random.key(0), jax.ShapeDtypeStruct((2, 3, 8, 8), jnp.float32)
    )


# EfficientNet


class MbConv(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand_conv = torch.nn.Conv2d(8, 24, 1, bias=False)
        self.bn0 = torch.nn.BatchNorm2d(24)
        self.depthwise_conv = torch.nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(24)
        self.se_reduce = torch.nn.Conv2d(24, 4, 1)
        self.se_expand = torch.nn.Conv2d(4, 24, 1)
        self.project_conv = torch.nn.Conv2d(24, 8, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(8)

    def forward(self, x: Any) -> Any:
        y = F.silu(self.bn0(self.expand_conv(x)))
        y = F.silu(self.bn1(self.depthwise_conv(y)))
        s = self.se_expand(F.silu(self.se_reduce(y.mean((2, 3), keepdim=True))))
        return x + self.bn2(self.project_conv(y * torch.sigmoid(s)))


class EfficientNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = torch.nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn0 = torch.nn.BatchNorm2d(8)
        self.blocks = torch.nn.Sequential(MbConv(), MbConv())
        self.fc = torch.nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = F.silu(self.bn0(self.conv_stem(x)))
        return self.fc(self.blocks(x).mean((2, 3)))


class NnxMbConv(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        conv = {"use_bias": False, "rngs": rngs}
        self.expand = nnx.Conv(8, 24, (1, 1), **conv)
        self.expand_norm = batch_norm(24, rngs)
        self.depthwise = nnx.Conv(24, 24, (3, 3), feature_group_count=24, **conv)
        self.depthwise_norm = batch_norm(24, rngs)
        self.squeeze = nnx.Linear(24, 4, rngs=rngs)
        self.excite = nnx.Linear(4, 24, rngs=rngs)
        self.project = nnx.Conv(24, 8, (1, 1), **conv)
        self.project_norm = batch_norm(8, rngs)

    def __call__(self, x: Any) -> Any:
        y = jax.nn.silu(self.expand_norm(self.expand(x)))
        y = jax.nn.silu(self.depthwise_norm(self.depthwise(y)))
        s = self.excite(jax.nn.silu(self.squeeze(y.mean((1, 2), keepdims=True))))
        return x + self.project_norm(self.project(y * jax.nn.sigmoid(s)))


class NnxEfficientNet(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.stem = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.stem_norm = batch_norm(8, rngs)
        self.blocks = nnx.List([NnxMbConv(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = jax.nn.silu(self.stem_norm(self.stem(channels_last(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


# U-Net


class UNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.down2 = torch.nn.Conv2d(8, 16, 3, padding=1)
        self.norm = torch.nn.GroupNorm(4, 16)
        self.middle = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.up = torch.nn.ConvTranspose2d(16, 8, 2, 2)
        self.conv = torch.nn.Conv2d(16, 8, 3, padding=1)
        self.out = torch.nn.Conv2d(8, 3, 1)

    def forward(self, x: Any) -> Any:
        a = F.silu(self.down1(x))
        b = F.silu(self.norm(self.down2(F.avg_pool2d(a, 2))))
        c = self.up(F.silu(self.middle(b)))
        return self.out(F.silu(self.conv(torch.cat([c, a], 1))))


class NnxUNet(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.encode_1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.encode_2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.encode_norm = nnx.GroupNorm(16, num_groups=4, epsilon=1e-5, rngs=rngs)
        self.bottleneck = nnx.Conv(16, 16, (3, 3), rngs=rngs)
        self.upsample = nnx.ConvTranspose(
            16, 8, (2, 2), strides=(2, 2), padding="VALID", transpose_kernel=True, rngs=rngs
        )
        self.decode = nnx.Conv(16, 8, (3, 3), rngs=rngs)
        self.final = nnx.Conv(8, 3, (1, 1), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        a = jax.nn.silu(self.encode_1(channels_last(x)))
        b = nnx.avg_pool(a, (2, 2), (2, 2))
        b = jax.nn.silu(self.encode_norm(self.encode_2(b)))
        c = self.upsample(jax.nn.silu(self.bottleneck(b)))
        y = self.final(jax.nn.silu(self.decode(jnp.concatenate([c, a], -1))))
        return y.transpose(0, 3, 1, 2)


# recurrent cells


class Lstm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 8, batch_first=True)
        self.fc = torch.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.fc(self.lstm(x)[0][:, -1])


class EqxLstm(eqx.Module):
    cell: eqx.nn.LSTMCell
    linear: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        a, b = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(6, 8, key=a)
        self.linear = eqx.nn.Linear(8, 3, key=b)

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.one)(x)

    def one(self, x: Any) -> Any:
        state = jnp.zeros(8), jnp.zeros(8)
        for step in x:
            state = self.cell(step, state)
        return self.linear(state[0])


class NnxLstm(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.cell = nnx.OptimizedLSTMCell(6, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        carry = jnp.zeros((x.shape[0], 8)), jnp.zeros((x.shape[0], 8))
        for at in range(x.shape[1]):
            carry, y = self.cell(carry, x[:, at])
        return self.head(y)


class Gru(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(6, 8, batch_first=True)
        self.fc = torch.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.fc(self.gru(x)[0][:, -1])


class EqxGru(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        a, b = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(6, 8, key=a)
        self.linear = eqx.nn.Linear(8, 3, key=b)

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.one)(x)

    def one(self, x: Any) -> Any:
        state = jnp.zeros(8)
        for step in x:
            state = self.cell(step, state)
        return self.linear(state)


# policies and other small networks


class Policy(torch.nn.Module):
    """Square layers of one shape, as a robot has it."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.trunk = torch.nn.Sequential(
            linear(8, 8), torch.nn.Tanh(), linear(8, 8), torch.nn.Tanh(), linear(8, 8)
        )
        self.mean = linear(8, 8)
        self.value = linear(8, 8)

    def forward(self, x: Any) -> Any:
        x = self.trunk(x)
        return torch.cat([self.mean(x), self.value(torch.tanh(x))], -1)


class NnxPolicy(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])
        self.actor = nnx.Linear(8, 8, rngs=rngs)
        self.critic = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        first, second, third = self.layers
        x = third(jnp.tanh(second(jnp.tanh(first(x)))))
        return jnp.concatenate([self.actor(x), self.critic(jnp.tanh(x))], -1)


class LinenPolicy(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(nn.Dense(8)(x))
        x = nn.tanh(nn.Dense(8)(x))
        x = nn.Dense(8)(x)
        return jnp.concatenate([nn.Dense(8)(x), nn.Dense(8)(nn.tanh(x))], -1)


def linen_policy() -> Any:
    module = LinenPolicy()
    return module, jax.eval_shape(
        module.init, jax.random.key(0), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    )


class EqxPolicy(eqx.Module):
    trunk: eqx.nn.MLP
    mean: eqx.nn.Linear
    value: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        a, b, c = jax.random.split(key, 3)
        self.trunk = eqx.nn.MLP(8, 8, 8, 2, activation=jnp.tanh, key=a)
        self.mean = eqx.nn.Linear(8, 8, key=b)
        self.value = eqx.nn.Linear(8, 8, key=c)

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.one)(x)

    def one(self, x: Any) -> Any:
        x = self.trunk(x)
        return jnp.concatenate([self.mean(x), self.value(jnp.tanh(x))])


def shapes_of(cls: Any) -> Any:
    """Returns a model of NNX or Equinox without memory."""
    if issubclass(cls, eqx.Module):
        return eqx.filter_eval_shape(cls, jax.random.key(0))
    return nnx.eval_shape(lambda: cls(nnx.Rngs(0)))
