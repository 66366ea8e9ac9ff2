"""`python -m fmapper profile FILE:MODEL`: targets, input expressions, files, exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper.cli.main import main
from fmapper.cli.target import load_model, load_target
from fmapper.profiles.example_inputs import at_batch_size, read_inputs

np = pytest.importorskip("numpy")

FILE = """
from dataclasses import dataclass

import numpy as np
import fmapper
import beside_{n}

@fmapper.functor
@dataclass
class Scale:
    w: object = 2.0
    def __call__(self, x):
        return x * self.w

class Needy:
    def __init__(self, width): ...

class Broken:
    def __init__(self):
        raise RuntimeError("no weights")

def make():
    return Scale(3.0)

def double(x):
    return 2 * x

model = Scale(beside_{n}.FACTOR)
X = np.ones((2, 3), np.float32)

def inputs(n):
    return np.ones((n, 5), np.float32)
"""
_made = 0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that imports another one beside it; each test has its own, under its own name."""
    global _made  # noqa: PLW0603
    _made += 1
    (tmp_path / f"beside_{_made}.py").write_text("FACTOR = 7.0")
    path = tmp_path / f"model_{_made}.py"
    path.write_text(FILE.format(n=_made))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield path
    for name in {*sys.modules} - before:
        if name.startswith(("beside_", "model_", "_fmapper_target_")):
            del sys.modules[name]


# --- FILE:NAME -----------------------------------------------------------------------------------


def test_instances_classes_and_factories(file: Path) -> None:
    assert load_model(f"{file}:model").w == 7.0
    assert load_model(f"{file}:Scale").w == 2.0
    assert load_model(f"{file}:make").w == 3.0
    assert load_model(f"{file}:double")(4) == 8, "a function that needs arguments is the model"
    assert load_target(f"{file}:model.w") == 7.0
    assert load_target(f"{file}:Scale") is load_target(f"{file}:Scale"), "a file is run once"


def test_a_relative_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert load_model(f"{file.name}:model").w == 7.0


def test_a_file_does_not_take_the_place_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("NAME = __name__")
    try:
        assert load_target(f"{tmp_path}/json.py:NAME") == "_fmapper_target_json"
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["_fmapper_target_json"]
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{file}", "is not FILE:NAME"),
        ("{file}:", "is not FILE:NAME"),
        ("{file}:1x", "is not FILE:NAME"),
        ("{folder}/none.py:model", "there is no file .*none.py"),
        ("{folder}:model", "there is no file"),
        ("{folder}/text.txt:model", r"does not end in \.py"),
        ("{folder}/raises.py:model", r"raises.py does not run: ZeroDivisionError.* \(line 2\)"),
        ("{folder}/exits.py:model", r"exits.py does not run: SystemExit: 3"),
        ("{folder}/syntax.py:model", r"syntax.py does not run: SyntaxError"),
        ("{file}:nothing", "there is no nothing in .*There is .*make, model"),
        ("{file}:model.nothing", "there is no nothing in Scale"),
        ("{file}:Needy", "is a class that needs width"),
        ("{file}:Broken", "creating the model failed: RuntimeError: no weights"),
    ],
)
def test_what_cannot_be_loaded(file: Path, target: str, words: str) -> None:
    folder = file.parent
    (folder / "text.txt").touch()
    (folder / "raises.py").write_text("x = 1\ny = 1 / 0\n")
    (folder / "exits.py").write_text("raise SystemExit(3)")
    (folder / "syntax.py").write_text("x = (")
    with pytest.raises(fmapper.TargetError, match=words):
        load_model(target.format(file=file, folder=folder))
    assert "raises" not in sys.modules


# --- expressions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes", "dtypes"),
    [
        ("randn(1, 3, 4)", [(1, 3, 4)], ["float32"]),
        ("randn((1, 3))", [(1, 3)], ["float32"]),
        ("rand(2)", [(2,)], ["float32"]),
        ("zeros(1,2), ones(3)", [(1, 2), (3,)], ["float32", "float32"]),
        ("zeros(1,2):float16", [(1, 2)], ["float16"]),
        ("(zeros(1) : int32, ones(2, dtype='bool'))", [(1,), (2,)], ["int32", "bool"]),
        ("zeros(4, dtype=float64)", [(4,)], ["float64"]),
        ("arange(5)", [(5,)], ["int64"]),
        ("randint(3, 9, (2, 8))", [(2, 8)], ["int64"]),
        ("randint(3, 9, 2, 8):int32", [(2, 8)], ["int32"]),
        ("zeros()", [()], ["float32"]),
    ],
)
def test_expressions(text: str, shapes: list[tuple[int, ...]], dtypes: list[str]) -> None:
    made = read_inputs(text)
    assert [array.shape for array in made] == shapes
    assert [array.dtype.name for array in made] == dtypes


