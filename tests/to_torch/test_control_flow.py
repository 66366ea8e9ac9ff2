"""Loops and branches of JAX in torch: values, dtypes and gradients are those of JAX."""

import warnings

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

X = jnp.asarray([1.0, -2.0, 3.0])
ROWS = jnp.asarray(np.random.RandomState(0).randn(5, 3), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randn(3, 3), jnp.float32)


def host(tree):
    """Arrays of JAX or torch as NumPy arrays; keys as their words."""
    found = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf.detach().numpy())
        elif jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            found.append(np.asarray(jax.random.key_data(leaf)))
        else:
            found.append(np.asarray(leaf))
    return found


def tensors(args):
    return jax.tree.map(lambda leaf: torch.from_numpy(host(leaf)[0].copy()), args)


def check(function, *args, tolerance=2e-6):
    """Converts, runs, and compares with JAX; gives the module."""
    module = fmapper.convert(function, "torch", args)
    for have, want in zip(host(module(*tensors(args))), host(function(*args)), strict=True):
        assert have.dtype == want.dtype
        assert have.shape == want.shape
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)
    return module


def total(tree):
    leaves = jax.tree.leaves(tree)
    return sum((x * x).sum() for x in leaves if "float" in str(x.dtype))


def check_gradient(function, *args):
    """Compares the gradients by the float arguments with jax.grad, autograd and torch.func."""
    module = check(function, *args)
    places = [i for i, x in enumerate(args) if "float" in str(x.dtype)]
    wanted = jax.grad(lambda *given: total(function(*given)), places)(*args)
    given = [x.requires_grad_() if i in places else x for i, x in enumerate(tensors(args))]
    total(module(*given)).backward()

    def of(*floats):
        full = list(tensors(args))
        for i, x in zip(places, floats, strict=True):
            full[i] = x
        return total(module(*full))

    transformed = torch.func.grad(of, tuple(range(len(places))))(
        *(given[i].detach() for i in places)
    )
    for i, want, other in zip(places, wanted, transformed, strict=True):
        np.testing.assert_allclose(given[i].grad, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(other.detach(), want, rtol=1e-5, atol=1e-5)


# --- scan -----------------------------------------------------------------------------------------


def recurrent(reverse=False, unroll=1):
    def run(xs, w):
        def step(carry, row):
            h, i = carry
            h = jnp.tanh(h @ w + row)
            return (h, i + 1), (h * 2, i)

        return lax.scan(step, (jnp.zeros(3), 0), xs, reverse=reverse, unroll=unroll)

    return run


@pytest.mark.nightly
@pytest.mark.parametrize("length", [1, 2, 5, 300])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan(length, reverse):
    xs = jnp.asarray(np.random.RandomState(length).randn(length, 3), jnp.float32)
    check_gradient(recurrent(reverse), xs, W / 3)


def test_scan_of_no_steps():
    module = check(recurrent(), jnp.zeros((0, 3)), W)
    carry, _ = module(torch.zeros(0, 3), torch.from_numpy(np.array(W)))
    assert carry[0].tolist() == [0, 0, 0]
    check(lambda x: lax.scan(lambda c, _: (c + 1, c), x, length=0), X)


@pytest.mark.nightly
def test_scan_that_jax_unrolls():
    check_gradient(recurrent(unroll=5), ROWS, W)


@pytest.mark.nightly
def test_scan_without_rows_without_carry_without_outputs():
    check_gradient(lambda x: lax.scan(lambda c, _: (c * x, c), x, length=4), X)
    check_gradient(lambda xs: lax.scan(lambda c, x: (c, x * 2), (), xs), ROWS)
    check_gradient(lambda xs: lax.scan(lambda c, x: (c + x, None), xs[0], xs), ROWS)


def test_scan_in_scan():
    def outer(carry, row):
        inner, seen = lax.scan(lambda c, x: (c * x + row.sum(), c), carry, row)
        return inner, seen

    check_gradient(lambda xs: lax.scan(outer, jnp.float32(0.3), xs), ROWS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "uint16", "int32", "uint32"])
def test_scan_carries_integers(dtype):
    def step(carry, row):
        after = ~carry if dtype == "bool" else carry * 3 + row
        return after, (carry, row)

    xs = jnp.asarray([[1, 200], [3, 4], [5, 255]]).astype(dtype)
    check(lambda first, xs: lax.scan(step, first, xs), xs[0], xs)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_scan_carries_64_bits(dtype):
    with jax.enable_x64(True):
        first = jnp.asarray([2**62 + 1, 7], dtype)
        check(lambda x: lax.scan(lambda c, _: (c * 3 + 1, c), x, length=3), first)


@pytest.mark.nightly
def test_scan_carries_keys():
    def step(key, _):
        key, own = jax.random.split(key)
        return key, jax.random.bits(own, (3,))

    check(lambda key: lax.scan(step, key, length=4), jax.random.key(3))
    check(lambda keys: lax.map(lambda k: jax.random.bits(k, (2,)), jax.random.split(keys, 3)),
          jax.random.key(3))  # fmt: skip


