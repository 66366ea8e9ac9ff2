"""Finds the functions of a model's own code to keep in files, because they repeat.

`q, k = rope(q, cos), rope(k, cos)` calls one function twice. Calls of functions are inlined into
their callers, unless the same function is called at several places and uses only its arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fmapper.programs.program import Call, Part, Program, map_arguments, refs_in
from fmapper.programs.reading.statements import count_targets, statements_at
from fmapper.programs.treespec import Ref, Size

# The function calls around a call, outer ones first: their parts, and the lines in them.
FunctionStack = tuple[tuple[str, str], ...]

LONG = 8  # the least number of operations for a function that is called once
_FEWEST = 3  # the least number for one that is called at several places
_DRAWS = re.compile(  # as far as the names of operations tell; the target has the others
    r"rand|dropout|bernoulli|multinomial|normal\b|normal_|uniform|rrelu|poisson|exponential"
    r"|cauchy|geometric"
)


def with_own_functions(program: Program, stacks: Mapping[str, FunctionStack]) -> Program:
    """Returns a program with parts only for functions to keep.

    Args:
        program: The program, with parts for all calls of functions.
        stacks: Its calls -> the function calls around them.
    """
    functions = {part.name: part for part in program.parts if part.function or part.method}
    finder = _Functions(program, functions, stacks)
    plain = finder.find_kept()
    methods = finder.find_methods(plain)
    kept = plain | methods
    given = _results_by_line(functions, stacks)

    def place(part: Part) -> Part:
        """Moves a part into the nearest enclosing part that is kept."""
        inner: list[tuple[str, str]] = []
        parent, source = part.parent, part.source
        while parent in functions and parent not in kept:
            inner.insert(0, (parent, source))
            parent, source = functions[parent].parent, functions[parent].source
        source = _line_of_inner("", [(parent, source), *inner], functions, given)
        source = source if part.name in functions else part.source
        function = "" if part.name in methods else part.function
        return replace(part, parent=parent, source=source, function=function)

    parts = tuple(
        place(part) for part in program.parts if part.name not in functions or part.name in kept
    )
    calls = []
    for call in program.graph.calls:
        stack = stacks.get(call.name, ())
        at = max((at for at, (name, _) in enumerate(stack) if name in kept), default=-1)
        name, line = stack[at] if at >= 0 else (call.module, call.source)
        if name in methods or stack[at + 1 :]:
            line = _line_of_inner(call.name, [(name, line), *stack[at + 1 :]], functions, given)
        calls.append(replace(call, module=name, source=line or call.source))
    return replace(program, graph=replace(program.graph, calls=calls), parts=parts)


def _results_by_line(
    functions: Mapping[str, Part], stacks: Mapping[str, FunctionStack]
) -> dict[tuple[str, str], list[str]]:
    """Maps function calls and lines in them to the results that are computed there."""
    results: dict[tuple[str, str], list[str]] = {}
    for name, part in functions.items():
        for value in dict.fromkeys(refs_in((part.result,))):
            for inner, line in stacks.get(value, ()):
                if inner == name:
                    results.setdefault((inner, line), []).append(value)
    return results


def _line_of_inner(
    value: str,
    stack: Sequence[tuple[str, str]],
    functions: Mapping[str, Part],
    given: Mapping[tuple[str, str], Sequence[str]],
) -> str:
    """Returns the line that assigns a value: that of a call which returns it, or the innermost.

    Args:
        value: The value.
        stack: The functions that are part of the first one, with the lines in each.
        functions: All function calls.
        given: Function calls and lines in them -> the results that are computed there.
    """
    line = stack[0][1]
    for inner, source in stack[1:]:
        if inner not in functions:
            break
        several = given.get((inner, source), ())
        value_there = several[0] if len(several) == 1 else value
        named = line_of_result(value_there, functions[inner], line, statements_at([line]))
        if named:
            return named
        if _names_what_it_computes(source):
            line = source
    return line


def line_of_result(value: str, part: Part, line: str, lines: Mapping[str, str]) -> str:
    """Returns the line of a call if it assigns the value that the call returns; otherwise "".

    Args:
        value: The value.
        part: The call of a function.
        line: The line of the call.
        lines: Lines -> their statements.
    """
    results = [*refs_in((part.result,))]
    if value not in results or count_targets(lines.get(line, "")) != len(results):
        return ""
    if len(results) == 1:
        return line
    called = re.escape(part.function or part.method)
    is_plain = re.search(rf"= (?:\w+\.)*{called}\([^()]*\)$", lines[line])
    return f"{line}#{results.index(value)}" if is_plain else ""


def _names_what_it_computes(line: str) -> bool:
    return not statements_at([line]).get(line, "return").startswith("return")


class _Functions:
    def __init__(
        self,
        program: Program,
        functions: Mapping[str, Part],
        stacks: Mapping[str, FunctionStack],
    ) -> None:
        self._program, self._functions = program, functions
        self._calls: dict[str, list[Call]] = {name: [] for name in functions}
        self._sizes = {call.name for call in program.graph.calls if _is_size(call)}
        self._constants = {
            value
            for value, given in zip(program.graph.inputs, program.inputs, strict=True)
            if given.kind == "constant"
        }
        self._users: dict[str, list[str]] = {}
        for call in program.graph.calls:
            for name, _ in stacks.get(call.name, ()):
                if name in self._calls:
                    self._calls[name].append(call)
            for value in {*call.refs(), *_free(call)}:
                self._users.setdefault(value, []).append(call.name)
        for value in refs_in(program.graph.outputs):
            self._users.setdefault(value, []).append("")
        self._with_parts = {
            name
            for part in program.parts
            if not part.function
            for name in self._around(part.parent)
        }

    def _around(self, name: str) -> Iterable[str]:
        while name in self._functions:
            yield name
            name = self._functions[name].parent

    def find_kept(self) -> set[str]:
        """Returns the function calls that are equal to calls at other places."""
        groups: dict[Any, list[str]] = {}
        for name, part in self._functions.items():
            if name not in self._with_parts and self._is_alone(part, self._constants):
                groups.setdefault((part.function, self._content(part)), []).append(name)
        kept: set[str] = set()
        places, functions = self._places(), self._functions
        for group in groups.values():
            is_long = len(group) == 1 and count_computing(self._calls[group[0]]) >= LONG
            is_several = len({places[name] for name in group}) > 1
            if is_long or (is_several and all(self._is_alone(functions[call]) for call in group)):
                kept.update(group)
        others = {name for name in self._functions if name not in kept and self._calls[name]}
        inlined = {_spot(self._functions[name]) for name in others}
        return {name for name in kept if _spot(self._functions[name]) not in inlined}

    def find_methods(self, functions: Collection[str]) -> set[str]:
        """Returns the method calls that stay methods in the file.

        They are calls of methods of other parts, and of the part itself if they repeat, or call
        parts and have a public name, such as `encode`.

        Args:
            functions: The calls that stay functions in the file.
        """
        groups: dict[Any, list[str]] = {}
        for name, part in self._functions.items():
            is_within = {*self._around(part.parent)} & {*functions}
            is_large = name in self._with_parts or len(self._calls[name]) >= _FEWEST
            is_large |= not part.function
            gives = any(True for _ in refs_in((part.result,)))
            if part.method and name not in functions and not is_within and gives and is_large:
                key = self._program.types.get(part.path), part.method, _options(part)
                groups.setdefault(key, []).append(name)
        places = self._places()
        return {
            name
            for group in groups.values()
            for name in group
            if len({places[call] for call in group}) > 1 or self._is_of_interface(name)
            if self._is_of_class(group)
        }

    def _is_of_class(self, calls: Sequence[str]) -> bool:
        """Returns whether all submodules of a class that run call a method, with equal contents.

        Otherwise the submodules are more alike without that method, unless they have no other code.
        """
        methods = [self._functions[name] for name in calls]
        types = self._program.types
        kind = types.get(methods[0].path)
        others = [part for part in self._program.parts if types.get(part.path) == kind]
        if all(part.function or part.method for part in others):
            return True
        is_same = len({self._content(part) for part in methods}) == 1
        return is_same and {part.path for part in others} <= {part.path for part in methods}

    def _is_of_interface(self, name: str) -> bool:
        """Returns whether a method is public, and its caller does more than call it."""
        part = self._functions[name]
        if not part.function:
            return True
        callers = (caller for caller in self._program.parts if caller.name == part.parent)
        is_public = part.method[0] != "_" and name in self._with_parts
        return is_public and all(part.result != caller.result for caller in callers)

    def _places(self) -> dict[str, tuple[str, int]]:
        """Maps each call to its line in the caller, and its index among the calls on that line."""
        counts: Counter[tuple[str, str]] = Counter()
        places = {}
        for name, part in self._functions.items():
            at = part.parent, part.source
            places[name] = part.source, counts[at]
            counts[at] += 1
        return places

    def _is_alone(self, part: Part, beside: Collection[str] = ()) -> bool:
        """Returns whether a function computes only with its arguments.

        Args:
            part: The function.
            beside: Further values with which it may compute.
        """
        calls = self._calls[part.name]
        inside = {call.name for call in calls}
        given, gives = {*refs_in((part.arguments,))}, {*refs_in((part.result,))}
        computing = [call for call in calls if call.name not in self._sizes]
        used = {value for call in computing for value in call.refs()} - inside - self._sizes
        results = {
            value for value in inside if {*self._users.get(value, ())} - inside
        } - self._sizes
        is_pure = all(map(_is_pure, computing))
        is_large = count_computing(computing) >= _FEWEST
        return (
            is_pure
            and is_large
            and used <= {*given, *beside}
            and results <= gives
            and bool(results)
        )

    def _content(self, part: Part) -> Any:
        """Returns the operations of a function, without the numbers in it, for comparison."""
        names: dict[str, int] = {}
        for value in refs_in((part.arguments,)):
            names.setdefault(value, len({*names.values()}))
        calls = [call for call in self._calls[part.name] if call.name not in self._sizes]
        ops = []
        for call in calls:
            if is_copy(call) and call.args[0].name in names:
                names.setdefault(call.name, names[call.args[0].name])
                continue
            ops.append((call.op, _plain(call.args, names), _plain(call.kwargs, names)))
            names.setdefault(call.name, len({*names.values()}))
        return (*map(repr, ops), repr(_plain(part.result, names)))


def _spot(part: Part) -> tuple[str, str]:
    """Returns a function and the line that calls it, which are the same for all objects."""
    return part.function, part.source


def _options(part: Part) -> str:
    """Returns the arguments of a call without arrays and sizes, as text."""
    plain = map_arguments(
        part.arguments,
        lambda value: type(value).__name__ if isinstance(value, Ref | Size) else value,
    )
    return repr(plain)


def _plain(value: Any, names: Mapping[str, int]) -> Any:
    """Replaces references in arguments by indices, and drops numbers, for comparisons."""
    if isinstance(value, Ref):
        return f"%{names[value.name]}" if value.name in names else "size"
    if isinstance(value, Mapping):
        return {key: _plain(item, names) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_plain(item, names) for item in value)
    is_size = isinstance(value, int) and not isinstance(value, bool)
    return "size" if is_size else value


def is_copy(call: Call) -> bool:
    """Returns whether a call returns its operand unchanged, such as `contiguous`."""
    name = call.op.partition("::")[2].partition(".")[0]
    return name in ("contiguous", "clone", "alias") and isinstance(call.args[0], Ref)


def _is_cast(call: Call) -> bool:
    """Returns whether a call returns its operand unchanged except for the dtype."""
    return is_copy(call) or call.op.partition("::")[2].partition(".")[0] in ("to", "_to_copy")


def count_computing(calls: Iterable[Call]) -> int:
    """Counts the calls that compute more than sizes, copies and casts."""
    return sum(not (_is_size(call) or _is_cast(call)) for call in calls)


def _is_size(call: Call) -> bool:
    kind, _, name = call.op.partition("::")
    return (kind == "sym" and name != "getitem") or name.startswith("sym_")


def _free(call: Call) -> Iterable[str]:
    for graph in call.graphs():
        for inner in graph.walk():
            yield from inner.refs()
        yield from refs_in(graph.outputs)


def _is_pure(call: Call) -> bool:
    name = call.op.partition("::")[2].partition(".")[0]
    acts = name.startswith(("_assert", "_print")) or name.endswith("_")
    return not (acts or call.graphs() or _DRAWS.search(name))
