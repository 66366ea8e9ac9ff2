"""Checks the arguments of transformed functions: their backends and paths."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.backends.compute import NO_TRANSFORMS, Compute
from fmapper.backends.discovery import adapter_of, owner_of
from fmapper.backends.undeclared import check_leaf
from fmapper.errors import FmapperError, MixedDevicesError, TransformError
from fmapper.tree.keypath import format_link
from fmapper.tree.walk import visit

if TYPE_CHECKING:
    from fmapper.transforms.static_key import StaticKey

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)  # they may capture arrays


def positions(name: str, given: Any) -> tuple[int, ...]:
    """Normalises `argnums` or `static_argnums` to a tuple."""
    try:
        return tuple(map(operator.index, given if isinstance(given, tuple | list) else (given,)))
    except TypeError:
        raise TransformError(
            f"{name}={given!r}: pass the positions of arguments, as an integer or several."
        ) from None


def place_of(number: int, args: tuple[Any, ...]) -> int:
    """Returns an argument number counted from the front."""
    place = number + len(args) if number < 0 else number
    if not 0 <= place < len(args):
        raise TransformError(
            f"there is no argument {number}: {len(args)} were passed by position, and only those "
            f"are numbered."
        )
    return place


def backend_of(arrays: Sequence[Any], verb: str, trees: Any) -> Compute:
    """Returns the common backend of some arrays; host arrays may mix with those of another."""
    by_backend: dict[str, Any] = {}
    first: dict[type, Any] = {}
    for array in arrays:
        first.setdefault(type(array), array)
    for array in first.values():
        adapter = adapter_of(array)
        if adapter is not None:
            by_backend.setdefault(adapter.name, array)
    if not by_backend:
        raise TransformError(
            f"cannot {verb} this call: there are no arrays among the arguments to determine the "
            f"backend."
        )
    others = {name for name, array in by_backend.items() if not owner_of(array).host_only}
    if others and all(owner_of(by_backend[name]).takes_host_arrays for name in others):
        by_backend = {name: by_backend[name] for name in others}
    if len(by_backend) > 1:
        refuse_mixture({name: path_of(array, trees) for name, array in by_backend.items()})
    return transformer_of(next(iter(by_backend.values())), verb)


def transformer_of(array: Any, verb: str) -> Compute:
    """Returns the adapter of an array, if its framework can transform functions."""
    adapter = owner_of(array)
    if not isinstance(adapter, Compute):
        raise TransformError(f"cannot {verb} a function of {adapter.name} arrays: {NO_TRANSFORMS}")
    reason = adapter.no_transforms()
    if reason is not None:
        raise TransformError(f"cannot {verb} a function of {adapter.name} arrays: {reason}")
    return adapter


def refuse_untransformable(
    error: Exception, adapter: Compute, arrays: Sequence[Any], verb: str, trees: Any
) -> None:
    """Raises an error with the reason if one of the arrays cannot be an argument."""
    if isinstance(error, FmapperError):
        return
    for array in arrays:
        reason = adapter.untransformable(array, error)
        if reason is not None:
            raise TransformError(
                f"cannot {verb} this call: {path_of(array, trees)}: {reason}"
            ) from error


def refuse_mixture(paths: Mapping[str, str]) -> None:
    """Raises the error for arguments of several backends, by path."""
    places = ", ".join(f"{name} at {path}" for name, path in paths.items())
    raise MixedDevicesError(
        f"the arrays belong to several backends: {places}. "
        "Move them to one first: to_torch or to_jax."
    )


def refuse_holders(structure: StaticKey, trees: Any) -> None:
    """Raises for an undeclared holder of arrays, which would be static."""

    def where(x: Any) -> Any:
        return next(link for link, leaf, _ in visit(trees, once=True) if leaf is x)

    for leaf in structure.opaque:
        if not issubclass(type(leaf), _FUNCTIONS):
            check_leaf(leaf, where, leaf)


def original_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the arguments as one tree with readable paths."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return {**dict(enumerate(args)), **kwargs}


def path_of(array: Any, trees: Any) -> str:
    """Returns the printed path of an array."""
    link = next(link for link, leaf, _ in visit(trees, once=True) if leaf is array)
    return format_link(link)
