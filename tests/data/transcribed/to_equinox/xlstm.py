"""xLSTMLMModel for Equinox, transcribed from models.repositories.xlstm"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from collections.abc import Callable


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


def absolute(x):
    """Returns absolute values; at zero their slope is zero, as in PyTorch."""
    return x * jnp.sign(x)


def conv(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolves x (batch, in, ...) with weight (out, in / groups, ...)."""
    count = weight.ndim - 2
    stride, padding, dilation = (
        v * count if len(v) == 1 else v
        for v in (v if isinstance(v, tuple) else (v,) for v in (stride, padding, dilation))
    )
    axes = ("NCDHW"[:2] + "DHW"[3 - count :], "OI" + "DHW"[3 - count :])
    y = jax.lax.conv_general_dilated(
        x,
        weight,
        stride,
        [(p, p) for p in padding],
        rhs_dilation=dilation,
        dimension_numbers=(*axes, axes[0]),
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, *(1,) * count)


def flatten(x, start, end):
    """Makes one dimension of several, from one to another."""
    return x.reshape(*x.shape[:start], -1, *x.shape[end % x.ndim + 1 :])


def gelu(x):
    """Computes GELU by erf, as PyTorch does; `jax.nn.gelu` takes erfc, which is slower."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    """Normalises groups of channels, of x with axes (batch, channels, ...), in float32."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(x.shape[0], groups, -1)
    centred = y - y.mean(axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)
    y, shape = y.reshape(x.shape), (1, -1, *(1,) * (x.ndim - 2))
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    return y.astype(x.dtype)


def initialize(owner, name, init, key):
    """Gives an array of a model that is still being made the values of an initializer."""
    array = Place(owner, name)
    set_part(owner, name, init(key, array.shape, array.dtype))


def largest(x, axis=None, keepdims=False, shared=False):
    """Returns the largest elements; the first of equal ones has the gradient, or all share it.

    That of `x.max` is zero where XLA computes `x` once more to compare it, and rounds otherwise.
    """
    axes = axis if isinstance(axis, tuple) else range(x.ndim) if axis is None else (axis,)

    def rows_of(y):
        y = jnp.moveaxis(y, axes, range(-len(axes), 0))
        return y.reshape(*y.shape[: y.ndim - len(axes)], -1)

    @jax.custom_jvp
    def compute(x):
        return x.max(axis=axis, keepdims=keepdims)

    @compute.defjvp
    def differentiate(given, slopes):
        rows, slope = rows_of(given[0]), rows_of(slopes[0])
        is_one = jax.nn.one_hot(rows.argmax(axis=-1), rows.shape[-1], dtype=bool)
        if shared:
            is_one = is_one | (rows == rows.max(axis=-1, keepdims=True))
        slope = jnp.where(is_one, slope, 0).sum(axis=-1) / is_one.sum(axis=-1)
        return compute(*given), jnp.expand_dims(slope, axes) if keepdims else slope

    return compute(x)


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


def pad(x, sizes, value=0):
    """Puts a value around the last dimensions: before and behind the last one, the one before it.

    Takes them away for a size below zero.
    """
    ends = [(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 2, -1, -2)]
    widths = [(0, 0, 0)] * (x.ndim - len(ends)) + [(before, after, 0) for before, after in ends]
    return jax.lax.pad(x, jnp.array(value, x.dtype), widths)


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


@dataclass(eq=False)
class xLSTMConfig:
    vocab_size: int = 100
    embedding_dim: int = 32
    num_blocks: int = 4
    num_heads: int = 4
    conv1d_kernel_size: int = 4
    proj_factor: float = 2.0
    slstm_at: list[int] = field(default_factory=lambda: [1])
    dropout: float = 0.0
    bias: bool = False


class CausalConv1d(eqx.Module):
    """Implements causal depthwise convolution of a time series tensor."""

    kernel_size: int = eqx.field(static=True)
    pad: int = eqx.field(static=True)
    conv: Conv1d

    def __init__(self, feature_dim, kernel_size=4, causal_conv_bias=True, *, key):
        keys = Keys(key)
        self.kernel_size = kernel_size
        self.pad = kernel_size - 1  # padding of this size assures temporal causality.
        self.conv = Conv1d(
            in_channels=feature_dim,
            out_channels=feature_dim,
            kernel_size=kernel_size,
            padding=self.pad,
            groups=feature_dim,
            bias=causal_conv_bias,
            key=keys(),
        )

    def __call__(self, x):
        y = x.swapaxes(2, 1)  # (B, F, T) tensor - now in the right shape for conv layer.
        y = self.conv(y)  # (B, F, T+pad) tensor
        return y[:, :, : -self.pad].swapaxes(2, 1)


