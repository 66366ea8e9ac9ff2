"""A loop over the parts of a list, taken apart: what each round takes, gives on, and collects."""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from fmapper.translation.code import identifier, text


class NotAScanError(Exception):
    """A loop cannot be a scan; the message says why."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over the parts of one or several lists.

    Attributes:
        owners: The code of the lists.
        variables: The parts of a round, one for each list.
        carry: The variables that a round takes from the one before it.
        lines: The statements of a round.
        rows: The code of what each round adds to lists of results.
        results: Those lists.
        begun: Those that are empty before the loop.
        name: A free name for the function of a round.
        names: All names of the function around it.
        count: How many parts each list has.
    """

    owners: tuple[str, ...]
    variables: tuple[str, ...]
    carry: tuple[str, ...]
    lines: tuple[str, ...]
    rows: tuple[str, ...]
    results: tuple[str, ...]
    begun: frozenset[str]
    name: str
    names: frozenset[str]
    count: int = 0

    def function(self, parameters: Sequence[str], first: Sequence[str], result: str) -> str:
        """Returns the code of the function of a round.

        Args:
            parameters: Its parameters; the first one is what a round carries on.
            first: The statements that it begins with.
            result: What it gives.
        """
        lines = [*first, *self.lines]
        if parameters[0] != self.unpack():
            lines.insert(0, f"{self.unpack()} = {parameters[0]}")
        target, equals, code = lines[-1].partition(" = ")
        if equals and len(self.carry) == 1 and result in (target, f"{target}, None"):
            lines[-1] = f"return {code}{result.removeprefix(target)}"
        else:
            lines.append(f"return {result}")
        header = f"def {self.name}({', '.join(parameters)}):"
        return "\n".join([header, *(textwrap.indent(line, "    ") for line in lines)])

    def state(self) -> str:
        """Returns the parameter for what a round carries on."""
        return self.carry[0] if len(self.carry) == 1 else identifier("carry", self.names)

    def unpack(self) -> str:
        """Returns the code of all that a round carries on."""
        return self.carry[0] if len(self.carry) == 1 else f"({', '.join(self.carry)})"

    def row(self) -> str:
        """Returns the code of all that a round adds to lists of results."""
        return self.rows[0] if len(self.rows) == 1 else f"({', '.join(self.rows)})"

    def fill(self, rows: str) -> list[str]:
        """Returns the statements that fill the lists of results from stacked rows.

        Args:
            rows: The variable of the rows, or of the tuple of them.
        """
        found = []
        for i, (target, row) in enumerate(zip(self.results, self.rows, strict=True)):
            code = rows if len(self.rows) == 1 else f"{rows}[{i}]"
            parts = _apart(ast.parse(row, mode="eval").body, code)
            found.append(f"{target} = {parts}" if target in self.begun else f"{target} += {parts}")
        return found


def _apart(row: ast.expr, stacked: str) -> str:
    """Returns the code for a list of rows that are stacked: the arrays in a tuple each are.

    Examples:
        >>> _apart(ast.parse("(k, v)", mode="eval").body, "rows")
        'list(zip(*rows, strict=True))'
    """
    if not isinstance(row, ast.Tuple):
        return f"list({stacked})"
    if any(isinstance(one, ast.Tuple) for one in row.elts):
        raise NotAScanError("it collects tuples of tuples")
    return f"list(zip(*{stacked}, strict=True))"


def loops_in(line: str) -> ast.For | None:
    """Returns a statement that is a loop over parts of the model."""
    if not line.startswith("for ") or "self." not in line.partition("\n")[0]:
        return None
    (node,) = ast.parse(line).body
    assert isinstance(node, ast.For)
    return node


def owners_of(node: ast.For) -> tuple[str, ...]:
    """Returns the code of the lists that a loop is over, of which there may be several."""
    over = node.iter
    if isinstance(over, ast.Call) and text(over.func) == "zip":
        return tuple(map(text, over.args))
    return (text(over),)


