"""The variables of one function: their values and their names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from fmapper.programs.program import Call
from fmapper.translation import naming
from fmapper.translation.code import Value, expr, literal, name, text
from fmapper.translation.functions.forms import (
    Body,
    Made,
    Statement,
    is_part_of_name,
    is_pure,
    mentions,
)
from fmapper.translation.guards.sizes import Sizes, UnknownSize
from fmapper.translation.units import Structure, Unit, refs_of

_LONGEST = 88
_ATOMS = (ast.Name, ast.Constant)
_ITEM = re.compile(r"\.\d+(?=\.|$)")
_VIEWS = ("unsqueeze", "slice", "select", "view", "transpose")


class Namer(Protocol):
    """The names shared by the functions of one file.

    Attributes:
        hints: The names that values got elsewhere.
    """

    hints: dict[str, str]

    def size_name(self, symbol: str, at: int, ndim: int) -> str:
        """Names a varying size."""
        ...


class Variables:
    """The variables of one function while it is written.

    Args:
        structure: The program.
        unit: What the function computes.
        namer: What it has in common with others.
        parameters: Its parameters.
        sizes: Sizes, expressions of symbols, that are parameters -> their names.
        named: Sizes that get variables of their own.
        reserved: Names that mean something else there.
    """

    def __init__(
        self,
        structure: Structure,
        unit: Unit,
        namer: Namer,
        parameters: tuple[str, ...],
        sizes: Mapping[str, str],
        named: frozenset[str],
        reserved: frozenset[str],
    ) -> None:
        self._structure = structure
        self._unit = unit
        self._namer = namer
        self._hints = namer.hints
        self._named = named
        self._reserved = naming.RESERVED | reserved
        self._env: dict[str, Value] = {}
        self._sizes = Sizes({size: name(parameter) for size, parameter in sizes.items()})
        self._counted: set[str] = set()  # variables of sizes that parts give
        self._body = Body(parameters)
        self._names = naming.Names(self._reserved - {*parameters})
        self._next: dict[str, str] = {}
        self._left: Counter[str] = Counter()
        self._users: dict[str, list[Any]] = {}
        self._inlined: dict[str, int] = {}
        self._wholes: list[tuple[Any, ast.expr]] = []  # tuples, with the code for them
        self._objects: list[tuple[Made, ast.expr]] = []  # those that parts have made
        self._within: dict[str, tuple[str, ...]] = {}  # tuples in variables -> the values in them
        self._in_order: frozenset[str] = frozenset()  # what is drawn has a statement of its own

    def _bind(self, value: str, node: ast.expr) -> None:
        dtype, shape = self._structure.values.get(value, ("", ()))
        self._env[value] = Value(node, dtype, shape)
        if isinstance(node, ast.Name):
            last = self._body.statements[-1] if self._body.statements else None
            if last is not None and node.id in (last.targets or ()):
                last.shapes[node.id] = shape
            self._name_sizes(node, shape)
        self._sizes.learn(self._env[value])

    def _name_sizes(self, node: ast.Name, shape: tuple[int | str, ...]) -> None:
        """Assigns frequently used sizes to variables."""
        new = [
            (i, size)
            for i, size in enumerate(shape)
            if isinstance(size, str) and size in self._named and not self._sizes.is_named(size)
        ]
        if not new:
            return
        targets = []
        for i, symbol in new:
            target = self._names.choose(self._namer.size_name(symbol, i, len(shape)), set())
            self._names.holds[target] = f"size {symbol}"
            self._left[f"size {symbol}"] = 10**6
            self._sizes.call(symbol, name(target))
            targets.append(target)
        places = [i for i, _ in new]
        if len(new) == 1:
            code = expr("{0}.shape[{1}]", node, places[0])
        elif places == list(range(len(shape))):
            code = expr("{0}.shape", node)
        elif places == list(range(len(places))):
            code = expr(f"{{0}}.shape[:{len(places)}]", node)
        elif 2 * len(places) >= len(shape):
            code = expr("{0}.shape", node)
            targets = [targets[places.index(i)] if i in places else "_" for i in range(len(shape))]
        else:
            for target, i in zip(targets, places, strict=True):
                one = expr("{0}.shape[{1}]", node, i)
                self._body.statements.append(Statement((target,), one))
            return
        self._body.statements.append(Statement(tuple(targets), code))

    def _hold_size(self, variable: str, size: str) -> None:
        """Keeps a variable for a size, to the end."""
        self._names.holds[variable] = f"size {size}"
        self._left[f"size {size}"] = 10**6

    def _drop_unused_sizes(self) -> None:
        """Takes the sizes that a part gives and nobody reads from the targets."""
        statements = list(self._body.walk())
        read = {one.id for s in statements for one in ast.walk(s.node) if isinstance(one, ast.Name)}
        read.update(
            word for s in statements for head, _ in s.blocks for word in re.findall(r"\w+", head)
        )
        for statement in statements:
            if statement.targets and self._counted & {*statement.targets} - read:
                statement.targets = tuple(
                    "_" if target in self._counted - read else target
                    for target in statement.targets
                )

    def _drop_unused_statements(self) -> None:
        """Removes assignments to variables that nothing reads, as those of a part without code.

        An assignment to anything else, such as an array that the model holds, is an effect.
        """
        read: set[str] = set()
        kept: list[Statement] = []
        for statement in reversed(self._body.statements):
            targets = {*(statement.targets or ())}
            is_plain = bool(targets) and not statement.blocks
            code = text(statement.node) if is_plain else str(statement)
            are_variables = all(target.isidentifier() for target in targets)
            if is_plain and are_variables and not read & targets and is_pure(code):
                continue
            kept.insert(0, statement)
            read |= {*re.findall(r"(?<![.\w])[A-Za-z_]\w*", code)}
        self._body.statements[:] = kept

    def often_asked(self) -> frozenset[str]:
        """Returns the sizes that the code uses more than once."""
        return frozenset(symbol for symbol, count in self._sizes.asked.items() if count > 1)

    # --- steps --------------------------------------------------------------------------------

    def _size_code(self, size: int | str) -> ast.expr:
        return literal(size) if isinstance(size, int) else self._size(size)

    def _size(self, expression: str) -> ast.expr:
        found = self._sizes.code(expression)
        if isinstance(found, str):
            raise UnknownSize(found, expression)
        return found

    def _line(self, source: str) -> str:
        return self._structure.program.lines.get(source, "")

    def _line_of(self, step: Any) -> str:
        if step is None:
            return ""
        return self._line(step.source if isinstance(step, Call) else step.part.source)

    def _define(self, value: str, node: ast.expr, source: str, op: str) -> None:
        """Defines the code of a value: a variable, or an inline expression."""
        uses = self._left[value]
        if uses <= 0:
            return
        if isinstance(node, _ATOMS) or is_part_of_name(node):
            if isinstance(node, ast.Name):
                self._hints.setdefault(value, re.sub(r"_\d+$", "", node.id))
            self._bind(value, node)
            self._inlined[value] = uses  # what it is a part of must stay meanwhile
            return
        if uses == 1 and value not in self._in_order and self._is_inline(value, node, source):
            self._bind(value, node)
            self._inlined[value] = 1
            return
        line = self._line(source)
        hinted = naming.targets(line)
        is_final = any(
            self._line_of(user) != line or self._repeats(value, user)
            for user in self._users.get(value, [])
        )
        target = self._new_name(value, hinted[0] if len(hinted) == 1 and is_final else "", op)
        self._emit((target,), node, line)
        self._names.holds[target] = value
        self._bind(value, name(target))

    def _name_constants(self, constants: Iterable[tuple[str, str, ast.expr]]) -> None:
        """Defines variables for constants, with the names that are wanted for them."""
        for value, wanted, node in constants:
            target = self._new_name(value, wanted)
            self._emit((target,), node)
            self._names.holds[target] = value
            self._bind(value, name(target))

    def _repeats(self, value: str, user: Any) -> bool:
        """Returns whether a value and its user are two iterations of a loop, or of two loops."""
        for step in self._unit.steps:
            if isinstance(step, Call) and step.name == value and isinstance(user, Call):
                base = step.op.partition("::")[2].partition(".")[0]
                is_view = base.startswith(_VIEWS) and not base.endswith("scatter")
                return step.op == user.op and not is_view
            if isinstance(step, Unit) and isinstance(user, Unit) and value in step.gives:
                are_items = step.path[-1:].isdigit() and user.path[-1:].isdigit()
                return (are_items and step.part.source != user.part.source) or (
                    re.sub(r"\d+", "", step.path) == re.sub(r"\d+", "", user.path)
                )
        return isinstance(user, Unit) and self._follows_item(value, user)

    def _follows_item(self, value: str, user: Unit) -> bool:
        """Returns whether a line calls an item of a list with what it made of one before."""
        makers = {v: step for step in self._unit.steps
                  for v in (step.gives if isinstance(step, Unit) else (step.name,))}  # fmt: skip
        line, kind = self._line_of(user), _ITEM.sub(".", user.path)
        left, seen = [value], {value}
        while left:
            step = makers.get(left.pop())
            if step is None or self._line_of(step) != line:
                continue
            other = step.path if isinstance(step, Unit) else user.path
            if other != user.path and _ITEM.sub(".", other) == kind:
                return True
            new = {*(step.given if isinstance(step, Unit) else refs_of(step))} - seen
            seen |= new
            left += new
        return False

    def _is_inline(self, value: str, node: ast.expr, source: str) -> bool:
        users = self._users.get(value, [])
        line = self._line(source)
        other = self._line_of(users[0]) if users else ""
        length = len(text(node))
        if users and users[0] is None:  # it is returned
            return length <= _LONGEST and (naming.is_plain(line) or not line)
        if line and line == other:
            return length <= _LONGEST and not self._repeats(value, users[0])
        if isinstance(users[0] if users else None, Call) and users[0].op == "sym::getitem":
            return True
        return naming.is_plain(line) and length <= _LONGEST // 2

    def _new_name(self, value: str, wanted: str = "", op: str = "") -> str:
        later = self._next.get(value, "")
        if later in self._names.holds and self._is_free(later):
            return later
        wanted = wanted.strip("_") and wanted
        wanted = wanted or self._hints.get(value, "") or naming.fallback(value, op)
        free = {variable for variable in self._names.holds if self._is_free(variable)}
        target = self._names.choose(wanted, free)
        self._hints.setdefault(value, re.sub(r"_\d+$", "", target))
        return target

    def _is_free(self, variable: str) -> bool:
        """Returns whether the value of a variable is no longer needed."""
        held = self._names.holds[variable]
        if any(self._left.get(one, 0) > 0 for one in self._within.get(held, (held,))):
            return False
        for value in self._inlined.keys() & self._env.keys():
            for node in ast.walk(self._env[value].node):
                if isinstance(node, ast.Name) and node.id == variable:
                    return False
        return True

    def _emit(self, targets: tuple[str, ...], node: ast.expr, origin: str = "") -> None:
        self._body.statements.append(Statement(targets, node, origin=origin))
        self._reassign(targets)

    def _reassign(self, targets: Iterable[str]) -> None:
        """Forgets the values of variables that are reassigned."""
        for target in targets:
            self._sizes.forget(target)
            for value, known in list(self._env.items()):  # what the variable held is gone
                if mentions(known.node, target):
                    del self._env[value]
            self._wholes = [one for one in self._wholes if not mentions(one[1], target)]
            self._objects = [one for one in self._objects if not mentions(one[1], target)]
        for known in self._env.values():
            self._sizes.learn(known)
