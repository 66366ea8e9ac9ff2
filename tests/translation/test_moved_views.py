"""Views where values are made, the largest elements, and look-ups of positions, in torch files."""

from __future__ import annotations

import ast

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from fmapper.translation.functions.forms import Statement  # noqa: E402
from fmapper.translation.statements.moved_views import move_views  # noqa: E402
from support.written import normal, written, written_code  # noqa: E402


def moved(code):
    body = ast.parse(code).body
    statements = [
        Statement((one.targets[0].id,) if isinstance(one, ast.Assign) else None, one.value)
        for one in body
    ]
    move_views(statements, {"transpose", "permute"})
    return "\n".join(map(str, statements))


def test_views_that_alone_are_read_are_written_where_the_value_is_made():
    assert moved("q = f(x)\nattend(q.transpose(1, 2), 3)") == (
        "q = f(x).transpose(1, 2)\nreturn attend(q, 3)"
    )
    assert moved("a = f(x)\ny = a.transpose(1, 2)\ng(y)") == "y = f(x).transpose(1, 2)\nreturn g(y)"


@pytest.mark.parametrize(
    "code",
    [
        "q = f(x)\nreturn_(q.transpose(1, 2), q)",  # it is read twice
        "q = f(x)\ng(q.transpose(1, n))",  # by what may be another number there
        "q = f(x)\ng(q.flip(1))",  # which is no view
        "q = f(x)\nq.transpose(1, 2) @ k",  # no argument
        f"q = f({'x' * 80})\ng(q.transpose(1, 2))",  # a line would be too long
    ],
)
def test_other_values_stay(code):
    before = [one.removeprefix("return ") for one in moved(code).splitlines()]
    assert before == code.splitlines()


@pytest.mark.nightly
def test_attention_reads_as_a_person_writes_it():
    class Attend(nnx.Module):
        def __init__(self):
            self.inner = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.inner(x)

    model = Attend()
    source, net, _ = written(model, normal(2, 5, 8))
    assert "x = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)" in source.code
    x = np.array(normal(2, 5, 8))
    np.testing.assert_allclose(net(torch.tensor(x)).detach(), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_the_largest_elements_are_one_call():
    def choose(x):
        weights, at = jax.lax.top_k(x, 2)
        return weights / weights.sum(-1, keepdims=True), at

    x = np.array([[1.0, 3.0, 3.0, 3.0], [-0.5, 0.0, -2.0, -np.inf], [1.0, 2.0, 5.0, 4.0]], "f4")
    code, net = written_code(choose, x)
    assert "weights, at = top_k(x, 2, 1)" in code
    given = torch.tensor(x, requires_grad=True)
    for ours, theirs in zip(net(given), choose(x), strict=True):
        np.testing.assert_array_equal(ours.detach(), theirs)
    assert net(given)[1].dtype is torch.int32
    factors = np.arange(6, dtype="f4").reshape(3, 2)
    (net(given)[0] * torch.tensor(factors)).sum().backward()
    slope = jax.grad(lambda x: (choose(x)[0] * factors).sum())(x)
    np.testing.assert_allclose(given.grad, slope, rtol=1e-5)


@pytest.mark.nightly
def test_positions_are_looked_up_in_an_embedding():
    class Positions(nnx.Module):
        def __init__(self, rngs):
            self.tokens, self.places = nnx.Embed(9, 4, rngs=rngs), nnx.Embed(8, 4, rngs=rngs)

        def __call__(self, tokens):
            return self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))

    model, tokens = Positions(nnx.Rngs(0)), np.array([[1, 4, 8], [0, 0, 2]])
    source, net, _ = written(model, tokens)
    assert "self.places = nn.Embedding(8, 4)" in source.code
    np.testing.assert_allclose(net(torch.tensor(tokens)).detach(), model(tokens), rtol=1e-6)
