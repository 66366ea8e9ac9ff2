"""Code for varying sizes, in terms of the available arrays."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fmapper.programs.sizes import size_of
from fmapper.translation.code import Value, expr, text
from fmapper.translation.guards.expressions import canonical, factors, key_of, parse, python


class UnknownSize(Exception):
    """Raised for a size that cannot be computed from available values.

    Args:
        symbol: What is unknown in it.
        expression: The size.
    """

    def __init__(self, symbol: str, expression: str) -> None:
        self.symbol = symbol
        self._expression = canonical(expression)

    def is_of(self, size: str) -> bool:
        """Returns whether a size is what could not be computed, or what is unknown in it."""
        return self.symbol == size or self._expression == canonical(size)


class Sizes:
    """The known symbols of one function.

    Args:
        given: Sizes that are parameters.
    """

    def __init__(self, given: dict[str, ast.expr]) -> None:
        self._known: dict[str, ast.expr] = {}
        self._fixed: set[str] = set()
        self._costly: dict[str, ast.expr] = {}  # of arrays that would be computed for it
        self.asked: Counter[str] = Counter()
        for size, node in given.items():
            self.call(size, node)

    def is_named(self, symbol: str) -> bool:
        """Returns whether a symbol is a variable or a parameter."""
        return symbol in self._fixed

    def symbols(self) -> frozenset[str]:
        """Returns the sizes that are known."""
        return frozenset(self._known)

    def call(self, symbol: str, node: ast.expr) -> None:
        """Binds a symbol, or an expression of some, to a variable."""
        self._known[symbol] = node
        self._fixed.add(symbol)
        for inner, code in _find_terms(symbol, node):
            self._known.setdefault(inner, code)

    def learn(self, value: Value) -> None:
        """Learns symbols from the sizes of an array."""
        known = self._known if _is_at_hand(value.node) else self._costly
        for i, size in enumerate(value.shape):
            if isinstance(size, str) and size not in self._known:
                known[size] = expr("{0}.shape[{1}]", value.node, i)
                for inner, code in _find_terms(size, known[size]):
                    known.setdefault(inner, code)

    def forget(self, variable: str) -> None:
        """Forgets the sizes that were known from a reassigned variable."""
        for known in (self._known, self._costly):
            for symbol, node in list(known.items()):
                if symbol not in self._fixed and variable in _names(node):
                    del known[symbol]

    def code(self, expression: str) -> ast.expr | str:
        """Returns the code for an expression of symbols, or its first unknown symbol."""
        found = self._code(expression)
        if isinstance(found, str) and self._costly:
            cheap, self._known = self._known, self._costly | self._known
            found = self._code(expression)
            self._known = cheap
        return found

    def _code(self, expression: str) -> ast.expr | str:
        if expression in self._known:
            self.asked[expression] += 1
            known: ast.expr = copy.deepcopy(self._known[expression])
            return known
        tree = parse(expression)
        told = {
            key: size
            for size in self._known
            if not size.isidentifier()
            for key in (canonical(size), key_of(parse(size)))
        }
        needed = _find_needed(tree, told)
        for symbol in sorted(needed):
            if symbol not in self._known and not self._solve(symbol):
                return str(symbol)
        self.asked.update(needed)
        fill = _Fill({key: self._known[size] for key, size in told.items()} | self._known)
        filled: ast.expr = fill.visit(tree)
        self.asked.update(told[key] for key in fill.used if key in told)
        return _shorter(_simple(filled))

    def _solve(self, symbol: str) -> bool:
        """Finds a symbol in a size such as `2*s + 1`."""
        linear = re.compile(rf"(?:(\d+)\*)?{re.escape(symbol)}(?: ([+-]) (\d+))?")
        for expression, node in list(self._known.items()):
            found = linear.fullmatch(expression)
            if found is None:
                continue
            factor, sign, more = found.groups()
            known = node
            if more:
                back = "-" if sign == "+" else "+"
                known = expr(f"{{0}} {back} {more}", known)
            if factor and factor != "1":
                known = expr(f"{{0}} // {factor}", known)
            self._known[symbol] = known
            return True
        return False


def _find_terms(size: str, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yields what a number is added to in a size, and its code.

    Examples:
        >>> [(inner, text(code)) for inner, code in _find_terms("(s0 - 1)//4 + 1", expr("height"))]
        [('(s0 - 1) // 4', 'height - 1')]
    """
    if size.isidentifier():
        return
    tree = ast.parse(python(size), mode="eval").body
    if not isinstance(tree, ast.BinOp) or not isinstance(tree.op, ast.Add | ast.Sub):
        return
    inner, more = tree.left, tree.right
    if isinstance(more, ast.Constant) and not isinstance(inner, ast.Name):
        back = "-" if isinstance(tree.op, ast.Add) else "+"
        yield text(inner), expr(f"{{0}} {back} {{1}}", node, more.value)


