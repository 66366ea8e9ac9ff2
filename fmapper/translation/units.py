"""Splits the graph of a program by the submodules that it was recorded from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fmapper.programs.program import (
    Call,
    Input,
    Part,
    Program,
    map_arguments,
    refs_in,
)
from fmapper.programs.treespec import Ref
from fmapper.translation.reading.paths import find_first_paths, owners, path_below
from fmapper.translation.statements.values import Shape, sizes_of, values_of


def refs_of(call: Call) -> Iterator[str]:
    """Yields the values that a call refers to, including those of inner loops and branches."""
    yield from refs_in((call.args, call.kwargs))
    yield from free_in(call)


def free_in(call: Call) -> Iterator[str]:
    """Yields the free variables of a loop or branch."""
    for graph in call.graphs():
        inside = {*graph.inputs}
        inner: Call | Unit
        for inner in graph.calls:
            used = inner.given if isinstance(inner, Unit) else refs_of(inner)
            yield from (name for name in used if name not in inside)
            inside.update(inner.gives if isinstance(inner, Unit) else (inner.name,))
        yield from (name for name in refs_in(graph.outputs) if name not in inside)


def with_inner(steps: Iterable[Call | Unit]) -> Iterator[Call]:
    """Yields the calls among steps, each with those of loops and branches within it."""
    for step in steps:
        if isinstance(step, Call):
            yield step
            for graph in step.graphs():
                yield from with_inner(graph.calls)


@dataclass(slots=True, eq=False)
class Unit:
    """One call of a submodule: what it computes itself, and the submodules that it calls.

    Attributes:
        name: Of the call.
        path: Of the submodule: the first one of the paths that it has.
        part: What it was given, and what it gave.
        steps: Calls and units, in an order in which they run.
        parent: The unit that called it.
        given: Values from outside that it uses, in the order in which they were made.
        gives: Its values that others use, in the order in which they are made.
    """

    name: str
    path: str
    part: Part
    steps: list[Call | Unit] = field(default_factory=list)
    parent: Unit | None = None
    given: list[str] = field(default_factory=list)
    gives: list[str] = field(default_factory=list)

    def own_result(self, root: Unit) -> Any:
        """Returns what the part gives, with None for what others compute and it is not given.

        That is in objects that its caller had before, such as the caches of other layers.
        """
        others = {call.name for call in root.calls()} - {call.name for call in self.calls()}
        others -= {*self.given, *refs_in((self.part.arguments,))}
        return map_arguments(
            self.part.result,
            lambda value: None if isinstance(value, Ref) and value.name in others else value,
        )

    def calls(self) -> Iterator[Call]:
        """Yields its calls and those of the units in it."""
        for step in self.steps:
            if isinstance(step, Call):
                yield step
            else:
                yield from step.calls()

    def units(self) -> Iterator[Unit]:
        """Yields the submodules in it, outer ones first."""
        for step in self.steps:
            if isinstance(step, Unit):
                yield step
                yield from step.units()

    def by_path(self) -> dict[str, list[Unit]]:
        """Returns the units in it by the paths of their submodules."""
        found: dict[str, list[Unit]] = {}
        for unit in self.units():
            found.setdefault(unit.path, []).append(unit)
        return found


def uses_of(units: Iterable[Unit]) -> int:
    """Returns how often others call a submodule: it may call methods of its own."""
    return sum(one.parent is None or one.parent.path != one.path for one in units)


@dataclass(slots=True, eq=False)
class Structure:
    """A program, divided by its submodules.

    Attributes:
        program: The program.
        root: The whole model.
        values: The dtype and shape of each value, if it has one.
        inputs: What each input of the graph is.
        sizes: Values that are sizes -> the expression of the symbols that they are.
        dissolved: The submodules that have no code of their own, with the reason.
        paths: The other paths of a submodule -> its first one.
    """

    program: Program
    root: Unit
    values: dict[str, tuple[str, Shape]]
    inputs: dict[str, Input]
    sizes: dict[str, str]
    dissolved: dict[str, str]
    paths: dict[str, list[str]]


def structure_of(program: Program) -> Structure:
    """Divides a program by its submodules, with the inputs and outputs of each."""
    sizes = sizes_of(program)
    graph = program.graph
    calls = [call for call in graph.calls if call.name not in sizes]
    units = _units(program, calls)
    dissolved: dict[str, str] = {}
    paths: dict[str, list[str]] = {}
    for path, first in find_first_paths(program).items():
        paths.setdefault(first, []).append(path)
    inputs = dict(zip(graph.inputs, program.inputs, strict=True))
    values = values_of(program)
    found = Structure(program, units[""], values, inputs, sizes, dissolved, paths)
    order = {name: at for at, name in enumerate([*graph.inputs, *(c.name for c in calls)])}
    while True:
        _arrange(found.root, order, dissolved)
        _bound(found, order)
        if not _dissolve_unsound(found, dissolved):
            return found


def _units(program: Program, calls: list[Call]) -> dict[str, Unit]:
    """Returns the units by name, each with its own calls; those without any are left out."""
    made: dict[str, Unit] = {}
    first_paths = find_first_paths(program)
    holders = owners(program)
    for part in program.parts:
        path = first_paths.get(part.path, part.path)
        made.setdefault(part.name, Unit(part.name, path, part))
    if "" not in made:
        made[""] = Unit("", "", Part("", "", "", {}, None))
    for name, unit in made.items():
        if name:
            unit.parent = made.get(unit.part.parent, made[""])
            unit.path = path_below(unit.parent.path, unit.path, first_paths, holders)
    for call in calls:
        unit = made.get(call.module, made[""])
        unit.steps.append(call)
    for unit in reversed(list(made.values())):  # inner ones first
        if unit.parent is not None and unit.steps:
            unit.parent.steps.append(unit)
    return made


def _names(step: Call | Unit) -> Iterator[str]:
    if isinstance(step, Call):
        yield step.name
    else:
        for call in step.calls():
            yield call.name


def _refs(step: Call | Unit) -> Iterator[str]:
    if isinstance(step, Call):
        yield from refs_of(step)
    else:
        for call in step.calls():
            yield from refs_of(call)


def _arrange(unit: Unit, order: Mapping[str, int], dissolved: dict[str, str]) -> None:
    """Sorts the steps of units topologically.

    A submodule that needs what another step makes of its own values has no such place: its calls
    become its caller's.
    """
    while True:
        placed = _schedule(unit.steps, order)
        if placed is not None:
            unit.steps = placed
            break
        inner = _smallest_in_cycle(unit.steps, order)
        dissolved[inner.name] = "it needs what its caller makes of its own intermediate values"
        dissolve(inner)
    for step in unit.steps:
        if isinstance(step, Unit):
            _arrange(step, order, dissolved)


def dissolve(unit: Unit) -> None:
    """Moves the steps of a unit to its parent."""
    parent = unit.parent
    assert parent is not None
    at = next(i for i, step in enumerate(parent.steps) if step is unit)
    parent.steps[at : at + 1] = unit.steps
    for step in unit.steps:
        if isinstance(step, Unit):
            step.parent = parent


def _needs(steps: list[Call | Unit]) -> list[set[int]]:
    maker = {name: i for i, step in enumerate(steps) for name in _names(step)}
    return [
        {maker[name] for name in _refs(step) if name in maker} - {i} for i, step in enumerate(steps)
    ]


def _schedule(steps: list[Call | Unit], order: Mapping[str, int]) -> list[Call | Unit] | None:
    """Sorts steps topologically, near to the recorded order; None for a cycle."""
    needs = _needs(steps)
    when = [max((order[name] for name in _names(step)), default=0) for step in steps]
    first = [min((order[name] for name in _names(step)), default=0) for step in steps]
    left = sorted(range(len(steps)), key=lambda i: (first[i], when[i]))
    done: set[int] = set()
    found: list[Call | Unit] = []
    while left:
        ready = next((i for i in left if needs[i] <= done), None)
        if ready is None:
            return None
        left.remove(ready)
        done.add(ready)
        found.append(steps[ready])
    return found


def _smallest_in_cycle(steps: list[Call | Unit], order: Mapping[str, int]) -> Unit:
    needs = _needs(steps)
    reach = [set(need) for need in needs]
    for _ in steps:
        grown = [found.union(*(reach[i] for i in found)) for found in reach]
        if grown == reach:
            break
        reach = grown
    units = [step for i, step in enumerate(steps) if isinstance(step, Unit) and i in reach[i]]
    return min(units, key=lambda unit: sum(1 for _ in unit.calls()))


def _bound(found: Structure, order: Mapping[str, int]) -> None:
    """Computes the inputs and outputs of each unit."""
    units = [found.root, *found.root.units()]
    own = {id(unit): {call.name for call in unit.calls()} for unit in units}
    outputs = set(refs_in(found.program.graph.outputs))
    for unit in units:
        inside = own[id(unit)]
        used = {name for call in unit.calls() for name in refs_of(call)}
        if unit is found.root:  # it may return what it is given, or not use it
            told = {*refs_in((unit.part.arguments,))}  # all but options, as keys for dropout
            given = {name for name, one in found.inputs.items() if _is_given(one)}
            used |= outputs | (given & told or given)
        used -= found.sizes.keys()
        unit.given = sorted((name for name in used - inside), key=lambda n: order.get(n, -1))
    used_by: dict[str, int] = {}
    for call in found.root.calls():
        for name in set(refs_of(call)):
            used_by[name] = used_by.get(name, 0) + 1
    changed = _find_changed(found.program)
    for unit in units:
        within: dict[str, int] = {}
        for call in unit.calls():
            for name in set(refs_of(call)):
                within[name] = within.get(name, 0) + 1
        inside = own[id(unit)]
        outer = {n for n in inside if used_by.get(n, 0) > within.get(n, 0) or n in outputs}
        outer -= {
            name
            for name in inside & changed.keys()
            if (name not in used_by or name in within)
            and (not unit.path or changed[name].startswith(f"{unit.path}."))
        }  # they leave it only as updates of its own buffers
        if outer and unit.part.name:  # what it gives when it is called alone
            outer |= inside.intersection(refs_in((unit.part.result,)))
        unit.gives = sorted(outer, key=lambda n: order[n])
    _settle(found, units)


def _is_given(one: Input) -> bool:
    return one.kind == "user" and one.is_array()


def _find_changed(program: Program) -> dict[str, str]:
    """Maps the values that leave the program only as updates of buffers to those."""
    users: set[str] = set()
    buffers: dict[str, str] = {}
    for value, output in zip(program.graph.outputs, program.outputs, strict=True):
        if isinstance(value, Ref):
            if output.kind == "buffer":
                buffers[value.name] = str(output.target)
            else:
                users.add(value.name)
    return {name: target for name, target in buffers.items() if name not in users}


def is_of_library(found: Structure, unit: Unit) -> bool:
    """Returns whether the class of a part is of another package than the model's."""
    types = found.program.types
    packages = {types.get(path, "").partition(".")[0] for path in ("", unit.path)}
    return unit.parent is not None and len(packages) > 1


