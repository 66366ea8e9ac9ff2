"""What is in the wheel and in the source distribution, and what must never be."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import fmapper

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/fmapper/fmapper"


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


def test_wheel_has_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "fmapper",
        "fmapper_adapters",
        "fmapper_translate",
    }


def test_wheel_has_every_source_file(wheel: zipfile.ZipFile) -> None:
    folders = ("fmapper", "adapters/fmapper_adapters", "adapters/fmapper_translate")
    expected = set().union(*(sources(ROOT / folder) for folder in folders))
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
        *("numpy", "torch", "jax", "flax", "optree", "plot", "gguf", "translate", "urls", "all")
    }


def test_one_version_and_addresses(metadata: Message) -> None:
    assert metadata["Version"] == fmapper.__version__
    addresses = [line.split(", ")[1] for line in metadata.get_all("Project-URL", [])]
    assert len(addresses) == 5
    assert all(address.startswith(REPOSITORY) for address in addresses)


def test_links_of_the_readme_work_on_an_index(metadata: Message) -> None:
    links = re.findall(r"\]\(([^)]+)\)", str(metadata.get_payload()))
    assert f"{REPOSITORY}/blob/v{fmapper.__version__}/docs/howto/index.md" in links
    pictures = re.findall(r'src(?:set)?="([^"]+)"', str(metadata.get_payload()))
    assert pictures
    assert [link for link in links + pictures if not link.startswith("https://")] == []


def pages() -> dict[Path, str]:
    """What people read: documents, messages in the code, and settings."""
    named = ("*.md", "*.toml", "*.yml", "fmapper/**/*.py", "adapters/**/*.py", "docs/**/*.md")
    found = {path for pattern in named for path in ROOT.glob(pattern)}
    found |= {*ROOT.glob("examples/*.py"), *ROOT.glob(".github/**/*.yml")}
    return {path: path.read_text("utf-8") for path in found}


def test_no_install_from_an_index() -> None:
    """Fmapper is on no package index yet: pip would find nothing, or a stranger's package."""
    command = re.compile(r"pip install [^\n`]*?(?<![\w/.-])fmapper\b(?! & )[^\n`]*")
    told = {
        (path.relative_to(ROOT).as_posix(), line)
        for path, text in pages().items()
        if path.name != "RELEASING.md"
        for line in command.findall(text)
    }
    assert {page for page, _ in told} >= {"README.md", "docs/start/install.md"}
    assert [line for line in told if "@ git+https://" not in line[1]] == []


def test_one_address_of_the_repository() -> None:
    told = {
        match
        for text in pages().values()
        for match in re.findall(r"https?://[\w./-]*/fmapper(?=[\s\"/)#`])", text)
    }
    assert told == {REPOSITORY}


def test_tested_versions_are_said_alike() -> None:
    """In the README and where the documentation says how to install."""
    said = [(ROOT / page).read_text("utf-8") for page in ("README.md", "docs/start/install.md")]
    for version in ("2.13", "2.11", "2.15", "0.12.8", "0.12.6", "0.12.12"):
        assert all(version in text for text in said), version
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    assert "torch==2.13." in constraints
    assert "flax==0.12.8" in constraints


def test_constraints_hold_all_that_is_asked_for() -> None:
    """What a version is not said of may change between two runs of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    asked = [*project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    for group in project["dependency-groups"].values():
        asked += [entry for entry in group if isinstance(entry, str)]
    names = {re.split(r"[^\w.-]", entry)[0] for entry in asked} - {"fmapper"}
    held = re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text("utf-8"))
    assert sorted(names - set(held)) == []


@pytest.mark.nightly
def test_sdist_can_be_tested_and_carries_no_leftovers(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "conftest.py", "tests/house/test_packaging.py"} <= names
    hidden = {name for name in names if any(part.startswith(".") for part in name.split("/"))}
    assert hidden <= {".gitignore"}  # hatchling's own addition
    assert not {name for name in names if "__pycache__" in name}
