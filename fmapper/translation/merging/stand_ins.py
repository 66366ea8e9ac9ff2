"""Arguments for which others stand in: `key_value_states`, which is else `hidden_states`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fmapper.translation.code import Swap, text

if TYPE_CHECKING:
    from fmapper.translation.merging.variants import Variant

_SIZE = re.compile(r"(\w+) = (\w+)\.shape\[(\d+)\]")
_SIZES = re.compile(r"(\w+(?:, \w+)+) = (\w+)\.shape(?:\[:\d+\])?")


@dataclass(frozen=True, slots=True)
class StandIn:
    """How the statements of one variant are written with an argument that may be None.

    Attributes:
        name: The argument.
        other: What it is else.
        sizes: The statements that tell its sizes.
        renamed: Statements on the other argument -> the same on this one.
    """

    name: str
    other: str
    sizes: tuple[str, ...]
    renamed: Mapping[str, str]

    def rewrite(self, lines: Sequence[str]) -> list[str]:
        """Returns the statements, the first of which gives the argument its value."""
        found = [self.renamed.get(line, line) for line in lines if line not in self.sizes]
        told = [i for i, line in enumerate(found) if _tells(line, self.other)]
        at = told[0] + 1 if told else 0
        head = f"if {self.name} is None:\n    {self.name} = {self.other}"
        found[at:at] = [head, *self.sizes]
        return found


def find(
    programs: Sequence[Sequence[str]], given: Sequence[frozenset[str]], optional: frozenset[str]
) -> list[StandIn] | None:
    """Returns how each variant is written with the argument that only some are given.

    Args:
        programs: The statements of each variant.
        given: The arguments of each.
        optional: Arguments that may be None, and are none of these.
    """
    every = frozenset.union(*given) - optional
    common = frozenset.intersection(*given)
    best: tuple[int, list[StandIn]] | None = None
    for name in sorted(every - common):
        for other in sorted(common - optional):
            found = _stand_in(name, other, programs, given)
            count = sum(len(one.renamed) for one in found or ())
            if found and (best is None or count > best[0]):
                best = count, found
    return best[1] if best else None


def drop_unused(variants: Sequence[Variant]) -> Sequence[Variant]:
    """Returns variants without an argument that others stand in for if all or none have it."""
    way = variants[0].stand_in
    if way is None or len({way.name in one.case.given for one in variants}) > 1:
        return variants
    cases = [replace(one.case, optional=one.case.optional - {way.name}) for one in variants]
    both = zip(variants, cases, strict=True)  # bypasses have places in the statements as they were
    plain = [replace(one, case=case, stand_in=None, bypasses=()) for one, case in both]
    return [replace(one, lines=one.own(one.sketches[0])) for one in plain]


def _stand_in(
    name: str, other: str, programs: Sequence[Sequence[str]], given: Sequence[frozenset[str]]
) -> list[StandIn] | None:
    having = [lines for lines, names in zip(programs, given, strict=True) if name in names]
    sizes = tuple(dict.fromkeys(x for lines in having for x in lines if _tells(x, name)))
    if any(_sets(x, name) or _sets(x, other) for lines in programs for x in lines):
        return None
    if any(_SIZE.fullmatch(one) is None for one in sizes):
        return None
    if any(one not in lines for lines in having for one in sizes):
        return None
    found = []
    for lines, names in zip(programs, given, strict=True):
        if name in names:
            found.append(StandIn(name, other, sizes, {}))
            continue
        renames = _renames(name, other, sizes, lines)
        if renames is None:
            return None
        named = {f"{other}.shape[{at}]": size for at, size in _sizes(other, lines).items()}
        table: dict[str, str] = {}
        for line in (x for group in having for x in group if x not in sizes):
            plain = _rename(line, renames, named)
            if plain != line and plain in lines:
                table.setdefault(plain, line)
        if not table or any(_rename(table[x], renames, named) != x for x in table):
            return None
        found.append(StandIn(name, other, sizes, table))
    return found


def _renames(
    name: str, other: str, sizes: Sequence[str], lines: Sequence[str]
) -> dict[str, str] | None:
    """Returns what the argument and its sizes are called in a variant that has the other alone."""
    found = {name: other}
    known = _sizes(other, lines)
    for line in sizes:
        told = _SIZE.fullmatch(line)
        if told is None or int(told[3]) not in known:
            return None
        found[told[1]] = known[int(told[3])]
    taken = {word for line in lines for word in re.findall(r"\w+", line)}
    return found if not taken & found.keys() else None


def _sizes(name: str, lines: Sequence[str]) -> dict[int, str]:
    """Returns the sizes of an array that have names, by their places."""
    known: dict[int, str] = {}
    for line in lines:
        if (several := _SIZES.fullmatch(line)) and several[2] == name:
            known |= dict(enumerate(several[1].split(", ")))
        if (one := _SIZE.fullmatch(line)) and one[2] == name:
            known[int(one[3])] = one[1]
    return known


def _rename(line: str, names: Mapping[str, str], sizes: Mapping[str, str]) -> str:
    """Returns a statement on other names, with the names of sizes that are read from an array."""
    tree: ast.AST = ast.parse(line)
    for old, new in names.items():
        tree = Swap(old, new).visit(tree)
    found = text(tree)
    if found == text(ast.parse(line)):
        return line
    return text(_Sizes(sizes).visit(tree))


class _Sizes(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        known = self._names.get(text(node))
        self.generic_visit(node)
        return ast.Name(known, ast.Load()) if known else node


def _tells(line: str, name: str) -> bool:
    found = _SIZE.fullmatch(line) or _SIZES.fullmatch(line)
    return found is not None and found[2] == name


def _sets(line: str, name: str) -> bool:
    return any(
        isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store)
        for one in ast.walk(ast.parse(line))
    )