class LayerNorm(eqx.Module):
    """LayerNorm but with an optional bias and a residual weight."""

    weight: jax.Array
    bias: Any
    eps: float = eqx.field(static=True)
    residual_weight: bool = eqx.field(static=True)
    ndim: int = eqx.field(static=True)

    def __init__(self, ndim=-1, weight=True, bias=False, eps=1e-05, residual_weight=True):
        self.weight = jnp.zeros((ndim,)) if weight else None
        self.bias = jnp.zeros((ndim,)) if bias else None
        self.eps = eps
        self.residual_weight = residual_weight
        self.ndim = ndim

    @property
    def weight_proxy(self):
        if self.weight is None:
            return None
        if self.residual_weight:
            return 1.0 + self.weight
        else:
            return self.weight

    def __call__(self, input):
        return layer_norm(input, weight=self.weight_proxy, bias=self.bias, eps=self.eps)


class MultiHeadLayerNorm(LayerNorm):
    def __call__(self, input):
        assert input.ndim == 4, "Input must be 4D tensor (B, NH, S, DH)"
        B, NH, S, DH = input.shape

        gn_in_1 = input.swapaxes(1, 2)  # (B, S, NH, DH)
        gn_in_2 = gn_in_1.reshape(B * S, NH * DH)  # (B * S, NH * DH)
        out = group_norm(gn_in_2, NH, weight=self.weight_proxy, bias=self.bias, eps=self.eps)
        # (B * S), (NH * DH) -> (B, S, NH, DH) -> (B, NH, S, DH)
        out = out.reshape(B, S, NH, DH).swapaxes(1, 2)
        return out


def parallel_stabilized_simple(queries, keys, values, igate_preact, fgate_preact, eps=1e-06):
    """This is the mLSTM cell in parallel form."""
    B, NH, S, DH = queries.shape
    _dtype = queries.dtype

    # forget gate matrix
    log_fgates = jax.nn.log_sigmoid(fgate_preact)  # (B, NH, S, 1)
    ltr = jnp.tril(jnp.ones((S, S), bool))
    # (B, NH, S+1, 1)
    log_fgates_cumsum = jnp.concatenate(
        [jnp.zeros((B, NH, 1, 1)), jnp.cumsum(log_fgates, axis=-2)], axis=-2
    )
    # for each batch/head this is a matrix (S+1, S+1) with the cumsum of the log gates
    rep_log_fgates_cumsum = jnp.tile(log_fgates_cumsum, (1, 1, 1, S + 1))  # (B, NH, S+1, S+1)
    # Now in each row cut off / subtract the forgetgate values of the later timesteps
    _log_fg_matrix = rep_log_fgates_cumsum - rep_log_fgates_cumsum.swapaxes(-2, -1)
    # Causal masking & selection of the correct submatrix
    # (B, NH, S, S)
    log_fg_matrix = jnp.where(ltr, _log_fg_matrix[:, :, 1:, 1:], -float("inf"))

    # gate decay matrix D (combination of forget gate and input gate)
    log_D_matrix = log_fg_matrix + igate_preact.swapaxes(-2, -1)  # (B, NH, S, S)
    # D matrix stabilization
    # (B, NH, S, 1)
    max_log_D, _ = (
        largest(log_D_matrix, axis=-1, keepdims=True),
        log_D_matrix.argmax(axis=-1, keepdims=True),
    )
    log_D_matrix_stabilized = log_D_matrix - max_log_D  # (B, NH, S, S)
    D_matrix = jnp.exp(log_D_matrix_stabilized)  # (B, NH, S, S)

    keys_scaled = keys / math.sqrt(DH)

    # combination matrix C
    qk_matrix = queries @ keys_scaled.swapaxes(-2, -1)  # (B, NH, S, S)
    C_matrix = qk_matrix * D_matrix  # (B, NH, S, S)
    normalizer = jnp.maximum(absolute(C_matrix.sum(axis=-1, keepdims=True)), jnp.exp(-max_log_D))
    # (B, NH, S, S)
    C_matrix_normalized = C_matrix / (normalizer + eps)

    # retrieved values
    h_tilde_state = C_matrix_normalized @ values  # (B, NH, S, DH)

    return h_tilde_state


