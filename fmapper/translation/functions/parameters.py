"""The parameters of the function that a unit becomes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.programs.program import Call, Program, refs_in
from fmapper.programs.treespec import Ref, Size, TreeSpec
from fmapper.translation.code import identifier, literal, text
from fmapper.translation.functions.forms import Argument, Form
from fmapper.translation.naming import targets
from fmapper.translation.units import (
    Structure,
    Unit,
    is_array,
    is_of_library,
    local_array,
    refs_of,
)

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect
    from fmapper.translation.scans.derivatives import Enclosing

_FIXED = bool | int | float | str | None


class Parameters:
    """Finds the parameters of units.

    Attributes:
        hints: The names that values got elsewhere.
        varying: Classes of submodules, with arguments that are other numbers in each of them.
        enclosing: The function whose derivative is written.
    """

    enclosing: Enclosing | None = None
    _variables: dict[str, str] | None = None
    _structure: Structure
    _dialect: Dialect
    _forms: Mapping[int, Form]
    hints: dict[str, str]
    varying: Collection[tuple[str, str]]

    @property
    def program(self) -> Program:
        """The program."""
        return self._structure.program

    def reserved_names(self) -> frozenset[str]:
        """Returns the names that mean something else in the file."""
        return self._dialect.reserved_names()

    def _parameters(self, unit: Unit) -> tuple[tuple[Argument, ...], set[str]]:
        """Returns the parameters of a unit in the order of the source's, and the values it needs.

        Those that its code does not use are among them: it is given them, too.
        """
        wanted = {
            value
            for value in unit.given
            if not self._is_constant(value) and not local_array(self._structure, unit, value)
        }
        found: list[Argument] = []
        names: set[str] = set()
        held: set[str] = set()
        reserved = self._dialect.reserved_names()
        reserved |= {"key"} if self._dialect.passes_keys else set()
        arguments = unit.part.arguments
        kind = self._structure.program.types.get(unit.path, "").rpartition(".")[2]
        has_no_names = kind == "Sequential" or is_of_library(self._structure, unit)
        if [*arguments] == ["input"] and has_no_names:
            arguments = {"x": arguments["input"]}
        for at, (key, structure) in enumerate(arguments.items()):
            argument = Argument(identifier(key, names | reserved), structure, at)
            argument.kind = self._kind(unit, key, structure, wanted, held)
            if argument.kind == "twin":
                twins = [one.name for one in found if one.structure == structure]
                argument.kind, argument.twin = ("twin", twins[0]) if twins else ("", "")
            if argument.kind:
                found.append(argument)
                names.add(argument.name)
            if argument.kind == "used":
                held |= {*refs_in((structure,))} & wanted
        needed = self._find_needed(unit)
        for value in unit.given:
            if value in wanted - held and value in needed:
                extra = self._extra(unit, value, names)
                at = [*arguments].index(extra) if extra in arguments else len(arguments)
                found.append(Argument(extra, Ref(value), at, "used"))
                names.add(extra)
        return tuple(sorted(found, key=lambda one: one.at)), wanted

    def _kind(self, unit: Unit, key: str, structure: Any, wanted: set[str], held: set[str]) -> str:
        """Returns the kind of an argument; empty for one that the function does not take."""
        values = {*refs_in((structure,))}
        needs = values & wanted
        is_varying = (self._structure.program.types.get(unit.path, ""), key) in self.varying
        if needs - held:
            return "used"
        if needs:
            return "twin" if isinstance(structure, Ref) else ""
        if values:
            is_own = any(
                local_array(self._structure, unit, value) or self._is_constant(value)
                for value in values
            )
            return "" if is_own or is_varying or unit.parent is None else "unused"
        if isinstance(structure, Size):
            return "size"
        is_fixed = isinstance(structure, _FIXED) and (
            not isinstance(structure, float) or structure - structure == 0
        )
        by_keyword = [*unit.part.arguments][unit.part.positional :]
        is_option = is_of_library(self._structure, unit) and key in by_keyword
        return "fixed" if is_fixed and not is_varying and not is_option else ""

    def _size_parameter(
        self, arguments: tuple[Argument, ...], symbol: str, known: Collection[str]
    ) -> dict[str, str]:
        """Returns a size that a unit is given, and its name: the argument with it, if there is one.

        Args:
            arguments: What it is given.
            symbol: What is unknown in it.
            known: The sizes that it is given already.
        """
        for argument in arguments:
            size = argument.structure
            if argument.kind != "size" or size.expression in known:
                continue
            if symbol in re.findall(r"[A-Za-z_]\w*", size.expression):
                return {size.expression: argument.name}
        return {symbol: self._name_of_size(symbol, {one.name for one in arguments})}

    def _name_of_size(self, symbol: str, taken: Collection[str]) -> str:
        """Returns the name of a size that is an argument: what the model's inputs call it."""
        for given in self._structure.inputs.values():
            if symbol in given.shape and given.kind == "user":
                at = given.shape.index(symbol)
                return identifier(self.size_name(symbol, at, len(given.shape)), taken)
        return symbol

    def size_name(self, symbol: str, at: int, ndim: int) -> str:
        """Names a varying size."""
        raise NotImplementedError

    def _find_needed(self, unit: Unit) -> set[str]:
        """Returns the values that a unit uses; a layer with dropout needs no key."""
        found = {*unit.gives, *refs_in(self._structure.program.graph.outputs)}
        for step in reversed(unit.steps):
            if isinstance(step, Call):
                layer = self._dialect.layer_of_call(self._structure, unit, step)
                checks = step.op.partition("::")[2].startswith("_assert")
                if step.name in found or checks or (layer and found & {*layer.gives()}):
                    found.update(refs_of(step))
            else:
                form = self._forms[id(step)]
                given = tuple(structure for _, structure in form.given)
                found.update(form.layer.inputs if form.layer else refs_in(given))
        return found

    def _extra(self, unit: Unit, value: str, taken: set[str]) -> str:
        given = self._structure.inputs.get(value)
        if given is not None and is_array(self._structure, value):
            return identifier("_".join(str(given.target).split(".")[-2:]), taken)
        plain = self._names_of_source().get(value) or re.sub(r"_\d+$", "", value)
        if unit.parent is not None:  # which says less of where it is in the model's argument
            plain = re.sub(r"_field\d+$", "", plain)
        return identifier(self.hints.get(value) or plain or value, taken)

    def _names_of_source(self) -> dict[str, str]:
        """Maps the values that statements of the source assign to variables to those."""
        if self._variables is None:
            calls = self._structure.program.graph.calls
            last = {(call.source, call.module): call.name for call in calls}
            lines = self._structure.program.lines
            found = {name: targets(lines.get(at[0], "")) for at, name in last.items()}
            self._variables = {name: one[0] for name, one in found.items() if len(one) == 1}
        return self._variables

    def _is_constant(self, value: str) -> bool:
        given = self._structure.inputs.get(value)
        return given is not None and given.kind in ("constant", "static")