def local_name(found: Structure, target: str, path: str) -> str | None:
    """Returns the path of a submodule as seen from another one; None if it is outside of it.

    That of itself is empty.
    """
    if target == path:
        return ""
    for name in found.paths.get(target, [target]):
        for own in found.paths.get(path, [path]) if path else [""]:
            if not own:
                return name
            if name.startswith(f"{own}."):
                return name[len(own) + 1 :]
    return None


def _settle(found: Structure, units: list[Unit]) -> None:
    """Resolves values that torch has left out: results by their order, a single argument."""
    became: dict[str, str] = {}
    for unit in units:
        lost = [n for n in dict.fromkeys(refs_in((unit.part.result,))) if n.startswith("?")]
        told = set(refs_in((unit.part.result,)))
        free = [name for name in unit.gives if name not in told]
        if lost and len(lost) == len(free):
            became.update(zip(lost, free, strict=True))
    for unit in units:
        arguments = map_arguments(unit.part.arguments, _rename(became))
        lost = [n for n in dict.fromkeys(refs_in((arguments,))) if n.startswith("?")]
        told = set(refs_in((arguments,)))
        free = [n for n in unit.given if n not in told and not is_own(found, unit, n)]
        if len(lost) == len(free) == 1:
            became.update(zip(lost, free, strict=True))
    if became:
        for unit in units:
            unit.part = replace(
                unit.part,
                arguments=map_arguments(unit.part.arguments, _rename(became)),
                result=map_arguments(unit.part.result, _rename(became)),
            )
    calls = {call.name: call for call in found.root.calls()}
    for unit in units:
        told = {*refs_in((unit.part.arguments,))}
        written = {_before_writing(name, calls): name for name in unit.given if name not in told}
        became = {old: new for old, new in written.items() if old in told - {*unit.given}}
        if became and unit.parent is not None:
            arguments = map_arguments(unit.part.arguments, _rename(became))
            unit.part = replace(unit.part, arguments=arguments)


