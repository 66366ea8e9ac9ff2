"""Evaluates and compares sizes that are expressions of others, such as `2*s0 + 1`.

An expression may come from an untrusted file: its length, depth and numbers are bounded, and no
code is run.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_LONGEST = 4096  # characters
_DEEPEST = 50  # nested parentheses, signs and powers
_LARGEST = 1 << 62
_MOST_KEPT = 4096  # cached expressions
_MOST_TERMS = 256  # terms of a product of sums

_TOKEN = re.compile(r"\s*(?:(\d{1,19}(?![\w.]))|([A-Za-z_]\w*)|(\*\*|//|[-+*%^(),]))", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MADE = re.compile(r"\bs\d+\b")  # names of sizes from recorders
_SUMS: dict[str, Any] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: dict[str, Any] = {"*": operator.mul, "//": operator.floordiv, "%": operator.mod}


def _most(a: Any, b: Any) -> Any:
    """Returns the larger of two sizes, with arithmetic alone where sizes are unknown."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return (a + b + abs(a - b)) // 2


def _least(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return (a + b - abs(a - b)) // 2


def _power(base: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int) or not 0 <= exponent < _LARGEST.bit_length():
        raise LookupError(exponent)
    return base**exponent


# Functions with which JAX prints sizes that operators cannot express.
_FUNCTIONS: dict[str, Any] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": _most,
    "min": _least,
}


def size_of(expression: str, sizes: Mapping[str, Any]) -> Any | None:
    """Evaluates an expression of sizes; None if that is impossible.

    Numbers, names, `+ - * // %`, powers with `^` or `**`, parentheses and the functions `floordiv`,
    `mod`, `max` and `min` are supported, with numbers up to 2**62.

    Examples:
        >>> size_of("2*s0 + 1", {"s0": 4}), size_of("s1", {"s0": 4}), size_of("f(s0)", {"s0": 4})
        (9, None, None)
        >>> size_of("max(floordiv(b, 2) - 1, 0) + 2^2", {"b": 7})
        6
        >>> size_of("9**9**9", {}) is None
        True
    """
    if expression.isidentifier():  # the usual case
        return sizes.get(expression)
    tree = _tree(expression)
    try:
        return None if tree is None else _value(tree, sizes)
    except (LookupError, ZeroDivisionError):
        return None


