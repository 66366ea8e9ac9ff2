"""Special functions.

Where neither XLA nor `jax.scipy` has a function it is evaluated as a Chebyshev series, piece by
piece. The series come from interpolation of `scipy.special` in float64 at the first use: JAX
depends on SciPy, so that it is always there.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import special as jsp

from fmapper_adapters.jax.aten.pointwise.elementwise import in_opmath, is_nan
from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import promote, wide

Function = Callable[..., Any]


def _unary(*ops: str) -> Callable[[Function], Function]:
    """Enters a function of floats; halves are computed in float32, integers become floats."""

    def add(function: Function) -> Function:
        def lowered(x: Any) -> jax.Array:
            (x,) = promote(x, to_float=True)
            return function(x.astype(wide(x.dtype))).astype(x.dtype)

        lowering(*ops)(lowered)
        return function

    return add


def _binary(*ops: str) -> Callable[[Function], Function]:
    """Enters a function of two floats, likewise."""

    def add(function: Function) -> Function:
        def lowered(x: Any, y: Any) -> jax.Array:
            dtype, (x, y) = in_opmath(x, y, to_float=True)
            return function(*jnp.broadcast_arrays(x, y)).astype(dtype)

        lowering(*ops)(lowered)
        return function

    return add


_unary("aten::erf")(jax.lax.erf)
_unary("aten::erfc")(jax.lax.erfc)
_unary("aten::erfinv")(jax.lax.erf_inv)
_unary("aten::i0", "aten::special_modified_bessel_i0")(jsp.i0)
_unary("aten::special_i0e")(jsp.i0e)
_unary("aten::special_i1", "aten::special_modified_bessel_i1")(jsp.i1)
_unary("aten::special_i1e")(jsp.i1e)
_unary("aten::special_ndtri")(jsp.ndtri)
_unary("aten::special_log_ndtr")(jsp.log_ndtr)
_unary("aten::special_entr")(jsp.entr)
_binary("aten::logaddexp2")(jnp.logaddexp2)


@_unary("aten::lgamma")
def lgamma(x: Any) -> jax.Array:
    """Exactly 0 at 1 and 2, where XLA is off by rounding."""
    y = jax.lax.lgamma(x)
    return y - jax.lax.stop_gradient(jnp.where((x == 1) | (x == 2), y, 0))


@_binary("aten::logaddexp")
def logaddexp(x: Any, y: Any) -> jax.Array:
    """Complex numbers keep the imaginary part of the larger one, beyond pi, too."""
    if not jnp.iscomplexobj(x):
        return jnp.logaddexp(x, y)
    first = x.real >= y.real
    large, small = jnp.where(first, x, y), jnp.where(first, y, x)
    infinite = ~jnp.isfinite(large.real) & (large.real == small.real)
    negligible = jnp.where(infinite, 0, small - large)
    found = large + jnp.log1p(jnp.exp(negligible))
    # Finite numbers are masked: what is not chosen must not overflow, or its derivative is NaN.
    ends = (jnp.where(infinite, x, 0) for x in (small, large))
    both = jnp.where(large.real < 0, small, jnp.log(sum(map(jnp.exp, ends))))
    return jnp.where(infinite, both, found)


@_unary("aten::digamma")
def digamma(x: Any) -> jax.Array:
    """The derivative of lgamma; infinite at zero, with the other sign."""
    zero = x == 0
    return jnp.where(zero, jnp.copysign(jnp.inf, -x), jax.lax.digamma(jnp.where(zero, 1, x)))


@jax.custom_jvp
def _hurwitz(s: Any, q: Any) -> jax.Array:
    """The Hurwitz zeta function, for whole s to the left of zero too, where JAX loses digits."""

    def below(q: Any) -> Any:
        return (q <= 0) & (q > -_FARTHEST)

    def step(state: Any) -> Any:
        q, found = state
        return jnp.where(below(q), q + 1, q), jnp.where(below(q), found + q**-s, found)

    start = (q, jnp.zeros_like(q))
    moved, first = jax.lax.while_loop(lambda state: jnp.any(below(state[0])), step, start)
    found = first + jsp.zeta(s, jnp.where(moved > 0, moved, 1))
    pole = (q <= 0) & (q == jnp.floor(q))
    found = jnp.where(pole, jnp.inf, jnp.where((q <= 0) & (s != jnp.floor(s)), jnp.nan, found))
    found = jnp.where((q <= -_FARTHEST) & ~pole, jnp.nan, found)
    found = jnp.where((q == jnp.inf) & (s == 2), 0, found)  # torch's trigamma
    return jnp.where(s == 1, jnp.inf, jnp.where((s < 1) | is_nan(q), jnp.nan, found))


_FARTHEST = 1e5  # as many terms at most


@_hurwitz.defjvp
def _hurwitz_slope(primals: Any, tangents: Any) -> Any:
    s, q = primals
    return _hurwitz(s, q), -s * _hurwitz(s + 1, q) * tangents[1]


_binary("aten::special_zeta")(_hurwitz)


@lowering("aten::polygamma")
def polygamma(n: int, x: Any) -> jax.Array:
    """The nth derivative of digamma."""
    (x,) = promote(x, to_float=True)
    y = x.astype(wide(x.dtype))
    if n == 0:
        return digamma(y).astype(x.dtype)
    factor = (-1.0) ** (n + 1) * math.factorial(n)
    return (factor * _hurwitz(jnp.full_like(y, n + 1), y)).astype(x.dtype)


@_binary("aten::igamma")
def igamma(a: Any, x: Any) -> jax.Array:
    """The lower incomplete gamma function, over gamma."""
    return _gamma_ends(a, x, jsp.gammainc, 1.0, 0.0)


@_binary("aten::igammac")
def igammac(a: Any, x: Any) -> jax.Array:
    """The upper incomplete gamma function, over gamma."""
    return _gamma_ends(a, x, jsp.gammaincc, 0.0, 1.0)


def _gamma_ends(a: Any, x: Any, function: Function, for_zero_a: float, zero_x: float) -> jax.Array:
    """With torch's values where an argument is zero or infinite."""
    plain = (a > 0) & (x > 0) & jnp.isfinite(a) & jnp.isfinite(x)
    found = function(jnp.where(plain, a, 1), jnp.where(plain, x, 1))
    ends = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, zero_x), for_zero_a)
    ends = jnp.where(x == 0, jnp.where(a > 0, zero_x, jnp.nan), ends)
    ends = jnp.where((a < 0) | (x < 0) | is_nan(a) | is_nan(x), jnp.nan, ends)
    return jnp.where(plain, found, ends)


