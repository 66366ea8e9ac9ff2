"""The parts of a model that the attributes of a class stand for, and functions use."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fmapper.translation import Class, expr, text
from fmapper_adapters.jax.translation.functions.layers import LAYER

FROZEN = "Frozen"  # marks the code of an array that is not trained
STACKED = "Stacked"  # marks the code of a block that several are


@dataclass(slots=True)
class Function:
    """A class of the file as a function.

    Attributes:
        cls: The class.
        name: The name of the function.
        keys: Its attributes -> the keys of their arrays.
        told: The parameters of its constructor that the function takes.
        making: Those that its arrays are made with.
        has_arrays: Whether it has any.
    """

    cls: Class
    name: str
    keys: Mapping[str, str]
    told: tuple[str, ...] = ()
    making: tuple[str, ...] = ()
    has_arrays: bool = False

    @property
    def parts(self) -> Mapping[str, ast.expr]:
        """The attributes -> the code that makes them."""
        return dict(self.cls.sketch.made)

    def name_of(self, method: str) -> str:
        """Returns the function of a method."""
        if method == "check_inputs":
            return f"check_inputs_of_{self.name}"
        return self.name if method == "__call__" else f"{self.name}_{method}"


@dataclass(slots=True)
class Thing:
    """A part of the model where a function uses it.

    Attributes:
        made: The code that makes it, in terms of the function's own parameters.
        arrays: The code for its arrays.
        function: The function that it is; None for a layer, a list, or an array.
    """

    made: ast.expr
    arrays: ast.expr
    function: Function | None = None
    given: Mapping[str, ast.expr] = field(default_factory=dict)

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer."""
        return isinstance(self.made, ast.Call) and text(self.made.func) == LAYER

    def items(self, functions: Mapping[str, Function]) -> list[Thing]:
        """Returns the parts of a list."""
        return [
            thing_of(node, _at(self.arrays, at), functions)
            for at, node in enumerate(items_of(self.made))
        ]

    def key(self) -> str:
        """Returns what is equal for parts that one loop can call."""
        if self.is_layer and isinstance(self.made, ast.Call):
            return text(ast.Call(self.made.func, [self.made.args[0]], self.made.keywords))
        return self.function.name if self.function else ""


def items_of(made: ast.expr) -> list[ast.expr]:
    """Returns the code for each part of a list."""
    if isinstance(made, ast.ListComp):
        count = made.generators[0].iter
        assert isinstance(count, ast.Call)
        return [made.elt] * int(ast.literal_eval(count.args[0]))
    return list(made.elts) if isinstance(made, ast.List) else []


def is_stacked(made: ast.AST | None) -> bool:
    """Returns whether code makes the arrays of several blocks as one."""
    return isinstance(made, ast.Call) and text(made.func) == STACKED


def thing_of(made: ast.expr, arrays: ast.expr, functions: Mapping[str, Function]) -> Thing:
    """Returns what code makes."""
    function = functions.get(text(made.func)) if isinstance(made, ast.Call) else None
    if function is None or not isinstance(made, ast.Call):
        return Thing(made, arrays)
    given = dict(zip(function.cls.parameters, made.args, strict=True))
    return Thing(made, arrays, function, given)


def inside(owner: Thing, attr: str, functions: Mapping[str, Function]) -> Thing | None:
    """Returns an attribute of a part: a part of it, or an array; None where it is neither."""
    function = owner.function
    if function is None:
        return Thing(expr("None"), _at(owner.arrays, attr)) if owner.is_layer else None
    made = _Give(owner.given).visit(copy.deepcopy(function.parts[attr]))
    return thing_of(made, _at(owner.arrays, function.keys[attr]), functions)


def _at(arrays: ast.expr, key: str | int) -> ast.expr:
    return expr("{0}[{1}]", arrays, key)


class _Give(ast.NodeTransformer):
    """Puts what a constructor is given in the place of its parameters."""

    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replaces a parameter."""
        return copy.deepcopy(self._given.get(node.id, node))


def options_of(
    cls: Class, made: Sequence[tuple[str, ast.expr]], functions: Mapping[str, Function]
) -> tuple[str, ...]:
    """Returns the parameters of a class that its function needs when it is called."""
    used = set(cls.stored)

    def names(node: ast.AST) -> set[str]:
        return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}

    def visit(node: ast.expr) -> None:
        if isinstance(node, ast.Call) and is_stacked(node):
            visit(node.args[0])
        elif isinstance(node, ast.ListComp):
            visit(node.elt)
        elif isinstance(node, ast.List):
            for item in node.elts:
                visit(item)
        elif isinstance(node, ast.Call) and text(node.func) == LAYER:
            for key in node.keywords:
                used.update(names(key.value))
        elif isinstance(node, ast.Call) and text(node.func) in functions:
            child = functions[text(node.func)]
            for name, value in zip(child.cls.parameters, node.args, strict=True):
                if name in child.told:
                    used.update(names(value))

    for _, node in made:
        visit(node)
    return tuple(name for name in cls.parameters if name in used)
