"""Splits a program into stages that run in sequence, each a program with some of the arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmapper.errors import ConversionError
from fmapper.programs.program import (
    Call,
    Graph,
    Guard,
    Input,
    Output,
    Parameter,
    Program,
    refs_in,
    substitute,
)
from fmapper.programs.treespec import Ref, TreeSpec

_ARRAYS = ("parameter", "buffer")
_GETITEM = "sym::getitem"


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive calls of a program, as a program of their own.

    Attributes:
        program: Takes the values and then the arrays, all by position, and returns a tuple.
        values: The values that it takes, by their names in the whole program.
        arrays: The parameters and buffers that it takes, by name.
        outputs: The values that it returns, by their names in the whole program.
        form: A key that is equal for stages which differ only in their arrays.
    """

    program: Program
    values: tuple[str, ...]
    arrays: tuple[str, ...]
    outputs: tuple[str, ...]
    form: str


def split(program: Program, ends: Callable[[Sequence[str], Sequence[str]], bool]) -> list[Stage]:
    """Divides a program into stages, in the order of its calls.

    Args:
        program: A program for evaluation, which draws no random numbers and changes nothing in
            place.
        ends: Called with the arrays of the stage so far and those of the next call that takes some;
            True begins a new stage before that call, unless other values than arrays are live
            there, such as sizes that depend on values.

    Raises:
        ConversionError: The program changes its arrays or its inputs.
    """
    for output in program.outputs:
        if output.kind != "user":
            raise ConversionError(
                f"{program.name} changes {output.kind} {output.target} while it runs. Only "
                "programs that change nothing can run in stages. Convert the model in eval(), with "
                "train=False."
            )
    cutter = _Cutter(program)
    bounds = [0, *cutter.cuts(ends), len(program.graph.calls)]
    pairs = itertools.pairwise(bounds)
    return [cutter.stage(start, stop) for start, stop in pairs if start < stop]


