"""The written form of a unit: statements, signature, and structures of values."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fmapper.programs.program import refs_in
from fmapper.programs.treespec import Ref
from fmapper.translation.code import expr, literal, text

if TYPE_CHECKING:
    from fmapper.translation.dialect import Layer
    from fmapper.translation.functions.shapes import Shapes


_DRAWS = re.compile(r"^self\.|rand|normal|bernoulli|multinomial|dropout|rngs")


@dataclass(slots=True)
class Statement:
    """One statement: an assignment to variables, or a return.

    Attributes:
        targets: The variables; `_` for what nobody uses. None for a statement that returns.
        node: The expression.
        blocks: Of a loop or branch: each beginning, as `for x in xs`, and the statements below.
        origin: The line of the model's code that it comes from; empty if it reads for itself.
        shapes: The shapes of its variables, where they are arrays.
    """

    targets: tuple[str, ...] | None
    node: ast.expr
    blocks: tuple[tuple[str, list[Statement]], ...] = ()
    origin: str = ""
    shapes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.blocks:
            return "\n".join(_block(*block) for block in self.blocks)
        code = text(self.node)
        is_bare = self.targets is None or len(self.targets) > 1
        if is_bare and isinstance(self.node, ast.Tuple) and len(self.node.elts) > 1:
            code = code[1:-1]
        if self.targets is None:
            return f"return {code}"
        return f"{', '.join(self.targets)} = {code}" if self.targets else code


def _block(beginning: str, statements: list[Statement]) -> str:
    lines = "\n".join(map(str, statements)) or "pass"
    return f"{beginning}:\n{textwrap.indent(lines, '    ')}"


@dataclass(slots=True)
class Body:
    """A function for one call of a submodule.

    Attributes:
        parameters: Its parameters.
        statements: What it does.
        layers: Layers that the submodule gets, by name.
        arrays: Arrays of its own that it names, by their path from there.
        randoms: Whether it draws random numbers.
        holds: What its object keeps for that, and its constants -> the code that makes them.
        written: Buffers that it gives new values.
        shapes: Those of each call.
        comments: The model's own lines for statements that do not read for themselves.
    """

    parameters: tuple[str, ...]
    statements: list[Statement] = field(default_factory=list)
    layers: dict[str, Layer] = field(default_factory=dict)
    arrays: dict[str, str] = field(default_factory=dict)
    randoms: bool = False
    holds: dict[str, str] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    shapes: list[Shapes] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)

    def walk(self) -> Iterator[Statement]:
        """Yields the statements, those in loops and branches, too."""
        todo = list(reversed(self.statements))
        while todo:
            statement = todo.pop()
            yield statement
            todo += [one for _, inner in statement.blocks for one in inner]

    def lines(self) -> list[str]:
        """Returns the statements as text."""
        return [str(statement) for statement in self.statements]


@dataclass(slots=True)
class Argument:
    """A parameter of a function, and what its call gives it.

    Attributes:
        name: Its name.
        structure: The structure of values that it takes.
        at: Its place among the arguments of the source's call; past those for what is beside them.
        kind: `used`; `unused` for arrays that the code does not need; `fixed` for a constant;
            `twin` for a value that another one has, too; `size`.
        twin: The name of that other one.
        has_default: It may be omitted.
        by_keyword: It is given by keyword.
    """

    name: str
    structure: Any
    at: int
    kind: str = ""
    twin: str = ""
    has_default: bool = False
    by_keyword: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether there is but one value that the code is written for."""
        return self.kind in ("fixed", "twin")


@dataclass(slots=True)
class Form:
    """The signature of a unit.

    Attributes:
        layer: The layer that it is; None for a class.
        body: The function of its class.
        method: The name of that function; empty for `__call__`.
        given: For each parameter that its code uses the structure of values that it takes.
        returns: The structure of values that it gives.
        arguments: All parameters.
    """

    layer: Layer | None = None
    body: Body | None = None
    method: str = ""
    given: tuple[tuple[str, Any], ...] = ()
    returns: Any = None
    arguments: tuple[Argument, ...] = ()

    @property
    def takes_sizes(self) -> bool:
        """Whether sizes are among its arguments."""
        return any(one.kind == "size" for one in self.arguments)


