"""Lowerings of arithmetic, reductions, sorting, new arrays and random numbers, at their corners.

Functions of one kind are one program: an output that differs is named by the function.
"""

import math

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support.converting import Function, check, check_gradients  # noqa: E402

inf, nan = math.inf, math.nan
CORNERS = [-inf, -7.5, -3.0, -2.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.5, 3.0, 7.0, inf, nan]
PAIRS = torch.cartesian_prod(torch.tensor(CORNERS), torch.tensor(CORNERS))
INTEGERS = torch.cartesian_prod(torch.arange(-4, 5), torch.tensor([-3, -2, -1, 1, 2, 3]))

UNARY = """abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv
exp exp2 expm1 floor frac i0 isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2
logical_not logit nan_to_num neg positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign
signbit sin sinc sinh sqrt square tan tanh trunc"""
SPECIAL = """airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr
modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtr ndtri
scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0"""
BINARY = """add sub mul div fmod remainder floor_divide pow atan2 copysign fmax fmin maximum minimum
heaviside hypot logaddexp logaddexp2 xlogy eq ne lt le gt ge logical_and logical_or logical_xor
nextafter"""


def each(names, *, of=torch):
    """All functions of these names as one function that gives their results by name."""
    names = names.split()

    def function(*args):
        return {name: getattr(of, name)(*args) for name in names}

    return function


@pytest.mark.nightly
def test_functions_of_one_float():
    check(each(UNARY), torch.tensor(CORNERS))


@pytest.mark.nightly
def test_special_functions():
    x = torch.cat([torch.tensor(CORNERS), torch.linspace(-12, 12, 97), torch.tensor([40.0, 90.0])])
    for name in SPECIAL.split():  # apart, as the largest element of one says little of another
        check(each(name, of=torch.special), x)


@pytest.mark.nightly
def test_functions_of_two_floats():
    check(each(BINARY), PAIRS[:, 0], PAIRS[:, 1])


def test_modes_of_division():
    def divided(x, y):
        return [torch.div(x, y, rounding_mode=mode) for mode in (None, "trunc", "floor")]

    check(divided, PAIRS[:, 0], PAIRS[:, 1])
    check(divided, INTEGERS[:, 0], INTEGERS[:, 1])


@pytest.mark.nightly
def test_functions_of_two_integers():
    names = """add sub mul div fmod remainder floor_divide maximum minimum eq lt bitwise_and
    bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm logical_and atan2
    copysign xlogy"""
    check(each(names), INTEGERS[:, 0], INTEGERS[:, 1])
    check(torch.pow, INTEGERS[:, 0], INTEGERS[:, 1].abs())


@pytest.mark.nightly
def test_functions_of_one_integer_or_bool():
    floats_only = {"frac"}
    names = " ".join(name for name in UNARY.split() if name not in floats_only)
    check(each(names), torch.arange(-3, 4))
    check(each("abs ceil floor trunc round sgn sign square"), torch.arange(-3, 4))
    names = "cos exp isnan isfinite logical_not bitwise_not sgn sigmoid sqrt signbit"
    check(each(names), torch.tensor([True, False]))


def test_numbers_enter_as_numbers():
    def mixed(x, i, b):
        return [
            x + 1, i + 1, b + 1, i + 0.5, b * 2.0, 2 - i, 1 / i, i**2, 2**i, 2.0**i, x**0.5,
            x**-0.5, x**3, i**0.5, i // 2, i % 3, i == 0.5, x > 1, torch.where(b, i, 0.5),
            i.clamp(-1.5, 1), torch.add(x, i, alpha=2), torch.sub(i, i, alpha=3),
            torch.rsub(i, 2), i.float() / 3,
        ]  # fmt: skip

    check(mixed, torch.tensor([0.25, 4.0]), torch.tensor([1, 3]), torch.tensor([True, False]))


@pytest.mark.nightly
def test_halves_are_rounded_once():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def functions(x):
        return [x * 0.1, x + 0.3, x - 0.7, x / 3, torch.add(x, x, alpha=0.3), x % 0.7, x.neg(),
                torch.addcmul(x, x, x, value=0.7), torch.lerp(x, x * 2, 0.3), x.sum(), x.mean(),
                x.std()]  # fmt: skip

    model = fmapper.convert(Function(functions), "jax", (x,))
    for got, want in zip(model(fmapper.to_jax(x)), functions(x), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), want.float().numpy())


