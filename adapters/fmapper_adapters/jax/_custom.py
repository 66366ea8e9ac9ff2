"""Functions with a derivative of their own, with that derivative as a program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core

# Of JAX's own, where the derivative is that of what is computed, or the target has it whole.
_NATURAL = {"relu", "silu", "_silu", "softmax", "_softmax", "relu6", "log_softmax", "_log_softmax"}


def derivative(eqn: Any) -> dict[str, Any]:
    """What a call of such a function holds beside its parameters; nothing for other calls.

    Returns:
        `function`: its name. `differentiable`, `cotangents`: which operands and which results have
        derivatives. `backward`: the program from the operands and the cotangents of those results
        to the cotangents of those operands; not there where it is that of what is computed.
    """
    if eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return {}
    name, is_own = _function(eqn)
    avals = [v.aval for v in eqn.invars]
    taken = [i for i, aval in enumerate(avals) if _is_real(aval)]
    given = [i for i, v in enumerate(eqn.outvars) if _is_real(v.aval)]
    found: dict[str, Any] = {
        "function": name,
        "differentiable": tuple(taken),
        "cotangents": tuple(given),
    }
    if not taken or not given or (name in _NATURAL and is_own):
        return found

    variables = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))
    alone = core.Jaxpr((), variables, eqn.outvars, [eqn])

    def run(*operands: Any) -> list[Any]:
        pairs = zip(eqn.invars, operands, strict=True)
        known = {v: x for v, x in pairs if not isinstance(v, core.Literal)}
        results = jax.core.eval_jaxpr(alone, (), *[known[v] for v in variables])
        return [results[i] for i in given]

    def backward(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        def of(*inner: Any) -> list[Any]:
            full = list(operands)
            for i, value in zip(taken, inner, strict=True):
                full[i] = value
            return run(*full)

        _, pull = jax.vjp(of, *[operands[i] for i in taken])
        return list(pull(cotangents))

    shapes = [_shape(a) for a in avals]
    outs = [eqn.outvars[i].aval for i in given]
    found["backward"] = jax.make_jaxpr(backward)(shapes, [_shape(a) for a in outs])
    return found


def _is_real(aval: Any) -> bool:
    return bool(np.issubdtype(aval.dtype, np.inexact)) or str(aval.dtype).startswith(
        ("bfloat", "float8")
    )


def _function(eqn: Any) -> tuple[str, bool]:
    """The name of the function, and whether it is one of JAX's own."""
    jaxpr = getattr(eqn.params["call_jaxpr"], "jaxpr", eqn.params["call_jaxpr"])
    info = getattr(jaxpr, "debug_info", None)
    name, _, place = str(getattr(info, "func_src_info", "")).partition(" at ")
    return name, "/jax/_src/" in place


def _shape(aval: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(aval.shape, aval.dtype)
