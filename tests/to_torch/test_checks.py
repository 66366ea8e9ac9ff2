"""Solvers of JAX and of libraries on it: their checks are kept, their derivatives are their own."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
eqx = pytest.importorskip("equinox")

X = np.asarray([1.0, 0.5], np.float32)


def agree(function, *, rtol=1e-4):
    model = fmapper.convert(function, "torch", (X,))
    given = torch.from_numpy(X.copy()).requires_grad_()
    got = model(given)
    np.testing.assert_allclose(got.detach(), function(jnp.asarray(X)), rtol=rtol, atol=1e-5)
    got.square().sum().backward()
    want = jax.grad(lambda x: (function(x) ** 2).sum())(jnp.asarray(X))
    np.testing.assert_allclose(given.grad, want, rtol=rtol, atol=1e-5)
    return model


def checked(x):
    x = eqx.error_if(x, x.sum() < 0, "the sum is negative")
    return jnp.sqrt(x)


@pytest.mark.nightly
def test_a_check_is_kept():
    model = agree(checked)
    with pytest.raises(RuntimeError, match="the sum is negative"):
        model(-torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*_assert_async.*")
def test_a_check_is_kept_in_compiled_and_exported_models():
    torch._dynamo.reset()
    model = fmapper.convert(checked, "torch", (X,))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    exported = torch.export.export(model, (torch.ones(2),)).module()
    for one in (compiled, exported):
        torch.testing.assert_close(one(torch.ones(2)), torch.ones(2))
        with pytest.raises(RuntimeError, match="the sum is negative"):
            one(-torch.ones(2))


@pytest.mark.nightly
def test_a_check_in_a_loop():
    def loop(x):
        def step(c, _):
            c = eqx.error_if(c * 0.5, c.max() > 10, "too large")
            return c, c

        return jax.lax.scan(step, x, None, length=3)[1]

    model = agree(loop)
    with pytest.raises(RuntimeError, match="too large"):
        model(torch.full((2,), 30.0))


@pytest.mark.nightly
def test_checks_of_a_batch():
    model = agree(lambda x: jax.vmap(lambda y: eqx.error_if(y, y < 0, "one is negative"))(x) * 2)
    with pytest.raises(RuntimeError, match="one is negative"):
        model(torch.tensor([1.0, -1.0]))


@pytest.mark.nightly
def test_odeint():
    from jax.experimental.ode import odeint

    model = fmapper.convert(
        lambda y: odeint(lambda y, t: -y * t, y, jnp.linspace(0.0, 1.0, 3)), "torch", (X,)
    )
    want = X * np.exp(-(np.linspace(0, 1, 3)[:, None] ** 2) / 2)
    np.testing.assert_allclose(model(torch.from_numpy(X)).detach(), want, rtol=1e-4)


@pytest.mark.nightly
def test_lineax():
    lx = pytest.importorskip("lineax")
    matrix = jnp.asarray([[2.0, 1.0], [1.0, 3.0]])
    agree(lambda y: lx.linear_solve(lx.MatrixLinearOperator(matrix), y).value)
    agree(lambda y: lx.linear_solve(lx.MatrixLinearOperator(jnp.diag(y) + matrix), y).value)


@pytest.mark.nightly
def test_optimistix():
    optx = pytest.importorskip("optimistix")
    solver = optx.Newton(rtol=1e-5, atol=1e-5)
    agree(lambda y: optx.root_find(lambda z, a: z**3 - a, solver, y, args=y).value)


@pytest.mark.nightly
def test_diffrax():
    diffrax = pytest.importorskip("diffrax")
    term = diffrax.ODETerm(lambda t, y, args: -y)

    def solve(y):
        return diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 1.0, 0.1, y,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 3)),
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
        ).ys  # fmt: skip

    agree(solve)


def test_what_has_no_counterpart_is_refused_by_name():
    exported = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(fmapper.ConversionError, match="call the original function"):
        fmapper.convert(exported.call, "torch", (X,))
