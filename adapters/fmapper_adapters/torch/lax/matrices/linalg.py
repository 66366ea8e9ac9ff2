"""Linear algebra: factorisations, eigenvalues and solutions of systems."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model.emit import current

_MOST_STEPS = 128  # the most columns for which algorithms are unrolled


@lax("cholesky")
def cholesky(x: Any) -> Any:
    """Returns the lower factor, which is NaN for a matrix that is not positive definite.

    Above the diagonal are the elements of the matrix, as in LAPACK.
    """
    narrow = x.dtype
    x = _wide(x)
    factor, info = _parts(torch.linalg.cholesky_ex(x), 2)
    factor = factor + torch.triu(x.detach(), 1)
    return _narrow(torch.where((info == 0)[..., None, None], factor, float("nan")), narrow)


def _wide(x: Any) -> Any:
    """Casts halves to float32 for LAPACK."""
    return x.to(torch.float32) if x.is_floating_point() and x.dtype.itemsize < 4 else x


def _narrow(x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype is dtype else x.to(dtype)


def _parts(results: Any, count: int) -> tuple[Any, ...]:
    return tuple(results[i] for i in range(count))


@lax("lu", takes_avals=True)
def lu(x: Any, *, avals: Avals) -> Any:
    """Returns both factors in one matrix, the pivots and the permutation."""
    factors, pivots = _parts(torch.linalg.lu_factor_ex(x), 2)
    order = _permutation(pivots, x.shape[-2], x.shape[-1])
    return factors, pivots - 1, order


@lax("lu_pivots_to_permutation")
def lu_pivots_to_permutation(pivots: Any, *, permutation_size: int) -> Any:
    return _permutation(pivots + 1, permutation_size, pivots.shape[-1])


def _permutation(pivots: Any, rows: Any, columns: Any) -> Any:
    """Returns the permutation of rows that results from swaps, which are counted from 1."""
    shape = (*pivots.shape[:-1], rows, columns)
    if 0 in shape:
        order = current().make(torch.arange, rows, dtype=torch.int32)
        return order.expand((*pivots.shape[:-1], rows))
    blank = current().make(torch.zeros, shape, dtype=torch.float32)
    matrix = torch.lu_unpack(blank, pivots, unpack_data=False)[0]
    return torch.argmax(matrix, -2).to(torch.int32)


@lax("linalg_solve")
def linalg_solve(a: Any, b: Any, *, transposed: bool) -> Any:
    """Solves systems whose unknowns are along the last dimension, by LU factors."""
    if transposed:
        a = a.permute(_swap(a))
    if b.ndim < a.ndim:
        return torch.linalg.solve_ex(a, b.unsqueeze(-1))[0].squeeze(-1)
    return torch.linalg.solve_ex(a, b.permute(_swap(b)))[0].permute(_swap(b))


def _swap(x: Any) -> tuple[int, ...]:
    return (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)


@lax("triangular_solve")
def triangular_solve(
    a: Any,
    b: Any,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
) -> Any:
    if conjugate_a and a.is_complex():
        a = a.conj()
    if transpose_a:
        a, lower = a.transpose(-2, -1), not lower
    solution = torch.linalg.solve_triangular(
        _wide(a), _wide(b), upper=not lower, left=left_side, unitriangular=unit_diagonal
    )
    return _narrow(solution, b.dtype)


@lax("qr", takes_avals=True)
def qr(
    x: Any, *, full_matrices: bool, pivoting: bool = False, use_magma: Any = None, avals: Avals
) -> Any:
    """Returns the orthogonal and the triangular factor, and the pivoted order of columns."""
    order = _pivots(x) if pivoting else None
    if order is not None:
        x = torch.take_along_dim(x, order.unsqueeze(-2), -1)
    complete = full_matrices and x.shape[-2] > x.shape[-1]
    factors = _parts(torch.linalg.qr(x, "complete" if complete else "reduced"), 2)
    return factors if order is None else (*factors, order.to(torch.int32))


def _pivots(x: Any) -> Any:
    """Returns the pivoted order of columns: the largest remaining norm first.

    Raises:
        ConversionError: There are too many columns to unroll this.
    """
    columns = x.shape[-1]
    steps = min(x.shape[-2], columns)
    if steps > _MOST_STEPS:
        raise ConversionError(
            f"qr with pivoting of {steps} columns: torch does not support it, and it is unrolled "
            f"for at most {_MOST_STEPS} columns. Use qr without pivoting, or svd"
        )
    rest = x.detach()
    places = current().make(torch.arange, columns)
    order = places.expand((*x.shape[:-2], columns))
    for k in range(steps):
        sizes = torch.sum(torch.abs(rest) ** 2, -2)
        best = torch.argmax(torch.where(places >= k, sizes, -1.0), -1, keepdim=True)
        swap = torch.where(places == k, best, torch.where(places == best, k, places))
        order = torch.gather(order, -1, swap)
        rest = torch.take_along_dim(rest, swap.unsqueeze(-2), -1)
        column = torch.narrow(rest, -1, k, 1)
        length = torch.sum(torch.abs(column) ** 2, -2, keepdim=True)
        share = torch.matmul(torch.adjoint(column), rest) / torch.where(length == 0, 1, length)
        rest = rest - column * share
    return order


@lax("geqrf")
def geqrf(x: Any) -> Any:
    return _parts(torch.geqrf(x), 2)


@lax("householder_product")
def householder_product(x: Any, taus: Any) -> Any:
    return torch.linalg.householder_product(x, taus)


@lax("ormqr")
def ormqr(x: Any, taus: Any, c: Any, *, left: bool, transpose: bool) -> Any:
    return torch.ormqr(x, taus, c, left, transpose)


@lax("eigh")
def eigh(
    x: Any,
    *,
    lower: bool,
    sort_eigenvalues: bool = True,
    subset_by_index: Any = None,
    algorithm: Any = None,
) -> Any:
    """Returns eigenvectors, then eigenvalues in ascending order."""
    values, vectors = _parts(torch.linalg.eigh(x, "L" if lower else "U"), 2)
    if subset_by_index is not None:
        start, end = subset_by_index
        values = torch.narrow(values, -1, start, end - start)
        vectors = torch.narrow(vectors, -1, start, end - start)
    return vectors, values


@lax("eig")
def eig(
    x: Any,
    *,
    compute_left_eigenvectors: bool,
    compute_right_eigenvectors: bool,
    enable_eigvec_derivs: bool = False,
    implementation: Any = None,
) -> Any:
    """Returns eigenvalues, then left and right eigenvectors; torch computes only the right ones."""
    if not (compute_left_eigenvectors or compute_right_eigenvectors):
        return (torch.linalg.eigvals(x),)
    values, right = _parts(torch.linalg.eig(x), 2)
    results = [values]
    if compute_left_eigenvectors:
        results.append(_left_eigenvectors(right))
    if compute_right_eigenvectors:
        results.append(right)
    return tuple(results)


def _left_eigenvectors(right: Any) -> Any:
    """Returns left eigenvectors of norm 1, whose largest element is real."""
    if 0 in right.shape:
        return right
    left = torch.adjoint(torch.linalg.inv(right))
    left = left / torch.linalg.vector_norm(left, dim=-2, keepdim=True)
    at = torch.argmax(torch.abs(left), -2, keepdim=True)
    return left * torch.conj(torch.sgn(torch.gather(left, -2, at)))


@lax("svd")
def svd(
    x: Any,
    *,
    compute_uv: bool,
    full_matrices: bool,
    subset_by_index: Any = None,
    algorithm: Any = None,
) -> Any:
    """Returns singular values, then the left and right vectors."""
    if compute_uv:
        full = full_matrices and x.shape[-1] != x.shape[-2]  # has a gradient if square
        left, values, right = _parts(torch.linalg.svd(x, full), 3)
    else:
        values = torch.linalg.svdvals(x)
    if subset_by_index is not None:
        start, end = subset_by_index
        values = torch.narrow(values, -1, start, end - start)
        if compute_uv:
            left = torch.narrow(left, -1, start, end - start)
            right = torch.narrow(right, -2, start, end - start)
    return (values, left, right) if compute_uv else (values,)


@lax("symmetric_product")
def symmetric_product(a: Any, c: Any, *, alpha: float, beta: float) -> Any:
    result = alpha * torch.matmul(a, a.transpose(-2, -1))
    return result + beta * c if beta else result


@lax("tridiagonal_solve")
def tridiagonal_solve(
    below: Any, diagonal: Any, above: Any, b: Any, *, perturb_singular: bool = False
) -> Any:
    """Solves a tridiagonal system; the unused ends of the outer diagonals are ignored.

    Raises:
        ConversionError: The option to perturb singular systems is set.
    """
    if perturb_singular:
        raise ConversionError(
            "tridiagonal_solve with perturb_singular=True: torch does not support it; omit it"
        )
    size = diagonal.shape[-1]
    matrix = torch.diag_embed(diagonal)
    if not isinstance(size, int) or size > 1:
        matrix = matrix + torch.diag_embed(torch.narrow(below, -1, 1, size - 1), -1)
        matrix = matrix + torch.diag_embed(torch.narrow(above, -1, 0, size - 1), 1)
    return torch.linalg.solve(matrix, b)
