"""Settings that all tests share: hypothesis, the marker `gpu`, backends that transform."""

import ast
import ctypes
import functools
import gc
import itertools
import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Programs and tables of cases: they need frameworks, and have no doctests.
collect_ignore_glob = ["support/*", "models/*", "sweeps/*"]

GROWTH = 400 * 2**20  # bytes, after which a process forgets compiled programs
FINISHED = itertools.count(1)  # tests

# No deadline: the first example of a property may load a framework or compile.
settings.register_profile("fmapper", deadline=None)
settings.load_profile("fmapper")


# What the jobs without some of the frameworks lack.
OPTIONAL = ("numpy", "torch", "jax", "flax", "equinox", "ml_dtypes", "optax", "transformers")
MISSING = frozenset(name for name in OPTIONAL if find_spec(name) is None)


def imports_of(path: Path) -> set[str]:
    """Returns the packages that a file imports at its top level."""
    packages = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or "").partition(".")[0])
    return packages


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the modules that import a framework where it is not installed."""
    is_test = MISSING and collection_path.suffix == ".py" and collection_path.name != "conftest.py"
    return True if is_test and imports_of(collection_path) & MISSING else None


def pytest_report_header() -> str:
    """Says which modules are left out."""
    return f"without modules that import {', '.join(sorted(MISSING))}" if MISSING else ""


@functools.cache
def sees_gpu(backend: str) -> bool:
    """Whether an installed backend sees a GPU; loads the backend."""
    if find_spec(backend) is None:
        return False
    if backend == "torch":
        import torch

        return torch.cuda.is_available()
    if backend == "jax":
        import jax

        try:
            return bool(jax.devices("gpu"))
        except RuntimeError:  # JAX's answer for a platform that it does not have
            return False
    raise ValueError(f"the marker gpu knows 'torch' and 'jax', not {backend!r}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where the backends that it names see none."""
    for marker in item.iter_markers("gpu"):
        blind = [backend for backend in marker.args if not sees_gpu(backend)]
        if blind:
            pytest.skip(f"needs a GPU that {' and '.join(blind)} can see; there is none here")
        if not marker.args and not (sees_gpu("torch") or sees_gpu("jax")):
            pytest.skip("needs a GPU that torch or jax can see; there is none here")


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Starts each test at the same random numbers, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)  # those of GPUs may be simulated


def pytest_collection_finish() -> None:
    """Freezes what was collected, or each collection of garbage would walk all tests."""
    gc.collect()
    gc.freeze()
    resident_at_start()


@pytest.fixture(scope="module", autouse=True)
def compiled_programs() -> Iterator[None]:
    """Forgets what JAX has compiled before there is too much of it, and freezes what is left."""
    yield
    gc.collect()
    gc.freeze()  # or each collection in later modules would walk what JAX and torch keep
    forget_programs()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Forgets what JAX has compiled within a long module, too."""
    if next(FINISHED) % 20 == 0:  # it takes some milliseconds
        forget_programs()


@functools.cache
def resident_at_start() -> int:
    return resident()


def resident() -> int:
    """Returns the bytes of this process that are in memory; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def forget_programs() -> None:
    """Forgets compiled programs, and gives back their memory, when the process has grown by them.

    Without that a worker takes 5 GB, and beyond 65,530 mappings the compiler aborts the process.
    """
    if "jax" in sys.modules and resident() - resident_at_start() > GROWTH:
        sys.modules["jax"].clear_caches()
        gc.collect()
        if hasattr(trim := ctypes.CDLL(None), "malloc_trim"):  # of glibc
            trim.malloc_trim(0)


@pytest.fixture(params=["torch", "jax"])
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A backend that differentiates and compiles, in float64."""
    pytest.importorskip(request.param)
    from support import transformed

    with transformed.backend(request.param) as found:
        yield found
