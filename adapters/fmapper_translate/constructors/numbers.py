"""Numbers that constructors compute with tensors: a file computes them with NumPy, untraced."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fmapper.translation import literal
from fmapper_translate.functions import Function
from fmapper_translate.printing.selections import number_of, operands

METHODS = ("item", "tolist")


def tensors_of_numbers(function: Function, *, constructs: bool) -> set[ast.AST]:
    """Returns the expressions of tensors that become Python's numbers in a function.

    Those are not among them that a condition asks for when the model runs.
    """
    bound: dict[str, list[ast.expr]] = {}
    for node in function.nodes:
        match node:
            case ast.Assign([ast.Name(name)], value):
                bound.setdefault(name, []).append(value)
            case (
                ast.For(target=ast.Name(name), iter=value)
                | ast.comprehension(target=ast.Name(name), iter=value)
            ):
                bound.setdefault(name, []).append(value)
    sources: set[ast.AST] = set()
    tests = [] if constructs else [x.test for x in function.nodes if isinstance(x, ast.If)]
    asked = {number_of(item) for test in tests for item in operands(test)}
    todo = [
        node.func.value for node in function.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in METHODS and node.func.value not in asked
    ]  # fmt: skip
    while todo:
        for node in _origins(todo.pop()):
            values = bound.get(node.id, []) if isinstance(node, ast.Name) else [node]
            todo += [item for item in values if item not in sources and item is not node]
            sources.update(values)
    return sources


def _origins(node: ast.expr) -> Iterator[ast.expr]:
    """Returns what an expression computes with: names, and itself if it has none."""
    yield node
    yield from (item for item in ast.walk(node) if isinstance(item, ast.Name))


def in_numpy(code: ast.expr) -> ast.expr:
    """Returns code for JAX as that for NumPy."""
    made = literal(code)
    for node in ast.walk(made):
        if isinstance(node, ast.Name) and node.id == "jnp":
            node.id = "np"
    return made
