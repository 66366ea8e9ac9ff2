"""Shapes, gathers and scatters of JAX in torch, with indices of all kinds, also out of bounds."""

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

from support.from_jax import check, normal, operations  # noqa: E402

INSIDE = np.array([[0, 4, 3], [1, 2, 2]], np.int32)
OUTSIDE = np.array([[0, 4, -9], [7, 2, -1]], np.int32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: lax.broadcast_in_dim(x, (2, 3, 4, 5), (1, 3)), (3, 1)),
        (lambda x: lax.reshape(x, (5, 6), (2, 0, 1)), (2, 3, 5)),
        (lambda x: lax.squeeze(x, (0, 2)), (1, 3, 1)),
        (lambda x: lax.rev(x, (0, 2)), (2, 3, 4)),
        (lambda x: lax.slice(x, (1, 0), (5, 4), (2, 3)), (6, 4)),
        (lambda x: lax.pad(x, np.float32(7), ((-1, 2, 0), (1, -2, 0))), (3, 4)),
        (lambda x: lax.pad(x, np.float32(7), ((-1, 2, 1), (3, -2, 2))), (3, 4)),
        (lambda x: lax.pad(x, x[0, 0], ((1, 1, 0), (0, 0, 3))), (3, 4)),
        (lambda x: lax.pad(x, np.float32(7), ((-3, 1, 0), (0, -4, 0))), (3, 4)),
        (lambda x: [*jnp.split(x, 2, 1), jnp.tile(x, (2, 1)), *jnp.unstack(x)], (3, 4)),
        (lambda x: jnp.stack([x, x * 2], 1), (3, 4)),
    ],
)
def test_shapes(function, shape):
    check(function, normal(*shape))


@pytest.mark.nightly
def test_slices_start_where_they_fit():
    x, update = normal(5, 4), normal(2, 3, seed=1)
    for start in (-3, 2, 9):
        check(lambda x, i: lax.dynamic_slice(x, (i, 1), (2, 3)), x, np.int32(start))
        check(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i * 0)), x, update, np.int8(start))
        check(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), x, update, np.int32(start))
    check(lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3)), x, np.uint32(2**32 - 1))


@pytest.mark.nightly_cases(
    "int8-fill", "float32-fill", "uint32-fill", "bool-fill", "complex64-fill"
)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8", "uint32", "bool", "complex64"])
def test_indices_out_of_bounds(mode, dtype):
    x = (normal(5, 4) * 3).astype(dtype)
    check(lambda x, i: jnp.take(x, i, axis=0, mode=mode), x, OUTSIDE)
    check(lambda x, i: jnp.take(x, i, axis=1, mode=mode), x, OUTSIDE)
    check(lambda x, i: jnp.take(x, i, mode=mode), x, OUTSIDE)
    check(lambda x, i: jnp.take_along_axis(x, i, 1, mode=mode), x, np.resize(OUTSIDE, (5, 3)))


def test_lookups_are_single_functions():
    x = normal(5, 4)
    assert "embedding" in operations(check(lambda x, i: x[i], x, INSIDE))
    assert "index_select" in operations(check(lambda x, i: x[:, i], x, INSIDE[0, [0, 2, 1]] % 4))
    along = check(lambda x, i: jnp.take_along_axis(x, i, 1), x, np.resize(INSIDE % 4, (5, 3)))
    assert "gather" in operations(along)


@pytest.mark.nightly
def test_lookups_in_several_dimensions():
    x, i, j = normal(3, 4, 5), np.array([0, 2]), np.array([[1], [-2]])
    check(lambda x, i, j: [x[i, j], x[i, :, j], x[:, i, j], x[1, i], x[i, 1:, j]], x, i, j)
    check(lambda x, i: x[i], x, np.zeros((0,), np.int32), gradients=False)
    check(jax.vmap(lambda a, b: a[b, 1:]), x, np.array([[0, 3], [1, 1], [-1, 2]]))
    starts = np.array([0, 2, 9])
    check(jax.vmap(lambda a, b: lax.dynamic_slice(a, (b, b), (2, 3))), x, starts)


