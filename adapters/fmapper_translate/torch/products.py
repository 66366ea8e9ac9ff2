"""The table of functions: products, norms and transforms of arrays."""

from __future__ import annotations

import ast
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fmapper.translation import expr
from fmapper_translate.torch.functions import (
    FUNCTIONS,
    Call,
    Given,
    call_method,
    invoke,
    method,
    printer_of,
    row,
    turn,
)
from fmapper_translate.walk.errors import NotTranscribed

__all__ = ["FUNCTIONS"]

for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    row(f"a, n=None, axis=None: torch.fft.{_name}(a, n=n, dim=axis)", getattr(jnp.fft, _name))
    if _name[0] != "h" and _name[:2] != "ih":
        row(f"a, s=None, axes=None: torch.fft.{_name}2(a, s=s, dim=axes)",
            getattr(jnp.fft, f"{_name}2"))  # fmt: skip
        row(f"a, s=None, axes=None: torch.fft.{_name}n(a, s=s, dim=axes)",
            getattr(jnp.fft, f"{_name}n"))  # fmt: skip
row("x, axes=None: torch.fft.fftshift(x, dim=axes)", jnp.fft.fftshift)
row("x, axes=None: torch.fft.ifftshift(x, dim=axes)", jnp.fft.ifftshift)
for _name in ("inv", "det", "eigvalsh", "slogdet", "cholesky"):
    row(f"a: torch.linalg.{_name}(a)", getattr(jnp.linalg, _name))
row("a, b: torch.linalg.solve(a, b)", jnp.linalg.solve)
row("v: torch.diag(v)", jnp.diag)
row("a: a.trace()", jnp.trace)
row("a, b: torch.inner(a, b)", jnp.inner)
row("a, b: torch.kron(a, b)", jnp.kron)


@printer_of(jnp.linalg.norm)
def _norm(
    call: Call, /, x: Given, ord: Given | None = None, axis: Given | None = None,
    keepdims: Given | None = None,
) -> ast.expr:  # fmt: skip
    keeps = keepdims if keepdims is not None and keepdims.value else None
    more = {"dim": turn(axis), "keepdim": keeps}
    return invoke("torch.linalg.norm", x, ord=turn(ord), **more)


@printer_of(lax.dot_general)
def _dot_general(
    call: Call, /, lhs: Given, rhs: Given, dimension_numbers: Given, precision: Any = None,
    preferred_element_type: Any = None,
) -> ast.expr:  # fmt: skip
    parts = dimension_numbers.parts
    if any(map(len, dimension_numbers.value[1])):
        raise NotTranscribed("it has dimensions of a batch")
    dims = parts[0] if parts else expr("{0}[0]", dimension_numbers.node)
    return invoke("torch.tensordot", lhs, rhs, dims=dims)


@printer_of(jnp.issubdtype)
def _issubdtype(call: Call, /, arg1: Given, arg2: Given) -> ast.expr:
    kinds = {jnp.integer: "not {0}.is_floating_point", jnp.floating: "{0}.is_floating_point",
             jnp.inexact: "{0}.is_floating_point"}  # fmt: skip
    if arg2.value not in kinds or jnp.issubdtype(arg1.value, jnp.complexfloating):
        raise NotTranscribed("it asks for another kind of dtype")
    return expr(kinds[arg2.value], arg1.node)


@printer_of(jnp.dot)
@method("dot")
def _dot(call: Call, /, a: Given, b: Given) -> ast.expr:
    if b.ndim > 2 or not a.ndim or not b.ndim:
        raise NotTranscribed("it is not a product of matrices")
    return expr("{0} @ {1}", a.node, b.node)


def dot_product_attention(
    call: Call, /, query: Given, key: Given, value: Given, bias: Given | None = None,
    mask: Given | None = None, *, scale: Given | None = None, is_causal: Given | None = None,
    dropout_rate: Given | None = None, deterministic: Given | None = None,
) -> ast.expr:  # fmt: skip
    """Prints attention of heads, which are the last dimension but one."""
    if bias is not None or query.value.shape[-2] != key.value.shape[-2]:
        raise NotTranscribed("it has a bias, or fewer heads of keys")
    if dropout_rate is not None and dropout_rate.value:
        raise NotTranscribed("it has dropout")
    if mask is not None and mask.value is not None and mask.value.dtype != bool:
        mask = Given(call_method(mask, "bool"), mask.value)
    heads = [expr("{0}.transpose(-3, -2)", item.node) for item in (query, key, value)]
    made = invoke(
        "F.scaled_dot_product_attention", *heads, attn_mask=turn(mask), is_causal=is_causal,
        scale=turn(scale),
    )  # fmt: skip
    return expr("{0}.transpose(-3, -2)", made)


printer_of(jax.nn.dot_product_attention, nnx.dot_product_attention)(dot_product_attention)
