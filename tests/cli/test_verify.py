"""`fmapper verify A B`: what it takes, its files, and its exit status."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper.checkpoints import Rename, Rules, Transpose
from fmapper.cli.main import main

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("rich")

FILE = """
import numpy as np, torch, jax.numpy as jnp

class Net(torch.nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.LayerNorm(8, eps)
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x, scale=None):
        y = self.last(self.norm(self.first(x)))
        return y if scale is None else y * scale

def other():
    return Net(1e-2)

def twin():
    params = {n: jnp.asarray(p.detach().numpy().T) for n, p in Net().named_parameters()}
    def net(p, x):
        y = x @ p["first.weight"] + p["first.bias"]
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
        y = y * p["norm.weight"] + p["norm.bias"]
        return y @ p["last.weight"] + p["last.bias"]
    return net, params

def nothing(x):
    return x[:0]
"""
KEYS = {
    "schema", "status", "a", "b", "error", "first", "outputs", "loss", "weights", "gradients",
    "steps", "buffers", "draws", "layers", "divergence", "exact", "modes", "undecided",
}  # fmt: skip
X = ("--inputs", "randn(5, 4)")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("cli") / "nets_for_verify.py"
    path.write_text(FILE)
    before = [*sys.path]
    yield path
    sys.path[:] = before
    sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "net.toml"
    path.write_text(
        Rules([Transpose("{name:first|last}.weight"), Rename("{x...}", "1.{x...}")]).to_toml()
    )
    return path


def verify(file: Path, a: str, b: str, *options: str) -> int:
    return main(["verify", f"{file}:{a}", f"{file}:{b}", *options])


def test_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(file, "Net", "Net", *X, "--gradients") == 0
    assert "1 of 1 outputs agree" in capsys.readouterr().out


def test_different_as_report_json_and_page(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "report.json", tmp_path / "report.html"
    assert verify(file, "Net", "other", *X, "--json", str(out), "--html", str(page)) == 1
    assert "in norm" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert (found["schema"], found["status"], found["error"]) == (1, 1, None)
    assert found["outputs"][0]["ok"] is False
    assert found.keys() == KEYS
    assert found["first"]["stage"] == "forward"
    assert found["first"]["a"]["module"] == "norm"
    text = page.read_text()
    assert "different" in text
    assert "<svg" in text
    assert not {"<script", "<link", "src="} & {*text.replace("=", "= ").split()}


def test_another_framework_by_rules(file: Path, rules: Path) -> None:
    assert (
        verify(file, "Net", "twin", *X, "--rules", str(rules), "--gradients", "--steps", "2") == 0
    )


def test_json_on_stdout_is_all_there_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(file, "Net", "Net", *X, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["status"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--inputs", "randn(5, 3)"), "shape"),
        (("--inputs", "zeros(5, 4)", "--rules", "none.toml"), "none.toml"),
        (("--inputs", "nothing(5)"), "nothing"),
    ],
)
def test_what_cannot_be_compared_has_a_status_of_its_own(
    file: Path, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(file, "Net", "Net", *options, "--json", "-") == 2
    out, err = capsys.readouterr()
    assert words in err
    found = json.loads(out)
    assert found["status"] == 2
    assert words in found["error"]


def test_empty_outputs_are_not_compared(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(file, "nothing", "nothing", *X) == 2
    assert "nothing was compared" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_inputs_from_a_file(file: Path, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"inputs.{ending}"
    arrays = {"arr_0" if ending == "npz" else "0": np.ones((5, 4), np.float32)}
    fmapper.save({**arrays, "scale": np.ones(3, np.float32)}, path)
    assert verify(file, "Net", "Net", "--inputs", str(path)) == 0
    assert verify(file, "Net", "other", "--inputs", str(path)) == 1


def test_a_module_by_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["verify", f"{file.stem}:Net", f"{file.stem}:other", *X]) == 1
    assert os.getcwd() in sys.path


def test_a_file_of_a_converted_model(file: Path, tmp_path: Path) -> None:
    from fmapper.cli.target import load_model

    path = tmp_path / "net.safetensors"
    x = np.ones((5, 4), np.float32)
    fmapper.convert(load_model(f"{file}:Net"), "jax", (x,)).save(path)
    assert main(["verify", f"{file}:Net", str(path), "--inputs", "ones(5, 4)"]) == 0
