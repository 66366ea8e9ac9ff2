"""Concludes from conditions on sizes: numbers, bounds, and which other conditions hold.

`mod(h//8, 2) == 1` says that `h//8` is at least 1 and `h` at least 8, that `max(1, h//2)` is
`h//2`, and that `3 - mod(h//8, 2)` is 2.
"""

from __future__ import annotations

import ast
import copy
import functools
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeGuard

from fmapper.programs.program import Guard
from fmapper.translation.code import expr, literal, text
from fmapper.translation.guards.expressions import factors, key_of, parse
from fmapper.translation.guards.terms import (
    MOST_TERMS,
    Sum,
    add,
    code_of,
    is_square,
    multiply,
    number,
    product_of,
)

_Bounds = tuple[int | None, int | None]


class Facts:
    """Numbers and bounds of sizes that meet conditions.

    Args:
        sizes: The symbols that are sizes, and therefore not negative.
        guards: The conditions.
    """

    def __init__(
        self, sizes: Iterable[str] = (), guards: Iterable[Guard] = (), *, odd: bool = True
    ) -> None:
        self._knows_odd = odd
        self._least: dict[str, int] = dict.fromkeys(sizes, 0)
        self._most: dict[str, int] = {}
        self._nodes: dict[str, ast.expr] = {}  # of the names that products are of
        self._products: list[tuple[tuple[str, ...], int]] = []  # and what they are at least
        self._known: dict[str, ast.expr] = {}  # what was simplified before
        for guard in guards:
            self.learn(guard)

    def __deepcopy__(self, _: Any) -> Facts:
        return self  # of a program, not of one of its functions

    def learn(self, guard: Guard) -> None:
        """Adds a condition to those that hold."""
        node = parse(guard.expression)
        relation, value = guard.relation, guard.value
        if self._knows_odd and relation == "!=" and value == 0 and _divisor(node) == 2:
            relation, value = "==", 1
        if relation in ("==", ">="):
            self._bound(node, value, is_least=True)
            names, rest = self._take_out(node)
            if names and rest == {(): 1}:
                self._products.append((names, value))
                if value > 0 and all(self._is_whole(x) for x in names):
                    for one in names:
                        self._bound(self._nodes[one], 1, is_least=True)
        if relation in ("==", "<="):
            self._bound(node, value, is_least=False)
        self._known.clear()

    def simplify(self, node: ast.expr) -> ast.expr:
        """Returns an expression with numbers for its known parts, and the larger of maxima."""
        key = text(node)
        if key not in self._known:
            self._known[key] = self._simplify(node)
        return copy.deepcopy(self._known[key])  # the code for its sizes is filled in

    def holds(self, guard: Guard) -> bool:
        """Returns whether a condition follows from those that hold."""
        node = self.simplify(parse(guard.expression))
        least, most = self.bounds(node)
        if guard.relation == ">=":
            return (least is not None and least >= guard.value) or self._is_at_least(
                node, guard.value
            )
        if guard.relation == "<=":
            return (most is not None and most <= guard.value) or self._is_at_least(
                expr("-1 * {0}", node), -guard.value
            )
        if guard.relation == "==":
            return least == most == guard.value or self._difference(node, guard.value) == {}
        if guard.value and self._has_factor_of(node, abs(guard.value) + 1):
            return True  # no factor of a number is larger, but for 0
        above = self._is_at_least(node, guard.value + 1)
        return above or self._is_at_least(expr("-1 * {0}", node), 1 - guard.value)

    # --- bounds -------------------------------------------------------------------------------

    def bounds(self, node: ast.expr) -> _Bounds:
        """Returns the least and the largest value of an expression, None where it is unknown."""
        key = key_of(node)
        least, most = self._compute(node)
        told_least, told_most = self._least.get(key), self._most.get(key)
        if told_least is not None:
            least = told_least if least is None else max(least, told_least)
        if told_most is not None:
            most = told_most if most is None else min(most, told_most)
        return least, most

    def _compute(self, node: ast.expr) -> _Bounds:
        known = number(node)
        if known is not None:
            return known, known
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            least, most = self.bounds(node.operand)
            return _minus(most), _minus(least)
        if isinstance(node, ast.Call):
            return self._of_call(text(node.func), [self.bounds(one) for one in node.args])
        if not isinstance(node, ast.BinOp):
            return None, None
        (a, b), (c, d) = self.bounds(node.left), self.bounds(node.right)
        if isinstance(node.op, ast.Sub):
            c, d = _minus(d), _minus(c)
        if isinstance(node.op, ast.Add | ast.Sub):
            return (
                None if a is None or c is None else a + c,
                None if b is None or d is None else b + d,
            )
        if isinstance(node.op, ast.Mult):
            return _product(a, b, c, d)
        if c is None or c < 1:
            return None, None
        if isinstance(node.op, ast.FloorDiv):
            if a is not None:
                a = a // c if a < 0 else 0 if d is None else a // d
            if b is not None:
                b = b // c if b >= 0 else -1 if d is None else b // d
            return a, b
        if isinstance(node.op, ast.Mod):
            is_whole = a is not None and b is not None and a >= 0 and b < c
            return (a, b) if is_whole else (0, None if d is None else d - 1)
        return None, None

    @staticmethod
    def _of_call(kind: str, bounds: list[_Bounds]) -> _Bounds:
        least = [low for low, _ in bounds if low is not None]
        most = [high for _, high in bounds if high is not None]
        every_least, every_most = len(least) == len(bounds), len(most) == len(bounds)
        if kind.lower() == "max":
            return max(least, default=None), max(most) if every_most else None
        if kind.lower() == "min":
            return min(least) if every_least else None, min(most, default=None)
        return None, None

    def _bound(self, node: ast.expr, value: int, *, is_least: bool) -> None:
        """Learns that an expression is at least, or at most, a number; and what it is made of."""
        told = self._least if is_least else self._most
        choose = max if is_least else min
        key = key_of(node)
        told[key] = choose(value, told.get(key, value))
        if not isinstance(node, ast.BinOp):
            return
        left, right = number(node.left), number(node.right)
        if isinstance(node.op, ast.Add) and (left is None) != (right is None):
            inner = node.right if right is None else node.left
            self._bound(inner, value - (left if right is None else right), is_least=is_least)  # type: ignore[operator]
        elif isinstance(node.op, ast.Sub) and right is not None:
            self._bound(node.left, value + right, is_least=is_least)
        elif isinstance(node.op, ast.FloorDiv) and (right or 0) > 0:
            assert right is not None
            more = 0 if is_least else right - 1
            self._bound(node.left, value * right + more, is_least=is_least)
        elif isinstance(node.op, ast.Mod) and is_least and (self.bounds(node.left)[0] or -1) >= 0:
            self._bound(node.left, value, is_least=True)

    # --- simpler expressions ------------------------------------------------------------------

    def _simplify(self, node: ast.expr) -> ast.expr:
        least, most = self.bounds(node)
        if least is not None and least == most:
            return (
                ast.Constant(least) if least >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-least))
            )
        if isinstance(node, ast.UnaryOp):
            return ast.UnaryOp(node.op, self.simplify(node.operand))
        if isinstance(node, ast.Call):
            args = [self.simplify(one) for one in node.args]
            made: ast.expr = ast.Call(node.func, args, [])
            sign = {"max": 1, "min": -1}.get(text(node.func).lower())
            if sign is not None and len(args) == 2:
                for one, other in (args, reversed(args)):
                    if self._is_at_least(expr(f"{sign} * ({{0}} - ({{1}}))", one, other), 0):
                        return one
        elif isinstance(node, ast.BinOp):
            left, right = self.simplify(node.left), self.simplify(node.right)
            if isinstance(node.op, ast.Mod) and self._divides(right, left):
                return ast.Constant(0)
            made = _with_one_number(ast.BinOp(left, node.op, right))
        else:
            return node
        least, most = self.bounds(made)
        return ast.Constant(least) if least is not None and 0 <= least == most else made

    # --- sums of products ---------------------------------------------------------------------

    def _divides(self, divisor: ast.expr, node: ast.expr) -> bool:
        """Returns whether a product is a factor of every term of a sum."""
        product, terms = self._terms(divisor), self._terms(node)
        if product is None or terms is None or len(product) != 1:
            return False
        ((names, by),) = product.items()
        return all(not factor % by and not Counter(names) - Counter(own)
                   for own, factor in terms.items())  # fmt: skip

    def _is_at_least(self, node: ast.expr, value: int) -> bool:
        """Returns whether an expression is at least a number wherever its parts are in bounds."""
        terms = self._difference(node, value)
        return terms is not None and self._is_positive(terms)

    def _is_positive(self, terms: Sum) -> bool:
        """Returns whether a sum is at least 0 wherever its parts are in bounds."""
        return self._grows(terms) or self._grows(self._without_quotients(terms))

    def _grows(self, terms: Sum) -> bool:
        """Returns whether no term is negative where parts are at their least, and none above."""
        grown: Sum = Counter()
        for names, factor in terms.items():
            product: Sum = Counter({(): factor})
            for one in names:
                least, _ = self.bounds(self._nodes[one])
                if least is None:
                    return False
                product = multiply(product, Counter({(one,): 1, (): least}))
            if len(product) > MOST_TERMS:
                return False
            add(grown, product)
        return all(factor >= 0 for factor in grown.values())

    def _without_quotients(self, terms: Sum) -> Sum:
        """Returns a sum that is at most as large: without `-2 * (n//2)`, which is at least `-n`."""
        found: Sum = Counter()
        for names, factor in terms.items():
            node = self._nodes[names[0]] if len(names) == 1 else None
            divisor = (number(node.right) or 0) if _is_quotient(node) else 0
            whole = None
            if _is_quotient(node) and divisor > 0 and factor < 0 and factor % divisor == 0:
                whole = self._terms(node.left)
            if whole is None:
                add(found, Counter({names: factor}))
            else:
                add(found, whole, factor // divisor)
        return found

    def shared_factor(self, node: ast.expr, value: int) -> ast.expr | None:
        """Returns the `b` of a product `b * rest` whose rest is at least a number, or None."""
        names, rest = self._take_out(node)
        for at, one in enumerate(names):
            left = multiply(rest, Counter({(*names[:at], *names[at + 1 :]): 1}))
            add(left, Counter({(): -value}))
            if self._is_positive(left):
                return self._nodes[one]
        return None

    def without_positive(self, node: ast.expr) -> ast.expr | None:
        """Returns a sum of products without the factors that are at least 1; None if none is."""
        names, rest = self._take_out(node)
        left = tuple(one for one in names if not self._is_whole(one, 1))
        if len(left) == len(names) or (not left and len(rest) < 2):
            return None
        found: ast.expr = ast.Constant(0)
        for own, factor in rest.items():
            product = [ast.Constant(factor), *(self._nodes[one] for one in (*left, *own))]
            found = expr("{0} + {1}", found, functools.reduce(product_of, product))
        return found

    def with_fewer_terms(self, node: ast.expr) -> ast.expr | None:
        """Returns a sum that is at least 1 where another one is, and shorter; None if none is.

        That is one of what its parts are more than the least that they can be, `x * y - 1` for
        `a * b + a + b` with `x = a + 1`; and without a factor that such a sum is never above.
        """
        terms = self._terms(node)
        if terms is None:
            return None
        shifted: Sum = Counter()
        for names, factor in terms.items():
            product: Sum = Counter({(): factor})
            for one in names:
                least, _ = self.bounds(self._nodes[one])
                product = multiply(product, self._above(one, least or 0))
            add(shifted, product)
        if len(shifted) >= len(terms):
            shifted = terms
        names, rest = _take_out(shifted)
        surplus: Sum = Counter({names: 1})
        add(surplus, rest, -1)
        whole = all(self._is_whole(one) for one in names)
        if names and len(rest) > 1 and whole and self._is_positive(surplus):
            shifted = rest
        found = code_of(shifted, self._nodes)
        return found if len(text(found)) < len(text(node)) else None

    def _above(self, name: str, least: int) -> Sum:
        """Returns a name as what it is above a number, and that."""
        if not least:
            return Counter({(name,): 1})
        node = _with_one_number(ast.BinOp(self._nodes[name], ast.Sub(), literal(least)))
        node = node if least > 0 else expr("{0} + {1}", self._nodes[name], -least)
        self._nodes[key_of(node)] = node
        return Counter({(key_of(node),): 1, (): least})

    def _is_whole(self, name: str, least: int = 0) -> bool:
        """Returns whether a name in products is of what is at least a number, 0 or more."""
        known, _ = self.bounds(self._nodes[name])
        return known is not None and known >= least

    def _has_factor_of(self, node: ast.expr, least: int) -> bool:
        """Returns whether a product has a factor that is at least a number."""
        if any((self.bounds(one)[0] or 0) >= least for one in factors(node)):
            return True
        names, rest = self._take_out(node)
        if any(
            told >= least and not Counter(part) - Counter(names) for part, told in self._products
        ):
            return True
        add(rest, Counter({(): -least}))
        return bool(names) and self._is_positive(rest)

    def _take_out(self, node: ast.expr) -> tuple[tuple[str, ...], Sum]:
        """Returns the names that every term of a sum has, and the sum without them."""
        return _take_out(self._terms(node) or Counter())

    def _difference(self, node: ast.expr, value: int) -> Sum | None:
        """Returns what an expression is more than a number, as a sum; None if that is too long."""
        terms = self._terms(node)
        if terms is not None:
            add(terms, Counter({(): -value}))
        return terms

    def _terms(self, node: ast.expr) -> Sum | None:
        known = number(node)
        if known is not None:
            return Counter({(): known} if known else {})
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._terms(expr("-1 * {0}", node.operand))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            left, right = self._terms(node.left), self._terms(node.right)
            if left is None or right is None or len(left) * len(right) > MOST_TERMS:
                return None
            if isinstance(node.op, ast.Mult):
                return multiply(left, right)
            add(left, right, -1 if isinstance(node.op, ast.Sub) else 1)
            return left
        if is_square(node):
            return self._terms(product_of(node.left, node.left))
        key = key_of(node)
        self._nodes[key] = node
        return Counter({(key,): 1})


def _take_out(terms: Sum) -> tuple[tuple[str, ...], Sum]:
    """Returns the names that every term of a sum has, and the sum without them."""
    common = functools.reduce(operator.and_, map(Counter, terms), Counter(next(iter(terms), ())))
    rest: Sum = Counter()
    for names, factor in terms.items():
        rest[(*(Counter(names) - common).elements(),)] += factor
    return (*common.elements(),), rest


def _is_quotient(node: ast.expr | None) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)


