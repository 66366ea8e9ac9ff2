"""Python code in pieces: expressions from templates, with facts about their values."""

from __future__ import annotations

import ast
import copy
import functools
import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fmapper.programs.treespec import Scalar

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Value:
    """An array in the generated code.

    Attributes:
        node: The expression that it is.
        dtype: Its dtype, by name.
        shape: Its sizes; one that may vary is an expression of symbols.
    """

    node: ast.expr
    dtype: str = ""
    shape: tuple[int | str, ...] = ()

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


def expr(template: str, *args: Any, **kwargs: Any) -> ast.expr:
    """Parses an expression template, with other expressions for its fields.

    Examples:
        >>> ast.unparse(expr("f({0}, axis={axis})", expr("a + b"), axis=-1))
        'f(a + b, axis=-1)'
        >>> ast.unparse(expr("{0}.T", expr("a + b")))
        '(a + b).T'
    """
    tree = copy.deepcopy(_parse(template))
    given = {f"_field_{i}": arg for i, arg in enumerate(args)}
    given |= {f"_field_{name}": arg for name, arg in kwargs.items()}
    found = _Fill(given).visit(tree)
    assert isinstance(found, ast.expr)
    return found


@functools.lru_cache(maxsize=4096)
def _parse(template: str) -> ast.expr:
    return ast.parse(_FIELD.sub(r"_field_\1", template), mode="eval").body


class _Fill(ast.NodeTransformer):
    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return literal(self._given[node.id]) if node.id in self._given else node


def elements(values: Any) -> Any:
    """Returns the elements of a NumPy array as numbers with no more digits than its dtype needs.

    Examples:
        >>> import numpy as np
        >>> elements(np.array([[0.1, 0.25]], np.float32))
        [[0.1, 0.25]]
    """
    if values.ndim:
        return [elements(one) for one in values]
    exact = values.item()
    short = float(str(values)) if values.dtype.kind == "f" else exact
    return short if values.dtype.type(short) == values else exact


def literal(value: Any) -> ast.expr:
    """Returns a value as an expression: arrays, numbers, texts, None, and sequences of them."""
    if isinstance(value, Value):
        return copy.deepcopy(value.node)
    if isinstance(value, ast.expr):
        return copy.deepcopy(value)
    if isinstance(value, Scalar):
        return literal(value.value)
    if isinstance(value, tuple):
        return ast.Tuple([literal(inner) for inner in value], ast.Load())
    if isinstance(value, list):
        return ast.List([literal(inner) for inner in value], ast.Load())
    if isinstance(value, Mapping):
        keys: list[ast.expr | None] = [literal(key) for key in value]
        return ast.Dict(keys, [literal(inner) for inner in value.values()])
    if isinstance(value, float) and not math.isfinite(value):
        return ast.parse(_not_finite(value), mode="eval").body
    if isinstance(value, complex):
        return ast.parse(f"complex({value.real!r}, {value.imag!r})", mode="eval").body
    if isinstance(value, bool | int | float | str) or value is None:
        return ast.parse(repr(value), mode="eval").body
    raise TypeError(f"{type(value).__name__} has no literal")


def _not_finite(value: float) -> str:
    return "float('nan')" if math.isnan(value) else f"float('{'-' if value < 0 else ''}inf')"


def text(node: ast.AST) -> str:
    """Returns the text of code."""
    return ast.unparse(ast.fix_missing_locations(node))


def name(identifier: str) -> ast.expr:
    """Returns a name as an expression."""
    return ast.Name(identifier, ast.Load())


def identifier(wanted: str, taken: Any = ()) -> str:
    """Returns an unused identifier similar to a name.

    Examples:
        >>> identifier("class"), identifier("0"), identifier("a-b"), identifier("x", {"x"})
        ('class_', 'item_0', 'a_b', 'x_2')
    """
    found = re.sub(r"\W", "_", wanted, flags=re.ASCII) or "value"
    if found[0].isdigit():
        found = f"item_{found}"
    if keyword.iskeyword(found) or keyword.issoftkeyword(found) or found == "self":
        found += "_"
    number, base = 1, found
    while found in taken:
        number += 1
        found = f"{base}_{number}"
    return found


def attribute_name(wanted: str) -> str:
    """Returns an identifier for an attribute: unlike a variable it may be called `self`.

    Examples:
        >>> attribute_name("self"), attribute_name("class")
        ('self', 'class_')
    """
    return wanted if wanted == "self" else identifier(wanted)


def attribute(owner: str, path: str) -> str:
    """Returns the code for an attribute of an object, by its path.

    Examples:
        >>> attribute("self", "layers.0.attn")
        'self.layers[0].attn'
        >>> attribute("self", "0.attn")  # the object itself is not a list
        'self.item_0.attn'
    """
    code = owner
    for step in path.split(".") if path else []:
        is_index = step.isdigit() and code != owner
        code += f"[{step}]" if is_index else f".{attribute_name(step)}"
    return code


def bare_condition(node: ast.expr) -> ast.expr:
    """Returns a condition without the integers that it was turned into, and back.

    Examples:
        >>> text(bare_condition(expr("((x > 0).all().astype(int) != 0).astype(int) == 1")))
        '(x > 0).all()'
    """
    match node:
        case ast.Compare(ast.Call(ast.Attribute(inner, "astype")), [op], [ast.Constant(value)]):
            is_itself = (isinstance(op, ast.Eq), value) in ((True, 1), (False, 0))
            if is_itself and isinstance(op, ast.Eq | ast.NotEq) and _is_condition(inner):
                return bare_condition(inner)
    return node


def is_true(node: ast.expr) -> bool:
    """Returns whether a condition on numbers is True, whatever a model is given.

    Examples:
        >>> is_true(expr("2 >= 1")), is_true(expr("_sym_not(2 == 0)")), is_true(expr("x >= 1"))
        (True, True, False)
    """
    return _truth(node) is True


def _truth(node: ast.expr) -> bool | None:
    match node:
        case ast.Compare(ast.Constant(int(left)), [op], [ast.Constant(int(right))]):
            return bool(_COMPARISONS[type(op)](left, right)) if type(op) in _COMPARISONS else None
        case ast.Call(ast.Name(name), [inner]) if name.endswith("sym_not"):
            known = _truth(inner)
            return None if known is None else not known
    return None


_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def _is_condition(node: ast.expr) -> bool:
    """Returns whether code gives a bool, or an array of them."""
    match node:
        case ast.Compare() | ast.Call(ast.Attribute(_, "all" | "any")):
            return True
    return False
