"""Results of parts that only some have: `residual`, which is `x` without a `downsample`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fmapper.translation.code import Swap, text
from fmapper.translation.merging.numbers import mask_numbers


@dataclass(frozen=True, slots=True)
class Bypass:
    """How the statements of a variant without a part are written with its result.

    Attributes:
        at: The index of the statement that sets the result.
        result: The result.
        other: What it is without the part.
        renamed: Indices of statements -> which of the names in them are the result.
    """

    at: int
    result: str
    other: str
    renamed: tuple[tuple[int, frozenset[int]], ...]

    def rewrite(self, lines: Sequence[str]) -> list[str]:
        """Returns the statements, one more than before."""
        found = list(lines)
        for index, places in self.renamed:
            tree = ast.parse(found[index])
            for place, one in enumerate(_names(tree)):
                if place in places:
                    one.id = self.result
            found[index] = text(tree)
        found.insert(self.at, f"{self.result} = {self.other}")
        return found


def find(part: str, having: Sequence[str], lacking: Sequence[str]) -> Bypass | None:
    """Returns how statements without a part are written like those with it.

    Args:
        part: The attribute.
        having: The statements of a submodule that has it.
        lacking: Those of one that has not.
    """
    at = next((i for i, line in enumerate(having) if f"self.{part}(" in line), None)
    if at is None:
        return None
    statement = ast.parse(having[at]).body[0]
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return None
    result, called = statement.targets[0].id, statement.value
    every = [one.id for line in lacking for one in _names(ast.parse(line))]
    names = [one for line in having for one in _names(ast.parse(line))]
    is_once = sum(_is_set(one, result) for one in names) == 1
    if result in every or not is_once or not isinstance(called, ast.Call) or len(called.args) != 1:
        return None
    other = text(called.args[0])
    if not other.isidentifier():
        return None
    masked = [mask_numbers(ast.parse(line)) for line in lacking]
    renamed: dict[int, frozenset[int]] = {}
    for line in having[at + 1 :]:
        tree = ast.parse(line)
        places = frozenset(i for i, one in enumerate(_names(tree)) if one.id == result)
        plain = mask_numbers(Swap(result, other).visit(tree))
        if places and masked.count(plain) != 1:
            return None
        if places:
            renamed[masked.index(plain)] = places
    if not renamed:
        return None
    sets = [any(_is_set(one, other) for one in _names(ast.parse(line))) for line in lacking]
    first, last = min(renamed), max(renamed)
    begin = at if at <= first and not any(sets[at:last]) else first
    if any(sets[begin:last]):
        return None
    return Bypass(begin, result, other, tuple(renamed.items()))


def _names(tree: ast.AST) -> Iterator[ast.Name]:
    return (one for one in ast.walk(tree) if isinstance(one, ast.Name))


def _is_set(node: ast.Name, name: str) -> bool:
    return node.id == name and isinstance(node.ctx, ast.Store)
