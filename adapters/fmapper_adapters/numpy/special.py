"""erf, erfc and the inverse of erf, which NumPy does not have."""

from __future__ import annotations

import functools
import math
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

# Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011), tables 1 and 2: the largest
# w of a polynomial, whether its variable is the root of w, its centre and coefficients.
_SINGLE = (
    (5.0, False, 2.5, (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06,
     0.00021858087, -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)),
    (np.inf, True, 3.0, (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844,
     0.00573950773, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)),
)  # fmt: skip
_DOUBLE = (
    (6.25, False, 3.125, (-3.6444120640178196996e-21, -1.685059138182016589e-19,
     1.2858480715256400167e-18, 1.115787767802518096e-17, -1.333171662854620906e-16,
     2.0972767875968561637e-17, 6.6376381343583238325e-15, -4.0545662729752068639e-14,
     -8.1519341976054721522e-14, 2.6335093153082322977e-12, -1.2975133253453532498e-11,
     -5.4154120542946279317e-11, 1.051212273321532285e-09, -4.1126339803469836976e-09,
     -2.9070369957882005086e-08, 4.2347877827932403518e-07, -1.3654692000834678645e-06,
     -1.3882523362786468719e-05, 0.0001867342080340571352, -0.00074070253416626697512,
     -0.0060336708714301490533, 0.24015818242558961693, 1.6536545626831027356)),
    (16.0, True, 3.25, (2.2137376921775787049e-09, 9.0756561938885390979e-08,
     -2.7517406297064545428e-07, 1.8239629214389227755e-08, 1.5027403968909827627e-06,
     -4.013867526981545969e-06, 2.9234449089955446044e-06, 1.2475304481671778723e-05,
     -4.7318229009055733981e-05, 6.8284851459573175448e-05, 2.4031110387097893999e-05,
     -0.0003550375203628474796, 0.00095328937973738049703, -0.0016882755560235047313,
     0.0024914420961078508066, -0.0037512085075692412107, 0.005370914553590063617,
     1.0052589676941592334, 3.0838856104922207635)),
    (np.inf, True, 5.0, (-2.7109920616438573243e-11, -2.5556418169965252055e-10,
     1.5076572693500548083e-09, -3.7894654401267369937e-09, 7.6157012080783393804e-09,
     -1.4960026627149240478e-08, 2.9147953450901080826e-08, -6.7711997758452339498e-08,
     2.2900482228026654717e-07, -9.9298272942317002539e-07, 4.5260625972231537039e-06,
     -1.9681778105531670567e-05, 7.5995277030017761139e-05, -0.00021503011930044477347,
     -0.00013871931833623122026, 1.0103004648645343977, 4.8499064014085844221)),
)  # fmt: skip


def erfinv_(x: Array) -> None:
    """Replaces float32 or float64 numbers in a flat array by their inverse under erf."""
    kind = x.dtype.type
    with np.errstate(divide="ignore"):
        w = -np.log1p(-x * x)
    bottom = -np.inf
    factor = np.empty_like(x)
    for limit, rooted, centre, coefficients in _SINGLE if kind is np.float32 else _DOUBLE:
        chosen: Any = slice(None)
        if bottom > -np.inf:
            chosen = np.flatnonzero((w >= bottom) & (w < limit))
            if not chosen.size:
                bottom = limit
                continue
        t = np.sqrt(w[chosen]) if rooted else w[chosen]
        t = t - kind(centre)
        p = np.full_like(t, kind(coefficients[0]))
        for c in coefficients[1:]:
            p *= t
            p += kind(c)
        factor[chosen] = p
        bottom = limit
    x *= factor


@functools.cache
def _erfc_series() -> Array:
    """Fits Chebyshev coefficients of log(erfc(z) exp(z^2) / t) in 2 t - 1, t = 2 / (2 + z).

    The substitution is that of Press et al., Numerical Recipes, 6.2.2; the values come from
    `math.erfc`, and beyond its range from the asymptotic series.
    """

    def log_series(z: float) -> float:
        if z < 20:  # beyond, the exponent loses digits
            return float((Decimal(math.erfc(z)) * (Decimal(z) ** 2).exp()).ln())
        total = term = 1.0
        for n in range(1, 30):
            smaller = -term * (2 * n - 1) / (2 * z * z)
            if abs(smaller) >= abs(term):
                break
            term = smaller
            total += term
        return math.log(total / (z * math.sqrt(math.pi)))

    def at(nodes: Array) -> Array:
        t = (np.asarray(nodes) + 1) / 2
        return np.array([log_series(2 / s - 2) - math.log(s) for s in t])

    coefficients: Array = np.polynomial.chebyshev.chebinterpolate(at, 32)
    return coefficients


def erfc(x: Array) -> Array:
    """Computes 1 - erf(x) without cancellation, in float64."""
    z = np.abs(x)
    t = 2 / (2 + z)
    with np.errstate(under="ignore", over="ignore"):
        log = np.polynomial.chebyshev.chebval(2 * t - 1, _erfc_series())
        tail = t * np.exp(log - z * z)
    value: Array = np.where(x < 0, 2 - tail, tail)
    return value
