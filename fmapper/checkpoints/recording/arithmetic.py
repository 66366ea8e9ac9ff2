"""Arithmetic on lazy arrays and numbers, and the error for unsupported operations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from fmapper.backends.dtypes import is_inexact
from fmapper.checkpoints import lazy
from fmapper.checkpoints.lazy import LazyArray, concatenate
from fmapper.errors import CheckpointError
from fmapper.tracebacks import frameworks

_LIBRARIES = {"fmapper", "fmapper_adapters", "einops", "contextlib", "functools"}

Operand = LazyArray | int | float


def operand(value: Any) -> Operand:
    """Returns an array as an operand: a number if all of its elements are equal."""
    if isinstance(value, LazyArray) and type(value).__name__ == "_InMemory":
        values = value.read().reshape(-1)
        if values.size and values.tobytes() == values[:1].tobytes() * values.size:
            number = values[0].item()
            return number if isinstance(number, int | float) else value
    return value  # type: ignore[no-any-return]


def cast(array: LazyArray, dtype: Any) -> LazyArray:
    """Casts an array as a framework does.

    Raises:
        CheckpointError: Elements that are not floats would change their dtype.
    """
    if array.dtype == dtype:
        return array
    new = array.astype(dtype) if is_inexact(dtype.name) else array
    if new.dtype != dtype:
        raise refusal(f"the cast of {array.dtype.name} to {dtype.name}")
    return new


def broadcast(array: LazyArray, shape: Sequence[int]) -> LazyArray:
    """Repeats an array along dimensions, as broadcasting does."""
    wanted = tuple(shape)
    if array.shape == wanted:
        return array
    new = array.reshape((*[1] * (len(wanted) - array.ndim), *array.shape))
    for axis, size in enumerate(wanted):
        if new.shape[axis] != size:
            new = concatenate([new] * size, axis)
    return new


def add(a: Operand, b: Operand) -> LazyArray:
    """Returns the sum of two operands of one dtype, at least one of them an array."""
    if not isinstance(b, LazyArray):
        a, b = b, a
    assert isinstance(b, LazyArray)
    if not isinstance(a, LazyArray):
        return b.plus(a) if a else b
    if a.shape != b.shape:
        raise refusal(f"a sum of arrays of shapes {list(a.shape)} and {list(b.shape)}")
    return lazy.add([a, b])


def total(array: LazyArray, axes: Sequence[int]) -> LazyArray:
    """Returns the sums over a dimension of size 2; frameworks sum larger ones in any order."""
    if len(axes) != 1 or array.shape[axes[0]] != 2:
        raise refusal("a sum of more than two elements")
    return lazy.add(array.unstack(axes[0]))


def multiply(a: Operand, b: Operand) -> LazyArray:
    """Returns the product of an array and a number."""
    if isinstance(a, LazyArray) and isinstance(b, LazyArray):
        raise refusal("a product of arrays")
    array, number = (a, b) if isinstance(a, LazyArray) else (b, a)
    assert isinstance(array, LazyArray)
    return array.times(number) if number != 1 else array  # type: ignore[arg-type]


def subtract(a: Operand, b: Operand) -> LazyArray:
    """Returns the difference of an array and a number."""
    if isinstance(b, LazyArray):
        if isinstance(a, LazyArray):
            raise refusal("a difference of arrays")
        return add(multiply(b, -1), a)
    return add(a, -b)


def divide(a: Operand, b: Operand) -> LazyArray:
    """Returns an array divided by a number."""
    if isinstance(b, LazyArray) or not isinstance(a, LazyArray):
        raise refusal("a quotient")
    return a.times(b, divide=True) if b != 1 else a


def refusal(operation: str, line: str | None = None) -> CheckpointError:
    """Returns the error for an operation that rules cannot express, with the user's line."""
    return CheckpointError(
        f"{line or place()}: {operation} needs the values of arrays, or computes others from them. "
        "Rules move, cast, add and scale elements. Leave this step out of the recorded function, "
        "and do it before or after the rules"
    )


def place(frames: Iterable[FrameType] | None = None) -> str:
    """Returns file and line of the innermost frame outside of libraries."""
    stack = _stack() if frames is None else frames
    for frame in stack:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _LIBRARIES | frameworks:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "in a library"


def is_library(frame: FrameType) -> bool:
    """Returns whether a frame belongs to a framework or fmapper."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _LIBRARIES | frameworks


def _stack() -> Iterable[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
