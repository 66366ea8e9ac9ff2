"""The product's files, read and parsed once for all tests that look at them."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS_ROOT = ROOT / "adapters" / "fmapper_adapters"
CORE = sorted((ROOT / "fmapper").rglob("*.py"))
ADAPTERS = sorted(ADAPTERS_ROOT.rglob("*.py"))
TRANSLATOR = sorted((ROOT / "adapters" / "fmapper_translate").rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, the module first."""
    return tuple(ast.walk(parse(path)))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


@pytest.fixture(scope="session", autouse=True)
def parsed_sources() -> None:
    """Parses all files; modules of tests that look at them import it."""
    for path in (*CORE, *ADAPTERS, *TRANSLATOR):
        nodes(path)
