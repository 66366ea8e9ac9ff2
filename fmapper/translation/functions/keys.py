"""Keys for random numbers, as arguments of what draws them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

from fmapper.programs.program import Call
from fmapper.translation.code import expr, name
from fmapper.translation.functions.forms import Body, Form, Statement
from fmapper.translation.units import Structure, Unit

_SEVERAL = "keys = Keys(key)"


def take_keys(body: Body, count: int) -> None:
    """Makes a function take a key, which it gives to what draws, or splits if that is several.

    Args:
        body: The function.
        count: How many of its calls are given a key.
    """
    body.randoms = True
    if count > 1:
        body.statements.insert(0, Statement(("keys",), expr(_SEVERAL.partition(" = ")[2])))
        return
    for statement in body.walk():
        statement.node = _OneKey().visit(statement.node)


def without_key(parameters: Sequence[str]) -> tuple[str, ...]:
    """Returns the parameters of a function that has no key.

    Examples:
        >>> without_key(("x", "*", "key=None"))
        ('x',)
    """
    found = [one for one in parameters if one != "key=None"]
    return tuple(found[:-1] if found[-1:] == ["*"] else found)


def attributes_for(bodies: Sequence[tuple[str, Body]]) -> list[tuple[str, ast.expr]]:
    """Returns the attributes for the draws and constants of methods, with their code."""
    held = {attr: code for _, body in bodies for attr, code in body.holds.items()}
    return [(attr, ast.parse(code, mode="eval").body) for attr, code in held.items()]


def ordered_draws(unit: Unit, draws: Callable[[str], bool]) -> frozenset[str]:
    """Returns the values of a unit that are drawn before or after others.

    Each has a statement of its own, so that the file draws in the order of its source.
    """
    if sum(draws(call.op) for call in unit.calls()) < 2:
        return frozenset()
    return frozenset(step.name for step in unit.steps if isinstance(step, Call) and draws(step.op))


class _OneKey(ast.NodeTransformer):
    """Puts the key itself in place of one that is split off."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == "keys":
            return name("key")
        self.generic_visit(node)
        return node


def units_that_draw(structure: Structure, forms: Mapping[int, Form]) -> frozenset[tuple[str, str]]:
    """Returns the paths and methods of the parts that have statements and draw."""
    units = [structure.root, *structure.root.units()]
    bodies = ((one, forms[id(one)].body) for one in units if id(one) in forms)
    return frozenset((one.path, one.part.method) for one, body in bodies if body and body.randoms)
