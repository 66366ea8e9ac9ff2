"""Random numbers of JAX in torch: the same bits, and floats that differ by rounding at most."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax, random  # noqa: E402

KEY = random.key(7)
RAW = random.PRNGKey(3)

# Whole numbers, and floats after which there is no more than one rounding.
EXACT = {
    "bits": lambda k: random.bits(k, (3, 5)),
    "an odd number of bits": lambda k: random.bits(k, (7,)),
    "bits of 8": lambda k: random.bits(k, (7,), "uint8"),
    "bits of 16": lambda k: random.bits(k, (3, 3), "uint16"),
    "one": random.bits,
    "none": lambda k: random.bits(k, (0, 3)),
    "split": lambda k: random.key_data(random.split(k, 5)),
    "split to a shape": lambda k: random.key_data(random.split(k, (2, 3))),
    "fold in": lambda k: random.key_data(random.fold_in(k, 5)),
    "fold in a negative number": lambda k: random.key_data(random.fold_in(k, jnp.int32(-5))),
    "fold in many": lambda k: random.key_data(
        jax.vmap(random.fold_in, (None, 0))(k, jnp.arange(4))
    ),
    "fold in uint16": lambda k: random.key_data(random.fold_in(k, jnp.uint16(65000))),
    "fold in to many": lambda k: random.key_data(
        jax.vmap(random.fold_in, (0, None))(random.split(k, 3), 9)
    ),
    "seed": lambda k: random.key_data(random.key(random.randint(k, (), -100, 100))),
    "seed of uint16": lambda k: random.key_data(random.key(jnp.uint16(65000))),
    "many keys": lambda k: jax.vmap(lambda k: random.bits(k, (3,)))(random.split(k, 4)),
    "keys of two dimensions": lambda k: jax.vmap(
        jax.vmap(lambda k: random.bits(k, (3,), "uint8"))
    )(random.split(k, (4, 2))),
    "split many": lambda k: random.key_data(jax.vmap(random.split)(random.split(k, 4))),
    "clone": lambda k: random.key_data(random.clone(k)),
    "index": lambda k: random.bits(random.split(k, 5)[2]),
    "where": lambda k: random.key_data(
        jnp.where(jnp.asarray([True, False]), random.split(k), random.split(k)[::-1])
    ),
    "stacked": lambda k: random.key_data(jnp.stack([k, random.split(k)[0]])),
    "every other": lambda k: random.key_data(random.split(k, 6)[::2]),
    "uniform": lambda k: random.uniform(k, (3, 5)),
    "uniform between": lambda k: random.uniform(k, (500,), minval=-0.3, maxval=0.4),
    "uniform between integers": lambda k: random.uniform(k, (500,), minval=-3, maxval=10),
    "uniform from zero": lambda k: random.uniform(k, (500,), maxval=0.7),
    "uniform of nothing": lambda k: random.uniform(k, (9,), minval=1.0, maxval=-2.0),
    "uniform between arrays": lambda k: random.uniform(
        k, (9, 3), minval=-jnp.arange(3.0), maxval=jnp.asarray([0.3, 1.7, 9.1])
    ),
    "uniform of float16": lambda k: random.uniform(k, (100,), "float16", -0.3, 0.4),
    "uniform of bfloat16": lambda k: random.uniform(k, (100,), "bfloat16"),
    "bernoulli": lambda k: random.bernoulli(k, 0.3, (100,)),
    "rademacher": lambda k: random.rademacher(k, (20,)),
    "randint": lambda k: random.randint(k, (100,), -5, 1000),
    "randint of all": lambda k: random.randint(k, (100,), -(2**31), 2**31 - 1),
    "randint of uint8": lambda k: random.randint(k, (100,), 0, 100, "uint8"),
    "permutation": lambda k: random.permutation(k, 20),
    "permutation of rows": lambda k: random.permutation(k, jnp.arange(12).reshape(4, 3)),
    "shuffled rows": lambda k: random.permutation(
        k, jnp.arange(12).reshape(4, 3), axis=1, independent=True
    ),
    "choice": lambda k: random.choice(k, 10, (5,), replace=False),
    "choice with weights": lambda k: random.choice(k, 10, (5,), p=jnp.arange(10) / 45),
    "categorical": lambda k: random.categorical(k, jnp.arange(12.0).reshape(3, 4), shape=(5, 3)),
    "poisson": lambda k: random.poisson(k, jnp.asarray([0.5, 3.0, 20.0])),
    "geometric": lambda k: random.geometric(k, 0.3, shape=(10,)),
    "binomial": lambda k: random.binomial(k, 10, 0.3, shape=(10,)),
    "carried": lambda k: lax.fori_loop(
        0, 3, lambda i, c: (random.fold_in(c[0], i), c[1] + random.uniform(c[0], (2,))),
        (k, jnp.zeros(2)),
    )[1],
    "in a branch": lambda k: lax.cond(
        random.bernoulli(k), lambda k: random.key_data(random.split(k)[0]), random.key_data, k
    ),
}  # fmt: skip


def carrying(key, _):
    key, own = random.split(key)
    return key, random.normal(own, (2,))


# Floats that go through functions which XLA and torch round in their own ways.
CLOSE = {
    "normal": lambda k: random.normal(k, (500,)),
    "truncated normal": lambda k: random.truncated_normal(k, -1, 2, (100,)),
    "multivariate normal": lambda k: random.multivariate_normal(
        k, jnp.zeros(3), jnp.eye(3) * 2 + 0.1, (5,)
    ),
    "orthogonal": lambda k: random.orthogonal(k, 4),
    "exponential": lambda k: random.exponential(k, (100,)),
    "gumbel": lambda k: random.gumbel(k, (100,)),
    "laplace": lambda k: random.laplace(k, (100,)),
    "logistic": lambda k: random.logistic(k, (100,)),
    "cauchy": lambda k: random.cauchy(k, (10,)),
    "gamma": lambda k: random.gamma(k, jnp.asarray([0.3, 1.0, 4.5])),
    "loggamma": lambda k: random.loggamma(k, jnp.asarray([0.003, 1.0, 4.5])),
    "beta": lambda k: random.beta(k, 2.0, 3.0, (10,)),
    "dirichlet": lambda k: random.dirichlet(k, jnp.asarray([0.3, 1.0, 4.5]), (4,)),
    "chisquare": lambda k: random.chisquare(k, 3.0, shape=(10,)),
    "student": lambda k: random.t(k, 3.0, (10,)),
    "ball": lambda k: random.ball(k, 3, shape=(5,)),
    "weibull": lambda k: random.weibull_min(k, 1.0, 2.0, (10,)),
    "wald": lambda k: random.wald(k, 1.0, (10,)),
    "maxwell": lambda k: random.maxwell(k, (10,)),
    "triangular": lambda k: random.triangular(k, 0.0, 0.3, 1.0, (10,)),
    "carried": lambda k: lax.scan(carrying, k, length=3)[1],
}


def drawn(function, key, rounded_each=False):
    """What JAX draws, and what torch does, as NumPy arrays of the same dtype and shape.

    JAX runs each operation by itself where each is to be rounded: XLA makes one of a product and a
    sum in float16 on processors that have it.
    """
    module = fmapper.convert(function, "torch", (key,))
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = np.array(random.key_data(key) if is_typed else key)
    with jax.disable_jit(rounded_each):
        have, want = module(torch.from_numpy(words)), function(key)
    assert str(have.dtype) == f"torch.{want.dtype}"
    if want.dtype == jnp.bfloat16:
        have, want = have.float(), want.astype("float32")
    have, want = have.detach().numpy(), np.asarray(want)
    assert have.shape == want.shape
    return have, want


@pytest.mark.nightly_cases(
    "many keys",
    "randint",
    "permutation",
    "permutation of rows",
    "choice",
    "keys of two dimensions",
    "split many",
    "where",
    "uniform of float16",
    "randint of uint8",
    "choice with weights",
    "categorical",
    "poisson",
    "binomial",
)
@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", EXACT)
def test_the_same_numbers(name):
    np.testing.assert_array_equal(*drawn(EXACT[name], KEY, name == "uniform of float16"))


@pytest.mark.nightly_cases("many keys")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["bits", "split", "fold in", "many keys", "uniform", "carried"])
def test_keys_that_are_plain_arrays(name):
    np.testing.assert_array_equal(*drawn(EXACT[name], RAW))


@pytest.mark.nightly
@pytest.mark.parametrize("name", CLOSE)
def test_numbers_up_to_rounding(name):
    have, want = drawn(CLOSE[name], RAW)
    np.testing.assert_allclose(have, want, rtol=5e-6, atol=5e-7)


BITS = [
    "bits",
    "an odd number of bits",
    "bits of 8",
    "bits of 16",
    "none",
    "split",
    "split to a shape",
    "many keys",
    "keys of two dimensions",
    "fold in",
    "uniform",
]


@pytest.mark.sampled(3)
@pytest.mark.nightly_cases("many keys", "keys of two dimensions")
@pytest.mark.parametrize("name", BITS)
def test_the_other_order_of_counters(name):
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(*drawn(EXACT[name], RAW))


@pytest.mark.nightly
@pytest.mark.parametrize("partitionable", [False, True])
def test_64_bits(partitionable):
    with jax.enable_x64(True), jax.threefry_partitionable(partitionable):
        for function in (
            lambda k: random.bits(k, (3, 5), "uint64"),
            lambda k: random.uniform(k, (50,), "float64"),
            lambda k: random.uniform(k, (50,), "float64", -0.3, 0.4),
            lambda k: random.key_data(random.key(jnp.int64(-(2**40) - 3))),
            lambda k: random.key_data(random.key(jnp.uint64(2**63 + 3))),
            lambda k: random.key_data(random.fold_in(k, jnp.int64(2**40 + 3))),
            lambda k: random.randint(k, (50,), -(2**40), 2**50, "int64"),
        ):
            np.testing.assert_array_equal(*drawn(function, RAW))
        have, want = drawn(lambda k: random.normal(k, (50,), "float64"), RAW)
        np.testing.assert_allclose(have, want, rtol=1e-13)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["threefry4x32", "philox4x32", "philox2x32", "rbg", "unsafe_rbg"])
def test_other_generators(kind):
    try:
        key = random.key(5, impl=kind)
    except ValueError:
        pytest.skip(f"this JAX has no {kind}")
    for function in (
        lambda k: random.bits(k, (3, 5)),
        lambda k: random.bits(k, (7,), "uint8"),
        lambda k: random.key_data(random.split(k, 3)),
        lambda k: random.key_data(random.fold_in(k, 5)),
        lambda k: random.uniform(k, (9,)),
        lambda k: jax.vmap(lambda k: random.bits(k, (2,)))(random.split(k, 3)),
    ):
        np.testing.assert_array_equal(*drawn(function, key))


@pytest.mark.nightly_cases(
    "shape1-uint64-RNG_DEFAULT",
    "shape2-uint32-RNG_THREE_FRY",
    "shape0-uint8-RNG_DEFAULT",
    "shape1-uint8-RNG_DEFAULT",
    "shape2-uint32-RNG_DEFAULT",
    "shape3-uint8-RNG_DEFAULT",
    "shape3-uint32-RNG_DEFAULT",
    "shape3-uint32-RNG_THREE_FRY",
    "shape3-uint64-RNG_DEFAULT",
)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("algorithm", ["RNG_DEFAULT", "RNG_THREE_FRY"])
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (3, 4, 2)])
def test_the_generator_of_xla(algorithm, dtype, shape):
    kind = lax.RandomAlgorithm[algorithm]

    def run(state):
        return lax.rng_bit_generator(state, shape, dtype, algorithm=kind)

    with jax.enable_x64(True):
        words = np.asarray([1, 2**31 + 2, 2**32 - 2, 2**32 - 1], np.uint32)  # the counter overflows
        for state in (words, words.view(np.uint64)):
            module = fmapper.convert(run, "torch", (jnp.asarray(state),))
            for have, want in zip(
                module(torch.from_numpy(state.copy())), run(jnp.asarray(state)), strict=True
            ):
                np.testing.assert_array_equal(have, want)


@pytest.mark.nightly
def test_dropout_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    x = jnp.ones((4, 50))

    def run(key, x):
        return nnx.Dropout(0.4, deterministic=False, rngs=nnx.Rngs(key))(x)

    module = fmapper.convert(run, "torch", (RAW, x))
    found = module(torch.from_numpy(np.array(RAW)), torch.ones(4, 50))
    np.testing.assert_array_equal(found, run(RAW, x))


@pytest.mark.nightly
def test_gradients_through_samples():
    def run(alpha, low):
        sample = random.gamma(RAW, alpha) + random.loggamma(RAW, alpha)
        return (
            sample
            + random.uniform(RAW, (3,), minval=low, maxval=2.0)
            + random.normal(RAW, (3,)) * low
        )

    given = jnp.asarray([0.3, 1.0, 4.5]), jnp.asarray([0.1, -0.2, 0.3])
    module = fmapper.convert(run, "torch", given)
    mine = [torch.from_numpy(np.array(x)).requires_grad_() for x in given]
    module(*mine).sum().backward()
    wanted = jax.grad(lambda *xs: run(*xs).sum(), (0, 1))(*given)
    for have, want in zip(mine, wanted, strict=True):
        np.testing.assert_allclose(have.grad, want, rtol=2e-4)


@pytest.mark.nightly
def test_vmap_of_torch_over_keys():
    module = fmapper.convert(lambda k: random.uniform(k, (4,)), "torch", (RAW,))
    keys = random.split(RAW, 3)
    found = torch.func.vmap(module)(torch.from_numpy(np.array(keys)))
    np.testing.assert_array_equal(found, jax.vmap(lambda k: random.uniform(k, (4,)))(keys))


def test_drawing_is_one_call():
    module = fmapper.convert(lambda k: random.uniform(k, (4,)), "torch", (RAW,))
    calls = [node.target.__name__ for node in module.graph.nodes if node.op == "call_function"]
    assert [name for name in calls if name != "viewed"] == ["uniform"]


def test_a_state_of_xla_is_refused():
    def run(x):
        return lax.rng_uniform(0.0, 1.0, (3,)) + x

    with pytest.raises(fmapper.ConversionError, match=r"jax\.random"):
        fmapper.convert(run, "torch", (jnp.ones(3),))


def units(got, want):
    """How many floats lie between two arrays of float32, at most."""
    a, b = (np.asarray(x, np.float32).view(np.int32).astype(np.int64) for x in (got, want))
    a, b = (np.where(x < 0, -(x & 0x7FFFFFFF), x) for x in (a, b))
    return np.abs(a - b).max()


# What the documentation says of each distribution: the bits, units in the last place, or how near.
SAID = {
    "uniform": (lambda k: random.uniform(k, (5000,)), 0, 0, 0),
    "uniform between": (lambda k: random.uniform(k, (5000,), minval=-3.0, maxval=7.0), 0, 0, 0),
    "choice": (lambda k: random.choice(k, jnp.arange(9.0), (5000,)), 0, 0, 0),
    "normal, bfloat16": (lambda k: random.normal(k, (5000,), "bfloat16"), 0, 0, 0),
    "normal, float16": (lambda k: random.normal(k, (5000,), "float16"), 0, 0, 0),
    "normal": (lambda k: random.normal(k, (20000,)), 3, 0, 0),
    "truncated normal": (lambda k: random.truncated_normal(k, -2, 2, (20000,)), 3, 0, 0),
    "exponential": (lambda k: random.exponential(k, (20000,)), 2, 0, 0),
    "laplace": (lambda k: random.laplace(k, (20000,)), 2, 0, 0),
    "cauchy": (lambda k: random.cauchy(k, (20000,)), 2, 0, 0),
    "gumbel": (lambda k: random.gumbel(k, (20000,)), None, 0, 1e-6),
    "logistic": (lambda k: random.logistic(k, (20000,)), None, 0, 1e-6),
    "gamma": (lambda k: random.gamma(k, 2.5, (1000,)), None, 1e-5, 0),
    "beta": (lambda k: random.beta(k, 2.0, 3.0, (1000,)), None, 1e-5, 0),
    "dirichlet": (lambda k: random.dirichlet(k, jnp.ones(4), (250,)), None, 1e-5, 0),
    "t": (lambda k: random.t(k, 4.0, (1000,)), None, 1e-5, 0),
}


@pytest.mark.nightly_cases(
    "normal, float16",
    "gumbel",
    "laplace",
    "choice",
    "normal, bfloat16",
    "truncated normal",
    "exponential",
    "gamma",
    "beta",
    "dirichlet",
    "t",
)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SAID)
def test_distributions_are_as_near_as_is_said(name):
    function, most, relative, absolute = SAID[name]
    key = random.PRNGKey(0)
    model = fmapper.convert(function, "torch", (key,))
    got, want = fmapper.to_numpy(model(fmapper.to_torch(key)).clone()), np.asarray(function(key))
    assert got.dtype == want.dtype
    if most == 0:
        np.testing.assert_array_equal(got, want)
    elif most is not None:
        assert units(got, want) <= most
        assert (got == want).mean() > 0.75
    else:
        np.testing.assert_allclose(got, want, rtol=relative, atol=absolute)
