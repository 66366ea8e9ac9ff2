"""Functions of JAX with a derivative of their own in files for torch: each a `Function` there."""

from __future__ import annotations

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from support.written import written_code  # noqa: E402


def agrees(function, *args, shapes=None, order=1):
    """Asserts that a file gives what a function does, and the derivatives up to an order."""
    code, net = written_code(function, *args, shapes=shapes)
    given = [torch.from_numpy(np.array(x)).requires_grad_() for x in args]
    theirs = function
    ours = net(*given)
    for left in reversed(range(order + 1)):
        got, want = jax.tree.leaves(ours), jax.tree.leaves(theirs(*args))
        for one, other in zip(got, want, strict=True):
            close(one, other)
        if not left:
            break
        ours = torch.autograd.grad(
            sum(_weighed(one, torch.cos) for one in got), given, create_graph=left > 1
        )
        theirs = _slopes(theirs, len(args))
    return code


def _weighed(x, cosine):
    return (cosine(x) * (x + 0.5)).sum()


def _slopes(function, count):
    def total(*xs):
        return sum(_weighed(one, jnp.cos) for one in jax.tree.leaves(function(*xs)))

    return jax.grad(total, argnums=tuple(range(count)))


def close(ours, theirs):
    scale = max(float(jnp.abs(theirs).max()), 1.0)
    np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-5 * scale)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


@jax.custom_vjp
def binarize(x):
    return jnp.where(x >= 0, 1.0, -1.0)


