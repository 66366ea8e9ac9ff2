"""Factorisations of matrices, and solvers that use them.

Where torch raises at run time, as for the Cholesky factor of an indefinite matrix or the inverse of
    a singular one, results are NaN or infinite here: a compiled program cannot raise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import cast, dtype_of, is_complex, wide


def _h(x: Any) -> jax.Array:
    """Returns the conjugate transposes of matrices."""
    y = jnp.swapaxes(x, -1, -2)
    return y.conj() if is_complex(y) else y


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _hermitian(a: Any, lower: bool, symmetric: bool = True) -> Any:
    """Completes Hermitian matrices from one triangle.

    As in torch, gradients reach the whole matrix, and are symmetrised if `symmetric`.
    """
    half = jnp.tril(a) if lower else jnp.triu(a)
    rest = jnp.tril(a, -1) if lower else jnp.triu(a, 1)
    if jnp.iscomplexobj(a):  # the imaginary parts of the diagonal are ignored
        half = rest + jnp.where(jnp.eye(a.shape[-1], dtype=bool), a.real, 0)
    return half + _h(rest)


@_hermitian.defjvp
def _hermitian_jvp(lower: bool, symmetric: bool, primals: Any, tangents: Any) -> Any:
    (da,) = tangents
    return _hermitian(*primals, lower, symmetric), (da + _h(da)) / 2 if symmetric else da


def _broadcast_batch(*matrices: Any) -> tuple[Any, ...]:
    """Returns matrices with one shape of batch dimensions."""
    batch = jnp.broadcast_shapes(*(m.shape[:-2] for m in matrices))
    return tuple(jnp.broadcast_to(m, (*batch, *m.shape[-2:])) for m in matrices)


def _lu(a: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns factors in one matrix, the rows that were swapped counted from one, and info.

    Info is the place, from one, of the first zero on the diagonal of U, or zero.
    """
    lu, pivots, _ = jax.lax.linalg.lu(a)
    zero = jnp.diagonal(lu, 0, -2, -1) == 0
    if zero.shape[-1] == 0:
        return lu, pivots + 1, jnp.zeros(a.shape[:-2], "int32")
    info = jnp.where(jnp.any(zero, -1), jnp.argmax(zero, -1) + 1, 0)
    return lu, pivots + 1, info.astype("int32")


def _permutation(pivots: Any, size: int) -> jax.Array:
    """Converts swaps of rows, counted from one, to the source index of each row."""
    return jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, size)


def _lower_upper(lu: Any) -> tuple[jax.Array, jax.Array]:
    m, n = lu.shape[-2:]
    k = min(m, n)
    lower = jnp.tril(lu[..., :, :k], -1) + jnp.eye(m, k, dtype=lu.dtype)
    return lower, jnp.triu(lu[..., :k, :])