def _divisor(node: ast.expr) -> int | None:
    """Returns what an expression is the rest of a division by."""
    is_rest = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    return number(node.right) if is_rest else None  # type: ignore[attr-defined]


def _with_one_number(node: ast.BinOp) -> ast.expr:
    """Returns a sum with its numbers added, behind the rest; or a product with them in front."""
    if isinstance(node.op, ast.Mult):
        return _with_one_factor(node)
    if not isinstance(node.op, ast.Add | ast.Sub):
        return node
    parts: list[tuple[bool, ast.expr]] = []
    total, count = 0, 0
    todo: list[tuple[bool, ast.expr]] = [(False, node)]
    while todo:
        is_less, one = todo.pop()
        known = number(one)
        if known is not None:
            total, count = total + (-known if is_less else known), count + 1
        elif isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add | ast.Sub):
            todo.append((is_less ^ isinstance(one.op, ast.Sub), one.right))
            todo.append((is_less, one.left))
        else:
            parts.append((is_less, one))
    if count < 2 and total:
        return node
    parts.sort(key=lambda part: part[0])
    if not parts or parts[0][0]:
        return node
    made = parts[0][1]
    for is_less, one in parts[1:]:
        made = expr("{0} - {1}" if is_less else "{0} + {1}", made, one)
    return expr(f"{{0}} {'+' if total > 0 else '-'} {abs(total)}", made) if total else made


