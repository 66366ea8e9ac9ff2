"""Masks that a part may be given None for."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from fmapper.programs.program import Call, refs_in
from fmapper.programs.treespec import Ref
from fmapper.translation.code import Value, expr, literal, text
from fmapper.translation.functions.forms import Argument, Body, Statement, mentions, optional_in
from fmapper.translation.guards.sizes import UnknownSize
from fmapper.translation.units import Structure, Unit

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect
    from fmapper.translation.functions.bodies import BodyWriter


class Masks:
    """Writes what a function does about masks that are None."""

    _structure: Structure
    _unit: Unit
    _dialect: Dialect
    _writer: BodyWriter
    _arguments: tuple[Argument, ...]
    _body: Body
    _env: dict[str, Value]
    _size_code: Callable[[int | str], ast.expr]
    optional: set[str]  # masks that may be None
    _passed_on: set[str]  # those among them that stay None

    def _fill_masks(self) -> None:
        """Writes the masks that None stands for, but for those that only others take."""
        for one in self._arguments:
            if not one.fill:
                continue
            if self._is_passed_on(one):
                self.optional.add(one.name)
                self._passed_on.add(one.name)
                continue
            shape = self._structure.values[one.structure.name][1]
            if one.fill == "causal" and shape[-1] != shape[-2]:
                continue
            try:
                sizes = tuple(self._size_code(size) for size in shape)
            except UnknownSize:
                continue
            if any(mentions(statement.node, one.name) for statement in self._body.statements):
                continue  # it tells a size
            if any(mentions(size, one.name) for size in sizes):
                continue
            code = expr(self._dialect.masks[one.fill], sizes, sizes[-2])
            block = [Statement((one.name,), code)]
            self._body.statements.append(
                Statement((), literal(None), ((f"if {one.name} is None", block),))
            )
            self.optional.add(one.name)

    def _is_passed_on(self, argument: Argument) -> bool:
        """Returns whether all that uses a mask does as well with None."""
        value = argument.structure.name
        for step in self._unit.steps:
            if isinstance(step, Call):
                if value in refs_in((step.args, step.kwargs)) and not (
                    argument.fill == "ones" and self._dialect.takes_no_mask(step, value)
                ):
                    return False
                continue
            form = self._writer._forms[id(step)]
            takers = [o for o in form.arguments if value in refs_in((o.structure,))]
            inputs = form.layer.inputs if form.layer is not None else ()
            if value in inputs or any(
                one.kind != "unused" and (one.structure, one.fill) != (Ref(value), argument.fill)
                for one in takers
            ):
                return False
            if (
                takers
                and form.body is not None
                and not {*form.body.terms.optional}
                >= {one.name for one in takers if one.kind != "unused"}
            ):
                return False
        return True

    def _find_needed_masks(self) -> set[str]:
        """Returns the masks that must not be None: others need them, or the code their sizes."""
        statements = [*self._body.walk()]
        told = {
            name
            for name in self._passed_on
            if any(f"{name}.shape" in text(one.node) for one in statements)
        }
        self.optional -= told
        return (optional_in(self._body.statements) - self.optional) | told
