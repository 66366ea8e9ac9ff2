"""What type checkers see: a program that calls every public function is right, wrong calls are not.

`nox -s types` runs this with mypy and pyright; where a checker is not installed it is left out.
"""

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fmapper

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("typed_user_program.py")
WRONG = """
import fmapper
import numpy as np
import torch

module, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
fmapper.convert(module, "pytorch", (x,))  # wrong
fmapper.convert(module, "jax", (x,), precison=None)  # wrong
fmapper.convert(module, "jax", (x,), fused=False)  # wrong
fmapper.convert(module, "linen", (x,), rngs=None)  # wrong
fmapper.convert(module, "jax", (x,), dynamic_shapes="auto")
fmapper.to_jax(module, devise="cpu")  # wrong
fmapper.to_cpu(module, device="cpu")  # wrong
fmapper.to_torch(np.ones(2)).shapes  # wrong
fmapper.fmap(abs, module, isleaf=None)  # wrong
fmapper.cast(module, "float16", strikt=True)  # wrong
fmapper.verify(module, module, x, example_kwarg={})  # wrong
fmapper.convert(module, "flax", (x,)).call_the_module  # wrong
"""
WRONG_LINES = [n for n, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")]


@pytest.fixture(autouse=True)
def _frameworks():
    for framework in ("torch", "jax", "flax"):
        pytest.importorskip(framework)


def errors_of(checker, path):
    """The lines of a program of which a checker says something, each with what it says."""
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(path)]
        done = subprocess.run(
            [*command, "--config-file", str(ROOT / "pyproject.toml")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert not done.stderr
        found = re.findall(rf"{re.escape(path.name)}:(\d+): error: (.*)", done.stdout)
        assert done.returncode == bool(found), done.stdout
        return [(int(line), text) for line, text in found]
    settings = {"include": [path.name], "extraPaths": [str(ROOT), str(ROOT / "adapters")]}
    (path.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "-p", str(path.parent)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["summary"]["filesAnalyzed"]
    return [
        (one["range"]["start"]["line"] + 1, one["message"]) for one in report["generalDiagnostics"]
    ]


def test_the_program_calls_every_public_function():
    used = {
        node.attr
        for node in ast.walk(ast.parse(PROGRAM.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "fmapper"
    }
    names = {name for name in fmapper.__all__ if not name.endswith(("Error", "Warning"))}
    assert names - used - {"KeyPath"} == set()


@pytest.mark.thorough
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_finds_nothing_in_it(checker, tmp_path):
    path = tmp_path / PROGRAM.name
    path.write_text(PROGRAM.read_text())
    assert errors_of(checker, path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_finds_a_wrong_target_or_option(checker, tmp_path):
    path = tmp_path / "wrong_program.py"
    path.write_text(WRONG)
    found = errors_of(checker, path)
    lines = {line for line, text in found if "not accessed" not in text}
    assert sorted(lines) == WRONG_LINES, found
