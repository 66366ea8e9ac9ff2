"""Functions of NumPy on arrays without data, other than views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fmapper.checkpoints import LazyArray, Recorder, concatenate, stack

HANDLERS: dict[Any, Callable[..., Any]] = {}
_LIKE: dict[Any, int | None] = {np.empty_like: None, np.zeros_like: 0, np.ones_like: 1}


def _handles(*functions: Any) -> Callable[[Any], Any]:
    def register(handler: Any) -> Any:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@_handles(np.reshape)
def _reshape(recorder: Any, a: Any, /, shape: Any = None, order: str = "C", **kw: Any) -> Any:
    return a.reshape(shape if shape is not None else kw["newshape"], order=order)


@_handles(np.ravel)
def _ravel(recorder: Any, a: Any, order: str = "C") -> Any:
    return a.ravel(order)


@_handles(np.copy)
def _copy(recorder: Any, a: Any, **kwargs: Any) -> Any:
    return a.copy()


@_handles(np.copyto)
def _copyto(recorder: Any, dst: Any, src: Any) -> None:
    if recorder.lazy(dst) is None:
        raise Recorder.refusal("a copy into an array with values")
    dst.write(src)


@_handles(np.sum)
def _sum(recorder: Any, a: Any, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not isinstance(axis, int):
        raise recorder.refusal("np.sum")
    return recorder.stand_in(recorder.total(a.lazy(), (axis,)))


@_handles(np.einsum)
def _einsum(recorder: Any, subscripts: Any, *operands: Any, **kwargs: Any) -> Any:
    old, arrow, new = str(subscripts).replace(" ", "").partition("->")
    is_permutation = arrow and sorted(old) == sorted(new) and len({*old}) == len(old)
    if len(operands) != 1 or not is_permutation or not old.isalpha():
        raise recorder.refusal("np.einsum")
    return operands[0].transpose([old.index(letter) for letter in new])


def _lazies(recorder: Any, arrays: Any, dtype: Any = None) -> list[LazyArray]:
    """Converts arrays to lazy arrays of a common dtype."""
    lazies = [recorder.to_lazy(array) for array in arrays]
    wanted = np.result_type(*(x.dtype for x in lazies)) if dtype is None else np.dtype(dtype)
    return [Recorder.cast(x, wanted) for x in lazies]


@_handles(np.concatenate)
def _concatenate(
    recorder: Any, arrays: Any, axis: int | None = 0, *, dtype: Any = None, **kwargs: Any
) -> Any:
    lazies = _lazies(recorder, arrays, dtype)
    if axis is None:
        lazies, axis = [x.reshape((-1,)) for x in lazies], 0
    return recorder.stand_in(concatenate(lazies, axis))


@_handles(np.stack)
def _stack(recorder: Any, arrays: Any, axis: int = 0, *, dtype: Any = None, **kwargs: Any) -> Any:
    return recorder.stand_in(stack(_lazies(recorder, arrays, dtype), axis))


def _joiner(prepare: Callable[[Any], Any], axis: int) -> Callable[..., Any]:
    def join(recorder: Any, arrays: Any, **kwargs: Any) -> Any:
        ready = [prepare(x) for x in arrays]
        at = 0 if axis == 1 and ready[0].ndim == 1 else axis
        return recorder.stand_in(concatenate(_lazies(recorder, ready), at))

    return join


HANDLERS[np.vstack] = _joiner(np.atleast_2d, 0)
HANDLERS[np.hstack] = _joiner(np.atleast_1d, 1)
HANDLERS[np.dstack] = _joiner(np.atleast_3d, 2)
HANDLERS[np.column_stack] = _joiner(lambda x: x[:, None] if x.ndim == 1 else x, 1)


@_handles(np.block)
def _block(recorder: Any, arrays: Any) -> Any:
    depth, first = 0, arrays
    while isinstance(first, list):
        depth, first = depth + 1, first[0]

    def join(part: Any, level: int) -> Any:
        if not isinstance(part, list):
            return part
        rows = [join(item, level - 1) for item in part]
        return _concatenate(recorder, rows, -level)

    return join(arrays, depth)


@_handles(np.append)
def _append(recorder: Any, arr: Any, values: Any, axis: int | None = None) -> Any:
    return _concatenate(recorder, [arr, values], axis)


@_handles(np.pad)
def _pad(recorder: Any, array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    if mode != "constant":
        raise Recorder.refusal(f"np.pad with mode={mode!r}")
    widths = np.broadcast_to(np.asarray(pad_width), (array.ndim, 2)).tolist()
    value = kwargs.get("constant_values", 0)
    shape = [low + size + high for (low, high), size in zip(widths, array.shape, strict=True)]
    padded = recorder.full(shape, value, array.dtype)
    padded[tuple(slice(low, low + n) for (low, _), n in zip(widths, array.shape, strict=True))] = (
        array
    )
    return padded


def _like(value: float | None) -> Callable[..., Any]:
    def make(recorder: Any, a: Any, dtype: Any = None, *, shape: Any = None, **kw: Any) -> Any:
        kind = a.dtype if dtype is None else np.dtype(dtype)
        return recorder.full(a.shape if shape is None else shape, value, kind)

    return make


HANDLERS.update({function: _like(value) for function, value in _LIKE.items()})


@_handles(np.full_like)
def _full_like(recorder: Any, a: Any, fill_value: Any, dtype: Any = None, **kw: Any) -> Any:
    return recorder.full(a.shape, fill_value, a.dtype if dtype is None else np.dtype(dtype))


@_handles(np.result_type)
def _result_type(recorder: Any, *args: Any) -> Any:
    return np.result_type(*(getattr(x, "dtype", x) for x in args))
