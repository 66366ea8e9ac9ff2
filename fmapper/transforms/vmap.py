"""`vmap`: vectorises functions with the backend of their arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from fmapper.backends.discovery import adapter_of
from fmapper.backends.namespace import array_namespace
from fmapper.errors import TransformError
from fmapper.tracebacks import short_traceback
from fmapper.transforms.arguments import (
    backend_of,
    original_of,
    refuse_holders,
    refuse_untransformable,
)
from fmapper.transforms.static_key import StaticKey, structure_of
from fmapper.tree.children import children
from fmapper.tree.nodes import sync
from fmapper.tree.walk import visit, walk

P = ParamSpec("P")
R = TypeVar("R")


def vmap(fun: Callable[P, R], in_axes: Any = 0, out_axes: Any = 0) -> Callable[P, R]:
    """Vectorises a function over an axis of its arguments.

    Args:
        fun: A function of trees; numbers and other leaves that are not arrays are passed as they
            are.
        in_axes: The axis to map over: an integer for all arguments, or one entry per argument: an
            integer, None for an argument that is passed whole to every call, or a list, tuple or
            dict of these, structured like the argument. Keyword arguments are mapped over axis 0.
        out_axes: The position of the new axis in the results: an integer for all, or a tuple with
            one for each item of a tuple.

    Raises:
        TransformError: The arrays are NumPy's, or there are none, or `in_axes` does not fit.
        MixedDevicesError: The arrays belong to several backends.

    The interface is that of `jax.vmap` and `torch.func.vmap`.

    Examples:
        >>> import fmapper, torch
        >>> dot = lambda m, x: (m["w"] * x).sum()
        >>> fmapper.vmap(dot, in_axes=(None, 0))({"w": torch.ones(2)}, torch.eye(2))
        tensor([1., 1.])
    """

    @short_traceback
    @functools.wraps(fun, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        sync()
        given = [*args, kwargs]
        axes = [*_per_argument(in_axes, len(args)), 0]
        parts = [structure_of(arg) for arg in given]
        arrays: list[Any] = []
        along: list[int | None] = []
        for place, (part, axis) in enumerate(zip(parts, axes, strict=True)):
            arrays += part.arrays
            along += _axes(part, axis, f"argument {place}")
            refuse_holders(part, original_of(args, kwargs))
        adapter = backend_of(arrays, "vectorise", original_of(args, kwargs))
        results: list[StaticKey] = []

        def run(new: Sequence[Any]) -> list[Any]:
            pending = iter(new)
            *new_args, new_kwargs = (
                part.fill([next(pending) for _ in part.arrays]) for part in parts
            )
            result = fun(*new_args, **new_kwargs)
            results.append(structure_of(result, lambda leaf: adapter_of(leaf) is adapter))
            refuse_holders(results[-1], results[-1].tree)
            return results[-1].arrays

        try:
            new = adapter.vectorize(run, arrays, along)
        except Exception as error:
            trees = original_of(args, kwargs)
            refuse_untransformable(error, adapter, arrays, "vectorise", trees)
            raise
        if out_axes != 0:
            new = _move_axes(new, _axes(results[-1], out_axes, "the result"))
        return results[-1].fill(new)

    return wrapper


def _per_argument(in_axes: Any, count: int) -> Sequence[Any]:
    if in_axes is None or isinstance(in_axes, int):
        return [in_axes] * count
    if not isinstance(in_axes, list | tuple) or len(in_axes) != count:
        raise TransformError(
            f"in_axes={in_axes!r} does not fit {count} arguments: an integer for all of them, or a "
            "tuple with one entry for each."
        )
    return in_axes


def _axes(structure: StaticKey, spec: Any, what: str) -> list[int | None]:
    """Returns the axis of each array of an argument or result."""
    if spec is None or isinstance(spec, int):
        return [spec] * len(structure.arrays)
    axes: dict[int, int | None] = {}
    for _, axis, _, part in walk(spec, once=False, state=structure.tree, down=_part_below):
        if axis is None or isinstance(axis, int):
            for _, leaf, kind in visit(part, once=True):
                if kind is None and axes.setdefault(id(leaf), axis) != axis:
                    raise TransformError(f"one tied array of {what} was given two axes.")
        elif children(axis).keys() != (have := children(part)).keys():
            raise TransformError(
                f"the axes {axis!r} do not fit {what}: there is {type(part).__name__} with the "
                f"children {', '.join(map(repr, have)) or 'none'}."
            )
    return [axes[id(array)] for array in structure.arrays]


def _part_below(part: Any, _: Any, key: Any, __: Any) -> Any:
    """Returns the child of an argument or result that corresponds to a child of its axes."""
    return children(part)[key]


def _move_axes(new: list[Any], axes: Sequence[int | None]) -> list[Any]:
    """Moves the new first axis of results to its requested position."""
    moved = []
    for array, axis in zip(new, axes, strict=True):
        if axis is None:
            moved.append(array[0])
        else:
            moved.append(array_namespace(array).moveaxis(array, 0, axis) if axis else array)
    return moved
