"""Every test and every sweep runs in some job; none drops out in silence."""

import ast
import itertools
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
if not (ROOT / ".ci").exists():
    pytest.skip("a source distribution has no jobs", allow_module_level=True)
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*")
}
CI = (ROOT / ".ci" / "run").read_text()


def matrix(workflow, job, axis):
    return WORKFLOWS[workflow]["jobs"][job]["strategy"]["matrix"][axis]


def sessions():
    """The sessions of the noxfile, by name."""
    text = (ROOT / "noxfile.py").read_text()
    return set(re.findall(r"@nox\.session[^\n]*\n(?:@nox[^\n]*\n)*def (\w+)", text))


def sessions_of_jobs():
    nightly = {session.split()[0] for session in matrix("nightly", "nightly", "session")}
    return nightly | set(re.search(r"nox -s ([\w ]+)", CI)[1].split())


def test_a_change_is_checked_by_the_jobs_of_the_script():
    jobs = set(re.findall(r"(?m)^(\w+)\(\) \{$", CI))
    assert set(matrix("check", "check", "job")) == jobs
    assert f"{{@:-{' '.join(matrix('check', 'check', 'job'))}}}" in CI


def test_every_session_is_in_a_job():
    in_script = {"lint": "ruff check", "types": "mypy", "docs": "zensical build"}
    assert all(command in CI for command in in_script.values())
    assert sessions() - sessions_of_jobs() - in_script.keys() == set()


def test_shards_are_complete():
    shards = {}
    for session in matrix("nightly", "nightly", "session"):
        if match := re.fullmatch(r"(\w+) -- --shard (\d+)/(\d+)", session):
            shards.setdefault((match[1], int(match[3])), []).append(int(match[2]))
    assert shards
    for (_, count), numbers in shards.items():
        assert sorted(number % count for number in numbers) == [*range(count)]


def test_every_combination_of_markers_is_in_a_job():
    """A test without markers, one that is `nightly`, `gpu`, or both."""
    default = re.search(r'"-m", "([^"]+)"', (ROOT / "pyproject.toml").read_text())[1]
    nightly = re.search(r'"pytest", "-m", "([^"]+)"', (ROOT / "noxfile.py").read_text())[1]
    simulated = "gpu"  # the sessions `simulated` run all of them
    assert f'"-m", "{simulated}"' in (ROOT / "noxfile.py").read_text()
    for marked in itertools.product([False, True], repeat=2):
        names = dict(zip(("nightly", "gpu"), marked, strict=True))
        jobs = [simulated] if names["gpu"] else [default, nightly]
        assert any(eval(expression, {}, names) for expression in jobs)


def test_no_other_marker_leaves_tests_out():
    used = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        used |= set(re.findall(r"pytest\.mark\.(\w+)", path.read_text()))
    known = {
        "gpu",
        "nightly",
        "nightly_cases",
        "daily_cases",
        "sampled",
        "parametrize",
        "usefixtures",
    }
    assert used - known - {"skipif", "xfail", "filterwarnings"} == set()


def optional_packages(path):
    """The packages that a file of tests may lack, each with whether the test is nightly."""
    tree = ast.parse(path.read_text())
    is_nightly = "nightly" in "".join(
        ast.unparse(node) for node in tree.body if "pytestmark" in ast.unparse(node)
    )
    for node in tree.body:
        marks = "".join(map(ast.unparse, getattr(node, "decorator_list", ())))
        for call in ast.walk(node):
            match call:
                case ast.Call(
                    func=ast.Attribute(attr="importorskip"), args=[ast.Constant(name), *_]
                ):
                    yield name.partition(".")[0], is_nightly or "nightly" in marks


def test_no_package_that_tests_are_skipped_without_is_in_no_job():
    """The nightly session installs what the others lack, and runs nightly tests alone."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    more = re.search(r"more = \((.*)\)", (ROOT / "noxfile.py").read_text())[1]
    for path in (ROOT / "tests").rglob("test_*.py"):
        for package, is_nightly in optional_packages(path):
            if f'"{package}"' in more:
                assert is_nightly, f"{path}: no job has {package} and runs this"
            else:
                assert find_spec(package), f"{path}: no job has {package}"
