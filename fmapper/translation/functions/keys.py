"""Keys for random numbers, as arguments of what draws them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from fmapper.programs.program import Call
from fmapper.translation.code import expr, name
from fmapper.translation.functions.forms import Body, Statement
from fmapper.translation.units import Unit


def take_keys(body: Body, count: int) -> None:
    """Makes a function take a key, which it gives to what draws, or splits if that is several.

    Args:
        body: The function.
        count: How many of its calls are given a key.
    """
    body.randoms = True
    if count > 1:
        body.statements.insert(0, Statement(("keys",), expr("Keys(key)")))
        return
    for statement in body.walk():
        statement.node = _OneKey().visit(statement.node)


def random_states(bodies: Sequence[tuple[str, Body]]) -> list[tuple[str, ast.expr]]:
    """Returns the attributes that an object has for the draws of its methods, with their code."""
    held = {attr: code for _, body in bodies for attr, code in body.holds.items()}
    return [(attr, expr(code)) for attr, code in held.items()]


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
