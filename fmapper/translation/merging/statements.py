"""Statements, read for the variables and numbers in them."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmapper.translation.functions.forms import Statement

Shape = tuple[int | str, ...]
_SIZES = re.compile(r"(\w+(?:, \w+)*) = (\w+)\.shape(?:\[(:?)(\d+)\])?")


@dataclass(eq=False)
class Leaf:
    """A variable or a number in a statement.

    Attributes:
        node: Its code.
        owner: What it is the index of.
        keyword: What it is given for.
        is_bound: Whether it is one end of a slice.
        version: The assignment that it is, or that gave what it reads; -1 for one from outside.
    """

    node: ast.Name | ast.Constant
    owner: ast.Subscript | None = None
    keyword: str = ""
    is_bound: bool = False
    version: int = -1

    @property
    def name(self) -> str:
        """The variable; empty for a number."""
        return self.node.id if isinstance(self.node, ast.Name) else ""

    @property
    def is_store(self) -> bool:
        """Whether it is assigned to."""
        return isinstance(self.node, ast.Name) and isinstance(self.node.ctx, ast.Store)


@dataclass(eq=False)
class Line:
    """A statement, with those that read sizes of what it assigns.

    Attributes:
        code: The statement.
        tree: Its syntax tree.
        key: Equal for statements that differ in variables and numbers.
        leaves: Its variables and numbers, in the order in which they are evaluated.
        sizes: Variables of sizes -> the place of the variable among those assigned, the dimension.
        shapes: The shapes of what it assigns; empty where they are not known.
        versions: The variables of sizes -> the assignments.
        origin: The line of the model's code that it comes from.
        after: The statements that read sizes.
    """

    code: str
    tree: ast.stmt
    key: str
    leaves: list[Leaf]
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    origin: str = ""
    after: list[str] = field(default_factory=list)

    def stores(self) -> list[Leaf]:
        """Returns what it assigns to."""
        return [leaf for leaf in self.leaves if leaf.is_store]

    def pattern(self) -> list[int]:
        """Returns for each variable in it where that is first: which of them are the same."""
        names = [leaf.name for leaf in self.leaves if leaf.name]
        return [names.index(name) for name in names]

    def read_sizes(self) -> list[str]:
        """Returns statements that read its sizes."""
        found = []
        stores = self.stores()
        for at, store in enumerate(stores):
            dims = {dim: name for name, (place, dim) in self.sizes.items() if place == at}
            ndim = len(self.shapes.get(store.name, ()))
            if len(dims) > 1 and [*dims] == [*range(len(dims))]:
                end = "" if ndim == len(dims) else f"[:{len(dims)}]"
                found.append(f"{', '.join(dims.values())} = {store.name}.shape{end}")
            elif len(dims) > 1 and 2 * len(dims) >= ndim > 0:
                names = ", ".join(dims.get(dim, "_") for dim in range(ndim))
                found.append(f"{names} = {store.name}.shape")
            else:
                found += [f"{name} = {store.name}.shape[{dim}]" for dim, name in dims.items()]
        return found


def read_lines(lines: Sequence[str], known: Mapping[str, Statement]) -> list[Line]:
    """Reads statements, each with those after it that read sizes of what it assigns.

    Args:
        lines: The statements.
        known: What is known of them.
    """
    found: list[Line] = []
    for code in lines:
        sizes = _read_sizes(code, found[-1]) if found else None
        if sizes is not None:
            found[-1].sizes |= sizes
            found[-1].after.append(code)
            continue
        (tree,) = ast.parse(code).body
        leaves = [*leaves_of(tree)]
        key = key_of(tree) if _is_simple(tree) else f"one {len(found)}"
        line = Line(code, tree, key, leaves)
        if code in known:
            line.shapes, line.origin = known[code].shapes, known[code].origin
        found.append(line)
    current: dict[str, int] = {}
    count = 0
    for line in found:
        for leaf in line.leaves:
            if leaf.is_store:
                current[leaf.name] = count
                count += 1
            leaf.version = current.get(leaf.name, -1)
        for name in line.sizes:
            line.versions[name] = current[name] = count
            count += 1
    return found


def _read_sizes(code: str, line: Line) -> dict[str, tuple[int, int]] | None:
    """Returns the variables of a statement that reads sizes of what another one assigns."""
    match = _SIZES.fullmatch(code)
    stores = [leaf.name for leaf in line.stores()]
    if match is None or stores.count(match[2]) != 1 or not isinstance(line.tree, ast.Assign):
        return None
    names = match[1].split(", ")
    dims = [int(match[4])] if match[4] and not match[3] else [*range(len(names))]
    if len(names) != len(dims) or {*names} & {*stores, *line.sizes}:
        return None
    pairs = zip(names, dims, strict=True)
    return {name: (stores.index(match[2]), dim) for name, dim in pairs if name != "_"}


def _is_simple(tree: ast.stmt) -> bool:
    """Returns whether a statement runs whole, each time."""
    kinds = (ast.Assign, ast.Expr, ast.For)
    if not isinstance(tree, kinds):
        return False
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    others = (ast.Lambda, ast.comprehension, ast.NamedExpr)
    return all(isinstance(one, kinds) for one in inner) and not any(
        isinstance(node, others) for node in ast.walk(tree)
    )


def key_of(tree: ast.stmt) -> str:
    """Returns what is equal for statements that differ in variables and numbers."""
    tree = copy.deepcopy(tree)
    for leaf in leaves_of(tree):
        if isinstance(leaf.node, ast.Name):
            leaf.node.id = "_"
        else:
            leaf.node.value = 0.0 if isinstance(leaf.node.value, float) else 0
    return ast.dump(tree)


def leaves_of(tree: ast.AST) -> Iterator[Leaf]:
    """Yields variables and numbers in the order in which they are evaluated."""

    def visit(node: ast.AST, owner: ast.Subscript | None, key: str, bound: bool) -> Iterator[Leaf]:
        if isinstance(node, ast.Name):
            yield Leaf(node)
        elif isinstance(node, ast.Constant):
            if type(node.value) in (int, float):
                yield Leaf(node, owner, key, bound)
        elif isinstance(node, ast.Assign):
            yield from visit(node.value, None, "", False)
            for target in node.targets:
                yield from visit(target, None, "", False)
        elif isinstance(node, ast.For):
            for one in (node.iter, node.target, *node.body):
                yield from visit(one, None, "", False)
        elif isinstance(node, ast.Subscript):
            yield from visit(node.value, None, "", False)
            yield from visit(node.slice, node, "", False)
        elif isinstance(node, ast.Slice):
            for end in (node.lower, node.upper, node.step):
                if end is not None:
                    yield from visit(end, None, "", True)
        else:
            key = node.arg or "" if isinstance(node, ast.keyword) else key
            for inner in ast.iter_child_nodes(node):
                yield from visit(inner, None, key, False)

    yield from visit(tree, None, "", False)
