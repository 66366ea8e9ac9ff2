"""What is infinite, NaN or zero with a sign is in the same places as in JAX."""

import functools

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

import fmapper  # noqa: E402

RNG = np.random.default_rng(0)
ODD = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 6.0, 1e20, 3e38, -3e38,
       88.8, -88.8, 1e-3, 127.5]  # fmt: skip
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}


def places(x):
    """What each element is: NaN, infinite, zero, or the rest, and its sign."""
    x = np.asarray(x).astype(np.float64)
    kind = np.where(np.isnan(x), 9, np.where(np.isinf(x), 2, np.where(x == 0, 0.5, 1)))
    return np.where(kind == 9, 9, np.copysign(kind, x))


def check(function, *args, tiny=1e-30, whole=False):
    """Compares a converted function with JAX on odd values: with one result, or a tuple."""
    args = [jnp.asarray(a) for a in args]
    model = fmapper.convert(function, "torch", args)
    got = jax.tree.leaves(model(*(fmapper.to_torch(a) for a in args)))
    for g, want in zip(got, jax.tree.leaves(function(*args)), strict=True):
        x = np.asarray(fmapper.to_numpy(g)).astype(np.float64)
        y = np.asarray(want).astype(np.float64)
        assert x.shape == y.shape
        near = np.abs(y) < tiny  # JAX makes zeros of these
        np.testing.assert_array_equal(np.where(near, 0, places(x)), np.where(near, 0, places(y)))
        finite = np.isfinite(y)
        size = np.abs(y[finite]).max(initial=0.0) if whole else np.abs(y[finite])
        bound = TOLERANCE.get(want.dtype.name, 0) * size + tiny
        assert (np.abs(x[finite] - y[finite]) <= bound).all()
    return model


def grid(dtype):
    """All pairs."""
    with np.errstate(all="ignore"):
        odd = jnp.asarray(ODD, "float32").astype(dtype)
    return jnp.repeat(odd, len(odd)), jnp.tile(odd, len(odd))


UNARY = {
    "relu": jax.nn.relu, "relu6": jax.nn.relu6, "silu": jax.nn.silu, "tanh": jnp.tanh,
    "softplus": jax.nn.softplus, "clip": lambda x: jnp.clip(x, 0, 6), "sign": jnp.sign,
    "max 0": lambda x: jnp.maximum(x, 0), "min 0": lambda x: jnp.minimum(0.0, x),
    "max -0": lambda x: jnp.maximum(x, -0.0), "min -0": lambda x: jnp.minimum(x, -0.0),
    "root as a power": lambda x: x**0.5, "its reciprocal": lambda x: x**-0.5,
    "cubed": lambda x: x**3, "squared below": lambda x: x**-2.0, "cosh": jnp.cosh,
    "sinh": jnp.sinh, "erf_inv": jax.lax.erf_inv, "i1e": jax.scipy.special.i1e,
    "argmax": jnp.argmax, "argmin": jnp.argmin, "sort": jnp.sort, "max": jnp.max,
    "cummax": jax.lax.cummax, "to int8": lambda x: x.astype("int8"),
    "to uint32": lambda x: x.astype("uint32"), "top": lambda x: jax.lax.top_k(x, 4),
}  # fmt: skip


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_functions_of_one_number(name, dtype):
    check(UNARY[name], jnp.asarray(ODD, "float32").astype(dtype))
    check(UNARY[name], jnp.asarray(ODD[4:8], "float32").astype(dtype))  # not a whole vector


BINARY = {
    "max": jnp.maximum, "min": jnp.minimum, "remainder": jax.lax.rem, "mod": jnp.mod,
    "floor_divide": jnp.floor_divide, "power": jnp.power, "atan2": jnp.arctan2,
    "logaddexp": jnp.logaddexp, "copysign": jnp.copysign, "hypot": jnp.hypot, "fmax": jnp.fmax,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name):
    check(BINARY[name], *grid("float32"))


