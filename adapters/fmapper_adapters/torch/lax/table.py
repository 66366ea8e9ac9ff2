"""The table of lowerings of JAX's primitives to torch; the files beside this one fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fmapper.programs import LoweringTable

F = TypeVar("F", bound=Callable[..., Any])

TABLE = LoweringTable("torch", __package__, "tensors")
find_all = TABLE.find_all


@dataclass(frozen=True, slots=True)
class Avals:
    """The abstract values of a call, as JAX has them.

    Attributes:
        operands: dtype and shape of each operand, by JAX's names: `uint32`, not how it is carried.
        results: The same of the results.
    """

    operands: tuple[tuple[str, tuple[Any, ...]], ...]
    results: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def is_unsigned(self) -> bool:
        """Whether the first operand is of unsigned integers that are carried as signed ones."""
        return self.operands[0][0] in ("uint16", "uint32", "uint64")


def lax(
    *names: str,
    takes_numbers: bool = False,
    takes_avals: bool = False,
    dims: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Registers a function for primitives by their names.

    Args:
        names: Such as `add`.
        takes_numbers: A scalar beside a tensor is given as a Python number.
        takes_avals: The function takes a keyword `avals`.
        dims: What they do with dimensions.
    """
    ops = (f"lax::{name}" for name in names)
    return TABLE.lowering(*ops, takes_numbers=takes_numbers, takes_avals=takes_avals, dims=dims)
