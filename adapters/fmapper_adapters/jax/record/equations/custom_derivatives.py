"""Functions with a custom derivative, which becomes a program of its own."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from fmapper.programs.reading import parameters_at
from fmapper_adapters.jax.arrays import prng_keys
from fmapper_adapters.jax.record import frames

_CALLS = {"custom_jvp_call", "custom_vjp_call"}
_WITHIN = {"jit", "pjit"}
# Lineax's primitive: it computes a function among its parameters, and has its own derivative.
_OPENED = {"linear_solve"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that is called in a program.

    Attributes:
        name: Its name, such as `jax::relu` if JAX itself defines it.
        taken: Which operands have derivatives.
        given: Which results have derivatives.
        body: The computation of its results from all operands, as a closed jaxpr.
        differentiate: Makes the closed jaxpr from the operands and the cotangents of these results
            to the cotangents of some of these operands.
        names: The names of the operands in its code, if known.
        opens_rule: Returns whether the second derivative is that of the operations in the rule. It
            is not if the rule calls the function itself, whose derivative is used again.
    """

    name: str
    taken: tuple[int, ...]
    given: tuple[int, ...]
    body: Any
    differentiate: Callable[[tuple[int, ...]], Any]
    names: tuple[str, ...] = ()
    opens_rule: Callable[[], bool] = lambda: False

    @property
    def is_own(self) -> bool:
        """Whether JAX itself defines it."""
        return self.name.startswith("jax::")


def function_of(eqn: Any) -> Function | None:
    """Returns the function of an equation with a custom derivative; None for others.

    A sample of a gamma distribution and the solution of a linear system are such functions too:
    JAX finds both by loops that it does not differentiate.
    """
    name = eqn.primitive.name
    if name in _CALLS:
        body = eqn.params["call_jaxpr"]
        label = _label(body)
    elif name == "custom_linear_solve":
        body, label = _solution(eqn), "jax::custom_linear_solve"
    elif name in _OPENED:
        body, label = _trace_rule(eqn), name
    elif name == "random_gamma":
        return _gamma(eqn)
    else:
        return None
    count = eqn.params.get("num_consts", 0)  # from the scope around the function
    taken = tuple(i for i, v in enumerate(eqn.invars) if i >= count and _is_real(v.aval))
    given = tuple(i for i, v in enumerate(eqn.outvars) if _is_real(v.aval))
    names = () if label.startswith("jax::") else _names(body, len(eqn.invars) - count)
    names = tuple(f"held_{i}" for i in range(count)) + names if names else ()
    opens_rule = name in _CALLS and not label.startswith("jax::")  # whose rules are known
    return Function(
        label,
        taken,
        given,
        body,
        lambda some: _backward(eqn, some, given),
        names,
        lambda: opens_rule and not _calls_itself(eqn, taken, given),
    )


def results_of(eqn: Any) -> Callable[[list[Any]], list[Any]]:
    """Returns an equation as a function of its operands."""
    variables = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))
    names = ("",) * len(variables), ("",) * len(eqn.outvars)
    info = core.DebugInfo("fmapper", "equation", *names)
    alone = core.Jaxpr((), variables, eqn.outvars, [eqn], debug_info=info)

    def run(operands: list[Any]) -> list[Any]:
        pairs = zip(eqn.invars, operands, strict=True)
        env = {v: x for v, x in pairs if not isinstance(v, core.Literal)}
        return list(jax.core.eval_jaxpr(alone, (), *[env[v] for v in variables]))

    return run


