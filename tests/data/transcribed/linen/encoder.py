"""Encoder for PyTorch, transcribed from models.linen_repositories.encoder"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from collections.abc import Callable
from torch import nn


class Dropout(nn.Dropout):
    """Dropout with Flax's arguments."""

    def __init__(self, rate, broadcast_dims=(), deterministic=False):
        super().__init__(rate)
        self.broadcast_dims, self.training = tuple(broadcast_dims), not deterministic

    def forward(self, x, deterministic=None):
        is_still = not self.training if deterministic is None else deterministic
        if is_still or not self.broadcast_dims:
            return F.dropout(x, self.p, not is_still)
        dims = {dim % x.ndim for dim in self.broadcast_dims}
        shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        ones = x.new_ones(1, math.prod(shape), 1)  # channels, of which whole ones are left out
        return x * F.dropout1d(ones, self.p).reshape(shape)


def fill(layer, name, init):
    """Gives an array of a layer the values of an initializer, if the layer has it."""
    array = getattr(layer, name)
    if array is None:
        return
    _, axes = getattr(layer, "source_arrays", {}).get(name, (name, None))
    axes = axes or tuple(range(array.ndim))
    shape = [array.shape[axes.index(axis)] for axis in range(array.ndim)]
    with torch.no_grad():
        array.copy_(init(shape).permute(axes))


def variance_scaling(scale, mode, distribution, in_axis=-2, out_axis=-1):
    """Returns an initializer whose variance depends on how many inputs and outputs there are."""

    def init(shape):
        fan_in, fan_out = (math.prod(shape) / shape[axis] for axis in (out_axis, in_axis))
        fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
        std = math.sqrt(scale / max(1.0, fans[mode]))
        if distribution == "uniform":
            return (torch.rand(shape) * 2 - 1) * math.sqrt(3) * std
        if distribution == "normal":
            return torch.randn(shape) * std
        return trunc_normal_init(std / 0.87962566103423978)(shape)

    return init


class Embed(nn.Embedding):
    """A table of vectors with Flax's arguments and initial values."""

    source_arrays = {"weight": ("embedding", None)}

    def __init__(self, num_embeddings, features, embedding_init=None):
        super().__init__(num_embeddings, features)
        self.features = features
        scaling = variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=0)
        fill(self, "weight", embedding_init or scaling)

    def attend(self, query):
        return query @ self.weight.T


def ones_init():
    """Returns an initializer that gives ones."""
    return torch.ones


def zeros_init():
    """Returns an initializer that gives zeros."""
    return torch.zeros


class LayerNorm(nn.LayerNorm):
    """Normalisation of the last dimension with Flax's arguments."""

    source_arrays = {"weight": ("scale", None)}

    def __init__(
        self,
        num_features,
        epsilon=1e-6,
        use_bias=True,
        use_scale=True,
        bias_init=None,
        scale_init=None,
    ):
        super().__init__(num_features, eps=epsilon, bias=use_bias)
        fill(self, "weight", scale_init or ones_init())
        fill(self, "bias", bias_init or zeros_init())
        if not use_scale:
            self.weight = None


class Lazy(nn.Module):
    """A layer of another class, which it becomes when its first input tells how many features."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        if "features" in kwargs:
            kwargs["out_features"] = kwargs.pop("features")
        self.given = args, kwargs

    def arguments_for(self, x):
        args, kwargs = self.given
        return (x.shape[-1], *args), kwargs

    def forward(self, x, *args, **kwargs):
        (sizes, options), training = self.arguments_for(x), self.training
        self.__class__ = self.kind
        self.__init__(*sizes, **options)
        self.to(x.device).train(training)
        return self(x, *args, **kwargs)


class LazyLayerNorm(Lazy):
    """See `LayerNorm`."""

    kind = LayerNorm


def lecun_normal(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances."""
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_axis, out_axis)


class Linear(nn.Linear):
    """A linear layer with Flax's arguments and initial values."""

    source_arrays = {"weight": ("kernel", (1, 0))}

    def __init__(self, in_features, out_features, use_bias=True, kernel_init=None, bias_init=None):
        super().__init__(in_features, out_features, bias=use_bias)
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())


class LazyLinear(Lazy):
    """See `Linear`."""

    kind = Linear


def repeat(size, count):
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int) else tuple(size)


class LinearGeneral(nn.Module):
    """A linear layer over several dimensions."""

    source_arrays = {"weight": ("kernel", None)}

    def __init__(
        self, in_features, out_features, axis=-1, use_bias=True, kernel_init=None, bias_init=None
    ):
        super().__init__()
        inner, outer = repeat(in_features, 1), repeat(out_features, 1)
        self.axis = repeat(axis, 1)
        drawn = (kernel_init or lecun_normal())((math.prod(inner), math.prod(outer)))
        self.weight = nn.Parameter(drawn.reshape(*inner, *outer))
        self.bias = nn.Parameter((bias_init or zeros_init())(outer)) if use_bias else None

    def forward(self, x):
        y = torch.tensordot(x, self.weight, (self.axis, tuple(range(len(self.axis)))))
        return y if self.bias is None else y + self.bias


