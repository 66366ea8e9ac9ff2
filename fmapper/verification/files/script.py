"""Makes one script of real modules, for a process that has no fmapper."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from importlib import import_module
from types import ModuleType

from fmapper.verification.files import process
from fmapper.verification.models import draws, spreads

_HEAD = '"""Runs a translated model and compares it with what its source gave."""'
_FUTURE = "from __future__ import annotations"
_MAIN = "compare_file({}, *sys.argv[1:4], json.loads(sys.argv[4]))\n"


@functools.cache
def script_of(runner: type[process.Runner]) -> str:
    """Returns a script that compares a file, whose model `runner` runs, with its source.

    It holds the module of the runner after those of adapters whose names this imports, and what
    both need of the core. Its arguments are those of `compare_file`, the modes as JSON.
    """
    parts = [_HEAD, _FUTURE, *(_read(module)[0] for module in (draws, spreads, process))]
    adapters: dict[str, str] = {}
    _add(runner.__module__, adapters)
    return "\n\n".join([*parts, *adapters.values(), _MAIN.format(runner.__name__)])


def _add(name: str, parts: dict[str, str]) -> None:
    """Adds the code of a module of an adapter, after that of those which it imports names of."""
    code, others = _read(sys.modules[name])
    for other in others:
        if other not in parts:
            _add(other, parts)
    parts[name] = code


def _read(module: ModuleType) -> tuple[str, list[str]]:
    """Returns code without its docstring and imports of fmapper, and the adapters' modules."""
    code = inspect.getsource(module)
    lines: list[str | None] = [*code.splitlines()]
    others = []
    for at, node in enumerate(ast.parse(code).body):
        place = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if at and not place.startswith(("fmapper", "__future__")):
            continue
        last = node.end_lineno or node.lineno
        lines[node.lineno - 1 : last] = [None] * (last - node.lineno + 1)
        if isinstance(node, ast.ImportFrom) and place.startswith("fmapper_adapters"):
            space = import_module(place)
            others += [getattr(space, alias.name).__module__ for alias in node.names]
    return "\n".join(line for line in lines if line is not None).strip(), others
