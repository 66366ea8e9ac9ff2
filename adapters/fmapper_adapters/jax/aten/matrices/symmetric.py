"""Factors of symmetric matrices that need not be definite: L D L^T with pivots.

The method and the form of its results are those of LAPACK's `sytrf` and `hetrf` for the lower
triangle: Bunch and Kaufman, Some stable methods for calculating inertia and solving symmetric
linear systems, Mathematics of Computation 31 (1977). Like torch's they have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import is_complex

_ALPHA = (1 + 17**0.5) / 8  # bounds the growth of elements in Bunch and Kaufman's method


@lowering("aten::linalg_ldl_factor_ex")
def ldl_factor(
    a: Any, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns L below the blocks of D, the pivots counted from one, and the first zero of D.

    Two equal negative pivots mark a block of two rows.
    """
    n = a.shape[-1]
    conj = jnp.conj if hermitian else _same
    lower = jnp.tril(a, -1)
    diagonal = jnp.diagonal(a, 0, -2, -1)
    diagonal = diagonal.real.astype(a.dtype) if hermitian else diagonal
    full = (
        lower + conj(jnp.swapaxes(lower, -1, -2)) + diagonal[..., None] * jnp.eye(n, dtype=a.dtype)
    )
    start = jnp.zeros((n,), "int32")

    def factor(matrix: Any) -> Any:
        def step(state: Any) -> Any:
            return _eliminate(state, conj)

        state = (jnp.int32(0), matrix, start, jnp.int32(0))
        return jax.lax.while_loop(lambda state: state[0] < n, step, state)

    if n == 0:
        return a, jnp.zeros(a.shape[:-1], "int32"), jnp.zeros(a.shape[:-2], "int32")
    _, full, pivots, info = _over_batch(factor, full)
    return jnp.tril(full), pivots, info


def _same(x: Any) -> Any:
    return x


def _over_batch(function: Callable[..., Any], *arrays: Any) -> Any:
    """Maps a function of matrices over the dimensions in front of those of the first array."""
    for _ in range(arrays[0].ndim - 2):
        function = jax.vmap(function)
    return function(*arrays)


def _eliminate(state: Any, conj: Callable[[Any], Any]) -> Any:
    """Eliminates the next one or two rows; the remainder is kept in both triangles."""
    k, a, pivots, info = state
    n = a.shape[-1]
    rows = jnp.arange(n)
    # as LAPACK measures complex numbers
    size = jnp.abs(a.real) + jnp.abs(a.imag) if is_complex(a) else jnp.abs(a)
    here = size[k, k]
    column = jnp.where(rows > k, size[:, k], 0)
    largest = jnp.argmax(column)
    row = jnp.where((rows >= k) & (rows != largest), size[:, largest], 0)
    of_column, of_row = column[largest], jnp.max(row)
    is_zero = jnp.maximum(here, of_column) == 0
    stays = (here >= _ALPHA * of_column) | (here * of_row >= _ALPHA * of_column * of_column)
    stays = stays | is_zero
    single = stays | (size[largest, largest] >= _ALPHA * of_row)
    chosen = jnp.where(stays, k, largest)
    last = jnp.where(single, k, k + 1)
    # what is already eliminated keeps its order, as in LAPACK
    order = rows.at[last].set(chosen).at[chosen].set(last)
    rest = (rows[:, None] >= k) & (rows >= k)
    a = jnp.where(rest, a[order][:, order], a)

    below = rows > last
    next_row = jnp.minimum(k + 1, n - 1)
    w = jnp.stack([a[:, k], jnp.where(single, 0, a[:, next_row])], 1) * below[:, None]
    d = a[k, k]
    one = jnp.stack([w[:, 0] / jnp.where(is_zero, 1, d), jnp.zeros_like(w[:, 0])], 1)
    two = w @ _inverse(d, a[k, next_row], a[next_row, k], a[next_row, next_row], single)
    factors = jnp.where(single, one, two)
    a = a - jnp.where(is_zero, 0, factors @ conj(w).T)
    a = a.at[:, k].set(jnp.where(below, factors[:, 0], a[:, k]))
    second = jnp.where(below & ~single, factors[:, 1], a[:, next_row])
    a = a.at[:, next_row].set(second)
    pivot = jnp.where(single, chosen + 1, -chosen - 1).astype("int32")
    pivots = jnp.where((rows >= k) & (rows <= last), pivot, pivots)
    info = jnp.where((info == 0) & is_zero, k + 1, info)
    return last.astype("int32") + 1, a, pivots, info


