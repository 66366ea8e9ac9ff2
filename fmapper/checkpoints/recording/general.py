"""Merges rules for single layers into one rule: numbers that vary become captures."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fmapper.checkpoints.recording.steps import MAKE, NUMBER, OVER, Step
from fmapper.checkpoints.rules.naming import Drop, Rename
from fmapper.checkpoints.rules.rule import Rule, matches
from fmapper.errors import CheckpointError
from fmapper.tree.pattern import Pattern

_NUMBERS = re.compile(r"(\d+)")
_CAPTURES = "ijklmopqrst"


class _Group(NamedTuple):
    """Names of several steps of one kind.

    Attributes:
        rows: For each step, its sources and targets.
        sources: How many of the names are sources.
        numbers: The first and last number of a stack.
    """

    rows: list[tuple[str, ...]]
    sources: int
    numbers: tuple[int, int] | None = None


def rules_of(steps: Iterable[Step], names: Iterable[str]) -> tuple[list[Rule], dict[str, None]]:
    """Generalises steps to rules with the same effect; also returns the resulting names.

    Args:
        steps: The steps.
        names: The names of all arrays at the beginning.

    Raises:
        CheckpointError: The steps cannot be ordered.
    """
    live = dict.fromkeys(names)
    groups: dict[Any, list[Step]] = {}
    for step in sorted(steps, key=lambda step: step.depth):
        plain = tuple(_NUMBERS.sub("0", name) for name in (*step.sources, *step.targets))
        key = step.depth, step.kind, step.values, step.numbers, plain
        groups.setdefault(key, []).append(step)
    rules: list[Rule] = []
    for members in groups.values():
        first = members[0]
        rows = [(*step.sources, *step.targets) for step in members]
        group = _Group(rows, len(first.sources), first.numbers)
        after = dict(live)
        for step in members:
            for name in _expand(step.sources, step.numbers) if step.kind != "tie" else ():
                after.pop(name, None)
            after.update(dict.fromkeys(_expand(step.targets, step.numbers)))
        pair = None if first.kind == "constant" else _patterns(group, live, after)
        for old, new in [pair] if pair else [_exact(group, row, live, after) for row in rows]:
            rules.append(MAKE[first.kind](old, new, first.values))
        live = after
    return rules, live


def rename(names: Mapping[str, str], live: Collection[str]) -> list[Rule]:
    """Returns a rule that renames arrays, all at once.

    Args:
        names: The new name of each old one.
        live: The names of all arrays.
    """
    changed = {old: new for old, new in names.items() if old != new}
    after = {changed.get(name, name) for name in live}
    renames: dict[str, str] = {}
    for rows in _alike(changed.items()):
        group = _Group(rows, 1)
        pair = _patterns(group, live, after)
        for old, new in [pair] if pair else [_exact(group, row, live, after) for row in rows]:
            renames[old[0]] = new[0]
    return [Rename(renames)] if renames else []


def drop(names: Iterable[str], live: Collection[str]) -> list[Rule]:
    """Returns a rule that drops arrays."""
    dropped: list[str] = []
    for rows in _alike([(name,) for name in names]):
        pair = _patterns(_Group(rows, 1), live, ())
        exact = [_exact(_Group(rows, 1), row, live, ()) for row in rows] if not pair else [pair]
        dropped += [old[0] for old, _ in exact]
    return [Drop(dropped)] if dropped else []


def _alike(rows: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    groups: dict[Any, list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault(tuple(_NUMBERS.sub("0", name) for name in row), []).append(row)
    yield from groups.values()


Pair = tuple[tuple[str, ...], tuple[str, ...]]


def _expand(names: Iterable[str], numbers: tuple[int, int] | None) -> Iterator[str]:
    for name in names:
        if NUMBER in name and numbers:
            first, last = numbers
            yield from (name.replace(NUMBER, str(n)) for n in range(first, last + 1))
        else:
            yield name


def _exact(
    group: _Group, row: tuple[str, ...], live: Collection[str], after: Collection[str]
) -> Pair:
    """Returns patterns for the names of one step."""
    alone = group._replace(rows=[row])
    pair = _patterns(alone, live, after)
    if pair is None:
        raise CheckpointError(f"{row[0]!r} cannot be distinguished from similar names")
    return pair


def _patterns(group: _Group, live: Collection[str], after: Collection[str]) -> Pair | None:
    """Returns patterns that match all names of some steps and no others.

    Args:
        group: The names of the steps.
        live: The names of all arrays before the steps.
        after: Those after them, from which the inverse starts.
    """
    texts = [[_NUMBERS.split(name) for name in row] for row in group.rows]
    columns = {
        (at, place): tuple(row[at][place] for row in texts)
        for at, parts in enumerate(texts[0])
        for place in range(1, len(parts), 2)
    }
    names: dict[tuple[str, ...], str] = {}
    for column in columns.values():
        if len({*column}) > 1 and column not in names:
            if len(names) == len(_CAPTURES):
                return None
            names[column] = _CAPTURES[len(names)]
    for strict in (False, True):
        patterns = []
        for at, parts in enumerate(texts[0]):
            text = ""
            for place, part in enumerate(parts):
                column = columns.get((at, place), ())
                if column in names:
                    text += _capture(names[column], column, strict)
                else:
                    text += _literal(part, group.numbers, strict)
            patterns.append(text)
        pair = tuple(patterns[: group.sources]), tuple(patterns[group.sources :])
        if _is_right(group, pair, live, after):
            return pair
    return None


def _capture(name: str, column: Sequence[str], strict: bool) -> str:
    if not strict:
        return f"{{{name}}}"
    values = sorted({int(text) for text in column})
    if len({*map(str, values)} | {*column}) != len(values):  # with leading zeros
        return f"{{{name}:{'|'.join(dict.fromkeys(column))}}}"
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{name}:{values[0]}-{values[-1]}}}"
    return f"{{{name}:{'|'.join(map(str, values))}}}"


def _literal(text: str, numbers: tuple[int, int] | None, strict: bool) -> str:
    text = Pattern.escape(text)
    if NUMBER in text and numbers:
        first, last = numbers
        plain = first == 0 and not strict
        text = text.replace(NUMBER, f"{{{OVER}}}" if plain else f"{{{OVER}:{first}-{last}}}")
    return text


def _is_right(group: _Group, pair: Pair, live: Collection[str], after: Collection[str]) -> bool:
    """Returns whether patterns match exactly the group, on both ways, and determine its targets."""
    texts = (*pair[0], *pair[1])
    for at, text in enumerate(texts):
        wanted = {name for row in group.rows for name in _expand([row[at]], group.numbers)}
        names = live if at < group.sources else after
        if {name for name, _ in matches(text, names)} != wanted:
            return False
    return len({frozenset(Pattern(text).captures) - {OVER} for text in texts}) == 1