def test_clamping_with_bounds_of_every_kind():
    x = torch.tensor(CORNERS)
    low, high = torch.tensor([-1.0, nan, 2.0])[:, None], torch.tensor([1.0, 2.0, -2.0])[:, None]
    check(lambda x, a, b: [x.clamp(a, b), x.clamp(a), x.clamp(None, b)], x, low, high)
    check(lambda x: [x.clamp(-1, 1), x.clamp(2, -2), x.clamp_min(0.5), x.clamp_max(0)], x)


@pytest.mark.nightly
def test_complex_numbers():
    z = torch.complex(torch.randn(7), torch.randn(7))
    names = "abs angle conj exp sgn sqrt reciprocal log sin tanh square sigmoid"
    check(each(names), z)
    check(
        lambda z: [z.real, z.imag, torch.view_as_real(z), z.sum(), z.mean(), z.prod(), z.var()], z
    )
    check(lambda a: [torch.polar(a, a), torch.complex(a, a) * 2j, torch.view_as_complex(a)],
          torch.randn(3, 2))  # fmt: skip


def test_roundings_to_decimals():
    check(lambda x: [torch.round(x, decimals=d) for d in (-1, 0, 2)], torch.randn(50) * 30)


# --- reductions -----------------------------------------------------------------------------

REDUCTIONS = {
    "sum": lambda x: [x.sum(), x.sum(0), x.sum((0, -1), keepdim=True)],
    "prod": lambda x: [x.prod(), x.prod(1)],
    "all": lambda x: [x.all(), x.all(0), x.any(), x.any(-1, keepdim=True)],
    "counts": lambda x: [torch.count_nonzero(x), torch.count_nonzero(x, 0)],
    "extremes": lambda x: [
        x.amax(),
        x.amin(0),
        x.amax((0, 1)),
        x.max(),
        x.min(),
        *x.aminmax(dim=0),
    ],
    "places": lambda x: [x.argmax(), x.argmin(0), x.argmax(1, keepdim=True), *x.max(1), *x.min(0)],
    "running": lambda x: [x.cumsum(0), x.cumprod(1), *x.cummax(0), *x.cummin(-1)],
    "sorted": lambda x: [*x.sort(stable=True, dim=1), *x.sort(stable=True, dim=0, descending=True)],
    "medians": lambda x: [x.median(), x.nanmedian(), x.median(0)[0], x.nanmedian(1)[0]],
    "modes": lambda x: [x.mode(1)[0], x.mode(0, keepdim=True)[0]],
    "topk": lambda x: [x.topk(2, 1)[0], x.topk(2, 0, largest=False)[0], x.kthvalue(2, 1)[0]],
}


@pytest.mark.sampled(10)
@pytest.mark.nightly_cases("float-all", "integer-extremes")
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("kind", ["float", "nan", "integer"])
def test_reductions(name, kind):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    if kind == "nan":
        x[1, 2], x[2, 0], x[0, 0] = nan, inf, -inf
    if kind == "integer":
        x = (x * 2).long()
    check(REDUCTIONS[name], x)


@pytest.mark.nightly
def test_reductions_of_floats_only():
    def functions(x):
        return [
            x.mean(), x.mean(0), x.var(), x.std(1), x.var(0, correction=0), x.std(0, correction=2),
            *torch.var_mean(x, 1), *torch.std_mean(x), x.norm(), x.norm(1, 0), x.norm(inf),
            x.norm(-inf, 1), x.norm(0), x.norm(3, 1, keepdim=True), x.logsumexp(1), x.nansum(0),
            x.logcumsumexp(1), x.softmax(-1), x.log_softmax(0), torch.nanmean(x, 0),
            x.renorm(2, 0, 1), torch.dist(x, x * 2, 3), x.histc(5), x.histc(4, -1, 1),
            x.quantile(0.3), x.quantile(torch.tensor([0.1, 0.5]), 1), torch.nanquantile(x, 0.4, 0),
        ]  # fmt: skip

    check(functions, torch.randn(3, 5))


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["linear", "lower", "higher", "nearest", "midpoint"])
def test_quantiles(way):
    q = torch.tensor([0.0, 0.2, 0.5, 1.0])

    def functions(x):
        found = []
        for quantile in (torch.quantile, torch.nanquantile):
            found += [quantile(x, 0.3, interpolation=way), quantile(x[0, 0], q, interpolation=way)]
            for dim, keep in ((0, False), (-2, True), (None, True)):
                found += [quantile(x, n, dim, keep, interpolation=way) for n in (0.7, q)]
        return [*found, x.quantile(q=q, dim=1, keepdim=True), x.nanquantile(0.5)]

    x = torch.randn(3, 5, 4)
    check(functions, x)
    x[0, 1, 2], x[2, :, 0] = nan, nan
    check(functions, x)