_WRITES = ("select_scatter", "slice_scatter", "diagonal_scatter")  # through a view


def _before_writing(name: str, calls: Mapping[str, Call]) -> str:
    """Returns the value that a tensor had before code wrote to parts of it."""
    while name in calls and calls[name].op.partition("::")[2].partition(".")[0] in _WRITES:
        name = calls[name].args[0].name
    return name


def _rename(names: Mapping[str, str]) -> Any:
    def rename(value: Any) -> Any:
        return Ref(names.get(value.name, value.name)) if isinstance(value, Ref) else value

    return rename


def is_array(found: Structure, name: str) -> bool:
    """Returns whether a value is an array that the model holds."""
    given = found.inputs.get(name)
    return given is not None and given.kind in ("parameter", "buffer", "constant")


def local_array(found: Structure, unit: Unit, name: str) -> str | None:
    """Returns the local path of an array of the unit's submodule; None for other values.

    A tied array is one of the submodule that has it first.
    """
    given = found.inputs.get(name)
    if given is None or given.kind not in ("parameter", "buffer"):
        return None
    target = str(given.target)
    if not unit.path:
        return target
    if target.startswith(f"{unit.path}."):
        return target[len(unit.path) + 1 :]
    holder, _, last = target.rpartition(".")
    within = local_name(found, holder, unit.path) if holder in found.paths else None
    return f"{within}.{last}" if within else None


