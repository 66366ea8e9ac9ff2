"""Layers that are given one array as several arguments, beside others of their class."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation.merging.twins import share_methods  # noqa: E402
from fmapper.translation.source import translate, translate_proved  # noqa: E402


class Attention(nn.Module):
    def __init__(self, width: int, swapped: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.swapped = swapped

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        size = query.shape[0]
        if self.swapped:
            query, key = key, query
        scores = self.q(query) @ self.k(key).mT
        mixed = torch.softmax(scores, -1) @ self.v(value)
        return mixed.reshape(size, -1, 4)


class Decoder(nn.Module):
    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.own, self.other = Attention(4), Attention(4, swapped)

    def forward(self, x: Any, memory: Any) -> Any:
        x = self.own(x, x, x)
        return self.other(x, memory, memory)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_attention_to_itself_and_to_others_is_one_class(target: str) -> None:
    pytest.importorskip(target)
    given = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    source, proof, _ = translate_proved(Decoder(), target, given)
    assert proof
    assert source.code.count("class Attention") == 1
    assert "self.own(x, x, x)" in source.code
    assert "value is key" in source.code
    assert "key is query" not in source.code


@pytest.mark.nightly
def test_other_code_is_another_class() -> None:
    given = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    code = translate(Decoder(swapped=True), "flax", given)[0].code
    assert code.count("class Attention") == 2


def _sketch(check: str, *lines: str) -> Any:
    from fmapper.translation.classes import Method, Sketch
    from fmapper.translation.functions.forms import Terms

    terms = Terms({}, frozenset(), frozenset(), bool(check), check)
    method = Method("__call__", ("a", "b", "c"), [*filter(None, [check, *lines])], terms=terms)
    return Sketch("", "Part", methods=[method])


@pytest.mark.parametrize(
    ("lines", "is_shared"),
    [
        (("x = f(b, c)", "return x + a"), True),
        (("b = f(b, c)", "return b + a"), True),
        (("x = f(b, c)", "return x + b"), True),
        (("x = f(b, 2)", "return x + a"), False),
        (("x = f(d, c)", "return x + a"), False),
        (("x = f(b, c)", "return x + x"), False),
        (("x = f(b, c)", "a = g(a)", "return x + a"), False),
    ],
)
def test_methods_are_shared_where_they_compute_the_same_of_equal_arguments(
    lines: tuple[str, ...], is_shared: bool
) -> None:
    own = _sketch("check(b is a and c is a, 'b=a')", "x_2 = f(a, a)", "return x_2 + a")
    other = _sketch("check(c is b, 'c=b')", *lines)
    share_methods([own, other])
    assert (own.methods[0].lines == other.methods[0].lines) is is_shared
    free = _sketch("", *lines)
    share_methods([own, other, free])
    assert (own.methods[0].lines == free.methods[0].lines) is is_shared


def test_what_else_arguments_must_be_is_the_same_for_all() -> None:
    own = _sketch("check(b is a and c is None, '')", "return f(a, a)")
    share_methods([own, _sketch("", "return f(a, b)")])
    assert own.methods[0].lines[-1] == "return f(a, a)"
