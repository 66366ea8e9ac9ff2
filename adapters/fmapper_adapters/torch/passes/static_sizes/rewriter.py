"""Replaces sizes that depend on values by numbers, so that a program compiles.

A size that is asserted to be a number is that number. An array with a row for each true element of
a mask gets a row for each element of the mask: the valid rows come first, and the others are
padding, which is never read. Operations that work row by row compute the padding too; operations
that combine rows ignore it. A program with other operations on such rows is left unchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]

from fmapper.programs import Call, Graph, Program, Ref, substitute
from fmapper_adapters.torch.from_fx.size_facts import SizeFacts
from fmapper_adapters.torch.passes.static_sizes.masked_rows import choose_by_masks
from fmapper_adapters.torch.passes.static_sizes.padding import BEARS
from fmapper_adapters.torch.passes.static_sizes.row_by_row import is_pointwise, is_row_by_row
from fmapper_adapters.torch.passes.static_sizes.same_counts import unite_counts
from fmapper_adapters.torch.passes.static_sizes.sources import SOURCES
from fmapper_adapters.torch.passes.static_sizes.writer import Remains, Writer

# The positions of sizes in the arguments, which include padding.
_SIZES = {"view": 1, "reshape": 1, "_unsafe_view": 1, "expand": 1, "full": 0, "zeros": 0, "ones": 0}
_SIZES |= {"empty": 0, "new_zeros": 1, "new_ones": 1, "new_full": 1, "new_empty": 1, "unflatten": 2}

PADDED = -2  # target of an internal output, whose rows may be followed by padding


def fix_sizes(program: Program, facts: SizeFacts) -> Program:
    """Fixes sizes to numbers by padding; returns the program unchanged if that fails."""
    if not facts.symbols and not facts.is_sized:
        return program
    whole = [output.target != PADDED for output in program.outputs]
    graph = choose_by_masks(program.graph, facts.with_results(program.graph))
    program = dataclasses.replace(program, graph=graph)
    facts = facts.with_results(graph)
    try:
        return dataclasses.replace(program, graph=_with_numbers(graph, facts, whole))
    except Remains:
        return program


def find_remaining(program: Program) -> list[Call]:
    """Returns the calls whose results have sizes that depend on values."""
    return [
        call
        for call in program.graph.walk()
        if call.op in _EAGER
        or any(isinstance(s, str) and _UNKNOWN.search(s) for _, shape in call.result for s in shape)
    ]


_UNKNOWN = re.compile(r"\bu\d+")  # torch's names of sizes that are read from arrays
_EAGER = {"aten::nonzero.default", "aten::argwhere.default", "aten::masked_select.default"}
_EAGER |= {"aten::_unique2.default", "aten::unique_consecutive.default", "aten::unique_dim.default"}
_EAGER |= {"aten::nonzero_numpy.default", "aten::bincount.default", "aten::_unique.default"}


def _with_numbers(graph: Graph, facts: SizeFacts, whole: Sequence[bool]) -> Graph:
    writer = Writer(graph, unite_counts(graph, facts))
    for call in graph.calls:
        writer.at = call
        args = substitute(call.args, writer.renamed)
        kwargs = substitute(call.kwargs, writer.renamed)
        _rewrite(writer, dataclasses.replace(call, args=args, kwargs=kwargs))
    outputs = substitute(graph.outputs, writer.renamed)
    for name in Graph((), [], tuple(itertools.compress(outputs, whole))).uses():
        if name in writer.rows:
            raise Remains(name)
    return Graph(graph.inputs, writer.calls, outputs, graph.kinds)


def _rewrite(writer: Writer, call: Call) -> None:
    name = call.op.partition("::")[2].partition(".")[0]
    if call.graphs():
        if writer.padded_refs(call):
            raise Remains(call.op)
        return writer.keep(call)
    if call.op.startswith(("sym::", "aten::_assert", "aten::item", "aten::_local")):
        return _number(writer, call)
    if call.op == "aten::sym_size.int":
        return _size_of(writer, call)
    if call.op == "sym::getitem" or not call.op.startswith("aten::"):
        return _plain(writer, call, name)
    if (source := SOURCES.get(name)) is not None and source(writer, call):
        return None
    return _plain(writer, call, name)


def _number(writer: Writer, call: Call) -> None:
    """Emits a call on numbers, with the counts."""
    if call.op == "sym::getitem":
        return _plain(writer, call, "getitem")
    if writer.padded_refs(call):
        raise Remains(call.op)
    writer.calls.append(call)
    return None


def _size_of(writer: Writer, call: Call) -> None:
    array, dim = call.args[0].name, call.args[1]
    padded = writer.rows.get(array)
    if padded is not None and dim % len(writer.shapes[array]) == padded[0]:
        writer.renamed[call.name] = writer.count(padded[1])
        return
    writer.calls.append(call)


def _plain(writer: Writer, call: Call, name: str) -> None:
    """Emits a call whose operands may have padding, if the operation tolerates it."""
    call = _with_sizes(writer, call, name)
    padded = writer.padded_refs(call)
    if padded:
        bears = BEARS.get(name)
        if bears is not None:
            if (new := bears(writer, call)) is None:
                return
            call = new
        elif not is_row_by_row(writer, call):
            raise Remains(call.op)
    writer.keep(call)


def _with_sizes(writer: Writer, call: Call, name: str) -> Call:
    """Replaces references to known numbers, and padded sizes, by numbers."""

    def number(value: Any, *, is_size: bool) -> Any:
        if isinstance(value, tuple):
            return tuple([number(inner, is_size=is_size) for inner in value])
        expression = writer.numbers.get(value.name) if isinstance(value, Ref) else None
        if expression is None or isinstance(expression, int):
            return value if expression is None else expression
        unknown = writer.unknowns(expression)
        if not unknown.isdisjoint(writer.most):
            if not is_size and not is_pointwise(call.op):
                raise Remains(call.op)
            return writer.size(expression) if is_size else value
        if unknown or not sympy.sympify(expression).free_symbols & writer.facts.symbols:
            return value
        return writer.size(expression)

    at = _SIZES.get(name)
    if name == "arange" and (call.op == "aten::arange.default" or call.args[0] == 0):
        at = 1 if len(call.args) == 2 else 0  # with a step the end is unknown
    if name == "slice" and call.args[0].name in writer.rows:
        at = 3
    args = tuple([number(v, is_size=i == at) for i, v in enumerate(call.args)])
    kwargs = {key: number(value, is_size=False) for key, value in call.kwargs.items()}
    return dataclasses.replace(call, args=args, kwargs=kwargs)