def test_scan_whose_function_holds_arrays():
    held = np.asarray([1.0, 2.0, 4.0], np.float32)
    table = jnp.asarray([5.0, 6.0, 7.0])

    def step(carry, row):
        return carry * held + table, row + jnp.asarray([3.0, 1.0, 2.0])

    check_gradient(lambda xs: lax.scan(step, xs[0], xs), ROWS)


def test_scan_gives_what_it_is_given():
    check_gradient(lambda x, xs: lax.scan(lambda c, row: (c, (row, c, row)), x, xs), X, ROWS)


def test_scan_of_trees():
    def step(carry, row):
        found = {"a": carry["a"] + row["x"], "b": carry["b"] * row["y"][0]}
        return found, (found, row["x"])

    def run(xs):
        rows = {"x": xs, "y": (xs * 2,)}
        return lax.scan(step, {"a": xs[0], "b": xs[1]}, rows)

    check_gradient(run, ROWS)


@pytest.mark.nightly
def test_map_and_associative_scan():
    check_gradient(lambda xs: lax.map(lambda x: jnp.tanh(x).sum(), xs), ROWS)
    check_gradient(lambda xs: lax.associative_scan(jnp.add, xs), ROWS)
    check_gradient(lambda xs: lax.associative_scan(lambda a, b: a * b, xs, reverse=True), ROWS)


# --- while ----------------------------------------------------------------------------------------


def newton(x):
    def step(state):
        i, y = state
        return i + 1, 0.5 * (y + jnp.abs(x) / y)

    return lax.while_loop(lambda s: s[0] < 8, step, (0, jnp.ones_like(x)))


def test_while():
    check(newton, X)
    check(lambda x: lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2 + 1, x), X)
    check(lambda x: lax.while_loop(lambda c: c.sum() > 100, lambda c: c * 2, x), X)  # no step


def test_while_has_the_gradient_that_its_steps_have():
    """JAX has none; here it is that of the steps that were made."""
    module = check(newton, X)
    x = tensors((X,))[0].requires_grad_()
    module(x)[1].sum().backward()
    np.testing.assert_allclose(x.grad, jnp.sign(X) * 0.5 / jnp.sqrt(jnp.abs(X)), rtol=1e-5)


def test_fori_with_bounds_that_are_arrays():
    def run(x, n):
        return lax.fori_loop(0, n, lambda i, c: c * 1.5 + i, x)

    module = check(run, X, jnp.int32(4))
    assert torch.equal(module(tensors((X,))[0], torch.tensor(0, dtype=torch.int32)),
                       tensors((X,))[0])  # fmt: skip


def test_fori_with_fixed_bounds_has_a_gradient():
    check_gradient(lambda x: lax.fori_loop(2, 6, lambda i, c: jnp.sin(c) * i, x), X)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int32", "bool"])
