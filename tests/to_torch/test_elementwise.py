"""Primitives of JAX on single elements, in torch: corners of every dtype, and their gradients."""

import warnings

import pytest

import fmapper
from sweeps import lax as sweep_lax

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

jnp = jax.numpy
lax = jax.lax

FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-30, -1e30, np.inf, -np.inf]
FLOATS += [np.nan, 80.7, -80.7, 0.9999999, 2.0**31, -(2.0**31), 2.0**24 + 1, 255.5, 7.3]
SIGNED = ["int8", "int16", "int32", "int64"]
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
REALS = ["float32", "float64", "float16", "bfloat16"]
COMPLEX = ["complex64"]


def corners(dtype):
    """Values of a dtype at which functions break."""
    if dtype == "bool":
        return np.array([True, False])
    if dtype in COMPLEX:
        parts = (0.0, 1.0, -1.0, 0.5, -2.5, 3.0)
        return np.array([complex(a, b) for a in parts for b in (*parts, -0.0)], dtype)
    if dtype in REALS:
        with np.errstate(over="ignore"):
            return np.array(FLOATS).astype(jnp.dtype(dtype))
    info = np.iinfo(dtype)
    found = {0, 1, 2, 7, 10, info.max, info.max - 1, info.max // 2 + 1, info.min, info.min + 1}
    found |= {info.bits - 1, info.bits, info.bits + 1}
    found |= {-1, -2, -7, -info.bits} if info.min else set()
    return np.array(sorted(found), dtype)


def pairs(dtype):
    values = corners(dtype)
    return np.repeat(values, len(values)), np.tile(values, len(values))


def check(function, *args, rounded=False, wide=None):
    """Converts a function and compares it with JAX on the same arguments; in 64 bits if any is."""
    if wide is None:
        wide = any(np.asarray(arg).dtype.name.endswith("64") for arg in args)
    with jax.enable_x64(wide):
        given = [jnp.asarray(arg) for arg in args]
        want = jax.tree.leaves(jax.jit(function)(*given))
        model = fmapper.convert(function, "torch", tuple(given))
        found = jax.tree.leaves(model(*[fmapper.to_torch(arg) for arg in given]))
        for x, y in zip(found, want, strict=True):
            assert sweep_lax.differs(fmapper.to_jax(x), y, rounded=rounded) == ""
    return model


ANY_INT = [lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.bitwise_and]
ANY_INT += [lax.bitwise_or, lax.bitwise_xor, lax.shift_left, lax.shift_right_arithmetic]
ANY_INT += [lax.shift_right_logical, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", SIGNED + UNSIGNED)
def test_integers_wrap_divide_shift_and_compare_as_in_jax(dtype):
    def function(x, y):
        return [primitive(x, y) for primitive in ANY_INT]

    check(function, *pairs(dtype))


@pytest.mark.nightly_cases(
    "three-uint8",
    "min-int16",
    "max-int16",
    "three-int32",
    "three-int64",
    "min-int8",
    "min-uint8",
    "max-int8",
    "max-int32",
    "max-uint8",
)
@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", SIGNED + UNSIGNED)
@pytest.mark.parametrize("number", ["min", "max", "zero", "three"])
def test_numbers_beside_integers(dtype, number):
    info = np.iinfo(dtype)
    value = {"min": info.min, "max": info.max, "zero": 0, "three": 3}[number]

    def function(x):
        y = np.array(value, dtype)[()]  # which JAX keeps as a literal
        return [p(x, y) for p in ANY_INT] + [p(y, x) for p in ANY_INT]

    check(function, corners(dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", SIGNED + UNSIGNED)
def test_bits_signs_and_powers_of_integers(dtype):
    def function(x):
        found = [lax.population_count(x), lax.clz(x), lax.bitwise_not(x), lax.sign(x), lax.neg(x)]
        if dtype in SIGNED:
            found.append(lax.abs(x))
        return [*found, *(lax.integer_pow(x, n) for n in (0, 1, 2, 3, 7))]

    check(function, corners(dtype))
    check(lambda x: lax.clamp(np.array(2, dtype)[()], x, np.array(7, dtype)[()]), corners(dtype))


def test_the_high_half_of_products():
    if not hasattr(lax, "mulhi"):
        pytest.skip("this JAX has no mulhi")
    for dtype in SIGNED + UNSIGNED:
        check(lax.mulhi, *pairs(dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", [*REALS, *SIGNED, *UNSIGNED, "bool", *COMPLEX])
def test_conversions_saturate_and_wrap_as_in_jax(source):
    targets = [*REALS, *SIGNED, *UNSIGNED, "bool", *COMPLEX]

    def function(x):
        return [lax.convert_element_type(x, target) for target in targets]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        check(function, corners(source), wide=True)


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_eight_bits_overflow_as_in_jax(target):
    values = np.array([448, 464, 465, 1e9, -1e9, np.inf, np.nan, 2e-3, 1e-4, -0.0], "float32")
    check(lambda x: lax.convert_element_type(x, target).astype("float32"), values)


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "int32"), ("float32", "uint8"), ("int64", "float32"), ("uint16", "bfloat16"),
     ("uint8", "uint32"), ("int16", "float64"), ("bfloat16", "int16")],
)  # fmt: skip
def test_the_bits_of_numbers_as_others(source, target):
    x = np.arange(3 * 8, dtype="int32").reshape(3, 8) * 1234567
    x = x.astype(jnp.dtype(source))
    parts = jnp.dtype(target).itemsize // x.dtype.itemsize
    x = x.reshape(3, 8 // parts, parts) if parts > 1 else x
    check(lambda x: lax.bitcast_convert_type(x, target), x, wide=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("bits", [(5, 10), (8, 7), (4, 3), (5, 2), (8, 23)], ids=str)
def test_reduced_precision(dtype, bits):
    check(lambda x: lax.reduce_precision(x, *bits), corners(dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", REALS)
def test_floats_are_compared_rounded_and_chosen_as_in_jax(dtype):
    def one(x):
        whole = [lax.round(x, method) for method in lax.RoundingMethod]
        return [*whole, lax.floor(x), lax.ceil(x), lax.sign(x), lax.abs(x), lax.neg(x),
                lax.is_finite(x), lax.square(x), lax.integer_pow(x, 3), lax.max(x, _0(dtype)) + 1,
                lax.min(x, _0(dtype)) + 1, lax.clamp(_0(dtype), x, _1(dtype)) + 1]  # fmt: skip

    def two(x, y):
        found = [p(x, y) for p in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge, lax.add)]
        return [*found, lax.select(x < y, x, y), lax.clamp(x, y, x) + 1]

    check(one, corners(dtype))
    check(two, *pairs(dtype))
    check(lambda x, y: (lax.max(x, y) + 1, lax.min(x, y) + 1), *pairs(dtype))


def _0(dtype):
    return np.zeros((), jnp.dtype(dtype))[()]


def _1(dtype):
    return np.ones((), jnp.dtype(dtype))[()]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_the_next_number(dtype):
    values = np.array([1.0, -1.0, 0.5, 2.0, -100.7, np.inf, -np.inf, np.nan]).astype(
        jnp.dtype(dtype)
    )
    check(lax.nextafter, np.repeat(values, 8), np.tile(values, 8))


SMOOTH = ["exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "tan", "asin"]
SMOOTH += ["acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sqrt", "rsqrt"]
REAL_ONLY = ["cbrt", "lgamma", "erfc", "bessel_i0e"]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", SMOOTH + REAL_ONLY)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_functions_have_the_values_and_limits_of_jax(name, dtype):
    if dtype == "complex64" and name in REAL_ONLY:
        return
    values = corners(dtype)
    if dtype == "complex64":  # the pole of log1p and atanh is infinite in its own way
        values = values[np.abs(np.abs(values.real) - 1) + np.abs(values.imag) > 0]
    if name == "exp2":  # of which JAX has a few digits where it is large
        values = values[np.abs(values) < 9]
    check(getattr(lax, name), values, rounded=name == "lgamma" or dtype == "complex64")


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_log2(dtype):
    """A primitive from JAX 0.11 on, before that two logarithms."""
    check(jnp.log2, corners(dtype), rounded=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_log2_of_narrow_floats(dtype):
    values = np.array([0.001, 0.5, 1, 2, 3, 7, 8, 1000]).astype(jnp.dtype(dtype))
    check(jnp.log2, values, rounded=True)


@pytest.mark.parametrize("name", ["erf", "erf_inv", "digamma", "bessel_i1e"])
def test_special_functions(name):
    check(getattr(lax, name), np.linspace(-0.99, 0.97, 23).astype("float64"))


@pytest.mark.nightly
def test_special_functions_of_several_arguments():
    rng = np.random.default_rng(0)
    a, b, x = (rng.gamma(2, 3, 40) for _ in range(3))
    check(lax.igamma, a, x, rounded=True)
    check(lax.igammac, a, x, rounded=True)
    check(lax.igamma_grad_a, a, x, rounded=True)
    check(lax.betainc, a, b, rng.random(40), rounded=True)
    check(lax.zeta, x + 1.5, a)
    check(lax.polygamma, np.floor(x), a)


def test_complex_numbers_in_parts():
    z = corners("complex64")
    check(lambda z: (lax.real(z), lax.imag(z), lax.conj(z), lax.abs(z), lax.sign(z)), z)
    check(lambda z: lax.complex(lax.real(z), lax.imag(z)), z)
    check(lambda x, y: (lax.max(x, y), lax.min(x, y)), *pairs("complex64"))
    check(lax.pow, z + 3, z, rounded=True)


def gradients(function, *args):
    """Gradients of the sum of a function, by torch and by JAX, in float32."""
    args = [np.asarray(arg, "float32") for arg in args]
    model = fmapper.convert(function, "torch", tuple(map(jnp.asarray, args)))
    tensors = [torch.tensor(arg, requires_grad=True) for arg in args]
    model(*tensors).sum().backward()
    want = jax.grad(lambda *xs: function(*xs).sum(), tuple(range(len(args))))(*args)
    for tensor, wanted in zip(tensors, want, strict=True):
        np.testing.assert_allclose(tensor.grad.numpy(), np.asarray(wanted), rtol=1e-5, atol=1e-7)


KINKS = {
    "abs": lax.abs,
    "max": lambda x: lax.max(x, np.float32(0)),
    "min": lambda x: lax.min(np.float32(1), x),
    "clamp": lambda x: lax.clamp(np.float32(-1), x, np.float32(1)),
    "sign": lambda x: lax.sign(x) * x,
    "round": lambda x: lax.round(x) + x,
    "square": lax.square,
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 7),
    "stop_gradient": lambda x: lax.stop_gradient(x) * x,
    "power": lambda x: x**4 + x**3,
    "select": lambda x: jnp.where(x > 0, x, 2 * x),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(KINKS))
def test_gradients_at_kinks_are_those_of_jax(name):
    gradients(KINKS[name], [-2.5, -1.0, -0.3, 0.0, 0.3, 1.0, 2.5])


STEPS = {
    "floor": lax.floor,
    "ceil": lax.ceil,
    "round": lax.round,
    "round away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "sign": lax.sign,
    "floor_divide": lambda x: jnp.floor_divide(np.float32(1), x),
}


@pytest.mark.parametrize("name", list(STEPS))
def test_no_gradient_passes_a_step(name):
    """Also where the slope of what stands before it is infinite: no NaN of zero times infinity."""
    gradients(lambda x: STEPS[name](1 / x) + x, [-1.5, 0.0, 0.3])


@pytest.mark.nightly
def test_gradients_where_arguments_are_equal_and_of_special_functions():
    x = np.array([-1.0, 0.0, 0.5, 1.0, 2.0])
    gradients(lax.max, x, x[::-1].copy())
    gradients(lax.clamp, x - 1, x, x[::-1].copy() + 1.5)
    gradients(lax.cbrt, np.array([-8.0, -0.3, 0.5, 27.0]))
    gradients(lax.igamma, x[2:], np.array([0.3, 1.0, 5.0]))
    gradients(
        lambda u: lax.betainc(jnp.full(3, 2.0), jnp.full(3, 3.0), u), np.array([0.1, 0.5, 0.9])
    )


def test_what_says_nothing_about_values_is_left_out():
    def function(x):
        y = lax.optimization_barrier((x, x + 1))
        return lax.stop_gradient(y[0]) + jnp.copy(y[1])

    model = check(function, np.arange(3, dtype="float32"))
    assert model.code.count("torch") == 0 or "detach" in model.code


@pytest.mark.nightly
def test_iota_counts_in_every_dtype():
    for dtype in ("float32", "int32", "uint8", "uint32", "complex64", "bfloat16"):
        check(lambda x, dtype=dtype: lax.broadcasted_iota(dtype, (2, 300, 3), 1), np.ones(1))


BITS = {
    "of the same size": (lambda x: lax.bitcast_convert_type(x, "int32"), "float32"),
    "smaller": (lambda x: lax.bitcast_convert_type(x, "uint8"), "float32"),
    "larger": (lambda x: lax.bitcast_convert_type(x.reshape(2, 2), "int32"), "float16"),
    "unsigned": (lambda x: x * 3 + x[0], "uint16"),
    "order": (lambda x: lax.top_k(x, 2), "float32"),
    "precision": (lambda x: lax.reduce_precision(x, 5, 3), "float32"),
    "next number": (lambda x: lax.nextafter(x, x[0]), "float16"),
    "shift": (lambda x: lax.shift_right_arithmetic(x, x[0]), "uint8"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dimension", [0, 1])
def test_vmap_of_torch_over_bits(name, dimension):
    function, dtype = BITS[name]
    xs = np.array(
        [[3, 1, 4, 8], [1, 5, 9, 0], [2, 6, 5, 7], [9, 200, 201, 7], [6, 6, 3, 2]]
    ).astype(dtype)
    model = fmapper.convert(function, "torch", (jnp.asarray(xs[0]),))
    given = torch.from_numpy(xs.T.copy() if dimension else xs)
    found = jax.tree.leaves(torch.func.vmap(model, dimension)(given))
    for have, want in zip(found, jax.tree.leaves(jax.vmap(function)(xs)), strict=True):
        np.testing.assert_array_equal(fmapper.to_numpy(have), want)
