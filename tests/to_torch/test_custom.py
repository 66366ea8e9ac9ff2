"""Functions of JAX with derivatives of their own, in torch: values and gradients of JAX."""

import functools

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

X = jnp.asarray([1.0, -2.0, 3.0])
CORNERS = jnp.asarray([-100.0, -7, -1, -0.0, 0.0, 1e-3, 2, 6, 7, 30, 100])
INFINITE = jnp.asarray([-jnp.inf, jnp.inf])


@jax.custom_vjp
def clipped(x, limit):
    return x * 1.0


clipped.defvjp(
    lambda x, limit: (x * 1.0, limit),
    lambda limit, g: (jnp.maximum(jnp.minimum(g, limit), -limit), jnp.zeros_like(limit)),
)


@jax.custom_vjp
def reversed_(x):
    return x


reversed_.defvjp(lambda x: (x, None), lambda _, g: (-2 * g,))


@jax.custom_jvp
def straight_through(x):
    return (x > 0).astype(x.dtype)


straight_through.defjvps(lambda g, ans, x: 3 * g)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(f, x, n):
    return f(x) * n


applied.defvjp(lambda f, x, n: (applied(f, x, n), x), lambda f, n, x, g: (g * n * 3,))


@jax.custom_jvp
def pair(x, y):
    return x * y, jnp.tanh(x)


@pair.defjvp
def _(primals, tangents):
    (x, y), (a, b) = primals, tangents
    return pair(x, y), (2 * (a * y + b * x), 5 * a)


@jax.custom_jvp
def growing(x):
    return jnp.exp(x)


@growing.defjvp
def _(primals, tangents):
    (x,), (a,) = primals, tangents
    return growing(x), 2 * growing(x) * a


@jax.custom_vjp
def times(x, i):
    return x * i


times.defvjp(
    lambda x, i: (x * i, i), lambda i, g: (g * i * 7, np.zeros(i.shape, jax.dtypes.float0))
)

HELD = np.asarray([1.0, 2.0, 3.0], np.float32)


@jax.custom_vjp
def holding(x):
    return x * HELD


holding.defvjp(lambda x: (x * HELD, x), lambda x, g: (g * HELD * x * np.flip(HELD),))


@jax.custom_jvp
def relu(x):
    """Not JAX's: its derivative at zero is one half, and 7 above."""
    return jnp.maximum(x, 0)


relu.defjvps(lambda g, ans, x: jnp.where(x > 0, 7 * g, jnp.where(x == 0, 0.5 * g, 0)))


def scanned(x):
    def step(carry, row):
        return clipped(carry * row, jnp.float32(0.5)), straight_through(carry)

    return lax.scan(step, x, x * jnp.ones((3, 1)))


def branched(x):
    return lax.cond(x[0] > 0, lambda x: reversed_(x) * 3, straight_through, x)


CASES = {
    "clipped": (lambda x: clipped(x * 3, jnp.float32(0.5)), X),
    "two operands": (clipped, X, jnp.float32(0.5)),
    "reversed": (lambda x: reversed_(x) * 2, X),
    "an operand as it is": (reversed_, X),
    "straight through": (lambda x: straight_through(x) * x, X),
    "arguments that are no arrays": (lambda x: applied(jnp.exp, x, 4), X),
    "two results": (lambda x: pair(x, x * 2), X),
    "one of two results": (lambda x: pair(x, x * 2)[0], X),
    "an operand twice": (lambda x: pair(x, x), X),
    "in its own derivative": (growing, X),
    "an integer": (times, X, jnp.int32(3)),
    "arrays that it holds": (holding, X),
    "a name of JAX": (relu, CORNERS),
    "in scan": (scanned, X),
    "in scan, with arrays": (
        lambda x: lax.scan(lambda c, r: (holding(c) + r, c), x, x[:, None]),
        X,
    ),
    "in cond": (branched, X),
    "in the other branch": (branched, -X),
    "in vmap": (jax.vmap(lambda x: clipped(x * 3, jnp.float32(0.5))), X),
    "in remat": (jax.checkpoint(lambda x: reversed_(x) * x), X),
    "jax.nn.relu": (jax.nn.relu, CORNERS),
    "jax.nn.relu6": (jax.nn.relu6, CORNERS),
    "jax.nn.softplus": (jax.nn.softplus, CORNERS),
    "jax.nn.softplus at infinity": (jax.nn.softplus, INFINITE),
    "jax.nn.silu": (jax.nn.silu, CORNERS),
    "jax.nn.gelu": (jax.nn.gelu, CORNERS),
    "jax.nn.elu": (jax.nn.elu, CORNERS),
    "jax.nn.hard_tanh": (jax.nn.hard_tanh, CORNERS),
    "jax.nn.leaky_relu": (jax.nn.leaky_relu, CORNERS),
    "jax.nn.log_sigmoid": (jax.nn.log_sigmoid, CORNERS),
    "jax.nn.softmax": (lambda x: jax.nn.softmax(x) * x, CORNERS),
    "jax.nn.softmax of some": (lambda x: jax.nn.softmax(x, where=x > 0), CORNERS),
    "jax.nn.log_softmax": (lambda x: jax.nn.log_softmax(x) * x, CORNERS),
    "logsumexp": (jax.nn.logsumexp, CORNERS),
    "logaddexp": (jnp.logaddexp, CORNERS, CORNERS[::-1]),
    "logaddexp at infinity": (jnp.logaddexp, INFINITE, INFINITE),
    "logaddexp2": (jnp.logaddexp2, CORNERS, CORNERS[::-1]),
    "xlogy": (jax.scipy.special.xlogy, jnp.abs(CORNERS), jnp.abs(CORNERS)),
    "xlog1py": (jax.scipy.special.xlog1py, jnp.abs(CORNERS), jnp.abs(CORNERS)),
    "logit": (jax.scipy.special.logit, jnp.asarray([0.0, 0.1, 0.5, 1.0])),
    "sinc": (jnp.sinc, jnp.asarray([-1.5, 0, 0.3, 2])),
    "clip": (lambda x: jnp.clip(x, 0, 6), CORNERS),
}


