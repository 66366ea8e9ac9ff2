"""GPT for PyTorch, transcribed from models.nnx_repositories.gpt"""

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


def trunc_normal_init(stddev=1e-2, lower=-2.0, upper=2.0):
    """Returns an initializer that draws from a normal distribution between two deviations."""
    return lambda shape: nn.init.trunc_normal_(torch.empty(shape), a=lower, b=upper) * stddev


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in linear layers and norms, as GPT-2


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        # key, query, value projections for all heads, but in a batch
        self.c_attn = Linear(
            config.n_embd,
            3 * config.n_embd,
            use_bias=config.bias,
            kernel_init=normal_init(stddev=0.02),
        )
        # output projection
        self.c_proj = Linear(
            config.n_embd,
            config.n_embd,
            use_bias=config.bias,
            kernel_init=normal_init(stddev=0.02 / math.sqrt(2 * config.n_layer)),
        )
        # regularization
        self.attn_dropout = Dropout(config.dropout)
        self.resid_dropout = Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape  # batch size, sequence length, embedding dimensionality (n_embd)

        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q = q.reshape(B, T, self.n_head, C // self.n_head).permute(0, 2, 1, 3)  # (B, nh, T, hs)
        k = k.reshape(B, T, self.n_head, C // self.n_head).permute(0, 2, 1, 3)  # (B, nh, T, hs)
        v = v.reshape(B, T, self.n_head, C // self.n_head).permute(0, 2, 1, 3)  # (B, nh, T, hs)

        # causal self-attention: (B, nh, T, hs) x (B, nh, hs, T) -> (B, nh, T, T)
        att = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.shape[-1]))
        mask = torch.ones((T, T), dtype=torch.bool, device=x.device).tril()
        att = torch.where(mask, att, -torch.inf)
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v  # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.permute(0, 2, 1, 3).reshape(B, T, C)  # all head outputs side by side

        # output projection
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, use_bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, use_bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        x = F.gelu(x, approximate="tanh")
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, epsilon=1e-05, use_bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, epsilon=1e-05, use_bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """The language model; the token embedding is the head, too."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = Embed(config.vocab_size, config.n_embd)
        self.wpe = Embed(config.block_size, config.n_embd)
        self.drop = Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = LayerNorm(config.n_embd, epsilon=1e-05, use_bias=config.bias)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        _, t = idx.shape
        if t > self.config.block_size:
            raise ValueError(f"Cannot forward sequence of length {t}")
        pos = torch.arange(0, t, device=idx.device)  # shape (t)

        # forward the GPT model itself
        tok_emb = self.wte(idx)  # token embeddings of shape (b, t, n_embd)
        pos_emb = self.wpe(pos)  # position embeddings of shape (t, n_embd)
        x = self.drop(tok_emb + pos_emb)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        return self.wte.attend(x)


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
