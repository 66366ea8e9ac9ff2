"""Classes whose submodules have one part or another, or a part or none: one class of the file."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from torch import nn

from fmapper.translation.merging import bypasses
from fmapper.translation.source import translate_proved

TARGETS = ("flax", "equinox")


class Swish(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * torch.sigmoid(x + 1)


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, width // 2), nn.Linear(width // 2, width)

    def forward(self, x: Any) -> Any:
        return x * torch.sigmoid(self.up(torch.relu(self.down(x))))


class Inverted(nn.Module):
    def __init__(self, inp: int, hidden: int, *, use_se: bool, use_swish: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inp, hidden, bias=False),
            nn.LayerNorm(hidden),
            Swish() if use_swish else nn.ReLU(),
            nn.Identity() if not use_se else Squeeze(hidden),
            nn.Linear(hidden, inp),
        )

    def forward(self, x: Any) -> Any:
        return x + self.layers(x)


class Blocks(nn.Module):
    def __init__(self, *kinds: tuple[bool, bool]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Inverted(6, 8 + 4 * at, use_se=se, use_swish=swish)
            for at, (se, swish) in enumerate(kinds)
        )

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_items_of_two_kinds_are_below_the_flags_of_the_source(target: str) -> None:
    torch.manual_seed(0)
    model = Blocks((True, False), (False, True), (False, False), (True, True))
    source, proof, reason = translate_proved(model, target, (torch.randn(3, 6),))
    assert proof
    assert not reason
    assert "class Inverted_2" not in source.code
    assert "(lambda x: x * jax.nn.sigmoid(x + 1)) if use_swish else jax.nn.relu" in source.code
    assert re.search(r"Squeeze\(hidden, .*?\) if use_se else lambda x: x", source.code)


@pytest.mark.nightly
def test_flags_that_are_equal_in_all_are_two_arguments() -> None:
    torch.manual_seed(0)
    model = Blocks((True, True), (False, False), (True, True))
    source, proof, _ = translate_proved(model, "flax", (torch.randn(3, 6),))
    assert proof
    assert "if use_swish else" in source.code
    assert "if use_se else" in source.code


@pytest.mark.nightly
def test_what_no_variable_decides_on_is_called_after_the_part() -> None:
    class Named(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            act = {"gate": Squeeze(6), "relu": nn.ReLU()}[kind]
            self.layers = nn.Sequential(nn.Linear(6, 6), act, nn.Linear(6, 6), nn.LayerNorm(6))

        def forward(self, x: Any) -> Any:
            return self.layers(x) + x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Named("gate"), Named("relu")

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x))

    torch.manual_seed(0)
    source, proof, _ = translate_proved(Model(), "flax", (torch.randn(3, 6),))
    assert proof
    assert "class Named_2" not in source.code
    assert "Squeeze(rngs=rngs) if has_squeeze else jax.nn.relu" in source.code


class Gated(nn.Module):
    """Has a part for its input, a part for a context, both, or none."""

    def __init__(self, inputs: int, outputs: int, context: int = 0) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.first = nn.Linear(inputs, inputs)
        if context:
            self.context = nn.Linear(context, inputs, bias=False)
        if inputs != outputs:
            self.resample = nn.Linear(inputs, outputs)
        self.last, self.norm = nn.Linear(inputs, outputs), nn.LayerNorm(outputs)

    def forward(self, x: Any, context: Any = None) -> Any:
        residual = self.resample(x) if self.inputs != self.outputs else x
        x = self.first(x)
        if context is not None:
            x = x + self.context(context)
        x = torch.tanh(x)
        x = self.last(x)
        return self.norm(x + residual)


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Gated(8, 8), Gated(8, 4)
        self.c, self.d = Gated(4, 4, 8), Gated(4, 8, 8)

    def forward(self, x: Any) -> Any:
        return self.d(self.c(self.b(self.a(x)), x), x)


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_kept_of_an_input_is_the_input_without_a_part(target: str) -> None:
    torch.manual_seed(0)
    source, proof, _ = translate_proved(Gates(), target, (torch.randn(3, 8),))
    assert proof
    assert "class Gated_2" not in source.code
    assert "residual = x if self.resample is None else self.resample(x)" in source.code
    assert source.code.count("self.last(x)") == 1
    assert "x_2" not in source.code[source.code.index("class Gated") :].split("\nclass ")[0]


class Bottleneck(nn.Module):
    """Has a convolution and a norm, a gate, both or none."""

    def __init__(self, inputs: int, width: int, stride: int, *, gate: bool) -> None:
        super().__init__()
        self.stride = stride
        self.expand = nn.Conv1d(inputs, width, 1)
        if stride > 1:
            self.conv = nn.Conv1d(width, width, 3, stride, 1, groups=width, bias=False)
            self.norm = nn.BatchNorm1d(width)
        self.gate = nn.Linear(width, width) if gate else None
        self.project = nn.Conv1d(width, inputs, 1)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.expand(x))
        if self.stride > 1:
            x = self.conv(x)
            x = self.norm(x)
        if self.gate is not None:
            x = x * torch.sigmoid(self.gate(x.mean(2)))[:, :, None]
        return self.project(x)


class Bottlenecks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            Bottleneck(3, 4, 1, gate=False),
            Bottleneck(3, 6, 2, gate=False),
            Bottleneck(3, 8, 1, gate=True),
            Bottleneck(3, 10, 2, gate=True),
        )

    def forward(self, x: Any) -> Any:
        return self.blocks(x)


@pytest.mark.nightly
def test_parts_that_are_there_independently_have_a_condition_each() -> None:
    torch.manual_seed(0)
    source, proof, _ = translate_proved(Bottlenecks(), "flax", (torch.randn(4, 3, 16),))
    assert proof
    code = source.code
    assert "class Bottleneck_2" not in code
    assert code.count("x = self.conv(x)") == code.count("self.gate(") == 1
    assert "if self.conv is not None:" in code


class Residual(nn.Module):
    """Has a part for its input or none, and then another part or none."""

    def __init__(self, inputs: int, outputs: int, *, gate: bool) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, outputs)
        self.down = nn.Linear(inputs, outputs) if inputs != outputs else None
        self.gate = Squeeze(outputs) if gate else None

    def forward(self, x: Any) -> Any:
        residual = x
        out = torch.relu(self.first(x))
        if self.down is not None:
            residual = self.down(x)
        if self.gate is not None:
            out = self.gate(out)
        return out + residual


@pytest.mark.nightly
def test_one_or_the_other_is_one_statement_beside_other_conditions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Residual(4, 4, gate=True), Residual(4, 6, gate=True), Residual(6, 8, gate=False),
        Residual(8, 8, gate=False),
    )  # fmt: skip
    source, proof, _ = translate_proved(model, "flax", (torch.randn(3, 4),))
    assert proof
    assert source.code.count("self.down is") == 1
    assert source.code.count("self.gate is not None") == 1
    assert re.search(r"residual = .* if self.down is (not )?None else ", source.code)


@pytest.mark.nightly
def test_numbers_of_parts_that_are_not_there_are_those_of_the_others() -> None:
    torch.manual_seed(0)
    source, proof, _ = translate_proved(Bottlenecks(), "flax", (torch.randn(4, 3, 16),))
    assert proof
    assert "groups=" not in re.sub("feature_group_count=width", "", source.code)
    assert re.search(r"Bottleneck\(4, ", source.code)


@pytest.mark.nightly
def test_one_class_of_parts_of_two_kinds_takes_weights() -> None:
    torch.manual_seed(0)
    model = Blocks((True, False), (False, True)).eval()
    x = torch.randn(3, 6)
    source, _, _ = translate_proved(model, "flax", (x,))
    names: dict[str, Any] = {}
    exec(source.code, names)
    known = {key: value.numpy() for key, value in model.state_dict().items()}
    found = names["load_weights"](names["Blocks"](rngs=nnx.Rngs(0)), known)
    assert jnp.allclose(found(jnp.asarray(x.numpy())), model(x).detach().numpy(), atol=1e-5)


class Mixer(nn.Module):
    """Has a part that is called `self`, as those of transformers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.self, self.norm = part, nn.LayerNorm(6)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.self(x))