@pytest.mark.nightly
def test_gradients_of_quantiles():
    q = torch.tensor([0.1, 0.45])
    check_gradients(lambda x: (x.quantile(q, 1), x.nanquantile(0.3, 0)), torch.randn(4, 5))


@pytest.mark.nightly
def test_reductions_of_nothing_and_of_one():
    def functions(x):
        return [x.sum(), x.prod(), x.mean(), x.sum(0), x.any(), x.all(), x.cumsum(0),
                x.logsumexp(0), x.norm(), x.softmax(0), x.nansum()]  # fmt: skip

    check(functions, torch.zeros(0, 3))
    check(functions, torch.tensor(2.5))
    check(lambda x: [*x.max(0), *x.sort(), *x.topk(1), x.argmax(), *x.cummax(0), x.median()],
          torch.tensor(2.5))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_softmax_of_nothing_keeps_its_dtype(dtype):
    """With elements torch refuses these dtypes."""
    x = torch.zeros((0, 3), dtype=dtype)
    check(lambda x: x.softmax(1), x)
    if dtype is not torch.bool:  # which torch takes, but does not record
        check(lambda x: x.log_softmax(0), x)


@pytest.mark.nightly
def test_elements_that_are_unique():
    x = torch.tensor([[3, 1, 1], [3, 1, 1], [2, 0, 1]])

    def functions(x):
        return [
            torch.unique(x),
            torch.unique(x, return_inverse=True, return_counts=True),
            torch.unique(x, dim=0, return_inverse=True),
            torch.unique(x, dim=1),
            torch.unique_consecutive(x, return_inverse=True, return_counts=True),
            torch.unique_consecutive(x, dim=0, return_counts=True),
            torch.bincount(x[:, 0], minlength=6),
        ]

    check(functions, x)


@pytest.mark.nightly
def test_search_in_sorted_rows():
    edges = torch.tensor([-1.0, 0.0, 0.0, 2.0])
    x = torch.tensor(CORNERS)
    check(lambda e, x: [torch.bucketize(x, e), torch.bucketize(x, e, right=True, out_int32=True)],
          edges, x)  # fmt: skip
    rows = torch.stack([edges, edges + 0.5])
    check(lambda e, x: torch.searchsorted(e, x, side="right"), rows, x.repeat(2, 1))
    check(
        lambda x: [torch.isin(x, x[:3]), torch.isin(x, x[::2], invert=True)], torch.arange(40) % 7
    )


@pytest.mark.nightly
def test_histograms_and_triangles():
    def functions(x):
        return [*torch.histogram(x.reshape(-1), 4), x.histc(3, -1, 2), x.tril(1), x.triu(-1),
                *torch.histogram(x, torch.tensor([-1.0, 0.0, 0.5]), density=True)]  # fmt: skip

    check(functions, torch.randn(3, 4, generator=torch.Generator().manual_seed(2)))


def test_the_zeta_function_to_the_left_of_zero():
    x = torch.tensor([-8.478374, -3.5, -0.5, 0.5, 1.5, 0.0])
    check(lambda x: [torch.polygamma(2, x), torch.special.zeta(3.0, x)], x)


# --- new arrays -----------------------------------------------------------------------------


def test_new_arrays():
    def functions(x):
        return [
            torch.arange(5), torch.arange(0.5, 2, 0.3), torch.arange(7, 1, -2), torch.eye(3),
            torch.eye(2, 4, dtype=torch.int64), torch.zeros(2, 3), torch.ones(2, dtype=torch.bool),
            torch.full((2,), 3), torch.full((2,), 3.5), torch.full((2,), True), x.new_ones(3),
            x.new_full((2,), 7), torch.zeros_like(x), torch.ones_like(x, dtype=torch.float16),
            torch.full_like(x, 2.7), torch.linspace(-1, 1, 7), torch.linspace(0, 10, 4, dtype=int),
            torch.logspace(0, 2, 5), torch.tril_indices(3, 4, 1), torch.triu_indices(3, 3),
            torch.scalar_tensor(3), torch.empty(2, 3).shape, torch.linspace(0, 1, 1),
            torch.arange(1, 1), torch.arange(0, 1, 0.1),
        ]  # fmt: skip

    check(functions, torch.arange(6).reshape(2, 3))