def _find_needed(node: ast.expr, told: Mapping[str, str]) -> set[str]:
    """Returns the symbols in an expression outside of those parts that are told."""
    if key_of(node) in told:
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    inner = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
    return {name for one in inner if isinstance(one, ast.expr) for name in _find_needed(one, told)}


class _Fill(ast.NodeTransformer):
    """Puts the code for sizes in their places, that of whole expressions before that of symbols."""

    def __init__(self, known: Mapping[str, ast.expr]) -> None:
        self._known = known
        self.used: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        """Returns the code for an expression, or that for its parts."""
        if isinstance(node, ast.BinOp | ast.Call | ast.Name):
            found = self._known.get(key := key_of(node))
            if found is not None:
                self.used.append(key)
                return copy.deepcopy(found)
        return super().visit(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        kind = text(node.func)
        args = [self.visit(one) for one in node.args]
        if kind in ("floordiv", "FloorDiv") and len(args) == 2:
            return expr("{0} // {1}", *args)
        if kind in ("mod", "Mod", "PythonMod") and len(args) == 2:
            return expr("{0} % {1}", *args)
        node.args = args
        node.func = ast.Name(kind.lower(), ast.Load())
        return node


def _simple(node: ast.expr) -> ast.expr:
    """Folds expressions without names."""
    if isinstance(node, ast.BinOp):
        left, right = _simple(node.left), _simple(node.right)
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
            known = size_of(text(ast.BinOp(left, node.op, right)), {})
            return ast.BinOp(left, node.op, right) if known is None else ast.Constant(known)
        if isinstance(left, ast.Constant) and not isinstance(right, ast.Constant):
            if isinstance(node.op, ast.Add):
                return _simple(ast.BinOp(right, node.op, left))
            if isinstance(node.op, ast.Mult) and left.value == 1:
                return right
        if isinstance(node.op, ast.FloorDiv):
            found = _cancel(left, right)
            if found is not None:
                return found
        if isinstance(right, ast.Constant):
            same = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.FloorDiv: 1}
            if same.get(type(node.op)) == right.value:
                return left
        return ast.BinOp(left, node.op, right)
    return node


def _shorter(node: ast.expr) -> ast.expr:
    """Returns a sum with its like terms joined, where that is shorter.

    Examples:
        >>> text(_shorter(expr("2 * (x.shape[2] - 1) + 2"))), text(_shorter(expr("a * (b + 1)")))
        ('2 * x.shape[2]', 'a * (b + 1)')
    """
    terms: dict[str, int] = {}
    number = _add_terms(node, 1, terms)
    code = ""
    for term, factor in terms.items():
        size = term if abs(factor) == 1 else f"{abs(factor)} * {term}"
        if factor:
            code += f"{' - ' if factor < 0 else ' + '}{size}"
    if number or not code:
        code += f"{' - ' if number < 0 else ' + '}{abs(number)}"
    is_shorter = code.startswith(" + ") and len(code) - 3 < len(text(node))
    return expr(code[3:]) if is_shorter else node


def _add_terms(node: ast.expr, factor: int, terms: dict[str, int]) -> int:
    """Adds the terms of a sum, multiplied; returns the number that is added."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return factor * node.value
    if isinstance(node, ast.BinOp):
        left, right = node.left, node.right
        if isinstance(node.op, ast.Add | ast.Sub):
            sign = -1 if isinstance(node.op, ast.Sub) else 1
            return _add_terms(left, factor, terms) + _add_terms(right, sign * factor, terms)
        if isinstance(node.op, ast.Mult) and isinstance(left, ast.Constant):
            return _add_terms(right, factor * int(left.value), terms)  # type: ignore[arg-type]
        if isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Mult | ast.Pow):
            code = f"({text(node)})"
            terms[code] = terms.get(code, 0) + factor
            return 0
    code = text(node)
    terms[code] = terms.get(code, 0) + factor
    return 0


def _cancel(left: ast.expr, right: ast.expr) -> ast.expr | None:
    """Returns a quotient without the factors of its divisor, where it has all of them."""
    parts = factors(left)
    for divisor in factors(right):
        at = [i for i, factor in enumerate(parts) if text(factor) == text(divisor)]
        if not at:
            return None
        del parts[at[0]]
    product: ast.expr | None = None
    for factor in parts:
        product = factor if product is None else expr("{0} * {1}", product, factor)
    return product or ast.Constant(1)


def _is_at_hand(node: ast.expr) -> bool:
    """Returns whether code is a name, or an attribute or item of a name."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name)


def _names(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
