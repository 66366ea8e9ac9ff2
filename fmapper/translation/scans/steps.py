"""Loops whose steps call parts, which stand among the steps of a function until it is written.

`flow::begin` takes the first carry and the arrays of rows, and gives the carry and the rows of a
step; `flow::end` takes those, the next carry and what the step gives for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.programs.program import Call, Graph, map_arguments, refs_in
from fmapper.programs.treespec import Ref

if TYPE_CHECKING:
    from fmapper.translation.functions.forms import Form
    from fmapper.translation.units import Unit


def with_loops(steps: Iterable[Call | Unit]) -> list[Call | Unit]:
    """Returns steps with those of loops as the graphs of `flow::scan`.

    Raises:
        ConversionError: A loop ends elsewhere than where it begins.
    """
    found: list[Call | Unit] = []
    outer: list[tuple[Call, list[Call | Unit]]] = []
    for step in steps:
        if is_end(step) and outer:
            begin, before = outer.pop()
            before.append(_loop(begin, step, found))
            found = before
        elif isinstance(step, Call) and step.op == "flow::begin":
            outer.append((step, found))
            found = []
        elif is_end(step):
            raise _apart(step)
        else:
            found.append(step)
    if outer:
        raise _apart(outer[0][0])
    return found


def _apart(step: Call | Unit) -> ConversionError:
    where = step.module if isinstance(step, Call) else step.path
    return ConversionError(
        f"{where or 'the model'}: a loop begins and ends in different submodules, so that neither "
        "has its code. Use convert without structure=True"
    )


def is_end(step: Call | Unit) -> bool:
    """Returns whether a step ends a loop."""
    return isinstance(step, Call) and step.op == "flow::end"


def units_in(steps: Iterable[Call | Unit]) -> Iterator[Unit]:
    """Yields the units among steps, and those in the loops among them."""
    for step in steps:
        if not isinstance(step, Call):
            yield step
        else:
            for graph in step.graphs():
                yield from units_in(graph.calls)


def _loop(begin: Call, end: Call | Unit, steps: list[Call | Unit]) -> Call:
    """Returns a loop as one call."""
    assert isinstance(end, Call)
    given, carry, ys = end.args
    first, rows = begin.args
    names = tuple(one.name for one in given)
    inner: list[Any] = [step for step in steps if step.name not in names]
    if len(steps) - len(inner) != len(names):
        raise _apart(begin)
    graph = Graph(names, inner, (*carry, *ys))
    kwargs = {**end.kwargs, "rows": begin.kwargs["dims"]}
    return replace(end, op="flow::scan", args=(graph, first, rows), kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class Carried:
    """One variable that a loop carries on.

    Attributes:
        given: The structure of the values that a step is given.
        gives: That of those which the next one is given.
        at: The positions of its values in what the loop carries.
        name: What a part that takes it calls it; empty if it is one value.
    """

    given: Any
    gives: Any
    at: tuple[int, ...]
    name: str = ""


def states_of(loop: Call, forms: Mapping[int, Form], left: Mapping[str, int]) -> list[Carried]:
    """Returns what a loop carries: single values, and tuples that a part takes and gives whole.

    Args:
        loop: The loop.
        forms: How the parts in it are called.
        left: How often each value is used.
    """
    graph, carry, _ = loop.args
    places = {value: i for i, value in enumerate(graph.inputs[: len(carry)])}
    outputs = dict(zip(graph.inputs, graph.outputs, strict=False))
    found: list[Carried] = []
    for unit in units_in([loop]):
        form = forms[id(unit)]
        for one in form.arguments:
            values = [*refs_in((one.structure,))]
            if not isinstance(one.structure, tuple) or len(values) != len({*values} & {*places}):
                continue
            if len(values) < 2 or any(left[v] != 1 for v in values):
                continue
            gives = map_arguments(one.structure, lambda ref: outputs[ref.name])
            if isinstance(form.returns, tuple) and gives in form.returns:
                at = tuple(places[value] for value in values)
                found.append(Carried(one.structure, gives, at, one.name))
    taken = {i for one in found for i in one.at}
    found += [
        Carried(Ref(value), graph.outputs[i], (i,)) for value, i in places.items() if i not in taken
    ]
    return sorted(found, key=lambda one: one.at)