def read_loop(lines: Sequence[str], at: int, parameters: Collection[str]) -> Loop:
    """Takes a loop apart.

    Args:
        lines: The statements of a function.
        at: Which of them it is.
        parameters: The parameters of the function.

    Raises:
        NotAScanError: A round does more than a scan can.
    """
    node = loops_in(lines[at])
    assert node is not None
    owners = owners_of(node)
    targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
    variables = tuple(map(text, targets))
    every = frozenset(_names([ast.parse(line) for line in lines]))
    body, appended = _part_rows(node.body, every)
    if any(name == "self" for one in body for name in _names([one])):
        raise NotAScanError("the loop uses other parts of the model")
    if any(isinstance(inner, ast.Break | ast.Continue) for one in body for inner in ast.walk(one)):
        raise NotAScanError("the loop does not call all of them")
    before = {*parameters, *_targets([ast.parse(line) for line in lines[:at]])}
    needed, stored = _first_read(body)
    after = _read_after(lines[at + 1 :], stored - {*variables})
    lost = after - before
    if lost:
        raise NotAScanError(f"{min(lost)} of the last one is used after the loop")
    carry = tuple(name for name in _targets(body) if name in before and name in needed | after)
    if not carry:
        raise NotAScanError("they are not called one after the other")
    if {target for target, _ in appended} & ({*needed} | stored):
        raise NotAScanError("the loop uses the results that it collects")
    loop = Loop(
        owners,
        variables,
        carry,
        tuple(map(text, body)),
        tuple(code for _, code in appended),
        tuple(target for target, _ in appended),
        frozenset(_empty(lines[:at], [target for target, _ in appended])),
        identifier(f"call_{owners[0].rpartition('.')[2]}", every),
        every,
    )
    loop.fill("rows")  # raises where it cannot
    return loop


def _part_rows(
    body: Sequence[ast.stmt], taken: Collection[str]
) -> tuple[list[ast.stmt], list[tuple[str, str]]]:
    """Parts what a round adds to lists from what else it does."""
    found: list[ast.stmt] = []
    appended: list[tuple[str, str]] = []
    own = {*taken}
    for at, statement in enumerate(body):
        known = _append(statement)
        if known is None:
            found.append(statement)
            continue
        target, item = known
        code = text(item)
        if {*_names([item])} & {*_targets(body[at + 1 :])}:  # of another value at the end
            code = identifier("row", own)
            own.add(code)
            found.append(ast.parse(f"{code} = {text(item)}").body[0])
        appended.append((target, code))
    return found, appended


def _append(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    called = statement.value.func
    if not isinstance(called, ast.Attribute) or called.attr != "append":
        return None
    return text(called.value), statement.value.args[0]


def _first_read(body: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
    """Returns the names that a round reads before it assigns them, and those it assigns."""
    needed: set[str] = set()
    stored: set[str] = set()
    for statement in body:
        needed |= {*_reads(statement)} - stored
        stored |= {*_targets([statement])}
    return needed, stored


def _read_after(lines: Sequence[str], wanted: Collection[str]) -> set[str]:
    """Returns those names that statements read before they assign them."""
    open_names = {*wanted}
    found: set[str] = set()
    for line in lines:
        (tree,) = ast.parse(line).body
        read = {*_reads(tree)} & open_names
        found |= read
        open_names -= read
        if isinstance(tree, ast.Assign):
            open_names -= {*_targets([tree])}
    return found


def _empty(lines: Sequence[str], lists: Sequence[str]) -> Iterator[str]:
    """Yields lists that nothing has been put into."""
    for name in lists:
        uses = [line for line in lines if name in _names([ast.parse(line)])]
        if uses[-1:] == [f"{name} = []"]:
            yield name


def _names(trees: Sequence[ast.AST]) -> Iterator[str]:
    for tree in trees:
        yield from (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _reads(tree: ast.AST) -> Iterator[str]:
    if isinstance(tree, ast.AugAssign):
        yield from _names([tree.target])
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def _targets(trees: Sequence[ast.AST]) -> list[str]:
    """Returns the names that statements assign, in order; those of comprehensions are their own."""
    found: dict[str, None] = {}
    for tree in trees:
        held = copy.deepcopy(tree)
        for node in ast.walk(held):
            if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
                node.generators = []
        for node in ast.walk(held):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[node.id] = None
    return list(found)