@lowering("aten::linalg_lu_factor_ex")
def lu_factor(
    a: Any, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns L and U in one matrix, the swapped rows counted from one, and info."""
    _with_pivots(pivot)
    return _lu(a)


@lowering("aten::_lu_with_info", whole=False)
def lu_with_info(
    a: Any, pivot: bool = True, check_errors: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Factors as `lu_factor` does."""
    _with_pivots(pivot)
    return _lu(a)


@lowering("aten::linalg_lu")
def lu(a: Any, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns P, L and U, whose product is the matrix."""
    _with_pivots(pivot)
    packed, pivots, _ = _lu(a)
    return lu_unpack(packed, pivots)


def _with_pivots(pivot: bool) -> None:
    if not pivot:
        raise ValueError("LU without pivoting does not exist in JAX; use pivot=True")


@lowering("aten::lu_unpack")
def lu_unpack(
    lu: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns P, L and U from the results of `lu_factor`; those not requested are empty."""
    nothing = jnp.zeros((0,), lu.dtype)
    p = lower = upper = nothing
    if unpack_pivots:
        m = lu.shape[-2]
        rows = _permutation(pivots, m)
        p = (rows[..., None, :] == jnp.arange(m)[:, None]).astype(lu.dtype)
    if unpack_data:
        lower, upper = _lower_upper(lu)
    return p, lower, upper


@lowering("aten::linalg_lu_solve")
def lu_solve(
    lu: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    """Solves A X = B, or X A = B for `left=False`; for `adjoint`, A is replaced by its adjoint."""
    if not left:
        return _h(lu_solve(lu, pivots, _h(b), adjoint=not adjoint))
    batch = jnp.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    lu, b = _broadcast_batch(lu, b)
    n = lu.shape[-1]
    rows = jnp.broadcast_to(_permutation(pivots, n), (*batch, n))[..., None]
    solve = jax.lax.linalg.triangular_solve
    if not adjoint:
        b = jnp.take_along_axis(b, rows, -2)
        y = solve(lu, b, left_side=True, lower=True, unit_diagonal=True)
        return solve(lu, y, left_side=True, lower=False)
    options: Any = {"left_side": True, "transpose_a": True, "conjugate_a": is_complex(lu)}
    y = solve(lu, b, lower=False, **options)
    y = solve(lu, y, lower=True, unit_diagonal=True, **options)
    return jnp.take_along_axis(y, jnp.argsort(rows, -2), -2)


@lowering("aten::_linalg_det")
def det(a: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns determinants, and the factors they are computed from."""
    packed, pivots, _ = _lu(a)
    return jnp.linalg.det(a), packed, pivots


@lowering("aten::_linalg_slogdet")
def slogdet(a: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns signs and logarithms of determinants, and the factors they are computed from."""
    sign, log = jnp.linalg.slogdet(a)
    packed, pivots, _ = _lu(a)
    return sign, log, packed, pivots


@lowering("aten::_linalg_solve_ex")
def solve_ex(
    a: Any, b: Any, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the solution of A X = B, or of X A = B; B may be vectors, one for each matrix."""
    packed, pivots, info = _lu(a)
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    x = b[..., None] if is_vector else b
    if left:
        x = jnp.linalg.solve(*_broadcast_batch(a, x))
    else:
        a, x = _broadcast_batch(a, x)
        x = jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(x, -1, -2)), -1, -2)
    return x[..., 0] if is_vector else x, packed, pivots, info


@lowering("aten::linalg_inv_ex")
def inv_ex(a: Any, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns inverses, and the place of the first zero on the diagonal of U."""
    return jnp.linalg.inv(a), _lu(a)[2]


@lowering("aten::linalg_cholesky_ex")
def cholesky_ex(
    a: Any, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Factors a positive definite matrix; info is the order of the first non-positive minor.

    Only one triangle is read.
    """
    b = _hermitian(a, not upper)
    factor = jnp.tril(jax.lax.linalg.cholesky(b, symmetrize_input=False))
    return (_h(factor) if upper else factor), _first_indefinite_minor(b, factor)


def _first_indefinite_minor(a: Any, factor: Any) -> jax.Array:
    n = a.shape[-1]
    batch = a.shape[:-2]
    if a.size == 0:
        return jnp.zeros(batch, "int32")

    def search(a: Any) -> Any:
        def is_indefinite(k: Any) -> Any:
            inside = jnp.arange(n) < k
            minor = jnp.where(inside[:, None] & inside, a, jnp.eye(n, dtype=a.dtype))
            lower = jax.lax.linalg.cholesky(minor, symmetrize_input=False)
            return jnp.any(jnp.isnan(lower), (-1, -2))

        indefinite = jax.lax.map(is_indefinite, jnp.arange(1, n + 1))
        return jnp.where(jnp.any(indefinite, 0), jnp.argmax(indefinite, 0) + 1, 0).astype("int32")

    failed = jnp.any(jnp.isnan(factor))
    a = jax.lax.stop_gradient(a)
    return jax.lax.cond(failed, search, lambda _: jnp.zeros(batch, "int32"), a)


@lowering("aten::cholesky")
def cholesky(a: Any, upper: bool = False) -> jax.Array:
    """Returns the factor of a positive definite matrix."""
    return cholesky_ex(a, upper=upper)[0]


@lowering("aten::cholesky_solve")
def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> jax.Array:
    """Returns the solution of A X = B for the Cholesky factor of A."""
    factor, b = _broadcast_batch(factor, b)
    lower = _h(factor) if upper else factor
    solve = jax.lax.linalg.triangular_solve
    y = solve(lower, b, left_side=True, lower=True)
    return solve(
        lower, y, left_side=True, lower=True, transpose_a=True, conjugate_a=is_complex(lower)
    )


@lowering("aten::cholesky_inverse")
def cholesky_inverse(factor: Any, upper: bool = False) -> jax.Array:
    """Returns the inverse of A for the Cholesky factor of A."""
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return cholesky_solve(eye, factor, upper)


@lowering("aten::linalg_solve_triangular")
def solve_triangular(
    a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    """Returns the solution of A X = B, or of X A = B, for triangular A."""
    a, b = _broadcast_batch(a, b)
    return jax.lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@lowering("aten::triangular_solve")
def triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the solution of A X = B, or with A transposed, and A."""
    a, b = _broadcast_batch(a, b)
    x = jax.lax.linalg.triangular_solve(
        a,
        b,
        left_side=True,
        lower=not upper,
        transpose_a=transpose,
        unit_diagonal=unitriangular,
    )
    return x, a


@lowering("aten::linalg_qr")
def qr(a: Any, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    """Returns orthonormal columns and a triangular matrix; for mode "r" the first is empty."""
    if mode == "r":
        return jnp.zeros((0,), a.dtype), jnp.linalg.qr(a, mode="r")
    q, r = jnp.linalg.qr(a, mode=mode)
    return q, r


@lowering("aten::geqrf")
def geqrf(a: Any) -> tuple[jax.Array, jax.Array]:
    """Returns reflectors below the diagonal and R above it, and the reflectors' scales."""
    h, tau = jnp.linalg.qr(a, mode="raw")
    return jnp.swapaxes(h, -1, -2), tau


@lowering("aten::linalg_householder_product")
def householder_product(a: Any, tau: Any) -> jax.Array:
    """Returns the first columns of the product of reflectors."""
    m, n = a.shape[-2:]
    eye = jnp.broadcast_to(jnp.eye(m, n, dtype=a.dtype), a.shape)
    return _reflect(a, tau, eye, first_last=True, conjugate=False)


@lowering("aten::ormqr")
def ormqr(a: Any, tau: Any, b: Any, left: bool = True, transpose: bool = False) -> jax.Array:
    """Returns the product of the reflectors' matrix, or of its adjoint, with another one."""
    if left:
        return _reflect(a, tau, b, first_last=not transpose, conjugate=transpose)
    return _h(_reflect(a, tau, _h(b), first_last=transpose, conjugate=not transpose))


def _reflect(a: Any, tau: Any, b: Any, *, first_last: bool, conjugate: bool) -> jax.Array:
    """Returns each reflector `I - tau v v^H` times b, one after the other."""
    vectors = jnp.tril(a, -1) + jnp.eye(a.shape[-2], a.shape[-1], dtype=a.dtype)
    scales = tau.conj() if conjugate and is_complex(tau) else tau
    count = tau.shape[-1]
    if count == 0:
        return b

    def step(i: Any, b: Any) -> Any:
        at = count - 1 - i if first_last else i
        v = jnp.take(vectors, at, axis=-1)[..., None]
        return b - jnp.take(scales, at, axis=-1)[..., None, None] * (v @ (_h(v) @ b))

    return jax.lax.fori_loop(0, count, step, b)


@lowering("aten::_linalg_svd")
def svd(
    a: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns U, the singular values and V^H; without vectors the two are empty."""
    if not compute_uv:
        nothing = jnp.zeros((0,), a.dtype)
        return nothing, jnp.linalg.svd(a, compute_uv=False), nothing
    u, s, vh = jnp.linalg.svd(a, full_matrices=full_matrices)
    return u, s, vh


@lowering("aten::_linalg_eigh")
def eigh(a: Any, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    """Returns eigenvalues in ascending order and eigenvectors; only one triangle is read."""
    a = _hermitian(a, UPLO.upper() == "L")
    v, w = jax.lax.linalg.eigh(a, symmetrize_input=False)
    return w, v if compute_v else jnp.zeros((0,), a.dtype)


@lowering("aten::linalg_eig")
def eig(a: Any) -> tuple[jax.Array, jax.Array]:
    """Returns eigenvalues and eigenvectors of matrices that need not be symmetric."""
    w, v = jnp.linalg.eig(a)
    return w, v


@lowering("aten::_linalg_eigvals")
@lowering("aten::linalg_eigvals", whole=False)
def eigvals(a: Any) -> jax.Array:
    """Returns eigenvalues of matrices that need not be symmetric."""
    return jnp.linalg.eigvals(a)


@lowering("aten::linalg_matrix_exp")
def matrix_exp(a: Any) -> jax.Array:
    """Returns the exponential of matrices."""
    if not a.size:
        return a
    return jax.scipy.linalg.expm(a.astype(wide(a.dtype)), max_squarings=48).astype(a.dtype)


@lowering("aten::linalg_pinv.atol_rtol_tensor")
def pinv(a: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> jax.Array:
    """Returns the pseudoinverse; singular values up to `max(atol, rtol * largest)` are zero."""
    m, n = a.shape[-2:]
    if a.size == 0:
        return jnp.zeros((*a.shape[:-2], n, m), a.dtype)
    real = a.real.dtype
    atol = jnp.zeros((), real) if atol is None else cast(atol, real)
    if rtol is None:
        rtol = jnp.where(atol > 0, 0, _default_cut(a))
    return _pseudoinverse(_hermitian(a, True, False) if hermitian else a, atol, cast(rtol, real))


def _default_cut(a: Any) -> float:
    return max(a.shape[-2:]) * float(np.finfo(a.dtype).eps)


@jax.custom_jvp
def _pseudoinverse(a: Any, atol: Any, rtol: Any) -> Any:
    """Returns the pseudoinverse, with a gradient that also holds for equal singular values."""
    u, s, vh = svd(a)
    kept = s > jnp.maximum(atol, rtol * jnp.max(s, -1))[..., None]
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
    return _h(vh) @ (inverse[..., None] * _h(u))


@_pseudoinverse.defjvp
def _inverted_jvp(primals: Any, tangents: Any) -> Any:
    # Golub and Pereyra, 1973: for matrices whose rank does not change
    a, p, da = primals[0], _pseudoinverse(*primals), tangents[0]
    adjoint = _h(da)
    first = p @ _h(p) @ (adjoint - adjoint @ a @ p)
    second = (adjoint - p @ a @ adjoint) @ _h(p) @ p
    return p, first + second - p @ da @ p


@lowering("aten::linalg_lstsq")
def lstsq(
    a: Any, b: Any, rcond: float | None = None, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the least squares solution, residuals, ranks, singular values; empty as in torch."""
    m, n = a.shape[-2:]
    driver = driver or "gelsy"
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    y = b[..., None] if is_vector else b
    cut = _default_cut(a) if rcond is None else rcond
    cut = -1.0 if driver == "gels" else cut
    s = svd(a, compute_uv=False)[1]
    real = s.dtype
    inverse = _pseudoinverse(a, jnp.asarray(-1.0, real), jnp.asarray(cut, real))
    x = jnp.matmul(*_broadcast_batch(inverse, y))
    kept = s > cut * jnp.max(s, -1, keepdims=True, initial=0)
    rank = jnp.sum(kept, -1).astype(dtype_of("int64"))
    nothing = jnp.zeros((0,), real)
    residuals = nothing
    if m > n and driver != "gelsy":
        left = jnp.abs(a @ x - y)
        residuals = jnp.sum(left * left, -2)
    return (
        x[..., 0] if is_vector else x,
        residuals,
        jnp.zeros((0,), rank.dtype) if driver == "gels" else rank,
        s if driver in ("gelsd", "gelss") else nothing,
    )