def solve_names(sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Solves for names that occur only in expressions, such as `n` in `2*n + 1`; rounds down.

    Examples:
        >>> solve_names({"2*n + 1": 7, "b": 3})["n"]
        3
    """
    solved = dict(sizes)
    for expression, given in sizes.items():
        match = None if expression.isidentifier() else _LINEAR.fullmatch(expression)
        if match is not None and isinstance(given, int):
            factor, name, sign, more = match.groups()
            rest = given - int(f"{sign or '+'}{more or 0}")
            solved.setdefault(name, rest // max(int(factor or 1), 1))
    return solved


_LINEAR = re.compile(r"(?:(\d{1,9})\*)?([A-Za-z_]\w*)(?: ([+-]) (\d{1,9}))?", re.ASCII)
_read: dict[str, Any] = {}  # compilers can trace a dict, but not functools.cache


def _tree(expression: str) -> Any:
    """Parses an expression into numbers, names and tuples of a function and arguments, or None."""
    if expression not in _read:
        if len(_read) >= _MOST_KEPT:
            _read.clear()
        _read[expression] = _parse(expression)
    return _read[expression]


def _parse(expression: str) -> Any:
    if len(expression) > _LONGEST:
        return None
    tokens: list[str] = []
    at, end = 0, len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at)
        if match is None:
            return None
        tokens.append(match[match.lastindex or 0])
        at = match.end()
    reader = _Reader(tokens)
    try:
        tree = reader.sum()
    except SyntaxError:
        return None
    return None if reader.rest else tree


class _Reader:
    """Parses an expression with Python's precedence, and rejects anything unknown."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens[::-1]
        self._depth = 0

    def sum(self) -> Any:
        return self._row(_SUMS, self._product)

    def _product(self) -> Any:
        return self._row(_PRODUCTS, self._sign)

    def _row(self, operators: Mapping[str, Any], operand: Any) -> Any:
        first, more = operand(), []
        while self._next() in operators:
            more += [operators[self.rest.pop()], operand()]
        return (_fold, first, *more) if more else first

    def _sign(self) -> Any:
        if self._next() != "-":
            return self._exponent()
        self.rest.pop()
        return operator.neg, self._within(self._sign)

    def _exponent(self) -> Any:
        base = self._atom()
        if self._next() not in ("^", "**"):  # JAX prints powers with a hat
            return base
        self.rest.pop()
        return _power, base, self._within(self._sign)

    def _atom(self) -> Any:
        token = self.rest.pop() if self.rest else ""
        if token.isdigit():
            return int(token)
        if token == "(":
            tree = self._within(self.sum)
            self._take(")")
            return tree
        if not token.isidentifier():
            raise SyntaxError(token)
        if self._next() != "(":
            return token
        self.rest.pop()
        first = self._within(self.sum)
        self._take(",")
        second = self._within(self.sum)
        self._take(")")
        if token not in _FUNCTIONS:
            raise SyntaxError(token)
        return _FUNCTIONS[token], first, second

    def _within(self, part: Any) -> Any:
        if self._depth == _DEEPEST:
            raise SyntaxError("too deep")
        self._depth += 1
        tree = part()
        self._depth -= 1
        return tree

    def _next(self) -> str:
        return self.rest[-1] if self.rest else ""

    def _take(self, token: str) -> None:
        if self._next() != token:
            raise SyntaxError(token)
        self.rest.pop()


def _fold(first: Any, *more: Any) -> Any:
    for function, operand in zip(more[::2], more[1::2], strict=True):
        first = _bound(function(first, operand))
    return first


def _value(tree: Any, sizes: Mapping[str, Any]) -> Any:
    if isinstance(tree, str):
        return sizes[tree]
    if not isinstance(tree, tuple | int):  # a function of several arguments
        return tree
    if isinstance(tree, tuple):
        tree = tree[0](*[_value(inner, sizes) for inner in tree[1:]])
    return _bound(tree)


def _bound(size: Any) -> Any:
    if isinstance(size, int) and not -_LARGEST <= size <= _LARGEST:
        raise LookupError(size)
    return size


class Polynomial(dict[tuple[str, ...], int]):
    """A size as a sum of products, so that equal sizes compare equal in any notation.

    It maps the sorted factors of each term to the coefficient. A factor is a name, or an operation
    that is not polynomial, such as `max(0, s0 - 2)`.

    Examples:
        >>> read = Polynomial.read
        >>> Polynomial.product(["2*s1", "s0"]) == read("s0*s1*2")
        True
        >>> Polynomial.product(["s0 + 1", "s1 - 1"]) == read("s0*s1 - s0 + s1 - 1")
        True
        >>> read("s1*max(s0 - 2, 0)") == read("max(-2 + s0, 0)*s1")
        True
        >>> (read("s0 + 1") - read("s0 - 2")).number
        3
    """

    @classmethod
    def read(cls, size: int | str) -> Polynomial:
        """Reads a size; one that `size_of` does not understand is a factor."""
        try:
            tree = size if isinstance(size, int) else _tree(size)
            return cls({(str(size),): 1}) if tree is None else _polynomial(tree)
        except OverflowError:
            return cls({(str(size),): 1})

    @classmethod
    def product(cls, sizes: Iterable[int | str]) -> Polynomial:
        """Reads sizes and multiplies them."""
        return math.prod(map(cls.read, sizes), start=cls.read(1))

    @property
    def number(self) -> int | None:
        """The number that this is; None if it varies."""
        return None if any(self) else self.get((), 0)

    def __lt__(self, other: Polynomial) -> bool:
        """Compares the terms of highest degree."""
        left, right = ([(len(term), n) for term, n in x.items()] or [(0, 0)] for x in (self, other))
        return max(left) < max(right)

    def __add__(self, other: Polynomial) -> Polynomial:
        return _sum([*self.items(), *other.items()])

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + Polynomial({(): -1}) * other

    def __mul__(self, other: Polynomial) -> Polynomial:
        if len(self) * len(other) > _MOST_TERMS:
            raise OverflowError(f"a product of more than {_MOST_TERMS} terms")
        pairs = itertools.product(self.items(), other.items())
        return _sum((tuple(sorted(left + right)), m * n) for (left, m), (right, n) in pairs)

    def __str__(self) -> str:
        return " + ".join("*".join([*factors, f"{n}"]) for factors, n in sorted(self.items()))


def _sum(terms: Iterable[tuple[tuple[str, ...], int]]) -> Polynomial:
    total: Counter[tuple[str, ...]] = Counter()
    for factors, number in terms:
        total[factors] += number
    return Polynomial({factors: number for factors, number in total.items() if number})


def _polynomial(tree: Any) -> Polynomial:
    if not isinstance(tree, tuple):
        return _sum([((tree,), 1) if isinstance(tree, str) else ((), tree)])
    function, *operands = tree
    if function is not _fold:
        return _apply(function, *map(_polynomial, operands))
    polynomial = _polynomial(operands[0])
    for function, operand in zip(operands[1::2], operands[2::2], strict=True):
        polynomial = _apply(function, polynomial, _polynomial(operand))
    return polynomial


def _apply(function: Any, *operands: Polynomial) -> Polynomial:
    if function in (operator.add, operator.sub, operator.mul):
        polynomial: Polynomial = function(*operands)
        return polynomial
    numbers = [operand.number for operand in operands]
    if function is operator.neg:
        return Polynomial() - operands[0]
    if function is _power and numbers[1] in range(_MOST_TERMS):
        return math.prod([operands[0]] * (numbers[1] or 0), start=_polynomial(1))
    text = f"{function.__name__}({', '.join(map(str, operands))})"
    if len(text) > _LONGEST:
        raise OverflowError(f"more than {_LONGEST} characters")
    return Polynomial({(text,): 1})


def reshape_groups(
    old: Sequence[int | str], new: Sequence[int | str]
) -> tuple[list[tuple[slice, slice]], bool]:
    """Groups the dimensions of two shapes into the smallest parts of equal size.

    Returns:
        The ranges of both in each group, and whether all groups match; the last one may not.

    Examples:
        >>> reshape_groups([6, "n", 4], [2, 3, "4*n"])
        ([(slice(0, 1, None), slice(0, 2, None)), (slice(1, 3, None), slice(2, 3, None))], True)
    """
    before: Any = old
    after: Any = new
    unit: Any = 1
    if any(isinstance(size, str) for size in (*old, *new)):
        before, after = ([Polynomial.read(size) for size in shape] for shape in (old, new))
        unit = Polynomial.read(1)
    groups: list[tuple[slice, slice]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        k, m = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while True:
            left, right = math.prod(before[k:i], start=unit), math.prod(after[m:j], start=unit)
            if left == right:
                break
            if left < right and i < len(old):
                i += 1
            elif j < len(new):
                j += 1
            else:
                return [*groups, (slice(k, len(old)), slice(m, len(new)))], False
        groups.append((slice(k, i), slice(m, j)))
    return groups, True


def names_in(size: object) -> list[str]:
    """Returns the names in an expression of sizes, in their order."""
    return [*dict.fromkeys(x for x in _NAME.findall(str(size)) if x not in _FUNCTIONS)]


def show_shape(shape: Sequence[int | str]) -> str:
    """Formats a shape for errors, with `_` for dynamic sizes that the user has not named."""
    sizes = ["_" if isinstance(size, str) and _MADE.fullmatch(size) else size for size in shape]
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def name_sizes(text: str, places: Mapping[str, str]) -> str:
    """Replaces recorders' names of sizes by the inputs that have these sizes."""
    return _MADE.sub(lambda name: places.get(name[0], name[0]), text)