def tensors(args):
    return [torch.from_numpy(np.array(x)) for x in args]


def leaves(tree):
    return jax.tree.leaves(tree)


def total(tree):
    """A number that depends on each element in its own way."""
    found = 0
    for x in leaves(tree):
        finite = jnp.isfinite if isinstance(x, jax.Array) else torch.isfinite
        where = jnp.where if isinstance(x, jax.Array) else torch.where
        found = found + where(finite(x), x, 0).sum() * 1.5 + x.reshape(-1)[-1:].sum() * 0.5
    return found


@pytest.mark.nightly_cases(
    "arrays that it holds",
    "logaddexp",
    "clipped",
    "a name of JAX",
    "in scan",
    "jax.nn.gelu",
    "jax.nn.log_sigmoid",
    "jax.nn.softmax",
    "jax.nn.softmax of some",
    "logsumexp",
)
@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    function, *args = CASES[name]
    module = fmapper.convert(function, "torch", args)
    given = tensors(args)
    for have, want in zip(leaves(module(*given)), leaves(function(*args)), strict=True):
        np.testing.assert_allclose(have.detach(), want, rtol=2e-6, atol=1e-6)
    places = [i for i, x in enumerate(args) if "float" in str(x.dtype)]
    wanted = jax.grad(lambda *xs: total(function(*xs)), places)(*args)
    total(
        module(*[x.requires_grad_() if i in places else x for i, x in enumerate(given)])
    ).backward()
    for i, want in zip(places, wanted, strict=True):
        np.testing.assert_allclose(given[i].grad, want, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly_cases("two results", "clipped", "in scan", "xlogy")
@pytest.mark.parametrize("name", ["clipped", "two results", "an integer", "in scan", "xlogy"])
def test_transformations_of_torch(name):
    """torch.func.grad, and vmap of it, over functions with derivatives of their own."""
    function, *args = CASES[name]
    module = fmapper.convert(function, "torch", args)
    x, *rest = tensors(args)
    want = jax.grad(lambda x: total(function(x, *args[1:])))(args[0])
    have = torch.func.grad(lambda x: total(module(x, *rest)))(x)
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    several = jnp.stack([args[0], args[0] * 2, -args[0]])
    want = jax.vmap(jax.grad(lambda x: total(function(x, *args[1:]))))(several)
    have = torch.func.vmap(torch.func.grad(lambda x: total(module(x, *rest))))(*tensors([several]))
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "function", [growing, lambda x: pair(x, x * x)[0], jax.nn.softplus, jax.nn.silu, jax.nn.relu,
                 lambda x: jnp.logaddexp(x, x * 2)]
)  # fmt: skip
def test_second_derivatives(function):
    module = fmapper.convert(function, "torch", (X,))
    want = jax.grad(lambda x: (jax.grad(lambda x: function(x).sum())(x) ** 2).sum())(X)
    x = tensors([X])[0].requires_grad_()
    (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    if not first.requires_grad:
        assert not want.any()
        return
    (second,) = torch.autograd.grad((first**2).sum(), x)
    np.testing.assert_allclose(second, want, rtol=1e-5, atol=1e-6)


def test_third_derivatives_are_refused_not_wrong():
    module = fmapper.convert(growing, "torch", (X,))
    x = tensors([X])[0].requires_grad_()
    (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    np.testing.assert_allclose(second.detach(), 4 * jnp.exp(X), rtol=1e-6)
    with pytest.raises(RuntimeError, match="up to the second"):
        torch.autograd.grad(second.sum(), x)


def halved(rule):
    """Half the gradient, where `rule` computes what the function is in the rule for gradients."""

    @jax.custom_vjp
    def half(x):
        return x * 1.0

    half.defvjp(lambda x: (rule(half, x), None), lambda _, gradient: (gradient / 2,))
    return half


RULES = {
    "calls it": lambda half, x: half(x),
    "calls it compiled": lambda half, x: jax.jit(half)(x),
    "with other values": lambda half, x: half(x + 0.0) * 1.0,
    "computes it": lambda half, x: x * 1.0,
}


@pytest.mark.parametrize("rule", RULES)
def test_second_derivatives_are_those_of_the_rule_or_refused(rule):
    """JAX differentiates what a forward rule computes, and torch the function again."""
    half = halved(RULES[rule])

    def function(x):
        return (half(x) ** 2).sum()

    want = jax.grad(lambda x: (jax.grad(function)(x) ** 2).sum())(X)
    module = fmapper.convert(function, "torch", (X,))
    x = tensors([X])[0].requires_grad_()
    (first,) = torch.autograd.grad(module(x), x, create_graph=True)
    np.testing.assert_allclose(first.detach(), jax.grad(function)(X), rtol=1e-6)
    if rule.startswith("calls"):
        (second,) = torch.autograd.grad((first**2).sum(), x)
        np.testing.assert_allclose(second, want, rtol=1e-5)
        return
    with pytest.raises(RuntimeError, match=r"its forward rule, which does not call .*half itself"):
        torch.autograd.grad((first**2).sum(), x)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_forward_mode_is_refused_not_wrong():
    module = fmapper.convert(straight_through, "torch", (X,))
    x = tensors([X])[0]
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(module, (x,), (torch.ones_like(x),))


def test_a_derivative_by_what_is_found_in_the_surroundings_is_refused_as_in_jax():
    def run(x, w):
        @jax.custom_vjp
        def inner(x):
            return x * w

        inner.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 5,))
        return inner(x)

    module = fmapper.convert(run, "torch", (X, X))
    x, w = tensors([X, X])
    module(x.requires_grad_(), w).sum().backward()
    assert x.grad.tolist() == [5, 5, 5]
    with pytest.raises(RuntimeError, match="as an argument"):
        module(x, w.requires_grad_()).sum().backward()

    def leaking(x, w):
        @jax.custom_vjp
        def inner(x):
            return x * w

        inner.defvjp(lambda x: (x * w, None), lambda _, g: (g * 5,))
        return inner(x)

    module = fmapper.convert(leaking, "torch", (X, X))
    assert module(*tensors([X, X])).tolist() == leaking(X, X).tolist()
    with pytest.raises(RuntimeError, match="as an argument"):
        module(x, w.detach()).sum().backward()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (jax.nn.relu, ["_threshold"]),  # torch's relu and relu6 keep -0.0
        (jax.nn.relu6, ["_threshold", "hardtanh"]),
        (jax.nn.softplus, ["softplus"]),
    ],
)
def test_what_torch_has_whole_is_not_taken_apart(function, names):
    module = fmapper.convert(function, "torch", (X,))
    calls = [node.target.__name__ for node in module.graph.nodes if node.op == "call_function"]
    assert calls == names


