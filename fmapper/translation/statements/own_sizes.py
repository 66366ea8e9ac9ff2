"""Computes sizes where they are read: torch computes one that several blocks have in the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fmapper.programs.program import Call, Graph, Program, substitute
from fmapper.programs.treespec import Ref


def with_own_sizes(program: Program) -> Program:
    """Returns a program whose parts compute numbers made of sizes, such as `ceil(n / 4)`.

    Another block would be given them as further arguments, and be of another class.
    """
    made: dict[str, Call] = {}
    sizes: set[str] = set()
    for call in program.graph.calls:
        if call.op.partition("::")[2].startswith("sym_size"):
            sizes.add(call.name)
        elif _is_number(call) and {*call.refs()} <= sizes | made.keys():
            made[call.name] = call
    above = {part.name: part.parent for part in program.parts}
    calls: list[Call] = []
    copies: dict[tuple[str, str], str] = {}
    for call in program.graph.calls:
        wanted = [
            one
            for one in dict.fromkeys(call.refs())
            if one in made and made[one].module not in _places(call.module, above)
        ]
        for name in wanted:
            calls += _copy(name, call.module, made, copies)
        known = {name: Ref(copies[name, call.module]) for name in wanted}
        args, kwargs = substitute(call.args, known), substitute(call.kwargs, known)
        calls.append(replace(call, args=args, kwargs=kwargs) if known else call)
    if not copies:
        return program
    old = program.graph
    return replace(program, graph=Graph(old.inputs, calls, old.outputs, old.kinds))


def _is_number(call: Call) -> bool:
    return call.op.startswith("sym::") and call.op != "sym::getitem" and not call.graphs()


def _places(module: str, above: dict[str, str]) -> Iterator[str]:
    """Yields a call of a submodule, and those of its callers."""
    while module:
        yield module
        module = above.get(module, "")
    yield ""


def _copy(
    name: str, module: str, made: dict[str, Call], copies: dict[tuple[str, str], str]
) -> list[Call]:
    """Returns the calls that compute a number in a submodule, but for those that are there."""
    if (name, module) in copies:
        return []
    call = made[name]
    inner = [one for one in dict.fromkeys(call.refs()) if one in made]
    calls = [found for one in inner for found in _copy(one, module, made, copies)]
    copies[name, module] = f"{name}_{len(copies) + 1}_of_own"
    known = {one: Ref(copies[one, module]) for one in inner}
    return [
        *calls,
        replace(call, name=copies[name, module], module=module, args=substitute(call.args, known)),
    ]
