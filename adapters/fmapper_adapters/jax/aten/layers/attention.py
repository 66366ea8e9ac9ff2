"""Scaled dot-product attention, and torch's kernels for it.

`jax.nn.dot_product_attention` is not used: its results differ for rows that are masked everywhere,
and for causal masks with more keys than queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper import ConversionError
from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import dtype_of, is_floating, wide


@lowering("aten::scaled_dot_product_attention", dims=dimensions.attention)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Returns weights `softmax(query @ key.T * scale + mask)` times the values, `(..., L, Ev)`.

    Rows in which every key is masked are zeros, as in torch. Halves are accumulated in float32.
    """
    if enable_gqa:
        key, value = _for_all_heads(query, key), _for_all_heads(query, value)
    if not is_floating(query):  # torch accepts these only for empty sums
        batch = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        shape = (*batch, query.shape[-2], value.shape[-1])
        return jnp.zeros(shape, dtype_of("int64") if query.dtype == bool else query.dtype)
    weights, _ = _weights(query, key, attn_mask, is_causal, scale)
    return _apply(weights, value, query.dtype)


@lowering("fmapper::scaled_dot_product_attention_with_dropout", random=True)
def attention_with_dropout(
    query: Any,
    key_: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
    key: Any,
) -> jax.Array:
    """Computes attention with dropout: weights are zero with probability `dropout_p`."""
    if enable_gqa:
        key_, value = _for_all_heads(query, key_), _for_all_heads(query, value)
    weights, _ = _weights(query, key_, attn_mask, is_causal, scale)
    kept = jax.random.bernoulli(key, 1.0 - dropout_p, weights.shape)
    larger = 0.0 if dropout_p >= 1 else 1.0 / (1.0 - dropout_p)
    weights = jnp.where(kept, weights * larger, jnp.zeros((), weights.dtype))
    return _apply(weights, value, query.dtype)


@lowering("aten::_scaled_dot_product_attention_math", whole=False)
def attention_math(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Any = None,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the values and the weights; `dropout_mask` is true where dropout keeps a weight."""
    if enable_gqa:
        key, value = _for_all_heads(query, key), _for_all_heads(query, value)
    weights, _ = _weights(query, key, attn_mask, is_causal, scale)
    larger = 1.0
    if dropout_mask is not None:
        weights = jnp.where(dropout_mask, weights, 0)
        larger = 0.0 if dropout_p >= 1 else 1.0 / (1.0 - dropout_p)
    return _apply(weights * larger, value, query.dtype), weights.astype(query.dtype)


@lowering("aten::_scaled_dot_product_flash_attention_for_cpu")
def flash_attention_for_cpu(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the values, and the logarithms of the sums that normalise the weights."""
    _no_dropout(dropout_p)
    weights, sums = _weights(query, key, attn_mask, is_causal, scale)
    return _apply(weights, value, query.dtype), sums


@lowering("aten::_scaled_dot_product_efficient_attention")
def efficient_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
) -> tuple[jax.Array, ...]:
    """Returns the values, the logarithms of the sums, and two empty seeds."""
    _no_dropout(dropout_p)
    weights, sums = _weights(query, key, attn_bias, is_causal, scale)
    seed = jnp.zeros((), jnp.int32)
    return _apply(weights, value, query.dtype), sums, seed, seed


@lowering("aten::_scaled_dot_product_flash_attention.default")
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> tuple[Any, ...]:
    """Returns the values and the logarithms of the sums; the rest serves torch's backward only."""
    _no_dropout(dropout_p)
    weights, sums = _weights(query, key, None, is_causal, scale)
    return _with_nothing(_apply(weights, value, query.dtype), sums, query, key)


@lowering("aten::_scaled_dot_product_cudnn_attention")
def cudnn_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> tuple[Any, ...]:
    """Computes flash attention with a mask."""
    _no_dropout(dropout_p)
    weights, sums = _weights(query, key, attn_bias, is_causal, scale)
    return _with_nothing(_apply(weights, value, query.dtype), sums, query, key)


@lowering("aten::_scaled_dot_product_fused_attention_overrideable")
def overrideable_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> tuple[Any, ...]:
    """Computes flash attention with a mask."""
    _no_dropout(dropout_p)
    weights, sums = _weights(query, key, attn_bias, is_causal, scale)
    return _with_nothing(_apply(weights, value, query.dtype), sums, query, key)


