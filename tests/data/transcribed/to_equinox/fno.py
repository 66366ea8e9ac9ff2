"""FNO1d for Equinox, transcribed from models.repositories.fno"""

from __future__ import annotations

import math
from typing import Any
from typing import ClassVar

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


class SpectralConv1d(eqx.Module):
    in_channels: int = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)
    modes1: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    weights1: jax.Array

    def __init__(self, in_channels, out_channels, modes1, *, key):
        keys = Keys(key)
        """1D Fourier layer. It does FFT, linear transform, and Inverse FFT."""

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.modes1 = modes1  # Number of Fourier modes to multiply, at most floor(N/2) + 1

        self.scale = 1 / (in_channels * out_channels)
        self.weights1 = self.scale * jax.lax.complex(
            jax.random.uniform(keys(), (in_channels, out_channels, self.modes1)),
            jax.random.uniform(keys(), (in_channels, out_channels, self.modes1)),
        )

    def compl_mul1d(self, input, weights):
        # (batch, in_channel, x ), (in_channel, out_channel, x) -> (batch, out_channel, x)
        return jnp.einsum("bix,iox->box", input, weights)

    def __call__(self, x):
        batchsize = x.shape[0]
        # Compute Fourier coeffcients up to factor of e^(- something constant)
        x_ft = jnp.fft.rfft(x)

        # Multiply relevant Fourier modes
        out_ft = jnp.zeros((batchsize, self.out_channels, x.shape[-1] // 2 + 1), jnp.complex64)
        out_ft = out_ft.at[:, :, : self.modes1].set(
            self.compl_mul1d(x_ft[:, :, : self.modes1], self.weights1)
        )

        # Return to physical space
        x = jnp.fft.irfft(out_ft, n=x.shape[-1])
        return x


class FNO1d(eqx.Module):
    modes1: int = eqx.field(static=True)
    width: int = eqx.field(static=True)
    padding: int = eqx.field(static=True)
    fc0: Linear
    convs: list[SpectralConv1d]
    ws: list[Conv1d]
    fc1: Linear
    fc2: Linear

    def __init__(self, modes, width, layers=2, padding=2, *, key):
        keys = Keys(key)
        self.modes1 = modes
        self.width = width
        self.padding = padding  # pad the domain if input is non-periodic
        self.fc0 = Linear(2, self.width, key=keys())  # input channel is 2: (a(x), x)

        self.convs = [
            SpectralConv1d(self.width, self.width, self.modes1, key=keys()) for _ in range(layers)
        ]
        self.ws = [Conv1d(self.width, self.width, 1, key=keys()) for _ in range(layers)]

        self.fc1 = Linear(self.width, 32, key=keys())
        self.fc2 = Linear(32, 1, key=keys())

    def __call__(self, x):
        grid = self.get_grid(x.shape)
        x = jnp.concatenate([x, grid], axis=-1)
        x = self.fc0(x)
        x = x.swapaxes(-2, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.padding)))

        for i, (conv, w) in enumerate(zip(self.convs, self.ws)):
            x1 = conv(x)
            x2 = w(x)
            x = x1 + x2
            if i < len(self.convs) - 1:
                x = gelu(x)

        x = x[..., : -self.padding]
        x = x.swapaxes(-2, -1)
        x = self.fc1(x)
        x = gelu(x)
        x = self.fc2(x)
        return x

    def get_grid(self, shape):
        batchsize, size_x = shape[0], shape[1]
        gridx = jnp.linspace(0, 1, size_x)
        gridx = jnp.tile(gridx.reshape(1, size_x, 1), (batchsize, 1, 1))
        return gridx


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
