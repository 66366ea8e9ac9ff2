"""GRU cells whose reset gate applies to the product with the hidden state, as in torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fmapper.programs import Graph, Ref
from fmapper_adapters.torch.fuse.graph_index import Look
from fmapper_adapters.torch.fuse.recurrent import Gate, Part, Reader


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


def find_gru(graph: Graph, constants: int, carry: int) -> Gru | None:
    """Recognises the step of a loop as a GRU that returns its hidden state or nothing."""
    names = graph.inputs
    if carry != 1 or len(names) != constants + 2 or len({*graph.outputs}) != 1:
        return None
    kinds = dict(zip(names, graph.kinds, strict=True))
    dtypes = {dtype for dtype, _ in graph.kinds}
    state = tuple(kinds[names[constants]][1])
    if len(dtypes) != 1 or not dtypes <= {"float32", "float64"} or len(state) not in (1, 2):
        return None
    if not isinstance(state[-1], int):
        return None
    look, hidden = Look(graph, kinds), Ref(names[constants])
    parts = _parts(look, hidden, graph.outputs[0])
    product = None if parts is None else _reset(look, parts[1])
    if parts is None or product is None:
        return None
    reset, inner, rest = product
    reader = Reader(look, Ref(names[-1]), hidden, set(names[:constants]), state[-1])
    gates = reader.gate(reset), reader.gate(parts[0])
    new, kept = reader.terms(rest), reader.terms([inner])
    if None in gates or new is None or kept is None:
        return None
    if [len(new["x"]), len(new["h"]), len(kept["x"]), len(kept["h"])] != [1, 0, 0, 1]:
        return None
    entry = Gate(new["x"][0], kept["h"][0], tuple(new["bias"]), sum(new["number"]))
    return Gru(state[-1], *gates, entry, kept["h"][0], tuple(kept["bias"]), sum(kept["number"]))  # type: ignore[arg-type]


def _parts(look: Look, hidden: Ref, after: Any) -> tuple[Any, Any] | None:
    """Returns the arguments of the update gate's sigmoid and the new state's tanh.

    The state after a step is `z * h + (1 - z) * n` or `n + z * (h - n)`.
    """
    total = look.call(after, "add")
    if total is None:
        return None
    for a, b in (total.args, total.args[::-1]):
        left = look.call(a, "mul")
        if left is None:
            continue
        right = look.call(b, "mul")
        if right is None:
            update = _beside(left.args, partial(_is_difference, look, hidden, b))
            new = look.call(b, "tanh")
        else:
            update = _beside(left.args, partial(operator.eq, hidden))
            new = look.call(_beside(right.args, partial(_is_rest, look, update)), "tanh")
        gate = look.call(update, "logistic")
        if gate is not None and new is not None:
            return gate.args[0], new.args[0]
    return None


def _beside(factors: tuple[Any, ...], is_one: Callable[[Any], bool]) -> Any | None:
    """Returns the other factor of a product."""
    return next((y for x, y in (factors, factors[::-1]) if is_one(x)), None)


def _is_rest(look: Look, update: Any, value: Any) -> bool:
    call = look.call(value, "sub")
    return call is not None and look.number(call.args[0]) == 1 and call.args[1] == update


def _is_difference(look: Look, a: Any, b: Any, value: Any) -> bool:
    call = look.call(value, "sub")
    return call is not None and call.args == (a, b)


def _reset(look: Look, value: Any) -> tuple[Any, Any, list[Any]] | None:
    """Returns the reset gate's argument, the factor that it multiplies, and the other terms."""
    resets: list[tuple[Any, Any]] = []
    rest: list[Any] = []
    todo = [value]
    while todo:
        term = todo.pop()
        call = look.call(term, "add", "mul")
        if call is not None and call.op == "lax::add":
            todo += call.args
            continue
        factors = (None, None) if call is None else call.args
        pairs = [(look.call(x, "logistic"), y) for x, y in (factors, factors[::-1])]
        gated = [(gate.args[0], y) for gate, y in pairs if gate is not None]
        resets += gated
        rest += [] if gated else [term]
    return (*resets[0], rest) if len(resets) == 1 else None
