"""Conditions on the sizes of a model's inputs: those that its code has to check."""

from __future__ import annotations

import ast
import copy
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import replace

from fmapper.programs.program import Guard, Program
from fmapper.translation.code import expr, replace_nodes, text
from fmapper.translation.guards.expressions import factors, parse
from fmapper.translation.guards.facts import Facts
from fmapper.translation.guards.periods import solve
from fmapper.translation.guards.sums import join_quotients, without_implied
from fmapper.translation.guards.terms import number

_MOST = 4096  # sizes that are tried


def conditions_of(program: Program) -> tuple[list[Guard], Facts]:
    """Returns what has to hold for the sizes of a program's inputs, and what that says of them.

    That a size is odd is not used: `2 - n % 2` stays what `3 - n % 3` is in another submodule.
    """
    symbols = {
        symbol
        for given in program.inputs
        if given.kind == "user" and given.is_array()
        for size in given.shape
        for symbol in re.findall(r"[A-Za-z_]\w*", str(size))
    }
    found = strictest(program.guards, symbols)
    return found, Facts(symbols, found, odd=False)


def strictest(guards: Iterable[Guard], sizes: Iterable[str] = ()) -> list[Guard]:
    """Returns conditions without those that always hold, or that others imply.

    Args:
        guards: The conditions.
        sizes: The symbols in them that are sizes, and therefore not negative.
    """
    sizes = {*sizes}
    whole = join_quotients(dict.fromkeys(guards))
    simple = _join_multiples([_as_multiple(_reduce(one)) for one in whole])
    simple = without_implied(_without_implied_rests([*dict.fromkeys(simple)]))
    simple = [_reduce(one) for one in simple]
    told = {_key(one): one for one in reversed(simple)}
    facts = Facts(sizes)
    found: dict[int, Guard] = {}
    in_order = enumerate(reversed(told.values()))
    for at, guard in sorted(in_order, key=lambda one: len(one[1].expression)):
        if _always_holds(guard) or _is_identity(guard) or facts.holds(guard):
            continue
        found[at] = _simplify(guard, facts)
        facts.learn(found[at])
    for at in list(found):
        others = Facts(sizes, [found[other] for other in found if other != at])
        if others.holds(found[at]):
            del found[at]
        else:
            found[at] = _simplify(found[at], others)
    left = solve([found[at] for at in sorted(found)])
    return [one for guard in left if (one := _as_equality(guard, left)) is not None]


def _key(guard: Guard) -> tuple[str, str, int]:
    return guard.expression, guard.relation, guard.value


def _simplify(guard: Guard, facts: Facts) -> Guard:
    """Returns a condition with what others say about its expression."""
    node = parse(guard.expression)
    simpler = facts.simplify(node)
    if guard.relation == ">=" and guard.value > 0:
        factor = facts.shared_factor(simpler, guard.value)
        if factor is not None and text(factor) != text(simpler):
            return _reduce(Guard(text(factor), ">=", 1))
    if (guard.relation, guard.value) == (">=", 1):
        rest = facts.without_positive(simpler) or facts.with_fewer_terms(simpler)
        if rest is not None:
            return _simplify(_reduce(Guard(text(facts.simplify(rest)), ">=", 1)), facts)
    if text(simpler) == text(node) or number(simpler) is not None:
        return guard
    return replace(_reduce(Guard(text(simpler), guard.relation, guard.value)), question="")


