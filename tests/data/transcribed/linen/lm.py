"""TransformerLM for PyTorch, transcribed from models.linen_repositories.lm"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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


class LazyLinearGeneral(Lazy):
    """See `LinearGeneral`."""

    kind = LinearGeneral

    def arguments_for(self, x):
        args, kwargs = self.given
        axes = kwargs.get("axis", args[1] if len(args) > 1 else -1)
        axes = (axes,) if isinstance(axes, int) else axes
        return (tuple(x.shape[axis] for axis in axes), *args), kwargs


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


def make_causal_mask(x):
    """Returns a mask that lets each place of sequences attend to those before it, and itself."""
    length = x.shape[-1]
    mask = torch.ones(length, length, device=x.device).tril()
    return mask.expand(*x.shape[:-1], 1, length, length)


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


def trunc_normal_init(stddev=1e-2, lower=-2.0, upper=2.0):
    """Returns an initializer that draws from a normal distribution between two deviations."""
    return lambda shape: nn.init.trunc_normal_(torch.empty(shape), a=lower, b=upper) * stddev


@dataclass(frozen=True)
class TransformerConfig:
    """Global hyperparameters used to minimize obnoxious kwarg plumbing."""

    vocab_size: int
    emb_dim: int = 16
    num_heads: int = 2
    num_layers: int = 2
    mlp_dim: int = 24
    max_len: int = 16
    dropout_rate: float = 0.1
    logits_via_embedding: bool = True


class MlpBlock(nn.Module):
    """Transformer MLP / feed-forward block."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        config = self.config
        self.Dense_0 = LazyLinear(config.mlp_dim)
        self.Dropout_0 = Dropout(rate=config.dropout_rate)
        self.Dropout_1 = Dropout(rate=config.dropout_rate)

    def forward(self, inputs, deterministic=True):
        x = self.Dense_0(inputs)
        x = F.relu(x)
        x = self.Dropout_0(x, deterministic=deterministic)
        output = late(self, "Dense_1", lambda: LazyLinear(inputs.shape[-1]))(x)
        return self.Dropout_1(output, deterministic=deterministic)


class DecoderBlock(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        config = self.config
        self.LayerNorm_0 = LazyLayerNorm()
        self.Dropout_0 = Dropout(rate=config.dropout_rate)
        self.LayerNorm_1 = LazyLayerNorm()
        self.MlpBlock_0 = MlpBlock(config=config)

    def forward(self, inputs, decoder_mask=None, deterministic=True):
        config = self.config
        assert inputs.ndim == 3
        x = self.LayerNorm_0(inputs)
        b, t, d = x.shape
        heads = config.num_heads
        qkv = late(self, "qkv", lambda: LazyLinearGeneral((3, heads, d // heads), use_bias=False))(
            x
        )
        q, k, v = qkv.movedim(2, 0)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d // heads)
        if decoder_mask is not None:
            scores = torch.where(decoder_mask != 0, scores, -1000000000.0)
        weights = F.softmax(scores, dim=-1)
        x = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d)
        x = late(self, "proj", lambda: LazyLinear(d, use_bias=False))(x)
        x = self.Dropout_0(x, deterministic=deterministic)
        x = x + inputs
        z = self.LayerNorm_1(x)
        z = self.MlpBlock_0(z, deterministic=deterministic)
        return x + z


class TransformerLM(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        config = self.config
        self.embed = Embed(config.vocab_size, config.emb_dim)
        self.pos_embedding = nn.Parameter(
            normal_init(stddev=0.02)((1, config.max_len, config.emb_dim))
        )
        self.Dropout_0 = Dropout(rate=config.dropout_rate)
        for lyr in range(config.num_layers):
            self.add_module(f"encoderdecoderblock_{lyr}", DecoderBlock(config=config))
        self.encoderdecoder_norm = LazyLayerNorm()

    def forward(self, inputs, deterministic: bool = True):
        config = self.config
        embed = self.embed
        mask = make_causal_mask(inputs)
        x = embed(inputs)
        pos = self.pos_embedding
        x = x + pos[:, : inputs.shape[1], :]
        x = self.Dropout_0(x, deterministic=deterministic)
        for lyr in range(config.num_layers):
            x = getattr(self, f"encoderdecoderblock_{lyr}")(
                x, decoder_mask=mask, deterministic=deterministic
            )
        x = self.encoderdecoder_norm(x)
        if config.logits_via_embedding:
            return embed.attend(x) / math.sqrt(x.shape[-1])
        raise NotImplementedError("the source does something else here, which no example has shown")


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
