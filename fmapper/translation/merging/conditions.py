"""The conditions below which the statements stand that only some submodules of a class have."""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fmapper.translation.code import expr, text

if TYPE_CHECKING:
    from fmapper.translation.classes import Sketch

FLAG = re.compile(r"\bflag\((\w+)\)")
_VALUE = re.compile(r"\bflag\(\w+=([\w.]+)\)")
_NOT = re.compile(r"(?<= and )\(not ([\w.]+)\)(?!\w)")
_TUPLE = re.compile(r"(?m)^( *return )\((.*)\)$")
_MOST_GROUPS = 4
_WIDEST = 96  # characters of a statement with a condition in it


@dataclass(frozen=True, slots=True)
class Case:
    """The facts about a submodule that conditions can ask for.

    Attributes:
        given: The arguments that it is given, other than None.
        parts: The parts that it has.
        flags: The flags of the source's submodule.
        optional: Arguments of which None says nothing: masks, and what has another default.
        hidden: Parts that are items of a sequence in the file, so that no condition names them.
    """

    given: frozenset[str]
    parts: frozenset[str]
    flags: Mapping[str, bool]
    optional: frozenset[str]
    hidden: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Test:
    """A condition: `is_there` of an argument or a part, or a flag."""

    kind: str
    name: str
    wanted: bool

    def holds(self, case: Case) -> bool:
        """Returns whether it holds."""
        known = {"argument": case.given, "part": case.parts}.get(self.kind)
        found = self.name in known if known is not None else case.flags[self.name]
        return found == self.wanted

    def __str__(self) -> str:
        if self.kind == "flag":
            return f"{'' if self.wanted else 'not '}flag({self.name})"
        place = f"self.{self.name}" if self.kind == "part" else self.name
        return f"{place} is {'not ' if self.wanted else ''}None"


@dataclass(frozen=True, slots=True)
class Choice:
    """Statements of which a submodule has those of the first condition that holds.

    Attributes:
        branches: The conditions, all of which must hold, and the statements; no condition for else.
    """

    branches: tuple[tuple[tuple[Test, ...], str], ...]

    def pick(self, case: Case) -> str:
        """Returns the statements of a submodule."""
        return next(
            (code for tests, code in self.branches if all(t.holds(case) for t in tests)), ""
        )

    def flags(self) -> set[str]:
        """Returns the flags that are asked for."""
        return {one.name for tests, _ in self.branches for one in tests if one.kind == "flag"}

    def statements(self) -> list[str]:
        """Returns the code: one statement, and what follows it where it returns."""
        if len(self.branches) == 1:
            tests, code = self.branches[0]
            (only, *others) = ast.parse(code).body
            if isinstance(only, ast.If) and not others and not only.orelse:
                head, _, inner = code.partition("\n")
                condition = head.removeprefix("if ").removesuffix(":")
                return [f"if {' and '.join(map(str, tests))} and {condition}:\n{inner}"]
        if (whole := self._as_expression()) is not None:
            return [whole]
        found = []
        after: list[str] = []
        for at, (tests, code) in enumerate(self.branches):
            if not tests and code.startswith("return "):
                after = [code]
                continue
            word = "elif" if at else "if"
            head = f"{word} {' and '.join(map(str, tests))}:" if tests else "else:"
            found.append(f"{head}\n{textwrap.indent(code, '    ')}")
        return ["\n".join(found), *after]

    def _as_expression(self) -> str | None:
        """Returns the assignment of one value or another, where that is one short statement."""
        if [len(tests) for tests, _ in self.branches] != [1, 0]:
            return None
        ((test,), first), (_, second) = self.branches
        trees = [ast.parse(code).body for code in (first, second)]
        kinds = {tuple(map(type, tree)) for tree in trees}
        if kinds != {(ast.Assign,)}:
            return None
        one, other = (tree[0] for tree in trees)
        assert isinstance(one, ast.Assign)
        assert isinstance(other, ast.Assign)
        value = expr(f"{{0}} if {test} else {{1}}", one.value, other.value)
        whole = text(ast.Assign(one.targets, value, lineno=1))
        is_same = text(one.targets[0]) == text(other.targets[0])
        return whole if is_same and len(whole) <= _WIDEST else None

    def lines(self) -> list[str]:
        """Returns the lines of the code."""
        return "\n".join(self.statements()).splitlines()


def choose_shortest(parts: Sequence[Sequence[str]], cases: Sequence[Case]) -> list[Choice]:
    """Returns the choices by which each submodule has its statements; none if there are none.

    Args:
        parts: The statements of each submodule.
        cases: What conditions can ask of it.
    """
    each = _choose_each(parts, cases)
    whole = _choose(["\n".join(part) for part in parts], cases)
    if whole is None or 0 < sum(len(one.lines()) for one in each) < len(whole.lines()):
        return each
    return [whole]