class Made(dict[str, Any]):
    """An object of a class of the file, by its fields.

    Attributes:
        cls: The name of the class.
    """

    def __init__(self, cls: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.cls = cls


class FieldName(str):
    """The name of a field, among the keys and indices of a structure."""

    __slots__ = ()


def mentions(node: ast.expr, variable: str) -> bool:
    """Returns whether code names a variable."""
    return any(isinstance(one, ast.Name) and one.id == variable for one in ast.walk(node))


def is_pure(code: str) -> bool:
    """Returns whether code calls nothing but functions of arrays, which change and draw nothing.

    Examples:
        >>> is_pure("x = F.relu(y).to(torch.int64)"), is_pure("x = self.part(y)")
        (True, False)
        >>> is_pure("x = y.add_(1)"), is_pure("x = torch.rand(3)")
        (False, False)
    """
    calls = [one.func for one in ast.walk(ast.parse(code)) if isinstance(one, ast.Call)]
    return all(
        isinstance(one, ast.Attribute)
        and not one.attr.endswith("_")
        and not _DRAWS.search(text(one))
        for one in calls
    )


def is_flat(structure: Any) -> bool:
    """Returns whether a structure is a tuple of values."""
    return isinstance(structure, tuple) and all(
        not isinstance(one, tuple | Mapping) for one in structure
    )


def places(structure: Any) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yields the values in a structure, each with its keys and indices."""
    for path, one in _inside(structure):
        if isinstance(one, Ref):
            yield path, one.name


def objects_in(structure: Any) -> Iterator[tuple[tuple[Any, ...], Made]]:
    """Yields the objects in a structure, outer ones first, each with its keys and indices."""
    for path, one in _inside(structure):
        if isinstance(one, Made):
            yield path, one


def tuples_in(structure: Any, node: ast.expr) -> Iterator[tuple[Any, ast.expr]]:
    """Yields the tuples and dicts in a structure, outer ones first, with the code for each."""
    for path, one in _inside(structure):
        if is_plain(one) and any(True for _ in places(one)):
            yield one, at(node, path)


def is_plain(structure: Any) -> bool:
    """Returns whether a structure is a tuple or a dict, and no object of a class of the file."""
    return isinstance(structure, tuple | Mapping) and not isinstance(structure, Made)


def _inside(structure: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields a structure and all that is in it, outer ones first, with keys and indices."""
    yield path, structure
    if isinstance(structure, Ref):
        return
    if isinstance(structure, tuple):
        for i, one in enumerate(structure):
            yield from _inside(one, (*path, i))
    elif isinstance(structure, Mapping):
        for key, one in structure.items():
            step = FieldName(key) if isinstance(structure, Made) else key
            yield from _inside(one, (*path, step))


def at(node: ast.expr, path: tuple[Any, ...]) -> ast.expr:
    """Returns the code for an element of a structure."""
    for key in path:
        is_field = isinstance(key, FieldName)
        node = ast.Attribute(node, key, ast.Load()) if is_field else expr("{0}[{1}]", node, key)
    return node


def with_objects(structure: Any, objects: Sequence[Made]) -> Any:
    """Returns a structure with objects in place of the dicts that equal them."""
    if isinstance(structure, tuple):
        return tuple(with_objects(one, objects) for one in structure)
    if isinstance(structure, Mapping):
        known = next((made for made in objects if made and made == structure), None)
        if known is None:
            return {key: with_objects(one, objects) for key, one in structure.items()}
        return known
    return structure


def is_part_of_name(node: ast.expr) -> bool:
    """Returns whether code is a name, or an attribute or item of one."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
        node = node.value
    return isinstance(node, ast.Name)


def is_lost(structure: Any) -> bool:
    """Returns whether a structure has values that torch has left out."""
    return any(value.startswith("?") for value in refs_in((structure,)))


def kind_of_field(structure: Any) -> str:
    """Returns the type of a field of a result; empty for an array."""
    if isinstance(structure, Ref):
        return ""
    if isinstance(structure, Made):
        return structure.cls
    kind = type(structure).__name__
    return kind if kind in ("tuple", "dict", "bool", "int", "float", "str") else "object"


def condition_on(
    arguments: tuple[Argument, ...],
) -> tuple[ast.expr, str] | None:
    """Returns what must hold of arguments that the code does not see for itself, and how to say it.

    Examples:
        >>> cache, mask = Argument("cache", None, 1, "fixed"), Argument("mask", None, 2, "fixed")
        >>> condition, message = condition_on((cache, mask))
        >>> text(condition), message
        ('cache is mask is None', 'this is written for cache=None, mask=None')
    """
    told: list[str] = []
    conditions: list[str] = []
    alike: dict[str, list[str]] = {}  # None, True or False -> the arguments that are to be that
    for one in arguments:
        if one.kind == "twin":
            told.append(f"{one.name}={one.twin}")
            same = f"{one.name} is {one.twin}"
            conditions.append(f"({one.name} is None or {same})" if one.has_default else same)
        elif one.kind == "used" and (items := _find_same(one.name, one.structure)):
            told += (condition.replace(" is ", "=") for condition in items)
            conditions += items
        elif one.kind == "fixed":
            value = text(literal(one.structure))
            told.append(f"{one.name}={value}")
            if one.structure is None or isinstance(one.structure, bool):
                alike.setdefault(value, []).append(one.name)
            else:
                conditions.append(f"{one.name} == {value}")
    conditions = [" is ".join([*names, value]) for value, names in alike.items()] + conditions
    if not conditions:
        return None
    condition = ast.parse(" and ".join(conditions), mode="eval").body
    return condition, f"this is written for {', '.join(told)}"


def _find_same(name: str, structure: Any) -> list[str]:
    """Returns which items of an argument are the same array, or a constant, as code.

    Examples:
        >>> _find_same("carry", (Ref("a"), (Ref("b"), Ref("a"))))
        ['carry[1][1] is carry[0]']
        >>> _find_same("given", Made("Given", {"x": Ref("a"), "mask": None, "heads": 3}))
        ['given.mask is None', 'given.heads == 3']
    """
    first: dict[str, str] = {}
    found: list[str] = []
    for path, one in _inside(structure):
        place = text(at(ast.Name(name), path))
        if isinstance(one, Ref):
            other = first.setdefault(one.name, place)
            found += [f"{place} is {other}"] if other != place else []
        elif one is None or isinstance(one, bool):
            found.append(f"{place} is {one}")
        elif isinstance(one, int | float | str):
            found.append(f"{place} == {text(literal(one))}")
    return found
