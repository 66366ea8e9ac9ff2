"""Special functions that torch lacks, or whose derivatives it lacks, as functions of tensors.

They sum terms in double precision until all elements have converged. While a graph is recorded,
convergence cannot be checked, and they sum JAX's largest number of terms for float32.
"""

from __future__ import annotations

from typing import Any

import torch

_TERMS = 200  # if convergence cannot be checked
_MOST = 20_000
_EVERY = 8  # terms between checks of convergence

Tensor = torch.Tensor


def _steps(x: Tensor) -> tuple[int, bool]:
    """Returns the largest number of terms, and whether values may be inspected."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return _TERMS, False
    return _MOST, True


class _IncompleteGamma(torch.autograd.Function):
    """The regularized incomplete gamma functions, differentiable by both arguments."""

    @staticmethod
    def forward(a: Tensor, x: Tensor, upper: bool) -> Tensor:
        function = torch.special.gammaincc if upper else torch.special.gammainc
        value = function(a.double(), x.double())  # torch's float32 is accurate to five digits
        # Follows JAX's series and fraction at zero and infinity, limits or not.
        value = torch.where((x == torch.inf) & (a >= 0), 0.0 if upper else 1.0, value)
        unknown = torch.isnan(a) | torch.isnan(x) | ((a == 0) & (x <= 0 if upper else x < 1))
        unknown = unknown | ((a == torch.inf) & (x >= 1) & (x < torch.inf))
        return torch.where(unknown, torch.nan, value).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.upper = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, x = ctx.saved_tensors
        (grad,) = grads
        sign = -1 if ctx.upper else 1
        by_a = by_x = None
        if ctx.needs_input_grad[0]:
            by_a = grad * sign * gamma_slope(a, x)[0]
        if ctx.needs_input_grad[1]:
            by_x = grad * sign * torch.exp(torch.xlogy(a - 1, x) - x - torch.lgamma(a))
        return by_a, by_x, None


def incomplete_gamma(a: Tensor, x: Tensor, upper: bool) -> tuple[Tensor]:
    """Computes P(a, x), or Q(a, x) if `upper`, of tensors of one shape and dtype."""
    return (_IncompleteGamma.apply(a, x, upper),)  # type: ignore[no-untyped-call]


def gamma_slope(a: Tensor, x: Tensor) -> tuple[Tensor]:
    """Returns the derivative of P(a, x) by a, from the series of P (DLMF 8.11.4)."""
    dtype = x.dtype
    a, x = a.detach().double(), x.detach().double()
    logarithm = torch.log(x)
    term = torch.exp(a * logarithm - x - torch.lgamma(a + 1))
    slope = logarithm - torch.digamma(a + 1)
    total = term * slope
    most, visible = _steps(x)
    for n in range(1, most):
        term = term * x / (a + n)
        slope = slope - 1 / (a + n)
        total = total + term * slope
        if visible and n % _EVERY == 0:
            small = torch.abs(term * slope) < 1e-17 * torch.abs(total) + 1e-300
            if bool((small & (a + n > x) | ~torch.isfinite(total)).all()):
                break
    total = torch.where(x == 0, 0.0, total)
    total = torch.where((x < 0) | (a <= 0) | torch.isnan(a) | torch.isnan(x), torch.nan, total)
    return (total.to(dtype),)


class _IncompleteBeta(torch.autograd.Function):
    """The regularized incomplete beta function, differentiable by its last argument."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return _beta(a.double(), b.double(), x.double()).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            raise RuntimeError("betainc has no derivative with respect to a and b, in JAX either")
        a, b, x = ctx.saved_tensors
        whole = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        slope = torch.exp(torch.special.xlog1py(b - 1, -x) + torch.xlogy(a - 1, x) - whole)
        return None, None, grads[0] * slope


def incomplete_beta(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor]:
    """Computes I_x(a, b) of tensors of one shape and dtype by continued fraction (DLMF 8.17.22)."""
    return (_IncompleteBeta.apply(a, b, x),)  # type: ignore[no-untyped-call]


def _beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    nothing = (a == 0) | torch.isinf(b)
    everything = (b == 0) | torch.isinf(a)
    unknown = (a < 0) | (b < 0) | ~((x >= 0) & (x <= 1)) | torch.isnan(a + b)
    zero = (everything & (x != 1)) | (nothing & (x == 0)) | (x == 0)
    one = (nothing & (x != 0)) | (everything & (x == 1)) | (x == 1)
    turned = x >= (a + 1) / (a + b + 2)
    p, q = torch.where(turned, b, a), torch.where(turned, a, b)
    y = torch.where(turned, 1 - x, x)
    power = torch.xlogy(p, y) + torch.special.xlog1py(q, -y)
    front = torch.exp(power - torch.lgamma(p) - torch.lgamma(q) + torch.lgamma(p + q)) / p
    value = front * _fraction(p, q, y)
    value = torch.where(turned, 1 - value, value)
    value = torch.where(one, 1.0, torch.where(zero, 0.0, value))
    return torch.where(unknown | (nothing & everything), torch.nan, value)


def _fraction(p: Tensor, q: Tensor, y: Tensor) -> Tensor:
    """Evaluates the continued fraction by Lentz's method, away from division by zero."""
    least = 1e-300
    upper = torch.ones_like(y)
    lower = 1 - (p + q) * y / (p + 1)
    lower = 1 / torch.where(torch.abs(lower) < least, least, lower)
    fraction = lower
    most, visible = _steps(y)
    for m in range(1, most):
        even = m * (q - m) * y / ((p + 2 * m - 1) * (p + 2 * m))
        odd = -(p + m) * (p + q + m) * y / ((p + 2 * m) * (p + 2 * m + 1))
        change = upper
        for part in (even, odd):
            lower = 1 + part * lower
            upper = 1 + part / upper
            lower = 1 / torch.where(torch.abs(lower) < least, least, lower)
            upper = torch.where(torch.abs(upper) < least, least, upper)
            change = lower * upper
            fraction = fraction * change
        if visible and m % _EVERY == 0 and bool((torch.abs(change - 1) < 5e-16).logical_or(
            ~torch.isfinite(change)).all()):  # fmt: skip
            break
    return fraction


_WHOLE: tuple[Any, ...] = (incomplete_gamma, gamma_slope, incomplete_beta)
for _function in _WHOLE:
    _function.is_control_flow = True  # the emitter does not run it on fake tensors
