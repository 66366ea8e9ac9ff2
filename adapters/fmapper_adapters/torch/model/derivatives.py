"""Functions with a custom derivative, at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmapper_adapters.torch import _private

Tensor = torch.Tensor
Body = Callable[..., tuple[Tensor, ...]]


def call_with_derivative(
    body: Body,
    backward: Body | str,
    operands: Sequence[Tensor],
    *,
    differentiable: tuple[int, ...],
    cotangents: tuple[int, ...],
    constants: tuple[int, int] = (0, 0),
    once: str = "",
) -> tuple[Tensor, ...]:
    """Calls a function whose derivative is another function.

    Args:
        body: The function.
        backward: Maps the operands and the cotangents of results to the cotangents of operands; or
            the reason why there is none, which becomes the error on differentiation.
        operands: The constants of the function, those of `backward`, and the operands.
        differentiable: The operands that have derivatives.
        cotangents: The results that have derivatives.
        constants: The number of constants of each function.
        once: Why there is no second derivative; empty if there is one.
    """
    count, more = constants
    inner = (*operands[:count], *operands[count + more :])
    if not _is_differentiated(inner):
        return tuple(body(*inner))
    plan = body, backward, count, more, differentiable, cotangents, once
    if torch.compiler.is_compiling():  # compilers accept no tensor twice
        operands = [
            x.view_as(x) if any(x is y for y in operands[:i]) else x for i, x in enumerate(operands)
        ]
    results: tuple[Tensor, ...] = _Function.apply(plan, *operands)  # type: ignore[no-untyped-call]
    return results


call_with_derivative.is_control_flow = True  # type: ignore[attr-defined]


def _is_differentiated(tensors: Sequence[Tensor]) -> bool:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    return _private.is_in_transformation() or _private.is_dual()


class _Function(torch.autograd.Function):
    """A function and its derivative, both as modules."""

    generate_vmap_rule = True

    @staticmethod
    def forward(plan: Any, *operands: Tensor) -> Any:
        body, _, count, more, *_ = plan
        results = body(*operands[:count], *operands[count + more :])
        # autograd saves the operands, so none of them may be a result
        return tuple(y.view_as(y) if any(y is x for x in operands) else y for y in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        plan, *operands = inputs
        ctx.plan = plan
        ctx.count = len(operands)
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, backward, count, more, differentiable, cotangents, once = ctx.plan
        if isinstance(backward, str):
            raise RuntimeError(f"a custom derivative cannot be used here: {backward}")
        given = [gradients[i] for i in cotangents]
        results = backward(*ctx.saved_tensors[count:], *given)
        full: list[Any] = [None] * ctx.count
        for i, gradient in zip(differentiable, results, strict=True):
            full[count + more + i] = gradient
        if any(
            needed and i - count - more not in differentiable
            for i, needed in enumerate(ctx.needs_input_grad[1:])
        ):
            raise RuntimeError(
                "a function with a custom derivative is differentiated with respect to an array "
                "of an enclosing scope, which JAX does not support: pass the array as an argument"
            )
        return (None, *_without_derivatives(full, once))


def _without_derivatives(gradients: Sequence[Any], reason: str) -> Sequence[Any]:
    """Returns gradients that cannot be differentiated, if there is a reason for that."""
    if not reason or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradients
    tensors = [x for x in gradients if x is not None]
    remaining = iter(_Last.apply(reason, *tensors))  # type: ignore[no-untyped-call]
    return [None if x is None else next(remaining) for x in gradients]


class _Last(torch.autograd.Function):
    """Gradients without second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(reason: str, *gradients: Tensor) -> Any:
        return tuple(x.view_as(x) for x in gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.reason = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.reason)


def with_gradient(
    backward: Body | str,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    kept: Sequence[Tensor],
    places: Sequence[int],
    once: str = "",
) -> tuple[Tensor, ...]:
    """Attaches a derivative function to results.

    Args:
        backward: Maps the gradients of the results, and the saved values, to those of the
            arguments; or the reason why there is none, which becomes the error on
            differentiation.
        ys: The results.
        xs: The arguments.
        kept: The saved values.
        places: The argument that each result of `backward` belongs to.
        once: Why there is no second derivative; empty if there is one.
    """
    given = {id(x) for x in xs}
    positions = {id(y): i for i, y in enumerate(ys) if id(y) not in given}
    origins = tuple(positions.get(id(tensor)) for tensor in kept)
    plan = backward, len(ys), len(xs), tuple(places), origins, once
    results: tuple[Tensor, ...] = _WithGradient.apply(  # type: ignore[no-untyped-call]
        plan, *(y.detach() for y in ys), *xs, *kept
    )
    return results


class _WithGradient(torch.autograd.Function):
    """Results with a derivative that is computed by another function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(plan: Any, *tensors: Tensor) -> Any:
        return tuple(y.view_as(y) for y in tensors[: plan[1]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        plan, *tensors = inputs
        ctx.plan = plan
        ctx.count = len(tensors)
        kept = zip(tensors[plan[1] + plan[2] :], plan[4], strict=True)
        ctx.save_for_backward(*(tensor if i is None else output[i] for tensor, i in kept))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        backward, results, _, places, _, once = ctx.plan
        if isinstance(backward, str):
            raise RuntimeError(backward)
        full: list[Any] = [None] * ctx.count
        slopes = backward(*gradients, *ctx.saved_tensors)
        for place, gradient in zip(places, slopes, strict=True):
            full[results + place] = gradient
        return (None, *_without_derivatives(full, once))


with_gradient.is_control_flow = True  # type: ignore[attr-defined]
