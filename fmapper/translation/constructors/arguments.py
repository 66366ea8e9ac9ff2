"""The arguments of the constructor of a class: the numbers that its submodules have differently."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fmapper.programs.reading.arithmetic import CALLED, compute, names_in_code
from fmapper.translation.code import expr, identifier, replace_nodes, text
from fmapper.translation.merging.numbers import SHORTER, numbers_in

if TYPE_CHECKING:
    from fmapper.translation.classes import Sketch

Values = tuple[object, ...]
_OF_SIZES = frozenset({"arange", "broadcast_to", "full", "ones", "reshape", "view", "zeros"})


@dataclass(slots=True)
class Arguments:
    """The arguments of the constructor of one class.

    Attributes:
        parameters: What they are called.
        numbers: For each submodule what its constructor is given.
        code: The numbers in the code of the class that are others in each, counted -> the argument,
            or code with arguments.
    """

    parameters: tuple[str, ...] = ()
    numbers: list[Values] = field(default_factory=list)
    code: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Column:
    """A number that the submodules have in one place.

    Attributes:
        at: Which of the numbers in the code it is.
        values: What each submodule has there.
        key: The keyword that it is given for, or function and position.
        place: The part whose constructor is given it; None where a method reads it.
    """

    at: int
    values: Values
    key: str
    place: str | None


def arguments_of_class(group: Sequence[Sketch], names: Mapping[str, Sequence[str]]) -> Arguments:
    """Returns the arguments that make all submodules of a group by one class.

    They are called as in the constructor of the source, where that is known, and what it computes
    of them is computed of them here.

    Args:
        group: Submodules whose classes differ only in numbers.
        names: Classes of the target -> the names of the parameters of their constructors.
    """
    every = _columns_that_differ(group)
    if not every:
        return Arguments()
    columns = [one for one in every if not _is_flag(one, group[0])]
    reserved = _names_in_use(group[0])
    found: dict[Values, str] = {}
    for values, variables in _variables(columns, group).items():
        found[values] = identifier(variables[0], {*reserved, *found.values()})
    derived: dict[Values, str] = {}
    own: dict[int, str] = {}
    for again in (False, True):
        for column in columns:
            if column.values not in found and (code := _derive(column, group, found, reserved)):
                own[column.at] = derived[column.values] = code
        for column in columns if not again else ():  # what methods read may tell the others
            is_left = column.values not in found and column.values not in derived
            known = "" if _code_at(column.place, group) else _attribute_with(column.values, group)
            if is_left and known:
                found[column.values] = identifier(known, {*reserved, *found.values()})
    for column in columns:
        if column.values not in found and column.values not in derived:
            known = _attribute_with(column.values, group)
            wanted = known or _parameter_name(column.key, names)
            found[column.values] = identifier(wanted, {*reserved, *found.values()})
    by_column = {one.at: own.get(one.at) or (found | derived)[one.values] for one in columns}
    for column in every:
        if _is_flag(column, group[0]):  # two that happen to be equal are two arguments still
            values = *column.values, column.key
            name = identifier(column.key, {*reserved, *found.values()})
            by_column[column.at] = found.setdefault(values, name)
    ordered = _sort(found, [*_fullest(group).numbers])
    rows = [tuple(values[at] for values, _ in ordered) for at in range(len(group))]
    return Arguments(tuple(name for _, name in ordered), rows, by_column)


def _columns_that_differ(group: Sequence[Sketch]) -> list[_Column]:
    rows = [[(c.value, key) for node in s.nodes() for c, key in numbers_in(node)] for s in group]
    places = _places(group[0])
    found = []
    for at, column in enumerate(zip(*rows, strict=True)):
        values = tuple(value for value, _ in column)
        if len({(type(value), value) for value in values}) > 1:
            place = places[at] if at < len(places) else None
            found.append(_Column(at, values, column[0][1], place))
    return found


def _is_flag(column: _Column, sketch: Sketch) -> bool:
    """Returns whether a column is a variable of the source that is true or false."""
    return type(column.values[0]) is bool and column.key in sketch.words


def _places(sketch: Sketch) -> list[str]:
    """Returns for each number in the code for the parts of a submodule which part is given it."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, path: str) -> None:
        for inner in ast.walk(node):
            found[id(inner)] = path
        items: Sequence[ast.expr] = node.elts if isinstance(node, ast.List) else ()
        if isinstance(node, ast.Call):
            items = node.args
            if len(items) == 1 and isinstance(items[0], ast.List | ast.ListComp):
                only = items[0]
                items = only.elts if isinstance(only, ast.List) else [only.elt]
        for at, item in enumerate(_flat(items)):
            for one in _sides(item):
                if isinstance(one, ast.Call):
                    visit(one, f"{path}.{at}" if path else str(at))

    for attr, node in sketch.made:
        for one in _sides(node):
            visit(one, "" if sketch.is_sequence else attr)
    return [found[id(one)] for _, node in sketch.made for one, _ in numbers_in(node)]


