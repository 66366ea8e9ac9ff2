"""The names in definitions of the source: in the text of classes, and in defaults."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fmapper_translate.functions import Function, definition_of, is_standard
from fmapper_translate.recording import Recording

PLAIN = (bool, int, float, str, tuple)


def names_in(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the names of its module that a class reads, but for annotations, and their values."""
    tree = definition_of(cls)
    notes = {
        item for node in ast.walk(tree) for name in ("annotation", "returns")
        for item in ast.walk(getattr(node, name, None) or ast.Pass())
    }  # fmt: skip
    space = vars(sys.modules[cls.__module__])
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node not in notes and node.id in space:
            yield node.id, space[node.id]


def is_whole(recording: Recording, cls: type, is_own: Callable[[type], bool]) -> bool:
    """Returns whether a file can have all that the text of a class names.

    Args:
        recording: What the source did.
        cls: The class.
        is_own: Returns whether a class is one of the source.
    """
    values = [x for base in cls.__mro__[:-1] if is_own(base) for _, x in names_in(base)]
    return all(
        isinstance(x, PLAIN)
        or is_standard(getattr(inspect.getmodule(x), "__name__", ""))
        or (isinstance(x, type) and is_own(x))
        or recording.function_of(x) is not None
        for x in values
    )


def in_defaults(recording: Recording, item: type | Function) -> Iterator[Any]:
    """Yields the classes and functions that defaults of a function, or of methods, name."""
    for function in recording.functions:
        if item not in (function, function.owner):
            continue
        args = function.tree.args
        for default in (*args.defaults, *filter(None, args.kw_defaults)):
            for node in ast.walk(default):
                name = node.id if isinstance(node, ast.Name) else ""
                value = function.target.__globals__.get(name)
                yield value if isinstance(value, type) else recording.function_of(value)
