"""Numbers that are read from arrays or drawn, complex numbers, and their Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.programs import Program
from fmapper.translation import Printing, Value, expr
from fmapper_adapters.jax.translation.promotion import call_of, is_simple
from fmapper_adapters.jax.translation.table import cast, dtype_code, prints

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


# --- random numbers ---------------------------------------------------------------------------

# What the proof can give to both sides: normal, uniform and whole numbers.
DRAWS = frozenset(
    f"aten::{name}"
    for name in (
        "rand", "rand_like", "uniform", "randn", "randn_like", "normal", "normal_functional",
        "log_normal", "bernoulli", "exponential", "randint", "randint_like", "randperm",
    )
)  # fmt: skip


def draws(program: Program) -> bool:
    """Returns whether a program draws such numbers."""
    return any(call.op.rpartition(".")[0] in DRAWS for call in program.graph.walk())


@prints("aten::randn", "aten::rand")
def draw(p: Printing, size: Sequence[Any], *, dtype: Any = None, generator: Any = None) -> Any:
    """Prints `jax.random.normal(key, size)` or `jax.random.uniform(key, size)`."""
    kind = "normal" if p.call.op.startswith("aten::randn") else "uniform"
    return _draw(p, kind, tuple(size))


@prints("aten::randn_like", "aten::rand_like")
def draw_like(p: Printing, x: Value, *, dtype: Any = None, generator: Any = None) -> Any:
    """Prints `jax.random.normal(key, x.shape)` or `jax.random.uniform(key, x.shape)`."""
    kind = "normal" if p.call.op.startswith("aten::randn") else "uniform"
    return _draw(p, kind, _shape(p, x))


@prints("aten::normal_functional")
def draw_normal(
    p: Printing, x: Value, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None
) -> Any:
    """Prints `mean + std * jax.random.normal(key, x.shape)`."""
    if not isinstance(mean, float | int) or not isinstance(std, float | int):
        return None
    drawn = _draw(p, "normal", _shape(p, x))
    drawn = drawn if std == 1 or drawn is None else expr("{0} * {1}", std, drawn)
    return drawn if mean == 0 or drawn is None else expr("{0} + {1}", mean, drawn)


@prints("aten::uniform")
def draw_uniform(
    p: Printing, x: Value, low: Any = 0.0, high: Any = 1.0, *, generator: Any = None
) -> Any:
    """Prints `jax.random.uniform(key, x.shape, minval=low, maxval=high)`."""
    if not isinstance(low, float | int) or not isinstance(high, float | int):
        return None
    ends = {"minval": None if low == 0 else low, "maxval": None if high == 1 else high}
    return _draw(p, "uniform", _shape(p, x), **ends)


@prints("aten::exponential")
def draw_exponential(p: Printing, x: Value, rate: Any = 1.0, *, generator: Any = None) -> Any:
    """Prints `jax.random.exponential(key, x.shape)`."""
    return _draw(p, "exponential", _shape(p, x)) if rate == 1 else None


@prints("aten::bernoulli.p", "aten::bernoulli.default")
def draw_ones(p: Printing, x: Value, rate: Any = None, *, generator: Any = None) -> Any:
    """Prints `jax.random.bernoulli(key, rate, x.shape)`, in the dtype of the array."""
    if rate is None:
        drawn = expr("jax.random.bernoulli({0}, {1})", p.key(), x)
    elif isinstance(rate, float | int):
        drawn = expr("jax.random.bernoulli({0}, {1}, {2})", p.key(), rate, _shape(p, x))
    else:
        return None
    return cast(Value(drawn, "bool", p.shape), p.dtype)


@prints("aten::randint.default")
def draw_below(
    p: Printing, high: Any, size: Sequence[Any], *, dtype: Any = None, generator: Any = None
) -> Any:
    """Prints `jax.random.randint(key, size, 0, high)`."""
    return draw_between(p, 0, high, size)


@prints("aten::randint.low")
def draw_between(
    p: Printing,
    low: Any,
    high: Any,
    size: Sequence[Any],
    *,
    dtype: Any = None,
    generator: Any = None,
) -> Any:
    """Prints `jax.random.randint(key, size, low, high)`."""
    if p.dtype not in ("int64", "int32"):
        return None
    return call_of("jax.random.randint", p.key(), tuple(size), low, high)


@prints("aten::randperm.default")
def permutation(p: Printing, n: Any, *, dtype: Any = None, generator: Any = None) -> Any:
    """Prints `jax.random.permutation(key, n)`."""
    return None if p.dtype != "int64" else call_of("jax.random.permutation", p.key(), n)


def _shape(p: Printing, x: Value) -> Any:
    """Returns the code for the shape of an array, which need not be made for that."""
    return expr("{0}.shape", x) if is_simple(x) else tuple(map(p.size, p.shape))


def _draw(p: Printing, kind: str, shape: Any, **options: Any) -> Any:
    if not p.dtype.startswith(("float", "bfloat")):
        return None
    dtype = None if p.dtype == "float32" else dtype_code(p.dtype)
    return call_of(f"jax.random.{kind}", p.key(), shape, dtype=dtype, **options)
