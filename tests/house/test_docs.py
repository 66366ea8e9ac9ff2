"""Every public name stands on exactly one page of the reference, and every page can be reached."""

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from sybil.region import Lexeme

DOCS = Path(__file__).resolve().parents[2] / "docs"
FACES = (
    "fmapper",
    "fmapper.backends",
    "fmapper.checkpoints",
    "fmapper.generation",
    "fmapper.meshes",
    "fmapper.programs",
    "fmapper.random",
    "fmapper.nn.functional",
)
MODELS = ("jax.JaxModel", "flax.FlaxModel", "flax.LinenModel", "torch.TorchModel")


def documented() -> Counter[str]:
    """How often the reference documents a name."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    return Counter(
        name for page in pages for name in re.findall(r"(?m)^::: (\S+)$", page.read_text("utf-8"))
    )


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_stands_on_one_page(face: str) -> None:
    found = documented()
    counts = {
        f"{face}.{name}": found[f"{face}.{name}"] for name in importlib.import_module(face).__all__
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_stands_in_a_guide(face: str) -> None:
    """In a sentence or a table, of the reference too where that explains its names as a whole.

    Errors and warnings explain themselves.
    """
    pages = [page for page in DOCS.rglob("*.md") if "benchmarks" not in page.parts]
    if face == "fmapper":
        pages = [page for page in pages if "reference" not in page.parts]
    text = "\n".join(page.read_text("utf-8") for page in [*pages, DOCS.parent / "README.md"])
    text = re.sub(r"(?m)^::: .*$", "", text)
    names = importlib.import_module(face).__all__
    names = [name for name in names if not name.endswith(("Error", "Warning"))]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def program_of_docs(name: str) -> ModuleType:
    """Loads a program that writes a part of the documentation."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_docs", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["commands", "examples", "messages"])
def test_a_page_is_what_its_program_writes(name: str) -> None:
    """`python docs/commands.py` writes the first, and so on."""
    module = program_of_docs(name)
    assert module.PAGE.read_text("utf-8") == module.page()


def test_pictures_are_those_of_the_recorded_session() -> None:
    """`python docs/pictures.py` draws them."""
    pytest.importorskip("pygments")
    module = program_of_docs("pictures")
    for name, text in module.pictures().items():
        assert (module.ASSETS / name).read_text("utf-8") == text, name


@pytest.mark.nightly
def test_the_recorded_file_is_what_the_command_writes(tmp_path: Path) -> None:
    """`python docs/pictures.py --record` records it anew."""
    for package in ("torch", "flax", "ruff"):
        pytest.importorskip(package)
    module = program_of_docs("pictures")
    shutil.copy(module.DEMO / "net.py", tmp_path)
    words = shlex.split(module.TRANSLATE)[1:]
    subprocess.run([sys.executable, "-m", "fmapper", *words], cwd=tmp_path, check=True)
    written = (tmp_path / "net_flax.py").read_text("utf-8")
    assert written == (module.DEMO / "net_flax.py").read_text("utf-8")


@pytest.mark.parametrize("face", FACES)
def test_what_the_reference_documents_is_public(face: str) -> None:
    public = importlib.import_module(face).__all__
    names = [name.rpartition(".") for name in documented()]
    assert [last for place, _, last in names if place == face and last not in public] == []


def test_what_convert_returns_stands_on_one_page() -> None:
    found = documented()
    assert [found[f"fmapper_adapters.{name}"] for name in MODELS] == [1, 1, 1, 1]


def test_every_page_is_in_the_menu_and_every_entry_is_a_page() -> None:
    menu = re.findall(
        r"([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(menu) == sorted(pages)


def test_the_index_of_the_reference_lists_every_page() -> None:
    index = (DOCS / "reference" / "index.md").read_text("utf-8")
    listed = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", index, re.MULTILINE)
    pages = [page.name for page in (DOCS / "reference").glob("*.md") if page.name != "index.md"]
    assert sorted(listed) == sorted(pages)


WIDTH = 78  # what a page shows without scrolling
PROMPTS = re.compile(r">>> |\.\.\. |>>>$|\$ ")
SET_UP = "python3 -m venv .venv && . .venv/bin/activate && pip install -U pip && pip install"


def faults_of_blocks(text: str) -> list[str]:
    """Which lines of blocks are too wide, or begin with a prompt where they are to be copied."""
    faults = []
    for block in re.finditer(r"(?ms)^( *)```(\w*)[^\n]*\n(.*?)^\1```", text):
        indent, language, code = block.groups()
        for line in code.splitlines():
            wide = len(line) - len(indent) > WIDTH and not line.startswith(SET_UP)
            if wide or (language != "text" and PROMPTS.match(line.strip())):
                faults.append(line)
    return faults


PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_blocks_can_be_read_and_copied(page: Path) -> None:
    """Results are comments below a statement, which the tests compare: see `run_snippet`."""
    assert faults_of_blocks(page.read_text("utf-8")) == []


def test_the_test_of_blocks_can_fail() -> None:
    wide = f"x = {'1' * WIDTH}"
    text = f"```python\n>>> 1 + 1\n```\n\n```text\n>>> 1 + 1\n{wide}\n```\n"
    assert faults_of_blocks(text) == [">>> 1 + 1", wide]


def test_links_to_pages_from_outside_of_the_docs_are_good() -> None:
    """Zensical checks links inside the docs."""
    root = DOCS.parent
    for page in (root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md"):
        for link, anchor in re.findall(
            r"\]\((docs/[^)#]+)(?:#([^)]+))?\)", page.read_text("utf-8")
        ):
            assert (root / link).exists(), f"{page.name}: {link}"
            headings = (
                re.findall(r"(?m)^#+ (.*)$", (root / link).read_text("utf-8")) if anchor else ()
            )
            anchors = {re.sub(r"[^\w]+", "-", heading.lower()).strip("-") for heading in headings}
            assert not anchor or anchor in anchors, f"{page.name}: {link}#{anchor}"


@pytest.mark.parametrize(
    ("code", "compared"),
    [
        ("1 + 1\n# 2\n", True),
        ("1 + 1\n# 3\n", False),
        ("print('a b')\n# a\n#   b\n", True),
        ("print('a b')\n# a ...\n", True),
        ("1 + 1\n\n# A sentence about what follows.\nx = 1\n", True),
        ("1 / 0\n# raises ZeroDivisionError: ...\n", True),
        ("1 + 1\n# raises ZeroDivisionError: ...\n", False),
    ],
)
def test_results_below_statements_are_compared(
    code: str, compared: bool, pytestconfig: pytest.Config
) -> None:
    plugin = pytestconfig.pluginmanager.get_plugin(str(DOCS.parent / "conftest.py"))
    example = SimpleNamespace(parsed=Lexeme(code, 0, 0), line=1, path="page.md", namespace={})
    assert (plugin.run_snippet(example) is None) is compared