def test_what_is_in_them() -> None:
    (numbers,) = read_inputs("randint(3, 9, (100,))")
    assert set(numbers.tolist()) == {3, 4, 5, 6, 7, 8}
    assert (read_inputs("randn(5)")[0] == read_inputs("randn(5)")[0]).all()
    (normal,) = read_inputs("randn(10000)")
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    tree, scale, flag = read_inputs("{'a': ones(1), 'b': [zeros(2), 3]}, -2.5, True")
    assert (list(tree), tree["b"][1], scale, flag) == (["a", "b"], 3, -2.5, True)


def test_bfloat16() -> None:
    pytest.importorskip("ml_dtypes")
    assert read_inputs("ones(2):bfloat16")[0].dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "invalid syntax"),
        ("randn(1", "was never closed"),
        ("__import__('os').system('true')", r"\"__import__\('os'\).system\" is not known"),
        ("open('x')", "'open' is not known"),
        ("(lambda: 1)()", "is not known"),
        ("x", "'x' is not known"),
        ("zeros(n)", "'n' is not known"),
        ("zeros(2) + 1", "is not known"),
        ("[x for x in (1, 2)]", "is not known"),
        ("{**{}}", "is not known"),
        ("zeros(2, device='cpu')", r"takes only dtype= by name"),
        ("zeros(2, dtype=thing)", "'thing' is not a dtype"),
        ("zeros(-1)", r"zeros\(-1\): negative dimensions"),
        ("randint(3)", r"randint\(3\): .*missing"),
    ],
)
def test_no_expressions(text: str, words: str) -> None:
    with pytest.raises(fmapper.TargetError, match=words):
        read_inputs(text)


def test_batches_are_new_arrays() -> None:
    x = np.arange(6).reshape(3, 2)
    (same,) = at_batch_size((x,), 3)
    assert (same == x).all()
    assert not np.shares_memory(same, x)


# --- the command ---------------------------------------------------------------------------------

QUICK = ["--seconds", "0.01", "--devices", "numpy:cpu", "--no-predict", "--batch-sizes", "1, 4"]


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.parent / "out.json"
    command = ["profile", f"{file}:model", "--example", "randn(1, 3)", "--json", str(out)]
    assert main([*command, *QUICK]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Where the time of Scale goes")
    made = fmapper.Profile.from_json(out.read_text())
    assert made.batch_sizes == (1, 4)
    assert made.cell("numpy:cpu", 4).bytes_in == 48


@pytest.mark.parametrize(("name", "bytes_in"), [("X", 4 * 3 * 4), ("inputs", 4 * 5 * 4)])
def test_inputs_from_a_file(file: Path, name: str, bytes_in: int) -> None:
    out = file.parent / "out.json"
    command = ["profile", f"{file}:double", "--example", f"{file}:{name}", "--json", str(out)]
    assert main([*command, *QUICK]) == 0
    assert fmapper.Profile.from_json(out.read_text()).cell("numpy:cpu", 4).bytes_in == bytes_in


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{file}:nothing", "--example", "ones(1)"], "there is no nothing in"),
        (["{file}:model", "--example", "one(1)"], "'one' is not known"),
        (["{file}:model", "--example", "{file}:Y"], "there is no Y in"),
        (["{file}:model", "--example", "ones(1)", "--accelerator", "Z80"], "'Z80' is not in"),
        (["{file}:model", "--example", "ones(1)", "--devices", "what"], "is not a device"),
        (
            ["{file}:model", "--example", "ones(1)", "--json", "/no/such/x.json"],
            "does not exist",
        ),
        (["{file}:Needy", "--example", "ones(1)"], "is a class that needs width"),
    ],
)
def test_errors_are_words_and_a_status(
    file: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *(word.format(file=file) for word in arguments)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("fmapper profile: ")
    assert words in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("sizes", ["0", "x", "1,,x", ""])
def test_bad_batch_sizes(file: Path, sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"{file}:model", "--example", "ones(1)", "--batch-sizes", sizes]) == 2
    assert "--batch-sizes" in capsys.readouterr().err


@pytest.mark.nightly
def test_end_to_end(tmp_path: Path) -> None:
    """As a user runs it, piped, without Unicode, with a prediction and a picture."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(torch.nn.Linear(8, 8), torch.nn.ReLU())\n"
        "if __name__ == '__main__':\n"
        "    raise AssertionError\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-W", "error", "-m", "fmapper", "profile", "net.py:Net"]
    options = ["--example", "randn(1, 8)", "--batch-sizes", "1,16", "--devices", "torch:cpu"]
    files = ["--seconds", "0.02", "--json", "out.json", "--plot", "out.png"]
    done = subprocess.run(
        [*command, *options, *files],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress bar where stderr is not a terminal"
    assert "Where the time of Net goes" in done.stdout
    made = fmapper.Profile.from_json((tmp_path / "out.json").read_text())
    assert made.batch_sizes == (1, 16)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert all(len(line) <= 120 for line in done.stdout.splitlines())


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown: Any = capsys.readouterr().out
    assert "devices" in shown
    assert "profile" in shown
