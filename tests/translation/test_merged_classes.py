"""Submodules of one class of the source are one class of the file, though their programs differ."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fmapper
from fmapper.translation.classes import Sketch
from fmapper.translation.code import expr
from fmapper.translation.merging import bypasses
from fmapper.translation.merging.align import fill_lacking, split_sequences
from fmapper.translation.merging.conditions import Case, choose_shortest, evaluate, rules
from fmapper.translation.source import translate

pytest.importorskip("flax")
pytestmark = pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")


class Attention(nn.Module):
    def __init__(self, *, is_causal: bool, has_bias: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.query, self.key, self.out = (nn.Linear(8, 8) for _ in range(3))
        if has_bias:
            self.bias = nn.Embedding(7, 2)

    def forward(self, x: Any, memory: Any = None, mask: Any = None, bias: Any = None) -> Any:
        seen = x if memory is None else memory
        query = self.query(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        keys = self.key(seen).view(*seen.shape[:2], 2, 4).transpose(1, 2)
        if bias is None and hasattr(self, "bias"):
            at = torch.arange(x.shape[1])
            bias = self.bias((at[:, None] - at).clamp(-3, 3) + 3).permute(2, 0, 1)[None]
        scores = query @ keys.transpose(2, 3)
        if bias is not None:
            scores = scores + bias
        if self.is_causal:
            size = x.shape[1]
            scores = scores.masked_fill(~torch.ones(size, size).bool().tril(), -1e9)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        found = torch.softmax(scores, -1) @ keys
        return self.out(found.transpose(1, 2).reshape(x.shape)), bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(is_causal=True, has_bias=True)
        self.second = Attention(is_causal=True, has_bias=False)
        self.encoder = Attention(is_causal=False, has_bias=True)
        self.cross = Attention(is_causal=False, has_bias=False)

    def forward(self, x: Any, y: Any, mask: Any) -> Any:
        mask = mask[:, None, None]
        memory, _ = self.encoder(y, mask=mask)
        x, bias = self.first(x)
        x, _ = self.second(x, bias=bias)
        return self.cross(x, mask=mask, memory=memory)[0]


@pytest.fixture(scope="module")
def module() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def inputs(rows: int = 2, length: int = 5) -> Any:
    mask = torch.ones(rows, 6, dtype=torch.int64)
    mask[0, 4:] = 0
    return torch.randn(rows, length, 8), torch.randn(rows, 6, 8), mask


@pytest.fixture(scope="module")
def code(module: Net) -> str:
    source, _, proof = translate(module, "flax", inputs(), proved=True)
    assert proof
    return source.code


@pytest.mark.nightly
def test_one_class_with_flags_and_optional_arguments(code: str) -> None:
    classes = {n.name: n for n in ast.parse(code).body if isinstance(n, ast.ClassDef)}
    assert [name for name in classes if name.startswith("Attention")] == ["Attention"]
    assert "if memory is None:\n            memory = x" in code
    assert "nnx.Embed(7, 2, rngs=rngs) if has_bias else None" in code
    assert "is_causal=True" in code
    assert "if self.is_causal" in code
    assert "flag(" not in code


@pytest.mark.nightly
def test_each_part_is_that_of_the_source(module: Net) -> None:
    model = fmapper.convert(module, "flax", inputs(), structure=True, dynamic_shapes="auto")
    x, y, mask = inputs()
    bias = torch.randn(1, 2, 5, 5)
    calls = {
        "first": {}, "second": {"bias": bias}, "encoder": {"mask": mask[:, None, None, :5]},
        "cross": {"mask": mask[:, None, None], "memory": y},
    }  # fmt: skip
    for name, given in calls.items():
        with torch.no_grad():
            wanted = getattr(module, name)(x, **given)
        mine = getattr(model, name)(x.numpy(), **{k: v.numpy() for k, v in given.items()})
        np.testing.assert_allclose(mine[0], wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_what_no_part_was_called_with_is_refused(module: Net) -> None:
    model = fmapper.convert(module, "flax", inputs(), structure=True, dynamic_shapes="auto")
    x, y = (one.numpy() for one in inputs()[:2])
    mask = np.ones((2, 1, 1, 5), np.int32)
    with pytest.raises(ValueError, match="mask must be given if not is_causal, and only then"):
        model.first(x, mask=mask)  # it would mask what is padding, and see what comes later
    with pytest.raises(ValueError, match="bias must be given"):
        model.second(x)
    with pytest.raises(ValueError, match="memory must be given"):
        model.encoder(x, y, mask=mask)


def test_a_rule_allows_each_what_it_was_given() -> None:
    cases = [case("x", b=True, c=True), case("x y", b=True, c=False), case("x", b=False, c=False)]
    assert rules(cases) == [
        ("(y is not None) == (flag(b) and not flag(c))",
         "y must be given if flag(b) and not flag(c), and only then"),
    ]  # fmt: skip
    either = [case("x", b=True), case("x y", b=True), case("x", b=False)]
    assert rules(either) == [("y is None or flag(b)", "y may be given only if flag(b)")]
    crossed = [case("x y", b=True), case("x z", b=True)]
    assert rules(crossed) is None  # of y and z one


def case(given: str = "", parts: str = "", **flags: bool) -> Case:
    return Case(frozenset(given.split()), frozenset(parts.split()), flags, frozenset())


def test_conditions_pick_what_each_has() -> None:
    cases = [case("x", "a", b=True), case("x", "a", b=False), case("x y", "", b=False)]
    codes = ["y = 1", "y = 2", ""]
    (choice,) = choose_shortest([[one] if one else [] for one in codes], cases)
    assert [choice.pick(one) for one in cases] == codes
    (code,) = choice.statements()
    for one, wanted in zip(cases, codes, strict=True):
        assert ast.unparse(evaluate(ast.parse(code), one)) == wanted


def test_what_no_condition_tells_apart_stays_apart() -> None:
    assert not choose_shortest([["y = 1"], ["y = 2"]], [case("x"), case("x")])


class Doubled(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + x


class Scaled(nn.Module):
    """What differs is in no attribute: it is in the class of an activation."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.activation = activation

    def forward(self, x: Any) -> Any:
        return self.activation(self.up(x)) * 2


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(nn.ReLU()), Scaled(Doubled())

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