ENDS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 3.0, -0.5, -1.0, -2.0]


@pytest.mark.daily_cases("float32-zeta", "bfloat16-zeta")
@pytest.mark.parametrize("function", [jax.lax.igamma, jax.lax.igammac, jax.lax.zeta])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_special_functions_at_the_ends_of_their_axes(function, dtype):
    x = jnp.asarray(ENDS, dtype)
    check(function, jnp.repeat(x, len(x)), jnp.tile(x, len(x)))


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX has other values there since")
def test_polygamma_at_its_poles():
    order, x = jnp.asarray([0.0, 1, 2, 3, -1, 0.5, np.nan], "float32"), jnp.asarray(ENDS, "float32")
    check(jax.lax.polygamma, jnp.repeat(order, len(x)), jnp.tile(x, len(order)))


# --- what is recognised ---


def rows():
    """Matrices that are odd in one row each."""
    x = RNG.normal(size=(12, 8)).astype(np.float32)
    x[0, 3], x[1, 2], x[2, 5] = np.nan, np.inf, -np.inf
    x[3], x[4], x[5], x[6] = -np.inf, np.inf, 0.0, -0.0
    x[7], x[8, 1:], x[9] = 1e4, -np.inf, -500.0
    x[10, :4] = 200.0
    return x


def shifted(x, m):
    return jnp.exp(x - m) / jnp.exp(x - m).sum(-1, keepdims=True)


PATTERNS = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "softmax, by hand": lambda x: shifted(x, x.max(-1, keepdims=True)),
    "exponentials that overflow": lambda x: shifted(x, 0.5),
    "exponentials that vanish": lambda x: shifted(x, x.max(-1, keepdims=True, initial=0.0)),
    "shifted by the mean": lambda x: shifted(x, x.mean(-1, keepdims=True)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu with tanh": jax.nn.gelu,
    "mean": lambda x: x.mean(-1),
    "layer norm": lambda x: (
        (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    ),
    "RMS norm": lambda x: x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6),
    "dense": lambda x: x @ np.ones((8, 3), np.float32) + np.array([1, -np.inf, 0], np.float32),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    check(PATTERNS[name], rows(), tiny=1e-5, whole=True)


@pytest.mark.parametrize("name", ["mean", "RMS norm", "dense"])
def test_patterns_in_half_precision_overflow_where_those_of_jax_do(name):
    x = np.full((2, 8), 300.0, np.float16)
    x[1] = 2e4
    functions = {
        "mean": lambda x: jax.lax.reduce(x, np.float16(0), jax.lax.add, (1,)) / np.float16(8),
        "RMS norm": PATTERNS["RMS norm"],
        "dense": lambda x: x @ np.ones((8, 3), np.float16) + np.full(3, -6e4, np.float16),
    }
    check(functions[name], x, tiny=1e-3)


def attention(q, k, v, mask=None, bias=None, fill=-1e9):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, fill)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def heads(count=6):
    return [RNG.normal(size=(2, count, 3, 8)).astype(np.float32) for _ in range(3)]


SEEN = np.arange(6) < 4
CAUSAL = np.tril(np.ones((6, 6), bool))
VALUES = [np.nan, np.inf, -np.inf, 3e38, 1e20, -1e12]


@pytest.mark.nightly_cases(
    "q-all-3e+38",
    "q-padded-inf",
    "q-padded-3e+38",
    "q-padded-1e+20",
    "q-padded-nan",
    "q-padded--inf",
)
@pytest.mark.sampled(15)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("mask", [SEEN, CAUSAL, None], ids=["padded", "causal", "all"])
@pytest.mark.parametrize("part", [0, 1, 2], ids=["q", "k", "v"])
def test_attention_with_an_odd_number_somewhere(value, mask, part):
    args = heads()
    args[part][0, 5, 1, 2] = value  # of a key that the masks remove, wholly or from most rows
    check(functools.partial(attention, mask=mask), *args, tiny=1e-4, whole=True)


