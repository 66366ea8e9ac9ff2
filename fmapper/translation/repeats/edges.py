"""The first and the last of rounds, which may be written otherwise, or lack a part."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fmapper.translation.code import identifier, replace_nodes, statement_text, text
from fmapper.translation.merging.statements import Line, key_of, leaves_of, read_lines

if TYPE_CHECKING:
    from fmapper.translation.functions.forms import Statement

Place = tuple[int, int, int]  # where rounds begin, how many statements each has, how many they are
_DRAWS = re.compile(r"dropout|\brand|\b(normal|uniform|bernoulli|multinomial|gumbel|exponential)\b")


def with_whole_rounds(
    lines: Sequence[str], place: Place, known: Mapping[str, Statement]
) -> tuple[list[str], Place] | None:
    """Writes statements so that more of them are rounds of one loop.

    The first round may have code where later ones read what the round before gave. The last one
    may use a value where it is made, and lack statements whose results nobody reads: these are
    added where the others are lines of a loop in the model's code, too.

    Args:
        lines: The statements of a function.
        place: Rounds that are alike.
        known: What is known of statements.

    Returns:
        The statements, and the rounds; None where there are no more of them.

    Examples:
        >>> lines = ["y = f(x, z(3))", "a = g(y)", "y = f(x, a)", "a = g(y)", "y = f(x, a)"]
        >>> more, place = with_whole_rounds([*lines, "return y * g(y)"], (1, 2, 2), {})
        >>> print(*more, place, sep="; ")
        a = z(3); y = f(x, a); a = g(y); y = f(x, a); a = g(y); y = f(x, a); a_2 = g(y); \
