"""Random numbers: each operation gets its own key.

The numbers differ from torch's, but have the same distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import lowering, pointwise
from fmapper_adapters.jax.aten.types import (
    cast,
    default_dtype,
    dtype_of,
    is_complex,
    is_floating,
    wide,
)


@lowering("aten::dropout", random=True, dims=pointwise)
def dropout(x: Any, p: float, train: bool, *, key: Any) -> jax.Array:
    """Sets elements to zero with probability p, and scales the others by 1 / (1 - p)."""
    return native_dropout(x, p, train, key=key)[0]


@lowering("aten::native_dropout", random=True, dims=pointwise)
def native_dropout(x: Any, p: float, train: Any, *, key: Any) -> tuple[jax.Array, jax.Array]:
    """Applies dropout, and returns the mask of kept elements."""
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(key, 1.0 - p, x.shape)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    scaled = x * cast(scale, x.dtype) if is_floating(x) else x * scale
    return jnp.where(kept, scaled, jnp.zeros((), scaled.dtype)), kept


def _normal(key: Any, shape: Any, dtype: Any) -> jax.Array:
    """Draws standard normal numbers; complex ones have half the variance in each part."""
    return jax.random.normal(key, tuple(shape), dtype)


@lowering("aten::rand", random=True)
def rand(size: Sequence[Any], *, dtype: Any = None, generator: Any = None, key: Any) -> jax.Array:
    """Draws uniformly from [0, 1)."""
    dtype = default_dtype() if dtype is None else dtype
    if is_complex(dtype):
        both = jax.random.uniform(key, (2, *size), np.zeros((), dtype).real.dtype)
        return jax.lax.complex(both[0], both[1])
    return jax.random.uniform(key, tuple(size), dtype)


@lowering("aten::rand_like", random=True)
def rand_like(x: Any, *, dtype: Any = None, generator: Any = None, key: Any) -> jax.Array:
    """Draws uniformly from [0, 1), in the shape of another array."""
    return rand(x.shape, dtype=x.dtype if dtype is None else dtype, key=key)


@lowering("aten::randn", random=True)
def randn(size: Sequence[Any], *, dtype: Any = None, generator: Any = None, key: Any) -> jax.Array:
    """Draws from the standard normal distribution."""
    return _normal(key, size, default_dtype() if dtype is None else dtype)


@lowering("aten::randn_like", random=True)
def randn_like(x: Any, *, dtype: Any = None, generator: Any = None, key: Any) -> jax.Array:
    """Draws from the standard normal distribution, in the shape of another array."""
    return _normal(key, x.shape, x.dtype if dtype is None else dtype)


@lowering("aten::randint.default", "aten::randint.generator", random=True)
def randint(
    high: Any, size: Sequence[Any], *, dtype: Any = None, generator: Any = None, key: Any
) -> jax.Array:
    """Draws whole numbers from 0 to below high."""
    return randint_between(0, high, size, dtype=dtype, key=key)


@lowering("aten::randint.low", "aten::randint.low_generator", random=True)
def randint_between(
    low: Any, high: Any, size: Sequence[Any], *, dtype: Any = None, generator: Any = None, key: Any
) -> jax.Array:
    """Draws whole numbers from low to below high."""
    drawn = jax.random.randint(key, tuple(size), low, high, dtype_of("int64"))
    return cast(drawn, dtype_of("int64") if dtype is None else dtype)


@lowering("aten::randint_like.default", "aten::randint_like.generator",
          "aten::randint_like.Tensor", "aten::randint_like.Tensor_generator",
          random=True)  # fmt: skip
def randint_like(
    x: Any, high: Any, *, dtype: Any = None, generator: Any = None, key: Any
) -> jax.Array:
    """Draws whole numbers from 0 to below high, in the shape of another array."""
    return randint_between(0, high, x.shape, dtype=x.dtype if dtype is None else dtype, key=key)


@lowering("aten::randint_like.low_dtype", "aten::randint_like.low_generator_dtype", random=True)
def randint_like_between(
    x: Any, low: Any, high: Any, *, dtype: Any = None, generator: Any = None, key: Any
) -> jax.Array:
    """Draws whole numbers from low to below high, in the shape of another array."""
    return randint_between(low, high, x.shape, dtype=x.dtype if dtype is None else dtype, key=key)


@lowering("aten::randperm", random=True)
def randperm(n: Any, *, dtype: Any = None, generator: Any = None, key: Any) -> jax.Array:
    """Draws a permutation of the integers below n."""
    return cast(jax.random.permutation(key, n), dtype_of("int64") if dtype is None else dtype)


@lowering("aten::bernoulli.default", random=True)
def bernoulli(x: Any, *, generator: Any = None, key: Any) -> jax.Array:
    """Draws ones with the probabilities in the array."""
    drawn = jax.random.uniform(key, x.shape, wide(x.dtype))
    return (drawn < x.astype(drawn.dtype)).astype(x.dtype)


@lowering("aten::bernoulli.p", "aten::bernoulli.Tensor", random=True)
def bernoulli_p(x: Any, p: Any = 0.5, *, generator: Any = None, key: Any) -> jax.Array:
    """Draws ones with probability p, in the shape and dtype of the array."""
    return (jax.random.uniform(key, x.shape) < p).astype(x.dtype)


@lowering("aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor",
          random=True)  # fmt: skip
def normal(mean: Any, std: Any = 1.0, *, generator: Any = None, key: Any) -> jax.Array:
    """Draws normal numbers with means and standard deviations."""
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    dtype = mean.dtype if isinstance(mean, jax.Array) and mean.ndim else jnp.asarray(std).dtype
    if isinstance(mean, jax.Array):
        dtype = mean.dtype
    mean, std = jax.lax.stop_gradient((cast(mean, dtype), cast(std, dtype)))
    return (_normal(key, shape, dtype) * std + mean).astype(dtype)


@lowering("aten::normal.float_float", random=True)
def normal_of_size(
    mean: float, std: float, size: Any, *, dtype: Any = None, generator: Any = None, key: Any
) -> jax.Array:
    """Draws normal numbers with a mean and a standard deviation."""
    dtype = default_dtype() if dtype is None else dtype
    return _normal(key, size, dtype) * cast(std, dtype) + cast(mean, dtype)


@lowering("aten::normal_functional", random=True)
def normal_functional(
    x: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None, key: Any
) -> jax.Array:
    """Draws normal numbers, in the shape and dtype of the array."""
    return normal_of_size(mean, std, x.shape, dtype=x.dtype, key=key)


@lowering("aten::uniform", random=True)
def uniform(x: Any, low: float = 0.0, high: float = 1.0, **options: Any) -> jax.Array:
    """Draws uniformly from [low, high), in the array's shape and dtype; both parts if complex."""
    if is_complex(x):
        drawn = jax.random.uniform(options["key"], (2, *x.shape), x.real.dtype)
        return jax.lax.complex(*(drawn * (high - low) + low))
    drawn = jax.random.uniform(options["key"], x.shape, wide(x.dtype))
    return (drawn * (high - low) + low).astype(x.dtype)


