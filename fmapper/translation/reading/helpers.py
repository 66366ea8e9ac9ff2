"""The functions and classes that a file has beside the model's own."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Mapping

from fmapper.translation.dialect import Helper


def helpers_of(code: str, find: Callable[[str], Helper | None]) -> list[str]:
    """Returns the code of the helpers that a file calls, in a working order.

    Args:
        code: The file without them.
        find: Returns a helper by its name.
    """
    found: dict[str, str] = {}
    todo = sorted(names_in(code))
    while todo:
        name = todo.pop(0)
        helper = find(name) if name not in found else None
        if helper is not None:
            found[name] = helper.source
            todo += sorted(helper.needs | names_in(helper.source))
    return [found[name] for name in _order(found)]


def print_imports(lines: Iterable[str]) -> str:
    """Returns import statements in order: those of Python itself come first.

    Examples:
        >>> print(print_imports(["import numpy as np", "from typing import Any", "import math"]))
        import math
        from typing import Any
        <BLANKLINE>
        import numpy as np
    """
    ordered = sorted(set(lines), key=lambda line: (line.startswith("from "), line))
    own = [line for line in ordered if line.split()[1] in sys.stdlib_module_names]
    others = [line for line in ordered if line not in own]
    return "\n\n".join("\n".join(group) for group in (own, others) if group)


def names_in(code: str) -> set[str]:
    """Returns the names that stand in code."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def _order(helpers: Mapping[str, str]) -> list[str]:
    """Orders helpers so that definitions come before their use."""
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in found or name not in helpers:
            return
        node = ast.parse(helpers[name]).body[0]
        if not isinstance(node, ast.FunctionDef):
            for needed in sorted(names_in(helpers[name])):
                if needed != name:
                    visit(needed)
        found[name] = None

    for name in helpers:
        visit(name)
    return list(found)
