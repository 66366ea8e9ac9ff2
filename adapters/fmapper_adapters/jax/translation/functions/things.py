"""The parts of a model that the attributes of a class stand for, and functions use."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from fmapper.translation import Class, expr, text
from fmapper_adapters.jax.translation.functions.layers import LAYER

FROZEN = "Frozen"  # marks the code of an array that is not trained


@dataclass(slots=True)
class Function:
    """A class of the file as a function.

    Attributes:
        cls: The class.
        name: The name of the function.
        keys: Its attributes -> the keys of their arrays.
        has_arrays: Whether it has any.
    """

    cls: Class
    name: str
    keys: Mapping[str, str]
    has_arrays: bool = False

    @property
    def parts(self) -> Mapping[str, ast.expr]:
        """The attributes -> the code that makes them."""
        return dict(self.cls.sketch.made)

    def name_of(self, method: str) -> str:
        """Returns the function of a method."""
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


def items_of(made: ast.expr) -> list[ast.expr]:
    """Returns the code for each part of a list."""
    if isinstance(made, ast.ListComp):
        count = made.generators[0].iter
        assert isinstance(count, ast.Call)
        return [made.elt] * int(ast.literal_eval(count.args[0]))
    return list(made.elts) if isinstance(made, ast.List) else []


def thing_of(made: ast.expr, arrays: ast.expr, functions: Mapping[str, Function]) -> Thing:
    """Returns what code makes."""
    function = functions.get(text(made.func)) if isinstance(made, ast.Call) else None
    if function is None or not isinstance(made, ast.Call):
        return Thing(made, arrays)
    return Thing(made, arrays, function)


def inside(owner: Thing, attr: str, functions: Mapping[str, Function]) -> Thing | None:
    """Returns an attribute of a part: a part of it, or an array; None where it is neither."""
    function = owner.function
    if function is None:
        return Thing(expr("None"), _at(owner.arrays, attr)) if owner.is_layer else None
    return thing_of(function.parts[attr], _at(owner.arrays, function.keys[attr]), functions)


def _at(arrays: ast.expr, key: str | int) -> ast.expr:
    return expr("{0}[{1}]", arrays, key)
