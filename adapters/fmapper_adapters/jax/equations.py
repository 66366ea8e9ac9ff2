"""Evaluates the equations of a function, with a rule that may replace them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

Rule = Callable[[Any, Sequence[Any]], Sequence[Any]]


def trace(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Returns the closed jaxpr of a function, and the tree of its results."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    return closed, jax.tree.structure(shape)


def evaluate(closed: Any, args: Sequence[Any], rule: Rule, inlined: type) -> list[Any]:
    """Evaluates a closed jaxpr, whose values need not be arrays.

    Args:
        closed: The jaxpr.
        args: A value for each of its inputs.
        rule: Returns the results of an equation for its operands.
        inlined: Functions with operands of this type are inlined.
    """
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit") and any(isinstance(x, inlined) for x in given):
            outputs: Sequence[Any] = evaluate(eqn.params["jaxpr"], given, rule, inlined)
        else:
            outputs = rule(eqn, given)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: Any, given: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Applies the primitive of an equation to operands, with its parameters or others."""
    rest = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    functions, rest = rest if isinstance(rest, tuple) else ((), rest)  # older releases of JAX
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*functions, *given, **rest)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]
