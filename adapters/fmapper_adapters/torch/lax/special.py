"""Special functions."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch import _random
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
_one("bessel_i1e", torch.special.i1e)


@lax("erf_inv")
def erf_inv(x: Any) -> Any:
    return current().call(_random.erf_inv, x)


@lax("digamma")
def digamma(x: Any) -> Any:
    return torch.where((x <= 0) & (x == torch.floor(x)), torch.nan, torch.digamma(x))


@lax("igamma", numbers=True)
def igamma(a: Any, x: Any) -> Any:
    return _incomplete(torch.special.gammainc, a, x)


@lax("igammac", numbers=True)
def igammac(a: Any, x: Any) -> Any:
    return _incomplete(torch.special.gammaincc, a, x)


def _incomplete(function: Any, a: Any, x: Any) -> Any:
    a, x = as_tensor(a, x), as_tensor(x, a)
    found = function(a.double(), x.double())  # torch's own float32 has five digits
    return found if x.dtype is torch.float64 else found.to(x.dtype)


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
