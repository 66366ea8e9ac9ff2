"""GPT for Equinox, transcribed from models.repositories.nanogpt"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from collections.abc import Callable


class Embedding(eqx.nn.Embedding):
    """A table of vectors, of which that of padding is not trained."""

    padding_idx: int | None = eqx.field(static=True)

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, *, key):
        super().__init__(num_embeddings, embedding_dim, key=key)
        self.padding_idx = padding_idx
        if padding_idx is not None:
            self.weight = self.weight.at[padding_idx].set(0.0)

    def __call__(self, ids):
        x = self.weight[ids]
        if self.padding_idx is None:
            return x
        is_padding = (ids == self.padding_idx % self.num_embeddings)[..., None]
        return jnp.where(is_padding, jax.lax.stop_gradient(x), x)

    def attend(self, x):
        return x @ self.weight.T


class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class ModuleDict(eqx.Module):
    """Modules by name, which are attributes, too."""

    inside: ClassVar[str] = "parts"
    parts: OrderedDict[str, Any]

    def __init__(self, parts=()):
        self.parts = OrderedDict(parts)

    def __getattr__(self, name):
        parts = vars(self).get("parts", {})
        if name not in parts:
            raise AttributeError(name)
        return parts[name]

    def __getitem__(self, name):
        return self.parts[name]

    def __setitem__(self, name, part):
        self.parts[name] = part

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)

    def keys(self):
        return self.parts.keys()

    def values(self):
        return self.parts.values()

    def items(self):
        return self.parts.items()


def attention(query, key, value, mask=None, scale=None, is_causal=False, dropout=None):
    """Computes scaled dot-product attention; fully masked rows give zeros."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = key.swapaxes(-1, -2)
    logits = jnp.matmul(query, key, preferred_element_type=jnp.float32) * scale
    if mask is not None and mask.dtype != bool:
        logits = logits + mask
    if is_causal:
        mask = jnp.tri(*logits.shape[-2:], dtype=bool)
    if mask is not None and mask.dtype == bool:
        logits = jnp.where(mask, logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    weights = weights if dropout is None else dropout(weights)
    return (weights.astype(value.dtype) @ value).astype(query.dtype)


def buffer(*, saved=True, **options):
    """Declares an array that is not trained, and whether the source's state dict has it."""
    return eqx.field(metadata={"trained": False, "saved": saved}, **options)


def gelu(x):
    """Computes GELU by erf, as PyTorch does; `jax.nn.gelu` takes erfc, which is slower."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def initialize(owner, name, init, key):
    """Gives an array of a model that is still being made the values of an initializer."""
    array = Place(owner, name)
    set_part(owner, name, init(key, array.shape, array.dtype))


def iter_modules(module):
    """Yields the modules in a module with their paths, itself last."""
    is_part = lambda x: isinstance(x, eqx.Module) and x is not module  # noqa: E731
    for path, part in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_part):
        if isinstance(part, eqx.Module):
            yield from ((path + inner, x) for inner, x in iter_modules(part))
    yield (), module


def layer_norm(x, axes=1, weight=None, bias=None, eps=1e-5):
    """Normalises the last axes to zero mean and unit variance, in float32."""
    axis = tuple(range(-axes, 0))
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = y - y.mean(axis=axis, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=axis, keepdims=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.astype(x.dtype)


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there."""
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(str(name) for owner, name in steps if name != getattr(owner, "inside", None))


def named_parameters(model):
    """Yields the name of each array that is trained in the source, and its place."""
    for path, array in jax.tree_util.tree_leaves_with_path(model):
        steps = [*steps_to(model, path)]
        is_trained = all(settings_of(*step).get("trained", True) for step in steps)
        if eqx.is_inexact_array(array) and is_trained:
            yield name_in_source(model, path), Place(*steps[-1])


def set_part(owner, name, value):
    """Gives a part of a model that is still being made another array or module."""
    if isinstance(owner, eqx.Module):
        object.__setattr__(owner, name, value)
    else:
        owner[name] = value


def settings_of(owner, name):
    """Returns how a field of a module is declared."""
    return type(owner).__dataclass_fields__[name].metadata if isinstance(owner, eqx.Module) else {}


def steps_to(model, path):
    """Yields the parts on a key path, and the name or number of the next one in each."""
    owner = model
    for step in path:
        name = next(getattr(step, kind) for kind in ("name", "key", "idx") if hasattr(step, kind))
        yield owner, name
        owner = getattr(owner, name) if isinstance(owner, eqx.Module) else owner[name]


class Place:
    """An array in a part of a model that is still being made."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __iter__(self):
        return iter((self.owner, self.name))

    def __jax_array__(self):
        return self.array

    @property
    def array(self):
        is_module = isinstance(self.owner, eqx.Module)
        return getattr(self.owner, self.name) if is_module else self.owner[self.name]

    def __getattr__(self, name):
        return getattr(self.array, name)


class LayerNorm(eqx.Module):
    """LayerNorm but with an optional bias. PyTorch doesn't support simply bias=False."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, ndim, bias):
        self.weight = jnp.ones((ndim,))
        self.bias = jnp.zeros((ndim,)) if bias else None

    def __call__(self, input):
        return layer_norm(input, weight=self.weight, bias=self.bias)


class CausalSelfAttention(eqx.Module):
    c_attn: Linear
    c_proj: Linear
    attn_dropout: eqx.nn.Dropout
    resid_dropout: eqx.nn.Dropout
    n_head: int = eqx.field(static=True)
    n_embd: int = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    flash: bool = eqx.field(static=True)
    mask: jax.Array = buffer(default=None)
    inference: bool  # set by eqx.nn.inference_mode

    def __init__(self, config, *, key):
        keys = Keys(key)
        assert config.n_embd % config.n_head == 0
        # key, query, value projections for all heads, but in a batch
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias, key=keys())
        # output projection
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias, key=keys())
        # regularization
        self.attn_dropout = eqx.nn.Dropout(config.dropout)
        self.resid_dropout = eqx.nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout
        # flash attention make GPU go brrrrr
        self.flash = config.flash and True
        if not self.flash:
            # causal mask to ensure that attention is only applied to the left
            self.mask = jnp.tril(jnp.ones((config.block_size, config.block_size))).reshape(
                1, 1, config.block_size, config.block_size
            )
        self.inference = False

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        B, T, C = x.shape  # batch size, sequence length, embedding dimensionality (n_embd)

        # calculate query, key, values for all heads in batch and move head forward
        q, k, v = jnp.split(self.c_attn(x), 3, axis=2)
        k = k.reshape(B, T, self.n_head, C // self.n_head).swapaxes(1, 2)  # (B, nh, T, hs)
        q = q.reshape(B, T, self.n_head, C // self.n_head).swapaxes(1, 2)  # (B, nh, T, hs)
        v = v.reshape(B, T, self.n_head, C // self.n_head).swapaxes(1, 2)  # (B, nh, T, hs)

        # causal self-attention; self-attend: (B, nh, T, hs) x (B, nh, hs, T) -> (B, nh, T, T)
        if self.flash:
            # efficient attention using Flash Attention CUDA kernels
            y = attention(
                q,
                k,
                v,
                is_causal=True,
                dropout=lambda weights: eqx.nn.Dropout(0 if self.inference else self.dropout)(
                    weights, key=keys(), inference=False
                ),
            )
        else:
            # manual implementation of attention
            att = q @ k.swapaxes(-2, -1) * (1.0 / math.sqrt(k.shape[-1]))
            att = jnp.where(jax.lax.stop_gradient(self.mask)[:, :, :T, :T] == 0, float("-inf"), att)
            att = jax.nn.softmax(att, axis=-1)
            att = self.attn_dropout(att, key=keys())
            y = att @ v  # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.swapaxes(1, 2).reshape(B, T, C)  # re-assemble all head outputs side by side

        # output projection
        y = self.resid_dropout(self.c_proj(y), key=keys())
        return y


class MLP(eqx.Module):
    c_fc: Linear
    gelu: Callable
    c_proj: Linear
    dropout: eqx.nn.Dropout

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias, key=keys())
        self.gelu = partial(jax.nn.gelu, approximate=False)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias, key=keys())
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        x = self.dropout(x, key=keys())
        return x


class Block(eqx.Module):
    ln_1: LayerNorm
    attn: CausalSelfAttention
    ln_2: LayerNorm
    mlp: MLP

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, key=keys())
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config, key=keys())

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        x = x + self.attn(self.ln_1(x), key=keys())
        x = x + self.mlp(self.ln_2(x), key=keys())
        return x


