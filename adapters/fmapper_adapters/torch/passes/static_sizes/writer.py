"""The state of a graph being rewritten: its arrays, their padding, the calls so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]

from fmapper.programs import Call, Graph, Ref
from fmapper_adapters.torch.from_fx.size_facts import SizeFacts, Sizes


class Remains(Exception):
    """Raised for a size that still depends on values, with the call that causes it."""


class Writer:
    """The arrays and calls of a graph that is being rewritten.

    Attributes:
        calls: The new calls.
        rows: The name of an array with padding -> its padded dimension, and its symbol.
        most: Symbol -> the number of rows with padding.
        counts: Symbol -> the name of the number of valid rows.
        renamed: Results -> the results that replace them.
    """

    def __init__(self, graph: Graph, facts: SizeFacts) -> None:
        self.graph = graph
        self.facts = facts
        self.calls: list[Call] = []
        self.shapes = dict(facts.shapes)
        self.numbers = dict(facts.numbers)
        self.dtypes = dict(facts.dtypes)
        self.rows: dict[str, tuple[int, Any]] = {}
        self.most: dict[Any, int] = {}
        self.counts: dict[Any, Ref] = {}
        self.masks: dict[tuple[Any, Any], Ref] = {}
        self.renamed: dict[str, Any] = {}
        self.made = 0
        self.at: Call | None = None

    def add(
        self, op: str, *args: Any, shape: Sizes | None = None, dtype: str = "", **kw: Any
    ) -> Ref:
        """Adds a call, and returns a reference to its result."""
        self.made += 1
        assert self.at is not None
        name = f"{self.at.name}_static_{self.made}"
        result = () if shape is None else ((dtype, tuple(shape)),)
        self.calls.append(Call(name, op, args, kw, self.at.module, self.at.source, result))
        if shape is not None:
            self.shapes[name] = tuple(shape)
            self.dtypes[name] = dtype
        return Ref(name)

    def size(self, expression: Any) -> int:
        """Returns a size including padding."""
        if isinstance(expression, int):
            return expression
        size = _substitute(_substitute(sympy.sympify(expression), self.facts.fixed), self.most)
        if not size.is_Integer:
            raise Remains(str(expression))
        return int(size)

    def unknowns(self, expression: Any) -> set[Any]:
        """Returns the symbols in a size that depend on values and are not asserted."""
        if isinstance(expression, int):
            return set()
        symbols: set[Any] = sympy.sympify(expression).free_symbols & self.facts.symbols
        return {symbol for symbol in symbols if symbol not in self.facts.fixed}

    def sizes(self, shape: Sizes) -> tuple[int, ...]:
        """Returns a shape including padding."""
        return tuple(self.size(size) for size in shape)

    def padded_dim(self, shape: Sizes) -> tuple[int, Any] | None:
        """Returns the padded dimension, and the number of valid rows."""
        varying = []
        for dim, size in enumerate(shape):
            left = self.unknowns(size)
            if left:
                varying.append((dim, size, left))
        if not varying:
            return None
        if len(varying) > 1 or len(varying[0][2]) > 1:
            raise Remains("several such sizes in one array")
        dim, size, left = varying[0]
        symbol = next(iter(left))
        if symbol not in self.most:
            raise Remains(str(symbol))
        if not (size / symbol).is_Integer:
            raise Remains(str(size))
        return dim, size

    def count(self, expression: Any) -> Ref:
        """Returns the number of valid rows."""
        symbol = next(iter(expression.free_symbols))
        times = int(expression / symbol)
        count = self.counts[symbol]
        if times == 1:
            return count
        product = self.add("sym::mul", count, times)
        self.numbers[product.name] = expression
        return product

    def mask(self, expression: Any) -> Ref:
        """Returns a mask of the valid rows."""
        key = expression, "mask"
        if key not in self.masks:
            rows = self.size(expression)
            places = self.add("aten::arange.default", rows, shape=(rows,), dtype="int64")
            counts = self.count(expression)
            self.masks[key] = self.add(
                "aten::lt.Scalar", places, counts, shape=(rows,), dtype="bool"
            )
        return self.masks[key]

    def positions(self, mask: Ref, count: int) -> list[Ref]:
        """Returns the indices of the elements that are not zero, one row per dimension."""
        shape = self.static(mask)
        places = self.add(
            "aten::nonzero_static.default", mask, size=count, fill_value=0,
            shape=(count, len(shape)), dtype="int64",
        )  # fmt: skip
        return [
            self.add("aten::select.int", places, 1, dim, shape=(count,), dtype="int64")
            for dim in range(len(shape))
        ]

    def static(self, ref: Ref) -> tuple[int, ...]:
        """Returns the shape of an array that has no padding."""
        shape = self.shapes.get(ref.name)
        if shape is None or ref.name in self.rows:
            raise Remains(ref.name)
        return self.sizes(shape)

    def count_true(self, mask: Ref) -> Ref:
        """Counts the true elements of a mask, as a number."""
        hit = self.add("aten::ne.Scalar", mask, 0, shape=self.static(mask), dtype="bool")
        total = self.add("aten::sum.default", hit, shape=(), dtype="int64")
        return self.add("aten::item.default", total)

    def keep(self, call: Call) -> None:
        """Adds a call with the sizes of its results as numbers, and notes padded ones."""
        shape = self.facts.shapes.get(call.name)
        result = call.result
        if shape is not None:
            if (padded := self.padded_dim(shape)) is not None:
                self.rows[call.name] = padded
            if any(isinstance(size, str) for _, sizes in result for size in sizes):
                self._refuse_reads(call)
            if call.result:
                result = ((call.result[0][0], tuple(map(self._as_size, shape))),)
        elif any(isinstance(size, str) for _, sizes in result for size in sizes):
            result = tuple((kind, self.named_shape(sizes)) for kind, sizes in result)
        self.calls.append(dataclasses.replace(call, result=result))

    def _refuse_reads(self, call: Call) -> None:
        """Checks that no size depends on numbers read from arrays."""
        for name in call.refs():
            expression = self.numbers.get(name)
            if expression is not None and not self.unknowns(expression) <= self.most.keys():
                raise Remains(call.op)

    def _as_size(self, expression: Any) -> int | str:
        """Returns a size as a number, or by name if it varies with the inputs."""
        if isinstance(expression, int):
            return expression
        if sympy.sympify(expression).free_symbols & self.facts.symbols:
            return self.size(expression)
        return int(expression) if expression.is_Integer else str(expression)

    def named_shape(self, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """Returns the shape of a result including padding, with varying sizes by name."""
        by_name = {str(symbol): symbol for symbol in self.facts.symbols}
        return tuple(
            s
            if isinstance(s, int) or not any(name in s for name in by_name)
            else self.size(sympy.sympify(s, locals=by_name))
            for s in shape
        )

    def padded_refs(self, call: Call) -> list[str]:
        """Returns the operands of a call that have padding."""
        return [name for name in call.refs() if name in self.rows]

    def is_mask(self, ref: Ref) -> bool:
        """Returns whether an index is a mask of bools."""
        return self.dtype(ref) in ("bool", "uint8")

    def dtype(self, ref: Ref) -> str:
        """Returns the dtype of an array."""
        return self.dtypes[ref.name]

    def assert_that(self, condition: Ref, message: str) -> None:
        """Adds an assertion."""
        self.add("aten::_assert_scalar.default", condition, message)

    def assert_size(self, size: Ref, wanted: int) -> None:
        """Asserts that a size that depends on values equals the number used for it."""
        self.assert_that(
            self.add("sym::eq", size, wanted), f"a size that depends on values is {wanted}"
        )


def _substitute(expression: Any, values: Mapping[Any, Any]) -> Any:
    """Substitutes values for the symbols of an expression, recursively.

    There may be thousands of other symbols, as in a loop over experts, and `subs` tries each.
    """
    substitutes: dict[Any, Any] = {}
    todo = {*expression.free_symbols}
    while todo:
        symbol = todo.pop()
        if symbol in values and symbol not in substitutes:
            substitutes[symbol] = sympy.sympify(values[symbol])
            todo |= substitutes[symbol].free_symbols
    return expression.subs(substitutes) if substitutes else expression
