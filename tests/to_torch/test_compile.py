"""Converted models of JAX under torch.compile, torch.export and torch.func."""

import io

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

X = jnp.asarray([1.0, -2.0, 3.0])
W = jnp.asarray(np.random.RandomState(1).randn(3, 3) / 3, jnp.float32)
SHORT = jnp.asarray(np.random.RandomState(0).randn(5, 3), jnp.float32)
LONG = jnp.asarray(np.random.RandomState(0).randn(300, 3), jnp.float32)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -0.5, 0.5),))


def recurrent(xs, w):
    def step(carry, row):
        h, i, odd = carry
        h = jnp.tanh(h @ w + row)
        return (h, i + 1, ~odd), (h * 2, i, odd)

    return lax.scan(step, (jnp.zeros(3), 0, False), xs)


def backwards(xs, w):
    return lax.scan(lambda c, row: (clipped(c @ w) + row, c), xs[0], xs, reverse=True)


def keyed(key, x):
    def step(key, row):
        key, own = jax.random.split(key)
        return key, jax.random.uniform(own, (3,)) + row

    return lax.scan(step, key, x * jnp.ones((300, 1)))[1]


def looping(x):
    return lax.while_loop(lambda s: s[0] < 8, lambda s: (s[0] + 1, s[1] * 1.5 + x), (0, x))


def batched_loop(x):
    one = lambda x: lax.while_loop(lambda c: c < 50, lambda c: c * 2 + 1, x)  # noqa: E731
    return jax.vmap(one)(jnp.abs(x) * 20)


def branching(x):
    return lax.cond(x[0] > 0, lambda x: (x * 2, x), lambda x: (clipped(x) * 3, x + 1), x)


def switching(i, x):
    return lax.switch(i, [lambda x: x * 2, jnp.sin, lambda x: x, lambda x: x + 1], x)


def nested(x):
    def step(i, x):
        return lax.cond(
            x.sum() > 0, lambda x: x - 3, lambda x: lax.fori_loop(0, i, lambda j, c: c + j, x), x
        )

    return lax.fori_loop(0, jnp.int32(4) + 0 * x.astype(jnp.int32)[0], step, x)


def drawing(key, x):
    return jax.random.bernoulli(key, 0.5, x.shape) * x + jax.random.uniform(
        key, x.shape, minval=-0.3
    )


CASES = {
    "scan": (recurrent, SHORT, W),
    "scan that is not unrolled": (recurrent, LONG, W),
    "scan from the end": (backwards, LONG, W),
    "scan with keys": (keyed, jax.random.PRNGKey(3), X),
    "while": (looping, X),
    "while of a batch": (batched_loop, X),
    "cond": (branching, X),
    "the other branch": (branching, -X),
    "switch": (switching, jnp.int32(2), X),
    "switch out of range": (switching, jnp.int32(7), X),
    "nested": (nested, X),
    "custom": (lambda x: clipped(x * x) * 3, X),
    "an array twice": (lambda x: jnp.logaddexp(x, x), X),
    "random": (drawing, jax.random.PRNGKey(3), X),
}
FORWARD_ONLY = {"while", "while of a batch", "nested"}
BEFORE_2_13 = torch.__version__ < "2.13"
# The derivative of torch's `scan` refuses then what has none: "might be aliasing the input".
if BEFORE_2_13:
    FORWARD_ONLY.add("scan with keys")


def tensors(args):
    return tuple(torch.from_numpy(np.array(x)) for x in args)


def same(have, want):
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.detach(), b, rtol=2e-6, atol=2e-6)


def total(tree):
    return sum((x * x).sum() for x in jax.tree.leaves(tree) if "float" in str(x.dtype))


def gradients(module, args):
    given = [x.requires_grad_() if x.is_floating_point() else x for x in tensors(args)]
    total(module(*given)).backward()
    return [x.grad for x in given if x.is_floating_point()]


