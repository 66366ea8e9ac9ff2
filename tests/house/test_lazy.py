"""Importing fmapper imports no framework, and the check that says so can fail."""

import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORKS = ("numpy", "torch", "jax", "jaxlib", "flax")

DECLARE_AND_WALK = """
import fmapper

@fmapper.functor
class Affine:
    def __init__(self, w, b):
        self.w, self.b = w, b

assert fmapper.fmap(lambda x: 2 * x, Affine(2, [3])).b == [6]
"""


def frameworks_loaded_by(code: str, cwd: Path) -> set[str]:
    """The frameworks that a fresh interpreter in `cwd` has imported once `code` has run."""
    report = f"import sys; print('loaded:', *(set(sys.modules) & set({FRAMEWORKS!r})))"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{report}"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    marker, *loaded = run.stdout.splitlines()[-1].split()
    assert marker == "loaded:"
    return set(loaded)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import fmapper", id="core"),
        pytest.param("import fmapper_adapters", id="adapters"),
        pytest.param(DECLARE_AND_WALK, id="walk"),
        pytest.param("import fmapper.nn.functional, fmapper.random", id="functional"),
    ],
)
def test_no_framework_is_imported(code: str, tmp_path: Path) -> None:
    assert frameworks_loaded_by(code, tmp_path) == set()


def test_nothing_large_of_the_standard_library_is_imported() -> None:
    """Each of these costs a tenth of the import of fmapper and more."""
    large = ("tempfile", "importlib.abc", "importlib.metadata", "json", "asyncio", "rich", "click")
    code = f"import sys, fmapper; print([name for name in {large} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("statement", ["import {}", "from {} import __name__ as name"])
def test_the_check_can_fail(framework: str, statement: str, tmp_path: Path) -> None:
    """An empty stand-in for the framework: the check must work where the real one is absent."""
    (tmp_path / f"{framework}.py").touch()
    (tmp_path / "eager.py").write_text(statement.format(framework))
    assert frameworks_loaded_by("import eager", tmp_path) == {framework}


def test_the_check_can_fail_on_the_real_numpy(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    (tmp_path / "eager.py").write_text("import numpy")
    assert "numpy" in frameworks_loaded_by("import fmapper, eager", tmp_path)


@pytest.mark.nightly  # it imports all frameworks
def test_a_conversion_loads_nothing_that_writes_files() -> None:
    for framework in ("torch", "jax", "flax"):
        pytest.importorskip(framework)
    code = (
        "import sys, torch, jax.numpy as jnp; from flax import nnx; from fmapper import convert; "
        "convert(torch.nn.Linear(2, 3), 'flax', (torch.ones(1, 2),)); "
        "convert(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), 'torch', (jnp.ones((1, 2)),)); "
        "print([name for name in sys.modules if 'translation' in name])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
