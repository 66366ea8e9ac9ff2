"""Gradients by models of JAX libraries, against `jax`, Flax and Equinox; steps with optax."""

from __future__ import annotations

from typing import Any

import pytest

from fmapper import (
    fleaves,
    fmap,
    functor,
    grad,
    jit,
    load_state,
    no_gradient,
    state,
    trainables,
    value_and_grad,
    vmap,
)

np = pytest.importorskip("numpy")
jax = pytest.importorskip("jax")
jnp = jax.numpy


@functor
class Tree:
    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


def close(got: Any, want: Any) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


X = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")


@pytest.mark.nightly
def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0))

    def loss(m: Any) -> Any:
        return (jax.vmap(m)(X) ** 2).sum()

    value, gradient = value_and_grad(loss)(model)
    want_value, want = eqx.filter_value_and_grad(loss)(model)
    close(value, want_value)
    assert type(gradient) is eqx.nn.MLP
    close(fleaves(gradient), jax.tree.leaves(eqx.filter(want, eqx.is_array)))
    new = fmap(lambda p, g: p - 0.1 * g, model, gradient)
    close(
        eqx.filter(new, eqx.is_array),
        eqx.filter(eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, want)), eqx.is_array),
    )
    assert new.activation is model.activation
    close(fleaves(jit(grad(loss))(model)), fleaves(gradient))


@pytest.fixture
def nnx() -> Any:
    return pytest.importorskip("flax.nnx")


@pytest.mark.nightly
def test_nnx(nnx: Any) -> None:
    class Net(nnx.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.second = nnx.Linear(4, 4, rngs=rngs)
            self.again = self.second
            self.size = 4
            self.table = nnx.Variable(jnp.ones(4))

        def __call__(self, x: Any) -> Any:
            x = self.norm(jnp.tanh(self.first(x))) * self.table[...]
            return self.again(self.second(x))

    def loss(m: Any) -> Any:
        return (m(X) ** 2).sum()

    model = Net(nnx.Rngs(0))
    value, gradient = value_and_grad(loss)(model)
    want_value, want = nnx.value_and_grad(loss)(model)
    close(value, want_value)
    assert type(gradient) is Net
    close(gradient.first.kernel[...], want["first"]["kernel"])
    close(gradient.norm.scale[...], want["norm"]["scale"])
    close(gradient.second.kernel[...], want["again"]["kernel"])  # NNX goes by the alphabet
    assert gradient.again is gradient.second
    new = fmap(lambda p, g: p - 0.1 * g, model, gradient)
    assert new.again is new.second
    assert isinstance(new.first.kernel, nnx.Param)
    close(new.first.kernel[...], model.first.kernel[...] - 0.1 * gradient.first.kernel[...])
    close(new.table[...], jnp.ones(4))
    assert loss(new) != value


@pytest.mark.nightly
def test_linen_parameters() -> None:
    nn = pytest.importorskip("flax.linen")
    module = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(1)])
    variables = module.init(jax.random.key(0), X)

    def loss(variables: Any) -> Any:
        return (module.apply(variables, X) ** 2).sum()

    close(grad(loss)(variables), jax.grad(loss)(variables))
    each = vmap(grad(lambda v, x: (module.apply(v, x) ** 2).sum()), (None, 0))(variables, X)
    want = jax.vmap(jax.grad(lambda v, x: (module.apply(v, x) ** 2).sum()), (None, 0))(variables, X)
    close(each, want)


@pytest.mark.nightly
def test_flax_struct() -> None:
    struct = pytest.importorskip("flax.struct")

    @struct.dataclass
    class State:
        w: Any
        b: Any
        rate: float = struct.field(pytree_node=False, default=0.5)

    model = State(jnp.ones((3, 2)), jnp.zeros(2))
    gradient = grad(lambda m: ((X @ m.w + m.b) ** 2).sum() * m.rate)(model)
    want = jax.grad(lambda m: ((X @ m.w + m.b) ** 2).sum() * m.rate)(model)
    assert type(gradient) is State
    close(gradient, want)
    assert fmap(lambda p, g: p - g, model, gradient).rate == 0.5


