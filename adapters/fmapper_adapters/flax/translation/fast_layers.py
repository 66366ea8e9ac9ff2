"""Layers of Flax in forms whose gradients are cheaper, for models that are not printed.

A file has plain `nnx.Linear` and `nnx.LayerNorm`. The model that `convert` makes of it has these
forms, which are still layers of those classes; their numbers agree to rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def accelerate(model: nnx.Module) -> None:
    """Replaces linear layers and normalisations of a model by cheaper forms, in place."""
    for _, layer in nnx.iter_modules(model):
        if type(layer) in _FAST:
            object.__setattr__(layer, "__class__", _FAST[type(layer)])


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
