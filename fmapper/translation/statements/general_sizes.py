"""Makes calls of one function that differ in sizes equal, by names for those sizes.

`rope(q, cos)` for eight heads and `rope(k, cos)` for two reshape to `(batch, 8, length, 16)` and
`(batch, 2, length, 16)`. Both are `(batch, n, length, 16)`, with n from the shape of the argument.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmapper.programs.program import Call, map_arguments, refs_in
from fmapper.programs.reading.own_functions import is_copy
from fmapper.programs.treespec import Ref, Size
from fmapper.translation.code import identifier, text
from fmapper.translation.units import Structure, Unit

if TYPE_CHECKING:
    from fmapper.translation.functions.forms import Form

Row = tuple[int | str, ...]  # one size in each of several calls

UNKNOWN = "unknown_"  # begins the names of sizes that a function cannot compute
_MOST_TIMES = 9


def content_of(structure: Structure, unit: Unit, forms: Mapping[int, Form]) -> tuple[Any, ...]:
    """Returns what a call of a function computes, without sizes: equal for those of one function.

    Args:
        structure: The program.
        unit: The call.
        forms: How the functions are called that are called in it.
    """
    names: dict[str, str] = {}
    for value in refs_in((unit.part.arguments,)):
        names.setdefault(value, f"%{len({*names.values()})}")

    def plain(value: Any) -> Any:
        if isinstance(value, Ref):
            return "size" if value.name in structure.sizes else names.get(value.name, value.name)
        return "size" if _is_size(value) else value

    found: list[Any] = [unit.part.function, _shapes(structure, names)]
    found.append(map_arguments(unit.part.arguments, plain))
    for step in unit.steps:
        if isinstance(step, Call):
            if is_copy(step):
                names[step.name] = str(plain(step.args[0]))
                continue
            found.append((step.op, map_arguments((step.args, step.kwargs), plain)))
            names[step.name] = f"%{len({*names.values()})}"
        else:
            found.append((forms[id(step)].function, map_arguments(step.part.arguments, plain)))
            names |= {value: f"%{len({*names.values()})}.{i}" for i, value in enumerate(step.gives)}
    found.append(map_arguments(unit.part.result, plain))
    return tuple(map(repr, found))


def _shapes(structure: Structure, names: Mapping[str, str]) -> list[tuple[str, int]]:
    kinds = [structure.values.get(value, ("", ())) for value in names]
    return [(dtype, len(shape)) for dtype, shape in kinds]


def _is_size(value: Any) -> bool:
    return isinstance(value, Size) or (isinstance(value, int) and not isinstance(value, bool))


def general(
    structure: Structure, units: Sequence[Unit], forms: Mapping[int, Form]
) -> tuple[Structure, Unit, dict[str, Row]] | None:
    """Returns a call that stands for several: the program and the call, with names for sizes.

    Args:
        structure: The program.
        units: The calls, of one content.
        forms: How the functions are called that are called in them.

    Returns:
        With what each name stands for in each of the calls. None where a size that differs cannot
        be told from what the function is given.
    """
    found = _General(structure, units, forms)
    try:
        unit = found.unit()
    except _UnknownError:
        return None
    wider = replace(
        structure,
        values=structure.values | found.values,
        sizes=structure.sizes | found.sizes,
    )
    return wider, unit, found.rows


class _UnknownError(Exception):
    """A size is not computed from the arguments."""


class _General:
    def __init__(
        self, structure: Structure, units: Sequence[Unit], forms: Mapping[int, Form]
    ) -> None:
        self._structure, self._units, self._forms = structure, units, forms
        self.rows: dict[str, Row] = {}  # names of sizes that differ -> what they are in each call
        self._named: set[str] = set()  # those of them that are arguments
        self._turns: Counter[Row] = Counter()  # how often a shape or call has such sizes so far
        self._known: set[int] = set()  # sizes of arguments that do not
        self._unknown: dict[Row, str] = {}  # sizes of results that the arguments do not tell
        self.values: dict[str, Any] = {}
        self.sizes: dict[str, str] = {}

    def unit(self) -> Unit:
        """Returns the first call, with names for the sizes that are not those of all calls."""
        first = self._units[0]
        given = [one.part.arguments for one in self._units]
        arguments = {key: self._argument(key, rows) for key, rows in _by_key(given)}
        for values in zip(*(refs_in((one,)) for one in given), strict=True):
            self._learn(values)
        steps: list[Call | Unit] = []
        rows = zip(*map(_steps_of, self._units), strict=True)
        for step in first.steps:
            if isinstance(step, Call) and is_copy(step):
                of = step.args[0].name
                self.values[step.name] = self.values.get(of) or self._structure.values[of]
                steps.append(replace(step, result=(self.values[step.name],)))
                continue
            several = next(rows)
            if isinstance(step, Call):
                calls = [one for one in several if isinstance(one, Call)]
                steps.append(self._call(calls))
                continue
            steps.append(step)
            inner = [one for one in several if isinstance(one, Unit)]
            for values in zip(*(one.gives for one in inner), strict=True):
                self.values[values[0]] = self._value(values)
            if len({repr(self._numbers(one)) for one in inner}) > 1:
                raise _UnknownError
        part = replace(first.part, arguments=arguments)
        return replace(first, part=part, steps=steps)

    def _numbers(self, unit: Unit) -> list[Any]:
        """Returns the sizes that the call of an inner function is given."""
        given = [one.structure for one in self._forms[id(unit)].arguments]
        return [one for one in _leaves((unit.part.arguments, tuple(given))) if _is_size(one)]

    def _argument(self, key: str, several: Sequence[Any]) -> Any:
        """Returns an argument, with a name for a number that differs."""
        if not _is_size(several[0]):
            return several[0]
        row = tuple(one.expression if isinstance(one, Size) else one for one in several)
        if len({*row}) == 1 and not isinstance(several[0], Size):
            return several[0]
        name = identifier(key, self.rows)
        self.rows[name] = row
        self._named.add(name)
        return Size(name)

    def _learn(self, values: Sequence[str]) -> None:
        """Names the sizes of an argument that differ."""
        dtype, _ = self._structure.values.get(values[0], ("", ()))
        shape: list[int | str] = []
        seen: Counter[Row] = Counter()
        for row in zip(*map(self._shape, values), strict=True):
            if len({*row}) == 1:
                shape.append(row[0])
                self._known |= {one for one in row if isinstance(one, int)}
                continue
            names = [name for name, known in self.rows.items() if known == row]
            if seen[row] == len(names):  # a square has two
                names.append(f"size_{len(self.rows)}")
                self.rows[names[-1]] = row
            shape.append(names[seen[row]])
            seen[row] += 1
        self.values[values[0]] = (dtype, tuple(shape))

    def _shape(self, value: str) -> Row:
        return self._structure.values.get(value, ("", ()))[1]

    def _value(self, values: Sequence[str]) -> Any:
        """Returns dtype and shape of a value, with names."""
        dtype, _ = self._structure.values.get(values[0], ("", ()))
        return dtype, self._result([self._shape(value) for value in values])

    def _result(self, shapes: Sequence[Row]) -> Row:
        """Returns the shape of a result; a size that no argument tells has a name of its own."""
        self._turns.clear()
        return tuple(
            self._unknown.setdefault(row, f"{UNKNOWN}{len(self._unknown)}")
            if size is None
            else size
            for row in zip(*shapes, strict=True)
            for size in [self._try(row)]
        )

    def _call(self, calls: Sequence[Call]) -> Call:
        first = calls[0]
        self._turns.clear()
        rows = [*zip(*(_leaves((one.args, one.kwargs)) for one in calls), strict=True)]
        if len({*map(_dimension, calls)}) > 1:
            raise _UnknownError
        for row in rows:
            self._check(row, calls)
        leaves = iter([self._leaf(row) for row in rows])
        args, kwargs = map_arguments((first.args, first.kwargs), lambda _: next(leaves))
        result = tuple(
            (several[0][0], self._result([shape for _, shape in several]))
            for several in zip(*(one.result for one in calls), strict=True)
        )
        if len(result) == 1:
            self.values[first.name] = result[0]
        return replace(first, args=args, kwargs=kwargs, result=result)

    def _check(self, row: Sequence[Any], calls: Sequence[Call]) -> None:
        """Refuses numbers that differ and are not sizes, as strides, whatever sizes they equal."""
        are_numbers = all(type(one) is int for one in row)
        if not are_numbers or len({*row}) == 1 or _takes_bounds(calls[0]):
            return
        dims = {size for one in calls for _, shape in one.result for size in shape}
        is_given = tuple(row) in [self.rows[name] for name in self._named]
        if not is_given and not {*row} - {-1} <= dims:
            raise _UnknownError

    def _leaf(self, row: Sequence[Any]) -> Any:
        sizes = self._structure.sizes
        is_size = all(_is_size(one) or (isinstance(one, Ref) and one.name in sizes) for one in row)
        if not is_size:
            return row[0]
        told = tuple(sizes[one.name] if isinstance(one, Ref) else one for one in row)
        size = self._size(told)
        if len({*told}) == 1:
            return row[0]
        name = f"general {size}"
        self.sizes[name] = str(size)
        return Ref(name)

    def _size(self, row: Row) -> int | str:
        """Returns a size as what it is in all calls: a number, or an expression of names."""
        found = self._try(row)
        if found is None:
            raise _UnknownError
        return found

    def _try(self, row: Row) -> int | str | None:
        return self._find(tuple(map(_parse, row)))

    def _find(self, row: tuple[ast.expr, ...]) -> int | str | None:
        plain = tuple(_plain(one) for one in row)
        if len({*plain}) == 1:
            return plain[0]
        name = self._next(plain)
        if name:
            return name
        numbers = tuple(one for one in plain if isinstance(one, int))
        if len(numbers) == len(plain):
            return next(self._expressions(numbers), None)
        first = row[0]
        if not (isinstance(first, ast.BinOp) and all(isinstance(one, ast.BinOp) for one in row)):
            return None
        pairs = [(one.left, one.right) for one in row if isinstance(one, ast.BinOp)]
        if len({type(one.op) for one in row if isinstance(one, ast.BinOp)}) > 1:
            return None
        left, right = (self._find(several) for several in zip(*pairs, strict=True))
        return None if left is None or right is None else _join(left, first.op, right)

    def _next(self, row: Row) -> str:
        """Returns the name of a size: of several that are equal each time one after the other."""
        names = [
            name
            for name, known in self.rows.items()
            if tuple(_plain(_parse(one)) for one in known) == row
        ]
        at = self._turns[row]
        self._turns[row] += bool(names)
        return names[at % len(names)] if names else ""

    def _expressions(self, row: tuple[int, ...]) -> Iterator[str]:
        """Yields what a size may be: a product or quotient of others that all calls have."""
        atoms: dict[tuple[int, ...], int | None] = {}
        for known in self.rows.values():
            whole = tuple(one for one in known if isinstance(one, int) and one > 0)
            if len(whole) == len(row):
                atoms[whole] = None
        for one in sorted(self._known - {0}, reverse=True):
            atoms.setdefault((one,) * len(row), one)
        atoms |= {(ratio,) * len(row): ratio for ratio in range(2, _MOST_TIMES)}
        for (xs, a), (ys, b) in itertools.product(atoms.items(), repeat=2):
            pairs = [*zip(xs, ys, row, strict=True)]
            operation: ast.operator | None = None
            if all(x * y == size for x, y, size in pairs):
                operation = ast.Mult()
            elif all(x // y == size and x % y == 0 for x, y, size in pairs):
                operation = ast.FloorDiv()
            if operation is not None:
                yield _join(a or self._next(xs), operation, b or self._next(ys))


def _takes_bounds(call: Call) -> bool:
    """Returns whether an operation is given where a part of an array begins and ends."""
    return call.op.partition("::")[2].startswith(("slice", "narrow", "select", "split", "arange"))


def _dimension(call: Call) -> int | None:
    """Returns along which dimension a part of an array is taken: that is not a size."""
    name = call.op.partition("::")[2].partition(".")[0]
    if not name.startswith(("slice", "narrow", "select", "split")):
        return None
    at = 2 if name.startswith("split") or name.endswith("scatter") else 1
    found = call.args[at] if at < len(call.args) else None
    return found if type(found) is int else None


def _parse(size: int | str) -> ast.expr:
    return ast.parse(str(size), mode="eval").body


class _Joining(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        inner, is_quotient = node.left, isinstance(node.op, ast.FloorDiv)
        if not (
            is_quotient and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv)
        ):
            return node
        numbers = _number(inner.right), _number(node.right)
        if 0 in numbers:
            return node
        return ast.BinOp(inner.left, node.op, ast.Constant(numbers[0] * numbers[1]))


def _number(node: ast.expr) -> int:
    return max(node.value, 0) if isinstance(node, ast.Constant) and type(node.value) is int else 0


def _plain(size: ast.expr) -> int | str:
    """Returns a size as a number, or as an expression in one form: `n // 4 // 2` is `n // 8`.

    Examples:
        >>> _plain(_parse("((n)//(4))//(2)"))
        'n // 8'
    """
    node = _Joining().visit(copy.deepcopy(size))
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int)
    return node.value if is_number else text(node)


def _join(left: int | str, op: ast.operator, right: int | str) -> str:
    return text(ast.BinOp(_parse(left), op, _parse(right)))


def _steps_of(unit: Unit) -> list[Call | Unit]:
    return [step for step in unit.steps if not (isinstance(step, Call) and is_copy(step))]


def _by_key(given: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    for key in given[0]:
        yield key, [one[key] for one in given]


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_arguments(value, found.append)
    return found
