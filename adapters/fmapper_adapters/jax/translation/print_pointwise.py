"""Arithmetic, comparisons and functions of single elements."""

from __future__ import annotations

import ast
from typing import Any

from fmapper.translation import Printing, Value, expr, text
from fmapper_adapters.jax.translation.promotion import (
    convert,
    is_complex,
    is_float,
    is_int,
    is_number,
    jax_dtype,
    narrow,
    number,
    number_in,
    promote,
    torch_dtype,
)
from fmapper_adapters.jax.translation.table import dtype_code, name_of, prints


def elementwise(p: Printing, template: str, *operands: Any, dtype: str = "") -> Any:
    """Prints code of operands in the dtype in which PyTorch computes."""
    operands = (*(x.node if isinstance(x, Value) and not x.dtype else x for x in operands),)
    plain = [number_in(x) if any(isinstance(y, Value) and y is not x and y.ndim for y in operands)
             else x for x in operands]  # fmt: skip
    if not any(isinstance(x, Value) for x in plain):
        return None
    taken = promote(plain, dtype)
    if taken is None:
        return None
    node = expr(template, *map(number, taken))
    wanted = narrow(p.dtype)
    return node if jax_dtype(template, *taken) == wanted else convert(node, p.dtype)


def _same(p: Printing, x: Any) -> bool:
    return isinstance(x, Value) and narrow(x.dtype) == narrow(p.dtype) and x.shape == p.shape


# --- arithmetic -----------------------------------------------------------------------------


