"""Runs a file that was written, as a module of Python's."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from typing import Any

from fmapper.errors import ConversionError
from fmapper.translation.source_file import Source

_numbers = itertools.count(1)


def run_file(source: Source) -> dict[str, Any]:
    """Runs a file; returns its names.

    The file is a module of Python's from then on, so that its classes are found by name, and its
    lines are shown in tracebacks.

    Raises:
        ConversionError: The model is called with an object that the file has no class for.
    """
    if source.leaves:
        raise ConversionError(
            f"{source.name} is given an object whose fields have no names, which its code cannot "
            "take: give it a dataclass, a named tuple or a dict, or omit structure=True"
        )
    name = f"fmapper_translated.{source.name}_{next(_numbers)}"
    file = f"<{name}>"
    linecache.cache[file] = (len(source.code), None, source.code.splitlines(keepends=True), file)
    module = types.ModuleType(name, f"The source of {source.name}.")
    module.__dict__["__fmapper_source__"] = source
    sys.modules[name] = module
    exec(compile(source.code, file, "exec"), module.__dict__)
    return module.__dict__