def is_own(found: Structure, unit: Unit, name: str) -> bool:
    """Returns whether a unit has a value at hand: an array of its submodule's, or a constant."""
    given = found.inputs.get(name)
    if given is not None and given.kind == "constant":
        return True
    return local_array(found, unit, name) is not None


_MOST_FOREIGN = 2  # arrays of others that a unit may be given
_MOST_HIDDEN = 8  # values that a unit may give beside its result, as those for a cache


def _dissolve_unsound(found: Structure, dissolved: dict[str, str]) -> bool:
    """Dissolves the first unit that cannot stand alone; returns whether there was one."""
    changed = {
        value.name
        for value, output in zip(found.program.graph.outputs, found.program.outputs, strict=True)
        if output.kind != "user" and isinstance(value, Ref)
    }
    for unit in found.root.units():
        if not unit.gives and not _acts(unit, changed):
            dissolved[unit.name] = "what it computes is not used"
            dissolve(unit)
            return True
        told = set(refs_in((unit.part.result,)))
        hidden = [name for name in unit.gives if name not in told]
        if len(hidden) > _MOST_HIDDEN and told & set(_names(unit)):
            dissolved[unit.name] = "others read its intermediate values"
            dissolve(unit)
            return True
        foreign = [n for n in unit.given if is_array(found, n) and not is_own(found, unit, n)]
        if len(foreign) > _MOST_FOREIGN:
            dissolved[unit.name] = "it computes with arrays of others"
            dissolve(unit)
            return True
        callers = unit.parent.path if unit.parent is not None else ""
        if local_name(found, unit.path, callers) is None:
            parent = unit.parent
            assert parent is not None
            dissolved[parent.name] = f"it calls {unit.path}, which is not a part of it"
            dissolve(parent)
            return True
    return False


def _acts(unit: Unit, changed: set[str]) -> bool:
    """Returns whether a unit has side effects: checks, or changes of buffers."""
    return any(
        call.name in changed or call.op.partition("::")[2].startswith("_assert")
        for call in with_inner([*unit.calls()])
    )
