"""The trainable arrays of a tree as one vector, and the inverse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from fmapper.backends.device import common_device
from fmapper.backends.discovery import adapter_of, owner_of
from fmapper.backends.namespace import array_namespace
from fmapper.backends.undeclared import check_leaf
from fmapper.errors import FmapperError, StructureMismatchError, UnsupportedLeafError
from fmapper.states.state import at, refill
from fmapper.tracebacks import short_traceback
from fmapper.transforms.trainable import Trained
from fmapper.tree.keypath import Link, format_link
from fmapper.tree.nodes import sync
from fmapper.tree.walk import visit

T = TypeVar("T")


@short_traceback
def destructure(tree: T) -> tuple[Any, Callable[[Any], T]]:
    """Flattens the trainable arrays of a tree to one vector; returns it and the inverse.

    Those are the floating and complex arrays that are trained; see `trainables`. The vector
    contains a tied array once, and has the promoted dtype of all arrays. The inverse restores every
    array's dtype (real arrays take the real part) and all ties, and carries over the rest. It can
    be differentiated, jitted and vmapped.

    Returns:
        The vector, of shape (n,), and `rebuild(vector) -> tree`.

    Raises:
        MixedDevicesError: The arrays are not on one device of one backend.
        NotAFunctorError: An undeclared object holds arrays.

    The idea is that of `Optimisers.destructure`, https://fluxml.ai/Optimisers.jl.

    Examples:
        >>> import fmapper, numpy as np
        >>> vector, rebuild = fmapper.destructure({"w": np.ones((2, 2)), "n": 3})
        >>> vector, rebuild(2 * vector)["w"].tolist()
        (array([1., 1., 1., 1.]), [[2.0, 2.0], [2.0, 2.0]])
    """
    sync()
    trained = Trained(tree)
    arrays, links = [], []
    for link, leaf, node_type in visit(tree, once=True):
        if node_type is None and leaf in trained:
            arrays.append(leaf)
            links.append(link)
        elif node_type is None and adapter_of(leaf) is None:
            check_leaf(leaf, at(link))
    common_device(zip(links, arrays, strict=True))
    flat = [_flatten(array, link) for array, link in zip(arrays, links, strict=True)]
    shapes = [owner_of(array).shape(array) for array in arrays]
    total = sum(map(math.prod, shapes))
    if not arrays:
        from array_api_compat import numpy

        vector = cast(Any, numpy).zeros((0,))
    else:
        vector = _join(flat, links)

    def rebuild(vector: Any) -> Any:
        adapter = adapter_of(vector)
        if adapter is None or adapter.shape(vector) != (total,):
            shape = None if adapter is None else adapter.shape(vector)
            raise StructureMismatchError(
                f"destructure: expected a vector of shape ({total},), got shape {shape}."
            )
        starts = itertools.accumulate(map(math.prod, shapes), initial=0)
        pieces = (
            _piece(vector[start : start + math.prod(shape)], array, shape)
            for start, array, shape in zip(starts, arrays, shapes, strict=False)
        )
        return refill(tree, lambda _, leaf: next(pieces) if leaf in trained else leaf)

    return vector, rebuild


def _flatten(array: Any, link: Link) -> Any:
    """Flattens an array to one dimension.

    Raises:
        UnsupportedLeafError: It has no shape or no strides; names the path.
    """
    adapter = owner_of(array)
    try:
        adapter.shape(array)
        if adapter.is_freed(array):
            adapter.check(array)
        xp: Any = array_namespace(array)
        return xp.reshape(array, (-1,))
    except FmapperError:
        raise
    except Exception as error:
        raise _no_part(array, link, str(error)) from error


def _join(parts: Sequence[Any], links: Sequence[Link]) -> Any:
    """Joins flat arrays into one vector of their promoted dtype.

    Raises:
        UnsupportedLeafError: An array does not promote, or has no values; names the path.
    """
    xp: Any = array_namespace(parts)
    try:
        dtype = xp.result_type(*parts)
        return xp.concat([xp.astype(part, dtype) for part in parts])
    except Exception as error:
        for part, link in zip(parts, links, strict=True):
            try:
                owner_of(part).check(part)
                xp.concat([xp.astype(part, xp.result_type(part, parts[0]))] * 2)
            except Exception as why:
                part_dtype, first_dtype = (owner_of(x).dtype(x) for x in (part, parts[0]))
                if part_dtype != first_dtype:
                    why = TypeError(
                        f"{why} ({part_dtype}, and {first_dtype} at {format_link(links[0])})"
                    )
                raise _no_part(part, link, str(why)) from error
        raise


def _no_part(array: Any, link: Link, reason: str) -> UnsupportedLeafError:
    """Returns the error for an array that cannot be a part of a vector."""
    try:
        owner_of(array).check(array)
    except TypeError as why:
        reason = str(why)
    return UnsupportedLeafError(
        f"{format_link(link)}: cannot be a part of a vector: {reason.rstrip('.')}. Convert it "
        "first, or declare the trained children: @fmapper.functor(trainable=(...))."
    )


def _piece(part: Any, like: Any, shape: tuple[int, ...]) -> Any:
    xp: Any = array_namespace(part)
    dtype, wanted = owner_of(part).dtype(part), owner_of(like).dtype(like)
    if dtype.startswith("complex") and not wanted.startswith("complex"):
        part = xp.real(part)
    return owner_of(like).like(xp.astype(xp.reshape(part, shape), like.dtype), like)