def takes_first(unit: Unit, inputs: Sequence[str]) -> bool:
    """Returns whether the only input of a layer is the first argument of a submodule.

    One that is called with something else before cannot be that layer: it would take that.
    """
    given = [*unit.part.arguments.values()]
    others = {*refs_in(tuple(given[1:]))}
    return len(inputs) != 1 or given[:1] == [Ref(inputs[0])] or inputs[0] not in others


def find_varying(structure: Structure) -> set[tuple[str, str]]:
    """Returns the arguments that are other numbers for each submodule of a class, or grow.

    Returns:
        The class, and the name of the argument.
    """
    types = structure.program.types
    found: dict[tuple[str, str], dict[str, set[Any]]] = {}
    for unit in structure.root.units():
        for key, given in unit.part.arguments.items():
            is_many = isinstance(given, tuple | Mapping)  # it may grow from call to call
            value = len(given) if is_many else given
            if isinstance(value, int | float) and not isinstance(value, bool):
                by_path = found.setdefault((types.get(unit.path, ""), key), {})
                by_path.setdefault(unit.path, set()).add(value)
    return {one for one, by_path in found.items() if len({*map(frozenset, by_path.values())}) > 1}


def sign(
    unit: Unit, arguments: tuple[Argument, ...], sizes: Mapping[str, str]
) -> tuple[Argument, ...]:
    """Returns the signature of a unit: which arguments may be omitted, and which have a keyword.

    Args:
        unit: The unit.
        arguments: What it is given, in order.
        sizes: The sizes that its code needs -> the names of their parameters.
    """
    part = unit.part
    of_size = {one.name for one in arguments if one.kind == "size"}
    taken = [one for one in arguments if one.kind != "size" or one.name in sizes.values()]
    taken += [
        Argument(name, Size(size), len(part.arguments), "size")
        for size, name in sizes.items()
        if name not in of_size
    ]
    omitted = (
        {"fixed"} if unit.parent else {"fixed", "twin"}
    )  # by callers; not what a part is given
    required = [one.at for one in taken if one.kind not in omitted and one.at < part.positional]
    last = max(required, default=-1)
    expected, has_defaults, by_keyword = 0, False, False
    for one in taken:
        by_keyword = by_keyword or part.prefix <= one.at < len(part.arguments)
        by_keyword = by_keyword or (one.at != expected and one.at < len(part.arguments))
        expected = one.at + 1
        one.has_default = one.kind in omitted and (by_keyword or one.at > last)
        by_keyword = by_keyword or (has_defaults and not one.has_default)
        has_defaults = has_defaults or one.has_default
        one.by_keyword = by_keyword
    return tuple(taken)


