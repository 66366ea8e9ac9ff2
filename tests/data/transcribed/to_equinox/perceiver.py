"""Perceiver for Equinox, transcribed from models.repositories.perceiver"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp


class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new


def ntuple(size: Any, count: int) -> tuple[Any, ...]:
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int | float) else tuple(size)


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


def gelu(x):
    """Computes GELU by erf, as PyTorch does; `jax.nn.gelu` takes erfc, which is slower."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there."""
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(str(name) for owner, name in steps if name != getattr(owner, "inside", None))


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


pi = 3.141592653589793


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


def fourier_encode(x, max_freq, num_bands=4):
    x = x[..., None]
    dtype = x.dtype
    orig_x = x

    scales = jnp.linspace(1.0, max_freq / 2, num_bands)
    scales = scales[*(None,) * (len(x.shape) - 1), Ellipsis]

    x = x * scales * pi
    x = jnp.concatenate([jnp.sin(x), jnp.cos(x)], axis=-1)
    x = jnp.concatenate([x, orig_x], axis=-1)
    return x


class PreNorm(eqx.Module):
    fn: Attention | FeedForward
    norm: LayerNorm
    norm_context: LayerNorm | None

    def __init__(self, dim, fn, context_dim=None):
        self.fn = fn
        self.norm = LayerNorm(dim)
        self.norm_context = LayerNorm(context_dim) if exists(context_dim) else None

    def __call__(self, x, *, key=None, **kwargs):
        keys = Keys(key)
        x = self.norm(x)

        if exists(self.norm_context):
            context = kwargs["context"]
            normed_context = self.norm_context(context)
            kwargs.update(context=normed_context)

        return self.fn(x, **kwargs, key=keys())


class GEGLU(eqx.Module):
    def __call__(self, x):
        x, gates = jnp.split(x, 2, axis=-1)
        return x * gelu(gates)


class FeedForward(eqx.Module):
    net: Sequential

    def __init__(self, dim, mult=4, dropout=0.0, *, key):
        keys = Keys(key)
        self.net = Sequential(
            Linear(dim, dim * mult * 2, key=keys()),
            GEGLU(),
            Linear(dim * mult, dim, key=keys()),
            eqx.nn.Dropout(dropout),
        )

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        return self.net(x, key=keys())


class Attention(eqx.Module):
    scale: float = eqx.field(static=True)
    heads: int = eqx.field(static=True)
    to_q: Linear
    to_kv: Linear
    dropout: eqx.nn.Dropout
    to_out: Linear

    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0, *, key):
        keys = Keys(key)
        inner_dim = dim_head * heads
        context_dim = default(context_dim, query_dim)

        self.scale = dim_head ** (-0.5)
        self.heads = heads

        self.to_q = Linear(query_dim, inner_dim, bias=False, key=keys())
        self.to_kv = Linear(context_dim, inner_dim * 2, bias=False, key=keys())

        self.dropout = eqx.nn.Dropout(dropout)
        self.to_out = Linear(inner_dim, query_dim, key=keys())

    def __call__(self, x, context=None, mask=None, *, key=None):
        keys = Keys(key)
        h = self.heads
        b = x.shape[0]

        q = self.to_q(x)
        context = default(context, x)
        k, v = jnp.split(self.to_kv(context), 2, axis=-1)

        q, k, v = map(lambda t: t.reshape(b, t.shape[1], h, -1).swapaxes(1, 2), (q, k, v))

        sim = jnp.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale

        assert not exists(mask), "the source does something else here, which no example has shown"

        # attention, what we cannot get enough of
        attn = jax.nn.softmax(sim, axis=-1)
        attn = self.dropout(attn, key=keys())

        out = jnp.einsum("b h i j, b h j d -> b h i d", attn, v)
        out = out.swapaxes(1, 2).reshape(b, out.shape[2], -1)
        return self.to_out(out)