# A third of the cases; `nox -s nightly` runs all of them.
NAMES = [
    name if index % 3 == 0 else pytest.param(name, marks=pytest.mark.nightly)
    for index, name in enumerate(CASES)
]


@pytest.mark.nightly_cases(
    "scan", "scan with keys", "cond", "switch out of range", "an array twice"
)
@pytest.mark.parametrize("name", NAMES)
def test_compile(name):
    function, *args = CASES[name]
    module = fmapper.convert(function, "torch", tuple(args))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        same(compiled(*tensors(args)), function(*args))
    if name in FORWARD_ONLY:
        return
    places = [i for i, x in enumerate(args) if "float" in str(x.dtype)]
    wanted = jax.grad(lambda *xs: total(function(*xs)), places, allow_int=True)(*args)
    for have, want in zip(gradients(compiled, args), wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


# torch.export.load of torch 2.11 says so of the file that it has read
@pytest.mark.nightly_cases("switch out of range", "scan with keys")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("name", NAMES)
def test_export(name):
    if name == "scan with keys" and BEFORE_2_13:
        pytest.skip("torch.export.save of torch 2.11 knows no uint32: KeyError")
    function, *args = CASES[name]
    module = fmapper.convert(function, "torch", tuple(args))
    exported = torch.export.export(module, tensors(args))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    same(torch.export.load(file).module()(*tensors(args)), function(*args))


@pytest.mark.nightly
def test_branches_of_an_exported_model_are_both_there():
    module = fmapper.convert(branching, "torch", (X,))
    exported = torch.export.export(module, tensors((X,))).module()
    for x in (X, -X):
        same(exported(*tensors((x,))), branching(x))
    looped = torch.export.export(fmapper.convert(nested, "torch", (X,)), tensors((X,))).module()
    for x in (X, -X, X * 7):
        same(looped(*tensors((x,))), nested(x))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["scan that is not unrolled", "cond"])
def test_inductor(name):
    function, *args = CASES[name]
    module = fmapper.convert(function, "torch", tuple(args))
    compiled = torch.compile(module, fullgraph=True)
    with torch.no_grad():
        same(compiled(*tensors(args)), function(*args))
    places = [i for i, x in enumerate(args) if "float" in str(x.dtype)]
    wanted = jax.grad(lambda *xs: total(function(*xs)), places)(*args)
    for have, want in zip(gradients(compiled, args), wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


def model(params, xs):
    (h, _, _), ys = recurrent(xs, params["w"])
    return clipped(h) @ params["out"], ys[0]


PARAMS = {"w": W, "out": jnp.asarray(np.random.RandomState(2).randn(3, 2), jnp.float32)}


@pytest.mark.nightly
def test_functional_call_and_gradients_by_parameters():
    module = fmapper.convert((model, PARAMS), "torch", (SHORT,))
    (xs,) = tensors((SHORT,))
    params = {name: x.detach() for name, x in module.named_parameters()}
    assert set(params) == {"w", "out"}

    def loss(params, xs):
        return total(torch.func.functional_call(module, params, (xs,)))

    wanted = jax.grad(lambda p: total(model(p, SHORT)))(PARAMS)
    found = torch.func.grad(loss)(params, xs)
    for name, want in wanted.items():
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-5)
    several = jnp.stack([SHORT, SHORT * 2])
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, *tensors((several,)))
    wanted = jax.vmap(lambda xs: jax.grad(lambda p: total(model(p, xs)))(PARAMS))(several)
    for name, want in wanted.items():
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.skipif(BEFORE_2_13, reason="torch 2.11 cannot differentiate such a scan in graphs")
def test_a_compiled_model_is_trained():
    module = fmapper.convert((model, PARAMS), "torch", (LONG,))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    total(compiled(*tensors((LONG,)))).backward()
    wanted = jax.grad(lambda p: total(model(p, LONG)))(PARAMS)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(parameter.grad, wanted[name], rtol=1e-4, atol=1e-4)
