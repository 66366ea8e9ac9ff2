"""Rules for operations on rows that a program sorts into groups, as mixtures of experts do.

A program that sorts all rows of a batch, computes each separately with the weights of its group,
and puts the results back in order, gives the same results if each part of the batch is sorted
separately. The rules define which operations preserve this, and the kinds of their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from fmapper.meshes import follow_rows
from fmapper.programs import Call, Ref
from fmapper_adapters.jax.aten import table

Size = int | str


class Kind(Enum):
    """Kinds of arrays between sorting and restoring the order."""

    ROWS = auto()  # a row for each place in the sorted order
    ORDER = auto()  # original position of each sorted row
    SOURCES = auto()  # the row that each sorted row was copied from: ORDER // repeats
    SIZES = auto()  # a number for each group
    INVERSE = auto()  # sorted position of each row
    RESULT = auto()  # rows in their original order


@dataclass(slots=True)
class Step:
    """A call, and its effect on sorted rows.

    Attributes:
        kind: The kind of its result, or of each of several results.
        divided: The operands from outside that are divided like the rows, by name, with the number
            of sorted rows per row of theirs.
        call: The call for a part of the rows, if it differs; for all parts at once, if it is a
            product of groups.
    """

    kind: Kind | tuple[Kind, ...]
    divided: dict[str, int] = field(default_factory=dict)
    call: Call | None = None


@dataclass(slots=True)
class Sorted:
    """Facts about a program that rules ask for.

    Attributes:
        rows: The number of sorted rows.
        kinds: The kinds of the arrays that depend on the order.
        calls: All calls, by name.
        shapes: The shapes of all arrays, by name.
        repeats: For each array of the kind SOURCES, how often each row was copied.
    """

    rows: Size
    calls: Mapping[str, Call]
    shapes: Mapping[str, tuple[Size, ...]]
    kinds: dict[str, Kind] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)

    def kind(self, value: Any) -> Kind | None:
        """Returns the kind of an operand; None for one from outside."""
        return self.kinds.get(value.name) if isinstance(value, Ref) else None

    def dims(self, value: Any) -> int:
        """Returns how many dimensions an operand has."""
        return len(self.shapes.get(value.name, ())) if isinstance(value, Ref) else 0


Rule = Callable[[Sorted, Call], Step | None]
RULES: dict[str, Rule] = {}


def _says(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update((name if "::" in name else f"aten::{name}", rule) for name in names)
        return rule

    return add


def rule_of(op: str) -> Rule | None:
    """Returns the rule of an operation; None if the operation does not keep rows in order."""
    return RULES.get(op.partition(".")[0]) or (_each if table.dims(op) else None)


def starts(call: Call) -> Step | None:
    """Returns the step of a call that sorts rows; None for other calls."""
    if call.op not in ("aten::sort.default", "aten::sort.stable") or len(call.result) != 2:
        return None
    keys = call.args[0]
    if len(call.result[0][1]) != 1 or not isinstance(keys, Ref):
        return None
    return Step((Kind.ROWS, Kind.ORDER), {keys.name: 1})


def _each(facts: Sorted, call: Call) -> Step | None:
    """Computes each row, or each number of a group, separately."""
    names = [name for name in call.refs() if facts.kind(Ref(name)) is not None]
    kinds = {facts.kinds[name] for name in names}
    if len(kinds) != 1 or not kinds <= {Kind.ROWS, Kind.SIZES}:
        return None
    kept = follow_rows(call, facts.shapes, dict.fromkeys(names, 0), table.dims(call.op))
    counts = {shape[0] for _, shape in call.result if shape} | {facts.shapes[n][0] for n in names}
    if kept is None or any(kept) or len(counts) != 1:
        return None
    kind = (*kinds,) * len(call.result)
    return Step(kind if len(kind) > 1 else kind[0])


@_says("floor_divide", "div")
def _sources(facts: Sorted, call: Call) -> Step | None:
    """Finds the row that a sorted one was copied from, where each was repeated in place."""
    order, *others = call.args
    if facts.kind(order) is not Kind.ORDER:
        return _each(facts, call)
    rounds = call.op.startswith("aten::floor_divide") or call.kwargs.get("rounding_mode")
    if not rounds or len(others) != 1 or not isinstance(others[0], int) or others[0] < 1:
        return None
    facts.repeats[call.name] = others[0]
    return Step(Kind.SOURCES)


@_says("index")
def _index(facts: Sorted, call: Call) -> Step | None:
    """Looks up rows: in the sorted order, in the original order, or in a table."""
    x, indices = call.args[:2]
    if len(indices) != 1:
        return None
    kind, of = facts.kind(indices[0]), facts.kind(x)
    if of is Kind.ROWS and kind is Kind.INVERSE:
        return Step(Kind.RESULT)
    if of is not None or not isinstance(x, Ref):
        return None
    if kind is Kind.ORDER:
        return Step(Kind.ROWS, {x.name: 1})
    if kind is Kind.SOURCES:
        return Step(Kind.ROWS, {x.name: facts.repeats[indices[0].name]})
    return Step(Kind.ROWS) if kind is Kind.ROWS and facts.dims(indices[0]) == 1 else None


@_says("index_put")
def _index_put(facts: Sorted, call: Call) -> Step | None:
    """Inverts the order: puts 0, 1, 2, ... where the sorted rows were."""
    _, indices, values, *others = call.args
    if any(others) or call.kwargs.get("accumulate") or len(indices) != 1:
        return None
    maker = facts.calls.get(getattr(values, "name", ""))
    if facts.kind(indices[0]) is not Kind.ORDER or maker is None or not _counts_rows(facts, maker):
        return None
    return Step(Kind.INVERSE, call=_with_args(call, "fmapper::invert_order", (indices[0],)))


def _counts_rows(facts: Sorted, call: Call) -> bool:
    """Returns whether a call returns 0, 1, 2, ..., one number for each row."""
    if not call.op.startswith("aten::arange") or call.result[0][1] != (facts.rows,):
        return False
    return len(call.args) == 1 or (call.args[0] == 0 and call.args[2:] in ((), (1,)))


@_says("sort", "argsort")
def _sort_again(facts: Sorted, call: Call) -> Step | None:
    """Inverts the order: the indices that sort it put rows back."""
    if facts.kind(call.args[0]) is not Kind.ORDER or "argsort" not in call.op or call.args[1:]:
        return None
    return Step(Kind.INVERSE)


@_says("index_add")
def _index_add(facts: Sorted, call: Call) -> Step | None:
    """Adds sorted rows at the rows that they were copied from."""
    total, dim, index, rows = call.args[:4]
    if dim != 0 or facts.kind(total) is not None or facts.kind(rows) is not Kind.ROWS:
        return None
    if facts.kind(index) is not Kind.SOURCES or not isinstance(total, Ref):
        return None
    return Step(Kind.RESULT, {total.name: facts.repeats[index.name]})


@_says("histc")
def _count(facts: Sorted, call: Call) -> Step | None:
    """Counts the rows of each group."""
    return Step(Kind.SIZES) if facts.kind(call.args[0]) is Kind.ROWS else None


@_says("cumsum")
def _ends(facts: Sorted, call: Call) -> Step | None:
    """Finds where groups end, or sums along the features of each row."""
    is_of_groups = facts.kind(call.args[0]) is Kind.SIZES
    return Step(Kind.SIZES) if is_of_groups else _each(facts, call)


@_says("sum")
def _sum(facts: Sorted, call: Call) -> Step | None:
    """Sums over rows for each group, or over the features of each row."""
    x, *others = call.args
    if facts.kind(x) is Kind.ROWS and others in ([(0,)], [(-2,)]) and facts.dims(x) == 2:
        return Step(Kind.SIZES)
    return _each(facts, call)


@_says("transformers::grouped_mm_fallback", "_grouped_mm")
def _group(facts: Sorted, call: Call) -> Step | None:
    """Multiplies the rows of each group by the group's matrix."""
    x, weight, ends, *others = (*call.args, *call.kwargs.values())
    kinds = (facts.kind(x), facts.kind(weight), facts.kind(ends))
    dims = (facts.dims(x), facts.dims(weight), facts.dims(ends))
    if kinds != (Kind.ROWS, None, Kind.SIZES) or dims != (2, 3, 1) or any(others):
        return None
    return Step(
        Kind.ROWS, call=_with_args(call, "fmapper::grouped_mm_in_blocks", (x, weight, ends))
    )


@_says("view", "reshape", "_unsafe_view", "expand")
def _reshape(facts: Sorted, call: Call) -> Step | None:
    """Reshapes the features of each row."""
    x, rest = call.args[0], call.result[0][1][1:]
    step = _each(facts, call)
    if step is None or not all(isinstance(size, int) and size for size in rest):
        return None
    return Step(step.kind, call=_with_args(call, call.op, (x, (-1, *rest))))


def _with_args(call: Call, op: str, args: tuple[Any, ...]) -> Call:
    return Call(call.name, op, args, {}, call.module, call.source, call.result)
