"""An index of a graph: the call that computes a value, and the layout of its dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fmapper.programs import Call, Graph, Polynomial, Ref, Scalar

Shape = tuple[Any, ...]
_ON_NUMBERS = (
    "broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "sqrt", "convert_element_type",
)  # fmt: skip
MOVES = {
    "lax::broadcast_in_dim",
    "lax::reshape",
    "lax::squeeze",
    "lax::transpose",
    "lax::expand_dims",
}


class GraphIndex:
    """A graph by the names of its values.

    Args:
        graph: The graph.
        kinds: dtype and shape of its inputs, by name.
        roles: The inputs that are arrays of the model: `trained`, or `fixed` for those that have no
            gradient.
        borders: Arguments and results of submodules, at which code of another submodule ends.

    Attributes:
        reader: The submodule whose code is being matched.
    """

    def __init__(
        self,
        graph: Graph,
        kinds: Mapping[str, Any],
        roles: Mapping[str, str] | None = None,
        borders: set[str] | None = None,
    ) -> None:
        self.roles = dict(roles or {})
        self._borders = set() if borders is None else borders
        self.reader = ""
        self.calls = {call.name: call for call in graph.calls}
        self.kinds: dict[str, Any] = dict(kinds)
        for call in graph.calls:
            if len(call.result) == 1:
                self.kinds[call.name] = call.result[0]

    def add(self, call: Call) -> Ref:
        """Adds a call that a rewrite has created."""
        self.calls[call.name] = call
        self.kinds[call.name] = call.result[0]
        return Ref(call.name)

    def replace(self, old: str, new: str) -> None:
        """Replaces a value by another among the borders."""
        if old in self._borders:
            self._borders.add(new)

    def call(self, value: Any, *ops: str) -> Call | None:
        """Returns the call behind a value, if it is one of these primitives."""
        call = self.calls.get(value.name) if isinstance(value, Ref) else None
        if call is None or (ops and call.op.removeprefix("lax::") not in ops):
            return None
        is_of_other = call.module != self.reader and call.name in self._borders
        return None if is_of_other else call

    def shape(self, value: Any) -> Shape:
        """Returns the shape of a value."""
        if not isinstance(value, Ref):
            return ()
        kind = self.kinds.get(value.name)
        return () if kind is None else tuple(kind[1])

    def dtype(self, value: Any) -> str:
        """Returns the dtype of a value."""
        if isinstance(value, Scalar):
            return value.dtype
        kind = self.kinds.get(value.name) if isinstance(value, Ref) else None
        return "" if kind is None else str(kind[0])

    def number(self, value: Any) -> Any | None:
        """Returns the number that fills a value; None if it varies."""
        while True:
            if isinstance(value, Scalar):
                return value.value
            call = self.call(value, *_ON_NUMBERS)
            if call is None:
                return None
            value = call.args[0]
            if call.op in ("lax::sqrt", "lax::convert_element_type"):
                number = self.number(value) if call.result[0][0] == "float32" else None
                if number is None or isinstance(number, bool | complex):
                    return None
                root = np.sqrt if call.op == "lax::sqrt" else np.positive
                return float(root(np.float32(number))) if number >= 0 else None

    def origin(self, value: Any, *, detached: bool = False) -> tuple[Any, dict[int, int]]:
        """Returns the origin of a moved or broadcast value, and its place there.

        Args:
            value: The value.
            detached: Whether to look through calls that end gradients.

        Returns:
            The value from which only moves of dimensions lead to `value`, and for each of its
            dimensions that is not of size 1 the corresponding dimension of `value`.
        """
        at = {i: i for i, n in enumerate(self.shape(value)) if n != 1}
        while True:
            call = self.call(value)
            if detached and call is not None and call.op == "lax::stop_gradient":
                value = call.args[0]
                continue
            if call is None or call.op not in MOVES:
                return value, at
            step = self._step(call)
            if step is None:
                return value, at
            at = {i: at[j] for i, j in step.items() if j in at}
            value = call.args[0]

    def _step(self, call: Call) -> dict[int, int] | None:
        """Returns the target of each dimension not of size 1 in a move; None if it mixes them."""
        source = self.shape(call.args[0])
        target = tuple(call.result[0][1])
        kwargs = call.kwargs
        if call.op == "lax::broadcast_in_dim":
            pairs = enumerate(kwargs["broadcast_dimensions"])
            return {i: j for i, j in pairs if source[i] != 1}
        if call.op == "lax::transpose":
            pairs = enumerate(kwargs["permutation"])
            return {i: j for j, i in pairs if source[i] != 1}
        if "dimensions" in kwargs and call.op == "lax::reshape":
            return None
        old = [i for i, n in enumerate(source) if n != 1]
        new = [j for j, n in enumerate(target) if n != 1]
        if [source[i] for i in old] != [target[j] for j in new]:
            return None
        return dict(zip(old, new, strict=True))

    def same(self, a: Any, b: Any) -> bool:
        """Returns whether two values have the same origin and layout."""
        if a == b:
            return True
        if self.shape(a) != self.shape(b):
            return False
        return self.origin(a) == self.origin(b)

    def unreduce(
        self, value: Any, full: Shape, axes: Iterable[int], *, detached: bool = False
    ) -> Any | None:
        """Returns the reduction over `axes`, of shape `full`, that a value is broadcast from.

        Its dimensions must be those of `full` without `axes`, or with 1 in their places, or
        broadcast to `full`; otherwise None.
        """
        source, at = self.origin(value, detached=detached)
        dropped = set(axes)
        left = [i for i in range(len(full)) if i not in dropped]

        def places(shape: Shape) -> list[int] | None:
            if len(shape) == len(full):
                return list(range(len(full)))
            return left if len(shape) == len(left) else None

        here, there = places(self.shape(value)), places(self.shape(source))
        if here is None or there is None:
            return None
        fits = all(there[i] == here[j] for i, j in at.items())
        free = all(there[i] not in dropped for i in at)
        return source if fits and free else None

    def align(self, value: Any, dims: Sequence[int]) -> Any | None:
        """Returns the origin of a value whose dimensions are `dims` of a larger shape, in order."""
        source, at = self.origin(value)
        shape = self.shape(source)
        if len(shape) != len(dims):
            return None
        fits = all(at.get(i, dims[i]) == dims[i] for i in range(len(shape)))
        return source if fits else None

    def factors(self, value: Any, shape: Shape) -> list[Any]:
        """Returns the factors of a product, none of which is larger than `shape`."""
        call = self.call(value, "mul")
        if call is None:
            return [value]
        return [f for arg in call.args for f in self.factors(arg, shape)]

    def square_of(self, value: Any) -> Any | None:
        """Returns the base of a square."""
        call = self.call(value, "square", "integer_pow", "mul")
        if call is None:
            return None
        if call.op == "lax::mul":
            return call.args[0] if call.args[0] == call.args[1] else None
        if call.op == "lax::integer_pow" and call.kwargs["y"] != 2:
            return None
        return call.args[0]

    def mean_of(self, value: Any) -> tuple[Any, tuple[int, ...]] | None:
        """Recognises a mean; returns its operand and dimensions."""
        division = self.call(self.origin(value)[0], "div", "mul")
        if division is None:
            return None
        count = self._count(division.args[1])
        total = self.call(self.origin(division.args[0])[0], "reduce_sum")
        if count is None or total is None:
            return None
        full, axes = self.shape(total.args[0]), tuple(sorted(total.kwargs["axes"]))
        size = Polynomial.product(full[i] for i in axes)
        if not axes or division.op == "lax::mul" or count not in (size, size.number):
            return None
        for reduced in (value, division.args[0]):
            if self.unreduce(reduced, full, axes) is None:
                return None
        return total.args[0], axes

    def _count(self, value: Any) -> Any | None:
        """Returns the number, or the size that varies, that fills a value."""
        call = self.call(value, "convert_element_type")
        size = None if call is None else self.call(call.args[0], "dim_as_value")
        if size is None:
            return self.number(value)
        return Polynomial.read(str(size.kwargs["dim"].expression))

    def variance_is(self, value: Any, x: Any, axes: tuple[int, ...]) -> bool:
        """Returns whether a value is the variance of x over dimensions, in any of its forms."""
        full = self.shape(x)
        source = self.unreduce(value, full, axes)
        if source is None:
            return False
        call = self.call(source)
        if call is not None and call.op in ("lax::max",):
            for number, rest in (call.args, call.args[::-1]):
                if self.number(number) == 0:
                    return self.variance_is(rest, x, axes)
            return False
        if call is not None and call.op == "lax::sub":  # mean(x**2) - mean(x)**2
            squares = self.mean_of(call.args[0])
            inner = self.square_of(self.unreduce(call.args[1], full, axes))
            mean = None if inner is None else self.mean_of(inner)
            if squares is None or mean is None:
                return False
            return (
                squares[1] == mean[1] == axes and mean[0] == x and (self.square_of(squares[0]) == x)
            )
        squares = self.mean_of(source)
        if squares is None or squares[1] != axes:
            return False
        difference = self.call(self.square_of(squares[0]), "sub")
        if difference is None or difference.args[0] != x:
            return False
        return self.mean_of(difference.args[1]) == (x, axes)