@pytest.mark.nightly
def test_a_linear_system_and_its_gradients():
    a = jnp.asarray(np.random.RandomState(0).randn(3, 3) + 4 * np.eye(3), jnp.float32)

    def run(a, b, inverse):
        return lax.custom_linear_solve(
            lambda x: a @ x, b, lambda _, b: inverse @ b, lambda _, b: inverse.T @ b
        )

    given = a, X, jnp.linalg.inv(a)
    module = fmapper.convert(run, "torch", given)
    mine = [x.requires_grad_() for x in tensors(given)]
    found = module(*mine)
    np.testing.assert_allclose(found.detach(), run(*given), rtol=1e-5)
    found.square().sum().backward()
    wanted = jax.grad(lambda *xs: (run(*xs) ** 2).sum(), (0, 1))(*given)
    for have, want in zip(mine, wanted, strict=False):
        np.testing.assert_allclose(have.grad, want, rtol=1e-4, atol=1e-6)
    assert mine[2].grad is None or not mine[2].grad.any()


def test_what_jax_has_no_derivative_of_has_none_in_torch():
    matrix = np.eye(3, dtype=np.float32) * 2 + 0.1

    def function(b):
        def solve(_, b):
            return jnp.linalg.solve(matrix, b)

        return jax.lax.custom_linear_solve(lambda x: matrix @ x, b, solve)

    b = np.ones(3, np.float32)
    model = fmapper.convert(function, "torch", (b,))
    x = torch.tensor(b, requires_grad=True)
    y = model(x)
    np.testing.assert_allclose(y.detach(), function(b), rtol=1e-6)
    with pytest.raises(RuntimeError, match=r"derivative cannot be used here: \w+.*: "):
        y.sum().backward()
