"""Random numbers against `jax.random`, bit for bit, on every backend, eager and traced."""

import itertools
import math

import pytest

from fmapper import LossyCastError, random, to_numpy

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

SEED = 20
HOST = random.key(SEED)
TYPED = jax.random.key(SEED)
BACKENDS = ("numpy", "torch", "jax", "torch traced", "jax traced", "jax typed")


def key_of(backend):
    if backend.startswith("torch"):
        return torch.from_numpy(HOST.copy())
    if backend == "jax typed":
        return TYPED
    return jax.numpy.asarray(HOST) if backend.startswith("jax") else HOST


def draw(backend, function):
    """`function(key)` with a key of the backend, traced where that is said; as NumPy."""
    if backend == "torch traced":
        return np.asarray(to_numpy(torch.func.vmap(function)(key_of(backend)[None])[0]))
    if backend == "jax traced":
        function = jax.jit(function)
    return np.asarray(to_numpy(function(key_of(backend))))


def ulps(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b)
    return float(np.max(np.abs(a - b.astype(np.float64)) / np.spacing(np.abs(b)), initial=0))


def rounded_as_in(backend, dtype):
    """Where JAX rounds product and sum each, if the dtype is narrow and it is not the backend.

    XLA makes one operation of the two on processors that have it in 16 bits.
    """
    return jax.disable_jit(dtype in ("float16", "bfloat16") and not backend.startswith("jax"))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**40)])
def test_key_is_that_of_jax(seed, x64):
    assert random.key(seed).tolist() == jax.random.key_data(jax.random.key(seed)).tolist()
    assert random.key(seed).dtype == np.uint32


def test_key_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="64 bits"):
        random.key(2**64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num", [1, 2, 5, (2, 3)])
def test_split(backend, num):
    expected = jax.random.key_data(jax.random.split(TYPED, num))
    np.testing.assert_array_equal(draw(backend, lambda key: random.split(key, num)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("data", [0, 7, 2**32 - 1])
def test_fold_in(backend, data):
    expected = jax.random.key_data(jax.random.fold_in(TYPED, np.uint32(data)))
    np.testing.assert_array_equal(draw(backend, lambda key: random.fold_in(key, data)), expected)


@pytest.mark.sampled(21)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7, 5), (33_000,)])
@pytest.mark.parametrize("width", [8, 16, 32])
def test_bits(backend, width, shape):
    dtype = f"uint{width}"
    got = draw(backend, lambda key: random.bits(key, shape, dtype))
    np.testing.assert_array_equal(got, jax.random.bits(TYPED, shape, dtype))
    assert got.dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_of_64(backend, x64):
    got = draw(backend, lambda key: random.bits(key, (70_000,), "uint64"))
    np.testing.assert_array_equal(got, jax.random.bits(TYPED, (70_000,), "uint64"))


@pytest.mark.nightly_cases(
    "-1-1-float16-numpy", "0-1-bfloat16-numpy", "0-1-float16-numpy", "0-1-float16-torch"
)
@pytest.mark.sampled(12)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (-0.3, 0.9), (2.0, 7.5)])
def test_uniform(backend, dtype, low, high):
    got = draw(backend, lambda key: random.uniform(key, (300, 211), dtype, low, high))
    with rounded_as_in(backend, dtype):
        expected = np.asarray(jax.random.uniform(TYPED, (300, 211), dtype, low, high))
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == expected.dtype


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.3, 0.9)])
def test_uniform_in_float64(backend, low, high, x64):
    got = draw(backend, lambda key: random.uniform(key, (300, 211), "float64", low, high))
    np.testing.assert_array_equal(got, jax.random.uniform(TYPED, (300, 211), "float64", low, high))


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_uniform_between_arrays(backend):
    low, high = np.array([0.0, -2.0, 5.0], np.float32), np.array([1.0, 3.3, 6.1], np.float32)
    got = draw(backend, lambda key: random.uniform(key, (4, 3), minval=low, maxval=high))
    want = jax.random.uniform(TYPED, (4, 3), "float32", low, high)
    if jax.__version_info__ < (0, 12):
        np.testing.assert_array_equal(got, want)
    else:  # rounds twice, if bounds are arrays
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-7)


