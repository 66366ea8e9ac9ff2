"""Recognises the solution of linear systems by an LU factorisation, as in `jnp.linalg.solve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.programs import Call, Ref

_DTYPES = ("float32", "float64")


def system_of(
    eqn: Any, args: Sequence[Any], calls: Sequence[Call]
) -> tuple[tuple[Any, Any], dict[str, bool]] | None:
    """Returns the matrix and the right-hand side of a system that is solved by an LU factorisation.

    Matrix and right-hand side determine the solution and its derivative, so a target may use its
    own solver. The unknowns are along the last dimension of the right-hand side.

    Args:
        eqn: An equation.
        args: Its operands.
        calls: The calls before it.

    Returns:
        The operands, and whether the matrix is `transposed`; None for other equations, such as
        iterative solvers.
    """
    if eqn.primitive.name != "custom_linear_solve":
        return None
    counts = eqn.params["const_lengths"]
    if (counts.matvec, counts.solve) != (1, 2) or len(eqn.outvars) != 1:
        return None
    matrix, unknown = args[0], args[-1]
    if eqn.invars[-1].aval.dtype.name not in _DTYPES or not isinstance(matrix, Ref):
        return None
    product = eqn.params["jaxprs"].matvec.jaxpr
    is_transposed = _multiplies_transpose(product)
    if not (is_transposed or _multiplies_last(product)):
        return None
    factors = args[counts.matvec + counts.vecmat]
    if _factors_of(factors, calls) != matrix.name:
        return None
    return (matrix, unknown), {"transposed": is_transposed}


def _multiplies_last(jaxpr: Any) -> bool:
    """Returns whether a function multiplies a matrix and the last dimension of an array."""
    matrix, x = jaxpr.invars
    product, *turns = _steps(jaxpr)
    batch, rank = len(matrix.aval.shape) - 2, len(x.aval.shape)
    wanted = (((batch + 1,), (rank - 1,)), (tuple(range(batch)),) * 2)
    if not _is_product(product, [matrix, x], wanted) or rank - batch not in (1, 2):
        return False
    if rank - batch == 1:
        return not turns
    return (
        len(turns) == 1
        and turns[0].primitive.name == "transpose"
        and tuple(turns[0].params["permutation"]) == (*range(batch), batch + 1, batch)
    )


def _multiplies_transpose(jaxpr: Any) -> bool:
    """Returns whether a function multiplies the last dimension of an array and a matrix."""
    matrix, x = jaxpr.invars
    product, *turns = _steps(jaxpr)
    batch, rank = len(matrix.aval.shape) - 2, len(x.aval.shape)
    wanted = (((rank - 1,), (batch,)), (tuple(range(batch)),) * 2)
    return not turns and _is_product(product, [x, matrix], wanted) and rank - batch in (1, 2)


def _steps(jaxpr: Any) -> list[Any]:
    """Returns the equations of a chain, in which each takes the results of the one before."""
    before = None
    steps = []
    for eqn in jaxpr.eqns:
        if before is not None and [*eqn.invars] != [*before.outvars]:
            return [None]
        if eqn.primitive.name != "reduce_sum" or eqn.params["axes"]:
            steps.append(eqn)
        before = eqn
    is_whole = before is not None and jaxpr.outvars == before.outvars
    return steps if is_whole and steps else [None]


def _is_product(eqn: Any, operands: list[Any], wanted: Any) -> bool:
    if eqn is None or eqn.primitive.name != "dot_general" or [*eqn.invars] != operands:
        return False
    numbers = eqn.params["dimension_numbers"]
    return bool(tuple(tuple(tuple(map(int, dims)) for dims in pair) for pair in numbers) == wanted)


def _factors_of(value: Any, calls: Sequence[Call]) -> str:
    """Returns the name of the matrix whose LU factors a value contains; empty for other values."""
    made = {call.name: call for call in calls}
    for op in ("sym::getitem", "lax::lu", "lax::stop_gradient"):
        call = made.get(value.name) if isinstance(value, Ref) else None
        if call is None or call.op != op or (op == "sym::getitem" and call.args[1] != 0):
            return ""
        value = call.args[0]
    return str(value.name) if isinstance(value, Ref) else ""