return y * a_2; (1, 2, 3)
    """
    edges = _Edges(read_lines(lines, known), *place)
    edges.split_what_is_given_on()
    if not edges.begin_earlier():
        return None
    edges.end_later()
    written, found = edges.statements(), edges.place
    if edges.left:
        added = _find_missing(read_lines(written, known), found, edges.left)
        if added and edges.is_one_loop():
            at = edges.end_in_text
            return [*written[:at], *added, *written[at:]], (*found[:2], found[2] + 1)
    edges.leave_whole()
    return (edges.statements(), edges.place) if edges.place[2] > place[2] else None


def may_have_more(read: Sequence[Line], place: Place) -> bool:
    """Returns whether a statement beside rounds is like one of theirs: those have to be read anew.

    Args:
        read: The statements of a function.
        place: Rounds that are alike.
    """
    at, period, count = place
    end = at + period * count
    if at and None not in _compare(read[at - 1].tree, read[at - 1 + period].tree):
        return True
    if end == len(read):
        return False
    other = read[end - period]
    return read[end].key == other.key or _find_made(read[end].tree, other) is not None


class _Edges:
    """Rounds, with what comes before and after them.

    Args:
        read: The statements of a function.
        at: Where the rounds begin.
        period: How many statements each has.
        count: How often they come.
    """

    def __init__(self, read: Sequence[Line], at: int, period: int, count: int) -> None:
        self._lines = [replace(line, tree=copy.deepcopy(line.tree)) for line in read]
        self._start, self._end, self._period = at, at + period * count, period
        self._taken = _words(read)
        self._whole = self._end, self._lines  # what `leave_whole` goes back to
        self._given: list[Line] = []  # what the first round is given, in the place of its code

    @property
    def place(self) -> Place:
        """Where the whole rounds are."""
        count = (self._end - self._start) // self._period
        return self._start + len(self._given), self._period, count

    @property
    def left(self) -> int:
        """How many statements there are of a last round that is not whole."""
        return (self._end - self._start) % self._period

    @property
    def end_in_text(self) -> int:
        """Where the rounds end among the statements that are written."""
        before = [*self._given, *self._lines[: self._end]]
        return sum(1 + len(line.after) for line in before)

    def statements(self) -> list[str]:
        """Returns the statements."""
        lines = [*self._lines[: self._start], *self._given, *self._lines[self._start :]]
        return [code for line in lines for code in (line.code, *line.after)]

    def is_one_loop(self) -> bool:
        """Returns whether what is left comes from the lines of the model's code of the rounds."""
        rest = self._lines[self._end - self.left : self._end]
        rounds = self._lines[self._end - self.left - self._period : self._end - self.left]
        pairs = [(a.origin, b.origin) for a, b in zip(rest, rounds, strict=False)]
        return all(a == b for a, b in pairs) and any(a for a, _ in pairs)

    def split_what_is_given_on(self) -> None:
        """Gives variables to code of the rounds in whose place the first one reads a variable."""
        before = self._start - 1
        lasts = range(before + self._period, self._end, self._period)
        found = [self._differences(before, at) for at in lasts] if before >= 0 else []
        if not found or any(len(one) != 1 for one in found):
            return
        ((given, _),) = found[0]
        codes = [code for ((_, code),) in found]
        is_code = all(not isinstance(code, ast.Name) and _is_pure(code) for code in codes)
        if not isinstance(given, ast.Name) or not is_code:
            return
        for more, (at, code) in enumerate(zip(lasts, codes, strict=True)):
            self._split(at + more, code, given.id)
        self._end += len(codes)
        self._period += 1

    def begin_earlier(self) -> bool:
        """Lets rounds begin with statements before them; returns whether that is sound."""
        read: list[tuple[int, set[str]]] = []
        while self._start and len(read) < self._period - 1:
            at = self._start - 1
            differ = self._differences(at, at + self._period)
            if self._lines[at].key != self._lines[at + self._period].key and not differ:
                break
            given = [(a, b.id) for a, b in differ if isinstance(b, ast.Name) and _is_pure(a)]
            if len(given) < len(differ):
                break
            read.append((at, {one.id for a, _ in given for one in _names_in(a)}))
            self._replace(at, {id(a): self._variable(a, wanted, at) for a, wanted in given})
            self._start = at
        return all(not names & self._assigns(self._start, at) for at, names in read)

    def end_later(self) -> None:
        """Lets rounds end with statements after them, or with what these make first."""
        self._whole = self._end, [*self._lines]
        while self._end < len(self._lines):
            line, other = self._lines[self._end], self._lines[self._end - self._period]
            if line.key != other.key:
                made = _find_made(line.tree, other)
                if made is None:
                    break
                self._split(self._end, made, other.stores()[0].name)
            self._end += 1
            if not self.left:
                self._whole = self._end, [*self._lines]

    def leave_whole(self) -> None:
        """Lets rounds end with the last whole one, and what comes later be as it was."""
        self._end, self._lines = self._whole

    # --- code and variables --------------------------------------------------------------------

    def _differences(self, at: int, later: int) -> list[tuple[ast.expr, ast.expr]]:
        """Returns where one statement has a variable, and another one something else."""
        line, other = self._lines[at], self._lines[later]
        found = [*_compare(line.tree, other.tree)] if not line.after and not other.after else [None]
        return [] if None in found else [one for one in found if one is not None]

    def _variable(self, code: ast.expr, wanted: str, at: int) -> ast.expr:
        """Returns the variable for code of the first round, which is given before it."""
        earlier = self._assigns(0, at) | {
            one.name for line in self._lines for one in line.leaves if one.version < 0
        }
        made = identifier(wanted, earlier)
        if made != wanted:
            made = identifier(wanted, self._taken)
        self._taken.add(made)
        self._given.append(_line(f"{made} = {text(code)}"))
        return ast.Name(made, ast.Load())

    def _split(self, at: int, code: ast.expr, wanted: str) -> None:
        """Gives a variable to a part of a statement."""
        made = identifier(wanted, self._taken)
        self._taken.add(made)
        line = _line(f"{made} = {text(code)}", self._lines[at].origin)
        self._replace(at, {id(code): ast.Name(made, ast.Load())})
        self._lines.insert(at, line)

    def _replace(self, at: int, swaps: Mapping[int, ast.expr]) -> None:
        if swaps:
            tree = replace_nodes(self._lines[at].tree, swaps)
            code = statement_text(tree)
            self._lines[at] = replace(self._lines[at], tree=tree, code=code, key=key_of(tree))

    def _assigns(self, start: int, end: int) -> set[str]:
        lines = self._lines[start:end]
        return {name for line in lines for name in (*(s.name for s in line.stores()), *line.sizes)}