def test_one_rounding_where_two_would_differ():
    """A product and sum whose float64 sum lies halfway between two float32 numbers."""
    from fmapper_adapters.numpy import random as in_numpy
    from fmapper_adapters.torch.compute import random as in_torch

    a, b = np.array([1.0, 1.0]), np.array([2.0**-24, -(2.0**-24) / 2])
    c = np.array([2.0**-80, -(2.0**-80)])
    exact = in_numpy._add_odd(a + b, c).astype(np.float32)
    assert exact.tolist() == [1 + 2.0**-23, float(np.nextafter(np.float32(1), np.float32(0)))]
    found = in_torch._add_odd(torch.tensor(a + b), torch.tensor(c)).float()
    assert found.tolist() == exact.tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli(backend, p):
    got = draw(backend, lambda key: random.bernoulli(key, p, (1000,)))
    np.testing.assert_array_equal(got, jax.random.bernoulli(TYPED, p, (1000,)))
    assert got.dtype == bool


def test_bernoulli_does_not_depend_on_x64():
    expected = np.asarray(jax.random.bernoulli(TYPED, 0.3, (1000,)))
    with jax.enable_x64(True):
        for backend in BACKENDS:
            got = draw(backend, lambda key: random.bernoulli(key, 0.3, (1000,)))
            np.testing.assert_array_equal(got, expected)


def bounds(dtype):
    limits = np.iinfo(dtype)
    top = min(limits.max, 2**31 - 1)
    found = [(0, 10), (3, 3), (5, 2), (0, 256), (limits.min, top), (top - 3, top)]
    return [*found, (-5, 6)] if limits.min else found


@pytest.mark.sampled(75)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(d, *b) for d in ("int32", "uint32", "int8", "uint8", "int16", "uint16") for b in bounds(d)],
)
def test_randint(backend, dtype, low, high):
    got = draw(backend, lambda key: random.randint(key, (500,), low, high, dtype))
    expected = np.asarray(jax.random.randint(TYPED, (500,), low, high, dtype))
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == expected.dtype


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 10), (-5, 6), (-(2**63), 2**63 - 1), (-(2**62), 2**62 + 5), (3, 2**61), (4, 4)],
)
def test_randint_of_64(backend, low, high, x64):
    got = draw(backend, lambda key: random.randint(key, (500,), low, high, "int64"))
    np.testing.assert_array_equal(got, jax.random.randint(TYPED, (500,), low, high, "int64"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [0, 1, 2, 10, 3000])
def test_permutation_of_a_range(backend, n):
    got = draw(backend, lambda key: random.permutation(key, n))
    np.testing.assert_array_equal(got, jax.random.permutation(TYPED, n))
    assert got.dtype == np.int32
    assert sorted(got.tolist()) == list(range(n))


@pytest.mark.nightly_cases(
    "True-1-jax",
    "True-0-torch",
    "True-1-torch",
    "True--1-torch",
    "True-0-numpy",
    "True-1-numpy",
    "True--1-numpy",
)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("independent", [False, True])
def test_permutation_of_an_array(backend, axis, independent):
    x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    make = {"numpy": np.asarray, "torch": torch.tensor, "jax": jax.numpy.asarray}[backend]
    expected = jax.random.permutation(TYPED, x, axis, independent=independent)
    for key in (HOST, key_of(backend)):
        got = random.permutation(key, make(x), axis, independent=independent)
        np.testing.assert_array_equal(np.asarray(got), expected)


# --- normal --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_normal_on_the_host_is_the_same_everywhere(dtype):
    expected = random.normal(HOST, (200, 30), dtype)
    for like in (torch.ones(1), jax.numpy.ones(1)):
        moved = random.normal(HOST, (200, 30), dtype, like=like)
        assert type(moved) is type(like)
        np.testing.assert_array_equal(np.asarray(to_numpy(moved)), expected)


@pytest.mark.nightly_cases("float32-3-jax traced")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 3), ("float16", 0), ("bfloat16", 0)])
def test_normal_is_that_of_jax_but_for_rounding(backend, dtype, limit):
    got = draw(backend, lambda key: random.normal(key, (100_000,), dtype))
    expected = np.asarray(jax.random.normal(TYPED, (100_000,), dtype))
    assert got.dtype == expected.dtype
    assert ulps(got, expected.astype(got.dtype)) <= limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_normal_in_float64(backend, x64):
    got = draw(backend, lambda key: random.normal(key, (100_000,), "float64"))
    # XLA takes the logarithm of 1 - x * x, which rounds where x is near one; torch does not.
    expected = np.asarray(jax.random.normal(TYPED, (100_000,), "float64"))
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    np.testing.assert_allclose(np.median(np.abs(got - expected)), 0, atol=1e-15)