def _backward(eqn: Any, taken: tuple[int, ...], given: tuple[int, ...]) -> Any:
    """Returns the derivative of an equation as a closed jaxpr."""
    run = results_of(eqn)

    def backward(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        def of(*inner: Any) -> list[Any]:
            full = list(operands)
            for i, value in zip(taken, inner, strict=True):
                full[i] = value
            results = run(full)
            return [results[i] for i in given]

        _, pull = jax.vjp(of, *[operands[i] for i in taken])
        return list(pull(cotangents))

    shapes = [_shape(v.aval) for v in eqn.invars]
    outs = [_shape(eqn.outvars[i].aval) for i in given]
    return jax.make_jaxpr(backward)(shapes, outs)


def _calls_itself(eqn: Any, taken: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Returns whether the rule of a function computes its results by calling the function.

    An example is `return f(x), x`. A second derivative is that of the operations in the rule.
    """
    run = results_of(eqn)

    def forward(operands: list[Any]) -> list[Any]:
        def of(*inner: Any) -> list[Any]:
            replaced = dict(zip(taken, inner, strict=True))
            return run([replaced.get(i, operand) for i, operand in enumerate(operands)])

        return list(jax.vjp(of, *[operands[i] for i in taken])[0])

    traced = jax.make_jaxpr(forward)([_shape(v.aval) for v in eqn.invars]).jaxpr
    last = {v: i for i, v in enumerate(eqn.invars) if not isinstance(v, core.Literal)}
    variables = [i for i in taken if not isinstance(eqn.invars[i], core.Literal)]
    wanted = {i: traced.invars[last[eqn.invars[i]]] for i in variables}
    text = str(eqn.params["call_jaxpr"])

    def is_same(i: int) -> bool:
        made, operands, at = _maker_of(traced, i, {})
        return (
            made is not None
            and (made.primitive.name, at, len(operands)) == (eqn.primitive.name, i, len(eqn.invars))
            and all(operands[place] is v for place, v in wanted.items())
            and str(made.params["call_jaxpr"]) == text
        )

    return all(map(is_same, given))


def _maker_of(jaxpr: Any, at: int, outer: Mapping[Any, Any]) -> tuple[Any, list[Any], int]:
    """Returns the equation that computes an output, its operands, and the index of its result.

    The equation may be in a nested jitted function.
    """
    wanted = jaxpr.outvars[at]
    for eqn in jaxpr.eqns:
        if any(v is wanted for v in eqn.outvars):
            operands = [v if isinstance(v, core.Literal) else outer.get(v, v) for v in eqn.invars]
            place = [v is wanted for v in eqn.outvars].index(True)
            if eqn.primitive.name not in _WITHIN:
                return eqn, operands, place
            inner = eqn.params["jaxpr"].jaxpr
            return _maker_of(inner, place, dict(zip(inner.invars, operands, strict=True)))
    return None, [], 0


def _solution(eqn: Any) -> Any:
    """Returns the solver of `custom_linear_solve` as a function of all operands."""
    counts = eqn.params["const_lengths"]
    solve = eqn.params["jaxprs"].solve
    first = counts.matvec + counts.vecmat
    after = first + counts.solve + counts.transpose_solve

    def run(*operands: Any) -> list[Any]:
        constants = operands[first : first + counts.solve]
        outputs = jax.core.eval_jaxpr(solve.jaxpr, solve.consts, *constants, *operands[after:])
        return list(outputs)

    return jax.make_jaxpr(run)(*[_shape(v.aval) for v in eqn.invars])


def _trace_rule(eqn: Any) -> Any:
    """Traces a primitive's own lowering rule to a closed jaxpr."""

    def run(*operands: Any) -> list[Any]:
        return list(eqn.primitive.impl(*operands, **eqn.params))

    return jax.make_jaxpr(run)(*[_shape(v.aval) for v in eqn.invars])


def _gamma(eqn: Any) -> Function:
    """Returns a gamma sample as JAX draws it, vectorised, with JAX's derivative."""
    primitive, in_logarithms = eqn.primitive, eqn.params["log_space"]
    draw = primitive.impl
    more = {"use_vmap": True} if "use_vmap" in inspect.signature(draw).parameters else {}
    shapes = [_shape(v.aval) for v in eqn.invars]

    def backward(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        key, alpha = operands
        sample = primitive.bind(key, alpha, log_space=in_logarithms)
        if not in_logarithms:
            return [cotangents[0] * jax.lax.random_gamma_grad(alpha, sample)]
        sample = jax.numpy.exp(sample)
        least = np.finfo(sample.dtype).tiny if sample.dtype.kind == "f" else 0
        sample = jax.numpy.where(sample == 0, least, sample)
        return [cotangents[0] * (jax.lax.random_gamma_grad(alpha, sample) / sample)]

    body = jax.make_jaxpr(lambda key, alpha: draw(key, alpha, log_space=in_logarithms, **more))
    return Function(
        "jax::random_gamma",
        (1,),
        (0,),
        body(*shapes),
        lambda _: jax.make_jaxpr(backward)(shapes, shapes[1:]),
    )


def _is_real(aval: Any) -> bool:
    if prng_keys.is_key(aval):
        return False
    return bool(jax.numpy.issubdtype(aval.dtype, np.inexact))


def _label(body: Any) -> str:
    """Returns the qualified name of a function."""
    info = getattr(getattr(body, "jaxpr", body), "debug_info", None)
    name, _, place = str(getattr(info, "func_src_info", "")).partition(" at ")
    return f"jax::{name}" if frames.is_of(place, ("jax",)) else name


def _names(body: Any, count: int) -> tuple[str, ...]:
    """Returns the names of a function's parameters if there are `count` of them, else none."""
    info = getattr(getattr(body, "jaxpr", body), "debug_info", None)
    name, _, place = str(getattr(info, "func_src_info", "")).partition(" at ")
    file, _, line = place.rpartition(":")
    names = getattr(info, "arg_names", None) or parameters_at(file, int(line or 0), name)
    is_usable = len(names) == count == len({*names}) and all(map(_is_name, names))
    return tuple(names) if is_usable else ()


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)


def _shape(aval: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(aval.shape, aval.dtype)