@pytest.mark.nightly
def test_a_part_that_is_called_self_is_given() -> None:
    torch.manual_seed(0)
    gate = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model = nn.Sequential(Mixer(Squeeze(6)), Mixer(gate), Mixer(nn.Linear(6, 6)))
    source, proof, _ = translate_proved(model, "flax", (torch.randn(3, 6),))
    assert proof
    assert "self.self = self_" in source.code


def halves(x: Any, axis: int) -> Any:
    """Returns the difference of two halves along an axis."""
    size = x.shape[axis] // 2
    first, second = x.narrow(axis, 0, size), x.narrow(axis, size, size)
    return torch.tanh(first - second) * torch.sigmoid(first + second)


class Halved(nn.Module):
    def forward(self, x: Any) -> Any:
        return halves(x, 0) @ halves(x, 1)


@pytest.mark.nightly
def test_a_function_along_several_axes_is_written_for_each() -> None:
    source, proof, _ = translate_proved(Halved(), "flax", (torch.randn(4, 4),))
    assert proof
    assert source.code.count("jax.nn.sigmoid(") == 2


class Mixed(nn.Module):
    """Has one part or another where a variable says so, outside of a sequence."""

    def __init__(self, width: int, *, use_se: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        if use_se:
            self.mix = Squeeze(width)
        else:
            self.mix = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.first(x)) + self.mix(x)


