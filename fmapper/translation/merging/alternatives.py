"""Parts that are of two kinds: one class makes one or the other, `silu() if use_silu else relu`.

The source's constructor has such a condition, or makes what its argument names; a flag says which.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fmapper.translation.code import text
from fmapper.translation.constructors.differences import find_differences
from fmapper.translation.merging.align import Defaults, copy_aligned, rows_by_name
from fmapper.translation.merging.numbers import mask_numbers, numbers_in

if TYPE_CHECKING:
    from fmapper.translation.classes import Sketch

_KINDS = 2
_SEQUENCES = ("Sequential", "nnx.List", "nn.Sequential", "nn.ModuleList")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def choose_parts(sketches: Sequence[Sketch], defaults: Defaults, *, only_told: bool) -> bool:
    """Writes parts that are of two kinds as one that a flag decides on.

    Args:
        sketches: Those of one class of the source, with parts of the same names; they change.
        defaults: Classes of the target -> what their keywords are where they are not given.
        only_told: Whether only items of sequences, and what a variable of the source decides on.

    Returns:
        Whether all of their parts have one form now; they are as they were otherwise.
    """
    group = _Group(sketches, find_differences(sketches), defaults, only_told)
    changed: list[list[tuple[str, ast.expr]]] = [[] for _ in sketches]
    for row in zip(*(sketch.made for sketch in sketches), strict=True):
        attr = row[0][0]
        path = "" if sketches[0].is_sequence else attr
        nodes = group.combine([node for _, node in row], path)
        if nodes is None or any(attr in sketch.arrays for sketch in sketches):
            return False
        for made, node in zip(changed, nodes, strict=True):
            made.append((attr, node))
    for sketch, made in zip(sketches, changed, strict=True):
        sketch.made = made
    return True


def form_of_parts(sketch: Sketch) -> tuple[object, ...]:
    """Returns what sketches have in common of which parts may be of two kinds."""
    return tuple((attr, _kind(node) if _is_sequence(node) else "") for attr, node in sketch.made)


@dataclass(frozen=True, slots=True)
class _Group:
    """Submodules of one class of the source.

    Attributes:
        sketches: What they need.
        flags: The flags of each.
        defaults: Classes of the target -> what their keywords are where they are not given.
        only_told: Whether only items of sequences, and what a variable of the source decides on.
    """

    sketches: Sequence[Sketch]
    flags: Sequence[Mapping[str, bool]]
    defaults: Defaults
    only_told: bool

    def combine(
        self, nodes: Sequence[ast.expr], path: str, *, is_item: bool = False
    ) -> list[ast.expr] | None:
        """Returns what makes a part for each, in one form but for numbers; None without one.

        Args:
            nodes: What each submodule has there.
            path: The part, as its owner calls it.
            is_item: Whether it is an item of a sequence.
        """
        nodes = copy_aligned(nodes, self.defaults)
        if len({*map(mask_numbers, nodes)}) == 1:
            return nodes
        kinds = [*dict.fromkeys(map(_kind, nodes))]
        calls = [node for node in nodes if isinstance(node, ast.Call) and _is_sequence(node)]
        if len(kinds) == _KINDS:
            return self._decide(nodes, kinds, path, is_item=is_item)
        if len(kinds) > 1 or len(calls) < len(nodes):
            return None
        for at, row in enumerate(zip(*(call.args for call in calls), strict=True)):
            items = self.combine(row, f"{path}.{at}" if path else str(at), is_item=True)
            if items is None:
                return None
            for call, item in zip(calls, items, strict=True):
                call.args[at] = item
        return nodes

    def _decide(
        self, nodes: Sequence[ast.expr], kinds: Sequence[str], path: str, *, is_item: bool
    ) -> list[ast.expr] | None:
        """Returns parts of two kinds below a flag, which names the first or is of the source."""
        having = {one: [at for at, node in enumerate(nodes) if _kind(node) == one] for one in kinds}
        forms: dict[str, list[ast.expr]] = {}
        for kind, places in having.items():
            own = [[each[at] for at in places] for each in (self.sketches, self.flags)]
            inner = _Group(own[0], own[1], self.defaults, self.only_told)  # type: ignore[arg-type]
            found = inner.combine([nodes[at] for at in places], path, is_item=is_item)
            if found is None:
                return None
            forms[kind] = _everywhere(found, places, self.sketches)
        may_guess = is_item or not self.only_told
        decided = self._flag_for(having[kinds[0]], path, may_guess=may_guess)
        if decided is None:
            if not may_guess:
                return None
            named = [one for one in kinds if _snake(one).isidentifier()]
            if not named or len({*map(_snake, kinds)}) < _KINDS:
                return None
            first = next((one for one in named if one.endswith(")")), named[0])
            decided = f"has_{_snake(first)}", [at in having[first] for at in range(len(nodes))]
        name, row = decided
        then, other = kinds if (0 in having[kinds[0]]) == row[0] else reversed(kinds)
        tests = [ast.parse(f"flag({name}={is_true})", mode="eval").body for is_true in row]
        rows = zip(tests, forms[then], forms[other], strict=True)
        return [ast.IfExp(test, first, second) for test, first, second in rows]

    def _flag_for(
        self, having: Sequence[int], path: str, *, may_guess: bool
    ) -> tuple[str, list[bool]] | None:
        """Returns a flag that is true or false for parts of one kind alone, and its values."""
        is_first = [at in having for at in range(len(self.sketches))]
        is_other = [not one for one in is_first]
        rows = {name: [one[name] for one in self.flags] for name in self.flags[0]}
        fits = [name for name, row in rows.items() if row in (is_first, is_other)]
        told = (sketch.code.get(f"{path}.if") for sketch in self.sketches)
        wanted = next(filter(None, told), "")
        others = fits if may_guess else ()
        name = next((one for one in (wanted, f"has_{wanted}", *others) if one in fits), None)
        return None if name is None else (name, rows[name])


def _everywhere(
    found: Sequence[ast.expr], places: Sequence[int], sketches: Sequence[Sketch]
) -> list[ast.expr]:
    """Returns parts of one kind for all sketches, those of others with numbers of these."""
    own = dict(zip(places, found, strict=True))
    numbers = [[one.value for one, _ in numbers_in(node)] for node in found]
    nodes = []
    for at in range(len(sketches)):
        node = own.get(at) or copy.deepcopy(found[0])
        for (constant, _), values in zip(numbers_in(node), zip(*numbers, strict=True), strict=True):
            if at not in own:
                alike = rows_by_name(values, sketches, places)
                constant.value = alike[0][at] if alike else values[0]
        nodes.append(node)
    return nodes


def _is_sequence(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and text(node.func) in _SEQUENCES


def _kind(node: ast.expr) -> str:
    """Returns what parts of one kind have in common: what makes them, and of how many items."""
    if isinstance(node, ast.Call):
        return f"{text(node.func)}({len(node.args)})"
    return mask_numbers(node)


def _snake(kind: str) -> str:
    name = kind.partition("(")[0].rpartition(".")[2]
    return _WORD.sub("_", name).lower()
