"""Parameters of which a model only uses slices, as parameters of their own.

`nn.MultiheadAttention` has its three projections in one array, and takes that apart where queries
and keys come from two places.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from fmapper.programs import Call, Graph, Input, Program, Ref, map_arguments, refs_in

Bounds = tuple[int, int]
# The name of an array of the model -> those of its slices, and where they begin and end.
Slices = dict[str, dict[str, Bounds]]

# Of a file whose model has slices of arrays.
TAKE_APART = '''def take_apart(state):
    """Returns a state that has the slices of arrays, too."""
    found = dict(state)
    for name, array in state.items():
        for end, slices in SLICES.items():
            if f".{name}".endswith(f".{end}"):
                owner = name.removesuffix(end)
                found |= {owner + key: array[start:stop] for key, (start, stop) in slices.items()}
    return found


'''

_PROJECTIONS = {2: ("q_proj", "kv_proj"), 3: ("q_proj", "k_proj", "v_proj")}


def with_slices(program: Program) -> tuple[Program, Slices]:
    """Returns a program whose parameters are the slices that it uses, and those by their arrays."""
    tied = {*program.aliases, *program.aliases.values()}
    labels = {
        label: str(given.target)
        for label, given in zip(program.graph.inputs, program.inputs, strict=True)
        if given.kind == "parameter" and given.target not in tied
    }
    found = _find_slices(program, labels)
    if not found:
        return program, {}
    became: dict[str, Ref] = {}
    gone: set[str] = set()
    names: Slices = {}
    for label, used in found.items():
        bounds = sorted(set(used.values()))
        named = _names_of(program, labels[label], len(bounds))
        names[labels[label]] = dict(zip(named, bounds, strict=True))
        for value, one in used.items():
            became[value] = Ref(f"{label}_{bounds.index(one)}")
        gone |= {call.name for call in program.graph.calls if _splits(call, label)} | used.keys()
    return _replace(program, labels, names, became, gone), names


def _find_slices(program: Program, labels: Mapping[str, str]) -> dict[str, dict[str, Bounds]]:
    """Returns the parameters that are only split -> the values that are slices, with bounds."""
    graph = program.graph
    kept = set(refs_in(graph.outputs))
    for part in program.parts:
        kept.update(refs_in((part.arguments, part.result)))
    users: dict[str, list[Call]] = {}
    for call in graph.walk():
        for name in refs_in((call.args, call.kwargs)):
            users.setdefault(name, []).append(call)
    outer = {id(call) for call in graph.calls}
    found: dict[str, dict[str, Bounds]] = {}
    for label, given in zip(graph.inputs, program.inputs, strict=True):
        calls = users.get(label, [])
        is_split = calls and all(_splits(call, label) and id(call) in outer for call in calls)
        if label not in labels or label in kept or not is_split:
            continue
        slices: dict[str, Bounds] = {}
        for call in calls:
            for pick in users.get(call.name, []):
                slices[pick.name] = _bounds(call, pick)
        bounds = sorted(set(slices.values()))
        ends = [0, *(stop for _, stop in bounds)]
        if ends[:-1] == [start for start, _ in bounds] and ends[-1] == given.shape[0]:
            found[label] = slices
    return found


def _splits(call: Call, label: str) -> bool:
    """Returns whether a call splits an array along its first dimension."""
    if call.op != "aten::split_with_sizes.default" or call.args[0] != Ref(label):
        return False
    dim = call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)
    return dim == 0 and all(isinstance(size, int) for size in call.args[1])


def _bounds(call: Call, pick: Call) -> Bounds:
    at = pick.args[1]
    start = sum(call.args[1][:at])
    return start, start + call.args[1][at]


def _names_of(program: Program, name: str, count: int) -> list[str]:
    """Names slices so that those of a weight and its bias are one layer's."""
    owner, _, last = name.rpartition(".")
    found = re.fullmatch(r"(.+)_(weight|bias)", last)
    stem, end = (found[1], f".{found[2]}") if found else (last, "")
    is_attention = program.types.get(owner, "").endswith(".MultiheadAttention")
    usual = _PROJECTIONS.get(count) if is_attention and stem == "in_proj" else None
    steps = usual or [f"{stem}_{i}" for i in range(count)]
    return [f"{owner}.{step}{end}" if owner else f"{step}{end}" for step in steps]


def _replace(
    program: Program,
    labels: Mapping[str, str],
    names: Slices,
    became: Mapping[str, Ref],
    gone: set[str],
) -> Program:
    def swap(value: Any) -> Any:
        return became.get(value.name, value) if isinstance(value, Ref) else value

    graph = program.graph
    inputs: list[tuple[str, Input]] = []
    parameters = dict(program.parameters)
    for label, given in zip(graph.inputs, program.inputs, strict=True):
        slices = names.get(labels.get(label, ""))
        if slices is None:
            inputs.append((label, given))
            continue
        array = parameters.pop(labels[label])
        for i, (name, (start, stop)) in enumerate(slices.items()):
            shape = (stop - start, *given.shape[1:])
            inputs.append((f"{label}_{i}", Input(given.kind, name, given.dtype, shape)))
            parameters[name] = array[start:stop]
    frozen = [new for name in program.frozen for new in names.get(name, (name,))]
    calls = [
        dataclasses.replace(
            call, args=map_arguments(call.args, swap), kwargs=map_arguments(call.kwargs, swap)
        )
        for call in graph.calls
        if call.name not in gone
    ]
    parts = [
        dataclasses.replace(
            part,
            arguments=map_arguments(part.arguments, swap),
            result=map_arguments(part.result, swap),
        )
        for part in program.parts
    ]
    return dataclasses.replace(
        program,
        graph=Graph(
            tuple(label for label, _ in inputs), calls, map_arguments(graph.outputs, swap),
            graph.kinds,
        ),
        inputs=tuple(given for _, given in inputs),
        parameters=parameters,
        frozen=tuple(frozen),
        parts=tuple(parts),
    )  # fmt: skip


def slices_by_suffix(slices: Slices) -> dict[str, dict[str, Bounds]]:
    """Returns slices by the last parts of their names, where those say the same everywhere.

    Examples:
        >>> two = {"a.w": {"a.q": (0, 2), "a.k": (2, 4)}, "b.w": {"b.q": (0, 2), "b.k": (2, 4)}}
        >>> slices_by_suffix(two)
        {'w': {'q': (0, 2), 'k': (2, 4)}}
    """
    found: dict[str, dict[str, Bounds]] = {}
    for whole, parts in slices.items():
        owner, _, last = whole.rpartition(".")
        start = len(owner) + bool(owner)
        short = {name[start:]: bounds for name, bounds in parts.items()}
        if found.setdefault(last, short) != short:
            return dict(slices)
    return found
