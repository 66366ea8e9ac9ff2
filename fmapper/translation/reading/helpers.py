"""The functions and classes that a file has beside the model's own."""

from __future__ import annotations

import ast
import sys
import textwrap
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


def print_docstring(title: str, lacks_training: str) -> str:
    """Returns the docstring of a file; says why it is for evaluation alone, if it is."""
    docstring = f'"""{title}"""'
    lack = f"It is for evaluation alone, without training: {lacks_training}"
    return add_to_docstring(docstring, lack) if lacks_training else docstring


def add_to_docstring(code: str, words: str) -> str:
    """Returns a file with a sentence more in its docstring, as a paragraph of its own."""
    end = code.index('"""', 3)
    sentence = words.replace("\\", "/").replace('"', "'").rstrip(".") + "."
    return "\n".join([code[:end].rstrip(), "", *textwrap.wrap(sentence, 99), code[end:]])


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
    """Returns the names that stand in code, but for those of parameters in their functions.

    Examples:
        >>> sorted(names_in("def call(conv, x=start): return conv(x) + bias"))
        ['bias', 'start']
    """
    return _free_names(ast.parse(code))


def _free_names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    found = set().union(*map(_free_names, ast.iter_child_nodes(node)))
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return found
    parameters = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    outside = [*ast.iter_child_nodes(node.args), *getattr(node, "decorator_list", [])]
    return (found - parameters).union(*map(_free_names, outside))


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
