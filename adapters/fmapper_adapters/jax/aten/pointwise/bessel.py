"""Bessel and Airy functions and erfcx, as Chebyshev series piece by piece.

Neither XLA nor `jax.scipy` has them. The series come from interpolation of `scipy.special` in
float64 at the first use: JAX depends on SciPy, so it is always installed.
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

from fmapper_adapters.jax.aten.pointwise.comparisons import is_nan
from fmapper_adapters.jax.aten.pointwise.special import unary

Function = Callable[..., Any]


@unary("aten::special_spherical_bessel_j0")
def spherical_bessel_j0(x: Any) -> jax.Array:
    """Computes `sin(x) / x`."""
    ends = (x == 0) | jnp.isinf(x)
    safe = jnp.where(ends, 1, x)
    return jnp.where(ends, jnp.where(x == 0, 1, 0), jnp.sin(safe) / safe)


# --- Chebyshev series -----------------------------------------------------------------------


@functools.cache
def _series(function: Callable[[Any], Any], degree: int = 40) -> tuple[float, ...]:
    """Returns the series of a function on [-1, 1], in float64."""
    coefficients = np.polynomial.chebyshev.chebinterpolate(function, degree)
    kept = np.abs(coefficients) > 1e-17 * np.abs(coefficients).max()
    return tuple(coefficients[: int(np.flatnonzero(kept).max()) + 1])


def _evaluate(series: tuple[float, ...], t: Any) -> jax.Array:
    """Returns the value of a series, by Clenshaw's recurrence."""
    first, second = jnp.zeros_like(t), jnp.zeros_like(t)
    for coefficient in reversed(series[1:]):
        first, second = 2 * t * first - second + coefficient, first
    return t * first - second + series[0]


def _scipy() -> Any:
    return importlib.import_module("scipy.special")


_NEAR = 8.0  # the boundary between the series in x and those in 1 / x


def _near(name: str) -> Callable[[Any], Any]:
    """Returns J0, or J1 / x, over x * x from 0 to the square of _NEAR."""
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
    """Returns the amplitude of the Hankel function over 1 / x from 0 to 1 / _NEAR."""

    def amplitude(t: Any) -> Any:
        x = _NEAR / np.maximum((t + 1) / 2, 1e-12)
        phase = np.exp(1j * np.pi * (order / 2 + 0.25))
        value = np.sqrt(np.pi * x / 2) * _scipy().hankel1e(order, x) * phase
        return value.real if part == "real" else value.imag * x

    return amplitude


def _bessel(x: Any, order: int, kind: str) -> jax.Array:
    """Computes J or Y of order 0 or 1 for positive x; NaN at infinity, as in torch."""
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


@unary("aten::special_bessel_j0")
def bessel_j0(x: Any) -> jax.Array:
    """Returns the Bessel function of the first kind of order 0."""
    return _bessel(jnp.abs(x), 0, "j")


@unary("aten::special_bessel_j1")
def bessel_j1(x: Any) -> jax.Array:
    """Returns the Bessel function of the first kind of order 1."""
    value = _bessel(jnp.abs(x), 1, "j")
    return jnp.where(x < 0, -value, value)


def _for_positive(x: Any, function: Function, at_zero: float) -> jax.Array:
    value = function(jnp.where(x > 0, x, 1))
    return jnp.where(x > 0, value, jnp.where(x == 0, at_zero, jnp.nan))


@unary("aten::special_bessel_y0")
def bessel_y0(x: Any) -> jax.Array:
    """Returns the Bessel function of the second kind of order 0."""
    return _for_positive(x, lambda z: _bessel(z, 0, "y"), -math.inf)


@unary("aten::special_bessel_y1")
def bessel_y1(x: Any) -> jax.Array:
    """Returns the Bessel function of the second kind of order 1."""
    return _for_positive(x, lambda z: _bessel(z, 1, "y"), -math.inf)


_MIDDLE = 2.0  # the boundary between the series of the modified functions


@functools.cache
def _modified_near(order: int) -> Callable[[Any], Any]:
    """Returns K without its logarithm and its pole, over x * x."""

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
    def scale(t: Any) -> Any:
        x = _MIDDLE / np.maximum((t + 1) / 2, 1e-12)
        return np.sqrt(x) * _scipy().kve(order, x)

    return scale


def _modified_k(x: Any, order: int, *, scaled: bool) -> jax.Array:
    """Computes K of order 0 or 1 for positive x, times exp(x) if scaled."""
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


@unary("aten::special_modified_bessel_k0")
def modified_bessel_k0(x: Any) -> jax.Array:
    """Returns the modified Bessel function of the second kind of order 0."""
    return _for_positive(x, lambda z: _modified_k(z, 0, scaled=False), math.inf)


@unary("aten::special_modified_bessel_k1")
def modified_bessel_k1(x: Any) -> jax.Array:
    """Returns the modified Bessel function of the second kind of order 1."""
    return _for_positive(x, lambda z: _modified_k(z, 1, scaled=False), math.inf)


@unary("aten::special_scaled_modified_bessel_k0")
def scaled_modified_bessel_k0(x: Any) -> jax.Array:
    """Computes `exp(x)` times K of order 0."""
    return _for_positive(x, lambda z: _modified_k(z, 0, scaled=True), math.inf)


@unary("aten::special_scaled_modified_bessel_k1")
def scaled_modified_bessel_k1(x: Any) -> jax.Array:
    """Computes `exp(x)` times K of order 1."""
    return _for_positive(x, lambda z: _modified_k(z, 1, scaled=True), math.inf)


def _erfcx_over(t: Any) -> Any:
    """Returns erfcx without its pole, over (x - 4) / (x + 4), which is 1 at infinity."""
    t = np.minimum(t, 1 - 1e-12)
    x = 4 * (1 + t) / (1 - t)
    return _scipy().erfcx(x) * (1 + 2 * x)


@unary("aten::special_erfcx")
def erfcx(x: Any) -> jax.Array:
    """Computes `exp(x * x) * erfc(x)`."""
    size = jnp.abs(x)
    z = jnp.where(jnp.isinf(size), 1, size)
    value = _evaluate(_series(_erfcx_over, 60), (z - 4) / (z + 4)) / (1 + 2 * z)
    value = jnp.where(jnp.isinf(size), 0, value)
    below = jnp.where(x < 0, x, 0)
    return jnp.where(x < 0, 2 * jnp.exp(below * below) - value, value)


_AIRY = 4.0  # the boundaries between the series of the Airy function, on both sides of zero


def _airy_middle(t: Any) -> Any:
    return _scipy().airy(t * _AIRY)[0]


def _airy_right(t: Any) -> Any:
    """Returns Ai for positive x, over the inverse of x ** 1.5."""
    x = _AIRY / np.maximum((t + 1) / 2, 1e-10) ** (2 / 3)
    return _scipy().airye(x)[0] * x**0.25


@functools.cache
def _airy_left(part: str) -> Callable[[Any], Any]:
    def amplitude(t: Any) -> Any:
        x = _AIRY / np.maximum((t + 1) / 2, 1e-5) ** (2 / 3)
        ai, _, bi, _ = _scipy().airy(-x)
        angle = 2 / 3 * x**1.5 + np.pi / 4
        value = (bi + 1j * ai) * np.exp(-1j * angle) * np.sqrt(np.pi) * x**0.25
        return value.real if part == "real" else value.imag

    return amplitude


@unary("aten::special_airy_ai")
def airy_ai(x: Any) -> jax.Array:
    """Returns the Airy function Ai; NaN at both infinities, as in torch."""
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
