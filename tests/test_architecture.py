"""Who may import whom: the core knows no framework, adapters know only the public names."""

import ast
from pathlib import Path

import pytest

import fmapper

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"numpy", "torch", "jax", "flax", "optree", "array_api_compat", "ml_dtypes"}
CORE = sorted((ROOT / "fmapper").rglob("*.py"))
ADAPTERS = sorted((ROOT / "adapters").rglob("*.py"))
ORDER = ["_errors", "_keypath", "_functor", "_gradient", "_nodes", "_visit", "_batch", "_fmap"]


def imports(path, *, everywhere):
    """The (module, name) pairs that a file imports, at module level or everywhere."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_there_is_something_to_look_at():
    assert len(CORE) > 10
    assert {path.parent.name for path in ADAPTERS} >= {"numpy", "torch", "jax"}


@pytest.mark.parametrize("path", CORE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_core_imports_no_framework_and_no_adapter(path):
    tops = {module.partition(".")[0] for module, _ in imports(path, everywhere=False)}
    assert not tops & FRAMEWORKS
    tops = {module.partition(".")[0] for module, _ in imports(path, everywhere=True)}
    assert not tops & {"torch", "jax", "flax", "fmapper_adapters"}


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_adapters_use_public_names_and_no_other_adapter(path):
    own = path.relative_to(ROOT / "adapters" / "fmapper_adapters").parts[0]
    allowed = {own} | ({"jax"} if own == "flax" else set())
    for module, name in imports(path, everywhere=True):
        if module == "fmapper.random":  # public, too
            continue
        if module.partition(".")[0] == "fmapper":
            assert module == "fmapper"
            assert name in fmapper.__all__, name
        if module.startswith("fmapper_adapters."):
            assert module.split(".")[1] in allowed


@pytest.mark.parametrize("position", range(len(ORDER)))
def test_the_walk_depends_only_on_what_is_below_it(position):
    path = ROOT / "fmapper" / f"{ORDER[position]}.py"
    own = set()
    for module, name in imports(path, everywhere=True):
        if module == "fmapper":
            own.add(name)
        elif module.startswith("fmapper."):
            own.add(module.removeprefix("fmapper."))
    assert own <= set(ORDER[:position])
