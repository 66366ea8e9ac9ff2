"""Recognises LSTM and GRU cells in the step of a loop, in any order of gates and carry.

The reset gate of a GRU must apply to the product with the hidden state, as in torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fmapper.programs import Graph, Ref
from fmapper_adapters.torch.fuse.graph_index import GraphIndex


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


@dataclass(frozen=True)
class Gru:
    """A GRU cell.

    Attributes:
        size: The number of units.
        reset, update: The gates; the update gate is the share of the old state.
        new: The input's part of the new state.
        hidden: The product with the hidden state, to which the reset gate applies.
        hidden_biases: The biases that are added to it before that.
        hidden_number: A number that is added to it before that.
    """

    size: int
    reset: Gate
    update: Gate
    new: Gate
    hidden: Part
    hidden_biases: tuple[Part, ...]
    hidden_number: float


def find_lstm(graph: Graph, constants: int, carry: int) -> Lstm | None:
    """Recognises the step of a loop as an LSTM that returns its hidden state or nothing."""
    names, size = graph.inputs, _units(graph, constants, carry)
    if carry != 2 or size is None or len(graph.outputs) < 2:
        return None
    index = GraphIndex(graph, dict(zip(names, graph.kinds, strict=True)))
    for cell in (0, 1):
        before, hidden = Ref(names[constants + cell]), Ref(names[constants + 1 - cell])
        after, shown = graph.outputs[cell], graph.outputs[1 - cell]
        if any(y != shown for y in graph.outputs[2:]):
            continue
        gates = _gates(index, before, after, shown)
        if gates is None:
            continue
        reader = Reader(index, Ref(names[-1]), hidden, set(names[:constants]), size)
        read = [reader.gate(gate) for gate in gates]
        if all(gate is not None for gate in read):
            return Lstm(cell, size, tuple(gate for gate in read if gate is not None))
    return None


def _units(graph: Graph, constants: int, carry: int) -> int | None:
    """Returns the number of units of a step with one input; None if no cell of torch can do it."""
    states = {tuple(shape) for _, shape in graph.kinds[constants : constants + carry]}
    dtypes = {dtype for dtype, _ in graph.kinds}
    if len(graph.inputs) != constants + carry + 1 or len(states) != 1 or len(dtypes) != 1:
        return None
    (state,) = states
    is_plain = dtypes <= {"float32", "float64"} and len(state) in (1, 2)
    return state[-1] if is_plain and isinstance(state[-1], int) else None


def _gates(index: GraphIndex, before: Any, after: Any, shown: Any) -> tuple[Any, ...] | None:
    """Finds the arguments of the gates in `c = f * c + i * g` and `h = o * tanh(c)`."""
    total, product = index.call(after, "add"), index.call(shown, "mul")
    if total is None or product is None:
        return None
    output = _other(index, product, lambda x: _argument(index, x, "tanh") == after)
    for kept, new in (total.args, total.args[::-1]):
        left, right = index.call(kept, "mul"), index.call(new, "mul")
        if left is None or right is None:
            continue
        forget = _other(index, left, lambda x: x == before)
        entry = _other(index, right, lambda x: index.call(x, "tanh") is not None)
        if None in (output, forget, entry):
            continue
        cell = next(x for x in right.args if index.call(x, "tanh") is not None)
        return entry, forget, _argument(index, cell, "tanh"), output
    return None


def _other(index: GraphIndex, product: Any, is_one: Any) -> Any | None:
    """Returns the argument of the sigmoid that multiplies a factor."""
    for x, y in (product.args, product.args[::-1]):
        if is_one(x):
            return _argument(index, y, "logistic")
    return None


def _argument(index: GraphIndex, value: Any, name: str) -> Any | None:
    call = index.call(value, name)
    return None if call is None else call.args[0]


class Reader:
    """Splits the sums in gates into their terms.

    Args:
        index: The step.
        x: The input of the step.
        h: The hidden state before it.
        constants: The names of the weights.
        size: The number of units.
    """

    def __init__(self, index: GraphIndex, x: Ref, h: Ref, constants: set[str], size: int) -> None:
        self.index, self.x, self.h, self.constants, self.size = index, x, h, constants, size

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
        number = self.index.number(value)
        if number is not None:
            terms["number"].append(float(number))
            return True
        bias = self.index.align(value, (len(self.index.shape(value)) - 1,))
        if isinstance(bias, Ref) and bias.name in self.constants:
            if self.index.shape(bias)[0] == self.index.shape(value)[-1]:
                terms["bias"].append(Part(bias.name, start))
                return True
            return False
        call = self.index.call(value)
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
            split = self.index.calls.get(call.args[0].name)
            if split is None or split.op != "lax::split" or split.kwargs["axis"] != last:
                return False
            return self._add(split.args[0], start + sum(split.kwargs["sizes"][: call.args[1]]),
                             terms)  # fmt: skip
        return call.op == "lax::dot_general" and self._product(call, start, terms)

    def _same_rows(self, a: Any, b: Any) -> bool:
        return bool(self.index.shape(a)[:-1] == self.index.shape(b)[:-1])

    def _product(self, call: Any, start: int, terms: dict[str, list[Any]]) -> bool:
        """Records a product of x, h, or their concatenation with a matrix."""
        (left, right), (batch, _) = call.kwargs["dimension_numbers"]
        if batch or len(left) != 1 or call.kwargs.get("precision") is not None:
            return False
        for i, j, summed, other in ((0, 1, left, right), (1, 0, right, left)):
            value, weights = call.args[i], call.args[j]
            turned = self.index.call(weights, "transpose")
            weights = weights if turned is None else turned.args[0]
            if not isinstance(weights, Ref) or weights.name not in self.constants:
                continue
            shape = self.index.shape(value)
            if len(self.index.shape(weights)) != 2 or summed[0] != len(shape) - 1:
                continue
            if i == 1 and len(shape) > 1:
                continue  # the units come first
            joined = self.index.call(value, "concatenate")
            parts = [value] if joined is None else list(joined.args)
            if joined is not None and joined.kwargs["dimension"] != len(shape) - 1:
                return False
            row = 0
            for part in parts:
                if part not in (self.x, self.h):
                    return False
                count = self.index.shape(part)[-1]
                terms["x" if part == self.x else "h"].append(
                    Part(weights.name, start, (row, count), (other[0] == 1) is (turned is None))
                )
                row += count
            return True
        return False


def find_gru(graph: Graph, constants: int, carry: int) -> Gru | None:
    """Recognises the step of a loop as a GRU that returns its hidden state or nothing."""
    names, size = graph.inputs, _units(graph, constants, carry)
    if carry != 1 or size is None or len({*graph.outputs}) != 1:
        return None
    index = GraphIndex(graph, dict(zip(names, graph.kinds, strict=True)))
    hidden = Ref(names[constants])
    parts = _gates_of_gru(index, hidden, graph.outputs[0])
    product = None if parts is None else _reset(index, parts[1])
    if parts is None or product is None:
        return None
    reset, inner, rest = product
    reader = Reader(index, Ref(names[-1]), hidden, set(names[:constants]), size)
    gates = reader.gate(reset), reader.gate(parts[0])
    new, kept = reader.terms(rest), reader.terms([inner])
    if None in gates or new is None or kept is None:
        return None
    if [len(new["x"]), len(new["h"]), len(kept["x"]), len(kept["h"])] != [1, 0, 0, 1]:
        return None
    entry = Gate(new["x"][0], kept["h"][0], tuple(new["bias"]), sum(new["number"]))
    return Gru(size, *gates, entry, kept["h"][0], tuple(kept["bias"]), sum(kept["number"]))  # type: ignore[arg-type]


def _gates_of_gru(index: GraphIndex, hidden: Ref, after: Any) -> tuple[Any, Any] | None:
    """Returns the arguments of the update gate's sigmoid and the new state's tanh.

    The state after a step is `z * h + (1 - z) * n` or `n + z * (h - n)`.
    """
    total = index.call(after, "add")
    if total is None:
        return None
    for a, b in (total.args, total.args[::-1]):
        left = index.call(a, "mul")
        if left is None:
            continue
        right = index.call(b, "mul")
        if right is None:
            update = _beside(left.args, partial(_is_difference, index, hidden, b))
            new = index.call(b, "tanh")
        else:
            update = _beside(left.args, partial(operator.eq, hidden))
            new = index.call(_beside(right.args, partial(_is_rest, index, update)), "tanh")
        gate = index.call(update, "logistic")
        if gate is not None and new is not None:
            return gate.args[0], new.args[0]
    return None


def _beside(factors: tuple[Any, ...], is_one: Callable[[Any], bool]) -> Any | None:
    """Returns the other factor of a product."""
    return next((y for x, y in (factors, factors[::-1]) if is_one(x)), None)


def _is_rest(index: GraphIndex, update: Any, value: Any) -> bool:
    call = index.call(value, "sub")
    return call is not None and index.number(call.args[0]) == 1 and call.args[1] == update


def _is_difference(index: GraphIndex, a: Any, b: Any, value: Any) -> bool:
    call = index.call(value, "sub")
    return call is not None and call.args == (a, b)


def _reset(index: GraphIndex, value: Any) -> tuple[Any, Any, list[Any]] | None:
    """Returns the reset gate's argument, the factor that it multiplies, and the other terms."""
    resets: list[tuple[Any, Any]] = []
    rest: list[Any] = []
    todo = [value]
    while todo:
        term = todo.pop()
        call = index.call(term, "add", "mul")
        if call is not None and call.op == "lax::add":
            todo += call.args
            continue
        factors = (None, None) if call is None else call.args
        pairs = [(index.call(x, "logistic"), y) for x, y in (factors, factors[::-1])]
        gated = [(gate.args[0], y) for gate, y in pairs if gate is not None]
        resets += gated
        rest += [] if gated else [term]
    return (*resets[0], rest) if len(resets) == 1 else None