@pytest.mark.nightly
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_attention_of_jax_over_a_cache_that_is_not_filled(value):
    q, k, v = heads()
    k[:, 4:] = value
    function = functools.partial(jax.nn.dot_product_attention, mask=SEEN[None, None, None])
    check(function, q, k, v, tiny=1e-4, whole=True)


@pytest.mark.parametrize("fill", [-1e4, -1e9, float(np.finfo(np.float32).min)])
def test_attention_whose_scores_are_below_those_of_what_is_not_seen(fill):
    q, k, v = heads()
    q, k = -np.abs(q) * 1e6, np.abs(k) * 1e6
    check(functools.partial(attention, mask=SEEN, fill=fill), q, k, v, tiny=1e-4, whole=True)


def test_attention_with_rows_that_see_nothing():
    mask = np.tril(np.ones((6, 6), bool), -1)
    check(functools.partial(attention, mask=mask), *heads(), tiny=1e-4, whole=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_attention_with_an_odd_bias(value):
    bias = RNG.normal(size=(3, 6, 6)).astype(np.float32)
    bias[0, 0] = value
    bias[1, 1, 1] = value
    q, k, v = heads()

    def biased(params, q, k, v):
        return attention(q, k, v, bias=params["bias"])

    model = fmapper.convert((biased, {"bias": jnp.asarray(bias)}), "torch", (q, k, v))
    got = model(*map(torch.from_numpy, (q, k, v))).detach()
    want = np.asarray(attention(q, k, v, bias=bias))
    got = got.numpy()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_attention_chooses_in_each_call():
    q, k, v = map(jnp.asarray, heads())
    model = fmapper.convert(functools.partial(attention, mask=SEEN), "torch", (q, k, v))
    for odd in (k, k.at[:, 4:].set(jnp.nan), k * 1e6, k):
        got = model(*(fmapper.to_torch(x) for x in (q, odd, v)))
        want = attention(q, odd, v, mask=SEEN)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_attention_can_be_mapped_differentiated_forward_and_exported():
    args = tuple(map(torch.from_numpy, heads()))
    model = fmapper.convert(functools.partial(attention, mask=SEEN), "torch", tuple(heads()))
    want = model(*args)
    mapped = torch.func.vmap(model)(*(torch.stack([x, x]) for x in args))
    torch.testing.assert_close(mapped[1], want, rtol=1e-4, atol=1e-5)
    tangent = torch.func.jvp(lambda q: model(q, *args[1:]), args[:1], args[:1])[1]
    assert torch.isfinite(tangent).all()
    exported = torch.export.export(model, args).module()
    bad = args[1].clone()
    bad[:, 4:] = torch.nan
    torch.testing.assert_close(exported(args[0], bad, args[2]), model(args[0], bad, args[2]))


@pytest.mark.parametrize("dtype", ["bool", "complex64"])
def test_bounds_of_what_torch_does_not_clamp(dtype):
    x = jnp.asarray([0, 1, 1, 0] if dtype == "bool" else [1 + 2j, -1, 3 - 1j, 1j, -1j], dtype)
    low, high = jnp.zeros((), dtype), jnp.ones((), dtype)
    got = fmapper.convert(lambda x: jax.lax.clamp(low, x, high), "torch", (x,))
    np.testing.assert_array_equal(
        fmapper.to_numpy(got(fmapper.to_torch(x))), jax.lax.clamp(low, x, high)
    )


@pytest.mark.nightly_cases("3e+19-True", "3e+18-False", "3e+18-True")
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("size", [3e18, 3e19])
def test_layer_norms_whose_squares_overflow_are_jax_s_without_torch_s_own(fast, size):
    """`F.layer_norm` is right, zero or NaN there at other sizes than JAX; RMS norms are JAX's."""
    nnx = pytest.importorskip("flax.nnx")
    x = np.asarray([[1.0, 2.0, 3.0, 5.0]], np.float32)
    large = x * np.float32(size)
    for cls, fused in ((nnx.LayerNorm, False), (nnx.RMSNorm, True)):
        net = cls(4, use_fast_variance=fast, rngs=nnx.Rngs(0))
        model = fmapper.convert(net, "torch", (x,), fused=fused)
        got = model(torch.from_numpy(large)).detach()
        np.testing.assert_allclose(got, net(large), rtol=1e-5)  # XLA's fusions make NaN of some


def test_sums_of_exponentials_of_integers_are_refused_as_by_jax():
    x = jnp.array([1, 2, 5], jnp.int16)
    with pytest.raises(fmapper.ConversionError, match="no answer for integers"):
        fmapper.convert(jax.lax.cumlogsumexp, "torch", (x,), check=False)(fmapper.to_torch(x))
    none = jnp.zeros((0,), jnp.int16)
    found = fmapper.convert(jax.lax.cumlogsumexp, "torch", (none,))(fmapper.to_torch(none))
    assert str(found.dtype) == "torch.int16"


def slopes(function, x, weights):
    """The derivatives of the weighted sum of what a function gives, by JAX and by autograd."""
    model = fmapper.convert(function, "torch", (x,))
    leaf = fmapper.to_torch(x).requires_grad_()
    (model(leaf) * fmapper.to_torch(weights)).sum().backward()
    return jax.grad(lambda x: (function(x) * weights).sum())(x), leaf.grad.numpy()


SLOPES = {
    "abs": jnp.abs, "copysign": lambda x: jnp.copysign(x, 2.0), "sinh": jnp.sinh, "cosh": jnp.cosh,
    "cubed below": lambda x: x**-3, "squared below": lambda x: x**-2,
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_at_zeros_of_both_signs_and_where_numbers_overflow(name):
    x = jnp.asarray([np.inf, -np.inf, -0.0, 0.0, 1e20, -1e20, 3e38, 127.5, 1.0, -2.5], "float32")
    want, got = slopes(SLOPES[name], x, jnp.arange(1.0, 11.0))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.nightly_cases(
    "cummin-False-5",
    "cummin-True-8",
    "cummax-False-2",
    "cummax-False-5",
    "cummax-False-8",
    "cummax-False-13",
    "cumlogsumexp-False-8",
    "cummax-True-2",
    "cummax-True-5",
    "cummax-True-8",
    "cummax-True-13",
    "cumlogsumexp-False-13",
)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cummax", "cummin", "cumlogsumexp"])
def test_equal_elements_so_far_share_a_slope_as_in_jax(name, reverse, size):
    draw = np.random.default_rng(size)
    x = jnp.asarray(draw.integers(-2, 3, (3, size, 2)), "float32")
    weights = jnp.asarray(draw.standard_normal(x.shape), "float32")

    def function(x):
        return getattr(jax.lax, name)(x, axis=1, reverse=reverse)

    want, got = slopes(function, x, weights)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_slopes_of_logarithms_of_sums_of_large_exponentials():
    x = jnp.asarray([-20.0, 1e20, 2e20, -3e38, 3e38], "float32")  # by torch's own all are one
    want, got = slopes(lambda x: jax.lax.cumlogsumexp(x, axis=0), x, jnp.arange(1.0, 6.0))
    np.testing.assert_array_equal(got, want)


@pytest.mark.nightly
def test_a_product_that_is_asked_to_be_real_never_sees_imaginary_parts():
    def function(x, y):
        return jnp.matmul(x, y, preferred_element_type=jnp.float32)

    x = jnp.ones((3, 3), "bfloat16").at[1, 1].set(jnp.inf)
    check(function, x, jnp.full((3, 3), 1 + 2j, "complex64"))


def test_complex_numbers_that_are_constants_are_compared():
    check(lambda x: jnp.logical_and(x, np.float32(2)), jnp.asarray([1 - 2j, 0j], "complex64"))
