"""Folds the assertions of a program, so that each fact is read and asserted once.

torch asserts the value of a number about five times: that the number is at least, at most, and
    exactly this value, and again for each symbol of the number.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fmapper.programs import Call, Graph, Program, Ref, substitute
from fmapper_adapters.torch import _private

_READS = {"aten::item.default", "aten::_local_scalar_dense.default"}
_ASSERTION = "aten::_assert_scalar.default"
_NUMBERS: dict[str, Callable[..., Any]] = {
    f"sym::{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "mod",
                 "floordiv", "and_", "or_", "not_")
}  # fmt: skip
_NUMBERS["sym::sym_not"] = operator.not_
_INT32 = 2**31
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def fold_assertions(program: Program) -> Program:
    """Removes assertions that others imply, and calls that only they used."""
    if not any(call.op == _ASSERTION for call in program.graph.calls):
        return program
    graph = _drop_implied(_with_each_number_once(program.graph))
    return dataclasses.replace(program, graph=_compare_buffers(program, graph))


def _with_each_number_once(graph: Graph) -> Graph:
    """Merges equal reads of numbers and equal arithmetic; the graph must be functional."""
    names: dict[Any, str] = {}
    renamed: dict[str, Ref] = {}
    calls = []
    for old in graph.calls:
        call = dataclasses.replace(
            old, args=substitute(old.args, renamed), kwargs=substitute(old.kwargs, renamed)
        )
        if call.op in _READS or call.op in _NUMBERS:
            # 1, 1.0 and True are equal but not the same number
            key = call.op, repr(call.args), repr(call.kwargs)
            if (first := names.setdefault(key, call.name)) != call.name:
                renamed[call.name] = Ref(first)
                continue
        calls.append(call)
    return Graph(graph.inputs, calls, substitute(graph.outputs, renamed), graph.kinds)


def _drop_implied(graph: Graph) -> Graph:
    """Drops assertions that follow from those that fix a number."""
    by_name = {call.name: call for call in graph.calls}
    fixed: dict[str, int] = {}
    fixing: set[str] = set()  # the conditions
    for call in graph.calls:
        if (equation := _fixed_value(call, by_name)) is not None and equation[0] not in fixed:
            fixed[equation[0]] = equation[1]
            fixing.add(call.args[0].name)
    values: dict[str, Any] = dict(fixed)
    for call in graph.calls:
        if call.op in _NUMBERS and not call.kwargs:
            args = [values.get(a.name) if isinstance(a, Ref) else a for a in call.args]
            if all(isinstance(a, int | bool) for a in args):
                try:
                    values[call.name] = _NUMBERS[call.op](*args)
                except ArithmeticError:
                    continue
            elif _always_holds(call, by_name):
                values[call.name] = True
    asserted: set[str] = set()
    implied = set()
    for call in graph.calls:
        if call.op != _ASSERTION or not isinstance(call.args[0], Ref):
            continue
        condition = call.args[0].name
        # A failing assertion is kept, and raises its error at run time.
        if condition in asserted or (condition not in fixing and values.get(condition) is True):
            implied.add(call.name)
        asserted.add(condition)
    return _without(graph, implied)


def _always_holds(call: Call, by_name: Mapping[str, Call]) -> bool:
    """Returns whether a comparison always holds: of a number with itself, or of a count."""
    kind = call.op.removeprefix("sym::")
    if kind not in ("eq", "ge", "le") or len(call.args) != 2 or not isinstance(call.args[0], Ref):
        return False
    if call.args[0] == call.args[1]:  # for floats, NaN != NaN
        return _is_whole(by_name.get(call.args[0].name), by_name)
    most, bound = _most_counted(by_name.get(call.args[0].name), by_name), call.args[1]
    if most is None or type(bound) is not int:
        return False
    return (kind == "ge" and bound <= 0) or (kind == "le" and bound >= most)


def _is_whole(call: Call | None, by_name: Mapping[str, Call]) -> bool:
    """Returns whether a number is a size, or is read from an array of integers."""
    if call is None or call.op == "aten::sym_size.int":
        return call is not None
    made = by_name.get(call.args[0].name) if call.op in _READS else None
    return made is not None and made.result[0][0].startswith(("int", "uint", "bool"))


def _most_counted(call: Call | None, by_name: Mapping[str, Call]) -> int | None:
    """Returns the number of elements in which a number counts the true ones."""
    for ops in (_READS, {"aten::sum.default"}):
        if call is None or call.op not in ops or not isinstance(call.args[0], Ref):
            return None
        call = by_name.get(call.args[0].name)
    if call is None or len(call.result) != 1 or call.result[0][0] != "bool":
        return None
    sizes = [size for size in call.result[0][1] if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(call.result[0][1]) else None


def _fixed_value(call: Call, by_name: Mapping[str, Call]) -> tuple[str, int] | None:
    """Returns the value and the number that an assertion equates."""
    if call.op != _ASSERTION or not isinstance(call.args[0], Ref):
        return None
    condition = by_name.get(call.args[0].name)
    if condition is None or condition.op != "sym::eq":
        return None
    for side, other in (condition.args, condition.args[::-1]):
        if isinstance(side, Ref) and type(other) is int and side.name in by_name:
            return (side.name, other) if by_name[side.name].op in _READS else None
    return None


def _without(graph: Graph, dropped: Iterable[str]) -> Graph:
    """Removes calls, and calls whose results only they used."""
    gone = set(dropped)
    by_name = {call.name: call for call in graph.calls}
    uses = dict.fromkeys(by_name, 0)
    held = Graph((), [], graph.outputs).uses()
    for name in (*held, *(n for call in graph.calls for n in call.refs())):
        if name in uses:
            uses[name] += 1
    todo = list(gone)
    while todo:
        for name in by_name[todo.pop()].refs():
            if name not in uses:
                continue
            uses[name] -= 1
            if not uses[name] and _is_pure(by_name[name]):
                gone.add(name)
                todo.append(name)
    calls = [call for call in graph.calls if call.name not in gone]
    return Graph(graph.inputs, calls, graph.outputs, graph.kinds)


def _is_pure(call: Call) -> bool:
    """Returns whether a call is pure and deterministic."""
    if call.op in _NUMBERS or call.op == "sym::getitem":
        return True
    namespace, _, rest = call.op.partition("::")
    name, _, overload = rest.partition(".")
    if namespace != "aten" or name.startswith("_assert") or call.graphs():
        return False
    function = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    if not isinstance(function, _private.OpOverload):
        return False
    return (
        not _private.schema_of(function).is_mutable
        and torch.Tag.nondeterministic_seeded not in function.tags
    )


# --- buffers ------------------------------------------------------------------------------------


def _compare_buffers(program: Program, graph: Graph) -> Graph:
    """Replaces assertions on values computed from buffers by one comparison of the buffers."""
    written = {output.target for output in program.outputs if output.kind == "buffer"}
    numbers = {}
    for name, spec in zip(graph.inputs, program.inputs, strict=True):
        if spec.kind == "buffer" and spec.target not in written:
            number = _number_in(program.buffers.get(str(spec.target)))
            if number is not None:
                numbers[name] = number
    by_name = {call.name: call for call in graph.calls}
    sources: dict[str, frozenset[str] | None] = {name: frozenset([name]) for name in numbers}
    for call in graph.calls:
        if not _is_pure(call):
            sources[call.name] = None
            continue
        parts = [sources.get(name) for name in call.refs()]
        sources[call.name] = (
            None if None in parts else frozenset().union(*(p for p in parts if p is not None))
        )
    folded: dict[str, frozenset[str]] = {}
    for call in graph.calls:
        equation = _fixed_value(call, by_name)
        buffers = sources.get(equation[0]) if equation is not None else None
        if buffers:
            folded[call.name] = buffers
    if len(folded) < 2:
        return graph
    first = next(i for i, call in enumerate(graph.calls) if call.name in folded)
    compared = sorted(frozenset().union(*folded.values()))
    made = _comparison(graph.calls[first], {name: numbers[name] for name in compared})
    calls = [*graph.calls[:first], *made, *graph.calls[first:]]
    return _without(Graph(graph.inputs, calls, graph.outputs, graph.kinds), folded)


def _number_in(buffer: Any) -> int | bool | None:
    """Returns the integer or bool that a buffer of one element holds."""
    if not isinstance(buffer, torch.Tensor) or buffer.numel() != 1 or buffer.is_meta:
        return None
    # Floats may be cast later; quantised or fake tensors have no number.
    if buffer.dtype not in _INTEGERS or isinstance(buffer, _private.FakeTensor):
        return None
    number: int | bool = buffer.item()  # type: ignore[assignment]
    return number if abs(number) < _INT32 else None


def _comparison(at: Call, numbers: Mapping[str, Any]) -> list[Call]:
    calls: list[Call] = []

    def add(part: str, op: str, *args: Any, shape: tuple[int, ...] | None = None) -> Ref:
        result = () if shape is None else (("bool", shape),)
        name = f"{at.name}_buffers_{part}"
        calls.append(Call(name, op, args, {}, at.module, at.source, result))
        return Ref(name)

    rows = []
    for i, (name, number) in enumerate(numbers.items()):
        row = add(f"row_{i}", "aten::eq.Scalar", Ref(name), number, shape=())
        rows.append(add(f"view_{i}", "aten::view.default", row, (1,), shape=(1,)))
    together = add("cat", "aten::cat.default", tuple(rows), 0, shape=(len(rows),))
    same = add("all", "aten::all.default", together, shape=())
    message = "buffers hold the numbers that they held when it was recorded"
    add("check", "aten::_assert_async.msg", same, message)
    return calls