def test_while_carries_integers(dtype):
    if dtype == "bool":

        def step(state):
            return state[0] + 1, state[1] & (state[0] < 3)

        check(lambda x: lax.while_loop(lambda s: s[1].any(), step, (0, x > 0)), X)
        return
    first = jnp.asarray(200).astype(dtype)
    check(lambda x: lax.while_loop(lambda c: c > 100, lambda c: c // 2 + 7, x), first)
    if dtype == "uint32":  # above the signed half
        first = jnp.uint32(4_000_000_000)
        check(lambda x: lax.while_loop(lambda c: c > 100, lambda c: c // 2, x), first)


@pytest.mark.nightly
def test_while_with_a_batch_of_conditions():
    """JAX's vmap of a loop goes on until no element does; the others keep their values."""

    def one(x):
        return lax.while_loop(lambda c: c[1] < 50, lambda c: (c[0] + 1, c[1] * 2 + 1), (0, x))

    check(jax.vmap(one), jnp.asarray([1.0, 60.0, 30.0]))
    check(jax.vmap(jax.vmap(one)), jnp.asarray([[1.0, 60.0], [30.0, 2.0]]))


# --- cond -----------------------------------------------------------------------------------------


def branching(x):
    return lax.cond(x[0] > 0, lambda x: (x * 2, x), lambda x: (jnp.tanh(x), x + 1), x)


@pytest.mark.nightly_cases("x0")
@pytest.mark.parametrize("x", [X, -X])
def test_cond(x):
    check_gradient(branching, x)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("index", [-3, 0, 1, 2, 3, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_switch(index, count):
    branches = [lambda x: x * 2, jnp.sin, lambda x: x, lambda x: x + 1][:count]
    check_gradient(lambda i, x: lax.switch(i, branches, x), jnp.int32(index), X)


@pytest.mark.nightly
def test_branches_that_hold_arrays():
    first, second = np.asarray([1.0, 2, 4], np.float32), np.asarray([5.0, 2, 4], np.float32)

    def run(x):
        return lax.cond(x[0] > 0, lambda x: x * first, lambda x: x * second + first, x)

    check_gradient(run, X)
    check_gradient(run, -X)


def test_branches_that_give_constants_and_operands():
    def run(i, x):
        return lax.switch(i, [lambda x: (x, 1, True), lambda x: (x * 2, 5, False)], x)

    for i in (0, 1):
        check(run, jnp.int32(i), X)


def test_cond_of_a_cond_in_a_loop():
    def step(i, x):
        return lax.cond(
            x.sum() > 0,
            lambda x: lax.cond(i > 1, lambda x: x - 3, lambda x: x * 1.5, x),
            lambda x: x + 2.5,
            x,
        )

    check_gradient(lambda x: lax.fori_loop(0, 6, step, x), X)


@pytest.mark.nightly
def test_cond_under_vmap_of_jax():
    check_gradient(jax.vmap(branching), ROWS)


# --- torch.func.vmap ------------------------------------------------------------------------------


def several(function, xs):
    """torch.func.vmap of the converted function against jax.vmap."""
    module = fmapper.convert(function, "torch", (xs[0],))
    found = torch.func.vmap(module)(tensors((xs,))[0])
    for have, want in zip(host(found), host(jax.vmap(function)(xs)), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-6, atol=2e-6)


@pytest.mark.nightly_cases("branching")
@pytest.mark.parametrize("function", [newton, branching, lambda x: recurrent()(x[None], W)])
def test_vmap(function):
    several(function, ROWS)


def test_vmap_of_a_loop_whose_end_differs():
    def run(x):
        return lax.while_loop(lambda c: c[1] < 50, lambda c: (c[0] + 1, c[1] * 2 + 1), (0, x))

    several(run, jnp.asarray([1.0, 60.0, 30.0]))


@pytest.mark.nightly
def test_vmap_of_gradients_through_branches():
    module = fmapper.convert(branching, "torch", (X,))
    found = torch.func.vmap(torch.func.grad(lambda x: total(module(x))))(tensors((ROWS,))[0])
    want = jax.vmap(jax.grad(lambda x: total(branching(x))))(ROWS)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


# --- what is read past, and what is refused -------------------------------------------------------


def test_the_version_for_the_cpu():
    def run(x):
        return lax.platform_dependent(x, tpu=lambda x: x * 2, cpu=lambda x: x * 3)

    def other(x):
        return lax.platform_dependent(x, tpu=lambda x: x * 2, default=lambda x: x * 5)

    check(run, X)
    check(other, X)


def test_debug_print_is_left_out_with_a_warning():
    def run(x):
        jax.debug.print("x is {}", x)
        return x * 2

    with pytest.warns(fmapper.FmapperWarning, match=r"jax\.debug") as seen:
        module = fmapper.convert(run, "torch", (X,))
    assert len(seen) == 1
    assert module(tensors((X,))[0]).tolist() == [2, -4, 6]


def test_host_callbacks_are_refused():
    def run(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(fmapper.ConversionError, match="calls back into Python"):
        fmapper.convert(run, "torch", (X,))


def test_remat_is_inlined():
    module = check_gradient(jax.checkpoint(lambda x: jnp.sin(x) * x), X)
    assert module is None
    with warnings.catch_warnings():
        code = fmapper.convert(jax.checkpoint(jnp.sin), "torch", (X,)).code
    assert "checkpoint" not in code


def test_what_is_said_to_the_compiler_is_inlined():
    metadata = pytest.importorskip("jax.experimental.xla_metadata")
    if not hasattr(metadata, "xla_metadata_call"):
        pytest.skip("JAX before 0.11 has no xla_metadata_call")
    check_gradient(metadata.xla_metadata_call(lambda x: jnp.sin(x) * x, block="a"), X)


@pytest.mark.nightly
def test_sizes_that_vary_in_loops_and_branches():
    def run(x):
        def step(carry, row):
            return jnp.tanh(carry + row), (carry, jnp.zeros((carry.shape[0], 2)) + carry)

        scanned = lax.scan(step, jnp.zeros((x.shape[1], 1)), x[:, :, :1])
        chosen = lax.cond(x.sum() > 0, lambda x: x * jnp.ones(x.shape), lambda x: x, x)
        looped = lax.fori_loop(0, 3, lambda i, c: c + jnp.arange(c.shape[1])[:, None], x)
        return scanned, chosen, looped

    x = np.random.RandomState(0).randn(4, 7, 3).astype(np.float32)
    module = fmapper.convert(run, "torch", (jnp.asarray(x),), dynamic_shapes={"x": {1: "b"}})
    for b in (7, 3, 1):
        part = x[:, :b]
        for have, want in zip(
            host(module(torch.from_numpy(part.copy()))), host(run(part)), strict=True
        ):
            np.testing.assert_allclose(have, want, rtol=2e-6, atol=2e-6)