@lowering("aten::logit")
def logit(x: Any, eps: float | None = None) -> jax.Array:
    """`log(x / (1 - x))`, where x is first brought within eps of 0 and 1."""
    (x,) = promote(x, to_float=True)
    y = x.astype(wide(x.dtype))
    if eps is not None:
        y = jnp.where(y < eps, eps, jnp.where(y > 1 - eps, 1 - eps, y))
    return jnp.log(y / (1 - y)).astype(x.dtype)


@_binary("aten::xlogy")
def xlogy(x: Any, y: Any) -> jax.Array:
    """`x * log(y)`, zero where x is; NaN where y is."""
    return _x_log(jnp.log, x, y)


@_binary("aten::special_xlog1py")
def xlog1py(x: Any, y: Any) -> jax.Array:
    """`x * log1p(y)`, zero where x is; NaN where y is."""
    return _x_log(jnp.log1p, x, y)


def _x_log(log: Function, x: Any, y: Any) -> jax.Array:
    kept = (x != 0) | is_nan(y)
    return jnp.where(kept, x, 0) * log(jnp.where(kept, y, 1)) + _slope(log, x, y, kept)


def _slope(log: Function, x: Any, y: Any, kept: Any) -> jax.Array:
    """Zero, with the gradient `log(y)` in x where x is zero, as torch has it for positive y."""
    inside = ~kept & jnp.isfinite(log(jnp.where(kept, 1, y)))
    logs = log(jnp.where(inside, y, 1))
    return jnp.where(inside, (x - jax.lax.stop_gradient(x)) * jax.lax.stop_gradient(logs), 0)