def _flat(items: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """Yields items, also those that are there below a condition: `*((a, b) if c else ())`."""
    for item in items:
        match item:
            case ast.Starred(ast.IfExp(body=ast.Tuple(inner))):
                yield from inner
            case _:
                yield item


def _sides(node: ast.expr) -> list[ast.expr]:
    """Returns what may be there below a condition, after it; the code itself without one."""
    return [node, node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]


def _names_in_use(sketch: Sketch) -> set[str]:
    """Returns names that arguments cannot have: other arguments, attributes, and what is read."""
    nodes = (one for _, node in sketch.made for one in ast.walk(node))
    read = {one.id for one in nodes if isinstance(one, ast.Name)}
    methods = {method.name for method in sketch.methods}
    own = {name for name, _ in sketch.made}
    return {"rngs", "self", "key", "keys", *CALLED, *sketch.given, *own, *methods, *read}


def _code_at(place: str | None, group: Sequence[Sketch]) -> list[str]:
    """Returns what the source's constructor gives a part, or the one that is around it."""
    sketch = _fullest(group)
    for path in (place, place.removesuffix(".0")) if place is not None else ():
        found = [code for key, code in sketch.code.items() if key.rpartition(".")[0] == path]
        if found:
            return found
    return []


def _fullest(group: Sequence[Sketch]) -> Sketch:
    """Returns the submodule of whose constructor most is known."""
    return max(group, key=lambda one: len(one.code))


def _variables(columns: Sequence[_Column], group: Sequence[Sketch]) -> dict[Values, list[str]]:
    """Returns what the source's constructor calls numbers, its first parameters first."""
    order = {name: at for at, name in enumerate(_fullest(group).numbers)}
    found: dict[Values, list[str]] = {}
    for column in columns:
        for written in _code_at(column.place, group):
            if written.isidentifier() and _agree(group, written, column.values):
                found.setdefault(column.values, []).append(written)
    last = len(order)
    return {values: sorted(names, key=lambda one: order.get(one, last))
            for values, names in found.items()}  # fmt: skip


def _agree(group: Sequence[Sketch], name: str, values: Values) -> bool:
    """Returns whether these are the values of a variable, as far as those are known."""
    known = [one.numbers.get(name) for one in group]
    pairs = zip(known, values, strict=True)
    return any(one is not None for one in known) and all(
        one is None or repr(one) == repr(value) for one, value in pairs
    )


def _derive(
    column: _Column, group: Sequence[Sketch], found: dict[Values, str], reserved: Collection[str]
) -> str:
    """Returns the code of the source for a number, where it says of arguments what that is.

    One argument that nothing else needs may be added to those that are found.
    """
    given: list[dict[str, Any]] = [
        {**sketch.numbers, **{name: values[at] for values, name in found.items()}}
        for at, sketch in enumerate(group)
    ]
    for written in _code_at(column.place, group):
        names = names_in_code(written)
        values = [compute(written, one) for one in given]
        if not names or [*map(repr, values)] != [*map(repr, column.values)]:
            continue
        lacking = [name for name in names if name not in found.values()]
        if len(lacking) > 1 or any(name in reserved for name in lacking):
            continue
        for name in lacking:
            found[tuple(one[name] for one in given)] = name
        return written
    return ""


def _attribute_with(values: Values, group: Sequence[Sketch]) -> str:
    """Returns what the source calls a number of each submodule; empty where that is not clear."""
    found = [name for name in group[0].numbers if _agree(group, name, values)]
    if len(found) > 1:  # an argument, and the attributes that hold it
        sketch = _fullest(group)
        given = {name for code in sketch.code.values() for name in names_in_code(code)}
        found = [name for name in found if name in given]
    return found[0] if len(found) == 1 else ""


def _sort(found: Mapping[Values, str], known: Sequence[str]) -> list[tuple[Values, str]]:
    """Returns arguments in the order of the source, then those called as the first two, then flags.

    Args:
        found: The values of each -> its name.
        known: The names of the source, in order.
    """
    names = [name for values, name in found.items() if type(values[0]) is not bool]
    first = {re.sub(r"_\d+$", "", name) for name in names[:2]}

    def rank(one: tuple[Values, str]) -> tuple[int, int]:
        values, name = one
        if type(values[0]) is bool:
            return 3, 0
        if name in known:
            return 0, known.index(name)
        return (1 if re.sub(r"_\d+$", "", name) in first else 2), 0

    return sorted(found.items(), key=rank)


def _parameter_name(key: str, names: Mapping[str, Sequence[str]]) -> str:
    function, _, at = key.rpartition(":")
    if not function:
        return SHORTER.get(at, at) or "value"
    known = names.get(function, ())
    if int(at) < len(known):
        return known[int(at)]
    return "size" if function.rpartition(".")[2] in _OF_SIZES else "value"


def with_arguments(sketch: Sketch, code: Mapping[int, str]) -> tuple[Sketch, tuple[str, ...]]:
    """Returns a class with arguments in the places of numbers, and those that methods read.

    Args:
        sketch: The class of one submodule.
        code: The numbers in its code, counted -> the argument, or code with arguments.
    """
    left = iter(range(sum(1 for node in sketch.nodes() for _ in numbers_in(node))))
    stored: dict[str, None] = {}

    def put(node: Any, owner: str) -> bool:
        here = {id(one): code.get(next(left), "") for one, _ in numbers_in(node)}
        for key, written in here.items():
            names = names_in_code(written) if owner and written else []
            stored.update(dict.fromkeys(names))
            for name in names:
                here[key] = re.sub(rf"(?<![.\w]){name}\b", owner + name, here[key])
        replace_nodes(node, {key: expr(one) for key, one in here.items() if one})
        return any(here.values())

    made = copy.deepcopy(sketch.made)
    for _, node in made:
        put(node, "")
    methods = []
    for method in sketch.methods:
        comments = dict(method.comments)
        lines = [_put_in_line(line, put, comments) for line in method.lines]
        methods.append(replace(method, lines=lines, comments=comments))
    return replace(sketch, made=made, methods=methods, given={}), tuple(stored)


def _put_in_line(line: str, put: Callable[[Any, str], bool], comments: dict[str, str]) -> str:
    tree = ast.parse(line)
    if not put(tree, "self."):
        return line
    found = text(tree)
    for old, new in zip(line.splitlines(), found.splitlines(), strict=False):
        if old.strip() in comments:
            comments[new.strip()] = comments[old.strip()]
    return found
