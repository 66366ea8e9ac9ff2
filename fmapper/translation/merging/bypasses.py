"""Results of parts that only some have: `residual`, which is `x` without a `downsample`."""

from __future__ import annotations

import ast
import re
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
        later: What is called like `other` from where it is set: nothing else reads that then.
    """

    at: int
    result: str
    other: str
    renamed: tuple[tuple[int, frozenset[int]], ...]
    later: str = ""

    def rewrite(self, lines: Sequence[str]) -> list[str]:
        """Returns the statements, one more than before."""
        found = list(lines)
        for index, places in self.renamed:
            tree = ast.parse(found[index])
            for place, one in enumerate(_names(tree)):
                if place in places:
                    one.id = self.result
            found[index] = text(tree)
        if self.later:
            found = [text(Swap(self.later, self.other).visit(ast.parse(line))) for line in found]
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
    return _keep(at, result, other, having, lacking) or _rename(at, result, other, having, lacking)


def _keep(
    at: int, result: str, other: str, having: Sequence[str], lacking: Sequence[str]
) -> Bypass | None:
    """Returns the way where all other names stay."""
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


def _rename(
    at: int, result: str, other: str, having: Sequence[str], lacking: Sequence[str]
) -> Bypass | None:
    """Returns the way where `x_2` becomes `x`, which was in use for as long as nothing kept it."""
    names = [[*_names(ast.parse(line))] for line in lacking]
    wanted = re.compile(rf"{re.escape(other)}_\d+")
    set_at = [
        (i, one.id)
        for i, row in enumerate(names)
        for one in row
        if isinstance(one.ctx, ast.Store) and wanted.fullmatch(one.id)
    ]
    later = {name for _, name in set_at}
    of_both = [i for i, row in enumerate(names) if {one.id for one in row} & {other, *later}]
    if len(later) != 1 or any("\n" in lacking[i] for i in of_both):
        return None
    if any(_is_set(one, other) for row in names for one in row):
        return None
    if any(isinstance(one, ast.Lambda) for i in of_both for one in ast.walk(ast.parse(lacking[i]))):
        return None  # its `x` may be its own
    begin = set_at[0][0]
    renamed = {}
    for i, row in enumerate(names[begin + 1 :], begin + 1):
        if places := frozenset(at for at, one in enumerate(row) if one.id == other):
            renamed[i] = places
    found = Bypass(min(at, begin), result, other, tuple(renamed.items()), later.pop())
    masked = {mask_numbers(ast.parse(line)) for line in having}
    lines = found.rewrite(lacking)
    del lines[found.at]
    alike = [mask_numbers(ast.parse(lines[i])) in masked for i in of_both]
    return found if renamed and all(alike) else None


def _names(tree: ast.AST) -> Iterator[ast.Name]:
    return (one for one in ast.walk(tree) if isinstance(one, ast.Name))


def _is_set(node: ast.Name, name: str) -> bool:
    return node.id == name and isinstance(node.ctx, ast.Store)
