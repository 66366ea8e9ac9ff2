"""Sizes that vary, in code: as those of arrays that are at hand."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter

from fmapper.programs.sizes import size_of
from fmapper.translation.code import Value, expr, text

_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = {"max", "min", "floordiv", "mod", "Mod", "FloorDiv", "Max", "Min", "PythonMod"}


class Sizes:
    """What is known of the symbols of one function.

    Args:
        given: Symbols that are parameters.
    """

    def __init__(self, given: dict[str, ast.expr]) -> None:
        self._known: dict[str, ast.expr] = dict(given)
        self._fixed = set(given)
        self.asked: Counter[str] = Counter()

    def is_named(self, symbol: str) -> bool:
        """Tells whether a symbol is a variable or a parameter."""
        return symbol in self._fixed

    def call(self, symbol: str, node: ast.expr) -> None:
        """Makes a symbol a variable that stays."""
        self._known[symbol] = node
        self._fixed.add(symbol)

    def learn(self, value: Value) -> None:
        """Learns what the sizes of an array tell."""
        for i, size in enumerate(value.shape):
            if isinstance(size, str) and size not in self._known:
                self._known[size] = expr("{0}.shape[{1}]", value.node, i)

    def forget(self, variable: str) -> None:
        """Forgets what a variable told that holds something else from now on."""
        for symbol, node in list(self._known.items()):
            if symbol not in self._fixed and variable in _names(node):
                del self._known[symbol]

    def rename(self, change: ast.NodeTransformer) -> None:
        """Gives variables other names."""
        self._known = {symbol: change.visit(node) for symbol, node in self._known.items()}

    def code(self, expression: str) -> ast.expr | str:
        """Returns the code for an expression of symbols, or the symbol that is not known."""
        for symbol in _SYMBOL.findall(expression):
            self.asked[symbol] += 1
        if expression in self._known:
            known: ast.expr = copy.deepcopy(self._known[expression])
            return known
        symbols = set(_SYMBOL.findall(expression)) - _FUNCTIONS
        for symbol in sorted(symbols):
            if symbol not in self._known and not self._solve(symbol):
                return str(symbol)
        tree = ast.parse(_python(expression), mode="eval").body
        filled: ast.expr = _Fill(self._known).visit(tree)
        return _simple(filled)

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


def _python(expression: str) -> str:
    expression = expression.replace("^", "**")
    return re.sub(r"\b(FloorDiv|floordiv)\b", "floordiv", expression)


class _Fill(ast.NodeTransformer):
    def __init__(self, known: dict[str, ast.expr]) -> None:
        self._known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._known.get(node.id, node))

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
    """Computes what has no names in it."""
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
        if isinstance(right, ast.Constant):
            same = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.FloorDiv: 1}
            if same.get(type(node.op)) == right.value:
                return left
        return ast.BinOp(left, node.op, right)
    return node


def _names(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