@lowering("aten::_safe_softmax", whole=False)
def safe_softmax(x: Any, dim: int, dtype: Any = None) -> jax.Array:
    """Computes softmax, with zeros where everything is minus infinity."""
    out = x.dtype if dtype is None else dtype
    return _safe_softmax(x.astype(out).astype(wide(out)), dim)[0].astype(out)


def _weights(
    query: Any, key: Any, mask: Any, is_causal: bool, scale: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights `(..., L, S)` and the logarithms of their divisors, `(..., L)`."""
    dtype = wide(query.dtype)
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    # XLA fuses a product with the difference in softmax, whose result then has the rounding error
    # of large scores, and can overflow. So the query is scaled if its dtype can hold it.
    exact = query.dtype == dtype
    query, scale = (query * jnp.asarray(scale, dtype), None) if exact else (query, scale)
    scores = _products(query, key.astype(query.dtype), dtype)
    scores = scores if scale is None else scores * jnp.asarray(scale, dtype)
    if is_causal:
        rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0)
        columns = jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1)
        scores = jnp.where(columns <= rows, scores, -jnp.inf)
    if mask is not None:
        if mask.dtype == bool:
            scores = jnp.where(mask, scores, -jnp.inf)
        else:
            scores = scores + mask.astype(dtype)
    return _safe_softmax(scores, -1)


def _products(query: Any, key: Any, dtype: Any) -> jax.Array:
    """Returns the products of each query with each key.

    XLA copies a transposed key on the CPU; a product over the last axes of both reads it as it is.
    """
    if query.shape[:-2] != key.shape[:-2]:
        return jnp.matmul(query, jnp.swapaxes(key, -1, -2), preferred_element_type=dtype)
    last, batch = query.ndim - 1, tuple(range(query.ndim - 2))
    axes = (((last,), (last,)), (batch, batch))
    products: jax.Array = jax.lax.dot_general(query, key, axes, preferred_element_type=dtype)
    return products


def _safe_softmax(scores: Any, dim: int) -> tuple[jax.Array, jax.Array]:
    """Computes softmax and its log-sums, with zeros and finite gradients where all is masked."""
    if scores.ndim == 0 or scores.shape[dim] == 0:
        return jax.nn.softmax(scores, dim), jnp.zeros(scores.shape[:-1], scores.dtype)
    largest = jax.lax.stop_gradient(jnp.max(scores, dim, keepdims=True))
    masked = largest == -jnp.inf
    powers = jnp.exp(jnp.where(masked, -jnp.inf, scores - jnp.where(masked, 0, largest)))
    sums = jnp.sum(powers, dim, keepdims=True)
    safe = jnp.where(masked, 1, sums)
    logs = jnp.where(masked, -jnp.inf, jnp.log(safe) + largest)
    return powers / safe, jnp.squeeze(logs, dim)


def _apply(weights: Any, value: Any, dtype: Any) -> jax.Array:
    return jnp.matmul(
        weights.astype(value.dtype), value, preferred_element_type=weights.dtype
    ).astype(dtype)


def _for_all_heads(query: Any, key: Any) -> Any:
    """Repeats each head of keys or values for the queries that share it."""
    heads, shared = query.shape[-3], key.shape[-3]
    return key if heads == shared else jnp.repeat(key, heads // shared, axis=-3)


def _with_nothing(output: Any, sums: Any, query: Any, key: Any) -> tuple[Any, ...]:
    """Returns the results of a kernel; those that only torch's backward uses are empty."""
    empty = jnp.zeros((0,), jnp.int32)
    sizes = (query.shape[-2], key.shape[-2])
    return (output, sums, empty, empty, *sizes, empty, empty, jnp.zeros((0,), output.dtype))


def _no_dropout(dropout_p: float) -> None:
    """Checks that there is no dropout, for which these kernels use a generator of their own.

    Raises:
        ConversionError: There is dropout.
    """
    if dropout_p:
        raise ConversionError(
            "dropout inside one of torch's own attention kernels has no key to draw from: call "
            "torch.nn.functional.scaled_dot_product_attention instead"
        )
