"""Explains assertions on values in a program, and finds branches that the examples decided.

torch asserts the conditions under which a recording holds, in terms of its own symbols.
"""

from __future__ import annotations

import ast
import dataclasses
import linecache
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from fmapper.programs import Call, Graph, Program, Ref

_BY_TORCH = "Runtime assertion failed for expression"
_ASSERTIONS = ("aten::_assert_scalar", "aten::_assert_async")
_READS = ("aten::_local_scalar_dense.default", "aten::item.default")
_CASTS = ("aten::_to_copy", "aten::to.", "aten::ne.Scalar")
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
          "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}  # fmt: skip
_BRANCH = "its code took the other branch for the examples"
_NUMBER = "the number that it reads there is {} for the examples"
_MOST_LINES = 8


def explain_assertions(program: Program) -> Program:
    """Rewrites torch's messages of assertions in terms of the model."""
    graph = program.graph
    by_name = {call.name: call for call in graph.calls}
    calls = [
        dataclasses.replace(call, args=(call.args[0], _explain(call.args[0], by_name)))
        if _is_by_torch(call)
        else call
        for call in graph.calls
    ]
    return dataclasses.replace(
        program, graph=Graph(graph.inputs, calls, graph.outputs, graph.kinds)
    )


def _is_by_torch(call: Call) -> bool:
    return (
        call.op.startswith(_ASSERTIONS)
        and len(call.args) > 1
        and str(call.args[1]).startswith(_BY_TORCH)
    )


def _explain(condition: Any, by_name: Mapping[str, Call]) -> str:
    reads = list(_reads(condition, by_name))
    if reads and all(_is_truth(read.args[0], by_name) for read in reads):
        return _BRANCH
    made = by_name.get(condition.name) if isinstance(condition, Ref) else None
    if made is not None and made.op == "sym::eq":
        for side, other in (made.args, made.args[::-1]):
            names = {read.name for read in reads}
            if isinstance(side, Ref) and side.name in names and type(other) is int:
                return _NUMBER.format(other)
    text = _show(condition, by_name, {read.name: f"n{i or ''}" for i, read in enumerate(reads)})
    if text is None:
        return "a condition on its values and sizes does not hold"
    return f"{text} does not hold" + (", where n is a number that it reads there" if reads else "")


def _reads(value: Any, by_name: Mapping[str, Call]) -> Iterator[Call]:
    """Yields the reads of numbers that a condition is computed from, each once."""
    reads: dict[str, Call] = {}
    todo = [value]
    while todo:
        call = by_name.get(operand.name) if isinstance(operand := todo.pop(), Ref) else None
        if call is None:
            continue
        if call.op in _READS:
            reads[call.name] = call
        elif call.op.startswith("sym::"):
            todo += call.args
    yield from reads.values()


def _is_truth(array: Any, by_name: Mapping[str, Call]) -> bool:
    """Returns whether an array is a truth value, as a bool or as a number."""
    while isinstance(array, Ref) and (made := by_name.get(array.name)) is not None:
        if made.result and made.result[0][0] == "bool":
            return True
        if not made.op.startswith(_CASTS):
            return False
        array = made.args[0]
    return False


def _show(value: Any, by_name: Mapping[str, Call], names: Mapping[str, str]) -> str | None:
    """Spells a condition; None if an operation has no symbol."""
    if not isinstance(value, Ref):
        return str(value)
    call = by_name.get(value.name)
    if call is None or value.name in names:
        return names.get(value.name, value.name)
    if call.op == "aten::sym_size.int" and isinstance(call.args[0], Ref):
        name = call.args[0].name
        return "a size" if name in by_name else f"{name}.shape[{call.args[1]}]"
    sign = _SIGNS.get(call.op.removeprefix("sym::"))
    parts = [_show(arg, by_name, names) for arg in call.args]
    if sign is None or len(parts) != 2 or None in parts:
        return None
    nested = [f"({part})" if " " in str(part) and sign in "*//%" else part for part in parts]
    return f"{nested[0]} {sign} {nested[1]}"


def describe_decided(program: Program, *, numbers: bool) -> str:
    """Describes the code whose choices the values of the examples decided; empty for none.

    Conditions that the model itself asserts by `assert` or `raise` are left out, as are those that
    depend only on parameters and buffers.

    Args:
        program: The program.
        numbers: Whether to describe numbers that were read in addition to branches.
    """
    graph = program.graph
    by_name = {call.name: call for call in graph.calls}
    varying = {
        name for name, spec in zip(graph.inputs, program.inputs, strict=True) if spec.kind == "user"
    }
    for call in graph.calls:
        if not varying.isdisjoint(call.refs()):
            varying.add(call.name)
    lines: dict[str, None] = {}
    for call in graph.calls:
        if not call.op.startswith(_ASSERTIONS) or len(call.args) < 2:
            continue
        is_branch = call.args[1] == _BRANCH
        is_number = numbers and str(call.args[1]).startswith(_NUMBER.partition("{}")[0])
        if not (is_branch or is_number) or call.name not in varying:
            continue
        reads = _reads(call.args[0], by_name)
        place = next(
            (reader.source for reader in (call, *reads) if reader.source), call.module or ""
        )
        file, _, line = place.rpartition(":")
        if line.isdigit() and _refuses(file, int(line)):
            continue
        code = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
        lines[f"  {place}: {code}" if code else f"  {place or program.name}"] = None
    if not lines:
        return ""
    shown = [*lines][:_MOST_LINES]
    if len(lines) > len(shown):
        shown.append(f"  and at {len(lines) - len(shown)} more places")
    return (
        f"{program.name}: its code asks for values of tensors, and the program has only the code "
        "that ran for the examples. A call with values for which other code would run is refused. "
        "torch.where and torch.cond keep both branches. The values are read at\n" + "\n".join(shown)
    )


@lru_cache(maxsize=256)
def _statements(file: str) -> tuple[ast.stmt, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _refuses(file: str, line: int) -> bool:
    """Returns whether a line belongs to a statement that only refuses inputs."""
    for node in _statements(file):
        test = node.test if isinstance(node, ast.If | ast.Assert) else node
        if node.lineno <= line <= (test.end_lineno or line):
            if isinstance(node, ast.Assert):
                return True
            if isinstance(node, ast.If):
                return all(isinstance(child, ast.Raise) for child in node.body) and not node.orelse
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = ast.unparse(node.value.func)
                return called.rpartition(".")[2].startswith(("_check", "_assert"))
    return False
