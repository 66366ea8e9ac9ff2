"""Special functions."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.compute import random, special
from fmapper_adapters.torch.lax.pointwise.numbers import as_tensor
from fmapper_adapters.torch.lax.table import lax, pointwise
from fmapper_adapters.torch.model.emit import current


def _one(name: str, function: Any) -> None:
    def lower(x: Any) -> Any:
        return function(x)

    lax(name, dims=pointwise)(lower)


_one("erf", torch.erf)
_one("erfc", torch.erfc)
_one("lgamma", torch.lgamma)
_one("bessel_i0e", torch.special.i0e)


@lax("bessel_i1e")
def bessel_i1e(x: Any) -> Any:
    # torch lacks derivatives for narrow floats, and loses the sign of zero
    value = torch.special.i1e(x.to(torch.float32)).to(x.dtype) if x.dtype.itemsize < 4 else (
        torch.special.i1e(x)
    )  # fmt: skip
    return torch.where(x == 0, x * 0.5, value)


@lax("erf_inv", dims=pointwise)
def erf_inv(x: Any) -> Any:
    return current().call(random.erf_inv, x)


@lax("digamma", dims=pointwise)
def digamma(x: Any) -> Any:
    return torch.where((x <= 0) & (x == torch.floor(x)), torch.nan, torch.digamma(x))


@lax("igamma", takes_numbers=True)
def igamma(a: Any, x: Any) -> Any:
    return _call_whole(special.incomplete_gamma, as_tensor(a, x), as_tensor(x, a), False)


@lax("igammac", takes_numbers=True)
def igammac(a: Any, x: Any) -> Any:
    return _call_whole(special.incomplete_gamma, as_tensor(a, x), as_tensor(x, a), True)


@lax("igamma_grad_a", takes_numbers=True)
def igamma_grad_a(a: Any, x: Any) -> Any:
    return _call_whole(special.gamma_slope, as_tensor(a, x), as_tensor(x, a))


@lax("regularized_incomplete_beta")
def regularized_incomplete_beta(a: Any, b: Any, x: Any) -> Any:
    return _call_whole(special.incomplete_beta, a, b, x)


def _call_whole(function: Any, *args: Any) -> Any:
    """Emits a function as one call, without its decomposition."""
    return args[0].tracer.create_proxy("call_function", function, args, {})[0]


@lax("zeta", takes_numbers=True)
def zeta(s: Any, q: Any) -> Any:
    return _zeta(as_tensor(s, q), as_tensor(q, s))


def _zeta(s: Any, q: Any) -> Any:
    """Computes the Hurwitz zeta function with JAX's poles: infinite for even orders, else NaN."""
    dtype = s.dtype
    if dtype.itemsize < 4:
        s, q = s.to(torch.float32), q.to(torch.float32)
    value = torch.special.zeta(s, q)
    pole = (q <= 0) & (q == torch.floor(q))
    even = torch.fmod(s, 2) == 0  # not of infinite order
    value = torch.where(pole, torch.where(even, torch.inf, torch.nan), value)
    value = torch.where(torch.isfinite(s) & ~torch.isnan(q), value, torch.nan)
    return torch.where(s == 1, torch.inf, value).to(dtype)


@lax("polygamma", takes_numbers=True)
def polygamma(n: Any, x: Any) -> Any:
    order, x = as_tensor(n, x), as_tensor(x, n)
    dtype = x.dtype
    if dtype.itemsize < 4:
        order, x = order.to(torch.float32), x.to(torch.float32)
    sign = 1 - 2 * torch.fmod(order + 1, 2)
    value = sign * torch.exp(torch.lgamma(order + 1)) * _zeta(order + 1, x)
    value = torch.where((order > 0) & (order == torch.floor(order)), value, torch.nan)
    return torch.where(order == 0, digamma(x), value).to(dtype)
