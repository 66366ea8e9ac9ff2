"""Translated files read as a person would have written them."""

from __future__ import annotations

import ast
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fmapper
from fmapper.programs.program import Guard
from fmapper.translation.code import Value, name
from fmapper.translation.guards.conditions import strictest
from fmapper.translation.guards.facts import Facts
from fmapper.translation.guards.sizes import Sizes
from fmapper.translation.reading.helpers import print_imports
from fmapper.translation.source import translate, translate_proved


@pytest.mark.parametrize(
    ("expression", "relation", "value", "wanted"),
    [
        ("floordiv(n + -1, 32) + 1", ">=", 2, ("n", ">=", 33)),
        ("(n - 1)//4", "<=", 2, ("n", "<=", 12)),
        ("3*n", ">=", 4, ("n", ">=", 2)),
        ("2*n", "==", 6, ("n", "==", 3)),
        ("(n - 1)//4", "==", 2, ("(n - 1)//4", "==", 2)),
        ("n*m", ">=", 2, ("n*m", ">=", 2)),
    ],
)
def test_conditions_on_sizes_are_as_simple_as_they_can_be(
    expression: str, relation: str, value: int, wanted: tuple[str, str, int]
) -> None:
    (found,) = strictest([Guard(expression, relation, value)])
    assert (found.expression, found.relation, found.value) == wanted
    for n in range(60):
        sizes = {"n": n, "m": 2}
        assert found.holds(sizes) == Guard(expression, relation, value).holds(sizes)


def test_of_several_conditions_on_a_size_the_strictest_stays() -> None:
    several = [Guard("n", ">=", 2), Guard("floordiv(n - 1, 32)", ">=", 1), Guard("n - 1", ">=", 3)]
    both = Guard("floordiv(n - 1, 32)*floordiv(m - 1, 4) + floordiv(n - 1, 32)", ">=", 2)
    (first, second) = strictest([both, *several, Guard("m", ">=", 5)])
    assert (first.expression, first.value, second.expression) == ("n", 33, "m")
    weaker = [Guard("m", ">=", 4), Guard("n", ">=", 33)]
    assert len(strictest([both, *weaker])) == 3


def test_imports_of_python_come_first() -> None:
    lines = ["import numpy as np", "from flax import nnx", "from typing import NamedTuple"]
    assert print_imports(lines).splitlines() == [lines[2], "", lines[0], lines[1]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)

    def forward(self, states: Any, memory: Any) -> Any:
        query = self.query(states).view(states.shape[0], states.shape[1], 2, 4).transpose(1, 2)
        keys = self.key(memory).view(memory.shape[0], memory.shape[1], 2, 4).transpose(1, 2)
        attended = torch.softmax(query @ keys.transpose(2, 3), -1) @ keys
        attended = attended.transpose(1, 2).reshape(states.shape)
        return attended, keys


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, states: Any, memory: Any) -> Any:
        attended, keys = self.attention(states, memory)
        return states + attended, keys


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Layer()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Any, y: Any) -> Any:
        memory, _ = self.encoder(x, x)
        every = []
        for layer in self.layers:
            y = layer(y, memory)
            every.append({"keys": y[1]})
            y = y[0]
        return {"last": y, "layers": tuple(every)}


@pytest.fixture(scope="module")
def code() -> str:
    given = (torch.randn(2, 5, 8), torch.randn(2, 7, 8))
    source, _, proof = translate(Net().eval(), "flax", given, proved=True)
    assert proof
    return source.code


@pytest.mark.nightly
def test_sizes_have_numbers_only_where_a_function_has_several(code: str) -> None:
    assert "# states: (batch, length, 8), memory: (batch, length_2, 8)" in code
    for cls in ("class Attention(", "class Layer("):
        assert "length_2" not in code.partition(cls)[2].partition("class ")[0]


@pytest.mark.nightly
def test_results_that_are_only_returned_do_not_keep_a_loop_apart(code: str) -> None:
    model = code.partition("class Net(")[2]
    assert "for layer in self.layers:" in model
    assert "[0]" not in model