@_unary("aten::special_spherical_bessel_j0")
def spherical_bessel_j0(x: Any) -> jax.Array:
    """`sin(x) / x`."""
    ends = (x == 0) | jnp.isinf(x)
    safe = jnp.where(ends, 1, x)
    return jnp.where(ends, jnp.where(x == 0, 1, 0), jnp.sin(safe) / safe)


# --- Chebyshev series -----------------------------------------------------------------------


@functools.cache
def _series(function: Callable[[Any], Any], degree: int = 40) -> tuple[float, ...]:
    """The series of a function on [-1, 1], in float64."""
    found = np.polynomial.chebyshev.chebinterpolate(function, degree)
    kept = np.abs(found) > 1e-17 * np.abs(found).max()
    return tuple(found[: int(np.flatnonzero(kept).max()) + 1])


def _evaluate(series: tuple[float, ...], t: Any) -> jax.Array:
    """The value of a series, by Clenshaw's recurrence."""
    one, two = jnp.zeros_like(t), jnp.zeros_like(t)
    for coefficient in reversed(series[1:]):
        one, two = 2 * t * one - two + coefficient, one
    return t * one - two + series[0]


def _scipy() -> Any:
    return importlib.import_module("scipy.special")


_NEAR = 8.0  # between the series in x and those in 1 / x


def _near(name: str) -> Callable[[Any], Any]:
    """J0, or J1 / x, over x * x from 0 to the square of _NEAR."""
    return _cached_near(name)


@functools.cache
def _cached_near(name: str) -> Callable[[Any], Any]:
    def even(t: Any) -> Any:
        special = _scipy()
        x = np.sqrt(np.maximum((t + 1) / 2, 1e-30)) * _NEAR
        log = 2 / np.pi * np.log(x / 2)
        return {
            "j0": lambda: special.j0(x),
            "j1": lambda: special.j1(x) / x,
            "y0": lambda: special.y0(x) - log * special.j0(x),
            "y1": lambda: (special.y1(x) - log * special.j1(x) + 2 / np.pi / x) / x,
        }[name]()

    return even


@functools.cache
def _far(order: int, part: str) -> Callable[[Any], Any]:
    """How the amplitude of the Hankel function goes to 1, over 1 / x from 0 to 1 / _NEAR."""

    def amplitude(t: Any) -> Any:
        x = _NEAR / np.maximum((t + 1) / 2, 1e-12)
        phase = np.exp(1j * np.pi * (order / 2 + 0.25))
        found = np.sqrt(np.pi * x / 2) * _scipy().hankel1e(order, x) * phase
        return found.real if part == "real" else found.imag * x

    return amplitude


def _bessel(x: Any, order: int, kind: str) -> jax.Array:
    """J or Y of order 0 or 1 for positive x; NaN at infinity, as in torch."""
    near = x < _NEAR
    z = jnp.where(near, x, 1)
    t = 2 * (z / _NEAR) ** 2 - 1
    first = _evaluate(_series(_near(f"j{order}")), t) * (z if order else 1)
    if kind == "y":
        even = _evaluate(_series(_near(f"y{order}")), t)
        log = 2 / math.pi * jnp.log(z / 2) * first
        small = log + even if order == 0 else log + even * z - 2 / math.pi / z
    else:
        small = first
    z = jnp.where(near, 2 * _NEAR, x)
    t = 2 * (_NEAR / z) - 1
    cosine = _evaluate(_series(_far(order, "real")), t)
    sine = _evaluate(_series(_far(order, "imag")), t) / z
    angle = z - math.pi * (order / 2 + 0.25)
    if kind == "j":
        wave = jnp.cos(angle) * cosine - jnp.sin(angle) * sine
    else:
        wave = jnp.sin(angle) * cosine + jnp.cos(angle) * sine
    large = jnp.where(jnp.isinf(x), jnp.nan, jnp.sqrt(2 / math.pi / z) * wave)
    return jnp.where(is_nan(x), x, jnp.where(near, small, large))


