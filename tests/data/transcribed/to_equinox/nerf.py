"""NeRF for Equinox, transcribed from models.repositories.nerf"""

from __future__ import annotations

from typing import Any

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


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def buffer(*, saved=True, **options):
    """Declares an array that is not trained, and whether the source's state dict has it."""
    return eqx.field(metadata={"trained": False, "saved": saved}, **options)


def flatten(x, start, end):
    """Makes one dimension of several, from one to another."""
    return x.reshape(*x.shape[:start], -1, *x.shape[end % x.ndim + 1 :])


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


class PositionalEncoding(eqx.Module):
    freqs: jax.Array = buffer(saved=False)
    include_input: bool = eqx.field(static=True)

    def __init__(self, num_freqs, include_input=True):
        self.freqs = 2.0 ** jnp.arange(num_freqs).astype(jnp.float32)
        self.include_input = include_input

    def __call__(self, x):
        scaled = flatten(x[..., None, :] * jax.lax.stop_gradient(self.freqs)[:, None], -2, -1)
        encoded = jnp.concatenate([jnp.sin(scaled), jnp.cos(scaled)], axis=-1)
        return jnp.concatenate([x, encoded], axis=-1) if self.include_input else encoded


class NeRF(eqx.Module):
    D: int = eqx.field(static=True)
    W: int = eqx.field(static=True)
    skips: list[int]
    use_viewdirs: bool = eqx.field(static=True)
    embed_pts: PositionalEncoding
    embed_views: PositionalEncoding
    input_ch: int = eqx.field(static=True)
    input_ch_views: int = eqx.field(static=True)
    pts_linears: list[Linear]
    views_linears: list[Linear]
    feature_linear: Linear = None
    alpha_linear: Linear = None
    rgb_linear: Linear = None
    output_linear: Any = None

    def __init__(
        self,
        D=8,
        W=256,
        input_freqs=4,
        view_freqs=2,
        output_ch=4,
        skips=[4],
        use_viewdirs=False,
        *,
        key,
    ):
        keys = Keys(key)
        """"""
        self.D = D
        self.W = W
        self.skips = skips
        self.use_viewdirs = use_viewdirs
        self.embed_pts = PositionalEncoding(input_freqs)
        self.embed_views = PositionalEncoding(view_freqs)
        self.input_ch = input_ch = 3 * (1 + 2 * input_freqs)
        self.input_ch_views = input_ch_views = 3 * (1 + 2 * view_freqs)

        self.pts_linears = list(
            [Linear(input_ch, W, key=keys())]
            + [
                Linear(W, W, key=keys())
                if i not in self.skips
                else Linear(W + input_ch, W, key=keys())
                for i in range(D - 1)
            ]
        )

        ### Implementation according to the official code release
        self.views_linears = [Linear(input_ch_views + W, W // 2, key=keys())]

        if use_viewdirs:
            self.feature_linear = Linear(W, W, key=keys())
            self.alpha_linear = Linear(W, 1, key=keys())
            self.rgb_linear = Linear(W // 2, 3, key=keys())
        else:
            self.output_linear = Linear(W, output_ch, key=keys())

    def __call__(self, x):
        input_pts, input_views = jnp.split(x, 2, axis=-1)
        input_pts, input_views = self.embed_pts(input_pts), self.embed_views(input_views)
        h = input_pts
        for i, l in enumerate(self.pts_linears):
            h = self.pts_linears[i](h)
            h = jax.nn.relu(h)
            if i in self.skips:
                h = jnp.concatenate([input_pts, h], axis=-1)

        assert self.use_viewdirs, "the source does something else here, which no example has shown"
        alpha = self.alpha_linear(h)
        feature = self.feature_linear(h)
        h = jnp.concatenate([feature, input_views], axis=-1)

        for i, l in enumerate(self.views_linears):
            h = self.views_linears[i](h)
            h = jax.nn.relu(h)

        rgb = self.rgb_linear(h)
        outputs = jnp.concatenate([rgb, alpha], axis=-1)

        return outputs


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