@prints("aten::add")
def add(p: Printing, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Prints `x + y`, with `alpha * y` where alpha is not one."""
    if is_number(y, 0) and _same(p, x):
        return x
    if is_number(x, 0) and is_number(alpha, 1) and _same(p, y):
        return y
    if p.dtype == "bool":
        return elementwise(p, "{0} | {1}", x, y) if is_number(alpha, 1) else None
    return _sum(p, x, y, alpha, "+")


@prints("aten::sub")
def sub(p: Printing, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Prints `x - y`, with `alpha * y` where alpha is not one."""
    if is_number(y, 0) and _same(p, x):
        return x
    return _sum(p, x, y, alpha, "-")


@prints("aten::rsub")
def rsub(p: Printing, x: Any, y: Any, alpha: Any = 1) -> Any:
    """Prints `y - x`."""
    return _sum(p, y, x, alpha, "-")


def _sum(p: Printing, x: Any, y: Any, alpha: Any, sign: str) -> Any:
    if is_number(alpha, 1):
        return elementwise(p, f"{{0}} {sign} {{1}}", x, y)
    if isinstance(alpha, ast.AST) or not isinstance(alpha, int | float):
        return None
    if isinstance(y, int | float) and not isinstance(y, bool):
        return elementwise(p, f"{{0}} {sign} {{1}}", x, alpha * y)
    if isinstance(alpha, float) and not is_float(p.dtype):
        return None
    return elementwise(p, f"{{0}} {sign} {alpha!r} * {{1}}", x, y)


@prints("aten::mul")
def mul(p: Printing, x: Any, y: Any) -> Any:
    """Prints `x * y`; for bool `x & y`."""
    if is_number(y, 1) and _same(p, x):
        return x
    if is_number(x, 1) and _same(p, y):
        return y
    return elementwise(p, "{0} & {1}" if p.dtype == "bool" else "{0} * {1}", x, y)


@prints("aten::div", "aten::true_divide")
def div(p: Printing, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """Prints `x / y`, or `x // y` for a quotient rounded down."""
    if rounding_mode is None:
        if is_number(y, 1) and _same(p, x):
            return x
        dtype = torch_dtype(x, y)
        floats = is_float(dtype) or is_complex(dtype)
        return elementwise(p, "{0} / {1}", x, y, dtype="" if floats else "float32")
    if rounding_mode == "floor":
        return elementwise(p, "{0} // {1}", x, y)
    if is_float(p.dtype):
        return elementwise(p, "jnp.trunc({0} / {1})", x, y)
    if isinstance(x, ast.expr) and isinstance(y, int) and y > 0 and "-" not in text(x):
        return expr("jnp.asarray({0} // {1})", x, y)  # a size, which is not negative
    return None


@prints("aten::floor_divide")
def floor_divide(p: Printing, x: Any, y: Any) -> Any:
    """Prints `x // y`."""
    return elementwise(p, "{0} // {1}", x, y)


@prints("aten::pow")
def power(p: Printing, x: Any, y: Any) -> Any:
    """Prints `x ** y`, roots and reciprocals as such."""
    if is_number(y, 1) and _same(p, x):
        return x
    if isinstance(x, Value) and isinstance(y, int | float) and not isinstance(y, bool):
        if is_float(x.dtype) and is_float(p.dtype):
            if y in (0.5, -0.5, -1):
                written = {0.5: "jnp.sqrt({0})", -0.5: "jax.lax.rsqrt({0})", -1: "1 / {0}"}
                return elementwise(p, written[y], x)
            whole = int(y) if float(y).is_integer() and abs(y) < 16 else y
            return elementwise(p, "{0} ** {1}", x, whole)
        if is_int(x.dtype) and isinstance(y, int) and y >= 0:
            return elementwise(p, "{0} ** {1}", x, y)
    if is_float(p.dtype):
        return elementwise(p, "{0} ** {1}", x, y)
    return None


_BINARY = {
    "aten::remainder": "{0} % {1}",
    "aten::fmod": "jnp.fmod({0}, {1})",
    "aten::maximum": "jnp.maximum({0}, {1})",
    "aten::max.other": "jnp.maximum({0}, {1})",
    "aten::minimum": "jnp.minimum({0}, {1})",
    "aten::min.other": "jnp.minimum({0}, {1})",
    "aten::fmax": "jnp.fmax({0}, {1})",
    "aten::fmin": "jnp.fmin({0}, {1})",
    "aten::eq": "{0} == {1}",
    "aten::ne": "{0} != {1}",
    "aten::lt": "{0} < {1}",
    "aten::le": "{0} <= {1}",
    "aten::gt": "{0} > {1}",
    "aten::ge": "{0} >= {1}",
    "aten::bitwise_and": "{0} & {1}",
    "aten::bitwise_or": "{0} | {1}",
    "aten::bitwise_xor": "{0} ^ {1}",
    "aten::__and__": "{0} & {1}",
    "aten::__or__": "{0} | {1}",
    "aten::__xor__": "{0} ^ {1}",
    "aten::hypot": "jnp.hypot({0}, {1})",
    "aten::gcd": "jnp.gcd({0}, {1})",
    "aten::lcm": "jnp.lcm({0}, {1})",
}


def _enter_binary(op: str, template: str) -> None:
    @prints(op)
    def printer(p: Printing, x: Any, y: Any) -> Any:
        if op in _ALL and p.dtype == "bool":  # masks begin with what is true everywhere
            for one, other in ((x, y), (y, x)):
                if isinstance(one, Value) and text(one.node) == "jnp.ones((), bool)":
                    return other
        return elementwise(p, template, x, y)


_ALL = ("aten::bitwise_and", "aten::__and__")
for _op, _template in _BINARY.items():
    _enter_binary(_op, _template)


@prints("aten::bitwise_left_shift", "aten::__lshift__", "aten::bitwise_right_shift",
        "aten::__rshift__")  # fmt: skip
def shift(p: Printing, x: Any, y: Any) -> Any:
    """Prints `x << y` or `x >> y`, for a number of bits that every integer has."""
    if not isinstance(x, Value) or not is_int(x.dtype) or type(y) is not int or not 0 <= y < 8:
        return None
    is_left = p.call.op.startswith(("aten::bitwise_left", "aten::__lshift"))
    return elementwise(p, "{0} << {1}" if is_left else "{0} >> {1}", x, y)


@prints("aten::atan2")
def atan2(p: Printing, x: Any, y: Any) -> Any:
    """Prints `jnp.arctan2(x, y)`."""
    dtype = torch_dtype(x, y)
    return elementwise(p, "jnp.arctan2({0}, {1})", x, y, dtype="" if is_float(dtype) else "float32")


@prints("aten::addcmul")
def addcmul(p: Printing, x: Value, y: Value, z: Value, *, value: Any = 1) -> Any:
    """Prints `x + value * y * z`."""
    if len({narrow(a.dtype) for a in (x, y, z)}) > 1:
        return None
    factor = "" if is_number(value, 1) else f"{value!r} * "
    return elementwise(p, f"{{0}} + {factor}{{1}} * {{2}}", x, y, z)


@prints("aten::addcdiv")
def addcdiv(p: Printing, x: Value, y: Value, z: Value, *, value: Any = 1) -> Any:
    """Prints `x + value * y / z`."""
    if len({narrow(a.dtype) for a in (x, y, z)}) > 1 or not is_float(x.dtype):
        return None
    factor = "" if is_number(value, 1) else f"{value!r} * "
    return elementwise(p, f"{{0}} + {factor}{{1}} / {{2}}", x, y, z)


@prints("aten::clamp")
def clamp(p: Printing, x: Any, min: Any = None, max: Any = None) -> Any:
    """Prints `jnp.clip(x, min, max)`, or the one bound that there is."""
    if max is None:
        return elementwise(p, "jnp.maximum({0}, {1})", x, min)
    if min is None:
        return elementwise(p, "jnp.minimum({0}, {1})", x, max)
    taken = promote([x, min, max], p.dtype)
    return None if taken is None else expr("jnp.clip({0}, {1}, {2})", *map(number, taken))


@prints("aten::clamp_min")
def clamp_min(p: Printing, x: Any, min: Any) -> Any:
    """Prints `jnp.maximum(x, min)`."""
    return clamp(p, x, min)


@prints("aten::clamp_max")
def clamp_max(p: Printing, x: Any, max: Any) -> Any:
    """Prints `jnp.minimum(x, max)`."""
    return clamp(p, x, None, max)


# --- logic and choice -----------------------------------------------------------------------


def _enter_logical(op: str, function: str, sign: str) -> None:
    @prints(op)
    def printer(p: Printing, x: Any, y: Any) -> Any:
        known = [a for a in (x, y) if isinstance(a, Value)]
        if len(known) == 2 and all(a.dtype == "bool" for a in known):
            return expr(f"{{0}} {sign} {{1}}", x, y)
        return expr(f"{function}({{0}}, {{1}})", x, y)


_enter_logical("aten::logical_and", "jnp.logical_and", "&")
_enter_logical("aten::logical_or", "jnp.logical_or", "|")
_enter_logical("aten::logical_xor", "jnp.logical_xor", "^")


@prints("aten::logical_not")
def logical_not(p: Printing, x: Value) -> Any:
    """Prints `~x`, of what is not bool `jnp.logical_not(x)`."""
    return expr("~{0}" if x.dtype == "bool" else "jnp.logical_not({0})", x)


@prints("aten::bitwise_not")
def bitwise_not(p: Printing, x: Value) -> Any:
    """Prints `~x`."""
    return expr("~{0}", x)


@prints("aten::where")
def where(p: Printing, condition: Value, x: Any, y: Any) -> Any:
    """Prints `jnp.where(condition, x, y)`."""
    first, second = number_in(x), number_in(y)
    if not any(isinstance(a, Value) and a.ndim for a in (first, second)):
        first = x if isinstance(x, Value) else second if isinstance(second, Value) else first
        first, second = x, y
    elif isinstance(first, Value) and isinstance(second, Value):
        first, second = x, y
    taken = promote([first, second], p.dtype)
    if taken is None:
        return None
    node = expr("jnp.where({0}, {1}, {2})", convert(condition, "bool"), *map(number, taken))
    if any(isinstance(a, Value) for a in taken):
        return node
    return convert(node, p.dtype)


@prints("aten::masked_fill")
def masked_fill(p: Printing, x: Value, mask: Value, value: Any) -> Any:
    """Prints `jnp.where(mask, value, x)`."""
    value = number_in(value)
    if isinstance(value, Value):
        value = convert(value, x.dtype)
    elif isinstance(value, float) and not is_float(x.dtype):
        return None
    if isinstance(value, int | float) and x.dtype == "bool":
        value = bool(value)
    if isinstance(value, complex) or not _fits(value, x.dtype):
        return None
    return expr("jnp.where({0}, {1}, {2})", convert(mask, "bool"), number(value), x)


def _fits(value: Any, dtype: str) -> bool:
    return promote([value], dtype) is not None if isinstance(value, int) else True


# --- functions of one array -----------------------------------------------------------------

_UNARY = {
    "aten::neg": "-{0}",
    "aten::abs": "jnp.abs({0})",
    "aten::sign": "jnp.sign({0})",
    "aten::square": "jnp.square({0})",
    "aten::sqrt": "jnp.sqrt({0})",
    "aten::reciprocal": "1 / {0}",
    "aten::exp": "jnp.exp({0})",
    "aten::exp2": "jnp.exp2({0})",
    "aten::expm1": "jnp.expm1({0})",
    "aten::log": "jnp.log({0})",
    "aten::log2": "jnp.log2({0})",
    "aten::log10": "jnp.log10({0})",
    "aten::log1p": "jnp.log1p({0})",
    "aten::sin": "jnp.sin({0})",
    "aten::cos": "jnp.cos({0})",
    "aten::tan": "jnp.tan({0})",
    "aten::asin": "jnp.arcsin({0})",
    "aten::acos": "jnp.arccos({0})",
    "aten::atan": "jnp.arctan({0})",
    "aten::sinh": "jnp.sinh({0})",
    "aten::cosh": "jnp.cosh({0})",
    "aten::tanh": "jnp.tanh({0})",
    "aten::asinh": "jnp.arcsinh({0})",
    "aten::acosh": "jnp.arccosh({0})",
    "aten::atanh": "jnp.arctanh({0})",
    "aten::sigmoid": "jax.nn.sigmoid({0})",
    "aten::erf": "jax.scipy.special.erf({0})",
    "aten::erfc": "jax.scipy.special.erfc({0})",
    "aten::erfinv": "jax.scipy.special.erfinv({0})",
    "aten::lgamma": "jax.scipy.special.gammaln({0})",
    "aten::digamma": "jax.scipy.special.digamma({0})",
    "aten::isnan": "jnp.isnan({0})",
    "aten::isinf": "jnp.isinf({0})",
    "aten::isfinite": "jnp.isfinite({0})",
    "aten::isposinf": "jnp.isposinf({0})",
    "aten::isneginf": "jnp.isneginf({0})",
    "aten::deg2rad": "jnp.deg2rad({0})",
    "aten::rad2deg": "jnp.rad2deg({0})",
}
_WHOLE = {
    "aten::floor": "jnp.floor({0})",
    "aten::ceil": "jnp.ceil({0})",
    "aten::trunc": "jnp.trunc({0})",
}
_COMPLEX = {"aten::neg", "aten::abs", "aten::exp", "aten::sqrt", "aten::square", "aten::sin",
            "aten::cos", "aten::tanh"}  # fmt: skip


def _enter_unary(op: str, template: str, *, whole: bool = False) -> None:
    @prints(op)
    def printer(p: Printing, x: Value) -> Any:
        if is_complex(x.dtype) and op not in _COMPLEX:
            return None
        if whole and not is_float(x.dtype):
            return x
        if op == "aten::abs" and x.dtype in ("bool", "uint8"):
            return x
        if op == "aten::abs" and is_float(x.dtype):
            return expr("absolute({0})", x)
        is_number = not is_float(x.dtype) and not is_complex(x.dtype)
        if is_number and is_float(p.dtype):  # JAX computes some of bool as float16
            return expr(template, convert(x, p.dtype))
        if x.dtype == "bool" and p.dtype != "bool":
            return None
        return expr(template, x)


for _op, _template in _UNARY.items():
    _enter_unary(_op, _template)
for _op, _template in _WHOLE.items():
    _enter_unary(_op, _template, whole=True)


@prints("aten::rsqrt")
def rsqrt(p: Printing, x: Value) -> Any:
    """Prints `jax.lax.rsqrt(x)`."""
    return None if is_complex(x.dtype) else expr("jax.lax.rsqrt({0})", convert(x, p.dtype))


@prints("aten::round")
def round_to(p: Printing, x: Value, *, decimals: int = 0) -> Any:
    """Prints `jnp.round(x)`."""
    if not is_float(x.dtype):
        return x
    return expr("jnp.round({0})", x) if decimals == 0 else None


@prints("aten::nan_to_num")
def nan_to_num(
    p: Printing, x: Value, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Any:
    """Prints `jnp.nan_to_num(x)`."""
    if is_int(x.dtype) or x.dtype == "bool":
        return x
    if is_complex(x.dtype):
        return None
    given = {"nan": nan or None, "posinf": posinf, "neginf": neginf}
    fields = "".join(f", {key}={{{key}}}" for key, value in given.items() if value is not None)
    found = {key: number(value) for key, value in given.items() if value is not None}
    return expr(f"jnp.nan_to_num({{0}}{fields})", x, **found)


# --- copies ---------------------------------------------------------------------------------


@prints("aten::clone", "aten::alias", "aten::contiguous", "aten::positive", "aten::lift_fresh",
        "aten::lift_fresh_copy", "aten::resolve_conj", "aten::resolve_neg")  # fmt: skip
def same(p: Printing, x: Value) -> Any:
    """Prints the array itself."""
    return x


@prints("aten::_to_copy", "aten::to")
def to_copy(p: Printing, x: Value, *, dtype: Any = None) -> Any:
    """Prints `x.astype(dtype)`."""
    wanted = name_of(dtype) or x.dtype
    if is_complex(x.dtype) and not is_complex(wanted):
        return None
    if wanted in ("int8", "uint8", "int16", "uint16") and is_float(x.dtype):
        return expr("{0}.astype(jnp.int32).astype({1})", x, dtype_code(wanted))
    return convert(x, wanted)


@prints("aten::copy")
def copy(p: Printing, x: Value, source: Any, non_blocking: bool = False) -> Any:
    """Prints the other array, in the shape and dtype of this one."""
    if not isinstance(source, Value):
        return None
    if source.shape == x.shape:
        return convert(source, x.dtype)
    shape = tuple(p.size(size) for size in x.shape)
    known = number_in(source)
    if not isinstance(known, Value):
        return expr("jnp.full({0}, {1}, {2})", shape, number(known), dtype_code(x.dtype))
    return expr("jnp.broadcast_to({0}, {1})", convert(source, x.dtype), shape)


@prints("aten::fill")
def fill(p: Printing, x: Value, value: Any) -> Any:
    """Prints `jnp.full_like(x, value)`."""
    value = number_in(value)
    if isinstance(value, Value):
        return None
    return expr("jnp.full_like({0}, {1})", x, number(value))


@prints("aten::detach", "fmapper::stop_gradient")
def detach(p: Printing, x: Value) -> Any:
    """Prints `jax.lax.stop_gradient(x)`; integers have no gradient to stop."""
    if not is_float(x.dtype) and not is_complex(x.dtype):
        return x
    return expr("jax.lax.stop_gradient({0})", x)


@prints("fmapper::overwrite")
def overwrite(p: Printing, x: Value, value: Value) -> Any:
    """Prints a value that has the gradient of another array."""
    if not is_float(x.dtype) and not is_complex(x.dtype):
        return value
    return expr("({0} + jax.lax.stop_gradient({1} - {0}))", x, value)


@prints("aten::scalar_tensor")
def scalar_tensor(p: Printing, value: Any, *, dtype: Any = None) -> Any:
    """Prints `jnp.float32(value)`."""
    if isinstance(value, Value | complex):
        return None
    if isinstance(value, float) and not is_float(p.dtype):
        return None
    if p.dtype == "bool":
        return expr("jnp.bool_({0})", bool(value)) if not isinstance(value, ast.AST) else None
    if not _fits(value, p.dtype):
        return None
    return expr("{0}({1})", dtype_code(p.dtype), number(value))
