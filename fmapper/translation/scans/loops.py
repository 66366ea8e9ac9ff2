"""Loops over the parts of a list in the place of statements that are alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from fmapper.translation.code import identifier
from fmapper.translation.naming import singular
from fmapper.translation.scans.sums import begin_sums

_LONGEST = 24  # statements of an iteration
_INDEX = re.compile(r"self((?:\.\w+|\[\d+\])*\.\w+)\[(\d+)\]")
_INNER = re.compile(r"self((?:\.\w+|\[\d+\])*\.\w+\[\d+\])\[(\d+)\]")  # of lists in lists


def with_loops(
    lines: list[str],
    lengths: dict[str, int],
    titles: Mapping[str, Sequence[str]] | None = None,
    *,
    has_sums: bool = True,
) -> list[str]:
    """Writes repeated statements on the parts of a list as a loop.

    Args:
        lines: The statements of a function.
        lengths: The lists, as `self.layers` -> how many parts they have.
        titles: What the class of each of their parts is called.
        has_sums: Whether a sum that the iterations add to may begin with a number.
    """
    titles = titles or {}
    found = _with_end(lines, lengths, titles)
    for begun in begin_sums(lines) if has_sums else ():
        other = _with_end(begun, lengths, titles)
        if _count_lines(other) < _count_lines(found):
            found = other
    return found


def _count_lines(lines: Sequence[str]) -> int:
    return sum(line.count("\n") + 1 for line in lines)


def _with_end(
    lines: list[str], lengths: dict[str, int], titles: Mapping[str, Sequence[str]]
) -> list[str]:
    """Writes loops, with what is returned as the result of the last step of one."""
    *_, before, last = "", "", *lines
    target, code = before.partition(" = ")[0], last.removeprefix("return ")
    if code != last and target.isidentifier() and _INDEX.search(code) and _INDEX.search(before):
        whole = _loops([*lines[:-1], f"{target} = {code}", f"return {target}"], lengths, titles)
        if len(whole) < len(lines):
            return whole
    return _loops(lines, lengths, titles)


def _loops(
    lines: list[str], lengths: dict[str, int], titles: Mapping[str, Sequence[str]]
) -> list[str]:
    found: list[str] = []
    lines = list(lines)
    at = 0
    while at < len(lines):
        run = _run_at(lines, at, titles)
        for rewritten in _with_first_alike(lines, at) if run is None else ():
            run = _run_at(rewritten, at + 1, titles)
            if run is not None:
                lines = rewritten
                found.append(lines[at])
                at += 1
                break
        if run is None:
            found.append(lines[at])
            at += 1
            continue
        period, count, first, owners = run
        last = at + period * count
        if period == 1 and all(first + count == lengths.get(one, 0) - 1 for one in owners):
            parted = _last_apart(lines[last - 1], lines[last : last + 1])
            lines[last : last + 1] = parted
            count += len(parted) > 1
        found += _loop(lines[at : at + period], owners, first, count, lengths, titles)
        at += period * count
    return found


def _last_apart(before: str, after: list[str]) -> list[str]:
    """Extracts the last step of a loop from the statement that uses its result.

    Examples:
        >>> _last_apart("x = self.layers[1](x)", ["return self.head(self.layers[2](x))"])
        ['x = self.layers[2](x)', 'return self.head(x)']
    """
    step = _shift([before], 1)[0]
    target, _, code = step.partition(" = ")
    if not after or not target.isidentifier() or after[0].count(code) != 1 or after[0] == step:
        return after
    rest = after[0].replace(code, "\0")
    if re.search(rf"(?<![.\w]){target}\b", rest.partition(" = ")[2] or rest):
        return after
    return [step, rest.replace("\0", target)]


def _run_at(
    lines: list[str], at: int, titles: Mapping[str, Sequence[str]]
) -> tuple[int, int, int, list[str]] | None:
    """Finds repeated statements: length, count, first index, and lists."""
    for period, index in itertools.product(range(1, _LONGEST + 1), (_INDEX, _INNER)):
        group = lines[at : at + period]
        if len(group) < period:
            return None
        found = [m for line in group for m in index.finditer(line)]
        if not found or (not index.search(group[0]) and period == 1):
            continue
        indices = {int(m[2]) for m in found}
        if len(indices) != 1:
            continue
        first = indices.pop()
        count = 1
        while _shift(group, count, index) == lines[at + count * period : at + (count + 1) * period]:
            count += 1
        owners = list(dict.fromkeys(f"self{m[1]}" for m in found))
        if count > 1 and all(_is_one_kind(titles.get(one, ()), first, count) for one in owners):
            return period, count, first, owners
    return None


def _is_one_kind(titles: Sequence[str], first: int, count: int) -> bool:
    """Returns whether parts are all that a list has, or of one class."""
    return count >= len(titles) - 1 or len({*titles[first : first + count]}) < 2


def _with_first_alike(lines: list[str], at: int) -> Iterator[list[str]]:
    """Yields statements with the first iteration of a loop written like the later ones."""
    if not _INDEX.search(lines[at]):
        return
    for period in range(1, _LONGEST + 1):
        begun = _as_begun(*lines[at : at + period + 1 : period])
        if begun:
            yield [*lines[:at], *begun, *lines[at + 1 :]]


def _as_begun(first: str, later: str = "") -> list[str]:
    """Rewrites the first statement of a loop like that of the next iteration."""
    target, equals, code = first.partition(" = ")
    if not equals or not target.isidentifier():
        return []
    wanted = _shift([later], -1)[0].partition(" = ")[2]
    if not later.startswith(f"{target} = ") or code == wanted:
        return []
    words = set(re.findall(r"(?<![.\w])[a-z_]\w*\b(?!\s*=)", code))
    for other in sorted(words - {"self"}) if target not in words else ():
        if re.sub(rf"(?<![.\w]){other}\b(?!\s*=)", target, code) == wanted:
            return [f"{target} = {other}", f"{target} = {wanted}"]
    return []


def _shift(group: list[str], by: int, index: re.Pattern[str] = _INDEX) -> list[str]:
    return [index.sub(lambda m: f"self{m[1]}[{int(m[2]) + by}]", line) for line in group]


def _loop(
    group: list[str],
    owners: list[str],
    first: int,
    count: int,
    lengths: dict[str, int],
    titles: Mapping[str, Sequence[str]],
) -> list[str]:
    used = set(re.findall(r"\w+", " ".join(group)))
    variables = []
    for owner in owners:
        plural = re.sub(r"\[\d+\]$", "", owner.rpartition(".")[2])
        variable = identifier(singular(plural, titles.get(owner, [""])[0]), used)
        used.add(variable)
        variables.append(variable)
    sources = [_slice(owner, first, first + count, lengths.get(owner, -1)) for owner in owners]
    over = sources[0] if len(sources) == 1 else f"zip({', '.join(sources)}, strict=True)"
    lines = [f"for {', '.join(variables)} in {over}:"]
    for statement in group:
        line = statement
        for owner, variable in zip(owners, variables, strict=True):
            line = line.replace(f"{owner}[{first}]", variable)
        lines.append(f"    {line}")
    return ["\n".join(lines)]


def _slice(owner: str, first: int, end: int, length: int) -> str:
    """Returns the code for a part of a list, or for all of it."""
    bounds = f"{first or ''}:{'' if end == length else end}"
    return owner if bounds == ":" else f"{owner}[{bounds}]"
