"""The table of functions that make arrays, and draw them."""

from __future__ import annotations

import ast
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fmapper.translation import expr
from fmapper_translate.torch.functions import (
    Call,
    Given,
    call_method,
    dtype_of,
    invoke,
    printer_of,
)
from fmapper_translate.torch.products import FUNCTIONS
from fmapper_translate.walk.errors import NotTranscribed

__all__ = ["FUNCTIONS"]


@printer_of(jnp.zeros)
def _zeros(call: Call, /, shape: Given, dtype: Given | None = None) -> ast.expr:
    return call.make("torch.zeros", shape, dtype=dtype)


@printer_of(jnp.ones)
def _ones(call: Call, /, shape: Given, dtype: Given | None = None) -> ast.expr:
    return call.make("torch.ones", shape, dtype=dtype)


@printer_of(jnp.full)
def _full(call: Call, /, shape: Given, fill_value: Given, dtype: Given | None = None) -> ast.expr:
    if isinstance(shape.value, int):
        shape = Given(ast.Tuple([shape.node], ast.Load()), (shape.value,))
    return call.make("torch.full", shape, fill_value, dtype=dtype)


@printer_of(jnp.zeros_like)
def _zeros_like(call: Call, /, a: Given, dtype: Given | None = None) -> ast.expr:
    return Call(call.value, None).make("torch.zeros_like", a, dtype=dtype)


@printer_of(jnp.ones_like)
def _ones_like(call: Call, /, a: Given, dtype: Given | None = None) -> ast.expr:
    return Call(call.value, None).make("torch.ones_like", a, dtype=dtype)


@printer_of(jnp.full_like)
def _full_like(call: Call, /, a: Given, fill_value: Given, dtype: Given | None = None) -> ast.expr:
    return Call(call.value, None).make("torch.full_like", a, fill_value, dtype=dtype)


@printer_of(jnp.arange)
def _arange(
    call: Call, /, start: Given, stop: Given | None = None, step: Given | None = None,
    dtype: Given | None = None,
) -> ast.expr:  # fmt: skip
    args = [item for item in (start, stop, step) if item is not None]
    return call.make("torch.arange", *args, dtype=dtype)


@printer_of(lax.iota)
def _iota(call: Call, /, dtype: Given, size: Given) -> ast.expr:
    return call.make("torch.arange", size, dtype=dtype)


@printer_of(lax.broadcasted_iota)
def _broadcasted_iota(call: Call, /, dtype: Given, shape: Given, dimension: Given) -> ast.expr:
    size = expr("{0}[{1}]", shape.node, dimension.node)
    if shape.parts:
        size = shape.parts[dimension.value].node
    steps = Given(call.make("torch.arange", size, dtype=dtype), None)
    ones = [1] * (len(shape.value) - dimension.value % len(shape.value) - 1)
    column = Given(call_method(steps, "reshape", -1, *ones), None) if ones else steps
    return call_method(column, "expand", shape)


@printer_of(jnp.linspace)
def _linspace(
    call: Call,
    /,
    start: Given,
    stop: Given,
    num: Given | None = None,
    *,
    dtype: Given | None = None,
) -> ast.expr:
    count = num or Given(ast.Constant(50), 50)
    return call.make("torch.linspace", start, stop, count, dtype=dtype)


@printer_of(jnp.eye, jnp.identity)
def _eye(
    call: Call, /, n: Given, m: Given | None = None, *, dtype: Given | None = None
) -> ast.expr:
    return call.make("torch.eye", n, *([] if m is None else [m]), dtype=dtype)


@printer_of(jnp.tril)
def _tril(call: Call, /, m: Given, k: Given | None = None) -> ast.expr:
    return call_method(m, "tril", *([] if k is None else [k]))


@printer_of(jnp.triu)
def _triu(call: Call, /, m: Given, k: Given | None = None) -> ast.expr:
    return call_method(m, "triu", *([] if k is None else [k]))


@printer_of(jnp.array, jnp.asarray)
def _array(call: Call, /, object: Given, dtype: Given | None = None) -> ast.expr:
    if object.is_array:
        return object.node if dtype is None else call_method(object, "to", dtype_of(dtype))
    if isinstance(object.value, np.ndarray):
        dtype = dtype or Given(ast.Constant(""), call.value.dtype)
        return call.make("torch.as_tensor", object, dtype=dtype)
    return call.make("torch.tensor", object, dtype=dtype)


@printer_of(jnp.meshgrid)
def _meshgrid(call: Call, /, *arrays: Given, indexing: Given | None = None) -> ast.expr:
    kind = indexing or Given(ast.Constant("xy"), "xy")
    codes = [item.node for item in arrays]
    return ast.Call(expr("torch.meshgrid"), codes, [ast.keyword("indexing", kind.node)])


# --- random numbers -------------------------------------------------------------------------------


def _shape(shape: Given | None) -> Any:
    return ast.Tuple([], ast.Load()) if shape is None else shape


@printer_of(jax.random.split)
def _split(call: Call, /, key: Given, num: Given | None = None) -> ast.expr:
    return invoke(
        "range", ast.Constant(2) if num is None else num
    )  # of which each stands for a key


@printer_of(jax.random.normal)
def _normal(call: Call, /, key: Given, shape: Given | None = None, dtype: Any = None) -> ast.expr:
    return call.make("torch.randn", _shape(shape), dtype=dtype)


@printer_of(jax.random.uniform)
def _uniform(
    call: Call, /, key: Given, shape: Given | None = None, dtype: Any = None,
    minval: Given | None = None, maxval: Given | None = None,
) -> ast.expr:  # fmt: skip
    drawn = call.make("torch.rand", _shape(shape), dtype=dtype)
    if minval is None and maxval is None:
        return drawn
    low = ast.Constant(0.0) if minval is None else minval.node
    high = ast.Constant(1.0) if maxval is None else maxval.node
    return expr("{1} + ({2} - {1}) * {0}", drawn, low, high)


@printer_of(jax.random.exponential)
def _exponential(
    call: Call, /, key: Given, shape: Given | None = None, dtype: Any = None
) -> ast.expr:
    empty = Given(call.make("torch.empty", _shape(shape), dtype=dtype), None)
    return call_method(empty, "exponential_")


@printer_of(jax.random.gumbel)
def _gumbel(call: Call, /, key: Given, shape: Given | None = None, dtype: Any = None) -> ast.expr:
    return expr("-{0}.log()", _exponential(call, key, shape, dtype))


@printer_of(jax.random.randint)
def _randint(
    call: Call, /, key: Given, shape: Given, minval: Given, maxval: Given, dtype: Any = None
) -> ast.expr:
    return call.make("torch.randint", minval, maxval, shape, dtype=dtype)


@printer_of(jax.random.bernoulli)
def _bernoulli(call: Call, /, key: Given, p: Given, shape: Given | None = None) -> ast.expr:
    if shape is None:
        raise NotTranscribed("it is given no shape")
    return expr("{0} < {1}", call.make("torch.rand", shape), p.node)
