"""Numbers that are read from arrays, complex numbers, and their Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.translation import Printing, Value, expr
from fmapper_adapters.jax.translation.promotion import call_of
from fmapper_adapters.jax.translation.table import prints

_TEMPLATES = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "add": "{0} + {1}", "sub": "{0} - {1}",
    "mul": "{0} * {1}", "truediv": "{0} / {1}", "floordiv": "{0} // {1}", "mod": "{0} % {1}",
    "neg": "-{0}", "pow": "{0} ** {1}",
}  # fmt: skip


def _enter(name: str, template: str) -> None:
    @prints(f"sym::{name}")
    def number(p: Printing, *args: Any) -> Any:
        return expr(template, *args)


for _name, _template in _TEMPLATES.items():
    _enter(_name, _template)


@prints("aten::_local_scalar_dense", "aten::item")
def read(p: Printing, x: Value) -> Any:
    """Prints the array: one element is a number to JAX."""
    return x if not x.shape else expr("{0}.reshape(())", x)


# --- complex numbers -----------------------------------------------------------------------


@prints("aten::real", "aten::imag")
def complex_part(p: Printing, x: Value) -> Any:
    """Prints `x.real` or `x.imag`."""
    return expr(f"{{0}}.{p.call.op.split('::')[1].split('.')[0]}", x)


@prints("aten::view_as_real", "aten::view_as_real_copy")
def view_as_real(p: Printing, x: Value) -> Any:
    """Prints `as_pairs(x)`, a function in the file."""
    return expr("as_pairs({0})", x)


@prints("aten::view_as_complex", "aten::view_as_complex_copy")
def view_as_complex(p: Printing, x: Value) -> Any:
    """Prints `as_complex(x)`, a function in the file."""
    return expr("as_complex({0})", x)


@prints("aten::complex")
def complex_(p: Printing, x: Value, y: Value) -> Any:
    """Prints `jax.lax.complex(x, y)`."""
    return expr("jax.lax.complex({0}, {1})", x, y) if x.shape == y.shape else None


@prints("aten::polar")
def polar(p: Printing, length: Value, angle: Value) -> Any:
    """Prints `length * jnp.exp(1j * angle)`."""
    return expr("{0} * jnp.exp(1j * {1})", length, angle)


# --- Fourier transforms -----------------------------------------------------------------------

_NORMS = ("backward", "ortho", "forward")  # scales after a transform: none, the root, the count


@prints("aten::_fft_c2c")
def fft_c2c(p: Printing, x: Value, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """Prints `jnp.fft.fftn(x, axes=dim)` or its inverse."""
    return _transform("fft" if forward else "ifft", x, dim, normalization, forward)


@prints("aten::_fft_r2c")
def fft_r2c(p: Printing, x: Value, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    """Prints `jnp.fft.rfftn(x, axes=dim)`."""
    return _transform("rfft" if onesided else "fft", x, dim, normalization, forward=True)


@prints("aten::_fft_c2r")
def fft_c2r(
    p: Printing, x: Value, dim: Sequence[int], normalization: int, last_dim_size: Any
) -> Any:
    """Prints `jnp.fft.irfftn(x, s, axes=dim)`."""
    sizes = tuple(p.size(p.shape[d]) for d in dim)
    return _transform("irfft", x, dim, normalization, forward=False, sizes=sizes)


def _transform(
    kind: str,
    x: Value,
    dims: Sequence[int],
    normalization: int,
    forward: bool,
    sizes: tuple[Any, ...] = (),
) -> Any:
    if not 1 <= len(dims) <= 3:  # XLA takes three at once
        return None
    norm = _NORMS[normalization if forward else 2 - normalization]
    options = {"norm": None if norm == "backward" else norm}
    if len(dims) == 1:
        return call_of(f"jnp.fft.{kind}", x, *sizes, axis=dims[0], **options)
    return call_of(f"jnp.fft.{kind}n", x, *([sizes] if sizes else []), axes=tuple(dims), **options)
