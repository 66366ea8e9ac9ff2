"""Layers of Flax in forms whose gradients are cheaper, for models that are not printed.

A file has plain `nnx.Linear` and `nnx.LayerNorm`. The model that `convert` makes of it has these
forms, which are still layers of those classes; their numbers agree to rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def accelerate(model: nnx.Module) -> None:
    """Replaces linear layers and normalisations of a model by cheaper forms, in place."""
    for _, layer in nnx.iter_modules(model):
        if fast := _fast_form(type(layer)):
            object.__setattr__(layer, "__class__", fast)


@functools.cache
def _fast_form(kind: type) -> type | None:
    """Returns the cheaper form of a class of Flax, or of a class of a file with such a base."""
    base = next((base for base in kind.__mro__ if base in _FAST), None)
    if base is None or base is kind:
        return _FAST.get(kind)
    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    fast = type(kind.__name__, (kind, _FAST[base]), own)
    fast.__call__ = fast.__call__  # type: ignore[method-assign]  # `nnx.capture` wants its own
    return fast


class Linear(nnx.Linear):
    """A linear layer that flattens what it is given to rows, on a CPU.

    The gradient of the kernel is then one product; with more dimensions XLA copies both of its
    operands and its result transposed.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies by the kernel and adds the bias."""
        inputs = jnp.asarray(inputs)
        if inputs.ndim < 3 or _is_sharded(inputs, out_sharding):
            result: jax.Array = super().__call__(inputs, out_sharding)
            return result
        rows = super().__call__(inputs.reshape(-1, inputs.shape[-1]))
        return rows.reshape(*inputs.shape[:-1], self.out_features)


def _is_sharded(x: jax.Array, out_sharding: Any) -> bool:
    """Returns whether an array may be distributed, or is on a device that copies nothing."""
    is_alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    return not is_alone or out_sharding is not None or any(jax.typeof(x).sharding.spec)


class Conv(nnx.Conv):
    """A convolution that is a product of matrices, on a CPU, where that is faster.

    That is so for kernels of a single pixel, and for more filters than there are pixels: XLA's own
    convolution transposes the filters at each call. The patches are copied.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Convolves images (batch, ..., in), channels last."""
        inputs = jnp.asarray(inputs)
        kernel = self.kernel[...]
        pads = _pads(self, inputs)
        if pads is not None and not _is_sharded(inputs, out_sharding):
            steps = _each(self.strides, len(pads))
            sizes = zip(inputs.shape[1:-1], pads, kernel.shape, steps, strict=False)
            places = [(size + sum(pad) - k) // step + 1 for size, pad, k, step in sizes]
            count = inputs.shape[0] * math.prod(places)
            if math.prod(kernel.shape[:-2]) == 1 or 0 < count <= kernel.shape[-1]:
                rows = _patches(inputs, pads, kernel.shape[:-2], steps, places)
                flat = kernel.reshape(-1, kernel.shape[-1])
                y = jnp.dot(rows, flat, precision=self.precision)
                y = y if self.bias is None else y + self.bias[...]
                return y.reshape(inputs.shape[0], *places, kernel.shape[-1])
        result: jax.Array = super().__call__(inputs, out_sharding)
        return result


def _pads(layer: nnx.Conv, x: jax.Array) -> list[tuple[int, int]] | None:
    """Returns the padding before and after each axis; None if it is not a plain convolution."""
    kernel = layer.kernel[...]
    count = kernel.ndim - 2
    is_plain = (
        layer.feature_group_count == 1
        and layer.mask is None
        and layer.dtype is None
        and layer.conv_general_dilated is jax.lax.conv_general_dilated
        and x.ndim == kernel.ndim
        and all(isinstance(size, int) for size in x.shape)
        and x.dtype == kernel.dtype
        and x.dtype in (jnp.float32, jnp.float64)
        and not isinstance(layer.padding, str)
        and {1} == {*_each(layer.input_dilation, count), *_each(layer.kernel_dilation, count)}
    )
    if not is_plain:
        return None
    found = [
        (pad, pad) if isinstance(pad, int) else tuple(pad) for pad in _each(layer.padding, count)
    ]
    return None if any(isinstance(pad, str) or min(pad) < 0 for pad in found) else found


def _each(value: Any, count: int) -> Sequence[Any]:
    """Returns a setting for each axis."""
    return value if isinstance(value, Sequence) else (1 if value is None else value,) * count


def _patches(
    x: jax.Array,
    pads: Sequence[tuple[int, int]],
    kernel: Sequence[int],
    steps: Sequence[int],
    places: Sequence[int],
) -> jax.Array:
    """Returns a row for each place: what the kernel sees there, in the order of its elements."""
    if any(map(any, pads)):
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    parts = []
    for first in itertools.product(*map(range, kernel)):
        sizes = zip(first, places, steps, strict=True)
        last = [at + (place - 1) * step + 1 for at, place, step in sizes]
        strides = (1, *steps, 1)
        part = jax.lax.slice(x, (0, *first, 0), (len(x), *last, x.shape[-1]), strides)
        parts.append(part.reshape(-1, x.shape[-1]))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


class LayerNorm(nnx.LayerNorm):
    """A layer normalisation that subtracts the mean once, for the variance and for the result."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises the last dimension to zero mean and unit variance."""
        if not _is_usual(self, x, mask):
            result: jax.Array = super().__call__(x, mask=mask)
            return result
        scale, bias = _value(self.scale), _value(self.bias)
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = _scale(wide - wide.mean(axis=-1, keepdims=True), self.epsilon, scale)
        y = y if bias is None else y + bias
        return y.astype(x.dtype)


class RMSNorm(nnx.RMSNorm):
    """A normalisation by the root mean square that scales rows first, then columns."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Divides by the root mean square over the last dimension."""
        if not _is_usual(self, x, mask):
            result: jax.Array = super().__call__(x, mask=mask)
            return result
        x, scale = self.promote_dtype((x, _value(self.scale)), dtype=self.dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return _scale(wide, self.epsilon, scale).astype(x.dtype)


_FAST: dict[type, type] = {
    nnx.Linear: Linear,
    nnx.Conv: Conv,
    nnx.LayerNorm: LayerNorm,
    nnx.RMSNorm: RMSNorm,
}


def _is_usual(layer: nnx.LayerNorm | nnx.RMSNorm, x: jax.Array, mask: Any) -> bool:
    """Returns whether a layer normalises real numbers over the last dimension of one device."""
    axes = (layer.reduction_axes, layer.feature_axes)
    is_exact = not layer.use_fast_variance and layer.axis_name is None
    return mask is None and is_exact and axes == (-1, -1) and not jnp.iscomplexobj(x)


def _value(variable: nnx.Param[jax.Array] | None) -> jax.Array | None:
    return None if variable is None else variable[...]


def _scale(x: jax.Array, epsilon: float, scale: jax.Array | None) -> jax.Array:
    y = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + epsilon)
    return y if scale is None else y * scale
