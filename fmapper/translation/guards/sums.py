"""Sums of products of sizes, and conditions on them that others imply.

A view as `x.reshape(-1, 16 * 5 * 5)` asks whether `batch * height * width * 16` can be divided by
400, and whether that gives the batch: `height * width * 16 == 400` says both.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from fmapper.programs.program import RELATIONS, Guard
from fmapper.translation.code import expr, literal, text
from fmapper.translation.guards.expressions import key_of, parse
from fmapper.translation.guards.terms import (
    MOST_STEPS,
    MOST_TERMS,
    Sum,
    add,
    code_of,
    divide,
    first_of,
    is_operation,
    is_square,
    multiply,
    number,
)


def _as_product(total: Sum, value: int, nodes: Mapping[str, ast.expr]) -> tuple[str, int] | None:
    """Returns `(a + 3) * (b + 2)` and 10 for `2*a*b + 4*a + 6*b` and 8; None for another sum."""
    terms = {names: factor for names, factor in total.items() if names}
    pair = first_of(total)
    if len(pair) != 2 or pair[0] == pair[1]:
        return None
    common, value = terms[pair], value - total[()]
    shares = [terms.get((one,), 0) for one in pair]
    known = {pair, *((one,) for one in pair)}
    if any(one % common for one in (*shares, value)) or not {*terms} <= known:
        return None
    less, more = (one // common for one in shares)
    parts = [_plus(nodes[one], by) for one, by in zip(pair, (more, less), strict=True)]
    return text(expr("{0} * {1}", *parts)), value // common + less * more


def _plus(node: ast.expr, value: int) -> ast.expr:
    """Returns a sum with a number, `(a + 2) // 2` for `a//2` and 1."""
    if is_operation(node, ast.FloorDiv) and (divisor := number(node.right)):
        return expr("{0} // {1}", _plus(node.left, value * divisor), literal(divisor))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if (known := number(one)) is not None:
                return _plus(other, known + value)
    sign = "+" if value > 0 else "-"
    return expr(f"{{0}} {sign} {abs(value)}", node) if value else node


def join_quotients(guards: Iterable[Guard]) -> list[Guard]:
    """Returns `a - 2*b == 0` for `mod(a, b) == 0` where `a//b == 2`, too.

    Examples:
        >>> join_quotients([Guard("mod(n, n//2)", "==", 0), Guard("n//(n//2)", "==", 2)])[0]
        Guard(expression='n - 2 * (n // 2)', relation='==', value=0, question='')
    """
    given = [*guards]
    known: dict[str, int] = {}
    for guard in given:
        if guard.relation == "==" and isinstance(parse(guard.expression), ast.BinOp):
            known[text(parse(guard.expression))] = guard.value
    return [_without_rest(guard, known) for guard in given]


def _without_rest(guard: Guard, known: Mapping[str, int]) -> Guard:
    node = parse(guard.expression)
    if not is_operation(node, ast.Mod) or (guard.relation, guard.value) != ("==", 0):
        return guard
    quotients = [expr("{0} // {1}", node.left, node.right)]
    if is_operation(node.left, ast.FloorDiv):  # (n // 2) // m is n // (2 * m)
        divisor = expr("{0} * {1}", node.left.right, node.right)
        quotients.append(expr("{0} // {1}", node.left.left, divisor))
    value = next((known[text(one)] for one in quotients if text(one) in known), None)
    if value is None:
        return guard
    return Guard(text(expr("{0} - {1} * {2}", node.left, value, node.right)), "==", 0)


def without_implied(guards: Iterable[Guard]) -> list[Guard]:
    """Returns conditions without those that equalities among them imply, and shorter ones.

    Examples:
        >>> area = Guard("h*w", "==", 42)
        >>> without_implied([Guard("mod(n*h*w, 42)", "==", 0), area]) == [area]
        True
    """
    given = [*guards]
    normal, kept = _Normal(), {}
    for guard in sorted(given, key=_order):
        found = normal.of(parse(guard.expression))
        if found is None or {*found} - {()}:
            kept[guard] = guard if found is None else normal.shorter(guard, found)
            normal.learn(guard, found)
        elif not RELATIONS[guard.relation](found[()], guard.value):
            kept[guard] = guard
    return [kept[one] for one in given if one in kept]


def _order(guard: Guard) -> tuple[bool, bool, int]:
    node = parse(guard.expression)
    is_multiple = is_operation(node, ast.Mod) and isinstance(node.left, ast.Name)
    return (
        not is_multiple,
        guard.relation != "==" or is_operation(node, ast.Mod),
        len(guard.expression),
    )


class _Normal:
    """Sums that are the same for equal expressions of sizes."""

    def __init__(self) -> None:
        self._multiples: dict[str, int] = {}
        self._rules: list[tuple[tuple[str, ...], Sum]] = []  # products -> what they are instead
        self._nodes: dict[str, ast.expr] = {}  # names in sums -> their code

    def shorter(self, guard: Guard, found: Sum) -> Guard:
        """Returns a condition, on the code of its sum where that is shorter."""
        code, value = text(code_of(found, self._nodes)), guard.value
        if guard.relation == "==":
            code, value = _as_product(found, value, self._nodes) or (code, value)
        if _length(parse(code)) >= _length(parse(guard.expression)):
            return guard
        return Guard(code, guard.relation, value)

    def learn(self, guard: Guard, found: Sum | None) -> None:
        """Adds a condition, which has a sum, to those that hold."""
        node = parse(guard.expression)
        if guard.relation != "==":
            return
        if is_operation(node, ast.Mod) and isinstance(node.left, ast.Name):
            divisor = number(node.right)
            if divisor is not None and divisor > 0 and not guard.value:
                self._multiples[node.left.id] = divisor
        elif found is not None:
            rest = Counter(found)
            add(rest, Counter({(): guard.value}), -1)
            calls = [names for names in rest if any(_is_call(self._nodes[one]) for one in names)]
            first = calls[0] if calls else first_of(rest)
            factor = rest.pop(first)
            if first and len(calls) < 2 and all(one % factor == 0 for one in rest.values()):
                self._rules.append((first, Counter({n: -f // factor for n, f in rest.items()})))

    def of(self, node: ast.expr) -> Sum | None:
        """Returns the sum of an expression; None if it is too long."""
        known = number(node)
        if known is not None:
            return Counter({(): known} if known else {})
        if isinstance(node, ast.Name) and node.id in self._multiples:
            factor = self._multiples[node.id]
            return self._reduce(self._name(expr(f"{node.id} // {factor}"), factor))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self.of(expr("-1 * {0}", node.operand))
        parts = [self.of(one) for one in _parts(node)]
        sums = [one for one in parts if one is not None]
        if len(sums) < len(parts):
            return None
        found = self._operation(node, sums) if isinstance(node, ast.BinOp) else _extreme(node, sums)
        if found is None:
            codes = [code_of(one, self._nodes) for one in sums]
            found = self._name(_with_parts(node, codes))
        return self._reduce(found) if len(found) <= MOST_TERMS else None

    def _name(self, node: ast.expr, factor: int = 1) -> Sum:
        name = key_of(node)
        self._nodes[name] = node
        return Counter({(name,): factor})

    def _operation(self, node: ast.BinOp, sums: list[Sum]) -> Sum | None:
        left, right = sums
        if isinstance(node.op, ast.Mult):
            return multiply(left, right)
        if is_square(node):
            return multiply(left, left)
        if isinstance(node.op, ast.Add | ast.Sub):
            total = Counter(left)
            add(total, right, -1 if isinstance(node.op, ast.Sub) else 1)
            return total
        if isinstance(node.op, ast.FloorDiv | ast.Mod):
            quotient = divide(left, right)
            if quotient is not None:
                return quotient if isinstance(node.op, ast.FloorDiv) else Counter()
        return None

    def _reduce(self, total: Sum) -> Sum | None:
        """Returns a sum with what is known of its products."""
        for _ in range(MOST_STEPS):
            found = next(
                ((names, rule) for names in total for rule in self._rules
                 if not Counter(rule[0]) - Counter(names)),
                None,
            )  # fmt: skip
            if found is None:
                return total
            names, (product, instead) = found
            rest = (*sorted((Counter(names) - Counter(product)).elements()),)
            total = Counter(total)
            add(total, multiply(Counter({rest: total.pop(names)}), instead))
        return None


def _parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    return node.args if _is_call(node) else []


def _extreme(node: ast.expr, sums: list[Sum]) -> Sum | None:
    """Returns the largest or smallest of numbers."""
    choose = {"max": max, "min": min}.get(text(node.func).lower()) if _is_call(node) else None
    if choose is None or any({*one} - {()} for one in sums):
        return None
    found = choose(one[()] for one in sums)
    return Counter({(): found} if found else {})


def _length(node: ast.expr) -> int:
    return sum(1 for _ in ast.walk(node))


def _is_call(node: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call)


def _with_parts(node: ast.expr, parts: list[ast.expr]) -> ast.expr:
    if isinstance(node, ast.BinOp):
        return ast.BinOp(parts[0], node.op, parts[1])
    return ast.Call(node.func, parts, []) if _is_call(node) else node