# --- gradients ------------------------------------------------------------------------------

GRADIENTS = {
    "relu": (torch.relu, [-1.0, 0.0, 2.0]),
    "clamp": (lambda x: x.clamp(-1, 1), [-2.0, -1.0, 0.0, 1.0, 3.0]),
    "clamp to tensors": (lambda x: x.clamp(x.new_zeros(3), x.new_ones(3)), [0.0, 0.5, 1.0]),
    "one bound": (lambda x: x.clamp_min(0.0) + x.clamp(max=1), [-1.0, 0.0, 1.0, 2.0]),
    "abs": (torch.abs, [-2.0, 0.0, 3.0]),
    "maximum": (lambda x: torch.maximum(x, x.flip(0) * 1.0), [1.0, 2.0, 1.0]),
    "amax": (lambda x: x.amax(), [1.0, 3.0, 3.0]),
    "max": (lambda x: x.max(0)[0], [1.0, 3.0, 3.0]),
    "norm": (lambda x: x.norm(), [0.0, 0.0, 0.0]),
    "norm 1": (lambda x: x.norm(1), [0.0, -2.0, 1.0]),
    "norm 3": (lambda x: x.norm(3), [0.0, -2.0, 1.0]),
    "std": (lambda x: x.std(), [2.0, 2.0, 2.0]),
    "var": (lambda x: x.var(), [2.0, 1.0, 5.0]),
    "prod": (lambda x: x.prod(), [2.0, 0.0, 5.0]),
    "cumprod": (lambda x: x.cumprod(0), [2.0, 0.0, 5.0]),
    "cummax": (lambda x: x.cummax(0)[0], [2.0, 1.0, 2.0]),
    "sort": (lambda x: x.sort(descending=True)[0] * torch.arange(3), [2.0, 1.0, 2.0]),
    "topk": (lambda x: x.topk(2)[0] * torch.arange(2), [2.0, 1.0, 4.0]),
    "median": (lambda x: x.median(), [2.0, 1.0, 4.0]),
    "logsumexp": (lambda x: x.logsumexp(0), [2.0, -inf, 4.0]),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), [2.0, -1.0, 4.0]),
    "softmax": (lambda x: x.softmax(0) * x, [2.0, -1.0, 4.0]),
    "pow": (lambda x: x**2.5 + x**2 + x**0, [0.0, 1.0, 4.0]),
    "exponent": (lambda x: torch.pow(x.abs(), x), [0.5, 1.0, 4.0]),
    "remainder": (lambda x: x % 2.0 + torch.remainder(x * 0 + 7, x), [-3.0, 1.5, 4.0]),
    "remainder next to a whole number": (lambda x: x % x[:1], [1e-3, -1.866, 1.0]),
    "fmod": (lambda x: torch.fmod(x, x * x), [-3.0, 1.5, 4.0]),
    "floor": (
        lambda x: torch.div(x, 2, rounding_mode="floor") + x.round() + x.sign() + x,
        [-3.0, 1.5, 4.0],
    ),
    "xlogy": (lambda x: torch.xlogy(x, x + 1), [0.0, 1.5, 4.0]),
    "copysign": (lambda x: torch.copysign(x, -x), [-2.0, 1.5, 4.0]),
    "where": (lambda x: torch.where(x > 0, x.clamp_min(1e-9).sqrt(), 0.0), [0.0, 1.5, 4.0]),
    "lerp": (lambda x: torch.lerp(x, x * x, x / 10), [-3.0, 1.5, 4.0]),
    "erfinv": (lambda x: torch.erfinv(x) + torch.erfc(x), [-0.5, 0.1, 0.9]),
    "gamma": (lambda x: x.lgamma() + x.digamma() + torch.polygamma(1, x), [0.5, 1.5, 4.0]),
    "log2": (lambda x: x.log2() + x.exp2() + x.log10(), [0.5, 1.5, 4.0]),
    "sinc": (torch.sinc, [0.0, 1.5, 4.0]),
    "i0": (lambda x: torch.i0(x) + torch.special.i1e(x), [-0.5, 1.5, 4.0]),
    "amax of ties": (lambda x: x.reshape(2, 2).amax(1), [1.0, 1.0, 2.0, 3.0]),
}


