"""Products, norms, factorisations of matrices and Fourier transforms: converted, and compared."""

import itertools
import math

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support.converting import Function, check, check_gradients  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def matrices(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape) + 2 * torch.eye(shape[-2], shape[-1])


def positive(*shape):
    x = matrices(*shape)
    return x @ x.mT + torch.eye(shape[-1])


@pytest.mark.nightly
def test_products():
    def function(a, b, v, w, batch):
        return {
            "mm": a @ b,
            "mv": a @ v,
            "vm": v @ b,
            "dot": v @ v,
            "vdot": torch.vdot(v, v),
            "outer": torch.outer(v, w),
            "bmm": batch @ batch.mT,
            "broadcast": batch @ b,
            "vector first": v @ batch.mT,
            "nothing": a[:, :0] @ b[:0],
            "integers": a.long() @ b.long(),
            "addmm": torch.addmm(w, a, b, beta=2, alpha=-0.5),
            "addmm, no bias": torch.addmm(a @ b * torch.nan, a, b, beta=0),
            "addmv": torch.addmv(v[:1], a, v, alpha=3),
            "baddbmm": torch.baddbmm(b[:1, :1], batch, batch.mT, beta=0.5),
            "addbmm": torch.addbmm(a[:2, :2], batch, batch.mT, alpha=2),
            "addr": torch.addr(a[:1, :1], v, w, beta=2, alpha=3),
            "half": torch.addmm(w.bfloat16(), a.bfloat16(), b.bfloat16(), beta=2),
            "kron": torch.kron(a, b),
            "kron of bool": torch.kron(a > 0, b > 0),
            "tensordot": torch.tensordot(batch, b, dims=([2], [0])),
            "chain": torch.linalg.multi_dot([a, b, b.T, v]),
            "power": torch.linalg.matrix_power(a @ a.T, 3),
            "cross": torch.linalg.cross(a[:3, :3], batch[0, :1, :3], dim=1),
            "vecdot": torch.linalg.vecdot(a, v),
            "trace": [a.trace(), a.long().trace()],
        }

    check(
        function, matrices(4, 5), matrices(5, 3), matrices(1, 5)[0], matrices(1, 3)[0],
        matrices(3, 2, 5),
    )  # fmt: skip


@pytest.mark.parametrize(
    "equation",
    [
        "ij,jk",
        "ij,jk->ki",
        "...ij,jk->...k",
        "ij->",
        "ii->i",
        "ij,kl,jk->il",
        "bij , jk -> bik",
        "Aij,jk",
    ],
)
def test_sums_over_named_dimensions(equation):
    shapes = {"i": 3, "j": 4, "k": 5, "l": 2, "b": 2, "A": 2}
    parts = equation.replace(" ", "").split("->")[0].replace("...", "b").split(",")
    if equation == "ii->i":
        parts = ["ii"]
    arrays = [torch.randn([shapes[c] for c in part]) for part in parts]
    check(lambda *xs: torch.einsum(equation, *xs), *arrays)


def test_sums_broadcast_sizes_of_one():
    check(lambda x, y: torch.einsum("ij,ij->i", x, y), torch.randn(3, 1), torch.randn(3, 4))


DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool", "complex64"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("...i,...i->...", ((1,), (2, 3))), ("i,j", ((2,), (3,))), ("ij,ij->i", ((2, 3), (2, 1))),
     ("i...,...->...", ((2, 3), ()))],
)  # fmt: skip
def test_products_without_a_sum_of_matrices_take_other_dtypes_together(equation, shapes):
    pairs, numbers = itertools.product(DTYPES, DTYPES), torch.tensor([3, 0, 1, 2, 1, 4])
    check(
        lambda *xs: [torch.einsum(equation, *xs[i : i + 2]) for i in range(0, len(xs), 2)],
        *(numbers[: math.prod(shape)].reshape(shape).to(getattr(torch, name))
          for pair in pairs for name, shape in zip(pair, shapes, strict=True)),
    )  # fmt: skip


def test_bilinear_forms():
    check(
        F.bilinear,
        *map(torch.randn, [(2, 3), (2, 4), (5, 3, 4), (5,)]),
    )


ORDERS = (0, 1, 2, 3, 0.5, -1, -2, float("inf"), float("-inf"))


