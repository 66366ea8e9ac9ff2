"""`python -m fmapper convert FILE:MODEL`: the report, the files, the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper.cli.convert import example_args, example_kwargs
from fmapper.cli.main import main
from fmapper.programs.lowering import added

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("rich")

FILE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.first = torch.nn.Linear(4, 8)
        self.noise = torch.nn.Dropout()
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x, scale=None):
        y = self.last(self.noise(self.first(self.norm(x)).relu()))
        return y if scale is None else y * scale

class Ours(torch.nn.Module):
    def forward(self, x):
        return torch.ops.fmapper_test_cli.unknown(x)

@torch.library.custom_op("fmapper_test_cli::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@unknown.register_fake
def _(x):
    return torch.empty_like(x)

def double(x):
    return 2 * x

X = torch.ones(3, 4)

def inputs():
    return (torch.ones(3, 4), torch.ones(3))

NAMED = {"x": torch.ones(2, 4)}
"""
QUICK = ("--seconds", "0")
PARAMETERS = 4 + 4 + 4 * 8 + 8 + 8 * 3 + 3


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One file for all: its custom operation can be declared only once."""
    path = tmp_path_factory.mktemp("cli") / "net_for_convert.py"
    path.write_text(FILE)
    before = [*sys.path]
    yield path
    sys.path[:] = before
    sys.modules.pop(path.stem, None)


def convert(file: Path, name: str, *options: str) -> int:
    return main(["convert", f"{file}:{name}", "--to", "jax", *options])


def test_report_and_files(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "net.safetensors", tmp_path / "report.json"
    files = ("--out", str(out), "--json", str(report))
    assert convert(file, "Net", "--example", "randn(5, 4)", "--seconds", "0.01", *files) == 0
    text = capsys.readouterr().out
    assert text.startswith("Net to jax\n")
    for words in (
        f"{PARAMETERS} numbers in 6 arrays, {4 * PARAMETERS} B",
        "9 numbers in 3 arrays, 40 B",  # two statistics of four, and a count of 64 bits
        "linear 2",
        "1 output agrees",
        "against float64",
        "with compilation",
        "x as fast",
        f"saved as {out}",
    ):
        assert words in " ".join(text.split()), words
    made = json.loads(report.read_text())
    assert made["ok"] is True
    assert made["parameters"] == {"arrays": 6, "numbers": PARAMETERS, "nbytes": 4 * PARAMETERS}
    assert made["ops"]["aten::linear.default"] == 2
    assert made["verification"]["outputs"][0]["error"] < 1e-6
    assert max(made["verification"]["exact"]) < 1e-6
    assert made["per_call"]["n"] >= 1
    assert min(made["export_seconds"], made["lowering_seconds"], made["first_call_seconds"]) > 0
    loaded = fmapper.convert(fmapper.load_program(out), "jax")
    assert loaded(np.ones((5, 4), np.float32)).shape == (5, 3)


def test_a_varying_batch(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    assert (
        convert(
            file,
            "Net",
            "--example",
            "randn(5, 4)",
            "--dynamic",
            "auto",
            "--no-check",
            *QUICK,
            "--out",
            str(out),
        )
        == 0
    )
    loaded = fmapper.convert(fmapper.load_program(out), "jax")
    assert loaded(np.ones((7, 4), np.float32)).shape == (7, 3)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (["--example", "randn(5, 4), 2.0"], (5, 3)),
        (["--example", "randn(5, 4)", "--example", "randn(3)"], (5, 3)),
        (["--example", "{file}:X"], (3, 3)),
        (["--example", "{file}:inputs"], (3, 3)),
        (["--kwargs", "{{'x': randn(2, 4)}}"], (2, 3)),
        (["--kwargs", "{file}:NAMED"], (2, 3)),
        (["--example", "randn(5, 4)", "--kwargs", "{{'scale': randn(3)}}"], (5, 3)),
    ],
)
def test_inputs(file: Path, tmp_path: Path, options: list[str], shape: tuple[int, ...]) -> None:
    out = tmp_path / "net.safetensors"
    given = [option.format(file=file) for option in options]
    assert convert(file, "Net", *given, *QUICK, "--no-check", "--out", str(out)) == 0
    program = fmapper.load_program(out)
    assert program.graph.calls[-1].result[0][1] == shape


def test_a_model_of_linen_is_read_from_the_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", f"{file}:Net", "--to", "linen", "--example", "randn(3, 4)"]) == 1
    assert "fmapper.load(path, to='linen')" in capsys.readouterr().err


def test_inputs_of_several_options_are_other_numbers() -> None:
    one, two = example_args(["randn(2, 3)", "randn(2, 3)"])
    three = example_kwargs("{'x': randn(2, 3)}")["x"]
    assert len({float(x[0, 0]) for x in (one, two, three)}) == 3


@pytest.mark.nightly
def test_training_is_recorded_and_not_run(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "net.safetensors"
    assert convert(file, "Net", "--example", "randn(5, 4)", "--train", "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert text.startswith("Net to jax, in training\n")
    assert "per call" not in text
    trained = fmapper.convert(fmapper.load_program(out), "jax")
    x = np.ones((5, 4), np.float32)
    _, new = trained(x, key=jax.random.key(0), mutable=True)
    assert int(new.buffers["norm.num_batches_tracked"]) == 1


@pytest.mark.nightly
def test_what_differs_is_not_saved(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(added, None, {})
    fmapper.lowering("aten::relu")(lambda x: x)
    out, report = tmp_path / "net.safetensors", tmp_path / "report.json"
    files = ("--out", str(out), "--json", str(report))
    assert convert(file, "Net", "--example", "randn(5, 4)", *QUICK, *files) == 1
    shown = capsys.readouterr()
    assert "the outputs differ" in shown.out
    assert "first difference: aten::relu" in " ".join(shown.out.split()).replace("in : ", "")
    assert "was not saved" in shown.err
    assert json.loads(report.read_text())["ok"] is False
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Ours", ["--example", "ones(1)"], "fmapper_test_cli::unknown"),
        ("Net", ["--example", "ones(5, 3)"], "Net"),
        ("double", ["--example", "ones(1)"], "function cannot be converted to jax"),
        ("X", ["--example", "ones(1)"], "not a model that can be recorded"),
        ("Nothing", [], "there is no Nothing in"),
        ("Net", ["--example", "one(1)"], "'one' is not known"),
        ("Net", ["--kwargs", "randn(1)"], "expected a dict by name"),
        ("Net", ["--kwargs", "{{1: 2}}"], "expected a dict by name"),
        ("Net", ["--to", "abacus"], "abacus"),
        ("Net", ["--to", "torch", "--example", "randn(2, 4)"], "already a model of it"),
        ("Net", ["--out", "/no/such/x.safetensors"], "does not exist"),
    ],
)
def test_errors_are_words_and_a_status(
    file: Path,
    name: str,
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert convert(file, name, *(option.format() for option in options), *QUICK) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("fmapper convert: ")
    assert words in shown.err
    assert "Traceback" not in shown.err
    assert "saved as" not in shown.out


@pytest.mark.nightly
def test_end_to_end(tmp_path: Path) -> None:
    """As a user runs it, piped, without Unicode."""
    (tmp_path / "net.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-W", "error", "-m", "fmapper", "convert", "net.py:model"]
    options = ["--to", "jax", "--example", "randn(3, 4)", "--out", "net.safetensors"]
    done = subprocess.run(
        [*command, *options, "--seconds", "0.02"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "1 output agrees" in done.stdout
    assert (tmp_path / "net.safetensors").stat().st_size > 40
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