@pytest.mark.sampled(12)
@pytest.mark.nightly_cases("topk", "gamma")
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    function, values = GRADIENTS[name]
    x = torch.tensor(values, requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    y = function(x)
    (y * weights[: y.numel()].reshape(y.shape)).sum().backward()
    model = fmapper.convert(Function(function), "jax", (x.detach(),))

    def loss(x):
        y = model(x)
        return (y * weights[: y.size].numpy().reshape(y.shape)).sum()

    got = jax.grad(loss)(jax.numpy.asarray(values))
    np.testing.assert_allclose(np.asarray(got), x.grad.numpy(), rtol=1e-5, atol=1e-6)


# --- random numbers -------------------------------------------------------------------------

DRAWS = {
    "rand": (torch.rand_like, 1 / 2, 1 / 12),
    "randn": (torch.randn_like, 0, 1),
    "randint": (lambda x: torch.randint_like(x, -2, 3), 0, 2),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.21),
    "bernoulli p": (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21),
    "normal": (lambda x: torch.normal(x + 2, 3.0), 2, 9),
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1, 16 / 12),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2), 1 / 2, 1 / 4),
    "geometric": (lambda x: torch.empty_like(x).geometric_(0.4), 2.5, 3.75),
    "log normal": (lambda x: torch.empty_like(x).log_normal_(0, 0.5).log(), 0, 0.25),
    "poisson": (lambda x: torch.poisson(x + 3), 3, 3),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([0.2, 0.0, 0.8]), 20000, True).float(), 1.6, 0.64
    ),
    "dropout": (lambda x: torch.nn.functional.dropout(x + 1, 0.2), 1, 0.25),
}  # fmt: skip


@pytest.mark.nightly_cases("uniform", "dropout", "geometric", "log normal", "poisson")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_have_the_distribution(name):
    function, mean, variance = DRAWS[name]
    x = torch.zeros(20000)
    model = fmapper.convert(Function(function), "jax", (x,), train=True)
    drawn = np.asarray(model(x.numpy(), key=jax.random.key(0)))
    again = np.asarray(model(x.numpy(), key=jax.random.key(1)))
    assert not np.array_equal(drawn, again)
    # within five standard errors of what the distribution has
    assert abs(drawn.mean() - mean) < 5 * math.sqrt(variance / drawn.size)
    assert abs(drawn.var() / variance - 1) < 0.2


@pytest.mark.nightly
def test_multinomial_without_replacement_and_permutations():
    weights = torch.tensor([[0.1, 0.0, 0.3, 0.6], [0.5, 0.1, 0.4, 0.0]])
    model = fmapper.convert(
        Function(lambda w: (torch.multinomial(w, 3), torch.randperm(9))),
        "jax",
        (weights,),
    )
    drawn, order = model(weights.numpy(), key=jax.random.key(0))
    assert [sorted(row) for row in drawn.tolist()] == [[0, 2, 3], [0, 1, 2]]
    assert sorted(order.tolist()) == list(range(9))


@pytest.mark.nightly
def test_sums_of_complex_exponentials_keep_the_larger_imaginary_part():
    """Which need not be between -pi and pi; the last pair is of infinite numbers."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(3, 6, dtype=torch.complex64, generator=generator)
    y = 4 * torch.randn(3, 6, dtype=torch.complex64, generator=generator)
    x[0, 0], y[0, 0] = complex(-inf, 2.0), complex(-inf, 1.0)
    x[0, 1], y[0, 1] = complex(-inf, 2.0), complex(1.0, 7.0)
    check(lambda x, y: (torch.logaddexp(x, y), y.logcumsumexp(1), y.logcumsumexp(0)), x, y)
    check(lambda x: x.logcumsumexp(0), torch.zeros(0, 2, dtype=torch.complex64))


@pytest.mark.nightly
@pytest.mark.parametrize("size", [1, 100, 1000])
def test_the_derivative_of_complex_logaddexp_has_no_nan_where_exp_overflows(size):
    """Against 1 / (1 + exp(y - x)) in double precision: torch's own is NaN for some."""
    generator = torch.Generator().manual_seed(1)
    x, y = (size * torch.randn(12, dtype=torch.complex64, generator=generator) for _ in range(2))
    model = fmapper.convert(Function(torch.logaddexp), "jax", (x[0], y[0]))
    slope = jax.vmap(jax.grad(model, holomorphic=True))(x.numpy(), y.numpy())
    with np.errstate(over="ignore", invalid="ignore"):
        want = 1 / (1 + np.exp(y.numpy().astype(complex) - x.numpy()))
    want = np.where(np.isnan(want), 0, want)
    np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_the_zeros_of_lgamma_are_exact():
    x = torch.tensor([1.0, 2.0], dtype=torch.float32)
    model = fmapper.convert(Function(torch.lgamma), "jax", (x,))
    assert model(x.numpy()).tolist() == [0, 0]
    check_gradients(torch.lgamma, x)


