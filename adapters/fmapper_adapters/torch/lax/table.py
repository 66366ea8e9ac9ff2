"""The table of lowerings of JAX's primitives to torch; the files beside this one fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

from fmapper.meshes import along, permutes, pointwise, reduces, regroups
from fmapper.programs import Facts, LoweringTable
from fmapper_adapters.torch.lax import dimensions

__all__ = [
    "TABLE",
    "Avals",
    "along",
    "dimensions",
    "find_all",
    "lax",
    "permutes",
    "pointwise",
    "reduces",
    "regroups",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

TABLE = LoweringTable("torch", __package__, "tensors")
find_all = TABLE.find_all


@dataclass(frozen=True, slots=True)
class Avals:
    """The abstract values of a call in JAX.

    Attributes:
        operands: dtype and shape of each operand, by JAX's names: `uint32`, not the dtype that
            carries it.
        results: The same for the results.
    """

    operands: tuple[tuple[str, tuple[Any, ...]], ...]
    results: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def is_unsigned(self) -> bool:
        """Whether the first operand is of unsigned integers that are carried as signed ones."""
        return self.operands[0][0] in ("uint16", "uint32", "uint64")


def lax(*names: str, **facts: Unpack[Facts]) -> Callable[[F], F]:
    """Registers a function for primitives by their names, such as `add`; see `Lowering`."""
    return TABLE.lowering(*(f"lax::{name}" for name in names), **facts)
