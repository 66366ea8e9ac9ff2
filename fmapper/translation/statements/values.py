"""The arrays and the sizes among the values of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fmapper.programs.treespec import Ref

if TYPE_CHECKING:
    from fmapper.programs.program import Program

Shape = tuple[int | str, ...]


def values_of(program: Program) -> dict[str, tuple[str, Shape]]:
    """Returns the dtype and shape of each value that has one."""
    found: dict[str, tuple[str, Shape]] = {}
    for name, given in zip(program.graph.inputs, program.inputs, strict=True):
        if given.is_array():
            found[name] = (given.dtype, given.shape)
    for call in program.graph.walk():
        if len(call.result) == 1:
            found[call.name] = call.result[0]
        elif call.op.partition("::")[2].startswith("item.") and isinstance(call.args[0], Ref):
            found[call.name] = (found.get(call.args[0].name, ("", ()))[0], ())
        for graph in call.graphs():
            found.update(zip(graph.inputs, graph.kinds, strict=False))
    return found


_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**"}


def sizes_of(program: Program) -> dict[str, str]:
    """Maps values that are computed from sizes alone to their expressions."""
    shapes = values_of(program)
    found: dict[str, str] = {
        name: str(given.value)
        for name, given in zip(program.graph.inputs, program.inputs, strict=True)
        if given.kind == "user" and given.dtype == "int"
    }

    def text(value: Any) -> str | None:
        if isinstance(value, Ref):
            return found.get(value.name)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else None

    for call in program.graph.walk():
        if call.op.partition("::")[2].startswith("sym_size") and isinstance(call.args[0], Ref):
            shape = shapes.get(call.args[0].name)
            if shape is not None and isinstance(call.args[1], int):
                found[call.name] = str(shape[1][call.args[1]])
        elif call.op.startswith("sym::"):
            kind = call.op[5:]
            parts = [text(one) for one in call.args]
            known = [part for part in parts if part is not None]
            if len(known) != len(parts) or not parts:
                continue
            if kind in _OPERATORS and len(known) == 2:
                found[call.name] = f"({known[0]}){_OPERATORS[kind]}({known[1]})"
            elif kind == "neg":
                found[call.name] = f"-({known[0]})"
            elif kind in ("sym_max", "sym_min", "max", "min") and len(known) == 2:
                found[call.name] = f"{kind[-3:]}({known[0]}, {known[1]})"
    return found