@pytest.mark.nightly
def test_norms():
    def function(x, z):
        found = {f"{p}": torch.linalg.vector_norm(x, p, 1) for p in ORDERS}
        return found | {
            "all": torch.linalg.vector_norm(x, 3, keepdim=True),
            "two": x.norm(dim=(0, 1), keepdim=True),
            "complex": [torch.linalg.vector_norm(z, p) for p in (0, 1, 2, 4)],
            "half": x.bfloat16().norm(),
            "nothing": torch.linalg.vector_norm(x[:, :0], 2, 1),
            "scalar": x[0, 0].norm(),
            "matrix": [torch.linalg.matrix_norm(x, p) for p in ("fro", "nuc", 1, -1, 2, torch.inf)],
            "dist": torch.dist(x, x[0], 3),
            "renorm": x.renorm(2, 0, 1.0),
            "normalized": F.normalize(x, dim=0),
            "cond": torch.linalg.cond(x[:, :3]),
        }

    x = matrices(3, 5)
    x[1, :2] = 0
    check(function, x, torch.randn(4, dtype=torch.complex64), scale=3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("p", [p for p in ORDERS if p not in (0, -1, -2, 0.5)])
def test_gradients_of_norms(p):
    x = torch.tensor([[0.0, 0.0], [3.0, -4.0], [0.0, 2.0], [2.0, 2.0]])
    check_gradients(lambda x: torch.linalg.vector_norm(x, p, 1), x)


@pytest.mark.nightly
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, float("inf")])
def test_distances(p):
    def function(x, y):
        return [torch.cdist(x, y, p), F.pdist(y, p)]

    x, y = torch.randn(3, 4), torch.randn(5, 4)
    check(function, x, y)
    if p >= 1:
        y[0] = x[0]  # at distance zero
        check_gradients(lambda x, y: torch.cdist(x, y, p), x, y)


def test_many_distances():
    check(torch.cdist, torch.randn(30, 4), torch.randn(5, 4), scale=10)
    check(
        lambda x, y: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"),
        torch.randn(30, 4),
        torch.randn(5, 4),
    )


def solutions(a, b, s):
    lu, pivots = torch.linalg.lu_factor(a)
    lower = torch.linalg.cholesky(s)
    return {
        "solve": torch.linalg.solve(a, b),
        "solve vector": torch.linalg.solve(a, b[..., 0]),
        "solve right": torch.linalg.solve(a, b.mT, left=False),
        "inv": torch.linalg.inv(a),
        "det": torch.linalg.det(a),
        "logdet": torch.logdet(s),
        "slogdet": tuple(torch.linalg.slogdet(a)),
        "cholesky": lower,
        "upper": torch.linalg.cholesky(s, upper=True),
        "cholesky_solve": torch.cholesky_solve(b, lower),
        "cholesky_solve upper": torch.cholesky_solve(b, lower.mT, upper=True),
        "cholesky_inverse": torch.cholesky_inverse(lower),
        "triangular": torch.linalg.solve_triangular(lower, b, upper=False),
        "triangular right": torch.linalg.solve_triangular(lower.mT, b.mT, upper=True, left=False),
        "unit": torch.linalg.solve_triangular(s, b, upper=True, unitriangular=True),
        "lu_solve": torch.linalg.lu_solve(lu, pivots, b),
        "lu_solve adjoint": torch.linalg.lu_solve(lu, pivots, b, adjoint=True),
        "lu_solve right": torch.linalg.lu_solve(lu, pivots, b.mT, left=False),
        "exp": torch.linalg.matrix_exp(a / 4),
        "pinv": torch.linalg.pinv(a[..., :2]),
        "pinv hermitian": torch.linalg.pinv(s, hermitian=True),
        "eigvalsh": torch.linalg.eigvalsh(s),
        "svdvals": torch.linalg.svdvals(a),
    }


@pytest.mark.nightly
def test_solutions():
    check(solutions, matrices(2, 4, 4), matrices(2, 4, 3), positive(2, 4, 4), scale=5)
    check(solutions, matrices(3, 3), matrices(3, 2), positive(3, 3), scale=5)


@pytest.mark.nightly
def test_gradients_of_solutions():
    check_gradients(solutions, matrices(3, 3), matrices(3, 2), positive(3, 3), scale=50)


@pytest.mark.nightly
def test_factorisations():
    def function(a, s):
        q, r = torch.linalg.qr(a)
        u, w, vh = torch.linalg.svd(a, full_matrices=False)
        values, vectors = torch.linalg.eigh(s)
        upper = torch.linalg.eigh(s * torch.tensor([[1.0, 1, 1], [9, 1, 1], [9, 9, 1]]), UPLO="U")[
            0
        ]
        general, columns = torch.linalg.eig(s @ torch.diag(torch.arange(1.0, 4)))
        h, tau = torch.geqrf(a)
        # vectors are unique up to a sign, products of them are unique
        return {
            "qr": [(q @ r), r.abs(), q.mT @ q],
            "r": torch.linalg.qr(a, "r")[1].abs(),
            "complete": torch.linalg.qr(a, "complete")[1].abs(),
            "svd": [w, (u * w[..., None, :]) @ vh],
            "full": torch.linalg.svd(a)[1],
            "eigh": [values, (vectors * values[..., None, :]) @ vectors.mT, upper],
            "eig": [general.real.sort()[0], (columns * general[..., None, :]) @ columns.inverse()],
            "lu": tuple(torch.linalg.lu(a)),
            "unpacked": tuple(torch.lu_unpack(*torch.linalg.lu_factor(a))),
            "rank": torch.linalg.matrix_rank(a),
            "householder": torch.linalg.householder_product(h, tau) @ r.abs().sign(),
            "ormqr": torch.ormqr(h, tau, a, transpose=True).abs(),
            "info": torch.linalg.cholesky_ex(s - torch.eye(3) * torch.tensor([0.0, 0, 99])).info,
            "inv_ex": torch.linalg.inv_ex(s * 0).info,
        }

    check(function, matrices(2, 4, 3), positive(2, 3, 3), scale=10)