@pytest.mark.nightly
def test_classes_that_no_flag_tells_apart_stay_apart() -> None:
    source, _, proof = translate(Scales().eval(), "flax", (torch.randn(2, 8),), proved=True)
    assert proof
    assert "class Scaled_2(" in source.code


class Residual(nn.Module):
    def __init__(self, given: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(given, width, 3, stride, 1)
        self.norm = nn.BatchNorm2d(width)
        self.shortcut = None
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(given, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm(self.conv(x)))
        residual = x if self.shortcut is None else self.shortcut(x)
        return y + residual


@pytest.mark.nightly
def test_blocks_with_and_without_a_shortcut_are_one_class() -> None:
    net = nn.Sequential(Residual(4, 4), Residual(4, 6, 2), Residual(6, 6), Residual(6, 8, 2))
    source, _, proof = translate(net, "flax", (torch.randn(2, 4, 8, 8),), train=True, proved=True)
    assert proof, proof
    assert "class Residual_2(" not in source.code
    assert "residual = x if self.shortcut is None else self.shortcut(x)" in source.code
    assert "Conv(given, width, (1, 1), strides=stride, rngs=rngs)" in source.code
    assert (
        "width, stride=1, has_shortcut=False, *, rngs" in source.code
    )  # what is usual has a default
    assert "Residual(4, 4, rngs=rngs)" in source.code


def test_a_number_of_a_part_is_an_argument_for_others_of_its_kind_alone() -> None:
    plain, other = "Conv(4, 8, strides=2)", "Conv(6, 6, strides=1)"
    lacking = Sketch("a", "Block", [("conv", ast.parse(plain, mode="eval").body)])
    made = [("conv", other), ("skip", "Conv(6, 6, (1, 1), strides=1)")]
    having = Sketch("b", "Block", [(k, ast.parse(v, mode="eval").body) for k, v in made])
    filled = fill_lacking([lacking, having])
    assert ast.unparse(filled[id(lacking)]["skip"]) == "Conv(4, 4, (1, 1), strides=2)"
    assert filled[id(having)] == {}


def test_a_result_is_what_the_part_is_given_until_that_is_another() -> None:
    having = ["h = self.a(x)", "y = self.b(h)", "return y + h"]
    way = bypasses.find("a", having, ["y = self.b(x)", "return y + x"])
    assert way is not None
    assert way.rewrite(["y = self.b(x)", "return y + x"]) == ["h = x", *having[1:]]
    assert bypasses.find("a", having, ["y = self.b(x)", "x = y", "return y + x"]) is None
    assert bypasses.find("a", having, ["y = self.b(x)", "return y + y"]) is None


class Inverted(nn.Module):
    """A block of MobileNet: its list begins with three layers that some blocks lack."""

    def __init__(self, inp: int, oup: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inp * expand
        self.use_res = stride == 1 and inp == oup
        layers: list[nn.Module] = []
        if expand != 1:
            layers += [nn.Conv2d(inp, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, oup, 1, bias=False),
            nn.BatchNorm2d(oup),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return x + self.conv(x) if self.use_res else self.conv(x)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_sequences_that_lack_their_first_items_are_one_class(target: str) -> None:
    blocks = Inverted(4, 4, 1, 1), Inverted(4, 6, 2, 3), Inverted(6, 6, 1, 3), Inverted(6, 8, 1, 2)
    net = nn.Sequential(*blocks).eval()
    source, _, proof = translate(net, target, (torch.randn(2, 4, 8, 8),), proved=True)
    assert proof, proof
    assert "class Inverted_2(" not in source.code
    assert "if has_all_conv else ()" in re.sub(r"\s+", " ", source.code)
    assert "Inverted(4, 4, hidden=4, has_all_conv=False, use_res=True, " in source.code
    assert source.code.count("has_all_conv=") == 2  # the default is the other


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["short first", "short last"])
def test_sequences_that_lack_items_in_the_middle_keep_their_order(order: str) -> None:
    def sequence(width: int, *, extra: bool) -> Items:
        more = [nn.Linear(width, width), nn.Tanh()] if extra else []
        return Items(
            nn.Linear(4, width), nn.ReLU(), *more, nn.LayerNorm(width), nn.Linear(width, 4)
        )

    parts = [sequence(5, extra=False), sequence(6, extra=True), sequence(7, extra=True)]
    net = nn.Sequential(*(parts if order == "short first" else reversed(parts)))
    source, _, proof = translate(net.eval(), "flax", (torch.randn(3, 4),), proved=True)
    assert proof, proof
    assert "class Items_2(" not in source.code


class Items(nn.Module):
    def __init__(self, *items: nn.Module) -> None:
        super().__init__()
        self.items = nn.Sequential(*items)

    def forward(self, x: Any) -> Any:
        return x + self.items(x)


def test_sequences_are_not_split_where_the_name_of_the_items_is_taken() -> None:
    def sketch(*items: str) -> Sketch:
        made = [("layers", expr(f"Sequential({', '.join(items)})")), ("all_layers", expr("A(1)"))]
        return Sketch("", "Net", made)

    several = [sketch("A(1)", "B(2)"), sketch("C(1)", "A(1)", "B(2)")]
    before = [list(one.made) for one in several]
    assert split_sequences(several) == {}
    assert [one.made for one in several] == before
    for one in several:
        one.made.pop()
    assert split_sequences(several) == {"layers": 0}