@_unary("aten::special_bessel_j0")
def bessel_j0(x: Any) -> jax.Array:
    """The Bessel function of the first kind of order 0."""
    return _bessel(jnp.abs(x), 0, "j")


@_unary("aten::special_bessel_j1")
def bessel_j1(x: Any) -> jax.Array:
    """The Bessel function of the first kind of order 1."""
    found = _bessel(jnp.abs(x), 1, "j")
    return jnp.where(x < 0, -found, found)


def _for_positive(x: Any, function: Function, at_zero: float) -> jax.Array:
    found = function(jnp.where(x > 0, x, 1))
    return jnp.where(x > 0, found, jnp.where(x == 0, at_zero, jnp.nan))


@_unary("aten::special_bessel_y0")
def bessel_y0(x: Any) -> jax.Array:
    """The Bessel function of the second kind of order 0."""
    return _for_positive(x, lambda z: _bessel(z, 0, "y"), -math.inf)


@_unary("aten::special_bessel_y1")
def bessel_y1(x: Any) -> jax.Array:
    """The Bessel function of the second kind of order 1."""
    return _for_positive(x, lambda z: _bessel(z, 1, "y"), -math.inf)


_MIDDLE = 2.0  # between the series of the modified functions


@functools.cache
def _modified_near(order: int) -> Callable[[Any], Any]:
    """What is left of K without its logarithm and its pole, over x * x."""

    def even(t: Any) -> Any:
        special = _scipy()
        x = np.sqrt(np.maximum((t + 1) / 2, 1e-30)) * _MIDDLE
        log = np.log(x / 2)
        if order == 0:
            return special.k0(x) + log * special.i0(x)
        return (special.k1(x) - log * special.i1(x) - 1 / x) / x

    return even


@functools.cache
def _modified_far(order: int) -> Callable[[Any], Any]:
    def scaled(t: Any) -> Any:
        x = _MIDDLE / np.maximum((t + 1) / 2, 1e-12)
        return np.sqrt(x) * _scipy().kve(order, x)

    return scaled


def _modified_k(x: Any, order: int, *, scaled: bool) -> jax.Array:
    """K of order 0 or 1 for positive x, times exp(x) if it is to be scaled."""
    near = x <= _MIDDLE
    z = jnp.where(near, x, 1)
    even = _evaluate(_series(_modified_near(order)), 2 * (z / _MIDDLE) ** 2 - 1)
    if order == 0:
        small = even - jnp.log(z / 2) * jsp.i0(z)
    else:
        small = even * z + jnp.log(z / 2) * jsp.i1(z) + 1 / z
    y = jnp.where(near, 2 * _MIDDLE, x)
    large = _evaluate(_series(_modified_far(order), 60), 2 * _MIDDLE / y - 1) / jnp.sqrt(y)
    if scaled:
        return jnp.where(near, small * jnp.exp(z), large)
    return jnp.where(near, small, large * jnp.exp(-y))


@_unary("aten::special_modified_bessel_k0")
def modified_bessel_k0(x: Any) -> jax.Array:
    """The modified Bessel function of the second kind of order 0."""
    return _for_positive(x, lambda z: _modified_k(z, 0, scaled=False), math.inf)


@_unary("aten::special_modified_bessel_k1")
def modified_bessel_k1(x: Any) -> jax.Array:
    """The modified Bessel function of the second kind of order 1."""
    return _for_positive(x, lambda z: _modified_k(z, 1, scaled=False), math.inf)