@dataclass(eq=False)
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2 vocab_size of 50257, padded up to nearest multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # True: bias in Linears and LayerNorms, like GPT-2
    flash: bool = False


class GPT(eqx.Module):
    config: GPTConfig = eqx.field(static=True)
    transformer: ModuleDict

    def __init__(self, config, *, key):
        keys = Keys(key)
        assert config.vocab_size is not None
        assert config.block_size is not None
        self.config = config

        self.transformer = ModuleDict(
            dict(
                wte=Embedding(config.vocab_size, config.n_embd, key=keys()),
                wpe=Embedding(config.block_size, config.n_embd, key=keys()),
                drop=eqx.nn.Dropout(config.dropout),
                h=[Block(config, key=keys()) for _ in range(config.n_layer)],
                ln_f=LayerNorm(config.n_embd, bias=config.bias),
            )
        )

        # init all weights
        for _, module in iter_modules(self):
            self._init_weights(module, key=keys())
        # apply special scaled init to the residual projections, per GPT-2 paper
        for pn, p in named_parameters(self):
            if pn.endswith("c_proj.weight"):
                initialize(
                    *p, jax.nn.initializers.normal(0.02 / math.sqrt(2 * config.n_layer)), keys()
                )

    def _init_weights(self, module, *, key):
        keys = Keys(key)
        if isinstance(module, Linear):
            initialize(module, "weight", jax.nn.initializers.normal(0.02), keys())
            if module.bias is not None:
                set_part(module, "bias", jnp.zeros_like(module.bias))
        elif isinstance(module, Embedding):
            initialize(module, "weight", jax.nn.initializers.normal(0.02), keys())

    def __call__(self, idx, targets=None, *, key=None):
        keys = Keys(key)
        b, t = idx.shape
        assert t <= self.config.block_size, (
            f"Cannot forward sequence of length {t}, block size is only {self.config.block_size}"
        )
        pos = jnp.arange(t)  # shape (t)

        # forward the GPT model itself
        tok_emb = self.transformer.wte(idx)  # token embeddings of shape (b, t, n_embd)
        pos_emb = self.transformer.wpe(pos)  # position embeddings of shape (t, n_embd)
        x = self.transformer.drop(tok_emb + pos_emb, key=keys())
        for block in self.transformer.h:
            x = block(x, key=keys())
        x = self.transformer.ln_f(x)

        assert targets is None, "the source does something else here, which no example has shown"
        # inference-time mini-optimization: only forward the lm_head on the very last position
        # note: using list [-1] to preserve the time dim
        logits = self.transformer.wte.attend(x[:, jnp.array([-1]), :])
        loss = None

        return logits, loss


TIED = {"lm_head.weight": "transformer.wte.weight"}  # names in the source's state -> those here


def load_weights(model, state, strict=True):
    """Returns a model with the arrays of the source's state dict.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    given = {TIED.get(name, name): array for name, array in state.items()}
    known, missing = set(), []

    def load(path, array):
        name = name_in_source(model, path)
        name = TIED.get(name, name)
        known.add(name)
        if name not in given:
            missing.extend([] if name is None else [name])
            return array
        if jnp.shape(given[name]) != array.shape:
            raise ValueError(f"{name}: {jnp.shape(given[name])} instead of {array.shape}")
        return jnp.asarray(given[name], array.dtype)

    arrays, rest = eqx.partition(model, eqx.is_array)
    filled = eqx.combine(jax.tree_util.tree_map_with_path(load, arrays), rest)
    left = [x for x in given if x not in known and not x.endswith("num_batches_tracked")]
    if strict and (missing or left):
        raise ValueError(f"missing: {missing}; left over: {left}")
    return filled


def source_state(model):
    """Returns the arrays of a model by their names in the source."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    named = [(name_in_source(model, path), array) for path, array in leaves]
    state = {name: array for name, array in named if name is not None}
    return state | {second: state[first] for second, first in TIED.items()}