def _choose(codes: Sequence[str], cases: Sequence[Case]) -> Choice | None:
    """Returns the choice by which each submodule has its statements; None if there is none."""
    groups = list(dict.fromkeys(codes))
    if len(groups) > _MOST_GROUPS:
        return None
    tests = [*_tests(cases)]
    names = {name for code in groups for name in _targets(code)}
    best: tuple[float, Choice] | None = None
    for order in itertools.permutations(groups):
        if "" in order[:-1]:
            continue
        for found in _chains(order, codes, cases, tests):
            cost = sum(_cost(one, names) for conditions, _ in found.branches for one in conditions)
            if best is None or cost < best[0]:
                best = cost, found
    return best[1] if best else None


def _choose_each(parts: Sequence[Sequence[str]], cases: Sequence[Case]) -> list[Choice]:
    """Returns choices for statements that are there or not, whichever of the others are.

    Args:
        parts: The statements of each submodule.
        cases: What conditions can ask of it.

    Returns:
        Those, one after the other; nothing where there are none, or fewer than two.
    """
    order: list[str] = []
    for part in parts:
        at = 0
        for line in part:
            if line in order[at:]:
                at = order.index(line, at) + 1
            else:
                order.insert(at, line)
                at += 1
    if any([line for line in order if line in part] != [*part] for part in parts):
        return []
    rows = [(line, tuple(line in part for part in parts)) for line in order]
    runs = [
        (presence, "\n".join(line for line, _ in several))
        for presence, several in itertools.groupby(rows, operator.itemgetter(1))
    ]
    found = []
    while runs:
        presence, code = runs.pop(0)
        tests = [one for one in _tests(cases) if tuple(map(one.holds, cases)) == presence]
        if not tests or "return" in code:
            return []
        test = min(tests, key=lambda one: code.find(f"self.{one.name}(") % len(code))
        branches: list[tuple[tuple[Test, ...], str]] = [((test,), code)]
        if runs and runs[0][0] == tuple(not one for one in presence):
            branches.append(((), runs.pop(0)[1]))
        found.append(Choice(tuple(branches)))
    return found if len(found) > 1 else []


def _chains(
    order: Sequence[str], codes: Sequence[str], cases: Sequence[Case], tests: Sequence[Test]
) -> Iterator[Choice]:
    """Yields the chains of conditions for statements in an order, the shortest first."""
    several = []
    for at, code in enumerate(order[:-1]):
        own = [case for case, one in zip(cases, codes, strict=True) if one == code]
        later = [case for case, one in zip(cases, codes, strict=True) if one in order[at + 1 :]]
        fitting = [
            chosen
            for size in (1, 2, 3)
            for chosen in itertools.combinations(tests, size)
            if all(test.holds(case) for test in chosen for case in own)
            and not any(all(test.holds(case) for test in chosen) for case in later)
        ]
        several.append(fitting[:48])
    for conditions in itertools.islice(itertools.product(*several), 4000):
        branches = [*zip(conditions, order, strict=False)]
        if order[-1]:
            branches.append(((), order[-1]))
        yield Choice(tuple(branches))


def _tests(cases: Sequence[Case]) -> Iterator[Test]:
    """Yields the conditions that hold for some."""
    optional = {name for case in cases for name in case.optional}
    arguments = sorted({name for case in cases for name in case.given} - optional)
    parts = sorted({name for case in cases for name in case.parts - case.hidden})
    flags = sorted(set.intersection(*({*case.flags} for case in cases)))
    for kind, names in (("argument", arguments), ("part", parts), ("flag", flags)):
        for name in names:
            for wanted in (True, False):
                test = Test(kind, name, wanted)
                if len({test.holds(case) for case in cases}) > 1:
                    yield test


def _cost(test: Test, names: set[str]) -> float:
    """Returns what a condition costs the reader: an argument says less than a flag, if it stays."""
    return 1.5 if test.kind == "argument" and test.name not in names else 1


def _targets(code: str) -> Iterator[str]:
    """Yields the variables that code assigns to."""
    for one in ast.walk(ast.parse(code)):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id


def rules(cases: Sequence[Case]) -> list[tuple[str, str]] | None:
    """Returns what must hold of the arguments that only some are given, and how to say it.

    Together they allow each submodule what it was given, and nothing else; None where no conditions
    say that.
    """
    settings = [_settings(case) for case in cases]
    optional = frozenset(name for case in cases for name in case.optional)
    names = sorted(frozenset.union(*(case.given for case in cases)))
    names = [one for one in names if any(one not in case.given for case in cases)]
    tests = [one for one in _tests(cases) if one.kind != "argument"]
    for own in dict.fromkeys(settings):  # all combinations of what they were given
        given = {
            tuple(_status(case, name) for name in names)
            for case, one in zip(cases, settings, strict=True)
            if one == own
        }
        if len(given) != math.prod(len({*column}) for column in zip(*given, strict=True)):
            return None
    found: list[tuple[str, str]] = []
    for name in names:
        may_be_given = {s for s, c in zip(settings, cases, strict=True) if name in c.given}
        may_be_none = {
            s
            for s, c in zip(settings, cases, strict=True)
            if name not in c.given or name in c.optional
        }
        if name in optional and not any(name not in case.given for case in cases):
            continue
        where = _describe(may_be_given, settings, cases, tests)
        absent = _describe(may_be_none, settings, cases, tests)
        if where is None:
            return None
        if not may_be_given & may_be_none:
            message = f"{name} must be given if {where}, and only then"
            found.append((f"({name} is not None) == ({where})", message))
            continue
        if absent is None:
            return None
        if where:
            found.append((f"{name} is None or {where}", f"{name} may be given only if {where}"))
        if absent:
            message = f"{name} may be None only if {absent}"
            found.append((f"{name} is not None or {absent}", message))
    return found


