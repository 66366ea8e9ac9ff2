"""Rules for the dimensions of operations: the `dims` of lowerings.

These rules serve operations of all frameworks; rules of single operations are in adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmapper.meshes.dimensions import DimensionRule, Dimensions, Dims
    from fmapper.programs.program import Call


def argument(call: Call, name: str, at: int | None = None, default: Any = None) -> Any:
    """Returns an argument of a call, by name or, if it has one, by position."""
    if at is not None and len(call.args) > at:
        return call.args[at]
    return call.kwargs.get(name, default)


def pointwise(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Aligns operands with results by broadcasting."""
    for operand in operands:
        for result in results:
            if operand is not None:
                dimensions.align(operand, result)


def regroups(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Splits and merges dimensions, like a reshape."""
    dimensions.regroup(operands[0], results[0], call)


def fresh(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Leaves the results with new dimensions, because only the operand's dtype matters."""


def reduces(name: str, at: int | None = None) -> DimensionRule:
    """Returns the rule of an operation that reduces dimensions.

    Args:
        name: The argument with the dimensions.
        at: Its position, if it has one. If it is missing or empty, all dimensions are reduced.
    """

    def rule(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
        x = operands[0]
        asked = argument(call, name, at, ())
        if at is not None and (asked in (None, ()) or isinstance(asked, bool)):  # std(x, unbiased)
            asked = range(len(x))
        reduced = _places(asked, len(x))
        for dim in reduced:
            dimensions.sum(x[dim], call)
        for result in results:
            kept = len(result) == len(x)
            dimensions.align([d for i, d in enumerate(x) if kept or i not in reduced], result)

    return rule


def along(name: str, at: int | None = None, default: int | None = -1) -> DimensionRule:
    """Returns the rule of an operation that needs some dimensions whole and keeps the others.

    Args:
        name: The argument with the dimensions.
        at: Its position, if it has one.
        default: The dimension if the argument is missing; None for all.
    """

    def rule(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
        rank = len(results[0])
        asked = argument(call, name, at, default)
        whole = range(rank) if asked in (None, ()) else _places(asked, rank)
        keep_but(dimensions, call, operands, results, whole)

    return rule


def permutes(order: Callable[[Call, int], Sequence[int]]) -> DimensionRule:
    """Returns the rule of an operation that permutes dimensions.

    Args:
        order: Takes a call and the number of dimensions; returns the old dimension at each
            position.
    """

    def rule(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
        x, y = operands[0], results[0]
        for at, new in zip(order(call, len(x)), y, strict=True):
            dimensions.join(x[at], new)

    return rule


def keep_but(
    dimensions: Dimensions,
    call: Call,
    operands: list[Any],
    results: list[Dims],
    whole: Collection[int],
) -> None:
    """Joins the dimensions of operands with those of results, except those needed whole."""
    for x in _arrays(operands):
        for y in results:
            for at, (old, new) in enumerate(zip(x, y, strict=True)) if len(x) == len(y) else ():
                if at in whole:
                    dimensions.need([old, new], call)
                else:
                    dimensions.join(old, new)


def _arrays(operands: list[Any]) -> Iterator[Dims]:
    """Yields the dimensions of the operands, some of which are lists of arrays."""
    for operand in operands:
        if operand and isinstance(operand[0], int):
            yield operand
        elif operand:
            yield from _arrays(operand)


def _places(asked: Any, rank: int) -> set[int]:
    return {at % max(rank, 1) for at in (asked if isinstance(asked, Collection) else (asked,))}
