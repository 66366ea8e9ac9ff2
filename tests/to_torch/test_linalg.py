"""Linear algebra and Fourier transforms of JAX in torch."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

from support.from_jax import check  # noqa: E402


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def wide_normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def wide_positive(*shape):
    x = np.asarray(wide_normal(*shape))
    return jnp.asarray(x @ np.swapaxes(x, -1, -2) + 3 * np.eye(shape[-1]))


@pytest.mark.nightly
def test_cholesky():
    check(jnp.linalg.cholesky, wide_positive(3, 4, 4))
    check(jnp.linalg.cholesky, -wide_positive(2, 2), gradients=False)


@pytest.mark.parametrize(
    "options",
    [
        {"left_side": True, "lower": True, "transpose_a": True},
        {"left_side": True, "lower": False, "unit_diagonal": True},
        {"left_side": True, "lower": True, "transpose_a": True, "conjugate_a": True},
    ],
)
def test_triangular_solve(options):
    a, b = wide_normal(4, 4) + 3 * np.eye(4), wide_normal(4, 2, seed=1)
    check(lambda a, b: lax.linalg.triangular_solve(a, b, **options), a, b)


@pytest.mark.nightly
def test_lu_and_its_permutation():
    check(lax.linalg.lu, wide_normal(2, 5, 4))
    check(lax.linalg.lu, wide_normal(4, 5))
    check(
        lambda p: lax.linalg.lu_pivots_to_permutation(p, 5),
        np.array([[2, 3, 2], [0, 4, 4]], np.int32),
    )


@pytest.mark.nightly
def test_solutions_have_the_gradients_of_the_matrix():
    check(jnp.linalg.solve, wide_normal(4, 4), wide_normal(4, seed=1))
    check(jnp.linalg.solve, wide_normal(2, 4, 4), wide_normal(2, 4, 3, seed=1))
    check(jnp.linalg.inv, wide_normal(2, 4, 4))


@pytest.mark.nightly
def test_qr():
    check(jnp.linalg.qr, wide_normal(5, 3))
    check(lambda x: jax.scipy.linalg.qr(x, pivoting=True), wide_normal(5, 3), gradients=False)
    check(lambda x: jax.scipy.linalg.qr(x, pivoting=True), wide_normal(3, 5), gradients=False)


@pytest.mark.nightly
def test_eigenvalues():
    check(lambda x: jnp.linalg.eigh(x)[0], wide_positive(4, 4))
    check(lambda x: jnp.abs(jnp.linalg.eigh(x)[1]), wide_positive(4, 4))
    check(lambda x: jnp.sort(jnp.abs(jnp.linalg.eig(x)[0])), wide_normal(4, 4), gradients=False)


@pytest.mark.nightly
def test_eigenvectors_on_both_sides():
    """They are defined up to their signs, so what they do is looked at."""
    x = wide_normal(5, 5)
    values, left, right = fmapper.convert(lax.linalg.eig, "torch", (x,))(fmapper.to_torch(x))
    x = fmapper.to_torch(x).to(values.dtype)
    torch.testing.assert_close(x @ right, right * values)
    torch.testing.assert_close(left.mH @ x, values[:, None] * left.mH)
    torch.testing.assert_close(torch.linalg.vector_norm(left, dim=0), torch.ones(5).double())


@pytest.mark.nightly
def test_singular_values():
    check(lambda x: jnp.linalg.svd(x, compute_uv=False), wide_normal(4, 3))
    check(lambda x: jnp.abs(jnp.linalg.svd(x, full_matrices=False)[0]), wide_normal(4, 3))
    check(lambda x: jnp.abs(jnp.linalg.svd(x)[2]), wide_normal(4, 4))


def test_diagonals():
    d = [wide_normal(5, seed=i) for i in range(3)]
    check(lax.linalg.tridiagonal_solve, d[0], d[1] + 4, d[2], wide_normal(5, 2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@pytest.mark.parametrize("length", [None, 7])
def test_transforms(name, length):
    check(lambda x: getattr(jnp.fft, name)(x, n=length), wide_normal(3, 8))


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_transforms_over_several_dimensions(name):
    check(getattr(jnp.fft, name), wide_normal(3, 4, 6))
    check(lambda x: getattr(jnp.fft, name)(x, axes=(1, 2)), wide_normal(0, 4, 6), gradients=False)


@pytest.mark.parametrize("name", ["schur", "hessenberg"])
def test_what_torch_has_not_is_refused(name):
    with pytest.raises(fmapper.UnsupportedOpsError, match=name):
        fmapper.convert(getattr(lax.linalg, name), "torch", (wide_normal(3, 3),))
