"""Recognises LSTM cells in the step of a loop, in any order of the gates and of the carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmapper.programs import Graph, Ref
from fmapper_adapters.torch.fuse.graph_index import Look


@dataclass(frozen=True)
class Part:
    """The place of a gate's numbers in a constant of the loop.

    Attributes:
        name: The constant, a matrix or a vector.
        start: Its first unit.
        rows: The inputs of a matrix that it takes: the first, and their number.
        units_first: Whether a matrix has its units in the first dimension.
    """

    name: str
    start: int
    rows: tuple[int, int] = (0, 0)
    units_first: bool = False


@dataclass(frozen=True)
class Gate:
    """The products and biases whose sum is the argument of a gate's sigmoid or tanh."""

    x: Part
    h: Part
    biases: tuple[Part, ...]
    number: float


@dataclass(frozen=True)
class Lstm:
    """An LSTM cell.

    Attributes:
        cell: The position of the cell state in the carry.
        size: The number of units.
        gates: The input, forget, cell and output gates, in torch's order.
    """

    cell: int
    size: int
    gates: tuple[Gate, ...]


def find_lstm(graph: Graph, constants: int, carry: int) -> Lstm | None:
    """Recognises the step of a loop as an LSTM that returns its hidden state or nothing."""
    names = graph.inputs
    if carry != 2 or len(names) != constants + 3 or len(graph.outputs) < 2:
        return None
    kinds = dict(zip(names, graph.kinds, strict=True))
    dtypes = {dtype for dtype, _ in graph.kinds}
    state = tuple(kinds[names[constants]][1])
    if len(dtypes) != 1 or not dtypes <= {"float32", "float64"} or len(state) not in (1, 2):
        return None
    if tuple(kinds[names[constants + 1]][1]) != state or not isinstance(state[-1], int):
        return None
    look = Look(graph, kinds)
    for cell in (0, 1):
        before, hidden = Ref(names[constants + cell]), Ref(names[constants + 1 - cell])
        after, shown = graph.outputs[cell], graph.outputs[1 - cell]
        if any(y != shown for y in graph.outputs[2:]):
            continue
        gates = _gates(look, before, after, shown)
        if gates is None:
            continue
        reader = Reader(look, Ref(names[-1]), hidden, set(names[:constants]), state[-1])
        read = [reader.gate(gate) for gate in gates]
        if all(gate is not None for gate in read):
            return Lstm(cell, state[-1], tuple(gate for gate in read if gate is not None))
    return None


def _gates(look: Any, before: Any, after: Any, shown: Any) -> tuple[Any, ...] | None:
    """Finds the arguments of the gates in `c = f * c + i * g` and `h = o * tanh(c)`."""
    total, product = look.call(after, "add"), look.call(shown, "mul")
    if total is None or product is None:
        return None
    output = _other(look, product, lambda x: _argument(look, x, "tanh") == after)
    for kept, new in (total.args, total.args[::-1]):
        left, right = look.call(kept, "mul"), look.call(new, "mul")
        if left is None or right is None:
            continue
        forget = _other(look, left, lambda x: x == before)
        entry = _other(look, right, lambda x: look.call(x, "tanh") is not None)
        if None in (output, forget, entry):
            continue
        cell = next(x for x in right.args if look.call(x, "tanh") is not None)
        return entry, forget, _argument(look, cell, "tanh"), output
    return None


def _other(look: Any, product: Any, is_one: Any) -> Any | None:
    """Returns the argument of the sigmoid that multiplies a factor."""
    for x, y in (product.args, product.args[::-1]):
        if is_one(x):
            return _argument(look, y, "logistic")
    return None


def _argument(look: Any, value: Any, name: str) -> Any | None:
    call = look.call(value, name)
    return None if call is None else call.args[0]