def _reduce(guard: Guard) -> Guard:
    """Returns a condition on a simpler expression: `n >= 33` for `(n - 1)//32 + 1 >= 2`.

    Likewise `n >= 4` for `max(1, n//2) >= 2`.
    """
    node = parse(guard.expression)
    if isinstance(node, ast.Call) and guard.relation == ">=" and text(node.func).lower() == "max":
        larger = [x for x in node.args if (n := number(x)) is None or n >= guard.value]
        if len(larger) == 1 and number(larger[0]) is None:  # max(1, n) >= 2
            return _reduce(Guard(text(larger[0]), ">=", guard.value))
    if len(parts := factors(node)) > 2 and number(parts[0]) is not None:  # (2 * h) * w
        node = expr("{0} * {1}", parts[0], functools.reduce(_times, parts[1:]))
    relation, value, is_reduced = guard.relation, guard.value, False
    while isinstance(node, ast.BinOp):
        left, right = number(node.left), number(node.right)
        if isinstance(node.op, ast.Add) and (left is None) != (right is None):
            value -= right if left is None else left  # type: ignore[operator]
        elif isinstance(node.op, ast.Sub) and right is not None and left is None:
            value += right
        elif (
            isinstance(node.op, ast.FloorDiv)
            and right is not None
            and right > 0
            and left is None
            and relation in (">=", "<=")
        ):
            value = value * right + (right - 1) * (relation == "<=")
        elif isinstance(node.op, ast.Mult) and left is not None and left > 0 and right is None:
            if relation == ">=":
                value = -(-value // left)
            elif relation == "<=" or value % left == 0:
                value //= left
            else:
                break
            node, is_reduced = node.right, True
            continue
        else:
            break
        node, is_reduced = node.right if right is None else node.left, True
    return _reduce(Guard(text(node), relation, value)) if is_reduced else guard


_MULTIPLE = re.compile(r"mod\((.+), (\d+)\)")


def _as_multiple(guard: Guard) -> Guard:
    """Returns `mod(n, 2) == 0` for `2*(n//2) == n`, and for `2*(n//4) == n//2` that of `n//2`.

    Likewise `mod(n, 2) == 1` for `n == 2*(n//2) + 1`, and `mod(n, 2) == 0` for `mod(n, 2) <= 0`.
    """
    if (guard.relation, guard.value) == ("<=", 0) and _MULTIPLE.fullmatch(guard.expression):
        return replace(guard, relation="==")
    if guard.relation != "==":
        return guard
    more: list[ast.expr] = []
    less: list[ast.expr] = []
    _sort_terms(parse(guard.expression), more, less)
    if len(more) != 1 or len(less) != 1:
        return guard
    for product, whole, rest in (
        (more[0], less[0], -guard.value),
        (less[0], more[0], guard.value),
    ):
        if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
            continue
        factor, (size, divisor) = number(product.left), _quotient(product.right)
        known, before = _quotient(whole)
        is_rest = divisor == (factor or 0) * before and text(size) == text(known)
        if factor and factor > 1 and is_rest and 0 <= rest < factor:
            return Guard(f"mod({text(whole)}, {factor})", "==", rest)
    return guard


def _quotient(node: ast.expr) -> tuple[ast.expr, int]:
    """Returns the dividend and divisor of a division that rounds down, or code and 1."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        divisor = number(node.right)
        if divisor is not None and divisor > 0:
            return node.left, divisor
    return node, 1


def _join_multiples(guards: list[Guard]) -> list[Guard]:
    """Returns one condition for several: `n` is a multiple of 4 where it and `n//2` are even."""
    chains: dict[str, list[tuple[int, int, Guard]]] = {}
    for guard in guards:
        found = _MULTIPLE.fullmatch(guard.expression)
        if found is not None and (guard.relation, guard.value) == ("==", 0):
            size, divisor = _quotient(parse(found[1]))
            chains.setdefault(text(size), []).append((divisor, int(found[2]), guard))
    joined: dict[Guard, Guard] = {}
    for dividend, several in chains.items():
        in_order = sorted(several, key=lambda one: one[:2])
        least = multiple = in_order[0][0]
        for divisor, factor, _ in in_order:
            if multiple % divisor == 0:
                multiple = math.lcm(multiple, divisor * factor)
        size = parse(dividend)
        whole = text(size if least == 1 else expr(f"{{0}} // {least}", size))
        for divisor, factor, guard in several:
            if multiple % (divisor * factor) == 0 and divisor % least == 0:
                joined[guard] = Guard(f"mod({whole}, {multiple // least})", "==", 0)
    return [joined.get(guard, guard) for guard in guards]


def _without_implied_rests(guards: list[Guard]) -> list[Guard]:
    """Returns conditions without `mod(n, 2) == 1` where there is `mod(n, 4) == 3`."""
    rests: dict[Guard, tuple[str, range, int]] = {}  # -> the dividend, what it is, and its period
    for guard in guards:
        found = _MULTIPLE.fullmatch(guard.expression)
        if found is not None and guard.relation == "==":
            size, divisor = _quotient(parse(found[1]))
            begin, period = guard.value * divisor, divisor * int(found[2])
            if divisor <= _MOST:
                rests[guard] = text(size), range(begin, begin + divisor), period

    def implies(one: Guard, other: Guard) -> bool:
        (size, known, period), (of, wanted, length) = rests[one], rests[other]
        is_finer = one != other and size == of and period % length == 0
        return is_finer and all(n % length in wanted for n in known)

    return [one for one in guards if one not in rests or not any(implies(o, one) for o in rests)]


def _as_equality(guard: Guard, guards: list[Guard]) -> Guard | None:
    """Returns `==` for a `>=` whose `<=` is there, too, and None for the latter."""
    other = {">=": "<=", "<=": ">="}.get(guard.relation, "")
    key = (guard.expression, guard.value, other)
    if all((one.expression, one.value, one.relation) != key for one in guards):
        return guard
    return replace(guard, relation="==", question="") if guard.relation == ">=" else None


def condition_of(size: ast.expr, guard: Guard) -> ast.expr:
    """Returns a condition as code, with what is subtracted on its other side.

    Examples:
        >>> guard = Guard("a - b", "==", 0, "")
        >>> ast.unparse(condition_of(expr("x.shape[0] + -1 * y.shape[1]"), guard))
        'x.shape[0] == y.shape[1]'
        >>> guard = Guard("4*a - 2*b", "==", -6, "")
        >>> ast.unparse(condition_of(expr("4 * x.shape[0] - 2 * x.shape[1]"), guard))
        '2 * x.shape[0] + 3 == x.shape[1]'
        >>> guard = Guard("(a - 1)//4 % 2", "==", 1, "")
        >>> ast.unparse(condition_of(expr("(-1 + x.shape[0]) // 4 % 2"), guard))
        '(x.shape[0] - 1) // 4 % 2 == 1'
    """
    size = _Differences().visit(size)
    more: list[ast.expr] = []
    less: list[ast.expr] = []
    _sort_terms(size, more, less)
    if not more or not less:
        return expr(f"{{0}} {guard.relation} {{1}}", size, guard.value)
    divisor = math.gcd(guard.value, *map(_number_in, (*more, *less)))
    value = guard.value // divisor
    more, less = ([_divide(one, divisor) for one in terms] for terms in (more, less))
    if value:
        (less if value > 0 else more).append(ast.Constant(abs(value)))
    return expr(f"{{0}} {guard.relation} {{1}}", _sum(more), _sum(less))


class _Differences(ast.NodeTransformer):
    """Writes sums with negative terms within other code as differences."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        more: list[ast.expr] = []
        less: list[ast.expr] = []
        _sort_terms(node, more, less)
        less += [ast.Constant(-value) for one in more if (value := number(one) or 0) < 0]
        more = [one for one in more if (number(one) or 0) >= 0]
        if not isinstance(node.op, ast.Add | ast.Sub) or not more or not less:
            return node
        return functools.reduce(lambda a, b: expr("{0} - {1}", a, b), less, _sum(more))


def _number_in(term: ast.expr) -> int:
    """Returns the number in front of a product, or 1."""
    return number(factors(term)[0]) or 1


def _divide(term: ast.expr, divisor: int) -> ast.expr:
    """Returns a product whose number is divided."""
    if divisor == 1:
        return term
    first, *rest = factors(term)
    left = (number(first) or 0) // divisor
    return functools.reduce(_times, rest if left == 1 and rest else [ast.Constant(left), *rest])


def _sort_terms(node: ast.expr, more: list[ast.expr], less: list[ast.expr]) -> None:
    """Sorts the terms of a sum into those that are added and those that are subtracted."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        _sort_terms(node.left, more, less)
        turned = isinstance(node.op, ast.Sub)
        _sort_terms(node.right, less if turned else more, more if turned else less)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        less.append(node.operand)
    elif (factor := number((parts := factors(node))[0]) or 0) < 0 and len(parts) > 1:
        rest = parts[1:] if factor == -1 else [ast.Constant(-factor), *parts[1:]]
        less.append(functools.reduce(_times, rest))
    else:
        more.append(node)


def _times(left: ast.expr, right: ast.expr) -> ast.expr:
    return expr("{0} * {1}", left, right)


def _sum(terms: list[ast.expr]) -> ast.expr:
    total = terms[0]
    for term in terms[1:]:
        total = expr("{0} + {1}", total, term)
    return total


def _always_holds(guard: Guard) -> bool:
    """Returns whether an expression is a multiple of what the value is not."""
    if guard.relation != "!=":
        return False
    try:
        divisor = _divisor(ast.parse(guard.expression, mode="eval").body)
    except SyntaxError:
        return False
    return divisor > 1 and guard.value % divisor != 0


def _is_identity(guard: Guard) -> bool:
    """Returns whether an equality holds since `n` is `k * (n // k) + n % k`.

    Examples:
        >>> _is_identity(Guard("b*(n % 5) + 5*b*((n - n % 5)//5) - b*n", "==", 0, ""))
        True
    """
    if guard.relation != "==" or "%" not in text(parse(guard.expression)):
        return False
    split = _Quotients()
    node = split.put(split.visit(split.visit(parse(guard.expression))))
    return Facts().holds(replace(guard, expression=text(node)))


class _Quotients(ast.NodeTransformer):
    """Names quotients and rests: `n_by_5` for `n // 5`, and `n_rest_5` for `n % 5`."""

    def __init__(self) -> None:
        self._divisors: dict[str, int] = {}

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        divisor = number(node.right)
        if divisor is None or divisor < 1 or not isinstance(node.op, ast.Mod | ast.FloorDiv):
            return node
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Name):
            known = self._divisors.setdefault(node.left.id, divisor)
            return expr(f"{node.left.id}_rest_{divisor}") if known == divisor else node
        for name, known in self._divisors.items():
            left = text(_Differences().visit(copy.deepcopy(node.left)))
            if known == divisor and left in (name, f"{name} - {name}_rest_{divisor}"):
                return expr(f"{name}_by_{divisor}")
        return node

    def put(self, node: ast.expr) -> ast.expr:
        """Puts quotients and rests in the place of the sizes that they are of."""
        for name, k in self._divisors.items():
            names = [x for x in ast.walk(node) if isinstance(x, ast.Name) and x.id == name]
            whole = f"{k} * {name}_by_{k} + {name}_rest_{k}"
            node = replace_nodes(node, {id(one): expr(whole) for one in names})
        return node


def _divisor(node: ast.expr) -> int:
    """Returns a number that divides the value of an expression of whole numbers.

    Examples:
        >>> _divisor(ast.parse("4*(s + 1)*6 + 16*t", mode="eval").body)
        8
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return abs(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _divisor(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _divisor(node.left), _divisor(node.right)
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add | ast.Sub):
            return math.gcd(left, right)
    return 1
