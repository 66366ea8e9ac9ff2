"""`source` and `fmapper translate`: in the words of the source, or by operations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fmapper
from fmapper import ConversionError
from fmapper.cli.main import main
from fmapper.translation.source import transcribe_proved

torch = pytest.importorskip("torch")
pytest.importorskip("flax")

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=4, depth=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

model = Net(depth=3)
"""
EXAMPLE = torch.ones(2, 4)


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "net_in_words.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    import net_in_words  # type: ignore[import-not-found]

    return net_in_words.model


def transcribing(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> list[Any]:
    """Has a transcription give a proof, or raise an error; returns what is asked for."""
    asked: list[Any] = []

    def transcribe(model: Any, inputs: Any, arguments: Any, options: Any, **settings: Any) -> Any:
        assert arguments is None
        assert options == {}
        asked.append((model, inputs, settings))
        if isinstance(outcome, Exception):
            raise outcome
        weights = dict(model.named_parameters())
        prove = SimpleNamespace(weights=weights, whole="whole", name="Net", fallen={})
        prove.only_evaluation = "its training" if outcome == "evaluation" else ""
        prove.prove = lambda *_, only_evaluation: outcome and [outcome, only_evaluation]
        return prove

    monkeypatch.setattr("fmapper_translate.transcribe", transcribe)
    return asked


@pytest.mark.parametrize("train", [False, True])
def test_source_is_the_transcription(
    net: Any, monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    asked = transcribing(monkeypatch, train)  # what is not asked to train is not proved
    assert fmapper.source(net, "nnx", EXAMPLE.numpy(), train=train) == "whole"
    ((model, inputs, settings),) = asked
    assert model is net
    assert torch.equal(inputs[0], EXAMPLE)
    assert settings == {"target": "flax", "dynamic_shapes": "auto", "scan": False}


@pytest.mark.parametrize(
    "outcome",
    [False, "evaluation", ConversionError("no counterpart"), TypeError("of the model's code")],
)
def test_source_is_by_operations_where_there_is_no_proof(
    net: Any, monkeypatch: pytest.MonkeyPatch, outcome: Any
) -> None:
    asked = transcribing(monkeypatch, outcome)
    assert "nnx.Linear(4, 4" in fmapper.source(net, "flax", (EXAMPLE,), train=True)
    assert len(asked) == 1


def test_sizes_are_those_at_which_a_transcription_is_compared(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = transcribing(monkeypatch, True)
    for shapes in (None, ["batch, _"]):
        assert fmapper.source(net, "flax", (EXAMPLE,), dynamic_shapes=shapes) == "whole"
        assert asked.pop()[2]["dynamic_shapes"] is shapes


@pytest.mark.parametrize("outcome", [True, "evaluation"])
def test_a_file_for_evaluation_is_proved_there(
    net: Any, monkeypatch: pytest.MonkeyPatch, outcome: Any
) -> None:
    transcribing(monkeypatch, outcome)
    given = (net, "flax", (EXAMPLE,), None)
    assert transcribe_proved(*given, train=False)[1] == [outcome, True]
    assert transcribe_proved(*given, train=None)[1] == [outcome, False]


def test_scans_are_transcribed_or_refused(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = transcribing(monkeypatch, True)
    assert fmapper.source(net, "flax", (EXAMPLE,), scan=True) == "whole"
    assert asked[0][2]["scan"] is True
    transcribing(monkeypatch, ConversionError("no counterpart"))
    with pytest.raises(ConversionError, match="no counterpart"):
        fmapper.source(net, "flax", (EXAMPLE,), scan=True)
    with pytest.raises(ConversionError, match="no counterpart"):
        fmapper.convert(net, "flax", (EXAMPLE,), structure=True, scan=True)


@pytest.mark.nightly
def test_the_command_writes_the_words_of_the_source_with_a_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(NET)
    out = tmp_path / "net_flax.py"
    words = ["translate", f"{tmp_path / 'net.py'}:model", "--to", "flax", "--out", str(out)]
    assert main([*words, "--example", "randn(2, 4)", "--tests"]) == 0
    text = out.read_text()
    assert "def __init__(self, width=4, depth=2, *, rngs" in text
    assert "return Net(width=4, depth=3, rngs=rngs)" in text
    assert "train steps" in capsys.readouterr().out
    assert pytest.main(["-q", "-p", "no:cacheprovider", str(tmp_path / "test_net_flax.py")]) == 0
    assert main([*words, "--example", "randn(2, 4)", "--eval"]) == 0
    assert "make_model" in out.read_text()
    assert "eval outputs" in (said := capsys.readouterr().out)
    assert "train steps" not in said


LINEN = """
import flax.linen as nn
import jax
import jax.numpy as jnp


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


model = Net(), Net().init(jax.random.key(0), jnp.ones((2, 4)))
"""


@pytest.mark.nightly
def test_the_test_of_a_file_tells_the_mode_as_calls_of_its_source_do(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    (tmp_path / "linen_net.py").write_text(LINEN)
    out = tmp_path / "linen_net_torch.py"
    words = ["translate", f"{tmp_path / 'linen_net.py'}:model", "--to", "torch", "--out", str(out)]
    assert main([*words, "--example", "randn(2, 4)", "--tests"]) == 0
    assert "def forward(self, x, train: bool = False)" in out.read_text()
    test = str(tmp_path / "test_linen_net_torch.py")
    assert pytest.main(["-q", "-p", "no:cacheprovider", test]) == 0
