"""Dicts in which calls keep arrays by a key: `if n not in self.tables: self.tables[n] = ...`.

In a file they are names of the function, which computes the array in each call: modules do not
keep arrays of calls there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Memo:
    """An entry of such a dict.

    Attributes:
        name: Its name in the file.
        value: What it is given.
    """

    name: str
    value: ast.expr


def memos_of(function: Any, recording: Any) -> dict[str, Memo]:
    """Returns the text of each such entry in a function -> the entry."""
    found: dict[str, Memo] = {}
    for node in function.nodes:
        entry = entry_given(node)
        if entry is None:
            continue
        table, place, value = entry
        tables = [x for x in function.nodes if _text(x) == _text(table)]
        entries = [x for x in function.nodes if _text(x) == _text(place)]
        keeps = [event.value for event in recording.events.get(table, ())]
        is_array = [recording.source.is_array(x.value) for x in recording.events.get(value, ())]
        # One in the condition, and each other one with that key.
        is_only_read = len(tables) == len(entries) + 1 and all(type(x) is dict for x in keeps)
        if keeps and is_only_read and is_array and all(is_array):
            found[_text(place)] = Memo(table.attr.lstrip("_"), value)
    return found


def entry_given(node: ast.AST) -> tuple[ast.Attribute, ast.Subscript, ast.expr] | None:
    """Returns the dict that a condition looks into, the entry that it makes, and its value."""
    match node:
        case ast.If(
            ast.Compare(key, [ast.NotIn()], [ast.Attribute() as table]),
            [ast.Assign([ast.Subscript(owner, other) as place], value)],
            [],
        ) if _text(owner) == _text(table) and _text(other) == _text(key):
            return table, place, value
    return None


def keys_of(function: Any, memos: dict[str, Memo]) -> Iterator[str]:
    """Yields the names of a function that nothing but keys of such entries reads."""
    places = [x for x in function.nodes if _text(x) in memos or entry_given(x) is not None]
    inside = {item for place in places for item in ast.walk(_without_value(place))}
    reads = [x for x in function.nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)]
    names = {x.id for x in reads if x in inside}
    yield from names - {x.id for x in reads if x not in inside}


def _without_value(node: Any) -> ast.AST:
    return node.test if isinstance(node, ast.If) else node


def _text(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.expr) else ""
