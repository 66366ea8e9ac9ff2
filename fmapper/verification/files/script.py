"""Makes one script of real modules, for a process that has no fmapper."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from types import ModuleType

from fmapper.verification.files import process
from fmapper.verification.models import draws, spreads

_HEAD = '"""Runs a translated model and compares it with what its source gave."""'
_FUTURE = "from __future__ import annotations"
_MAIN = "compare_file({}, *sys.argv[1:4], json.loads(sys.argv[4]))\n"


@functools.cache
def script_of(runner: type[process.Runner]) -> str:
    """Returns a script that compares a file, whose model `runner` runs, with its source.

    It holds the modules of the runner and of the classes that it extends, without what they import
    from fmapper. Its arguments are those of `compare_file`, the modes as JSON.
    """
    classes = [cls for cls in reversed(runner.mro()) if issubclass(cls, process.Runner)][1:]
    modules = [draws, spreads, process, *(sys.modules[cls.__module__] for cls in classes)]
    main = _MAIN.format(runner.__name__)
    return "\n\n".join([_HEAD, _FUTURE, *map(_code_of, modules), main])


def _code_of(module: ModuleType) -> str:
    """Returns the code of a module without its docstring and what it imports from fmapper."""
    code = inspect.getsource(module)
    lines: list[str | None] = [*code.splitlines()]
    for at, node in enumerate(ast.parse(code).body):
        is_import = isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("fmapper", "__future__")
        )
        if is_import or at == 0:
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [None] * (last - node.lineno + 1)
    return "\n".join(line for line in lines if line is not None).strip()