@pytest.mark.nightly
def test_keys_go_along() -> None:
    key = jax.random.key(0)
    model = Tree(w=jnp.ones(3), key=key)

    def loss(m: Any, key: Any) -> Any:
        return (m.w**2 * jax.random.normal(key, (3,)) * jax.random.normal(m.key, (3,))).sum()

    noise = jax.random.normal(key, (3,)) * jax.random.normal(jax.random.key(1), (3,))
    for transformed in (grad(loss), jit(grad(loss))):
        gradient = transformed(model, jax.random.key(1))
        close(gradient.w, 2 * noise)
        assert gradient.key is no_gradient
        assert fmap(lambda p, g: p - g, model, gradient).key is key


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion"])
def test_optax_on_trainables(name: str) -> None:
    optax = pytest.importorskip("optax")
    optimizer = getattr(optax, name)(1e-2)
    w = jnp.ones((3, 2))
    model = Tree(w=w, tied=[w], b=jnp.zeros(2), n=3, name="x", i=jnp.arange(2))

    def loss(m: Any) -> Any:
        return ((X @ m.w + m.b) ** 2 @ m.tied[0].T).sum() / m.n

    def flat(p: Any) -> Any:
        return ((X @ p["w"] + p["b"]) ** 2 @ p["w"].T).sum() / 3

    @jit
    def step(model: Any, moments: Any) -> Any:
        arrays, gradients = trainables(model), trainables(grad(loss)(model))
        updates, moments = optimizer.update(gradients, moments, arrays)
        new = optax.apply_updates(arrays, updates)
        return load_state(model, new, strict=False), moments

    parameters = {"w": w, "b": jnp.zeros(2)}
    moments, plain = optimizer.init(trainables(model)), optimizer.init(parameters)
    for _ in range(5):
        model, moments = step(model, moments)
        updates, plain = optimizer.update(jax.grad(flat)(parameters), plain, parameters)
        parameters = optax.apply_updates(parameters, updates)
    np.testing.assert_allclose(model.w, parameters["w"], rtol=1e-5)
    np.testing.assert_allclose(model.b, parameters["b"], rtol=1e-5, atol=1e-6)
    assert model.tied[0] is model.w
    assert list(state(model)) == ["w", "tied.0", "b", "i"]


@pytest.mark.nightly
def test_optax_on_a_functor_of_arrays() -> None:
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(1e-2)
    model = Tree(w=jnp.ones((3, 2)), b=jnp.zeros(2))

    def loss(m: Any) -> Any:
        return ((X @ m.w + m.b) ** 2).sum()

    moments = optimizer.init(model)
    updates, moments = optimizer.update(grad(loss)(model), moments, model)
    new = optax.apply_updates(model, updates)
    want, _ = optimizer.update(jax.grad(loss)(model), optimizer.init(model), model)
    close(new, optax.apply_updates(model, want))
    assert type(new) is Tree


@pytest.mark.nightly
def test_within_other_functions_of_jax() -> None:
    model = Tree(w=jnp.ones(3), n=2)

    def loss(m: Any, x: Any) -> Any:
        return ((m.w * x) ** m.n).sum()

    def scanned(model: Any, x: Any) -> Any:
        def step(m: Any, _: Any) -> Any:
            return fmap(lambda p, g: p - 0.01 * g, m, grad(loss)(m, x)), None

        return jax.lax.scan(step, model, None, length=3)[0]

    plain = model
    for _ in range(3):
        plain = fmap(lambda p, g: p - 0.01 * g, plain, grad(loss)(plain, X[0]))
    close(scanned(model, X[0]), plain)
    close(jax.jit(scanned)(model, X[0]), plain)
    close(jax.vmap(scanned, (None, 0))(model, X).w[0], plain.w)
    hessian = jax.hessian(lambda w: loss(Tree(w=w, n=3), X[0]))(model.w)
    rows = jax.jacobian(lambda w: grad(loss)(Tree(w=w, n=3), X[0]).w)(model.w)
    close(rows, hessian)
    close(jax.checkpoint(grad(loss))(model, X[0]).w, grad(loss)(model, X[0]).w)
