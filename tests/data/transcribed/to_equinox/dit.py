"""DiT for Equinox, transcribed from models.repositories.dit"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from functools import partial
from typing import Any
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def ntuple(size: Any, count: int) -> tuple[Any, ...]:
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int | float) else tuple(size)


def uniform_init(low, high):
    """Returns an initializer that draws uniformly from an interval."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, low, high)

    return init


class Conv1d(eqx.Module):
    """A convolution of sequences with the channels first."""

    rank: ClassVar[int] = 1
    weight: jax.Array
    bias: jax.Array | None
    in_channels: int = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)
    kernel_size: tuple[int, ...] = eqx.field(static=True)
    stride: tuple[int, ...] = eqx.field(static=True)
    padding: Any = eqx.field(static=True)
    dilation: tuple[int, ...] = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    padding_mode: str = eqx.field(static=True)

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        padding_mode="zeros",
        *,
        key,
    ):
        if padding_mode != "zeros" and isinstance(padding, str):
            raise ValueError(f"{padding_mode} padding of a size that is called {padding!r}")
        self.padding_mode = padding_mode
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = ntuple(kernel_size, self.rank), ntuple(stride, self.rank)
        self.dilation = ntuple(dilation, self.rank)
        self.padding = padding if isinstance(padding, str) else ntuple(padding, self.rank)
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        bound, (first, second) = math.prod(shape[1:]) ** -0.5, jax.random.split(key)
        self.weight = uniform_init(-bound, bound)(first, shape)
        self.bias = uniform_init(-bound, bound)(second, (out_channels,)) if bias else None

    def __call__(self, x):
        is_named = isinstance(self.padding, str)
        pads = self.padding.upper() if is_named else [(size, size) for size in self.padding]
        if self.padding_mode != "zeros":
            modes = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
            x, pads = jnp.pad(x, [(0, 0), (0, 0), *pads], modes[self.padding_mode]), "VALID"
        y = jax.lax.conv_general_dilated(
            x,
            self.weight,
            self.stride,
            pads,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
        )
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * self.rank)


class Conv2d(Conv1d):
    """A convolution of images with the channels first."""

    rank: ClassVar[int] = 2


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


class LayerNorm(eqx.nn.LayerNorm):
    """Normalisation of the last dimensions."""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True):
        shape = ntuple(normalized_shape, 1)
        super().__init__(shape, eps, elementwise_affine, elementwise_affine and bias)

    def __call__(self, x):
        axes = tuple(range(-len(self.shape), 0))
        mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(var + self.eps)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def call_part(part, *args, key=None, statistics=None, **options):
    """Calls a part of a model with a random key and statistics, if it takes them."""
    names = inspect.signature(type(part).__call__).parameters
    if "key" in names or isinstance(part, eqx.nn.Dropout):
        options["key"] = key
    if "statistics" in names:
        options["statistics"] = statistics
    return part(*args, **options)


class Sequential(eqx.Module):
    """Parts that are called one after the other, by number or by name."""

    inside: ClassVar[str] = "layers"
    layers: OrderedDict[str, Any]

    def __init__(self, *parts):
        by_name = parts[0] if parts and isinstance(parts[0], dict) else dict(enumerate(parts))
        self.layers = OrderedDict((str(name), part) for name, part in by_name.items())

    def add_module(self, name, part):
        self.layers[name] = part

    def append(self, part):
        self.layers[str(len(self.layers))] = part

    def __len__(self):
        return len(self.layers)

    def __iter__(self):
        return iter(self.layers.values())

    def __getitem__(self, at):
        parts = [*self][at]
        return Sequential(*parts) if isinstance(at, slice) else parts

    def __call__(self, x, *, key=None, statistics=None):
        keys = Keys(key)
        for part in self:
            x = call_part(part, x, key=keys(), statistics=statistics)
        return x


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


