"""What type checkers see: a program that calls every public function is right, wrong calls are not.

`nox -s types` runs this with mypy and pyright; where a checker is not installed it is left out.
"""

import ast
import doctest
import json
import re
import subprocess
import sys
import textwrap
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
fmapper.convert(module, "jax", (x,)).call_the_module  # wrong
fmapper.convert(module, "jax", (x,), structure=True)  # wrong
fmapper.convert(module, "torch", (x,), structure=True, scan=True)  # wrong
fmapper.convert(module, "equinox", (x,))  # wrong
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
    return [(line, text) for _, line, text in pyright(path.parent, include=[path.name])]


def pyright(folder, **settings):
    """The file, line and text of everything that pyright says of the files in a folder."""
    settings["extraPaths"] = [str(ROOT), str(ROOT / "adapters")]
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "-p", str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["summary"]["filesAnalyzed"]
    return [
        (Path(one["file"]).stem, one["range"]["start"]["line"] + 1, one["message"])
        for one in report["generalDiagnostics"]
    ]


# What pyright says of snippets because of the types of other libraries, by page. Of fmapper's
# types there is nothing here.
OF_OTHERS = {
    "docs.concepts.random-numbers": 'parameter "shape" of type "Shape" in function "uniform"',
    "docs.howto.debug-a-difference": 'attribute "savefig" for class "SubFigure"',
    "docs.howto.decode-text": 'parameter ".*" of type .* in function "__init__"'
    '|attribute "generate" for class',
    "docs.howto.fill-from-checkpoint": 'Tensor [|] Module"|attribute "weight" for class "Tensor"',
    "docs.howto.gpu": 'Operator "<=" not supported for types "int | None"',
    "docs.howto.linen": 'attribute "shape" for class "FrozenDict',
    "docs.howto.lora": 'parameter "params" of type "Params"',
    "docs.howto.move-and-place": 'attribute "kernel" for class "FunctionType"',
    "docs.howto.save-and-load": 'function "savez"',
    "docs.howto.torch-to-flax": 'attribute "shape" for class "FrozenDict',
    "docs.howto.train-anywhere": 'Argument of type "Params"',
    "docs.notebooks.difference-by-layer": 'for class "tuple',
    "docs.notebooks.own-class": 'attribute "long" for class "Array"',
    "docs.notebooks.vision-in-flax": 'for class "tuple|"num_labels"',
}


def program_of(page):
    """The snippets of a page as one program: they share their names."""
    codes = []
    for _, code in re.findall(r"(?ms)^( *)```python\n(.*?)^\1```", page.read_text("utf-8")):
        block = textwrap.dedent(code)
        examples = doctest.DocTestParser().get_examples(block)
        codes += [example.source for example in examples] or [block]
    return "\n".join(codes)


@pytest.mark.nightly
def test_pyright_accepts_every_snippet_of_the_documentation(tmp_path):
    if find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        name = ".".join(page.relative_to(ROOT).with_suffix("").parts)
        (tmp_path / f"{name}.py").write_text(program_of(page), "utf-8")
    said = pyright(
        tmp_path,
        reportUnusedExpression=False,
        reportRedeclaration=False,  # a page defines a class again
        reportPossiblyUnboundVariable=False,  # a loop over what is there
    )
    wrong = []
    for file, line, text in said:
        others = OF_OTHERS.get(file)
        if others is None or not re.search(others, text):
            wrong.append(f"{file}:{line}: {text}")
    assert wrong == []


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


@pytest.mark.nightly
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_finds_nothing_in_it(checker, tmp_path):
    path = tmp_path / PROGRAM.name
    path.write_text(PROGRAM.read_text())
    assert errors_of(checker, path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_finds_a_wrong_target_or_option(checker, tmp_path):
    path = tmp_path / "wrong_program.py"
    path.write_text(WRONG)
    found = errors_of(checker, path)
    lines = {line for line, text in found if "not accessed" not in text}
    assert sorted(lines) == WRONG_LINES, found
