"""How all tests run: on all processors, long ones apart, with the examples in docs."""

import ast
import builtins
import contextlib
import importlib
import io
import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from fnmatch import fnmatch
from functools import wraps
from pathlib import Path
from typing import Any
from zlib import crc32

# JAX would take three quarters of the GPU when it first looks at it, and leave torch the rest.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # there is one for each processor
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("FMAPPER_FULL_TRACEBACKS", "1")  # a test that fails is looked into

import pytest
from _pytest.runner import runtestprotocol  # what `pytest-rerunfailures` is made of
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser

# --- the examples in docs -----------------------------------------------------------------------


def run_snippet(example: Example) -> str | None:
    """Runs a block of code, and compares what each statement shows with the comments below it.

    A statement shows what it prints and, as at a prompt, the value of an expression, or the error
    that it ends in, as `raises Class: message`. Blocks are copied as they stand, so they have no
    prompts, and a comment in place of each result: `...` in it stands for anything, and white
    space is as in a doctest. What has no comment is not compared.
    """
    source = str(example.parsed)
    lines = source.splitlines()
    example.namespace["__name__"] = "__main__"  # as in a script, whose classes are the model's
    for statement in ast.parse(source).body:
        end = statement.end_lineno or 0
        comments = itertools.takewhile(lambda line: line.startswith("#"), lines[end:])
        expected = "\n".join(comment.removeprefix("#").removeprefix(" ") for comment in comments)
        tree = ast.Interactive([statement])
        ast.increment_lineno(tree, example.line + example.parsed.line_offset)
        shown = io.StringIO()
        try:
            with contextlib.redirect_stdout(shown):
                exec(compile(tree, example.path, "single", dont_inherit=True), example.namespace)
        except Exception as error:
            if not expected.startswith("raises "):
                raise
            shown.write(f"raises {type(error).__name__}: {error}")
        flags = ELLIPSIS | NORMALIZE_WHITESPACE
        text = shown.getvalue()
        raises = expected.startswith("raises ") and not text.startswith("raises ")
        if raises or (
            text and expected and not OutputChecker().check_output(expected, text, flags)
        ):
            return f"line {example.line + end}: the page says\n{expected}\nand it is\n{text}"
    for name in ("__builtins__", "__name__"):
        example.namespace.pop(name, None)
    return None


pytest_collect_file = Sybil(
    parsers=[CodeBlockParser(language="python", evaluator=run_snippet), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    excludes=["docs/notebooks/*.md"],  # `nox -s notebooks` executes those
).pytest()

collect_ignore_glob = ["docs/*.py", "docs/**/*.py"]  # programs that need more than the tests do

WORKERS = 8  # each takes 1.5 GB


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns a worker a processor for whole folders, and none for tests of one file."""
    if not any(Path(argument).is_dir() for argument in config.args):
        return 0
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, WORKERS)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that divides a long run between machines."""
    parser.addoption("--shard", metavar="K/N", help="run the K-th of N parts of the files")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that `nightly_cases` names, and those that `daily_cases` does not.

    A case is named by its id in brackets, as `fnmatch` reads it; a name without a case is an error.
    Of a test with `sampled(n)` all but every n-th case are marked.
    """
    cases, counts = defaultdict(set), defaultdict(itertools.count)
    for item in items:
        callspec = getattr(item, "callspec", None)
        for marker in item.iter_markers():
            if (
                marker.name == "sampled"
                and next(counts[item.nodeid.partition("[")[0]]) % marker.args[0]
            ):
                item.add_marker("nightly")
            if marker.name in ("nightly_cases", "daily_cases"):
                names = {name for name in marker.args if callspec and fnmatch(callspec.id, name)}
                if bool(names) is (marker.name == "nightly_cases"):
                    item.add_marker("nightly")
                cases[item.nodeid.partition("[")[0], marker.args] |= names
    if not any("::" in argument for argument in config.args):
        unknown = {test: {*names} - cases[test, names] for test, names in cases}
        if any(unknown.values()):
            raise pytest.UsageError(f"markers name cases that do not exist: {unknown}")
    if shard := config.getoption("--shard"):
        number, count = map(int, shard.split("/"))
        items[:] = [
            item for item in items if crc32(item.path.name.encode()) % count == number % count
        ]


# --- the deadline -------------------------------------------------------------------------------

DEADLINE = 2.0  # seconds of a processor, of the machine on which REFERENCE was measured
NOISE = 2.0  # how many times as long a test takes beside others that fill caches and memory
REFERENCE = 0.014  # seconds for `sum(range(1_000_000))`


def slowness() -> float:
    """Measures how many times as long as on the machine of reference this one takes, 1 at least.

    At this moment: what else runs on the machine counts.
    """
    start = time.process_time()
    for _ in range(10):
        sum(range(1_000_000))
    return max(1.0, (time.process_time() - start) / 10 / REFERENCE)


def processor_seconds() -> float:
    """Returns the processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Imports:
    """How long imports took: the first test to need a framework pays for the others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        for module, name in ((builtins, "__import__"), (importlib, "import_module")):
            setattr(module, name, self._count(getattr(module, name)))

    def _count(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def counted(*args: Any, **kwargs: Any) -> Any:
            name = args[0] if args else kwargs["name"]
            if self._depth or name in sys.modules:
                return load(*args, **kwargs)
            start = time.process_time()
            self._depth += 1
            try:
                return load(*args, **kwargs)
            finally:
                self._depth -= 1
                self.seconds += time.process_time() - start

        return counted


IMPORTS = Imports()


SECONDS = pytest.StashKey[float]()  # that the last run of a test took


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measures a test without its imports."""
    start, imports = processor_seconds(), IMPORTS.seconds
    result = yield
    item.stash[SECONDS] = processor_seconds() - start - (IMPORTS.seconds - imports)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Fails a test that takes longer than the deadline, twice, and is not marked `nightly`.

    The second run does not pay for what a process does once: the first program, the first kernel.
    The examples of the documentation have no deadline: they are as long as what they show. Neither
    have tests for a GPU, which may be a simulated one.
    """
    if not isinstance(item, pytest.Function) or any(
        item.get_closest_marker(name) for name in ("nightly", "gpu")
    ):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if all(report.passed for report in reports) and seconds_over(item):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        took = item.stash[SECONDS]
        if (limit := seconds_over(item)) and all(report.passed for report in reports):
            reports[1].outcome = "failed"
            reports[1].longrepr = (
                f"it takes {took:.1f} s of a processor, of {limit:.1f} s: make its model smaller, "
                "share what it records or compiles by a fixture of the module, or mark it "
                "`nightly` where it is long for a reason"
            )
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def seconds_over(item: pytest.Item) -> float:
    """Returns the seconds that a test had, if its last run took longer; else 0."""
    took = item.stash.get(SECONDS, 0.0)
    if took <= DEADLINE * NOISE:
        return 0.0
    limit = DEADLINE * NOISE * slowness()
    return limit if took > limit else 0.0