class Perceiver(eqx.Module):
    input_axis: int = eqx.field(static=True)
    max_freq: float = eqx.field(static=True)
    num_freq_bands: int = eqx.field(static=True)
    fourier_encode_data: bool = eqx.field(static=True)
    latents: jax.Array
    layers: list[list]
    norm: LayerNorm
    to_logits: Linear

    def __init__(
        self,
        *,
        num_freq_bands,
        depth,
        max_freq,
        input_channels=3,
        input_axis=2,
        num_latents=512,
        latent_dim=512,
        cross_heads=1,
        latent_heads=8,
        cross_dim_head=64,
        latent_dim_head=64,
        num_classes=1000,
        attn_dropout=0.0,
        ff_dropout=0.0,
        fourier_encode_data=True,
        self_per_cross_attn=1,
        final_classifier_head=True,
        key,
    ):
        keys = Keys(key)
        self.input_axis = input_axis
        self.max_freq = max_freq
        self.num_freq_bands = num_freq_bands

        self.fourier_encode_data = fourier_encode_data
        fourier_channels = input_axis * (num_freq_bands * 2 + 1) if fourier_encode_data else 0
        input_dim = fourier_channels + input_channels

        self.latents = jax.random.normal(keys(), (num_latents, latent_dim))

        get_cross_attn = lambda: PreNorm(
            latent_dim,
            Attention(
                latent_dim,
                input_dim,
                heads=cross_heads,
                dim_head=cross_dim_head,
                dropout=attn_dropout,
                key=keys(),
            ),
            context_dim=input_dim,
        )
        get_cross_ff = lambda: PreNorm(
            latent_dim, FeedForward(latent_dim, dropout=ff_dropout, key=keys())
        )
        get_latent_attn = lambda: PreNorm(
            latent_dim,
            Attention(
                latent_dim,
                heads=latent_heads,
                dim_head=latent_dim_head,
                dropout=attn_dropout,
                key=keys(),
            ),
        )
        get_latent_ff = lambda: PreNorm(
            latent_dim, FeedForward(latent_dim, dropout=ff_dropout, key=keys())
        )

        self.layers = []
        for i in range(depth):
            self_attns = []

            for block_ind in range(self_per_cross_attn):
                self_attns.append([get_latent_attn(), get_latent_ff()])

            self.layers.append([get_cross_attn(), get_cross_ff(), self_attns])

        self.norm = LayerNorm(latent_dim)
        self.to_logits = (
            Linear(latent_dim, num_classes, key=keys())
            if final_classifier_head
            else eqx.nn.Identity()
        )

    def __call__(self, data, mask=None, return_embeddings=False, *, key=None):
        keys = Keys(key)
        (b, *axis, _, device, dtype) = (*data.shape, None, data.dtype)
        assert len(axis) == self.input_axis, "input data must have the right number of axis"

        if self.fourier_encode_data:
            axis_pos = list(map(lambda size: jnp.linspace(-1.0, 1.0, size), axis))
            pos = jnp.stack(jnp.meshgrid(*axis_pos, indexing="ij"), axis=-1)
            enc_pos = fourier_encode(pos, self.max_freq, self.num_freq_bands)
            enc_pos = enc_pos.reshape(enc_pos.shape[0], enc_pos.shape[1], -1)
            enc_pos = jnp.broadcast_to(enc_pos, (b, *enc_pos.shape))

            data = jnp.concatenate([data, enc_pos], axis=-1)

        # concat to channels of data and flatten axis

        data = data.reshape(b, -1, data.shape[-1])

        x = jnp.broadcast_to(self.latents, (b, *self.latents.shape))

        # layers

        for cross_attn, cross_ff, self_attns in self.layers:
            x = cross_attn(x, context=data, mask=mask, key=keys()) + x
            x = cross_ff(x, key=keys()) + x

            for self_attn, self_ff in self_attns:
                x = self_attn(x, key=keys()) + x
                x = self_ff(x, key=keys()) + x

        # allow for fetching embeddings

        if return_embeddings:
            return x

        # to logits

        return self.to_logits(x.mean(axis=-2))


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
