"""Patches JAX's class of symbolic sizes, so that its methods ask the recording for answers.

The patch is in place during recordings, and affects only the symbols of a recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import export

Symbol: Any = type(export.symbolic_shape("n")[0])
_ABSENT: Any = object()
_ORDERS = {"__ge__": ">=", "__le__": "<=", "__gt__": ">", "__lt__": "<"}
_LARGER = ("max", "rmax", "min", "rmin")
_TEXTS = ("__str__", "__repr__")
_QUOTIENTS = tuple(
    f"__{side}{name}__" for name in ("floordiv", "mod", "divmod", "truediv") for side in ("", "r")
)
_ARITHMETIC = tuple(
    f"__{side}{name}__" for name in ("mul", "add", "sub", "pow") for side in ("", "r")
)
_BITS = tuple(
    f"__{side}{name}__" for name in ("and", "or", "xor", "lshift", "rshift") for side in ("", "r")
)
_OF_INTEGERS = frozenset(name for name in dir(int) if not name.startswith("_"))
_lock = threading.Lock()
_active: dict[int, Any] = {}  # scope id -> recording


def enter(scope: Any, questions: Any) -> None:
    """Makes the symbols of a scope ask `questions`."""
    with _lock:
        if not _active:
            for name, method in _ANSWERING.items():
                setattr(Symbol, name, method)
        _active[id(scope)] = questions


def leave(scope: Any) -> None:
    """Undoes `enter`, and restores the class after the last one."""
    with _lock:
        del _active[id(scope)]
        if not _active:
            for name, method in ORIGINAL.items():
                if method is _ABSENT:
                    delattr(Symbol, name)
                else:
                    setattr(Symbol, name, method)


def _of(symbol: Any) -> Any:
    """Returns the recording that a symbol belongs to; other threads may have their own."""
    return _active.get(id(symbol.scope))


def _eq(self: Any, other: Any) -> Any:
    questions = _of(self)
    return ORIGINAL["__eq__"](self, other) if questions is None else questions.equal(self, other)


def _ne(self: Any, other: Any) -> Any:
    questions = _of(self)
    if questions is None:
        return not ORIGINAL["__eq__"](self, other)
    answer = questions.equal(self, other)
    if isinstance(answer, np.ndarray):
        return ~answer
    return answer if answer is NotImplemented else not answer


def _order(method: str) -> Callable[[Any, Any], Any]:
    def ask(self: Any, other: Any) -> Any:
        questions = _of(self)
        if questions is None:
            return ORIGINAL[method](self, other)
        return questions.at_least(self, other, _ORDERS[method])

    return ask


def _one_of_both(method: str) -> Callable[[Any, Any], Any]:
    def choose(self: Any, other: Any) -> Any:
        questions = _of(self)
        if questions is None:
            return ORIGINAL[method](self, other)
        return questions.larger(self, other, method)

    return choose


def _text(method: str) -> Callable[[Any], str]:
    def write(self: Any) -> str:
        questions = _of(self)
        if questions is None:
            text: str = ORIGINAL[method](self)
            return text
        text = questions.text(self, method)
        return text

    return write


def _quotient(method: str) -> Callable[[Any, Any], Any]:
    def divide(self: Any, other: Any) -> Any:
        questions = _of(self)
        if questions is None:
            return ORIGINAL[method](self, other)
        return questions.quotient(method, self, other)

    return divide


def _arithmetic(method: str) -> Callable[..., Any]:
    def work_out(self: Any, other: Any, *modulo: Any) -> Any:
        questions = _of(self)
        if questions is None or modulo:
            return ORIGINAL[method](self, other, *modulo)
        return questions.arithmetic(method, self, other)

    return work_out


def _bits(method: str) -> Callable[[Any, Any], Any]:
    def combine(self: Any, other: Any) -> Any:
        questions = _of(self)
        if questions is None:
            return NotImplemented
        try:
            return questions.as_integer(method, self, other)
        except AttributeError:
            return NotImplemented

    return combine


def _absolute(self: Any) -> Any:
    questions = _of(self)
    if questions is None:
        raise TypeError(f"bad operand type for abs(): {type(self).__name__!r}")
    return questions.absolute(self)


def _invert(self: Any) -> Any:
    return -self - 1


def _itself(self: Any) -> Any:
    return self


def _round(self: Any, digits: int | None = None) -> Any:
    questions = _of(self)
    if digits is None or digits >= 0 or questions is None:
        return self
    return questions.as_integer("__round__", self, digits)


def _format(self: Any, form: str) -> str:
    questions = _of(self)
    if questions is None:
        return object.__format__(self, form)
    text: str = questions.write(self, form) if form else questions.text(self, "__str__")
    return text


def _attribute(self: Any, name: str) -> Any:
    if name != "__class__" or (questions := _of(self)) is None:
        return object.__getattribute__(self, name)
    return questions.class_of(self)


def _more_attributes(self: Any, name: str) -> Any:
    """Looks up attributes that symbols lack: methods of integers, and NumPy's functions.

    NumPy calls the method `log2` of an object for `np.log2`.
    """
    questions = _of(self)
    is_known = name in _OF_INTEGERS or isinstance(getattr(np, name, None), np.ufunc)
    if questions is None or name.startswith("_") or not is_known:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    if name in ("numerator", "real"):
        return self
    if name in ("denominator", "imag"):
        return int(name == "denominator")
    questions.as_integer("__pos__", self)  # raises AttributeError for JAX
    return lambda *arguments: questions.as_integer(name, self, *arguments)


def _hash(self: Any) -> int:
    questions = _of(self)
    result: int = ORIGINAL["__hash__"](self) if questions is None else questions.hash_of(self)
    return result


def _bool(self: Any) -> bool:
    questions = _of(self)
    return True if questions is None else bool(questions.truth(self))


def _int(self: Any) -> int:
    questions = _of(self)
    if questions is None:
        result: int = ORIGINAL["__int__"](self)
        return result
    result = questions.number(self, ORIGINAL["__int__"])
    return result


def _no_index(self: Any) -> int:
    raise TypeError(f"{type(self).__name__!r} object cannot be interpreted as an integer")


def _index(self: Any) -> int:
    questions = _of(self)
    if questions is None:
        return _no_index(self)
    result: int = questions.number(self, _no_index)
    return result


_ANSWERING: dict[str, Any] = {
    "__eq__": _eq,
    "__ne__": _ne,
    **{method: _order(method) for method in _ORDERS},
    **{method: _one_of_both(method) for method in _LARGER},
    **{method: _text(method) for method in _TEXTS},
    **{method: _quotient(method) for method in _QUOTIENTS},
    **{method: _arithmetic(method) for method in _ARITHMETIC},
    **{method: _bits(method) for method in _BITS},
    **dict.fromkeys(("__trunc__", "__floor__", "__ceil__", "__pos__"), _itself),
    "__abs__": _absolute,
    "__invert__": _invert,
    "__round__": _round,
    "__format__": _format,
    "__getattribute__": _attribute,
    "__getattr__": _more_attributes,
    "__hash__": _hash,
    "__bool__": _bool,
    "__int__": _int,
    "__index__": _index,
}
ORIGINAL: dict[str, Any] = {name: Symbol.__dict__.get(name, _ABSENT) for name in _ANSWERING}
