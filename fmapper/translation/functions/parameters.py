"""The parameters of the function that a unit becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fmapper.programs.program import Call, refs_in
from fmapper.programs.treespec import Ref, Size
from fmapper.translation.code import identifier
from fmapper.translation.functions.forms import Form
from fmapper.translation.units import Structure, Unit, is_array, local_array, refs_of

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect


class Parameters:
    """Finds the parameters of units.

    Attributes:
        hints: The names that values got elsewhere.
    """

    _structure: Structure
    _dialect: Dialect
    _forms: Mapping[int, Form]
    hints: dict[str, str]

    def _parameters(self, unit: Unit) -> tuple[tuple[tuple[str, Any], ...], set[str]]:
        """Returns the parameters of a unit, each with the structure of values that it takes."""
        wanted = {
            value
            for value in unit.given
            if not local_array(self._structure, unit, value) and not self._is_constant(value)
        }
        found: list[tuple[str, Any]] = []
        taken: set[str] = set()
        arguments = unit.part.arguments
        if [*arguments] == ["input"]:  # as `nn.Sequential` calls it
            arguments = {"x": arguments["input"]}
        for key, structure in arguments.items():
            values = [v for v in refs_in((structure,)) if v in wanted]
            if values and not {*values} <= taken:
                taken_names = {k for k, _ in found} | self._dialect.reserved_names()
                taken_names |= {"key"} if self._dialect.passes_keys else set()
                found.append((identifier(key, taken_names), structure))
                taken.update(values)
        needed = self._find_needed(unit)
        for value in unit.given:
            if value in wanted - taken and value in needed:
                found.append((self._extra(value, {k for k, _ in found}), Ref(value)))
        return tuple(found), wanted

    def _size_parameter(
        self, unit: Unit, symbol: str, known: set[str], taken: set[str]
    ) -> dict[str, str]:
        """Returns a size that a unit is given, and its name: the argument with it, if there is one.

        Args:
            unit: The unit.
            symbol: What is unknown in it.
            known: The sizes that it is given already.
            taken: The names of its parameters.
        """
        for key, size in unit.part.arguments.items():
            if not isinstance(size, Size) or size.expression in known:
                continue
            if symbol in re.findall(r"[A-Za-z_]\w*", size.expression):
                reserved = self._dialect.reserved_names() | {"key"}
                return {size.expression: identifier(key, taken | reserved)}
        return {symbol: symbol}

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

    def _extra(self, value: str, taken: set[str]) -> str:
        given = self._structure.inputs.get(value)
        if given is not None and is_array(self._structure, value):
            return identifier("_".join(str(given.target).split(".")[-2:]), taken)
        return identifier(self.hints.get(value) or re.sub(r"_\d+$", "", value), taken)

    def _is_constant(self, value: str) -> bool:
        given = self._structure.inputs.get(value)
        return given is not None and given.kind in ("constant", "static")