def by_position(unit: Unit, arguments: tuple[Argument, ...]) -> tuple[str, ...]:
    """Returns the parameters for what a unit was given by position; empty for what it ignores."""
    names = {one.at: one.name for one in arguments}
    return tuple(names.get(at, "") for at in range(unit.part.positional))


def leaves_in_objects(structure: Structure, arguments: tuple[Argument, ...]) -> dict[str, int]:
    """Returns the parameters of a model for arrays in objects, and which input each is.

    Arrays in dicts that no part is given, as the random keys of Linen, have the names of these.
    """
    beside = len(structure.root.part.arguments)
    positional, keyword = structure.program.in_spec.children
    specs = (*positional.children, *keyword.children)
    in_objects = [_has_object(spec) for spec in specs for _ in spec.leaf_paths()]
    given = {
        one.name: structure.inputs.get(one.structure.name)
        for one in arguments
        if one.at >= beside and isinstance(one.structure, Ref)
    }
    places = {n: int(str(one.target)) for n, one in given.items() if one and one.kind == "user"}
    return {name: at for name, at in places.items() if in_objects[at]}


def _has_object(spec: TreeSpec) -> bool:
    return spec.kind == "record" or any(map(_has_object, spec.children))


def print_signature(arguments: tuple[Argument, ...]) -> tuple[str, ...]:
    """Returns the parameters as code.

    Examples:
        >>> x, mask = Argument("x", Ref("x"), 0, "used"), Argument("mask", Ref("m"), 2, "used")
        >>> scale = Argument("scale", 1.0, 1, "fixed", has_default=True)
        >>> mask.by_keyword = True
        >>> print_signature((x, scale, mask))
        ('x', 'scale=1.0', '*', 'mask')
    """
    found: list[str] = []
    for one in arguments:
        if one.by_keyword and "*" not in found:
            found.append("*")
        default = None if one.kind == "twin" else one.structure
        found.append(f"{one.name}={text(literal(default))}" if one.has_default else one.name)
    return tuple(found)