def _settings(case: Case) -> tuple[Any, ...]:
    return (case.parts, *sorted(case.flags.items()))


def _status(case: Case, name: str) -> str:
    return "either" if name in case.given & case.optional else str(name in case.given)


def _describe(
    wanted: set[tuple[Any, ...]],
    settings: Sequence[tuple[Any, ...]],
    cases: Sequence[Case],
    tests: Sequence[Test],
) -> str | None:
    """Returns the condition for some settings; empty if it always holds, None if there is none."""
    if wanted >= {*settings}:
        return ""
    own = [case for case, one in zip(cases, settings, strict=True) if one in wanted]
    others = [case for case, one in zip(cases, settings, strict=True) if one not in wanted]
    terms = [
        chosen
        for size in (1, 2)
        for chosen in itertools.combinations(tests, size)
        if not any(all(test.holds(case) for test in chosen) for case in others)
    ]
    for count in (1, 2):
        for several in itertools.combinations(terms, count):
            if all(any(all(t.holds(case) for t in term) for term in several) for case in own):
                return " or ".join(" and ".join(map(str, term)) for term in several)
    return None


def evaluate(tree: ast.Module, case: Case) -> ast.Module:
    """Returns code with the statements of one submodule in place of the choices."""
    return ast.Module(_evaluate(tree.body, case), [])


def _evaluate(statements: Sequence[ast.stmt], case: Case) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for one in statements:
        if found and isinstance(found[-1], ast.Return):
            break
        if not isinstance(one, ast.If):
            found.append(_pick(one, case))
            continue
        test = _value(one.test, case)
        if isinstance(test, bool):
            found += _evaluate(one.body if test else one.orelse, case)
        else:
            found.append(ast.If(test, one.body, one.orelse))
    return found


def _pick(statement: ast.stmt, case: Case) -> ast.stmt:
    """Returns an assignment with the value that a submodule has there."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.IfExp):
        test = _value(statement.value.test, case)
        if isinstance(test, bool):
            value = statement.value.body if test else statement.value.orelse
            return ast.Assign(statement.targets, value, lineno=1)
    return statement


def _value(node: ast.expr, case: Case) -> bool | ast.expr:
    """Returns the value of a condition, or what remains of it."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        values = [_value(one, case) for one in node.values]
        if any(one is False for one in values):
            return False
        rest = [one for one in values if isinstance(one, ast.expr)]
        return True if not rest else rest[0] if len(rest) == 1 else ast.BoolOp(ast.And(), rest)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _value(node.operand, case)
        return not inner if isinstance(inner, bool) else node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "flag":
        (name,) = node.args
        return case.flags[name.id] if isinstance(name, ast.Name) else node
    if isinstance(node, ast.Compare) and text(node.comparators[-1]) == "None":
        is_none = isinstance(node.ops[0], ast.Is)
        left = node.left
        if isinstance(left, ast.Name) and left.id not in case.optional:
            return (left.id not in case.given) == is_none
        if isinstance(left, ast.Attribute):
            return (left.attr not in case.parts) == is_none
    return node


def with_flags(lines: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """Returns statements with the values of flags, as keywords: those are numbers of a class."""
    return [FLAG.sub(lambda found: f"flag({found[1]}={flags[found[1]]})", x) for x in lines]


def without_flags(sketch: Sketch) -> Sketch:
    """Returns a sketch with the values of flags in place of `flag(name=value)`."""
    for method in sketch.methods:
        method.lines[:] = [_plain(line) if "flag(" in line else line for line in method.lines]
    sketch.made[:] = [
        (attr, ast.parse(_VALUE.sub(r"\1", text(node)), mode="eval").body)
        for attr, node in sketch.made
    ]
    return sketch


def _plain(line: str) -> str:
    found = _NOT.sub(r"not \1", _VALUE.sub(r"\1", line))
    bare = _TUPLE.sub(r"\1\2", found)
    try:
        is_same = ast.dump(ast.parse(bare)) == ast.dump(ast.parse(found))
    except SyntaxError:
        return found
    return bare if is_same else found
