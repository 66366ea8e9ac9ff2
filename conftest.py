"""How all tests run: on all processors, long ones apart, with the examples in docs."""

import json
import math
import os
import re
from collections import defaultdict
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from pathlib import Path

# JAX would take three quarters of the GPU when it first looks at it, and leave torch the rest.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # there is one for each processor
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("FMAPPER_FULL_TRACEBACKS", "1")  # a test that fails is looked into

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE),
        SkipParser(),
    ],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    excludes=["docs/notebooks/*.md"],  # `nox -s notebooks` executes those
).pytest()

collect_ignore_glob = ["docs/*.py", "docs/**/*.py"]  # programs that need more than the tests do

WORKERS = 8  # each may take 5 GB
SECOND = 1.0
LONG = 2.0  # seconds
DURATIONS = Path(__file__).parent / "tests" / "durations.json"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns a worker a processor for whole folders, and none for tests of one file."""
    if not any(Path(argument).is_dir() for argument in config.args):
        return 0
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, WORKERS)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that take more than half a second, as tests/durations.json has them.

    Those of less than a second are `thorough`. Of the others, the shortest case of each function is
    `thorough`, unless it is long, and the rest are `slow`; but no file has slow tests alone. Tests
    that are selected by name always run.
    """
    named = any("::" in argument for argument in config.args)
    if named or config.pluginmanager.has_plugin("support.durations") or not DURATIONS.exists():
        return
    seconds = json.loads(DURATIONS.read_text())
    functions = defaultdict(list)
    for name in filter(lambda name: seconds[name] >= SECOND, seconds):
        functions[re.sub(r"\[.*", "", name)].append(name)
    shortest = {min(names, key=seconds.__getitem__) for names in functions.values()}
    limits = {name: LONG if name in shortest else SECOND for name in seconds}
    files = defaultdict(list)
    for item in items:
        files[item.path].append(item.nodeid)
    for names in files.values():
        if all(seconds.get(name, 0.0) >= limits.get(name, LONG) for name in names):
            limits[min(names, key=seconds.__getitem__)] = math.inf
    for item in items:
        if item.nodeid in seconds:
            short = seconds[item.nodeid] < limits[item.nodeid]
            item.add_marker("thorough" if short else "slow")
