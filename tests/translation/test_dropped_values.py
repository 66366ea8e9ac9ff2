"""Arguments of parts whose values `torch.export` drops, as those of dropout in evaluation."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Any, memory: Any, scale: Any) -> Any:
        return self.key(memory) * scale + self.query(hidden).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.cross = nn.LayerNorm(4), nn.Dropout(0.5), Cross()

    def forward(self, x: Any) -> Any:
        scale = (x * 2).expand(x.shape)
        memory = nn.functional.dropout(x.sin(), 0.1, self.training)
        hidden = self.drop(self.norm(x))
        return self.cross(hidden, memory, scale)


@pytest.mark.nightly
def test_arguments_have_the_names_of_what_they_were_dropped_for() -> None:
    code = translate(Net().eval(), "flax", (torch.randn(3, 4),))[0].code
    body = code.partition("class Cross(")[2].partition("\n\n\n")[0]
    for used in ("self.key(memory)", "self.query(hidden)", "* scale"):
        assert used in body, body


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.skip = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        hidden = torch.tanh(self.gate(x))
        return x + hidden, self.skip(hidden)


class Steps(nn.Module):
    """Uses one result of its last step alone, which `torch.export` then drops."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.unused = nn.ModuleList(Step() for _ in range(3)), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        total = 0
        for step in self.steps:
            x, skip = step(x)
            total = total + skip
        self.unused(x)
        return total


@pytest.mark.nightly
@pytest.mark.parametrize("train", [False, True])
def test_parts_give_results_that_nobody_uses(train: bool) -> None:
    net, x = Steps(), torch.randn(3, 4)
    model = fmapper.convert(net, "flax", (x,), structure=True, train=train)
    found = model.steps[2](x.numpy())
    for one, other in zip(found, net.steps[2](x), strict=True):
        torch.testing.assert_close(torch.tensor(one.tolist()), other, rtol=1e-5, atol=1e-6)


class Losses(nn.Module):
    def forward(self, x: Any, target: Any) -> Any:
        loss = nn.functional.cross_entropy(x, target)
        return loss, x.softmax(-1)


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.losses = nn.Linear(4, 3), Losses()

    def forward(self, x: Any, target: Any) -> Any:
        return self.losses(self.linear(x), target)[1]


@pytest.mark.nightly
def test_a_lost_result_is_the_first_of_those_that_an_operation_gives() -> None:
    net, given = Trainer(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    model = fmapper.convert(net, "flax", given, structure=True)
    logits = net.linear(given[0]).detach()
    found = model.losses(logits.numpy(), given[1].numpy())
    for one, other in zip(found, net.losses(logits, given[1]), strict=True):
        torch.testing.assert_close(torch.tensor(one.tolist()), other, rtol=1e-5, atol=1e-6)
