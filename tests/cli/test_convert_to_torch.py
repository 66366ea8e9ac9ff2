"""`python -m fmapper convert FILE:MODEL --to torch`: models of JAX on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper.cli.main import main
from fmapper.programs.lowering import added

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("rich")
pytest.importorskip("flax")

FILE = """
import jax, jax.numpy as jnp
from flax import linen, nnx

class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.noise = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.noise(jnp.tanh(self.norm(x))))

dense = linen.Dense(3)
pair = dense, dense.init(jax.random.key(0), jnp.ones((1, 4)))
weights = {"w": jnp.ones((4, 3)) / 4}

def layer(weights, x):
    return jnp.tanh(x @ weights["w"])

function = layer, weights

def closed(x):
    return layer(weights, x)

def branching(x):
    return x if x.sum() > 0 else -x

KEYED = {"key": jax.random.key(0), "shape": (3,)}

def noise(key, shape):
    return jax.random.normal(key, shape)
"""
QUICK = ("--seconds", "0")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("cli") / "net_for_torch.py"
    path.write_text(FILE)
    before = [*sys.path]
    yield path
    sys.path[:] = before
    sys.modules.pop(path.stem, None)


def convert(file: Path, name: str, *options: str) -> int:
    return main(["convert", f"{file}:{name}", "--to", "torch", *options])


@pytest.mark.nightly
def test_report_and_files(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "net.safetensors", tmp_path / "report.json"
    files = ("--out", str(out), "--json", str(report))
    assert convert(file, "Net", "--example", "randn(5, 4)", "--seconds", "0.01", *files) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "Net to torch parameters",
        "23 numbers in 4 arrays, 92 B",
        "1 output agrees",
        "against float64",
        "x as fast",
        f"saved as {out}",
    ):
        assert words in text, words
    assert "with compilation" not in text
    made = json.loads(report.read_text())
    assert made["ok"] is True
    assert made["ops"]["lax::dot_general"] == 1
    assert max(made["verification"]["exact"]) < 1e-6
    loaded = fmapper.convert(fmapper.load_program(out), "torch").eval()
    assert loaded(torch.ones(5, 4)).shape == (5, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Net", "pair", "function", "closed"])
def test_models(name: str, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    options = ("--example", "randn(5, 4)", "--dynamic", "auto", "--seconds", "0.001")
    assert convert(file, name, *options, "--out", str(out)) == 0
    loaded = fmapper.convert(fmapper.load_program(out), "torch").eval()
    assert loaded(torch.ones(7, 4)).shape == (7, 3)


@pytest.mark.nightly
def test_keys(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(file, "noise", "--kwargs", f"{file}:KEYED", "--seconds", "0.001") == 0
    assert "1 output agrees" in capsys.readouterr().out


def test_what_differs_is_not_saved(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(added, "torch", {})
    fmapper.lowering("lax::tanh", to="torch")(lambda x, accuracy=None: torch.sin(x))
    out = tmp_path / "net.safetensors"
    assert convert(file, "function", "--example", "randn(5, 4)", *QUICK, "--out", str(out)) == 1
    shown = capsys.readouterr()
    assert "first difference: lax::tanh" in " ".join(shown.out.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("branching", ["--example", "ones(1)"], "branch on a value"),
        ("function", ["--example", "ones(5, 3)"], "layer cannot be recorded"),
        ("weights", ["--example", "ones(1)"], "not a model that can be recorded"),
    ],
)
def test_errors_are_words_and_a_status(
    file: Path, name: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(file, name, *options, *QUICK) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("fmapper convert: ")
    assert words in shown.err
    assert "Traceback" not in shown.err
