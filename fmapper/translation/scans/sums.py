"""Sums of what each step of a loop gives, as they are begun."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_SUM = re.compile(r"(\w+) = (\w+) \+ (\w+)")
_PART = re.compile(r"(self(?:\.\w+|\[\d+\])*\.\w+)\[(\d+)\]\(")


def begin_sums(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yields statements whose first ones read like later ones, where a sum grows step by step.

    The sum begins with 0, or else with the first value; what the last step gives and nobody reads
    has a name, as in the other steps.

    Examples:
        >>> lines = ["x, y = self.h[0](x)", "x, y_2 = self.h[1](x)", "s = y + y_2"]
        >>> lines += ["_, y = self.h[2](x)", "s = s + y", "return s"]
        >>> print("; ".join(next(begin_sums(lines))))
        s = 0; x, y = self.h[0](x); s = s + y; x, y = self.h[1](x); s = s + y; \
x, y = self.h[2](x); s = s + y; return s
    """
    known = [*lines]
    alike = _with_names(known)
    for from_zero in (True, False):
        found = alike
        for at in reversed(range(len(alike))):
            found = _begin(found, at, from_zero=from_zero) or found
        if found != known:
            yield found


def _with_names(lines: list[str]) -> list[str]:
    """Names what the parts of a list give and nobody reads as the part before gives it."""
    found = [*lines]
    before: dict[str, tuple[int, list[str]]] = {}  # lists -> the last index, and what it gave
    for at, line in enumerate(lines):
        targets, code = _split(line)
        part = _PART.match(code)
        if part is None:
            continue
        index, names = before.get(part[1], (-1, []))
        if index == int(part[2]) - 1 and len(names) == len(targets):
            targets = [
                known if name == "_" and _is_dead(known, lines[at + 1 :]) else name
                for name, known in zip(targets, names, strict=True)
            ]
            if len({*targets} - {"_"}) == len(targets) - targets.count("_"):
                found[at] = f"{', '.join(targets)} = {code}"
        before[part[1]] = int(part[2]), _split(found[at])[0]
    return found


def _begin(lines: list[str], at: int, *, from_zero: bool) -> list[str] | None:
    """Returns the statements with a sum of two values begun with the first one, or with 0."""
    found = _SUM.fullmatch(lines[at])
    total, first, second = found.groups() if found else ("", "", "")
    if len({total, first, second}) < 3 or f"{total} = {total} + " not in "\n".join(lines[at:]):
        return None
    made, then = _maker(lines, at, first), _maker(lines, at, second)
    if not 0 <= made < then:
        return None
    inner = [*lines[made + 1 : then], _split(lines[then])[1], *lines[then + 1 : at]]
    if any(_reads(name, line) for name in (total, first, second) for line in inner):
        return None
    if _reads(total, lines[made]) or not all(
        _is_dead(name, lines[at + 1 :]) for name in (first, second)
    ):
        return None
    begun = [_rename(lines[made], first, total)]
    if from_zero:
        begun = [f"{total} = 0", lines[made], f"{total} = {total} + {first}"]
    between = [*lines[made + 1 : then], _rename(lines[then], second, first)]
    return [
        *lines[:made], *begun, *between, *lines[then + 1 : at],
        f"{total} = {total} + {first}", *lines[at + 1 :],
    ]  # fmt: skip


def _maker(lines: Sequence[str], at: int, name: str) -> int:
    """Returns where a variable was last assigned; -1 where that is not known."""
    for i in reversed(range(at)):
        if name in _split(lines[i])[0]:
            return i
        if "\n" in lines[i] and _reads(name, lines[i]):
            return -1
    return -1


def _split(line: str) -> tuple[list[str], str]:
    """Returns the variables that a statement assigns, and its code."""
    target, equals, code = line.partition(" = ")
    names = target.split(", ")
    is_plain = equals and "\n" not in line and all(name.isidentifier() for name in names)
    return (names, code) if is_plain else ([], line)


def _rename(line: str, name: str, other: str) -> str:
    targets, code = _split(line)
    return f"{', '.join(other if one == name else one for one in targets)} = {code}"


def _reads(name: str, line: str) -> bool:
    return re.search(rf"(?<![.\w]){name}\b", line) is not None


def _is_dead(name: str, after: Sequence[str]) -> bool:
    """Returns whether nobody reads a variable before it is assigned again."""
    for line in after:
        targets, code = _split(line)
        if _reads(name, code):
            return False
        if name in targets:
            return True
    return True