class mLSTMCell(eqx.Module):
    num_heads: int = eqx.field(static=True)
    igate: Linear
    fgate: Linear
    outnorm: MultiHeadLayerNorm

    def __init__(self, embedding_dim, num_heads, *, key):
        keys = Keys(key)
        self.num_heads = num_heads
        self.igate = Linear(3 * embedding_dim, num_heads, key=keys())
        self.fgate = Linear(3 * embedding_dim, num_heads, key=keys())
        self.outnorm = MultiHeadLayerNorm(ndim=embedding_dim, weight=True, bias=False)
        self.reset_parameters(key=keys())

    def __call__(self, q, k, v):
        B, S, _ = q.shape  # (B, S, H)

        if_gate_input = jnp.concatenate([q, k, v], axis=-1)
        q = q.reshape(B, S, self.num_heads, -1)  # (B, S, NH, DH)
        k = k.reshape(B, S, self.num_heads, -1)  # (B, S, NH, DH)
        v = v.reshape(B, S, self.num_heads, -1)  # (B, S, NH, DH)

        q = q.swapaxes(1, 2)  # (B, NH, S, DH)
        k = k.swapaxes(1, 2)  # (B, NH, S, DH)
        v = v.swapaxes(1, 2)  # (B, NH, S, DH)

        # compute input and forget gate pre-activations
        igate_preact = self.igate(if_gate_input)  # (B, S, NH)
        igate_preact = igate_preact.swapaxes(-1, -2)[..., None]  # (B, NH, S, 1)
        fgate_preact = self.fgate(if_gate_input)  # (B, S, NH)
        fgate_preact = fgate_preact.swapaxes(-1, -2)[..., None]  # (B, NH, S, 1)#

        h_state = parallel_stabilized_simple(q, k, v, igate_preact, fgate_preact)

        h_state_norm = self.outnorm(h_state)  # (B, NH, S, DH)
        h_state_norm = h_state_norm.swapaxes(1, 2).reshape(B, S, -1)
        return h_state_norm

    def reset_parameters(self, *, key):
        keys = Keys(key)
        set_part(self.outnorm, "weight", jnp.zeros_like(self.outnorm.weight))
        # forget gate initialization
        set_part(self.fgate, "weight", jnp.zeros_like(self.fgate.weight))
        set_part(self.fgate, "bias", jnp.linspace(3.0, 6.0, self.num_heads))
        # input gate initialization
        set_part(self.igate, "weight", jnp.zeros_like(self.igate.weight))
        initialize(self.igate, "bias", jax.nn.initializers.normal(0.1), keys())


class mLSTMLayer(eqx.Module):
    proj_up: Linear
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    conv1d: CausalConv1d
    conv_act_fn: Callable
    mlstm_cell: mLSTMCell
    ogate_act_fn: Callable
    learnable_skip: jax.Array
    proj_down: Linear
    dropout: eqx.nn.Dropout

    def __init__(self, config, *, key):
        keys = Keys(key)
        inner_dim = int(config.proj_factor * config.embedding_dim)
        self.proj_up = Linear(config.embedding_dim, 2 * inner_dim, bias=config.bias, key=keys())
        self.q_proj = Linear(inner_dim, inner_dim, bias=config.bias, key=keys())
        self.k_proj = Linear(inner_dim, inner_dim, bias=config.bias, key=keys())
        self.v_proj = Linear(inner_dim, inner_dim, bias=config.bias, key=keys())

        self.conv1d = CausalConv1d(inner_dim, kernel_size=config.conv1d_kernel_size, key=keys())
        self.conv_act_fn = jax.nn.silu
        self.mlstm_cell = mLSTMCell(inner_dim, config.num_heads, key=keys())
        self.ogate_act_fn = jax.nn.silu

        self.learnable_skip = jnp.ones((inner_dim,))

        self.proj_down = Linear(inner_dim, config.embedding_dim, bias=config.bias, key=keys())
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        # up-projection
        x_inner = self.proj_up(x)
        x_mlstm, z = jnp.split(x_inner, 2, axis=-1)

        # mlstm branch
        x_mlstm_conv = self.conv1d(x_mlstm)
        x_mlstm_conv_act = self.conv_act_fn(x_mlstm_conv)

        q = self.q_proj(x_mlstm_conv_act)
        k = self.k_proj(x_mlstm_conv_act)
        v = self.v_proj(x_mlstm)

        h_tilde_state = self.mlstm_cell(q=q, k=k, v=v)

        h_tilde_state_skip = h_tilde_state + self.learnable_skip * x_mlstm_conv_act

        # output / z branch
        h_state = h_tilde_state_skip * self.ogate_act_fn(z)

        # down-projection
        y = self.dropout(self.proj_down(h_state), key=keys())
        return y


