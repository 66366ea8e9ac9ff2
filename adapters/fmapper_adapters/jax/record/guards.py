"""Answers Python's questions about sizes that vary, and keeps each answer as a guard.

`jax.export` has symbols for sizes that vary. Python cannot branch on a symbol: `n == 4` and looking
`n` up in a dict are answered with "not equal" whatever `n` is, `bool(n % 2)` with True, `str(n)`
with a name, and `n > 3` with an error. With this module, code of the user gets the answer that
holds for the examples, and the program gets a guard for it. JAX itself gets JAX's answers, because
its code is written for symbols. If that fails, a second recording answers JAX for the examples too
(`deep`).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import numpy as np
from jax import export

from fmapper.programs import Guard, Polynomial, names_in, size_of
from fmapper_adapters.jax.record import symbols as _symbols
from fmapper_adapters.jax.record.frames import TypeCalls, called_name

_Symbol = _symbols.Symbol
_ORIGINAL = _symbols.ORIGINAL
_METHODS = {">=": "__ge__", "<=": "__le__", ">": "__gt__", "<": "__lt__"}
_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_ABSENT: Any = object()
_OF_JAX = frozenset({"jax", "jaxlib", "fmapper", "fmapper_adapters", "opt_einsum"})
# Libraries that compare sizes only to raise an error if they differ.
_FOR_JAX = frozenset({"flax", "equinox", "haiku", "optax", "einops", "jaxtyping"})
_BETWEEN = sys.stdlib_module_names | {"numpy"} - {"__main__"}  # their caller is asking
# Calls that look something up by its hash; other calls use hashes to cache, such as `jax.jit`.
_LOOKUPS = frozenset({
    "get", "setdefault", "pop", "add", "discard", "remove", "update", "hash", "set", "frozenset",
    "dict", "fromkeys", "Counter", "union", "intersection", "difference", "issubset", "issuperset",
    "symmetric_difference", "intersection_update", "difference_update",
    "symmetric_difference_update", "isdisjoint", "contains", "getitem", "itemgetter",
    "__hash__", "__getitem__", "__contains__", "__setitem__", "__delitem__",
    # These may run such a method in a `map` or a `filter`.
    "map", "filter", "list", "tuple", "sorted", "sum", "any", "all", "max", "min", "next", "reduce",
})  # fmt: skip
# Calls that show a text to people and do nothing with it.
_SHOWS = frozenset({"print", "pprint", "debug", "info", "warning", "error", "exception", "log"})
_ITERATIONS = frozenset({"_iter", "__iter__", "iterate"})  # functions of JAX behind `for row in x`
_BRANCHES = frozenset({"cond", "_cond"})  # they test a number of the user for 0


@dataclass
class _Range:
    """The range of an expression that the answers so far allow, with the question of each bound."""

    low: tuple[int, str] | None = None
    high: tuple[int, str] | None = None
    excluded: dict[int, str] = field(default_factory=dict)

    def at_least(self, value: int, question: str) -> None:
        if self.low is None or value > self.low[0]:
            self.low = value, question

    def at_most(self, value: int, question: str) -> None:
        if self.high is None or value < self.high[0]:
            self.high = value, question

    @property
    def only(self) -> tuple[int, str] | None:
        """The only possible value, if there is one, and the question that excluded all others."""
        if self.low is None or self.high is None or self.low[0] != self.high[0]:
            return None
        return self.low

    def guards(self, expression: str) -> Iterator[Guard]:
        if self.only is not None:
            yield Guard(expression, "==", *self.only)
            return
        least = 0 if expression.isidentifier() else -sys.maxsize
        low = least if self.low is None else self.low[0]
        high = sys.maxsize if self.high is None else self.high[0]
        if self.low is not None and low > least:
            yield Guard(expression, ">=", *self.low)
        if self.high is not None:
            yield Guard(expression, "<=", *self.high)
        for value, question in self.excluded.items():
            if low <= value <= high:
                yield Guard(expression, "!=", value, question)


class Questions:
    """The questions about the sizes of one recording, answered within its `with` block.

    Args:
        scope: The scope of the symbols.
        sizes: The sizes of the examples.
        deep: Whether JAX, too, gets the answers for the examples where it would otherwise fail.
    """

    def __init__(self, scope: Any, sizes: Mapping[str, int], *, deep: bool = False) -> None:
        self._scope = scope
        self._sizes = dict(sizes)
        self._deep = deep
        self._ranges: dict[str, _Range] = {}
        self._places: dict[CodeType, bool | None] = {}

    def __enter__(self) -> Questions:
        _symbols.enter(self._scope, self)
        self._types = TypeCalls(lambda frame: bool(_is_user(frame)), self._type_of)
        self._types.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._types.__exit__()
        _symbols.leave(self._scope)

    def guards(self) -> tuple[Guard, ...]:
        """Returns the guards: conditions on the sizes of a call."""
        return tuple(
            guard for part, limits in self._ranges.items() for guard in limits.guards(part)
        )

    def fixed_sizes(self) -> dict[str, tuple[int | str, str]]:
        """Returns sizes that guards have fixed to a value or another size, with the question."""
        fixed: dict[str, tuple[int | str, str]] = {}
        for part, limits in self._ranges.items():
            if limits.only is None:
                continue
            value, question = limits.only
            match sorted(Polynomial.read(part).items(), key=operator.itemgetter(1)):
                case [((name,), factor)] if name.isidentifier():
                    fixed.setdefault(name, (value // factor, question))
                case [((name,), -1), ((other,), 1)] if value == 0 and other not in fixed:
                    fixed.setdefault(name, (other, question))
        return fixed

    # --- answers ---

    def equal(self, size: Any, other: Any) -> Any:
        """Answers `size == other`."""
        frame = self._user()
        if frame is None and sys._getframe(2).f_code.co_name in _BRANCHES:
            frame = self._user(beyond=True)
        if frame is None:
            answer = _ORIGINAL["__eq__"](size, other)
            return answer or (self._deep and self._is_equal_in_depth(size, other))
        if isinstance(other, np.ndarray):
            return _each(lambda value: self._equals(size, value, frame), other)
        return self._equals(size, other, frame)

    def _equals(self, size: Any, other: Any, frame: Any) -> Any:
        number = _as_size(other)
        if number is None:
            return NotImplemented
        if isinstance(number, float):  # no integer
            return False
        return self._equal(size - number, f"{size} == {other}", frame)

    def at_least(self, size: Any, other: Any, relation: str) -> Any:
        """Answers `size >= other`, or another relation: `>`, `<` or `<=`."""
        frame = self._user()
        if frame is None and not self._deep:
            answer = _ORIGINAL[_METHODS[relation]](size, other)
            self._need_no_zero(size, other, relation, answer)
            return answer
        if isinstance(other, np.ndarray):
            return _each(lambda value: self._compare(size, value, relation, frame), other)
        return self._compare(size, other, relation, frame)

    def _compare(self, size: Any, other: Any, relation: str, frame: Any) -> Any:
        number = _as_size(other)
        if number is None:
            return NotImplemented
        if isinstance(number, float):
            if not math.isfinite(number):
                return _RELATIONS[relation](0, number)
            number = math.floor(number) if relation in (">", "<=") else math.ceil(number)
        try:
            answer = _ORIGINAL[_METHODS[relation]](size, number)
        except _INCONCLUSIVE:
            question = f"{size} {relation} {other}"
            above = size - number if relation in (">=", "<") else number - size
            answer = self._is_positive_or_zero(above, question, frame)
            return answer if relation in (">=", "<=") else not answer
        self._need_no_zero(size, number, relation, answer)
        return answer

    def larger(self, size: Any, other: Any, method: str) -> Any:
        """Answers `max(size, other)` or `min(size, other)`: one of them if that is decided."""
        difference = size - other
        result = _ORIGINAL[method](size, other)
        if not self._deep or result is size or result is other or not isinstance(result, _Symbol):
            return result
        takes_size = self._value(difference) >= 0
        frame = self._user(beyond=True)
        if takes_size:
            self._is_positive_or_zero(difference, f"{size} >= {other}", frame)
        else:
            self._is_positive_or_zero(-difference, f"{other} >= {size}", frame)
        return size if takes_size == method.endswith("max") else other

    def hash_of(self, size: Any) -> int:
        """Answers `hash(size)`, which fixes the size for a lookup."""
        frame = self._user()
        if frame is None or _name(frame) in _FOR_JAX or not _looks_up(frame):
            result: int = _ORIGINAL["__hash__"](size)
            return result
        return hash(self._fix(size, f"{size} is looked up", frame))

    def truth(self, size: Any) -> bool:
        """Answers `bool(size)`."""
        frame = self._user()
        return frame is None or not self._equal(size, f"{size} == 0", frame)

    def number(self, size: Any, original: Callable[[Any], int]) -> int:
        """Answers `int(size)`, or another use as a number."""
        frame = self._user()
        if frame is None and sys._getframe(2).f_code.co_name in _ITERATIONS:
            frame = self._user(beyond=True)
        if frame is None:
            return original(size)
        return self._fix(size, f"{size} is used as a number", frame)

    def text(self, size: Any, method: str) -> str:
        """Writes a size as text, for example for a name that contains it."""
        frame = self._user()
        if frame is None or _name(frame) in _FOR_JAX or called_name(frame) in _SHOWS:
            result: str = _ORIGINAL[method](size)
            return result
        return str(self._fix(size, f"{size} is written as text", frame))

    def write(self, size: Any, form: str) -> str:
        """Writes a size in a format, as in `f"{n:03d}"`."""
        frame = self._user()
        return format(size if frame is None else self._fix(size, f"{size} is written", frame), form)

    def quotient(self, method: str, size: Any, other: Any) -> Any:
        """Divides sizes for Python, where a division by zero is an error.

        Raises:
            ZeroDivisionError: The size is 0 for the examples.
        """
        frame = self._user()
        divisor = size if method.startswith("__r") else other
        is_asked = isinstance(divisor, _Symbol) and frame is not None
        if is_asked and self._equal(divisor, f"{divisor} == 0", frame):
            raise ZeroDivisionError("integer division or modulo by zero")
        return self._number_or(method, size, other, frame)

    def arithmetic(self, method: str, size: Any, other: Any) -> Any:
        """Adds, multiplies or raises to a power; repeats a sequence."""
        return self._number_or(method, size, other, self._user())

    def _number_or(self, method: str, size: Any, other: Any, frame: Any) -> Any:
        """Returns JAX's result for a size and `other`, or a number if that fails.

        JAX makes an array of anything that is not an integer. If that fails, as in
        `range(int(n / 2))`, the second recording knows the number.
        """
        repeats = isinstance(other, list | tuple) and method in ("__mul__", "__rmul__")
        if repeats and (self._deep or frame is not None):
            frame = frame or self._user(beyond=True)  # JAX repeats for a loop over rows
            return other * self._fix(size, f"{size} is a number of repetitions", frame)
        broken = isinstance(other, float) or method in ("__truediv__", "__rtruediv__")
        if not (self._deep and broken and frame is not None):
            return _ORIGINAL[method](size, other)
        if isinstance(other, _Symbol):
            other = self._fix(other, f"{other} is used as a number", frame)
        elif not isinstance(other, int | float):
            return _ORIGINAL[method](size, other)
        return getattr(float(self._fix(size, f"{size} is used as a number", frame)), method)(other)

    def absolute(self, size: Any) -> Any:
        """Answers `abs(size)`."""
        is_positive = self._is_positive_or_zero(size, f"{size} >= 0", self._user())
        return size if is_positive else -size

    def as_integer(self, method: str, size: Any, *arguments: Any) -> Any:
        """Calls a method of integers that symbols do not have, as in `size & 1`.

        Raises:
            AttributeError: JAX asks, which handles symbols without the method.
        """
        frame = self._user()
        if frame is None and not self._deep:
            raise AttributeError(f"{type(size).__name__!r} object has no attribute {method!r}")
        numbers = [
            self._fix(number, f"{number} is used as a number", frame)
            if isinstance(number, _Symbol) else number
            for number in (size, *arguments)
        ]  # fmt: skip
        of_numpy = not hasattr(int, method)
        return (
            getattr(np, method)(*numbers) if of_numpy else getattr(numbers[0], method)(*numbers[1:])
        )

    def class_of(self, size: Any) -> type:
        """Returns the class that `isinstance` sees: code of users knows sizes as integers."""
        frame = self._user()
        return type(size) if frame is None or _name(frame) in _FOR_JAX else int

    def _type_of(self, size: Any, frame: FrameType) -> None:
        """Fixes a size whose class is requested: only a number has the class `int`."""
        if isinstance(size, _Symbol) and _name(frame) not in _FOR_JAX:
            self._fix(size, f"type({size}) is asked for", frame)

    # --- the expressions ---

    def _value(self, expression: Any) -> int:
        if not isinstance(expression, _Symbol):
            return int(expression)
        value: Any = size_of(str(expression), self._sizes)
        return int(value)

    def _equal(self, difference: Any, question: str, frame: Any) -> bool:
        if not isinstance(difference, _Symbol):
            return bool(difference == 0)
        answer = self._value(difference) == 0
        part, sign, rest = _parts(difference)
        limits = self._ranges.setdefault(part, _Range())
        reason = _describe_question(question, frame)
        if answer:
            limits.at_least(-sign * rest, reason)
            limits.at_most(-sign * rest, reason)
        else:
            limits.excluded.setdefault(-sign * rest, reason)
        return answer

    def _is_equal_in_depth(self, size: Any, other: Any) -> bool:
        """Returns whether two sizes are equal for the examples, without fixing either of them."""
        number = _as_size(other)
        difference = None if number is None or isinstance(number, float) else size - number
        if not isinstance(difference, _Symbol) or self._value(difference) != 0:
            return False
        part, _, _ = _parts(difference)
        if "(" not in part:
            return False
        return self._equal(difference, f"{size} == {other}", self._user(beyond=True))

    def _is_positive_or_zero(self, difference: Any, question: str, frame: Any) -> bool:
        answer = self._value(difference) >= 0
        part, sign, rest = _parts(difference)
        limits = self._ranges.setdefault(part, _Range())
        reason = _describe_question(question, frame or self._user(beyond=True))
        if answer == (sign > 0):
            limits.at_least(-rest if answer else rest + 1, reason)
        else:
            limits.at_most(rest if answer else -rest - 1, reason)
        return answer

    def _need_no_zero(self, size: Any, other: Any, relation: str, answer: Any) -> None:
        """Guards against a size of zero if that would change the answer.

        JAX assumes that sizes are not zero.
        """
        difference = size - other
        if answer is NotImplemented or not isinstance(difference, _Symbol):
            return
        for name in names_in(difference):
            value = size_of(str(difference), {**self._sizes, name: 0})
            if value is not None and _RELATIONS[relation](value, 0) != answer:
                limits = self._ranges.setdefault(name, _Range())
                if limits.low is None or limits.low[0] < 1:
                    frame = self._user(beyond=True)
                    limits.at_least(1, _describe_question(f"{size} {relation} {other}", frame))

    def _fix(self, size: Any, question: str, frame: Any) -> int:
        part, sign, rest = _parts(size)
        value = self._value(size)
        limits = self._ranges.setdefault(part, _Range())
        reason = _describe_question(question, frame)
        limits.at_least(sign * (value - rest), reason)
        limits.at_most(sign * (value - rest), reason)
        return value

    def _user(self, *, beyond: bool = False) -> FrameType | None:
        """Returns the frame that asks, if it belongs to the user or a third-party library.

        Args:
            beyond: Whether to search past frames of JAX.
        """
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            is_user = self._places.get(frame.f_code, _ABSENT)
            if is_user is _ABSENT:
                is_user = self._places[frame.f_code] = _is_user(frame)
            if is_user:
                return frame
            if is_user is False and not beyond:
                return None
            frame = frame.f_back
        return None


def _inconclusive() -> type[Exception]:
    size = export.symbolic_shape("n")[0]
    try:
        size > 3  # noqa: B015 - it is asked for the error
    except Exception as error:
        return type(error)
    return TypeError


def _is_user(frame: FrameType) -> bool | None:
    """Returns whether code is the user's: True, False for JAX's, None for helpers of either."""
    name = _name(frame)
    if name in _OF_JAX:
        return False
    return None if name in _BETWEEN else True


def _name(frame: FrameType) -> str:
    """Returns the package of some code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _as_size(other: Any) -> Any:
    """Returns a size as an integer; None if it is not a number."""
    if isinstance(other, _Symbol):
        return other
    if isinstance(other, float):
        return int(other) if other.is_integer() else other
    try:
        return operator.index(other)
    except TypeError:
        return None


def _each(answer: Callable[[Any], Any], values: Any) -> Any:
    """Answers a question for each element of an array of NumPy."""
    answers = [answer(value) for value in values.flat]
    return np.array(answers, bool).reshape(values.shape)


def _parts(expression: Any) -> tuple[str, int, int]:
    """Returns an expression as `sign * part + rest`."""
    rest = Polynomial.read(str(expression)).get((), 0)
    part = str(expression - rest)
    return (str(rest - expression), -1, rest) if part.startswith("-") else (part, 1, rest)


def _describe_question(question: str, frame: FrameType | None) -> str:
    if frame is None:
        return question[:200]
    return f"{question[:200]} at {frame.f_code.co_filename}:{frame.f_lineno}"


def _looks_up(frame: FrameType) -> bool:
    """Returns whether the running instruction hashes for a lookup by equality."""
    return (called_name(frame) or "get") in _LOOKUPS


_INCONCLUSIVE = _inconclusive()