def _with_one_factor(node: ast.BinOp) -> ast.expr:
    left, right = number(node.left), number(node.right)
    if right is None:
        known, rest = left, node.right
    else:
        known, rest = right, node.left
    if known is None:
        return node
    if isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Mult):
        inner = number(rest.left)
        known, rest = (known, rest) if inner is None else (known * inner, rest.right)
    return rest if known == 1 else expr("{0} * {1}", literal(known), rest)


def _minus(value: int | None) -> int | None:
    return None if value is None else -value


def _product(a: int | None, b: int | None, c: int | None, d: int | None) -> _Bounds:
    """Returns the bounds of the product of what is in `a` to `b` and in `c` to `d`."""
    if a is not None and c is not None and a >= 0 and c >= 0:
        return a * c, None if b is None or d is None else b * d
    if c is not None and c == d:
        a, b, c, d = c, d, a, b
    if a is not None and a == b and a < 0:
        return _times(a, d), _times(a, c)
    if a is not None and a == b:
        return _times(a, c), _times(a, d)
    corners = (a, b, c, d)
    if None in corners:
        return None, None
    every = [one * other for one in (a, b) for other in (c, d)]  # type: ignore[operator]
    return min(every), max(every)


def _times(factor: int, value: int | None) -> int | None:
    return None if value is None else factor * value