@_unary("aten::special_scaled_modified_bessel_k0")
def scaled_modified_bessel_k0(x: Any) -> jax.Array:
    """`exp(x)` times K of order 0."""
    return _for_positive(x, lambda z: _modified_k(z, 0, scaled=True), math.inf)


@_unary("aten::special_scaled_modified_bessel_k1")
def scaled_modified_bessel_k1(x: Any) -> jax.Array:
    """`exp(x)` times K of order 1."""
    return _for_positive(x, lambda z: _modified_k(z, 1, scaled=True), math.inf)


def _erfcx_over(t: Any) -> Any:
    """Over (x - 4) / (x + 4), which is 1 at infinity, times what is left of its pole."""
    t = np.minimum(t, 1 - 1e-12)
    x = 4 * (1 + t) / (1 - t)
    return _scipy().erfcx(x) * (1 + 2 * x)


@_unary("aten::special_erfcx")
def erfcx(x: Any) -> jax.Array:
    """`exp(x * x) * erfc(x)`."""
    size = jnp.abs(x)
    z = jnp.where(jnp.isinf(size), 1, size)
    found = _evaluate(_series(_erfcx_over, 60), (z - 4) / (z + 4)) / (1 + 2 * z)
    found = jnp.where(jnp.isinf(size), 0, found)
    below = jnp.where(x < 0, x, 0)
    return jnp.where(x < 0, 2 * jnp.exp(below * below) - found, found)


_AIRY = 4.0  # between the series of the Airy function, on both sides of zero


def _airy_middle(t: Any) -> Any:
    return _scipy().airy(t * _AIRY)[0]


def _airy_right(t: Any) -> Any:
    """Over the inverse of x ** 1.5."""
    x = _AIRY / np.maximum((t + 1) / 2, 1e-10) ** (2 / 3)
    return _scipy().airye(x)[0] * x**0.25


@functools.cache
def _airy_left(part: str) -> Callable[[Any], Any]:
    def amplitude(t: Any) -> Any:
        x = _AIRY / np.maximum((t + 1) / 2, 1e-5) ** (2 / 3)
        ai, _, bi, _ = _scipy().airy(-x)
        angle = 2 / 3 * x**1.5 + np.pi / 4
        found = (bi + 1j * ai) * np.exp(-1j * angle) * np.sqrt(np.pi) * x**0.25
        return found.real if part == "real" else found.imag

    return amplitude


@_unary("aten::special_airy_ai")
def airy_ai(x: Any) -> jax.Array:
    """The Airy function Ai; NaN at both infinities, as in torch."""
    inside = jnp.abs(x) <= _AIRY
    middle = _evaluate(_series(_airy_middle, 60), jnp.where(inside, x, 0) / _AIRY)
    y = jnp.where(inside | is_nan(x), 2 * _AIRY, jnp.abs(x))
    ends = jnp.isinf(y)
    y = jnp.where(ends, 2 * _AIRY, y)
    power = y * jnp.sqrt(y)
    t = 2 * _AIRY**1.5 / power - 1
    root = jnp.sqrt(jnp.sqrt(y))
    right = _evaluate(_series(_airy_right), t) * jnp.exp(-2 / 3 * power) / root
    angle = 2 / 3 * power + math.pi / 4
    cosine, sine = (_evaluate(_series(_airy_left(part), 60), t) for part in ("real", "imag"))
    left = (jnp.sin(angle) * cosine + jnp.cos(angle) * sine) / (math.sqrt(math.pi) * root)
    outside = jnp.where(ends, jnp.nan, jnp.where(x > 0, right, left))
    return jnp.where(is_nan(x), x, jnp.where(inside, middle, outside))


# --- orthogonal polynomials -----------------------------------------------------------------


