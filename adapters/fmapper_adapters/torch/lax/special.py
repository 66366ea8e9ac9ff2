"""Special functions."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch import _random, _special
from fmapper_adapters.torch._emit import current
from fmapper_adapters.torch.lax._numbers import as_tensor
from fmapper_adapters.torch.lax._table import lax


def _one(name: str, function: Any) -> None:
    def lowered(x: Any) -> Any:
        return function(x)

    lax(name)(lowered)


_one("erf", torch.erf)
_one("erfc", torch.erfc)
_one("lgamma", torch.lgamma)
_one("bessel_i0e", torch.special.i0e)


@lax("bessel_i1e")
def bessel_i1e(x: Any) -> Any:
    if x.dtype.itemsize < 4:  # whose derivative torch does not have
        return torch.special.i1e(x.to(torch.float32)).to(x.dtype)
    return torch.special.i1e(x)


@lax("erf_inv")
def erf_inv(x: Any) -> Any:
    return current().call(_random.erf_inv, x)


@lax("digamma")
def digamma(x: Any) -> Any:
    return torch.where((x <= 0) & (x == torch.floor(x)), torch.nan, torch.digamma(x))


@lax("igamma", numbers=True)
def igamma(a: Any, x: Any) -> Any:
    return _called(_special.incomplete_gamma, as_tensor(a, x), as_tensor(x, a), False)


@lax("igammac", numbers=True)
def igammac(a: Any, x: Any) -> Any:
    return _called(_special.incomplete_gamma, as_tensor(a, x), as_tensor(x, a), True)


@lax("igamma_grad_a", numbers=True)
def igamma_grad_a(a: Any, x: Any) -> Any:
    return _called(_special.gamma_slope, as_tensor(a, x), as_tensor(x, a))


@lax("regularized_incomplete_beta")
def regularized_incomplete_beta(a: Any, b: Any, x: Any) -> Any:
    return _called(_special.incomplete_beta, a, b, x)


def _called(function: Any, *args: Any) -> Any:
    """A call of a function as it is, without what it is made of."""
    return args[0].tracer.create_proxy("call_function", function, args, {})[0]


@lax("zeta", numbers=True)
def zeta(x: Any, q: Any) -> Any:
    return torch.special.zeta(x, q)


@lax("polygamma", numbers=True)
def polygamma(n: Any, x: Any) -> Any:
    x = as_tensor(x, n)
    order = as_tensor(n, x)
    sign = 1 - 2 * torch.fmod(order + 1, 2)
    found = sign * torch.exp(torch.lgamma(order + 1)) * torch.special.zeta(order + 1, x)
    return torch.where(order == 0, torch.digamma(x), found)
