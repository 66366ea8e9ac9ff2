"""Every file in examples/ runs to its end, as a user would run it, and leaves nothing behind."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.nightly
@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    missing = [name for name in imported(example) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"could not import {', '.join(missing)}")
    run = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(tmp_path.iterdir()) == []
    assert "Warning" not in run.stderr


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_says_what_it_does(example: Path) -> None:
    """`--help` shows its docstring, as it is written."""
    calls = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(example.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "argparse.ArgumentParser"
    ]
    shown = "description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter"
    assert calls == [f"argparse.ArgumentParser({shown})"]


def imported(path: Path) -> Iterator[str]:
    """The packages that a file imports."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