def _recurrence(x: Any, n: Any, first: Any, step: Function) -> jax.Array:
    """The nth of polynomials p(0) = 1, p(1) = first, p(k + 1) = step(k, p(k), p(k - 1))."""
    n = jnp.trunc(n)
    last = jnp.max(jnp.where(jnp.isfinite(n), n, 0), initial=1)

    def further(state: Any) -> Any:
        k, before, now = state
        new = jnp.where(k < n, step(k, now, before), now)
        return k + 1, jnp.where(k < n, now, before), new

    start = (jnp.ones((), x.dtype), jnp.ones_like(x), jnp.broadcast_to(first, x.shape))
    _, _, found = jax.lax.while_loop(lambda state: state[0] < last, further, start)
    return jnp.where(n < 0, 0, jnp.where(n == 0, 1, found))


def _even(n: Any) -> Any:
    return jnp.trunc(n) % 2 == 0


def _chebyshev(x: Any, n: Any, first: Any, plus: Any, minus: Any, wave: Any, above: int) -> Any:
    """With the values at 1 and -1, and by a formula of waves inside for high degrees."""
    n = jnp.trunc(n)
    found = _recurrence(x, n, first, lambda k, now, before: 2 * x * now - before)
    found = jnp.where((n > above) & (jnp.abs(x) < 1), wave, found)
    found = jnp.where(x == 1, plus, jnp.where(x == -1, minus, found))
    return jnp.where(n < 0, 0, found)


def _t(x: Any, n: Any) -> jax.Array:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    return _chebyshev(x, n, x, 1, jnp.where(_even(n), 1, -1), jnp.cos(n * angle), 6)


def _u(x: Any, n: Any) -> jax.Array:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    wave = jnp.sin((n + 1) * angle) / jnp.sin(angle)
    ends = n + 1
    return _chebyshev(x, n, 2 * x, ends, jnp.where(_even(n), ends, -ends), wave, 8)


def _v(x: Any, n: Any) -> jax.Array:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    wave = jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)
    ends = 2 * n + 1
    return _chebyshev(x, n, 2 * x - 1, 1, jnp.where(_even(n), ends, -ends), wave, 8)


def _w(x: Any, n: Any) -> jax.Array:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    wave = jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)
    return _chebyshev(x, n, 2 * x + 1, 2 * n + 1, jnp.where(_even(n), 1, -1), wave, 8)


for _kind, _function in (("t", _t), ("u", _u), ("v", _v), ("w", _w)):
    _binary(f"aten::special_chebyshev_polynomial_{_kind}")(_function)
    _binary(f"aten::special_shifted_chebyshev_polynomial_{_kind}")(
        lambda x, n, function=_function: function(2 * x - 1, n)
    )


def _hermite_limit(x: Any, n: Any, found: Any) -> jax.Array:
    """NaN above the degree where torch gives up."""
    return jnp.where(n > (128 if x.dtype == np.float32 else 512), jnp.nan, found)


@_binary("aten::special_hermite_polynomial_h")
def hermite_h(x: Any, n: Any) -> jax.Array:
    """The physicists' Hermite polynomial of degree n."""
    found = _recurrence(x, n, 2 * x, lambda k, now, before: 2 * x * now - 2 * k * before)
    return _hermite_limit(x, n, found)


@_binary("aten::special_hermite_polynomial_he")
def hermite_he(x: Any, n: Any) -> jax.Array:
    """The probabilists' Hermite polynomial of degree n."""
    found = _recurrence(x, n, x, lambda k, now, before: x * now - k * before)
    return _hermite_limit(x, n, found)


@_binary("aten::special_laguerre_polynomial_l")
def laguerre_l(x: Any, n: Any) -> jax.Array:
    """The Laguerre polynomial of degree n."""

    def step(k: Any, now: Any, before: Any) -> Any:
        return ((2 * k + 1 - x) * now - k * before) / (k + 1)

    return _recurrence(x, n, 1 - x, step)


@_binary("aten::special_legendre_polynomial_p")
def legendre_p(x: Any, n: Any) -> jax.Array:
    """The Legendre polynomial of degree n."""

    def step(k: Any, now: Any, before: Any) -> Any:
        return ((2 * k + 1) * x * now - k * before) / (k + 1)

    return _recurrence(x, n, x, step)