class _Cutter:
    """Finds the places where a program may be cut, and builds the pieces."""

    def __init__(self, program: Program) -> None:
        self.program, self.calls = program, program.graph.calls
        self.inputs = dict(zip(program.graph.inputs, program.inputs, strict=True))
        self.made = {call.name: (at, call) for at, call in enumerate(self.calls)}
        self.last = dict.fromkeys(refs_in(program.graph.outputs), len(self.calls))
        for at, call in reversed([*enumerate(self.calls)]):
            for name in call.refs():
                self.last.setdefault(name, at)
        self.repeated: dict[str, Call] = {}  # sizes of inputs, which each stage computes itself
        for call in self.calls:
            if not call.result and self._is_number(call):
                self.repeated[call.name] = call
        taken_apart = {call.args[0].name for call in self.calls if call.op == _GETITEM}
        self.plain = {
            call.name
            for call in self.calls
            if len(call.result) == 1
            and call.name not in taken_apart
            and (call.op == _GETITEM or not call.op.startswith("sym::"))
        }

    def _is_number(self, call: Call) -> bool:
        """Returns whether a call returns a number, such as a size."""
        inputs = (self.inputs.get(name) for name in call.refs() if name not in self.repeated)
        return all(spec is not None and spec.kind == "user" for spec in inputs)

    def arrays_of(self, call: Call) -> list[str]:
        """Returns the names of the parameters and buffers among the operands of a call."""
        inputs = (self.inputs.get(name) for name in call.refs())
        return list(dict.fromkeys(str(i.target) for i in inputs if i and i.kind in _ARRAYS))

    def cuts(self, ends: Callable[[Sequence[str], Sequence[str]], bool]) -> Iterator[int]:
        """Yields the calls before which a stage begins."""
        allowed = self._allowed_cuts()
        so_far: dict[str, None] = {}
        after = 0  # the last call that took arrays
        for at, call in enumerate(self.calls):
            arrays = self.arrays_of(call)
            if not arrays:
                continue
            if so_far and ends([*so_far], arrays):
                place = next((n for n in range(at, after, -1) if allowed[n]), None)
                if place is not None:
                    yield place
                    so_far = {}
            so_far.update(dict.fromkeys(arrays))
            after = at

    def _allowed_cuts(self) -> list[bool]:
        """Returns for each call whether only arrays are live before it."""
        changes = [0] * (len(self.calls) + 1)
        for at, call in enumerate(self.calls):
            if call.name in self.plain or call.name in self.repeated:
                continue
            if self.last.get(call.name, at) > at:
                changes[at + 1] += 1
                changes[min(self.last[call.name], len(self.calls) - 1) + 1] -= 1
        open_ones = 0
        allowed: list[bool] = []
        for change in changes:
            open_ones += change
            allowed.append(open_ones == 0)
        return allowed

    def stage(self, start: int, stop: int) -> Stage:
        """Returns the calls of a range as a stage."""
        calls = self.calls[start:stop]
        outputs = [
            call.name
            for call in calls
            if self.last.get(call.name, -1) >= stop and call.name not in self.repeated
        ]
        calls = [*self._sizes(calls), *calls]
        computed = {call.name for call in calls}
        used = dict.fromkeys(name for call in calls for name in call.refs())
        outside = [name for name in used if name not in computed]
        fixed: dict[str, Any] = {}
        values: list[str] = []
        arrays: list[str] = []
        constants: list[str] = []
        for name in outside:
            spec = self.inputs.get(name)
            if spec is None or spec.kind == "user":
                values.append(name)
            elif spec.kind == "static":
                fixed[name] = spec.value
            else:
                (constants if spec.kind == "constant" else arrays).append(name)
        if self.program.symbols:  # inputs define the names of sizes
            given = [n for n, i in self.inputs.items() if i.kind == "user"]
            values += [name for name in given if name not in values]
        inputs = {name: self._input(name, at) for at, name in enumerate((*values, *arrays))}
        inputs |= {name: self.inputs[name] for name in constants}
        guards = self.program.guards if start == 0 else ()
        graph = _rename(Graph(tuple(inputs), calls, tuple(map(Ref, outputs))), fixed)
        return Stage(
            self._program(graph, inputs, guards),
            tuple(values),
            tuple(str(self.inputs[name].target) for name in arrays),
            tuple(outputs),
            _form(graph, tuple(inputs.values())) + repr(guards),
        )

    def _sizes(self, calls: Sequence[Call]) -> list[Call]:
        """Returns the further calls that compute sizes for the given calls."""
        computed = {call.name for call in calls}
        wanted = {name for call in calls for name in call.refs()} - computed
        size_calls: list[Call] = []
        for name, call in reversed(self.repeated.items()):
            if name in wanted:
                size_calls.append(call)
                wanted.update(call.refs())
        return size_calls[::-1]

    def _input(self, name: str, at: int) -> Input:
        spec = self.inputs.get(name)
        if spec is not None:
            return replace(spec, kind="user", target=at)
        ((dtype, shape),) = self.made[name][1].result
        return Input("user", at, dtype, shape)

    def _program(
        self, graph: Graph, inputs: Mapping[str, Input], guards: tuple[Guard, ...]
    ) -> Program:
        whole = self.program
        paths = dict(zip(_users(whole), whole.input_paths(), strict=True))
        given = [name for name, spec in inputs.items() if spec.kind == "user"]
        count = len(graph.outputs)
        return Program(
            graph,
            tuple(inputs.values()),
            tuple(Output("user", at) for at in range(count)),
            TreeSpec("tuple", (_leaves(len(given)), TreeSpec("dict"))),
            _leaves(count),
            tuple(Parameter(paths.get(name, name), "positional") for name in given),
            constants={
                str(i.target): whole.constants[str(i.target)]
                for i in inputs.values()
                if i.kind == "constant"
            },
            symbols=whole.symbols,
            guards=guards,
            default_dtype=whole.default_dtype,
            name=whole.name,
        )


def _users(program: Program) -> list[str]:
    pairs = zip(program.graph.inputs, program.inputs, strict=True)
    return [name for name, spec in pairs if spec.kind in ("user", "static")]


def _leaves(count: int) -> TreeSpec:
    return TreeSpec("tuple", (TreeSpec("leaf"),) * count)


def _rename(graph: Graph, fixed: Mapping[str, Any]) -> Graph:
    """Renames values by their order, so that equal stages have equal graphs."""
    names = {name: f"x{at}" for at, name in enumerate(graph.inputs)}
    names |= {call.name: f"c{at}" for at, call in enumerate(graph.calls)}
    refs = {name: Ref(new) for name, new in names.items()} | dict(fixed)
    calls = [
        replace(
            call,
            name=names[call.name],
            args=substitute(call.args, refs),
            kwargs=substitute(call.kwargs, refs),
        )
        for call in graph.calls
    ]
    return Graph(tuple(names[n] for n in graph.inputs), calls, substitute(graph.outputs, refs))


def _form(graph: Graph, inputs: Sequence[Input]) -> str:
    bare = [replace(call, module="", source="") for call in graph.calls]
    return repr((graph.inputs, inputs, bare, graph.outputs))
