"""torch's facts about sizes that depend on values, which a program knows only by name."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fmapper.programs import Graph

Sizes = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SizeFacts:
    """Torch's facts about the sizes in a graph.

    Attributes:
        shapes: The shape of each array, with symbols.
        numbers: Each number that is read or computed, with symbols.
        dtypes: The dtype of each array.
        fixed: Symbols that are asserted to be a number.
        symbols: All symbols for numbers that are read from arrays.
        is_sized: Whether sizes depend on values, even on values that torch knows.
    """

    shapes: dict[str, Sizes]
    numbers: dict[str, Any]
    dtypes: dict[str, str]
    fixed: dict[Any, int]
    symbols: frozenset[Any]
    is_sized: bool

    @classmethod
    def read(cls, module: torch.fx.GraphModule) -> SizeFacts:
        """Reads the facts about sizes in a graph of torch."""
        shapes: dict[str, Sizes] = {}
        numbers: dict[str, Any] = {}
        dtypes: dict[str, str] = {}
        fixed: dict[Any, int] = {}
        symbols: set[Any] = set()
        sized = False
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shapes[node.name] = tuple(map(expression_of, value.shape))
                dtypes[node.name] = str(value.dtype).removeprefix("torch.")
            elif isinstance(value, torch.SymInt):
                numbers[node.name] = expression_of(value)
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, torch.Tensor | torch.SymInt):
                    symbols |= set(free_unbacked_symbols(item))
            if node.target is torch.ops.aten._assert_scalar.default:
                fixed |= _asserted_symbol(node.args[0])
            packet = getattr(node.target, "overloadpacket", None)
            sized = sized or packet in _SIZED or (packet is _INDEX and _has_mask(node))
        return cls(shapes, numbers, dtypes, fixed, frozenset(symbols), sized)

    def with_results(self, graph: Graph) -> SizeFacts:
        """Adds the arrays that only a rewritten graph has, whose sizes have torch's names."""
        new = {call.name: call.result[0] for call in graph.calls if len(call.result) == 1}
        new = {name: kind for name, kind in new.items() if name not in self.shapes}
        if not new:
            return self
        sizes = (size for shape in self.shapes.values() for size in shape)
        symbols = {s for size in sizes if isinstance(size, sympy.Basic) for s in size.free_symbols}
        by_name = {str(symbol): symbol for symbol in symbols}
        shapes = {
            name: tuple(s if isinstance(s, int) else sympy.sympify(s, by_name) for s in shape)
            for name, (_, shape) in new.items()
        }
        dtypes = {name: dtype for name, (dtype, _) in new.items()}
        return dataclasses.replace(self, shapes=self.shapes | shapes, dtypes=self.dtypes | dtypes)


_SIZED = {
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.unique_consecutive,
    torch.ops.aten._unique2,
    torch.ops.aten.repeat_interleave,
    torch.ops.aten.bincount,
}
_INDEX = torch.ops.aten.index


def _has_mask(node: torch.fx.Node) -> bool:
    indices: Any = node.args[1]
    kinds = [index.meta["val"].dtype for index in indices if isinstance(index, torch.fx.Node)]
    return torch.bool in kinds or torch.uint8 in kinds


def expression_of(size: Any) -> Any:
    """Returns the expression of a size, or the number."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _asserted_symbol(condition: Any) -> dict[Any, int]:
    """Returns the symbol that an assertion fixes to a number, if it does."""
    if not isinstance(condition, torch.fx.Node) or condition.target is not operator.eq:
        return {}
    for side, other in (condition.args, condition.args[::-1]):
        value = side.meta.get("val") if isinstance(side, torch.fx.Node) else None
        if isinstance(value, torch.SymInt) and type(other) is int:
            expression = expression_of(value)
            if isinstance(expression, sympy.Symbol):
                return {expression: other}
    return {}
