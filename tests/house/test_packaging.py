"""What is in the wheel and in the source distribution, and what must never be."""

import email
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(target: str, into: Path) -> Path:
    """Build a "wheel" or "sdist" of the checkout with the hatchling of this environment."""
    run = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def sources(folder: Path) -> set[str]:
    """The Python files below `folder`, named from the folder above it."""
    return {path.relative_to(folder.parent).as_posix() for path in folder.rglob("*.py")}


def test_adapters_is_no_package() -> None:
    """The name `adapters` belongs to another project on the package index."""
    assert (ROOT / "adapters").is_dir()
    assert not (ROOT / "adapters" / "__init__.py").exists()


def test_wheel_has_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "fmapper",
        "fmapper_adapters",
    }


def test_wheel_has_every_source_file(wheel: zipfile.ZipFile) -> None:
    expected = sources(ROOT / "fmapper") | sources(ROOT / "adapters" / "fmapper_adapters")
    assert "fmapper/__init__.py" in expected
    assert expected == {name for name in wheel.namelist() if name.endswith(".py")}


def test_wheel_is_typed_and_licensed(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {"fmapper/py.typed", "fmapper_adapters/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_core_depends_on_no_framework(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    core = [requirement for requirement in requirements if "extra ==" not in requirement]
    assert sorted(core) == ["array-api-compat>=1.12", "click>=8.1.8", "rich>=14.0"]


def test_extras(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == {
        *("numpy", "torch", "jax", "flax", "optree", "plot", "all")
    }


def test_sdist_can_be_tested_and_carries_no_leftovers(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "conftest.py", "tests/house/test_packaging.py"} <= names
    hidden = {name for name in names if any(part.startswith(".") for part in name.split("/"))}
    assert hidden <= {".gitignore"}  # hatchling's own addition
    assert not {name for name in names if "__pycache__" in name}