@pytest.mark.nightly_cases(
    "bfloat16-numpy",
    "float16-jax",
    "float16-torch traced",
    "bfloat16-jax traced",
    "float16-numpy",
    "float16-torch",
    "bfloat16-jax",
)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_truncated_normal(backend, dtype):
    got = draw(backend, lambda key: random.truncated_normal(key, -2, 1.5, (100_000,), dtype))
    with rounded_as_in(backend, dtype):
        expected = np.asarray(jax.random.truncated_normal(TYPED, -2, 1.5, (100_000,), dtype))
    # Where jit has folded the bounds, they differ in the last place, six times that at two sigma.
    limit = 7 * 2.0**-23 if dtype == "float32" else 0
    assert np.max(np.abs(got.astype(np.float64) - expected.astype(np.float64))) <= limit
    assert got.min() > -2
    assert got.max() < 1.5


def test_the_inverse_of_erf_in_float64_inverts_it():
    from fmapper_adapters.numpy.special import erfc, erfinv_

    x = np.concatenate([np.linspace(-1, 1, 2001)[1:-1], 1 - 2.0 ** -np.arange(2, 52)])
    inverse = x.copy()
    erfinv_(inverse)
    np.testing.assert_allclose([math.erf(v) for v in inverse], x, rtol=2e-15, atol=0)
    z = np.linspace(-6, 25, 4001)
    np.testing.assert_allclose(erfc(z[z < 5]), [math.erfc(v) for v in z[z < 5]], rtol=5e-15)
    np.testing.assert_allclose(erfc(z), [math.erfc(v) for v in z], rtol=4e-13)


# --- initial weights -----------------------------------------------------------------------------


@pytest.mark.nightly_cases(
    "shape0-glorot_uniform",
    "shape1-lecun_normal",
    "shape1-glorot_uniform",
    "shape1-glorot_normal",
    "shape1-he_uniform",
    "shape1-he_normal",
)
@pytest.mark.parametrize(
    "name", ["glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "lecun_normal"]
)
@pytest.mark.parametrize("shape", [(30, 20), (8, 6, 3, 3)])
def test_initialisers_are_those_of_jax(name, shape):
    expected = getattr(jax.nn.initializers, name)(in_axis=1, out_axis=0)(TYPED, shape)
    for like in (None, torch.ones(1), jax.numpy.ones(1)):
        got = np.asarray(getattr(random, name)(HOST, shape, like=like))
        assert ulps(got, np.asarray(expected)) <= 4
    other = getattr(jax.nn.initializers, name)(in_axis=0, out_axis=1)(TYPED, shape)
    got = getattr(random, name)(HOST, shape, in_axis=0, out_axis=1)
    assert ulps(got, np.asarray(other)) <= 4


def test_initialisers_name_axes_that_are_not_there():
    with pytest.raises(ValueError, match=r"shape \(3,\) have no axes in_axis=1"):
        random.glorot_uniform(HOST, (3,))


# --- where numbers go, and transformations -------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "like"), [*itertools.product(("numpy", "torch", "jax", "jax typed"), repeat=2)]
)
def test_like_decides_the_backend(backend, like):
    target = key_of(like)
    got = random.uniform(key_of(backend), (5,), like=target)
    assert isinstance(got, type(target) if like != "jax typed" else jax.Array)
    np.testing.assert_array_equal(np.asarray(got), jax.random.uniform(TYPED, (5,)))


@pytest.mark.nightly_cases("fold_in-args1", "permutation-args6", "split-args0", "randint-args5")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("split", (3,)),
        ("fold_in", (7,)),
        ("bits", ((5,), "uint8")),
        ("uniform", ((5,), "float32", -0.3, 0.9)),
        ("bernoulli", (0.3, (20,))),
        ("randint", ((5,), -3, 10)),
        ("permutation", (10,)),
        ("normal", ((50,),)),
        ("truncated_normal", (-2, 2, (50,))),
        ("glorot_normal", ((5, 3),)),
    ],
)
def test_torch_compile_takes_it_whole(name, args):
    def program(key):
        return getattr(random, name)(key, *args)

    torch.compiler.reset()
    got = torch.compile(program, backend="eager", fullgraph=True)(key_of("torch"))
    limit = 4 if "normal" in name else 0
    expected = to_numpy(program(key_of("torch")))
    if limit:
        np.testing.assert_array_max_ulp(to_numpy(got), expected, limit)
    np.testing.assert_allclose(to_numpy(got), expected, rtol=1e-6 if limit else 0)


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_a_host_key_beside_a_tracer(name):
    got = jax.jit(lambda x: x + getattr(random, name)(HOST, (4,), like=x))(jax.numpy.zeros(4))
    np.testing.assert_array_equal(np.asarray(got), getattr(random, name)(HOST, (4,)))


