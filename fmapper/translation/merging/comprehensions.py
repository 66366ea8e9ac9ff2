"""Lists of code whose items differ in a few numbers, as comprehensions."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence

from fmapper.translation.code import identifier, replace_nodes, text
from fmapper.translation.merging.numbers import mask_numbers, numbers_in

_LEAST = 3  # items that are one expression
_MOST = 3  # numbers that differ
_LONGEST = 88  # characters of a list that stays


def with_comprehensions(node: ast.expr, parameters: Mapping[str, Sequence[str]]) -> ast.expr:
    """Writes long lists whose items differ in a few numbers as comprehensions.

    Args:
        node: The code.
        parameters: What functions and classes call what they take by position.

    Examples:
        >>> blocks = ", ".join(f"Block({n}, features=8, rngs=rngs)" for n in (2, 4, 6, 8))
        >>> made = ast.parse(f"[{blocks}]", mode="eval").body
        >>> text(with_comprehensions(made, {"Block": ("width",)}))
        '[Block(width, features=8, rngs=rngs) for width in (2, 4, 6, 8)]'
    """
    found: ast.expr = _Comprehensions(parameters).visit(copy.deepcopy(node))
    return found


class _Comprehensions(ast.NodeTransformer):
    def __init__(self, parameters: Mapping[str, Sequence[str]]) -> None:
        self._parameters = parameters

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        items = node.elts
        is_long = len(items) >= _LEAST and len(text(node)) > _LONGEST
        are_calls = all(isinstance(one, ast.Call) for one in items)
        if not is_long or not are_calls or len({mask_numbers(one) for one in items}) > 1:
            return node
        numbers = [[*numbers_in(one)] for one in items]
        names: dict[tuple[object, ...], str] = {}  # what an item has in a place -> the variable
        replaced: dict[int, ast.expr] = {}
        taken = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        for places in zip(*numbers, strict=True):
            constant, key = places[0]
            values = tuple(one.value for one, _ in places)
            if len({*map(repr, values)}) > 1:
                if values not in names:
                    names[values] = identifier(self._name(key), taken)
                    taken.add(names[values])
                replaced[id(constant)] = ast.Name(names[values], ast.Load())
        if not names or len(names) > _MOST:
            return node
        item = text(replace_nodes(items[0], replaced))
        (first, *others) = names
        rows = first if not others else tuple(zip(*names, strict=True))
        code = f"[{item} for {', '.join(names.values())} in {rows!r}]"
        return ast.parse(code, mode="eval").body

    def _name(self, key: str) -> str:
        """Names a number after the keyword or parameter that it is given for."""
        function, _, at = key.rpartition(":")
        if not function:
            return key or "n"
        known = self._parameters.get(function, ())
        return known[int(at)] if int(at) < len(known) else "n"
