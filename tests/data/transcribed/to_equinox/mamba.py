"""Mamba for Equinox, transcribed from models.repositories.mamba"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from typing import ClassVar
from typing import Union

import equinox as eqx
import jax
import jax.numpy as jnp


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


def expand(x, sizes):
    """Repeats an array along dimensions of 1; those of -1 stay."""
    shape = (1,) * (len(sizes) - x.ndim) + x.shape
    pairs = zip(sizes, shape, strict=True)
    return jnp.broadcast_to(x, tuple(old if new == -1 else new for new, old in pairs))


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


@dataclass(eq=False)
class ModelArgs:
    d_model: int
    n_layer: int
    vocab_size: int
    d_state: int = 16
    expand: int = 2
    dt_rank: Union[int, str] = "auto"
    d_conv: int = 4
    pad_vocab_size_multiple: int = 8
    conv_bias: bool = True
    bias: bool = False

    def __post_init__(self):
        self.d_inner = int(self.expand * self.d_model)

        if self.dt_rank == "auto":
            self.dt_rank = math.ceil(self.d_model / 16)

        if self.vocab_size % self.pad_vocab_size_multiple != 0:
            self.vocab_size += (
                self.pad_vocab_size_multiple - self.vocab_size % self.pad_vocab_size_multiple
            )


class Mamba(eqx.Module):
    args: ModelArgs = eqx.field(static=True)
    embedding: Embedding
    layers: list[ResidualBlock]
    norm_f: RMSNorm

    def __init__(self, args: ModelArgs, *, key):
        """Full Mamba model."""
        keys = Keys(key)
        self.args = args

        self.embedding = Embedding(args.vocab_size, args.d_model, key=keys())
        self.layers = [ResidualBlock(args, key=keys()) for _ in range(args.n_layer)]
        self.norm_f = RMSNorm(args.d_model)

    def __call__(self, input_ids):
        """
        Args:
            input_ids (long tensor): shape (b, l)    (See Glossary at top for definitions of b, l)

        Returns:
            logits: shape (b, l, vocab_size)
        """
        x = self.embedding(input_ids)

        for layer in self.layers:
            x = layer(x)

        x = self.norm_f(x)
        logits = self.embedding.attend(x)

        return logits


class ResidualBlock(eqx.Module):
    args: ModelArgs = eqx.field(static=True)
    mixer: MambaBlock
    norm: RMSNorm

    def __init__(self, args: ModelArgs, *, key):
        """Simple block wrapping Mamba block with normalization and residual connection."""
        keys = Keys(key)
        self.args = args
        self.mixer = MambaBlock(args, key=keys())
        self.norm = RMSNorm(args.d_model)

    def __call__(self, x):
        output = self.mixer(self.norm(x)) + x

        return output


class MambaBlock(eqx.Module):
    args: ModelArgs = eqx.field(static=True)
    in_proj: Linear
    conv1d: Conv1d
    x_proj: Linear
    dt_proj: Linear
    A_log: jax.Array
    D: jax.Array
    out_proj: Linear

    def __init__(self, args: ModelArgs, *, key):
        """A single Mamba block, as described in Figure 3 in Section 3.4 in the Mamba paper [1]."""
        keys = Keys(key)
        self.args = args

        self.in_proj = Linear(args.d_model, args.d_inner * 2, bias=args.bias, key=keys())

        self.conv1d = Conv1d(
            in_channels=args.d_inner,
            out_channels=args.d_inner,
            bias=args.conv_bias,
            kernel_size=args.d_conv,
            groups=args.d_inner,
            padding=args.d_conv - 1,
            key=keys(),
        )

        # x_proj takes in `x` and outputs the input-specific Δ, B, C
        self.x_proj = Linear(args.d_inner, args.dt_rank + args.d_state * 2, bias=False, key=keys())

        # dt_proj projects Δ from dt_rank to d_in
        self.dt_proj = Linear(args.dt_rank, args.d_inner, bias=True, key=keys())

        A = jnp.tile(jnp.arange(1, args.d_state + 1), (args.d_inner, 1))
        self.A_log = jnp.log(A.astype(jnp.float32))
        self.D = jnp.ones((args.d_inner,))
        self.out_proj = Linear(args.d_inner, args.d_model, bias=args.bias, key=keys())

    def __call__(self, x):
        """Mamba block forward. This looks the same as Figure 3 in Section 3.4 in the Mamba paper [1]."""
        b, l, d = x.shape

        x_and_res = self.in_proj(x)  # shape (b, l, 2 * d_in)
        x, res = jnp.split(x_and_res, 2, axis=-1)

        x = x.swapaxes(1, 2)
        x = self.conv1d(x)[:, :, :l]
        x = x.swapaxes(1, 2)

        x = jax.nn.silu(x)

        y = self.ssm(x)

        y = y * jax.nn.silu(res)

        output = self.out_proj(y)

        return output

    def ssm(self, x):
        """Runs the SSM. See:
        - Algorithm 2 in Section 3.2 in the Mamba paper [1]
        - run_SSM(A, B, C, u) in The Annotated S4 [2]
        """
        d_in, n = self.A_log.shape

        # Compute ∆ A B C D, the state space parameters.
        #     A, D are input independent (see Mamba paper [1] Section 3.5.2 "Interpretation of A" for why A isn't selective)
        #     ∆, B, C are input-dependent (this is a key difference between Mamba and the linear time invariant S4,
        #                                  and is why Mamba is called **selective** state spaces)

        A = -jnp.exp(self.A_log.astype(jnp.float32))  # shape (d_in, n)
        D = self.D.astype(jnp.float32)

        x_dbl = self.x_proj(x)  # (b, l, dt_rank + 2*n)

        delta, B, C = jnp.split(x_dbl, [1, 5], axis=-1)
        delta = jax.nn.softplus(self.dt_proj(delta))  # (b, l, d_in)

        y = self.selective_scan(x, delta, A, B, C, D)

        return y

    def selective_scan(self, u, delta, A, B, C, D):
        """Does selective scan algorithm."""
        b, l, d_in = u.shape
        n = A.shape[1]

        # Discretize continuous parameters (A, B)
        deltaA = jnp.exp(jnp.einsum("bld,dn->bldn", delta, A))
        deltaB_u = jnp.einsum("bld,bln,bld->bldn", delta, B, u)

        # Perform selective scan (see scan_SSM() in The Annotated S4 [2])
        x = jnp.zeros((b, d_in, n))
        ys = []
        for i in range(l):
            x = deltaA[:, i] * x + deltaB_u[:, i]
            y = jnp.einsum("bdn,bn->bd", x, C[:, i, :])
            ys.append(y)
        y = jnp.stack(ys, axis=1)  # shape (b, l, d_in)

        y = y + u * D

        return y


class RMSNorm(eqx.Module):
    eps: float = eqx.field(static=True)
    weight: jax.Array

    def __init__(self, d_model: int, eps: float = 1e-05):
        self.eps = eps
        self.weight = jnp.ones((d_model,))

    def __call__(self, x):
        output = x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + self.eps) * self.weight

        return output


TIED = {"lm_head.weight": "embedding.weight"}  # names in the source's state -> those here


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