def _find_missing(read: Sequence[Line], place: Place, left: int) -> list[str]:
    """Returns the statements that the last round lacks; none where that would not be sound."""
    at, period, count = place
    end = at + period * count
    before, last = read[end - 2 * period : end - period], read[end - period : end]
    rest = read[end : end + left]
    names: dict[int, str] = {}  # assignments of the last whole round, or the one before -> now
    for theirs, mine in [*zip(before, last, strict=True), *zip(last, rest, strict=False)]:
        for one, new in zip(theirs.stores(), mine.stores(), strict=True):
            names[one.version] = new.name
        places = {place: name for name, place in mine.sizes.items()}
        for name, version in theirs.versions.items():
            names[version] = places.get(theirs.sizes[name], "")
    taken, found = _words(read), []
    for earlier, line in zip(before[left:], last[left:], strict=True):
        tree = copy.deepcopy(line.tree)
        if not isinstance(tree, ast.Assign) or line.after or not _is_pure(tree.value):
            return []
        swaps: dict[int, ast.expr] = {}
        leaves = zip(leaves_of(tree), line.leaves, earlier.leaves, strict=True)
        for leaf, told, other in leaves:
            if leaf.is_store:
                names[told.version] = identifier(leaf.name, taken)
                taken.add(names[told.version])
                swaps[id(leaf.node)] = ast.Name(names[told.version], ast.Store())
            elif leaf.name:
                swaps[id(leaf.node)] = ast.Name(names.get(told.version, leaf.name), ast.Load())
            elif text(told.node) != text(other.node):
                return []  # the next number may be beyond the end of an array
        if any(isinstance(one, ast.Name) and not one.id for one in swaps.values()):
            return []
        found.append(statement_text(replace_nodes(tree, swaps)))
    return found


def _compare(a: ast.AST, b: ast.AST) -> Iterator[tuple[ast.expr, ast.expr] | None]:
    """Yields where one has a variable and the other does not; None where they differ otherwise."""
    is_name, is_other = isinstance(a, ast.Name), isinstance(b, ast.Name)
    if is_name and is_other:
        return
    if isinstance(a, ast.expr) and isinstance(b, ast.expr) and (is_name or is_other):
        yield a, b
        return
    if type(a) is not type(b):
        yield None
        return
    if isinstance(a, ast.Constant) and isinstance(b, ast.Constant):
        is_number = type(a.value) is type(b.value) and type(a.value) in (int, float)
        if not is_number and a.value != b.value:
            yield None
        return
    for field in a._fields:
        one, other = getattr(a, field, None), getattr(b, field, None)
        ones, others = (x if isinstance(x, list) else [x] for x in (one, other))
        if len(ones) != len(others):
            yield None
            return
        for mine, theirs in zip(ones, others, strict=True):
            if isinstance(mine, ast.AST) and isinstance(theirs, ast.AST):
                yield from _compare(mine, theirs)
            elif mine != theirs:
                yield None


def _find_made(tree: ast.stmt, other: Line) -> ast.expr | None:
    """Returns the part of a statement that is made as a variable by another one."""
    target = other.tree.targets[0] if isinstance(other.tree, ast.Assign) else None
    kinds = (ast.Assign, ast.Return, ast.Expr)
    if not isinstance(target, ast.Name) or other.after or not isinstance(tree, kinds):
        return None
    assert isinstance(other.tree, ast.Assign)
    key = key_of(ast.Expr(other.tree.value))
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr) or isinstance(node, ast.Name | ast.Constant):
            continue
        if key_of(ast.Expr(node)) == key and _is_pure(node):
            return node
    return None


def _is_pure(code: ast.AST) -> bool:
    """Returns whether code may run earlier, or once more: without parts, changes, and draws."""
    kinds = (ast.Lambda, ast.comprehension, ast.NamedExpr, ast.Starred)
    for node in ast.walk(code):
        if isinstance(node, kinds) or (isinstance(node, ast.Name) and node.id in _STATES):
            return False
        if isinstance(node, ast.Call):
            called = text(node.func)
            if called.endswith("_") or _DRAWS.search(called):
                return False
    return True


_STATES = ("self", "rngs", "key", "keys")


def _names_in(code: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(code) if isinstance(node, ast.Name))


def _line(code: str, origin: str = "") -> Line:
    (tree,) = ast.parse(code).body
    return Line(code, tree, key_of(tree), [*leaves_of(tree)], origin=origin)


def _words(read: Sequence[Line]) -> set[str]:
    codes = (code for line in read for code in (line.code, *line.after))
    return {word for code in codes for word in re.findall(r"(?<![.\w])[A-Za-z_]\w*", code)}
