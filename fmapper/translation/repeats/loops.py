"""Loops in the place of statements that come again with other numbers and variables."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fmapper.translation.code import expr, identifier, replace_nodes, text
from fmapper.translation.merging.statements import Leaf, Line, read_lines
from fmapper.translation.naming import singular
from fmapper.translation.repeats.edges import may_have_more, with_whole_rounds
from fmapper.translation.repeats.rounds import Mismatch, Rounds

if TYPE_CHECKING:
    from fmapper.translation.functions.forms import Statement

_LONGEST = 40  # statements of a round
_MOST_TRIES = 100  # for a loop; unrolled code has hundreds of statements that are alike
_MOST_LINES = 600  # of a function that is searched
_MOST_LOOPS = 20
_MOST_SOURCES = 3  # that a loop goes through together
_LEAST = {2: 5}  # rounds -> the statements that each has at least; 1 for more rounds
_LEAST_WITH_MORE = {2: 3}  # the same, where parts of other rounds are before or after them
_OF_SLICE = re.compile(r"for .* in .*\w\[\d*:\d*\]")


def with_repeats(
    lines: Sequence[str],
    lengths: Mapping[str, int],
    titles: Mapping[str, Sequence[str]],
    known: Mapping[str, Statement],
    comments: dict[str, str],
    bare: Sequence[str] = (),
) -> list[str]:
    """Writes statements that come again as a loop, where they differ in numbers and variables.

    Args:
        lines: The statements of a function, with loops over lists of parts.
        lengths: Lists of parts, as `self.heads` -> how many parts they have.
        titles: The same -> what the classes of their parts are called.
        known: What is known of statements.
        comments: The comments on statements; those that change are added.
        bare: The statements without loops, from which there may be a longer one where one of those
            has a part of a list.

    Examples:
        >>> one = ["y = self.m[{0}](x[{0}])", "y = y.reshape(-1, 2)", "y = g(y * {1})"]
        >>> lines = [line.format(i, 8 * i + 8) for i in range(3) for line in one]
        >>> print(*with_repeats([*lines, "return y"], {"self.m": 3}, {}, {}, {}), sep="; ")
        for i, (one_m, n) in enumerate(zip(self.m, (8, 16, 24), strict=True)):
            y = one_m(x[i])
            y = y.reshape(-1, 2)
            y = g(y * n); return y
    """
    found = [*lines]
    for _ in range(_MOST_LOOPS if len(lines) <= _MOST_LINES else 0):
        rolled = _roll(found, lengths, titles, known, comments)
        if rolled is None:
            break
        found = rolled
    if bare and any(_OF_SLICE.match(line) for line in lines):
        more = {**comments}
        other = with_repeats(bare, lengths, titles, known, more)
        if _count_lines(other) < _count_lines(found):
            comments |= more
            return other
    return found


def _roll(
    lines: list[str],
    lengths: Mapping[str, int],
    titles: Mapping[str, Sequence[str]],
    known: Mapping[str, Statement],
    comments: dict[str, str],
) -> list[str] | None:
    """Rolls the first statements that come again; returns None where there are none."""
    try:
        read = read_lines(lines, known)
    except SyntaxError:
        return None
    tried = 0
    for place in _places([line.key for line in read]):
        at, period, count = place
        tries = [(lines, place)] if period >= _LEAST.get(count, 1) else []
        if may_have_more(read, place) and (more := with_whole_rounds(lines, place, known)):
            tries.append(more)
        tried += bool(tries)
        if tried > _MOST_TRIES:
            break
        best, least = None, 1 + (period == 1 and len({*lines[at : at + count]}) > 1)
        for written, where in tries:
            try:
                as_read = read if written is lines else read_lines(written, known)
                Rounds(as_read, *where).check_variables()  # before all is read anew, to be changed
                rounds = Rounds(read_lines(written, known), *where)
                rolled = _Loop(rounds, lengths, titles).write(comments)
            except Mismatch:
                continue
            saved = _count_lines(lines) - _count_lines(rolled)
            if saved >= least:
                best, least = rolled, saved
        if best is not None:
            return best
    return None


def _count_lines(statements: Sequence[str]) -> int:
    return len("\n".join(statements).splitlines())


def _places(keys: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yields where statements come again: the first, how many, and how often."""
    last = {key: at for at, key in enumerate(keys)}
    for at, key in enumerate(keys):
        if last[key] == at:
            continue
        for period in range(1, min(_LONGEST, (len(keys) - at) // 2) + 1):
            if keys[at + period] == key:
                count = _count(keys, at, period)
                if count > 1 and period >= _LEAST_WITH_MORE.get(count, 1):
                    yield at, period, count


def _count(keys: Sequence[str], at: int, period: int) -> int:
    """Returns how often statements come, one time after the other."""
    group, count = keys[at : at + period], 1
    while keys[at + count * period : at + (count + 1) * period] == group:
        count += 1
    return count


@dataclass
class _Loop:
    """The loop for rounds of statements.

    Attributes:
        rounds: Those.
        lengths: Lists of parts -> how many parts they have.
        titles: The same -> what the classes of their parts are called.
        sources: What it goes through -> the variable.
        has_index: Whether it counts.
    """

    rounds: Rounds
    lengths: Mapping[str, int]
    titles: Mapping[str, Sequence[str]]
    sources: dict[str, str] = field(default_factory=dict)
    has_index: bool = False
    _taken: set[str] = field(default_factory=set)

    def write(self, comments: dict[str, str]) -> list[str]:
        """Returns the statements of the function with the loop.

        Raises:
            Mismatch: It would do something else, or not be easy to read.
        """
        rounds = self.rounds
        self._taken = rounds.names()
        self._index = identifier("i", self._taken)
        self._taken.add(self._index)
        begun = rounds.check_variables()
        kept = rounds.gather(self._list_name)
        swaps: dict[int, ast.expr] = {}
        for leaf, values in rounds.numbers():
            swaps.update(self._number(leaf, values))
        for leaf, names in rounds.other_names():
            source = f"({', '.join(names)})"
            variable = self._variable(source, re.sub(r"_?\d+$", "", names[0]) or names[0])
            swaps[id(leaf.node)] = ast.Name(variable, ast.Load())
        for leaf, variable in rounds.reads_of_the_time_before():
            swaps[id(leaf.node)] = ast.Name(variable, ast.Load())
        if len(self.sources) > _MOST_SOURCES:
            raise Mismatch
        for leaf, variable in rounds.renames():
            swaps[id(leaf.node)] = ast.Name(variable, ast.Load())
        body = []
        for line in rounds.body():
            tree = replace_nodes(copy.copy(line.tree), swaps)
            added = [name for name, (_, at) in kept.items() if at >= 0 and rounds.maker(at) is line]
            if added and rounds.is_only(kept[added[0]], line):
                tree = expr(f"{added[0]}.append({{0}})", tree.value)
                added = []
            new = text(tree)
            if line.code in comments:
                comments.setdefault(new.partition("\n")[0], comments[line.code])
            body += [new, *(f"{name}.append({kept[name][0]})" for name in added)]
        body += [f"{name}.append({item})" for name, (item, at) in kept.items() if at < 0]
        if len(body) == len(kept) == 1 and not begun:
            (name,) = kept
            item = body[0].removeprefix(f"{name}.append(")[:-1]
            if f"{name}.append({item})" == body[0] and "\n" not in item:
                head = self._head().removesuffix(":")
                return [*rounds.before(), f"{name} = [{item} {head}]", *rounds.after()]
        inner = "\n".join(body).replace("\n", "\n    ")
        lists = [f"{name} = []" for name in kept]
        before = [*rounds.before(begun), *lists]
        return [*before, f"{self._head()}\n    {inner}", *rounds.after()]

    def _head(self) -> str:
        sources, names = [*self.sources], [*self.sources.values()]
        if not sources:
            return f"for {self._index if self.has_index else '_'} in range({self.rounds.count}):"
        over = sources[0] if len(sources) == 1 else f"zip({', '.join(sources)}, strict=True)"
        target = ", ".join(names)
        if not self.has_index:
            return f"for {target} in {over}:"
        target = target if len(names) == 1 else f"({target})"
        return f"for {self._index}, {target} in enumerate({over}):"

    def _number(self, leaf: Leaf, values: tuple[Any, ...]) -> Iterator[tuple[int, ast.expr]]:
        """Yields the code for a number, or for the item of a list whose index it is."""
        first, step = values[0], values[1] - values[0]
        if any(values == values[:n] * (len(values) // n) for n in range(2, len(values) // 3 + 1)):
            raise Mismatch  # as many rounds of more statements
        is_even = all(type(v) is int for v in values) and values == tuple(
            range(first, first + step * len(values), step) if step else ()
        )
        owner = leaf.owner
        if is_even and owner is not None and step == 1 and text(owner.value) in self.lengths:
            base = text(owner.value)
            is_all = (first, len(values)) == (0, self.lengths[base])
            end = first + len(values)
            bounds = f"{first or ''}:{'' if end == self.lengths[base] else end}"
            source = base if is_all else f"{base}[{bounds}]"
            yield id(owner), ast.Name(self._variable(source, self._item_of(base)), ast.Load())
            return
        is_count = (first, step) == (0, 1)
        if is_even and (owner is not None or leaf.is_bound or is_count) and step > 0:
            self.has_index = True
            code = self._index if step == 1 else f"{step} * {self._index}"
            code += f" + {first}" if first else ""
            yield id(leaf.node), ast.parse(code, mode="eval").body
            return
        source = repr(values)
        if is_even and step == 1 and len(values) > 2:
            source = f"range({first}, {first + len(values)})"
        variable = self._variable(source, leaf.keyword or "n")
        yield id(leaf.node), ast.Name(variable, ast.Load())

    def _item_of(self, base: str) -> str:
        last = base.rpartition(".")[2]
        if {*self.titles.get(base, ())} == {"ModuleList"}:  # a list of lists
            return last
        return singular(last, self.titles.get(base, ("",))[0])

    def _variable(self, source: str, wanted: str) -> str:
        if source not in self.sources:
            self.sources[source] = identifier(wanted, self._taken)
            self._taken.add(self.sources[source])
        return self.sources[source]

    def _list_name(self, line: Line | None, item: str) -> str:
        origin = re.match(r"(\w+)\.append\(", line.origin) if line else None
        stem = re.sub(r"_\d+$", "", item)
        found = (
            identifier(origin[1], self._taken)
            if origin
            else identifier(f"{stem}s" if not stem.endswith("s") else f"all_{stem}", self._taken)
        )
        self._taken.add(found)
        return found