def _open(x: Any, key: Any) -> jax.Array:
    """Draws uniformly from (0, 1], so that the logarithm is finite."""
    return 1 - jax.random.uniform(key, x.shape, wide(x.dtype) if is_floating(x) else None)


@lowering("aten::exponential", random=True)
def exponential(x: Any, lambd: float = 1.0, *, generator: Any = None, key: Any) -> jax.Array:
    """Draws from the exponential distribution with a rate."""
    return (-jnp.log(_open(x, key)) / lambd).astype(x.dtype)


@lowering("aten::geometric", random=True)
def geometric(x: Any, p: float, *, generator: Any = None, key: Any) -> jax.Array:
    """Draws the number of trials until one succeeds."""
    trials = jnp.ceil(jnp.log(_open(x, key)) / math.log1p(-p))
    return cast(jnp.maximum(trials, 1), x.dtype)


@lowering("aten::log_normal", random=True)
def log_normal(
    x: Any, mean: float = 1.0, std: float = 2.0, *, generator: Any = None, key: Any
) -> jax.Array:
    """Draws exponentials of normal numbers."""
    drawn = jax.random.normal(key, x.shape, wide(x.dtype))
    return jnp.exp(drawn * std + mean).astype(x.dtype)


@lowering("aten::cauchy", random=True)
def cauchy(
    x: Any, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None, key: Any
) -> jax.Array:
    """Draws from the Cauchy distribution with a median and a width."""
    return (jax.random.cauchy(key, x.shape, wide(x.dtype)) * sigma + median).astype(x.dtype)


@lowering("aten::poisson", random=True)
def poisson(x: Any, generator: Any = None, *, key: Any) -> jax.Array:
    """Draws from Poisson distributions with the rates in the array."""
    # JAX implements it for only one of its generators
    bits = jax.random.bits(key, (2,), "uint32")
    key = jax.random.wrap_key_data(bits, impl="threefry2x32")
    return jax.random.poisson(key, x.astype(wide(x.dtype)), x.shape).astype(x.dtype)


@lowering("aten::binomial", random=True)
def binomial(count: Any, prob: Any, generator: Any = None, *, key: Any) -> jax.Array:
    """Draws the number of successes in a number of trials."""
    inner = wide(count.dtype)
    return jax.random.binomial(key, count.astype(inner), prob.astype(inner)).astype(count.dtype)


@lowering("aten::_standard_gamma", random=True)
def standard_gamma(x: Any, generator: Any = None, *, key: Any) -> jax.Array:
    """Draws from gamma distributions with the shapes in the array."""
    return jax.random.gamma(key, x.astype(wide(x.dtype))).astype(x.dtype)


@lowering("aten::_sample_dirichlet", random=True)
def sample_dirichlet(x: Any, generator: Any = None, *, key: Any) -> jax.Array:
    """Draws from Dirichlet distributions with the concentrations along the last dimension."""
    return jax.random.dirichlet(key, x.astype(wide(x.dtype))).astype(x.dtype)


@lowering("aten::multinomial", random=True)
def multinomial(
    x: Any, num_samples: Any, replacement: bool = False, *, generator: Any = None, key: Any
) -> jax.Array:
    """Draws indices along the last dimension, weighted by the array."""
    weights = x.astype(wide(x.dtype))
    logits = jnp.log(weights)
    if replacement:
        shape = (*x.shape[:-1], num_samples)
        drawn = jax.random.categorical(key, logits[..., None, :], -1, shape=shape)
        return drawn.astype(dtype_of("int64"))
    # the largest of the logits with Gumbel noise are a sample without replacement
    noisy = logits + jax.random.gumbel(key, x.shape, logits.dtype)
    return jax.lax.top_k(noisy, num_samples)[1].astype(dtype_of("int64"))