class sLSTMLayer(eqx.Module):
    """Cells with exponential gates that mix the memories of each head."""

    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    gates: Linear
    recurrent: jax.Array
    group_norm: MultiHeadLayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.num_heads = config.num_heads
        self.head_dim = config.embedding_dim // config.num_heads
        self.gates = Linear(config.embedding_dim, 4 * config.embedding_dim, key=keys())
        self.recurrent = (
            jax.random.normal(keys(), (4, self.num_heads, self.head_dim, self.head_dim))
            / self.head_dim
        )
        self.group_norm = MultiHeadLayerNorm(ndim=config.embedding_dim)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def step(self, x, state):
        h, c, n, m = state
        recurrent = jnp.einsum("bhd,ghde->gbhe", h, self.recurrent)
        i, f, z, o = x + recurrent
        log_f = jax.nn.log_sigmoid(f)
        m_new = jnp.maximum(log_f + m, i)
        i_gate = jnp.exp(i - m_new)
        f_gate = jnp.exp(log_f + m - m_new)
        c = f_gate * c + i_gate * jnp.tanh(z)
        n = f_gate * n + i_gate
        h = jax.nn.sigmoid(o) * c / n
        return h, c, n, m_new

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        B, S, D = x.shape
        gates = (
            self.gates(x).reshape(B, S, 4, self.num_heads, self.head_dim).transpose(1, 2, 0, 3, 4)
        )
        zeros = jnp.zeros((B, self.num_heads, self.head_dim))
        state = zeros, zeros, zeros, zeros
        outputs = []
        for t in range(S):
            state = self.step(gates[t], state)
            outputs.append(state[0])
        y = jnp.stack(outputs, axis=1)  # (B, S, NH, DH)
        y = self.group_norm(y.swapaxes(1, 2))
        return self.dropout(flatten(y.swapaxes(1, 2), 2, -1), key=keys())


class FeedForward(eqx.Module):
    up_proj_dim: int = eqx.field(static=True)
    proj_up: Linear
    proj_down: Linear

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.up_proj_dim = int(4 / 3 * config.embedding_dim)
        self.proj_up = Linear(
            config.embedding_dim, 2 * self.up_proj_dim, bias=config.bias, key=keys()
        )
        self.proj_down = Linear(
            self.up_proj_dim, config.embedding_dim, bias=config.bias, key=keys()
        )

    def __call__(self, x):
        gate_preact, up_proj = jnp.split(self.proj_up(x), 2, axis=-1)
        return self.proj_down(gelu(gate_preact) * up_proj)


class xLSTMBlock(eqx.Module):
    xlstm_norm: LayerNorm
    xlstm: mLSTMLayer | sLSTMLayer = None
    ffn_norm: LayerNorm | None = None
    ffn: FeedForward | None = None

    def __init__(self, config, block_idx, *, key):
        keys = Keys(key)
        self.xlstm_norm = LayerNorm(ndim=config.embedding_dim, weight=True, bias=False)
        if block_idx in config.slstm_at:
            self.xlstm = sLSTMLayer(config, key=keys())
            self.ffn_norm = LayerNorm(ndim=config.embedding_dim, weight=True, bias=False)
            self.ffn = FeedForward(config, key=keys())
        else:
            self.xlstm = mLSTMLayer(config, key=keys())
            self.ffn_norm = None
            self.ffn = None

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        x = x + self.xlstm(self.xlstm_norm(x), key=keys())
        if self.ffn is not None:
            x = x + self.ffn(self.ffn_norm(x))
        return x


class xLSTMLMModel(eqx.Module):
    config: xLSTMConfig = eqx.field(static=True)
    token_embedding: Embedding
    blocks: list[xLSTMBlock]
    post_blocks_norm: LayerNorm
    lm_head: Linear

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.embedding_dim, key=keys())
        self.blocks = [
            xLSTMBlock(config, block_idx, key=keys()) for block_idx in range(config.num_blocks)
        ]
        self.post_blocks_norm = LayerNorm(ndim=config.embedding_dim)
        self.lm_head = Linear(config.embedding_dim, config.vocab_size, bias=False, key=keys())

    def __call__(self, idx, *, key=None):
        keys = Keys(key)
        x = self.token_embedding(idx)
        for block in self.blocks:
            x = block(x, key=keys())
        x = self.post_blocks_norm(x)
        return self.lm_head(x)


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
