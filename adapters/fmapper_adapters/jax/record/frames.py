"""Tells which library a file of Python code belongs to, and what a frame is about to call.

A file belongs to the package in whose folder it lies.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Libraries that are written in JAX: their lines are shown where no line of the user's own is there.
OF_FLAX_AND_ALIKE = ("flax", "equinox", "haiku", "optax")
_LOADS = ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
_OWN = ("fmapper", "fmapper_adapters")


def is_of(file: str, packages: tuple[str, ...]) -> bool:
    """Returns whether a file lies in the folder of one of these packages."""
    return file.startswith(tuple(folder for name in packages for folder in _folders(name)))


@functools.lru_cache(maxsize=4096)
def is_of_jax(file: str) -> bool:
    """Returns whether a file is part of JAX, of this library, or code that was made."""
    return file.startswith("<") or is_of(file, ("jax", "jaxlib", *_OWN))


@functools.lru_cache(maxsize=4096)
def is_of_library(file: str) -> bool:
    """Returns whether a file is part of a library that is written in JAX."""
    return is_of(file, OF_FLAX_AND_ALIKE)


@functools.lru_cache(maxsize=4096)
def is_of_python(file: str) -> bool:
    """Returns whether a file is part of the standard library."""
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    return file.startswith(standard) and not file.startswith(
        (os.path.join(standard, "site-packages"), os.path.join(standard, "dist-packages"))
    )


@functools.cache
def _folders(package: str) -> tuple[str, ...]:
    """Returns the folders of a package, each ending with a separator; none if not installed."""
    return tuple(
        form + os.sep for place in _places(package) for form in {place, os.path.realpath(place)}
    )


def _places(package: str) -> Iterator[str]:
    loaded = sys.modules.get(package)
    if loaded is not None:
        yield from map(os.path.abspath, getattr(loaded, "__path__", ()))
        return
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return
    yield from map(os.path.abspath, (spec and spec.submodule_search_locations) or ())


def called_name(frame: FrameType) -> str | None:
    """Returns the name of what a frame calls at this moment.

    Returns:
        The name, empty where it has none; None if the frame does something else.
    """
    done = [one for one in dis.get_instructions(frame.f_code) if one.offset <= frame.f_lasti]
    if not done or "CALL" not in done[-1].opname:
        return None
    start = _start(done[-1])
    names = [one.argval for one in done[:-1] if one.opname in _LOADS and _start(one) == start]
    return str(names[-1]) if names else ""


def _start(instruction: Any) -> tuple[Any, Any]:
    return instruction.positions.lineno, instruction.positions.col_offset