@pytest.mark.nightly_cases("bits")
@pytest.mark.parametrize("name", ["uniform", "normal", "bits"])
def test_vmap_over_keys(name):
    keys = random.split(HOST, 3)
    expected = np.stack([getattr(random, name)(key, (6,)) for key in keys])
    got = torch.func.vmap(lambda key: getattr(random, name)(key, (6,)))(torch.from_numpy(keys))
    limit = 3 if name == "normal" else 0
    np.testing.assert_array_max_ulp(to_numpy(got), expected, limit)
    got = jax.vmap(lambda key: getattr(random, name)(key, (6,)))(jax.numpy.asarray(keys))
    np.testing.assert_array_max_ulp(np.asarray(got), expected, limit)


def test_a_host_key_goes_where_the_number_is_that_is_folded_in():
    expected = random.fold_in(HOST, 5)
    traced = jax.jit(lambda step: random.fold_in(HOST, step))(5)
    tensor = random.fold_in(HOST, torch.tensor(5))
    assert (np.asarray(traced) == expected).all()
    assert isinstance(tensor, torch.Tensor)
    assert tensor.tolist() == expected.tolist()


@pytest.mark.nightly_cases("asarray")
@pytest.mark.parametrize("make", [torch.tensor, jax.numpy.asarray])
def test_bounds_and_probabilities_may_be_arrays_of_the_backend(make):
    low, high = np.array([0.0, -2.0, 5.0], np.float32), np.array([1.0, 3.3, 6.1], np.float32)
    key = make(HOST)
    got = random.uniform(key, (4, 3), minval=make(low), maxval=make(high))
    expected = random.uniform(HOST, (4, 3), minval=low, maxval=high)
    np.testing.assert_array_equal(np.asarray(got), expected)
    p = np.array([0.1, 0.9], np.float32)
    got = random.bernoulli(key, make(p), (50, 2))
    np.testing.assert_array_equal(np.asarray(got), random.bernoulli(HOST, p, (50, 2)))
    ends = np.array([0, -5]), np.array([3, 100])
    got = random.randint(key, (50, 2), *map(make, ends))
    np.testing.assert_array_equal(np.asarray(got), random.randint(HOST, (50, 2), *ends))


def test_the_setting_of_jax_does_not_matter():
    expected = random.uniform(HOST, (10,))
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(random.uniform(key_of("jax"), (10,)), expected)


@pytest.mark.parametrize(
    "wrong", [np.zeros(3, np.uint32), np.zeros((2, 2), np.uint32), np.zeros(2, np.int64)]
)
def test_what_is_no_key_is_refused(wrong):
    for key in (wrong, torch.from_numpy(wrong)):
        with pytest.raises(TypeError, match=r"fmapper.random.key\(seed\)"):
            random.uniform(key)


def test_a_seed_is_no_key():
    with pytest.raises(TypeError, match=r"key=5 is a int, not an array. Write fmapper.random.key"):
        random.uniform(5)


def test_another_generator_of_jax_is_refused():
    with pytest.raises(TypeError, match="two uint32 numbers"):
        random.uniform(jax.random.key(0, impl="rbg"))


def test_float64_where_jax_has_none():
    with pytest.raises(LossyCastError, match="jax_enable_x64"):
        random.uniform(HOST, (2,), "float64", like=jax.numpy.ones(1))
    with pytest.raises(LossyCastError, match="jax_enable_x64"):
        random.normal(HOST, (2,), "float64", like=jax.numpy.ones(1))


def test_unknown_dtypes_and_bad_shapes():
    with pytest.raises(ValueError, match="not one of float32"):
        random.normal(HOST, (2,), "int8")
    with pytest.raises(ValueError, match="negative"):
        random.normal(HOST, (-2,))


@pytest.mark.gpu("torch")
def test_on_a_gpu_the_bits_are_the_same():
    key = torch.from_numpy(HOST.copy()).cuda()
    for name, args in (("bits", ((999,),)), ("uniform", ((999,), "float32", -0.3, 0.9))):
        expected = getattr(random, name)(HOST, *args)
        for got in (
            getattr(random, name)(key, *args),
            getattr(random, name)(HOST, *args, like=key),
        ):
            assert got.is_cuda
            np.testing.assert_array_equal(got.cpu().numpy(), expected)
    moved = random.normal(HOST, (999,), like=key).cpu().numpy()
    np.testing.assert_array_equal(moved, random.normal(HOST, (999,)))