class MultiHeadAttention(nn.Module):
    """Attention of several heads with Flax's arguments and layouts."""

    def __init__(
        self,
        num_heads,
        in_features,
        qkv_features=None,
        out_features=None,
        dropout_rate=0.0,
        deterministic=False,
        kernel_init=None,
        out_kernel_init=None,
        bias_init=None,
        out_bias_init=None,
        use_bias=True,
        decode=False,
        broadcast_dropout=True,
    ):
        super().__init__()
        if decode:
            raise ValueError("a cache of keys and values")
        width = qkv_features or in_features
        heads = (num_heads, width // num_heads)
        inits = {"use_bias": use_bias, "kernel_init": kernel_init, "bias_init": bias_init}
        self.query = LinearGeneral(in_features, heads, **inits)
        self.key = LinearGeneral(in_features, heads, **inits)
        self.value = LinearGeneral(in_features, heads, **inits)
        self.out = LinearGeneral(
            heads,
            out_features or in_features,
            (-2, -1),
            use_bias,
            out_kernel_init or kernel_init,
            out_bias_init or bias_init,
        )
        self.dropout_rate, self.training = dropout_rate, not deterministic
        self.broadcast_dropout = broadcast_dropout

    def forward(
        self, inputs_q, inputs_k=None, inputs_v=None, *, mask=None, deterministic=None, decode=False
    ):
        if decode:
            raise ValueError("a cache of keys and values")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        q, k, v = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        weights = torch.einsum("...qhd,...khd->...hqk", q / math.sqrt(q.shape[-1]), k)
        if mask is not None:
            weights = torch.where(mask.bool(), weights, torch.finfo(weights.dtype).min)
        weights = weights.softmax(-1)
        is_still = not self.training if deterministic is None else deterministic
        if self.dropout_rate and not is_still:
            rest = weights.shape[:-2]
            shape = ((1,) * len(rest) if self.broadcast_dropout else rest) + weights.shape[-2:]
            kept = torch.rand(shape, device=weights.device) < 1 - self.dropout_rate
            weights = weights * (kept.to(weights.dtype) / (1 - self.dropout_rate))
        return self.out(torch.einsum("...hqk,...khd->...qhd", weights, v))


class LazyMultiHeadAttention(Lazy):
    """See `MultiHeadAttention`."""

    kind = MultiHeadAttention

    def arguments_for(self, x):
        args, kwargs = self.given
        args = [*args] or [kwargs["num_heads"]]
        rest = {name: value for name, value in kwargs.items() if name != "num_heads"}
        return (args[0], x.shape[-1], *args[1:]), rest


def initialize(model, *inputs, **options):
    """Calls a model once, so that its layers have their sizes; returns it."""
    training = model.training
    with torch.no_grad():
        model.eval()(*inputs, **options)
    return model.train(training)


def late(module, name, make):
    """Returns a part of a module that its first call makes, as sizes of arrays say."""
    if not hasattr(module, name):
        setattr(module, name, make())
    return getattr(module, name)


def named_arrays(module, path=()):
    """Yields the name of each array in the source, the tensor, and its axes there."""
    names = getattr(module, "source_arrays", {})
    for key, tensor in module.state_dict(keep_vars=True).items():
        if "." not in key:
            is_parameter = isinstance(tensor, nn.Parameter)
            name, axes, *kind = names.get(key, (key, None))
            kind = kind or ["params" if is_parameter else "batch_stats"]
            yield ".".join((*kind, *path, name)), tensor, axes
    inner = (*path, *getattr(module, "source_path", ()))
    for key, part in module.named_children():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        yield from named_arrays(
            part, (*inner[:-1], f"{inner[-1]}_{key}") if is_list else (*inner, key)
        )


def normal_init(stddev=1e-2):
    """Returns an initializer that draws from a normal distribution."""
    return lambda shape: torch.randn(shape) * stddev


def xavier_uniform(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances in both directions."""
    return variance_scaling(1.0, "fan_avg", "uniform", in_axis, out_axis)


def trunc_normal_init(stddev=1e-2, lower=-2.0, upper=2.0):
    """Returns an initializer that draws from a normal distribution between two deviations."""
    return lambda shape: nn.init.trunc_normal_(torch.empty(shape), a=lower, b=upper) * stddev


class AddPositionEmbs(nn.Module):
    """Adds learned positional embeddings to the inputs."""

    def __init__(self, posemb_init: Callable[..., Any] = normal_init(stddev=0.02)):
        super().__init__()
        self.posemb_init = posemb_init

    def forward(self, inputs):
        assert inputs.ndim == 3, f"{inputs.ndim} dimensions"
        pos_emb_shape = 1, inputs.shape[1], inputs.shape[2]
        pe = late(self, "pos_embedding", lambda: nn.Parameter(self.posemb_init(pos_emb_shape)))
        return inputs + pe


class MlpBlock(nn.Module):
    """Transformer MLP / feed-forward block."""

    def __init__(self, mlp_dim: int, out_dim: int | None = None, dropout_rate: float = 0.1):
        super().__init__()
        self.mlp_dim = mlp_dim
        self.out_dim = out_dim
        self.dropout_rate = dropout_rate
        self.Dense_0 = LazyLinear(
            features=self.mlp_dim, kernel_init=xavier_uniform(), bias_init=normal_init(stddev=1e-06)
        )
        self.Dropout_0 = Dropout(rate=self.dropout_rate)
        self.Dropout_1 = Dropout(rate=self.dropout_rate)

    def forward(self, inputs, *, deterministic: bool):
        actual_out_dim = inputs.shape[-1] if self.out_dim is None else self.out_dim
        x = self.Dense_0(inputs)
        x = F.gelu(x, approximate="tanh")
        x = self.Dropout_0(x, deterministic=deterministic)
        output = late(self, "Dense_1", lambda: LazyLinear(features=actual_out_dim))(x)
        return self.Dropout_1(output, deterministic=deterministic)


class Encoder1DBlock(nn.Module):
    """Transformer encoder layer."""

    def __init__(
        self,
        mlp_dim: int,
        num_heads: int,
        dropout_rate: float = 0.1,
        attention_dropout_rate: float = 0.1,
    ):
        super().__init__()
        self.mlp_dim = mlp_dim
        self.num_heads = num_heads
        self.dropout_rate = dropout_rate
        self.attention_dropout_rate = attention_dropout_rate
        self.LayerNorm_0 = LazyLayerNorm()
        self.MultiHeadDotProductAttention_0 = LazyMultiHeadAttention(
            kernel_init=xavier_uniform(),
            broadcast_dropout=False,
            dropout_rate=self.attention_dropout_rate,
            num_heads=self.num_heads,
        )
        self.Dropout_0 = Dropout(rate=self.dropout_rate)
        self.LayerNorm_1 = LazyLayerNorm()
        self.MlpBlock_0 = MlpBlock(mlp_dim=self.mlp_dim, dropout_rate=self.dropout_rate)

    def forward(self, inputs, *, deterministic: bool):
        # Attention block.
        x = self.LayerNorm_0(inputs)
        x = self.MultiHeadDotProductAttention_0(x, x, deterministic=deterministic)
        x = self.Dropout_0(x, deterministic=deterministic)
        x = x + inputs

        # MLP block.
        y = self.LayerNorm_1(x)
        y = self.MlpBlock_0(y, deterministic=deterministic)
        return x + y


class Encoder(nn.Module):
    """Embeds tokens, and applies the layers."""

    def __init__(
        self,
        vocab_size: int,
        width: int,
        num_layers: int,
        mlp_dim: int,
        num_heads: int,
        num_classes: int = 2,
        dropout_rate: float = 0.1,
        names: list[str] = None,
    ):
        super().__init__()
        self.vocab_size = vocab_size
        self.width = width
        self.num_layers = num_layers
        self.mlp_dim = mlp_dim
        self.num_heads = num_heads
        self.num_classes = num_classes
        self.dropout_rate = dropout_rate
        self.names = list() if names is None else names
        self.embed = Embed(self.vocab_size, self.width)
        self.positions = AddPositionEmbs()
        self.layers = nn.ModuleList(
            [
                Encoder1DBlock(self.mlp_dim, self.num_heads, self.dropout_rate)
                for _ in range(self.num_layers)
            ]
        )
        self.norm = LazyLayerNorm()
        self.head = LazyLinear(self.num_classes, kernel_init=normal_init(0.5))

    def forward(self, tokens, *, train: bool = False):
        x = self.positions(self.embed(tokens))
        for layer in self.layers:
            x = layer(x, deterministic=not train)
        return self.head(self.norm(x).mean(dim=1))


def load_weights(model, state, strict=True):
    """Fills a model with the arrays of the source's state, by name; returns it.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    arrays, filled = dict(state), set()
    for name, tensor, axes in named_arrays(model):
        if name in arrays:
            array = arrays.pop(name)
            array = array if isinstance(array, torch.Tensor) else torch.tensor(array)
            array = array if axes is None else array.permute(axes)
            if array.shape != tensor.shape:
                raise ValueError(f"{name}: {tuple(array.shape)} instead of {tuple(tensor.shape)}")
            with torch.no_grad():
                tensor.copy_(array)
            filled.add(id(tensor))
    missing = [name for name, tensor, _ in named_arrays(model) if id(tensor) not in filled]
    if strict and (missing or arrays):
        raise ValueError(f"missing: {missing}; left over: {[*arrays]}")
    return model


def source_state(model):
    """Returns the arrays of a model by their names in the source, in its layouts."""
    state = {}
    for name, tensor, axes in named_arrays(model):
        back = axes and [axes.index(axis) for axis in range(tensor.ndim)]
        state[name] = tensor.detach().permute(back) if back else tensor.detach()
    return state