@pytest.mark.nightly
def test_gradients_of_factorisations():
    def function(a, s):
        u, w, vh = torch.linalg.svd(a, full_matrices=False)
        values, vectors = torch.linalg.eigh(s)
        q, r = torch.linalg.qr(a)
        h, tau = a / 4, a[0]
        return [
            (u * w.sin()) @ vh,
            vectors * values.sin() @ vectors.mT,
            q.abs(),
            r.abs(),
            torch.linalg.householder_product(h, tau),
        ]

    check_gradients(function, matrices(4, 3), positive(3, 3), scale=20)


@pytest.mark.nightly
def test_matrices_without_elements():
    def function(x):
        empty = x[:, :0, :0]
        return [
            torch.linalg.det(empty),
            torch.linalg.inv(empty),
            torch.linalg.cholesky(empty),
            torch.linalg.svdvals(x[:, :0]),
            torch.linalg.solve(empty, x[:, :0]),
            torch.linalg.pinv(x[:, :0]),
            torch.linalg.eigvalsh(empty),
        ]

    check(function, torch.randn(2, 3, 3))


def test_matrices_that_are_indefinite_give_nan():
    s = positive(3, 3)
    module = Function(torch.linalg.cholesky)
    converted = fmapper.convert(module, "jax", (s,))
    assert np.isnan(converted(jax.numpy.asarray(-s.numpy()))).any()


@pytest.mark.nightly
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_fourier_transforms(norm):
    fft = torch.fft

    def function(x, z):
        return {
            "fft": fft.fft(x, norm=norm),
            "ifft": fft.ifft(z, norm=norm),
            "padded": fft.fft(z, 11, dim=1, norm=norm),
            "cropped": fft.ifft(z, 3, norm=norm),
            "fft2": fft.fft2(z, norm=norm),
            "fftn": fft.fftn(x, norm=norm),
            "rfft": fft.rfft(x, norm=norm),
            "rfftn": fft.rfftn(x, dim=(0, 2), norm=norm),
            "irfft": fft.irfft(z, norm=norm),
            "irfft odd": fft.irfft(z, 7, norm=norm),
            "irfftn": fft.irfftn(z, (3, 5), norm=norm),
            "hfft": fft.hfft(z, norm=norm),
            "ihfft": fft.ihfft(x, norm=norm),
            "shift": fft.fftshift(x),
            "ishift": fft.ifftshift(x, 1),
        }

    check(function, torch.randn(2, 3, 6), torch.randn(2, 4, 6, dtype=torch.complex64))


@pytest.mark.nightly_cases("bartlett", "kaiser")
@pytest.mark.parametrize("name", ["hann", "hamming", "blackman", "bartlett", "kaiser"])
def test_windows(name):
    window = getattr(torch, f"{name}_window")

    def function(x):
        found = [window(n, periodic) for n in (0, 1, 3, 7, 8) for periodic in (True, False)]
        return [*found, x * window(5), window(4, dtype=torch.float64)]

    with jax.enable_x64(True):
        check(function, torch.ones(5))


@pytest.mark.nightly
def test_spectrograms():
    def function(x, window):
        spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
        return spectrum, torch.istft(spectrum, 16, 4, window=window, length=80)

    check(function, torch.randn(2, 80), torch.hann_window(16))
    check_gradients(lambda x: function(x, torch.hann_window(16))[1], torch.randn(2, 80))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["real", "complex", "hermitian"])
@pytest.mark.parametrize("diagonal", ["random", "zero"])  # zero: blocks of two rows everywhere
def test_factors_of_indefinite_matrices(kind, diagonal):
    a = torch.randn(3, 7, 7, dtype=torch.float32 if kind == "real" else torch.complex64)
    b = torch.randn(3, 7, 2, dtype=a.dtype)
    hermitian = kind == "hermitian"
    a = a + (a.mH if hermitian else a.mT)
    if diagonal == "zero":
        a.diagonal(0, -2, -1).fill_(0)

    def function(a, b):
        factors, pivots, info = torch.linalg.ldl_factor_ex(a, hermitian=hermitian)
        return (
            factors,
            pivots,
            info,
            torch.linalg.ldl_solve(factors, pivots, b, hermitian=hermitian),
        )

    check(function, a, b)


@pytest.mark.nightly
def test_factors_of_matrices_without_any():
    def function(*matrices):
        return [torch.linalg.ldl_factor_ex(a) for a in matrices]

    check(function, torch.zeros(3, 3), torch.zeros(2, 0, 0), torch.ones(1, 1))


@pytest.mark.nightly
def test_imaginary_parts_on_the_diagonal_of_hermitian_matrices_are_not_read():
    a = torch.randn(2, 3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    check(lambda a: (torch.linalg.pinv(a, hermitian=True), torch.linalg.eigvalsh(a)), a, scale=10.0)