binarize.defvjp(lambda x: (binarize(x), x), lambda x, g: (g * (jnp.abs(x) <= 1),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reverse_gradient(x, scale):
    return x


reverse_gradient.defvjp(lambda x, _: (x, None), lambda scale, _, g: (-scale * g,))


@jax.custom_vjp
def clip_gradient(low, high, x):
    return x


clip_gradient.defvjp(
    lambda low, high, x: (x, (low, high)),
    lambda held, g: (None, None, jnp.clip(g, *held)),
)


@jax.custom_jvp
def safe_sqrt(x):
    return jnp.sqrt(x)


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    y = safe_sqrt(x)
    return y, jnp.where(x > 0, 0.5 * dx / jnp.maximum(y, 1e-6), 0.0)


@jax.custom_jvp
def swap(x, y):
    return y * 2.0, x * 3.0


@swap.defjvp
def _swap_jvp(primals, tangents):
    x, y = primals
    dx, dy = tangents
    return swap(x, y), (x * dy, jnp.cos(y) * dx + dy)


@pytest.mark.nightly
def test_a_straight_through_estimator_is_a_function_of_two_lines():
    code = agrees(lambda x: straight_through(x * 4.0) * x, normal(5, 3), order=2)
    assert "class StraightThrough(torch.autograd.Function):" in code
    assert "    def forward(ctx, x):\n        return torch.round(x)\n" in code
    assert "    def backward(ctx, gradient):\n        return gradient\n" in code
    assert "StraightThrough.apply(" in code


@pytest.mark.nightly
def test_a_function_that_is_called_often_stands_there_once():
    code = agrees(lambda x, w: binarize(binarize(x) @ binarize(w)), normal(5, 3), normal(3, 4))
    assert code.count("(torch.autograd.Function)") == 1
    assert code.count("Binarize.apply(") == 3
    assert "return torch.where(x >= 0.0, 1.0, -1.0)" in code
    assert "torch.abs(x) <= 1.0" in code


@pytest.mark.nightly
def test_a_reversed_gradient_gives_a_view_of_its_argument():
    code = agrees(lambda x: reverse_gradient(jnp.tanh(x), 0.5), normal(5, 3))
    assert "return x.view_as(x)" in code
    assert "return gradient * -0.5" in code


@pytest.mark.nightly
def test_numbers_stand_in_a_derivative():
    code = agrees(lambda x: clip_gradient(-0.1, 0.1, jnp.tanh(x)), normal(5, 3))
    assert "def forward(ctx, x):" in code
    assert "0.1" in code


@pytest.mark.nightly
def test_a_rule_for_tangents_calls_the_function_itself():
    code = agrees(lambda x: safe_sqrt(jnp.sum(x * x)) * x, normal(5), order=2)
    assert code.count("(torch.autograd.Function)") == 1
    assert code.count("SafeSqrt.apply(") == 2


def test_a_rule_that_does_not_call_the_function_is_differentiable_once():
    @jax.custom_vjp
    def half(x):
        return x * 1.0

    half.defvjp(lambda x: (x * 1.0, None), lambda _, gradient: (gradient / 2,))
    _, net = written_code(lambda x: (half(x) ** 2).sum(), normal(4))
    x = torch.ones(4, requires_grad=True)
    np.testing.assert_array_equal(torch.autograd.grad(net(x), x)[0], 1.0)
    with pytest.raises(NotImplementedError, match="half has no second"):
        torch.autograd.grad(net(x), x, create_graph=True)


@pytest.mark.nightly
def test_several_results_have_a_gradient_each():
    code = agrees(lambda x, y: swap(jnp.sin(x), y), normal(4), normal(4, seed=1), order=2)
    assert "def backward(ctx, gradient_0, gradient_1):" in code


@pytest.mark.nightly
def test_two_functions_of_one_name_are_two_classes():
    def make(slope):
        @jax.custom_vjp
        def gate(x):
            return jnp.sign(x)

        gate.defvjp(lambda x: (gate(x), x), lambda x, g: (slope * g,))
        return gate

    first, second = make(2.0), make(3.0)
    code = agrees(lambda x: first(x) * x + second(x), normal(5))
    assert "class Gate(" in code
    assert "class Gate_2(" in code


@pytest.mark.nightly
def test_an_argument_that_is_given_twice_has_one_gradient():
    @jax.custom_vjp
    def product(x, y):
        return x * y

    product.defvjp(lambda x, y: (x * y, (x, y)), lambda held, g: (g * held[1] * 5.0, g * 7.0))
    code = agrees(lambda x: product(x, x), normal(5))
    assert "def forward(ctx, x):" in code


@pytest.mark.nightly
def test_a_size_that_varies_is_that_of_an_argument():
    @jax.custom_vjp
    def mean(x):
        return jnp.sum(x) / x.shape[0]

    mean.defvjp(lambda x: (mean(x), x), lambda x, g: (jnp.full(x.shape, g / (2 * x.shape[0])),))
    function = lambda x: mean(jnp.sin(x)) * x  # noqa: E731
    x = normal(6)
    _, net = written_code(function, x, shapes="auto")
    longer = normal(9, seed=1)
    ours = torch.from_numpy(np.array(longer)).requires_grad_()
    got = net(ours)
    close(got, function(longer))
    got.sum().backward()
    close(ours.grad, jax.grad(lambda x: function(x).sum())(longer))


@pytest.mark.nightly
def test_parameters_are_called_as_in_the_models_code():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def quantise(levels, signal, step):
        return jnp.round(jnp.clip(signal / step, -levels, levels)) * step

    def backward(levels, held, g):
        signal, step = held
        inside = jnp.abs(signal / step) <= levels
        return jnp.where(inside, g, 0.0), jnp.sum(jnp.where(inside, 0.0, g))

    quantise.defvjp(lambda n, x, step: (quantise(n, x, step), (x, step)), backward)
    code = agrees(lambda x, s: quantise(4, x * 3.0, jnp.exp(s)), normal(5, 3), normal())
    assert "def forward(ctx, signal, step):" in code
    assert "torch.clamp(signal / step, -4.0, 4.0)" in code


@pytest.mark.nightly
def test_a_derivative_that_names_values_otherwise_calls_the_function_itself():
    @jax.custom_vjp
    def nearest(x, codebook):
        distance = jnp.sum((x[:, None] - codebook[None]) ** 2, -1)
        index = jnp.argmin(distance, -1)
        return codebook[index], index

    def forward(x, codebook):
        found, index = nearest(x, codebook)
        return (found, index), index

    def backward(index, gradients):
        return gradients[0], jnp.zeros((8, 4)).at[index].add(gradients[0])

    nearest.defvjp(forward, backward)
    code = agrees(lambda x, book: nearest(x, book)[0] * x, normal(5, 4), normal(8, 4, seed=1))
    assert code.count("(torch.autograd.Function)") == 1
    assert "def forward(ctx, x, codebook):" in code


@pytest.mark.nightly
def test_rows_of_a_table_are_an_embedding():
    eqx = pytest.importorskip("equinox")
    table = eqx.nn.Embedding(11, 4, key=jax.random.key(0))

    class Net(eqx.Module):
        table: eqx.nn.Embedding

        def __call__(self, ids):
            return jnp.sum(jax.vmap(self.table)(ids), 0)

    code, net = written_code(Net(table), jnp.arange(5))
    assert "self.table = nn.Embedding(11, 4)" in code
    close(net(torch.tensor([3, 1, 1, 0, 10])), Net(table)(jnp.array([3, 1, 1, 0, 10])))


@pytest.mark.nightly
def test_a_system_of_equations_is_solved_by_torch():
    def function(x, y):
        return jnp.linalg.solve(x @ x.T + jnp.eye(4), y)

    for shape in ((4,), (4, 2)):
        code = agrees(function, normal(4, 4), normal(*shape, seed=1), order=2)
        assert "torch.linalg.solve_ex(" in code
        assert "torch.eye(4, device=" in code
        assert "lu_factor" not in code
    batched = jax.vmap(jnp.linalg.solve)
    matrices = normal(3, 4, 4) + 4 * jnp.eye(4)
    agrees(batched, matrices, normal(3, 4, seed=1), order=2)
    agrees(jax.vmap(jnp.linalg.solve, (None, 0)), matrices[0], normal(3, 4, seed=1), order=2)
    agrees(jnp.linalg.inv, matrices, order=2)


@pytest.mark.nightly
def test_a_system_that_has_no_solution_is_nan_and_not_an_error():
    _, net = written_code(jnp.linalg.solve, jnp.eye(3), jnp.ones(3))
    got = net(torch.zeros(3, 3), torch.ones(3))
    assert not torch.isfinite(got).any()


@pytest.mark.nightly
def test_the_logarithm_of_a_determinant_is_torchs():
    code = agrees(lambda x: jnp.linalg.slogdet(x @ x.T + jnp.eye(4))[1], normal(4, 4), order=2)
    assert "torch.linalg.slogdet(" in code


@pytest.mark.nightly
def test_solutions_that_are_found_in_steps_have_their_own_gradient():
    def conjugate(w, b):
        return jax.scipy.sparse.linalg.cg(lambda v: (w @ w.T + jnp.eye(4)) @ v, b)[0]

    code = agrees(conjugate, normal(4, 4), normal(4, seed=1))
    assert code.count("(torch.autograd.Function)") == 1
    spd = lambda w, b: jax.scipy.linalg.solve(w @ w.T + jnp.eye(4), b, assume_a="pos")  # noqa: E731
    agrees(spd, normal(4, 4), normal(4, seed=1))


@pytest.mark.nightly
def test_a_fixed_point_is_differentiated_implicitly():
    def fixed_point(w, x):
        def gap(z):
            return jnp.tanh(z @ w * 0.3 + x) - z

        def solve(function, first):
            return jax.lax.fori_loop(0, 30, lambda _, z: z + function(z), first)

        def tangent(linear, y):
            return jnp.linalg.solve(jax.jacobian(linear)(jnp.zeros_like(y)), y)

        return jax.lax.custom_root(gap, jnp.zeros_like(x), solve, tangent)

    code = agrees(fixed_point, normal(4, 4), normal(4, seed=1))
    assert code.count("(torch.autograd.Function)") == 1


@pytest.mark.nightly
def test_what_a_model_of_parts_calls_is_one_function():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return straight_through(self.linear(x) * 3.0)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = Layer(rngs), Layer(rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    code, net = written_code(Net(nnx.Rngs(0)), normal(5, 4))
    assert code.count("(torch.autograd.Function)") == 1
    x = torch.from_numpy(np.array(normal(5, 4))).requires_grad_()
    net(x).sum().backward()
    assert x.grad.abs().sum() > 0
