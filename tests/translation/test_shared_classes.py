"""Submodules that differ in their configuration are one class with arguments in written files."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation.source import translate, translate_proved  # noqa: E402


class ConvLayer(nn.Module):
    def __init__(self, width: int, out: int, size: int = 3, stride: int = 1, act: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(width, out, size, stride, size // 2, bias=False)
        self.norm = FrozenNorm(out)
        self.act = nn.ReLU() if act else nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.act(self.norm(self.conv(x)))


class FrozenNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(width) + 0.5)

    def forward(self, x: Any) -> Any:
        return x * self.scale[:, None, None]


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.first = ConvLayer(width, inner, 1)
        self.second = ConvLayer(inner, inner, 3, stride)
        self.last = ConvLayer(inner, 2 * width, 1, act=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.second(self.first(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Bottleneck(4, 3, 1), Bottleneck(8, 5, 2))

    def forward(self, x: Any) -> Any:
        return self.blocks(x)


@pytest.fixture(scope="module")
def written() -> tuple[Any, str]:
    torch.manual_seed(0)
    module = Net().eval()
    return module, translate(module, "flax", (torch.randn(2, 4, 8, 8),))[0].code


def made(code: str, name: str = "Net") -> tuple[Any, Any]:
    """Runs a file: a new model, and what loads its arrays."""
    space: dict[str, Any] = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    return space[name](rngs=nnx.Rngs(0)), space["load_weights"]


def head(code: str, name: str) -> str:
    found = re.search(rf"class {name}\(nnx.Module\):\n    def __init__\((.*?)\):", code, re.DOTALL)
    assert found is not None, code
    return re.sub(r"\s+", " ", found[1])


@pytest.mark.nightly
def test_it_computes_the_same(written: Any) -> None:
    module, code = written
    model, load_weights = made(code)
    load_weights(model, {name: one.numpy() for name, one in module.state_dict().items()})
    x = torch.randn(3, 4, 10, 8)
    found = torch.tensor(jax.device_get(model(x.numpy())))
    torch.testing.assert_close(found, module(x))


@pytest.mark.nightly
def test_a_keyword_that_some_leave_out_is_an_argument(written: Any) -> None:
    code = written[1]
    assert head(code, "ConvLayer") == (
        "self, width, out, size=3, stride=1, act=True, *, rngs: nnx.Rngs"
    )
    assert "class ConvLayer_2" not in code


@pytest.mark.nightly
def test_arguments_are_called_like_those_of_the_parts(written: Any) -> None:
    code = written[1]
    assert head(code, "Bottleneck") == "self, width, inner, stride, *, rngs: nnx.Rngs"
    assert "ConvLayer(width, inner, size=1, rngs=rngs)" in code
    assert "ConvLayer(inner, 2 * width, size=1, act=False, rngs=rngs)" in code
    assert "Bottleneck(8, 5, 2, rngs=rngs)" in code


@pytest.mark.nightly
def test_values_that_differ_by_module_are_loaded(written: Any) -> None:
    module, code = written
    assert code.count("class FrozenNorm") == 1
    assert "LoadedBuffer(jnp.zeros(" in code
    assert head(code, "FrozenNorm") == "self, size, *, rngs: nnx.Rngs"
    model, load_weights = made(code)
    state = {name: one.detach().numpy() for name, one in module.named_parameters()}
    with pytest.raises(ValueError, match="scale"):
        load_weights(model, state)


class Relative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(5, 2))
        self.bias = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))

    def forward(self, x: Any) -> Any:
        return x @ self.bias(self.table).T


@pytest.mark.nightly
def test_a_sequence_may_be_given_an_array_of_its_owner() -> None:
    module = Relative().eval()
    code = translate(module, "flax", (torch.randn(3, 4),))[0].code
    assert "self.bias(self.table[...])" in code
    model, load_weights = made(code, "Relative")
    load_weights(model, {name: one.numpy() for name, one in module.state_dict().items()})
    x = torch.randn(2, 4)
    found = torch.tensor(jax.device_get(model(x.numpy())))
    torch.testing.assert_close(found, module(x))


class Turned(nn.Module):
    """A product with a weight of inputs by outputs, as GPT-2's `Conv1D`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class OfTwoOrders(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.turned = Turned(4, 6)
        self.act = act
        self.proj = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return x + self.proj(self.act(self.turned(x)))


class Waves(nn.Module):
    def forward(self, x: Any) -> Any:
        x = torch.relu(x)
        for _ in range(2):
            x = torch.tanh(x) + torch.sin(x)
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        act = Waves()
        self.blocks = nn.ModuleList(OfTwoOrders(act) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [False, True])
def test_layers_of_one_class_with_two_orders_and_one_activation_for_all(scan: bool) -> None:
    inputs = (torch.randn(2, 5, 4),)
    source, proof, reason = translate_proved(Stack(), "flax", inputs, scan=scan)
    assert proof
    assert not reason
    assert "ORDERS = {" in source.code
    assert source.code.count("class OfTwoOrders") == source.code.count("self.act = Waves(") == 1
    assert source.layers[0] == source.layers[1]