class Scores(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.query = nn.Linear(8, features)
        self.scale = features**-0.5

    def forward(self, x: Any) -> Any:
        scores = self.query(x) * self.scale / math.log(16)
        return scores.masked_fill(scores < 0, torch.finfo(torch.float32).min).amax(-1)


@pytest.mark.nightly
@pytest.mark.parametrize("features", [8, 16])
def test_numbers_are_written_as_what_they_are(features: int) -> None:
    model = Scores(features).eval()
    source, _, proof = translate(model, "flax", (torch.randn(2, 8),), proved=True)
    assert proof
    assert "/ math.log(16)" in source.code
    assert "float(jnp.finfo(jnp.float32).min)" in source.code
    assert ("8 ** -0.5" in source.code) == (features == 8)  # 0.25 is short enough


def test_what_conditions_say_about_sizes_is_written_once() -> None:
    guards = [
        Guard("mod(h, 2)", "==", 0),
        Guard("mod(floordiv(h, 2), 2)", "!=", 0),
        Guard("max(1, floordiv(h, 2)) * max(1, w) + -1 * max(1, w)", ">=", 1),
        Guard("floordiv(h, 2) + max(0, 3 + -1 * mod(floordiv(h, 2), 2))", ">=", 9),
        Guard("floordiv(h, 2) + -1 * max(1, floordiv(h, 2))", "==", 0),
        Guard("64 * b * floordiv(w - 1, 8) * 2", ">=", 2),
        Guard("floordiv(w - 1, 8) + 1", "==", 8),
        Guard("mod(36 * b + 36 * b * floordiv(w - 1, 8), 144 * b)", "==", 0),
    ]
    found = strictest(guards, "bhw")
    assert [(one.expression, one.relation, one.value) for one in found] == [
        ("mod(h, 4)", "==", 2),
        ("h", ">=", 14),
        ("b", ">=", 1),
        ("(w - 1) // 8", "==", 7),
    ]
    for b, h, w in itertools.product(range(3), range(40), range(70)):
        sizes = {"b": b, "h": h, "w": w}
        wanted = all(guard.holds(sizes) for guard in guards)
        assert all(guard.holds(sizes) for guard in found) == wanted, sizes


def test_a_size_has_its_own_code_in_each_function() -> None:
    simplify = Facts("s").simplify
    for array in ("states", "memory"):
        sizes = Sizes({}, simplify)
        sizes.learn(Value(name(array), "float32", ("s",)))
        code = sizes.code("s*16")
        assert isinstance(code, ast.expr)
        assert ast.unparse(code) == f"16 * {array}.shape[0]"


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 4)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 5 * 5, 2)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.head(x.flatten(1))


@pytest.mark.nightly
def test_layers_and_conditions_are_short():
    jnp, nnx = pytest.importorskip("jax.numpy"), pytest.importorskip("flax.nnx")
    code = fmapper.source(Small(), "flax", (torch.randn(2, 3, 14, 14),))
    assert "self.conv = Conv(3, 4, (4, 4), rngs=rngs)\n" in code
    assert "self.norm = BatchNorm(4, rngs=rngs)\n" in code
    assert 'check_shapes((x, "batch 3 height>=5 width>=5"))\n' in code.replace("'", '"')
    assert "def check_inputs" not in code  # the linear layer refuses other rows
    made = {}
    exec(code, made)
    model = made["Small"](rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="with height"):
        model(jnp.ones((2, 3, 4, 14)))
    with pytest.raises(TypeError, match="contracting"):
        model(jnp.ones((2, 3, 16, 14)))


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(100), persistent=False)

    def forward(self, x):
        x = x * self.table
        return torch.cat([x, x.sin(), x.cos(), (2 * x).sin(), (2 * x).cos(), x.exp()], -1)


@pytest.mark.nightly
def test_what_is_returned_at_once_has_no_name_and_bytes_have_a_function():
    code = fmapper.source(Features(), "flax", (torch.randn(2, 100),))
    assert "        return jnp.concatenate(" in code
    assert "joined" not in code
    assert 'Buffer(jnp.array(from_text("' in "".join(code.split()).replace("'", '"')


class Cross(nn.Module):
    """Names its input twice, and still needs the second name where the first gets a new value."""

    def __init__(self):
        super().__init__()
        self.w = nn.ModuleList(nn.Linear(8, 1, bias=False) for _ in range(3))
        self.b = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(3))

    def forward(self, x):
        x0 = x
        for i in range(3):
            xw = self.w[i](x)
            x = x0 * xw + self.b[i] + x
        return x


@pytest.mark.nightly
def test_a_second_name_is_not_taken_from_a_value_that_is_about_to_be_used():
    torch.manual_seed(0)
    net, x = Cross(), torch.randn(5, 8)
    model = fmapper.convert(net, "flax", (x,), structure=True, check=False)
    np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-6)


class TakesMuch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(20, 4))

    def forward(
        self, source: Any, target: Any, source_offsets: Any, target_offsets: Any,
        source_weights: Any, target_weights: Any,
    ) -> Any:  # fmt: skip
        first = self.table[: source.shape[0]] + source + source_offsets + source_weights
        return first, self.table[: target.shape[0]] + target + target_offsets + target_weights


@pytest.mark.nightly
def test_checks_of_many_arguments_have_no_method_of_their_own() -> None:
    given = [torch.randn(n, 4) for n in (5, 7, 5, 7, 5, 7)]
    source = translate(TakesMuch().eval(), "flax", tuple(given))[0]
    assert "check_inputs" not in source.code
    assert "(source, 'batch<=20 4')" in source.code
    space: dict[str, Any] = {}
    exec(source.code, space)
    model = space[source.name](rngs=space["nnx"].Rngs(0))
    long = [torch.randn(n, 4).numpy() for n in (21, 7, 21, 7, 21, 7)]
    with pytest.raises(ValueError, match=r"\(21, 4\) is not \(batch<=20 4\)"):
        model(*long)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.rand(4, 1))
        self.steps_ = torch.rand(1, 5)

    def forward(self, x: Any) -> Any:
        waves = torch.sin(self.low * self.steps_) / self.steps_
        return x @ (waves * torch.cos(self.steps_)).T


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_a_constant_that_several_operations_read_is_a_variable() -> None:
    source, proof, _ = translate_proved(Waves(), "flax", (torch.rand(3, 5),))
    assert proof
    assert source.code.count("steps = jnp.array([") == 1
    assert source.code.count("jnp.array(") == 1