def flatten(x, start, end):
    """Makes one dimension of several, from one to another."""
    return x.reshape(*x.shape[:start], -1, *x.shape[end % x.ndim + 1 :])


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


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there."""
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(str(name) for owner, name in steps if name != getattr(owner, "inside", None))


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


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class TimestepEmbedder(eqx.Module):
    """Embeds scalar timesteps into vector representations."""

    mlp: Sequential
    frequency_embedding_size: int = eqx.field(static=True)

    def __init__(self, hidden_size, frequency_embedding_size=256, *, key):
        keys = Keys(key)
        self.mlp = Sequential(
            Linear(frequency_embedding_size, hidden_size, bias=True, key=keys()),
            jax.nn.silu,
            Linear(hidden_size, hidden_size, bias=True, key=keys()),
        )
        self.frequency_embedding_size = frequency_embedding_size

    @staticmethod
    def timestep_embedding(t, dim, max_period=10000):
        """
        Create sinusoidal timestep embeddings.
        :param t: a 1-D Tensor of N indices, one per batch element.
        :param dim: the dimension of the output.
        """
        # https://github.com/openai/glide-text2im/blob/main/glide_text2im/nn.py
        half = dim // 2
        freqs = jnp.exp(-math.log(max_period) * jnp.arange(half, dtype=jnp.float32) / half)
        args = t[:, None].astype(jnp.float32) * freqs[None]
        embedding = jnp.concatenate([jnp.cos(args), jnp.sin(args)], axis=-1)
        if dim % 2:
            embedding = jnp.concatenate([embedding, jnp.zeros_like(embedding[:, :1])], axis=-1)
        return embedding

    def __call__(self, t):
        t_freq = self.timestep_embedding(t, self.frequency_embedding_size)
        t_emb = self.mlp(t_freq)
        return t_emb


class LabelEmbedder(eqx.Module):
    """Embeds class labels into vector representations. Also handles label dropout for classifier-free guidance."""

    embedding_table: Embedding
    num_classes: int = eqx.field(static=True)
    dropout_prob: float = eqx.field(static=True)

    def __init__(self, num_classes, hidden_size, dropout_prob, *, key):
        keys = Keys(key)
        use_cfg_embedding = dropout_prob > 0
        self.embedding_table = Embedding(num_classes + use_cfg_embedding, hidden_size, key=keys())
        self.num_classes = num_classes
        self.dropout_prob = dropout_prob

    def token_drop(self, labels, force_drop_ids=None, *, key=None):
        """Drops labels to enable classifier-free guidance."""
        keys = Keys(key)
        if force_drop_ids is None:
            drop_ids = jax.random.uniform(keys(), (labels.shape[0],)) < self.dropout_prob
        else:
            drop_ids = force_drop_ids == 1
        labels = jnp.where(drop_ids, self.num_classes, labels)
        return labels

    def __call__(self, labels, train, force_drop_ids=None, *, key=None):
        keys = Keys(key)
        use_dropout = self.dropout_prob > 0
        if train and use_dropout or force_drop_ids is not None:
            labels = self.token_drop(labels, force_drop_ids, key=keys())
        embeddings = self.embedding_table(labels)
        return embeddings


class Attention(eqx.Module):
    num_heads: int = eqx.field(static=True)
    qkv: Linear
    proj: Linear

    def __init__(self, dim, num_heads=8, qkv_bias=False, *, key):
        keys = Keys(key)
        self.num_heads = num_heads
        self.qkv = Linear(dim, dim * 3, bias=qkv_bias, key=keys())
        self.proj = Linear(dim, dim, key=keys())

    def __call__(self, x):
        B, N, C = x.shape
        qkv = (
            self.qkv(x)
            .reshape(B, N, 3, self.num_heads, C // self.num_heads)
            .transpose(2, 0, 3, 1, 4)
        )
        q, k, v = jnp.unstack(qkv)
        x = attention(q, k, v)
        return self.proj(x.swapaxes(1, 2).reshape(B, N, C))


class DiTBlock(eqx.Module):
    """A DiT block with adaptive layer norm zero (adaLN-Zero) conditioning."""

    norm1: LayerNorm
    attn: Attention
    norm2: LayerNorm
    mlp: Sequential
    adaLN_modulation: Sequential

    def __init__(self, hidden_size, num_heads, mlp_ratio=4.0, *, key, **block_kwargs):
        keys = Keys(key)
        self.norm1 = LayerNorm(hidden_size, elementwise_affine=False, eps=1e-06)
        self.attn = Attention(
            hidden_size, num_heads=num_heads, qkv_bias=True, **block_kwargs, key=keys()
        )
        self.norm2 = LayerNorm(hidden_size, elementwise_affine=False, eps=1e-06)
        mlp_hidden_dim = int(hidden_size * mlp_ratio)
        approx_gelu = lambda: partial(jax.nn.gelu, approximate=True)
        self.mlp = Sequential(
            Linear(hidden_size, mlp_hidden_dim, key=keys()),
            approx_gelu(),
            Linear(mlp_hidden_dim, hidden_size, key=keys()),
        )
        self.adaLN_modulation = Sequential(
            jax.nn.silu, Linear(hidden_size, 6 * hidden_size, bias=True, key=keys())
        )

    def __call__(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = jnp.split(
            self.adaLN_modulation(c), 6, axis=1
        )
        x = x + gate_msa[:, None] * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_mlp[:, None] * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


class FinalLayer(eqx.Module):
    """The final layer of DiT."""

    norm_final: LayerNorm
    linear: Linear
    adaLN_modulation: Sequential

    def __init__(self, hidden_size, patch_size, out_channels, *, key):
        keys = Keys(key)
        self.norm_final = LayerNorm(hidden_size, elementwise_affine=False, eps=1e-06)
        self.linear = Linear(
            hidden_size, patch_size * patch_size * out_channels, bias=True, key=keys()
        )
        self.adaLN_modulation = Sequential(
            jax.nn.silu, Linear(hidden_size, 2 * hidden_size, bias=True, key=keys())
        )

    def __call__(self, x, c):
        shift, scale = jnp.split(self.adaLN_modulation(c), 2, axis=1)
        x = modulate(self.norm_final(x), shift, scale)
        x = self.linear(x)
        return x


class DiT(eqx.Module):
    """Diffusion model with a Transformer backbone."""

    learn_sigma: bool = eqx.field(static=True)
    in_channels: int = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)
    patch_size: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_patches: int = eqx.field(static=True)
    x_embedder: Conv2d
    t_embedder: TimestepEmbedder
    y_embedder: LabelEmbedder
    pos_embed: jax.Array
    blocks: list[DiTBlock]
    final_layer: FinalLayer
    inference: bool  # set by eqx.nn.inference_mode

    def __init__(
        self,
        input_size=32,
        patch_size=2,
        in_channels=4,
        hidden_size=1152,
        depth=28,
        num_heads=16,
        mlp_ratio=4.0,
        class_dropout_prob=0.1,
        num_classes=1000,
        learn_sigma=True,
        *,
        key,
    ):
        keys = Keys(key)
        self.learn_sigma = learn_sigma
        self.in_channels = in_channels
        self.out_channels = in_channels * 2 if learn_sigma else in_channels
        self.patch_size = patch_size
        self.num_heads = num_heads
        self.num_patches = (input_size // patch_size) ** 2

        self.x_embedder = Conv2d(
            in_channels, hidden_size, kernel_size=patch_size, stride=patch_size, key=keys()
        )
        self.t_embedder = TimestepEmbedder(hidden_size, key=keys())
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob, key=keys())
        # Will use fixed sin-cos embedding:
        self.pos_embed = jnp.zeros((1, self.num_patches, hidden_size))

        self.blocks = [
            DiTBlock(hidden_size, num_heads, mlp_ratio=mlp_ratio, key=keys()) for _ in range(depth)
        ]
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels, key=keys())
        self.initialize_weights(key=keys())
        self.inference = False

    def initialize_weights(self, *, key):
        keys = Keys(key)

        # Initialize transformer layers:
        def _basic_init(module):
            if isinstance(module, Linear):
                initialize(
                    module,
                    "weight",
                    jax.nn.initializers.variance_scaling(
                        1.0, "fan_avg", "uniform", in_axis=1, out_axis=0
                    ),
                    keys(),
                )
                if module.bias is not None:
                    set_part(module, "bias", jnp.full_like(module.bias, 0))

        for _, module in iter_modules(self):
            _basic_init(module)

        # Initialize (and freeze) pos_embed by sin-cos embedding:
        pos_embed = get_2d_sincos_pos_embed(self.pos_embed.shape[-1], int(self.num_patches**0.5))
        set_part(self, "pos_embed", jnp.array(pos_embed, jnp.float32)[None])

        # Initialize patch_embed like nn.Linear (instead of nn.Conv2d):
        w = self.x_embedder.weight
        set_part(
            self.x_embedder,
            "weight",
            jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", in_axis=1, out_axis=0)(
                keys(), w.reshape(w.shape[0], -1).shape
            ).reshape(w.shape),
        )
        set_part(self.x_embedder, "bias", jnp.full_like(self.x_embedder.bias, 0))

        # Initialize label embedding table:
        initialize(
            self.y_embedder.embedding_table, "weight", jax.nn.initializers.normal(0.02), keys()
        )

        # Initialize timestep embedding MLP:
        initialize(self.t_embedder.mlp[0], "weight", jax.nn.initializers.normal(0.02), keys())
        initialize(self.t_embedder.mlp[2], "weight", jax.nn.initializers.normal(0.02), keys())

        # Zero-out adaLN modulation layers in DiT blocks:
        for block in self.blocks:
            set_part(
                block.adaLN_modulation[-1],
                "weight",
                jnp.full_like(block.adaLN_modulation[-1].weight, 0),
            )
            set_part(
                block.adaLN_modulation[-1],
                "bias",
                jnp.full_like(block.adaLN_modulation[-1].bias, 0),
            )

        # Zero-out output layers:
        set_part(
            self.final_layer.adaLN_modulation[-1],
            "weight",
            jnp.full_like(self.final_layer.adaLN_modulation[-1].weight, 0),
        )
        set_part(
            self.final_layer.adaLN_modulation[-1],
            "bias",
            jnp.full_like(self.final_layer.adaLN_modulation[-1].bias, 0),
        )
        set_part(
            self.final_layer.linear, "weight", jnp.full_like(self.final_layer.linear.weight, 0)
        )
        set_part(self.final_layer.linear, "bias", jnp.full_like(self.final_layer.linear.bias, 0))

    def unpatchify(self, x):
        """
        x: (N, T, patch_size**2 * C)
        imgs: (N, H, W, C)
        """
        c = self.out_channels
        p = self.patch_size
        h = w = int(x.shape[1] ** 0.5)
        assert h * w == x.shape[1]

        x = x.reshape(x.shape[0], h, w, p, p, c)
        x = jnp.einsum("nhwpqc->nchpwq", x)
        imgs = x.reshape(x.shape[0], c, h * p, h * p)
        return imgs

    def __call__(self, x, t, y, *, key=None):
        """
        Forward pass of DiT.
        x: (N, C, H, W) tensor of spatial inputs (images or latent representations of images)
        t: (N,) tensor of diffusion timesteps
        y: (N,) tensor of class labels
        """
        keys = Keys(key)
        # (N, T, D)
        x = flatten(self.x_embedder(x), 2, -1).swapaxes(1, 2) + jax.lax.stop_gradient(
            self.pos_embed
        )
        t = self.t_embedder(t)  # (N, D)
        y = self.y_embedder(y, not self.inference, key=keys())  # (N, D)
        c = t + y  # (N, D)
        for block in self.blocks:
            x = block(x, c)  # (N, T, D)
        x = self.final_layer(x, c)  # (N, T, patch_size ** 2 * out_channels)
        x = self.unpatchify(x)  # (N, out_channels, H, W)
        return x


def get_2d_sincos_pos_embed(embed_dim, grid_size):
    """
    grid_size: int of the grid height and width
    return:
    pos_embed: [grid_size*grid_size, embed_dim]
    """
    grid_h = np.arange(grid_size, dtype=np.float32)
    grid_w = np.arange(grid_size, dtype=np.float32)
    grid = np.meshgrid(grid_w, grid_h)  # here w goes first
    grid = np.stack(grid, axis=0)

    grid = grid.reshape([2, 1, grid_size, grid_size])
    emb_h = get_1d_sincos_pos_embed_from_grid(embed_dim // 2, grid[0])  # (H*W, D/2)
    emb_w = get_1d_sincos_pos_embed_from_grid(embed_dim // 2, grid[1])  # (H*W, D/2)

    emb = np.concatenate([emb_h, emb_w], axis=1)  # (H*W, D)
    return emb


def get_1d_sincos_pos_embed_from_grid(embed_dim, pos):
    """
    embed_dim: output dimension for each position
    pos: a list of positions to be encoded: size (M,)
    out: (M, D)
    """
    assert embed_dim % 2 == 0
    omega = np.arange(embed_dim // 2, dtype=np.float64)
    omega /= embed_dim / 2.0
    omega = 1.0 / 10000**omega  # (D/2,)

    pos = pos.reshape(-1)  # (M,)
    out = np.einsum("m,d->md", pos, omega)  # (M, D/2), outer product

    emb_sin = np.sin(out)  # (M, D/2)
    emb_cos = np.cos(out)  # (M, D/2)

    emb = np.concatenate([emb_sin, emb_cos], axis=1)  # (M, D)
    return emb


TIED = {}  # names in the source's state -> those here


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