class Reader:
    """Splits the sums in gates into their terms.

    Args:
        look: The step.
        x: The input of the step.
        h: The hidden state before it.
        constants: The names of the weights.
        size: The number of units.
    """

    def __init__(self, look: Any, x: Ref, h: Ref, constants: set[str], size: int) -> None:
        self.look, self.x, self.h, self.constants, self.size = look, x, h, constants, size

    def gate(self, value: Any) -> Gate | None:
        """Returns the gate with a value as its sum."""
        terms = self.terms([value])
        if terms is None or len(terms["x"]) != 1 or len(terms["h"]) != 1:
            return None
        return Gate(terms["x"][0], terms["h"][0], tuple(terms["bias"]), sum(terms["number"]))

    def terms(self, values: list[Any]) -> dict[str, list[Any]] | None:
        """Returns the terms of a sum by kind: of x, of h, biases, numbers; None for others."""
        terms: dict[str, list[Any]] = {"x": [], "h": [], "bias": [], "number": []}
        return terms if all(self._add(value, 0, terms) for value in values) else None

    def _add(self, value: Any, start: int, terms: dict[str, list[Any]]) -> bool:
        """Records the terms of a slice of units; returns False for an unknown term."""
        number = self.look.number(value)
        if number is not None:
            terms["number"].append(float(number))
            return True
        bias = self.look.align(value, (len(self.look.shape(value)) - 1,))
        if isinstance(bias, Ref) and bias.name in self.constants:
            if self.look.shape(bias)[0] == self.look.shape(value)[-1]:
                terms["bias"].append(Part(bias.name, start))
                return True
            return False
        call = self.look.call(value)
        if call is None:
            return False
        last = len(call.result[0][1]) - 1
        if call.op == "lax::add":
            return all(self._add(arg, start, terms) for arg in call.args)
        if call.op == "lax::slice":
            first, steps = call.kwargs["start_indices"], call.kwargs.get("strides")
            if any(first[:-1]) or (steps is not None and set(steps) != {1}):
                return False
            return self._same_rows(value, call.args[0]) and self._add(
                call.args[0], start + first[-1], terms
            )
        if call.op == "sym::getitem":
            split = self.look.calls.get(call.args[0].name)
            if split is None or split.op != "lax::split" or split.kwargs["axis"] != last:
                return False
            return self._add(split.args[0], start + sum(split.kwargs["sizes"][: call.args[1]]),
                             terms)  # fmt: skip
        return call.op == "lax::dot_general" and self._product(call, start, terms)

    def _same_rows(self, a: Any, b: Any) -> bool:
        return bool(self.look.shape(a)[:-1] == self.look.shape(b)[:-1])

    def _product(self, call: Any, start: int, terms: dict[str, list[Any]]) -> bool:
        """Records a product of x, h, or their concatenation with a matrix."""
        (left, right), (batch, _) = call.kwargs["dimension_numbers"]
        if batch or len(left) != 1 or call.kwargs.get("precision") is not None:
            return False
        for i, j, summed, other in ((0, 1, left, right), (1, 0, right, left)):
            value, weights = call.args[i], call.args[j]
            turned = self.look.call(weights, "transpose")
            weights = weights if turned is None else turned.args[0]
            if not isinstance(weights, Ref) or weights.name not in self.constants:
                continue
            shape = self.look.shape(value)
            if len(self.look.shape(weights)) != 2 or summed[0] != len(shape) - 1:
                continue
            if i == 1 and len(shape) > 1:
                continue  # the units come first
            joined = self.look.call(value, "concatenate")
            parts = [value] if joined is None else list(joined.args)
            if joined is not None and joined.kwargs["dimension"] != len(shape) - 1:
                return False
            row = 0
            for part in parts:
                if part not in (self.x, self.h):
                    return False
                count = self.look.shape(part)[-1]
                terms["x" if part == self.x else "h"].append(
                    Part(weights.name, start, (row, count), (other[0] == 1) is (turned is None))
                )
                row += count
            return True
        return False
