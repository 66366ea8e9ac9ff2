"""Reductions over windows of JAX in torch, and what is chosen in windows."""

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

from support.from_jax import check, normal  # noqa: E402

ZERO, LOW, HIGH = np.float32(0), -np.float32(np.inf), np.float32(np.inf)


def pool(start, function, window, strides, padding="VALID", **options):
    return lambda x: lax.reduce_window(x, start, function, window, strides, padding, **options)


@pytest.mark.nightly_cases("window2-strides2-SAME-start2-min")
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("start", "function"), [(ZERO, lax.add), (LOW, lax.max), (HIGH, lax.min)])
@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        ((1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
        ((1, 3, 1, 1), (1, 1, 1, 1), "SAME"),
        ((1, 5, 5, 1), (1, 1, 1, 1), ((0, 0), (4, 0), (0, 3), (0, 0))),
        ((2, 2, 2, 2), (1, 1, 1, 1), "SAME"),
        ((1, 1, 1, 1), (1, 2, 1, 1), "VALID"),
        ((2, 8, 9, 3), (1, 1, 1, 1), "VALID"),
        ((1, 9, 1, 1), (1, 1, 1, 1), "VALID"),
    ],
)
def test_pooling(start, function, window, strides, padding):
    check(pool(start, function, window, strides, padding), normal(2, 8, 9, 3))


@pytest.mark.nightly
def test_the_first_of_equal_elements_gets_the_gradient():
    x = jnp.round(normal(2, 8, 9, 3))
    for start, function in ((LOW, lax.max), (HIGH, lax.min)):
        check(pool(start, function, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), x)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("start", [None, 3])
@pytest.mark.parametrize("name", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int32", "uint32"])
def test_dilated_windows_of_any_numbers(dtype, name, start):
    x = normal(3, 7, 8)
    x = (x * 2**20).astype("int32").astype(dtype) if "int" in dtype else x.astype(dtype)
    if start is None:
        low = jnp.iinfo(dtype).min if "int" in dtype else -np.inf
        high = jnp.iinfo(dtype).max if "int" in dtype else np.inf
        start = {"add": 0, "mul": 1, "max": low, "min": high}[name]
    function = pool(
        np.asarray(start, dtype)[()],
        getattr(lax, name),
        (1, 3, 2),
        (1, 2, 1),
        ((0, 0), (2, 1), (0, 3)),
        base_dilation=(1, 2, 1),
        window_dilation=(1, 1, 2),
    )
    check(function, x, gradients=False)


def test_windows_by_a_function():
    half = np.float32(0.5)
    function = pool(np.float32(1), lambda a, b: a * b + a * half, (1, 2, 2), (1, 1, 1), "SAME")
    check(function, normal(2, 4, 5), gradients=False)


def test_windows_of_two_arrays():
    def larger(a, b):
        first = a[0] >= b[0]
        return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])

    def function(x, y):
        return lax.reduce_window((x, y), (LOW, np.int32(-1)), larger, (2, 2), (2, 2), "VALID")

    check(function, normal(4, 6), np.arange(24, dtype=np.int32).reshape(4, 6), gradients=False)


def test_bools_and_complex_numbers():
    check(pool(np.bool_(True), lax.bitwise_and, (3,), (1,), "SAME"), normal(9) > 0)
    check(pool(np.bool_(False), lax.bitwise_or, (3,), (2,)), normal(9) > 0)
    check(pool(np.complex64(0), lax.add, (3,), (1,), "SAME"), normal(9).astype("complex64") * 1j)


@pytest.mark.nightly
@pytest.mark.parametrize(("start", "function"), [(LOW, lax.max), (HIGH, lax.min)])
def test_the_programs_of_gradients_and_tangents(start, function):
    reduced = pool(start, function, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    x = jnp.round(normal(2, 8, 9, 3) * 3)
    check(jax.grad(lambda x: jnp.sum(reduced(x) ** 2)), x, gradients=False)
    check(lambda x, t: jax.jvp(reduced, (x,), (t,)), x, normal(2, 8, 9, 3, seed=1), gradients=False)


@pytest.mark.nightly
def test_second_gradients():
    reduced = pool(LOW, lax.max, (2, 2), (2, 2))
    first = jax.grad(lambda x: jnp.sum(reduced(x) ** 2))
    check(first, normal(4, 6))
