"""Products of halves in float32: what JAX gives, without a float32 copy of each matrix."""

import itertools

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

from fmapper_adapters.torch.lax.matrices import wide_products  # noqa: E402


def network(params, x):
    for weight in params:
        y = jnp.dot(x, weight, preferred_element_type=jnp.float32)
        x = jax.nn.relu(y).astype(x.dtype)
    return y


def case(dtype, *sizes):
    rng = np.random.default_rng(0)
    params = [
        jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, dtype)
        for shape in itertools.pairwise(sizes)
    ]
    return params, jnp.asarray(rng.normal(size=(2, 3, sizes[0])), dtype)


def exact_case(dtype, *sizes):
    """Multiples of powers of two whose sums have no more digits than float32.

    Of other numbers the last digit of a sum goes by its order, and a digit of its half with it.
    """
    rng = np.random.default_rng(0)
    params = [
        jnp.asarray(rng.integers(-4, 5, size=shape) / 64, dtype)
        for shape in itertools.pairwise(sizes)
    ]
    return params, jnp.asarray(rng.integers(-4, 5, size=(2, 3, sizes[0])) / 8, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("block", [1 << 23, 5000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_and_gradients_are_those_of_jax(dtype, block, monkeypatch):
    monkeypatch.setattr(wide_products, "_BLOCK", block)
    params, x = exact_case(dtype, 256, 300, 320, 256)
    model = fmapper.convert((network, params), "torch", (x,))
    given = fmapper.to_torch(x)
    with torch.no_grad():
        np.testing.assert_array_equal(model(given), network(params, x))
    model(given).square().sum().backward()
    gradients = jax.grad(lambda p: jnp.square(network(p, x)).sum())(params)
    own = [p.grad for _, p in sorted(model.named_parameters())]
    for got, theirs in zip(own, gradients, strict=True):
        assert str(got.dtype) == f"torch.{dtype}"
        want = np.asarray(theirs, np.float32)
        np.testing.assert_allclose(got.float(), want, rtol=2e-2, atol=1e-2 * abs(want).max())


def test_autograd_keeps_no_copies():
    params, x = case("bfloat16", 512, 512, 512)
    model = fmapper.convert((network, params), "torch", (x,))
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(fmapper.to_torch(x))
    assert not [t for t in kept if t.dtype is torch.float32 and t.numel() >= 512 * 512]


@pytest.mark.nightly
def test_it_is_differentiated_twice_and_compiled():
    params, x = case("bfloat16", 256, 256)
    model = fmapper.convert((network, params), "torch", (x,))
    given = fmapper.to_torch(x).requires_grad_()
    (first,) = torch.autograd.grad(model(given).sin().sum(), given, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), given)

    def once(x):
        return jax.grad(lambda x: jnp.sin(network(params, x)).sum())(x).astype(jnp.float32).sum()

    want = np.asarray(jax.grad(once)(x), np.float32)
    np.testing.assert_allclose(second.float(), want, rtol=5e-2, atol=2e-2 * abs(want).max())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-5, atol=1e-5)
    batched = torch.func.vmap(model)(torch.stack([given.detach()] * 2))
    torch.testing.assert_close(batched[1], model(given).detach(), rtol=1e-5, atol=1e-5)


def attention(params, x):
    """Products of halves in halves: of a matrix, with a bias, of stacks of matrices."""
    q, k, v, out, bias = params
    heads = [jnp.reshape(x @ w, (*x.shape[:-1], 4, -1)).swapaxes(-3, -2) for w in (q, k, v)]
    scores = heads[0] @ heads[1].swapaxes(-1, -2)
    mixed = (jnp.tanh(scores) @ heads[2]).swapaxes(-3, -2)
    return jnp.dot(jnp.reshape(mixed, x.shape), out) + bias


def attention_case(dtype, width=128):
    rng = np.random.default_rng(0)
    shapes = [(width, width)] * 4 + [(width,)]
    params = [jnp.asarray(rng.normal(size=shape) / width**0.5, dtype) for shape in shapes]
    return params, jnp.asarray(rng.normal(size=(2, 24, width)), dtype)


@pytest.mark.nightly_cases("bfloat16-1048576", "bfloat16-5000", "float16-1048576")
@pytest.mark.parametrize("block", [1 << 20, 5000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_halves_are_as_near_as_those_of_torch(dtype, block, monkeypatch):
    monkeypatch.setattr(wide_products, "_BLOCK", block)
    params, x = attention_case(dtype)
    model = fmapper.convert((attention, params), "torch", (x,))
    given = fmapper.to_torch(x)
    exact = fmapper.convert((attention, params), "torch", (x,)).double()(given.double())

    def errors(has_own):
        monkeypatch.setattr(wide_products, "_has_own", lambda dtype: has_own)
        model.zero_grad()
        output = model(given)
        assert str(output.dtype) == f"torch.{dtype}"
        output.square().sum().backward()
        return (output.double() - exact).norm().item(), [
            p.grad.double() for p in model.parameters()
        ]

    error, gradients = errors(has_own=False)
    of_torch, others = errors(has_own=True)
    assert error <= 1.02 * of_torch
    for got, want in zip(gradients, others, strict=True):
        assert (got - want).norm() <= 3e-2 * want.norm()


def test_products_of_halves_are_cast_only_where_that_is_faster(monkeypatch):
    monkeypatch.setattr(wide_products, "_has_own", lambda dtype: False)
    calls = []
    run = wide_products._in_blocks
    monkeypatch.setattr(
        wide_products, "_in_blocks", lambda *given: calls.append(given[0].shape) or run(*given)
    )
    few, many = torch.ones(1, 512).bfloat16(), torch.ones(64, 512).bfloat16()
    square = torch.ones(512, 512).bfloat16()
    for x, y in [(few, square), (many, square), (many, square.t())]:
        wide_products.matmul_of_halves(x, y)
    assert len(calls) == 3
    wide_products.matmul_of_halves(few, square.t())  # torch's own is fast
    wide_products.matmul_of_halves(few[:, :4], square[:4, :4])  # too little
    monkeypatch.setattr(wide_products, "_has_own", lambda dtype: True)
    wide_products.matmul_of_halves(many, square)
    assert len(calls) == 3


@pytest.mark.nightly
def test_products_of_halves_are_differentiated_twice_and_compiled(monkeypatch):
    monkeypatch.setattr(wide_products, "_has_own", lambda dtype: False)
    params, x = attention_case("bfloat16", 64)
    model = fmapper.convert((attention, params), "torch", (x,))
    given = fmapper.to_torch(x).requires_grad_()

    def gradient(run):
        (first,) = torch.autograd.grad(run(given).float().sin().sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.float().sum(), given)
        return second.float()

    own = gradient(model)
    monkeypatch.setattr(wide_products, "_has_own", lambda dtype: True)
    want = gradient(model)
    assert (own - want).norm() <= 0.1 * want.norm()
    monkeypatch.setattr(wide_products, "_has_own", lambda dtype: False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(given), model(given), rtol=2e-2, atol=2e-2)
    batched = torch.func.vmap(model)(torch.stack([given.detach()] * 2))
    torch.testing.assert_close(batched[1], model(given).detach(), rtol=2e-2, atol=2e-2)