@pytest.mark.daily_cases("1")
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_windows_and_frequencies(size):
    def made(x):
        names = "hann", "hamming", "blackman", "bartlett", "kaiser"
        makers = [getattr(torch, f"{name}_window") for name in names]
        found = [make(size, periodic) for make in makers for periodic in (True, False)]
        found += [torch.hamming_window(size, True, 0.6, 0.3), torch.kaiser_window(size, True, 5.0)]
        found += [torch.hann_window(size, dtype=torch.float16)]
        frequencies = [torch.fft.fftfreq(size, 0.5), torch.fft.rfftfreq(size), torch.fft.fftfreq(6)]
        return x, *found, *frequencies

    check(made, torch.ones(2))


@pytest.mark.nightly
def test_a_bool_as_a_factor_is_a_number():
    """XLA would choose between the other factor and zero: no NaN from 0 * inf."""
    x = torch.tensor([False, True, False, True])
    y = torch.tensor([inf, inf, nan, -2.0])
    check(lambda x, y: (x * y, x.float() * y, x / 0, x / x, (y > 0) * torch.log(y - y)), x, y)
    check(lambda x, y: (x.to(torch.complex64) * y, x.half() / y), x, y)


def test_gradients_of_hypot_beside_infinities():
    check_gradients(torch.hypot, torch.tensor([1.0, 3.0, 0.0]), torch.tensor([-inf, 4.0, 2.0]))


@pytest.mark.nightly
@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
def test_equal_elements_share_the_gradient_of_a_median(median):
    check_gradients(median, torch.tensor([[2.0, 1.0, 2.0], [3.0, 2.0, 1.0]]))
    check_gradients(median, torch.tensor([inf, inf, 1.0]))


def test_gradients_of_the_next_number():
    check_gradients(torch.nextafter, torch.tensor([1.0, 2.0, 5.0]), torch.tensor([3.0, 0.0, 5.0]))


def test_gradients_of_powers_of_zero_to_the_zero():
    x = torch.tensor([0.0, 0.0, 2.0, 3.0, 0.0])
    check_gradients(torch.pow, x, torch.tensor([0.0, 2.0, 0.0, 2.0, 1.0]))
    check_gradients(lambda x: x**x, torch.tensor([0.0, 1.0, 2.0]))


def test_powers_of_two_and_their_logarithms_beside_complex_infinities():
    x = torch.tensor(
        [complex(-inf, -1.5), complex(-inf, 0.0), complex(2.0, 0.5), complex(inf, 1.5)]
    )
    model = fmapper.convert(Function(lambda x: (x.exp2(), x.log2())), "jax", (x,))
    for got, want in zip(model(x.numpy()), (x.exp2(), x.log2()), strict=True):
        for part in ("real", "imag"):
            wanted = getattr(want, part).numpy()
            np.testing.assert_allclose(getattr(np.asarray(got), part), wanted, rtol=1e-6)


