"""Transformer for PyTorch, transcribed from models.nnx_repositories.llama"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


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


def lecun_normal(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances."""
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_axis, out_axis)


def zeros_init():
    """Returns an initializer that gives zeros."""
    return torch.zeros


class Linear(nn.Linear):
    """A linear layer with Flax's arguments and initial values."""

    source_arrays = {"weight": ("kernel", (1, 0))}

    def __init__(self, in_features, out_features, use_bias=True, kernel_init=None, bias_init=None):
        super().__init__(in_features, out_features, bias=use_bias)
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())


def named_arrays(module, path=()):
    """Yields the name of each array in the source, the tensor, and its axes there."""
    names = getattr(module, "source_arrays", {})
    for key, tensor in module.state_dict(keep_vars=True).items():
        if "." not in key:
            name, axes = names.get(key, (key, None))
            yield ".".join((*path, name)), tensor, axes
    inner = (*path, *getattr(module, "source_path", ()))
    for key, part in module.named_children():
        yield from named_arrays(part, (*inner, key))


def normal_init(stddev=1e-2):
    """Returns an initializer that draws from a normal distribution."""
    return lambda shape: torch.randn(shape) * stddev


def ones_init():
    """Returns an initializer that gives ones."""
    return torch.ones


def trunc_normal_init(stddev=1e-2, lower=-2.0, upper=2.0):
    """Returns an initializer that draws from a normal distribution between two deviations."""
    return lambda shape: nn.init.trunc_normal_(torch.empty(shape), a=lower, b=upper) * stddev


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 2
    num_embed: int = 32
    embed_dim: int = 16
    hidden_dim: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 4
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


def apply_rope(x, positions, head_dim, theta):
    """Rotates pairs of features; x is [B, T, N, H]."""
    fraction = 2 * torch.arange(0, head_dim // 2, device=x.device) / head_dim
    timescale = theta**fraction
    sinusoid = positions[..., None] / timescale
    sin, cos = torch.sin(sinusoid)[..., None, :], torch.cos(sinusoid)[..., None, :]
    first, second = x.chunk(2, dim=-1)
    out = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return out.to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.w = nn.Parameter(ones_init()((dim,)))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        rms = torch.sqrt((x.to(torch.float32) ** 2).mean(dim=-1, keepdim=True) + self.eps)
        return (self.w * x / rms).to(dtype)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        init = normal_init(0.02)
        self.q = nn.Parameter(init((cfg.embed_dim, cfg.num_heads, cfg.head_dim)))
        self.kv = nn.Parameter(init((2, cfg.embed_dim, cfg.num_kv_heads, cfg.head_dim)))
        self.o = nn.Parameter(init((cfg.num_heads, cfg.head_dim, cfg.embed_dim)))

    def forward(self, x, positions, mask):
        cfg = self.cfg
        q = torch.einsum("BTD,DNH->BTNH", x, self.q)
        k, v = torch.einsum("BTD,CDKH->CBTKH", x, self.kv)
        q = apply_rope(q, positions, cfg.head_dim, cfg.rope_theta)
        k = apply_rope(k, positions, cfg.head_dim, cfg.rope_theta)
        groups = cfg.num_heads // cfg.num_kv_heads
        k = k.repeat_interleave(groups, dim=2)
        v = v.repeat_interleave(groups, dim=2)
        scores = torch.einsum("BTNH,BSNH->BNTS", q, k) * cfg.head_dim ** (-0.5)
        scores = torch.where(mask[:, None], scores, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1).to(x.dtype)
        out = torch.einsum("BNTS,BSNH->BTNH", probs, v)
        return torch.einsum("BTNH,NHD->BTD", out, self.o)


class FeedForward(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate = Linear(cfg.embed_dim, cfg.hidden_dim, use_bias=False)
        self.up = Linear(cfg.embed_dim, cfg.hidden_dim, use_bias=False)
        self.down = Linear(cfg.hidden_dim, cfg.embed_dim, use_bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn_norm = RMSNorm(cfg.embed_dim, cfg.norm_eps)
        self.attn = Attention(cfg)
        self.ffn_norm = RMSNorm(cfg.embed_dim, cfg.norm_eps)
        self.ffn = FeedForward(cfg)

    def forward(self, x, positions, mask):
        x = x + self.attn(self.attn_norm(x), positions, mask)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embed = Embed(cfg.num_embed, cfg.embed_dim)
        self.layers = nn.ModuleList([Layer(cfg) for _ in range(cfg.num_layers)])
        self.norm = RMSNorm(cfg.embed_dim, cfg.norm_eps)

    def forward(self, tokens, lengths=None):
        B, T = tokens.shape
        positions = torch.arange(T, device=tokens.device)[None].broadcast_to((B, T))
        mask = torch.ones((T, T), dtype=torch.bool, device=tokens.device).tril()[None]
        if lengths is not None:
            mask = mask & (
                torch.arange(T, device=tokens.device)[None, None, :] < lengths[:, None, None]
            )
        x = self.embed(tokens) * math.sqrt(self.cfg.embed_dim)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.embed.attend(self.norm(x))


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