AT = np.array([3, 0, 7, 3, -1, 3, -9], np.int32)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["set", "add", "subtract", "min", "max"])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_scatters(name, mode):
    # the gradient of JAX is infinite there
    gradients = not (mode == "clip" and name in ("min", "max"))
    for function, x, updates in (
        (lambda x, i, u: getattr(x.at[i], name)(u, mode=mode), normal(5, 4), normal(7, 4, seed=1)),
        (lambda x, i, u: getattr(x.at[i], name)(u, mode=mode), jnp.ones((5,)), jnp.ones((7,))),
        (lambda x, i, u: getattr(x.at[:, i], name)(u, mode=mode), normal(4, 5), normal(4, 7)),
        (lambda x, i, u: getattr(x.at[i, i], name)(u, mode=mode), normal(5, 5), normal(7)),
    ):
        check(function, x, AT, updates, gradients=gradients)


@pytest.mark.nightly_cases("bfloat16-multiply")
@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["set", "add", "multiply", "min", "max"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "complex64", "bfloat16"])
def test_scatters_of_other_numbers(name, dtype):
    x, u = (np.asarray(normal(*s, seed=7) * 50) for s in ((5, 4), (7, 4)))
    if dtype == "complex64":
        x, u = x + 1j, np.round(u / 50) - 2j
    elif dtype.startswith("u"):
        x, u = np.abs(x) * 100, np.abs(u) * 100
    x, u = jnp.asarray(x).astype(dtype), jnp.asarray(u).astype(dtype)
    check(lambda x, i, u: getattr(x.at[i], name)(u), x, AT, u, gradients=False)


def test_the_largest_unsigned_numbers_are_the_largest():
    x, u = np.array([1, 2**32 - 1, 5], np.uint32), np.array([2**31, 7, 2**31], np.uint32)
    check(lambda x, u, i: [x.at[i].max(u), x.at[i].min(u)], x, u, np.array([0, 1, 2]))


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_windows_are_written_whole_or_not_at_all(mode):
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    at = np.array([[0, 0], [1, 1], [3, 2], [4, 0], [2, 3], [-1, 0]])
    for scatter in (lax.scatter, lax.scatter_add):
        check(
            lambda x, i, u, scatter=scatter: scatter(x, i, u, numbers, mode=mode),
            normal(5, 4),
            at,
            normal(6, 2, 2, seed=1),
        )


def test_scatters_by_a_function():
    x = normal(5, 4)
    check(lambda x, i: x.at[i].apply(lambda t: t * 2 + 1), x, AT, gradients=False)
    check(
        lambda x, i: x.at[i].apply(lambda t: t * 2 + 1, unique_indices=True),
        x,
        np.array([3, 0]),
        gradients=False,
    )


@pytest.mark.nightly
def test_batched_scatters():
    x, at, u = normal(3, 6, 5), np.array([[0, 3], [1, 1], [-1, 9]]), normal(3, 2, 5, seed=1)
    check(jax.vmap(lambda a, b, c: a.at[b].set(c)), x, at, u)
    check(jax.vmap(lambda a, b, c: a.at[b].add(c)), x, at, u)
    check(
        jax.vmap(lambda a, b, c: lax.dynamic_update_slice(a, c, (b, 0))),
        x,
        np.array([0, 3, 9]),
        u,
    )


def test_what_is_dropped_keeps_the_sign_of_zero():
    at = np.array([9], np.int32)
    found = check(lambda x, i, u: x.at[i].add(u), -jnp.zeros(3), at, jnp.ones(1))
    assert torch.signbit(found(-torch.zeros(3), torch.from_numpy(at), torch.ones(1))).all()


@pytest.mark.parametrize("mode", [None, "clip", "drop"])
def test_nothing_is_written_to_what_has_no_elements(mode):
    def function(x, y):
        at = jnp.array([1, 0, -1])
        return x.at[at].set(0.5, mode=mode), y.at[at].multiply(2.0, mode=mode), x.at[at].max(1.0)

    check(function, np.zeros((0, 3), np.float32), np.zeros(0, np.float32), gradients=False)
