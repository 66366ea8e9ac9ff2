"""Keys for random numbers, as arguments of what draws them."""

from __future__ import annotations

import ast

from fmapper.translation.code import expr, name
from fmapper.translation.functions.forms import Body, Statement


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
        for node in ast.walk(statement.node):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "key":
                    keyword.value = name("key")
