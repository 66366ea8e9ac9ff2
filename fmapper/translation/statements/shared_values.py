"""Computes values again that a caller reads of what its part changes in place.

A block `x + self.layers(x)` whose layers begin with `nn.ReLU(inplace=True)` adds to `relu(x)`. In
files that is computed where it is read, so that the layers give what they give when called alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fmapper.programs.program import Call, Part, Program, map_arguments, refs_in, substitute
from fmapper.programs.treespec import Ref
from fmapper.translation.statements.own_sizes import with_own_sizes
from fmapper.translation.units import refs_of


def with_own_values(program: Program, draws: Callable[[str], bool]) -> Program:
    """Returns a program in which callers compute such values themselves.

    Args:
        program: The program.
        draws: Whether an operation draws random numbers.
    """
    program = with_own_sizes(program)
    pass_ = _Values(program)
    for call in program.graph.calls:
        if _is_plain(call) and not draws(call.op):
            pass_.visit(call)
    return pass_.result() if pass_.copies else program


def _is_plain(call: Call) -> bool:
    """Returns whether a call gives an array of one other array, and of numbers."""
    return len({*call.refs()}) == 1 and len(call.result) == 1 and not call.graphs()


class _Values:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._parts = {part.name: part for part in program.parts}
        self._modules = {call.name: call.module for call in program.graph.calls}
        self._readers: dict[str, list[Call]] = {}
        for call in program.graph.calls:
            for name in {*refs_of(call)}:
                self._readers.setdefault(name, []).append(call)
        self.copies: dict[str, list[tuple[str, str, Call]]] = {}  # by the call: caller, part, copy

    def visit(self, call: Call) -> None:
        """Copies a call to the callers that read what a part has of it beside its result."""
        above = [*self._above(call.module)]
        (given,) = {*call.refs()}
        for reader in self._readers.get(call.name, ()):
            caller = next(one for one in self._above(reader.module) if one in above)
            at = above.index(caller)
            part = above[at - 1] if at else ""
            known = {one for one, *_ in self.copies.get(call.name, ())}
            if not part or caller in known or not self._is_beside(call.name, part):
                continue
            if part in self._above(self._modules.get(given, "")):
                continue  # it is made of what the part makes itself
            name = f"{call.name}_{len(known) + 1}_of_caller"
            copy = replace(call, name=name, module=caller, source=reader.source)
            self.copies.setdefault(call.name, []).append((caller, part, copy))

    def _is_beside(self, name: str, part: str) -> bool:
        known = self._parts.get(part)
        return known is not None and name not in {*refs_in((known.result,))}

    def _above(self, name: str) -> Iterator[str]:
        """Yields the name of a call of a submodule, and those of its callers."""
        while name:
            yield name
            name = self._parts[name].parent if name in self._parts else ""
        yield ""

    def result(self) -> Program:
        """Returns the program with the copies, each of which is read in its caller."""
        calls: list[Call] = []
        for call in self._program.graph.calls:
            known = self._instead(call.module)
            args, kwargs = substitute(call.args, known), substitute(call.kwargs, known)
            calls.append(replace(call, args=args, kwargs=kwargs))
            calls += [copy for *_, copy in self.copies.get(call.name, ())]
        graph = replace(self._program.graph, calls=calls)
        parts = tuple(map(self._change, self._program.parts))
        return replace(self._program, graph=graph, parts=parts)

    def _instead(self, module: str) -> dict[str, Ref]:
        """Maps values to what is read in place of them in a submodule."""
        above = {*self._above(module)}
        return {
            name: Ref(copy.name)
            for name, several in self.copies.items()
            for caller, part, copy in several
            if caller in above and part not in above
        }

    def _change(self, part: Part) -> Part:
        known, inner = self._instead(part.parent), self._instead(part.name)

        def instead(known: dict[str, Ref]) -> Callable[[object], object]:
            return lambda one: known.get(one.name, one) if isinstance(one, Ref) else one

        arguments = map_arguments(part.arguments, instead(known))
        return replace(part, arguments=arguments, result=map_arguments(part.result, instead(inner)))