class Sequence(nn.Sequential):
    def __init__(self, width: int, *, use_se: bool, act: nn.Module) -> None:
        other = Squeeze(width) if use_se else nn.LayerNorm(width)
        super().__init__(nn.Linear(width, width), other, act, nn.Linear(width, width))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList([Mixed(6, use_se=True), Mixed(6, use_se=False)])
        self.layers = nn.ModuleList(
            [
                Sequence(6, use_se=True, act=Swish()),
                Sequence(6, use_se=False, act=nn.ReLU()),
                Sequence(6, use_se=True, act=nn.ReLU()),
            ]
        )

    def forward(self, x: Any) -> Any:
        for layer in self.mixers:
            x = layer(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_attributes_and_items_of_sequences_of_the_source_are_below_flags(target: str) -> None:
    torch.manual_seed(0)
    source, proof, _ = translate_proved(Lists(), target, (torch.randn(3, 6),))
    assert proof
    code = re.sub(r"\s+", " ", source.code)
    assert re.search(r"self.mix = \(? ?Squeeze\(\w+=\w+(\(\))?\) if use_se else \w", code)
    assert re.search(r"Squeeze\(\w+=\w+(\(\))?\) if use_se else (nnx.)?LayerNorm\(6", code)
    assert "Mixed_2" not in code
    assert "Sequence_2" not in code
    if target == "equinox":
        assert "mix: Squeeze | Linear" in code


@pytest.mark.nightly
def test_two_lists_that_one_line_goes_through_are_two_loops() -> None:
    source, _, _ = translate_proved(Lists(), "flax", (torch.randn(3, 6),))
    code = source.code[source.code.index("class Lists") :]
    assert "in self.mixers:" in code
    assert "in self.layers:" in code
    assert "self.layers[0]" not in code


@pytest.mark.parametrize("line", ["x_2 = jax.vmap(lambda x: x + 1)(x)", "x_2 = f(x)"])
def test_variables_of_lambdas_are_not_renamed(line: str) -> None:
    having = ["residual = self.down(x)", line.replace("x_2", "x", 1), "return x + residual"]
    found = bypasses.find("down", having, [line, "return x_2 + x"])
    assert (found is None) == ("lambda" in line)