def _inverse(a: Any, b: Any, c: Any, d: Any, unused: Any) -> Any:
    """Inverts the matrix of rows (a, b) and (c, d)."""
    determinant = jnp.where(unused, 1, a * d - b * c)
    return jnp.stack([jnp.stack([d, -b]), jnp.stack([-c, a])]) / determinant


@lowering("aten::linalg_ldl_solve")
def ldl_solve(factors: Any, pivots: Any, b: Any, *, hermitian: bool = False) -> jax.Array:
    """Solves A X = B with the factors of A from `ldl_factor`."""
    n = factors.shape[-1]
    batch = jnp.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    factors, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (factors, b))
    pivots = jnp.broadcast_to(pivots, (*batch, n))
    conj = jnp.conj if hermitian else _same
    if 0 in b.shape:
        return b

    def solve(f: Any, p: Any, x: Any) -> Any:
        def down(state: Any) -> Any:
            return _down(state, f, p, conj)

        def up(state: Any) -> Any:
            return _up(state, f, p, conj)

        _, x = jax.lax.while_loop(lambda state: state[0] < n, down, (jnp.int32(0), x))
        return jax.lax.while_loop(lambda state: state[0] >= 0, up, (jnp.int32(n - 1), x))[1]

    return jnp.asarray(_over_batch(solve, factors, pivots, b))


def _swap(x: Any, i: Any, j: Any) -> Any:
    return x.at[i].set(x[j]).at[j].set(x[i])


def _down(state: Any, f: Any, pivots: Any, conj: Callable[[Any], Any]) -> Any:
    """Runs one step of solving with L and D: one row, or the two rows of a block."""
    k, x = state
    n = f.shape[-1]
    rows = jnp.arange(n)
    single = pivots[k] > 0
    next_row = jnp.minimum(k + 1, n - 1)
    last = jnp.where(single, k, next_row)
    x = _swap(x, last, jnp.abs(pivots[k]) - 1)
    below = rows > last
    x = x - jnp.where(below, f[:, k], 0)[:, None] * x[k]
    x = x - jnp.where(below & ~single, f[:, next_row], 0)[:, None] * x[next_row]
    c = f[next_row, k]
    block = _inverse(f[k, k], conj(c), c, f[next_row, next_row], single)
    pair = block @ jnp.stack([x[k], x[next_row]])
    first, second = jnp.where(single, x[k] / f[k, k], pair[0]), pair[1]
    # the second row first, since for the last row both are the same
    x = x.at[next_row].set(jnp.where(single, x[next_row], second)).at[k].set(first)
    return last.astype("int32") + 1, x


def _up(state: Any, f: Any, pivots: Any, conj: Callable[[Any], Any]) -> Any:
    """Runs one step of solving with the transposed L, from the last row up."""
    k, x = state
    rows = jnp.arange(f.shape[-1])
    single = pivots[k] > 0
    before = jnp.maximum(k - 1, 0)
    below = rows > k
    x = x.at[k].add(-(jnp.where(below, conj(f[:, k]), 0) @ x))
    x = x.at[before].add(-(jnp.where(below & ~single, conj(f[:, before]), 0) @ x))
    x = _swap(x, k, jnp.abs(pivots[k]) - 1)
    return jnp.where(single, k - 1, k - 2).astype("int32"), x
