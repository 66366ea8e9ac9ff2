"""The lists of equal blocks that become one module with stacked arrays, called by a scan."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.translation.code import attribute, text
from fmapper.translation.scans.loop import Loop, NotAScanError, loops_in, owners_of, read_loop
from fmapper.translation.scans.states import begin_apart, collect_states, part_nested
from fmapper.translation.units import Unit, is_own

if TYPE_CHECKING:
    from fmapper.translation.places import Node

Lines = Sequence[tuple[tuple[str, ...], list[str]]]  # of each method: its parameters, statements


class Scans:
    """Decides which lists of blocks are scanned, and rewrites the loops over them.

    Args:
        draft: The writer of the file.
        wanted: Whether there are any.

    Attributes:
        are_wanted: Whether there are any.
        counts: The lists that are scanned -> how many blocks they have.
        refused: The other lists of several blocks -> the reason.
    """

    def __init__(self, draft: Any, *, wanted: bool) -> None:
        self._draft = draft
        self.are_wanted = wanted
        self.counts: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self._lines: dict[str, list[tuple[tuple[str, ...], list[str]]]] = {}

    def table(self) -> dict[str, int]:
        """Returns the scanned lists by their places in the file, outer ones first."""
        place = self._draft.place
        return {".".join(place(path)): count for path, count in sorted(self.counts.items())}

    def by_state_name(self) -> dict[str, int]:
        """Returns the scanned lists by their names in `state`."""
        name = self._draft.dialect.state_name
        return {name(self._draft, path): count for path, count in self.counts.items()}

    def join_path(self, path: str) -> str:
        """Returns a path without the indices of blocks that are one module."""
        steps = path.split(".")
        kept = [s for at, s in enumerate(steps) if ".".join(steps[:at]) not in self.counts]
        return ".".join(kept)

    def reasons(self) -> dict[str, str]:
        """Returns the lists that are not scanned with the reasons; those of equal parts once."""
        return {re.sub(r"\b\d+\b", "*", path): reason for path, reason in self.refused.items()}

    def refuse_none(self) -> None:
        """Raises where a scan was asked for, and there is none.

        Raises:
            ConversionError: There is none; says why.
        """
        if not self.are_wanted or self.counts:
            return
        told = "; ".join(f"{path}: {reason}" for path, reason in self.reasons().items())
        raise ConversionError(
            f"{self._draft.program.name or 'the model'} has no blocks that a scan can call "
            f"({told or 'there is no list of submodules'}). Translate it without scan=True (--scan)"
        )

    def decide(self, node: Node, made: Mapping[str, ast.expr]) -> bool:
        """Returns whether a list is scanned.

        Args:
            node: The list.
            made: The code that makes each instance of a class of the file.
        """
        if node.path in self.counts:
            return True
        arrays = any(child.array for child in node.children.values())
        is_list = len(node.children) > 1 and not arrays
        if not self.are_wanted or node.path in self.refused or not is_list:
            return False
        self.counts[node.path] = len(node.children)  # lists in one loop ask each other
        try:
            self._check_parts(node, made)
            self._check_arrays(node)
            self._check_uses(node, made)
            self._check_calls(node)
        except NotAScanError as error:
            del self.counts[node.path]
            self.refused[node.path] = str(error)
            return False
        return True

    def lines_of(self, node: Node) -> Lines:
        """Returns the parameters and the statements of each method of a submodule, with loops."""
        if node.path not in self._lines:
            found = []
            for _, body in self._draft.bodies.get(node.path, []):
                lines = body.lines()
                if self.are_wanted:
                    lines = collect_states(begin_apart(part_nested(lines)))
                    lines = self._draft.with_loops(node, lines)
                found.append((body.parameters, lines))
            self._lines[node.path] = found
        return self._lines[node.path]

    def rewrite(self, node: Node, made: Mapping[str, ast.expr]) -> list[list[str]]:
        """Returns the statements of each method, with scans in the place of loops.

        Args:
            node: The submodule.
            made: The code that makes each instance of a class of the file.
        """
        return [
            self._rewrite(node, parameters, lines, made)
            for parameters, lines in self.lines_of(node)
        ]

    def _rewrite(
        self, node: Node, parameters: Sequence[str], lines: list[str], made: Mapping[str, ast.expr]
    ) -> list[str]:
        lists = dict(self._lists_in(node)) if self.are_wanted else {}
        found = list(lines)
        at = 0
        while at < len(found):
            loop = loops_in(found[at]) if lists else None
            held = [lists.get(code) for code in owners_of(loop)] if loop is not None else []
            if held and all(one is not None and self.decide(one, made) for one in held):
                assert held[0] is not None
                count = self.counts[held[0].path]
                read = replace(read_loop(found, at, _plain(parameters)), count=count)
                new = self._draft.dialect.scan(read)
                kept = [line for line in found[:at] if line not in _beginnings(read)]
                found[: at + 1] = [*kept, *new]
                at = len(kept) + len(new) - 1
            at += 1
        return found

    def takes_sequence(self, units: Sequence[Unit], sequences: Collection[str]) -> bool:
        """Returns whether the calls of a sequence become those of its parts, to be scanned.

        Args:
            units: The calls.
            sequences: The sequences that stay.
        """
        types = self._draft.program.types
        paths = {step.path for unit in units for step in unit.steps if isinstance(step, Unit)}
        return (
            self.are_wanted
            and len(paths) > 1
            and len({types.get(path) for path in paths}) == 1
            and all(one.parent is not None and one.parent.path not in sequences for one in units)
        )

    # --- what must be true --------------------------------------------------------------------

    def _check_parts(self, node: Node, made: Mapping[str, ast.expr]) -> None:
        indices = sorted(map(int, node.children))
        if indices != [*range(len(indices))]:
            raise NotAScanError("some of its parts are not called")
        codes = dict.fromkeys(
            text(self._draft._make(child, made)) for child in node.children.values()
        )
        if len(codes) > 1:
            one, other, *_ = codes
            raise NotAScanError(f"its parts differ: {_short(one)} and {_short(other)}")

    def _check_arrays(self, node: Node) -> None:
        """Checks that the arrays of the parts have equal shapes, and are trained alike."""
        program = self._draft.program
        arrays = {**program.parameters, **program.buffers}
        kinds: dict[str, set[tuple[object, ...]]] = {}
        targets = []
        for path, (target, order) in self._draft._arrays().items():
            if not path.startswith(f"{node.path}."):
                continue
            targets.append(target)
            array = arrays.get(target)
            place = path.removeprefix(f"{node.path}.").partition(".")[2]
            kinds.setdefault(place, set()).add(
                (
                    target in program.parameters,
                    target in program.frozen,
                    target in program.transient,
                    order,
                    array is not None and (tuple(array.shape), str(array.dtype)),
                )
            )
        for place, found in kinds.items():
            if len(found) > 1:
                raise NotAScanError(f"{place} differs in its shape, or in whether it is trained")
        if not targets:
            raise NotAScanError("its parts hold no arrays")
        if len({*targets}) < len(targets):
            raise NotAScanError("its parts share arrays")

    def _check_calls(self, node: Node) -> None:
        """Checks that all parts take and give arrays of the same shapes and dtypes."""
        structure = self._draft.structure
        known: dict[str, list[Unit]] = {}
        for unit in structure.root.units():
            if unit.path.rpartition(".")[0] == node.path:
                known.setdefault(unit.path, []).append(unit)

        def shapes(unit: Unit) -> tuple[frozenset[Any], frozenset[Any]]:
            given = [value for value in unit.given if not is_own(structure, unit, value)]
            return (
                frozenset(structure.values.get(value) for value in given),
                frozenset(structure.values.get(value) for value in unit.gives),
            )

        if len({tuple(map(shapes, units)) for units in known.values()}) > 1:
            raise NotAScanError("its parts take or give arrays of different shapes or dtypes")

    def _check_uses(self, node: Node, made: Mapping[str, ast.expr]) -> None:
        """Checks that a list is used by loops over the whole of it alone."""
        count = 0
        for owner in self._owners(node):
            lists = dict(self._lists_in(owner))
            code = next(code for code, one in lists.items() if one is node)
            for parameters, lines in self.lines_of(owner):
                for at, line in enumerate(lines):
                    uses = _uses(line, code)
                    loop = loops_in(line)
                    if not uses:
                        continue
                    if loop is None or uses > 1:
                        raise NotAScanError(f"{_short(line)} is not a loop over all of them")
                    read_loop(lines, at, _plain(parameters))
                    self._check_owners(loop, code, lists, made)
                    count += 1
            if any(_uses(line, code) for line in self._draft._ties(owner)):
                raise NotAScanError("one of its parts is used elsewhere, too")
        if not count:
            raise NotAScanError("its parts are not called in a loop")

    def _check_owners(
        self, loop: ast.For, code: str, lists: Mapping[str, Node], made: Mapping[str, ast.expr]
    ) -> None:
        owners = owners_of(loop)
        if code not in owners:
            raise NotAScanError(f"only some of its parts are in the loop over {owners[0]}")
        for other in owners:
            if other not in lists or not self.decide(lists[other], made):
                raise NotAScanError(f"its loop is over {other}, too, which is not scanned")

    def _owners(self, node: Node) -> Iterator[Node]:
        """Yields the submodules that a list is in and that have methods."""
        one = self._draft.root
        steps = node.path.split(".")
        for step in [*steps, ""]:
            if one is node:
                return
            if one.path in self._draft.bodies:
                yield one
            one = one.children[step]

    def _lists_in(self, node: Node) -> Iterator[tuple[str, Node]]:
        """Yields the lists in a submodule, with their code there."""
        start = len(node.path) + bool(node.path)

        def visit(one: Node) -> Iterator[tuple[str, Node]]:
            for child in one.children.values():
                if self._draft._is_list(child):
                    yield attribute("self", child.path[start:]), child
                yield from visit(child)

        yield from visit(node)


def _beginnings(loop: Loop) -> set[str]:
    """Returns the statements that begin the lists of results, which a scan needs no more."""
    return {f"{name} = []" for name in loop.begun}


def _plain(parameters: Sequence[str]) -> list[str]:
    return [name.partition("=")[0].lstrip("*") for name in parameters]


def _uses(line: str, code: str) -> int:
    """Counts how often a statement names a part of the model."""
    if code not in line:
        return 0
    nodes = ast.walk(ast.parse(line))
    return sum(
        isinstance(one, ast.Attribute | ast.Subscript) and text(one) == code for one in nodes
    )


def _short(code: str) -> str:
    first = " ".join(code.split())
    return first if len(first) <= _WIDEST else f"{first[:_WIDEST]} ..."


_WIDEST = 60