def test_powers_of_complex_numbers_at_their_corners():
    """Finite ones: of others torch's answer depends on the place in the array."""
    parts = torch.tensor([0.0, 1.0, 2.0, -0.5])
    grid = torch.cartesian_prod(parts, parts, parts, parts)
    x, y = torch.complex(grid[:, 0], grid[:, 1]), torch.complex(grid[:, 2], grid[:, 3])
    found = fmapper.convert(Function(torch.pow), "jax", (x, y), check=False)(x.numpy(), y.numpy())
    want = torch.pow(x, y).numpy()
    finite = np.isfinite(want)
    assert (np.isfinite(found) == finite).all()
    np.testing.assert_allclose(np.asarray(found)[finite], want[finite], rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_the_extreme_of_two_gives_no_gradient_of_nan_to_the_other():
    x, y = torch.tensor([1.0, -1.0, 2.0, nan]), torch.tensor([0.0, 0.0, 2.0, 1.0])
    for function in (torch.minimum, torch.maximum, torch.max):
        check_gradients(lambda x, y, function=function: 0 / function(x, y), x, y)
        check_gradients(function, x, y)


def test_numbers_in_a_range_of_few_bits_are_counted_before_they_are_truncated():
    check(
        lambda x: (torch.arange(1, 4.5, dtype=torch.int16) + x,
                   torch.arange(-0.5, 3.2, dtype=torch.int8) + x,
                   torch.arange(1, 4.5, dtype=torch.int64) + x),
        torch.tensor(1, dtype=torch.int8),
    )  # fmt: skip


@pytest.mark.nightly
def test_random_complex_numbers_have_random_parts():
    def drawn(x):
        return torch.empty_like(x).uniform_(2, 3)

    model = fmapper.convert(Function(drawn), "jax", (torch.zeros(500, dtype=torch.complex64),))
    found = np.asarray(model(np.zeros(500, np.complex64), key=jax.random.key(0)))
    for part in (found.real, found.imag):
        assert part.min() >= 2
        assert part.max() < 3
        assert abs(part.mean() - 2.5) < 0.1
    assert abs(np.corrcoef(found.real, found.imag)[0, 1]) < 0.2


def test_complex_numbers_of_halves_are_refused():
    x = torch.ones(2, dtype=torch.float16)
    with pytest.raises(fmapper.ConversionError, match="complex32"):
        fmapper.convert(Function(torch.complex), "jax", (x, x), check=False)(x.numpy(), x.numpy())


ALONG = """logcumsumexp logsumexp cumsum cumprod softmax log_softmax var mean sum prod amax argmax
nansum cummax median"""
OF_INTEGERS = {
    name: lambda x, name=name: [*getattr(torch, name)(x[None], 1)] for name in ALONG.split()
} | {
    "square": torch.square,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "floor": torch.floor,
    "hypot": lambda x: torch.hypot(x, x),
    "logaddexp": lambda x: torch.logaddexp(x, x),
    "gelu": torch.nn.functional.gelu,
    "norm": torch.linalg.vector_norm,
}


@pytest.mark.nightly_cases("log_softmax-torch.uint8")
@pytest.mark.sampled(24)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of what torch refuses
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_give_the_dtype_of_torch_or_are_refused_as_by_torch(name, dtype):
    function, x = OF_INTEGERS[name], torch.tensor([3, 1, 2, 0]).to(dtype)

    def converted():
        return fmapper.convert(Function(function), "jax", (x,))(x.numpy())

    with jax.enable_x64(True):
        try:
            wanted = function(x)
        except (RuntimeError, NotImplementedError):
            with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
                converted()
            return
        for found, want in zip(jax.tree.leaves(converted()), jax.tree.leaves(wanted), strict=True):
            assert found.dtype == want.numpy().dtype
            np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_the_median_of_nothing_is_that_of_torch(dtype):
    class Median(torch.nn.Module):
        def forward(self, x):
            return x.median()

    x = torch.zeros(0, 3, dtype=dtype)
    model = fmapper.convert(Median(), "jax", (x,), check=False)
    np.testing.assert_array_equal(np.asarray(model(x.numpy())), x.median().numpy())


def test_sigmoid_of_complex_numbers_is_nan_where_torch_divides_by_infinity():
    x = torch.tensor([complex(-torch.inf, -0.6), complex(-1000, 0.5), complex(-100, 0), 1 + 1j])
    model = fmapper.convert(Function(torch.sigmoid), "jax", (x,))
    torch.testing.assert_close(
        torch.from_numpy(np.array(model(x.numpy()))), torch.sigmoid(x), equal_nan=True
    )


def test_the_derivative_of_atan2_is_zero_at_the_origin():
    x = torch.tensor([0.0, -0.0, 0.0, 2.0, -1.0])
    y = torch.tensor([0.0, 0.0, -0.0, 0.0, 3.0])
    check(torch.atan2, x, y)
    check_gradients(torch.atan2, x, y)
