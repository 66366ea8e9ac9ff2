"""The calls of parts and layers in one function."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.programs.program import Call, map_arguments, refs_in
from fmapper.programs.treespec import Ref, Size
from fmapper.translation import naming
from fmapper.translation.code import Value, attribute, expr, literal, name, text
from fmapper.translation.functions.forms import (
    Argument,
    Body,
    Form,
    Made,
    at,
    is_flat,
    objects_in,
    places,
    tuples_in,
)
from fmapper.translation.guards.sizes import Sizes
from fmapper.translation.units import Structure, Unit, local_name

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect, Layer
    from fmapper.translation.functions.bodies import BodyWriter


class Calls:
    """Writes the calls of parts and layers."""

    _structure: Structure
    _unit: Unit
    _dialect: Dialect
    _writer: BodyWriter
    _within: dict[str, tuple[str, ...]]
    _arguments: tuple[Argument, ...]
    _body: Body
    _carried: list[tuple[Any, str]]
    _env: dict[str, Value]
    _left: Counter[str]
    _names: naming.Names
    _wholes: list[tuple[Any, ast.expr]]
    _wanted: set[str]
    _objects: list[tuple[Made, ast.expr]]
    _passed: dict[int, set[str]]
    _sizes: Sizes
    _counted: set[str]
    keys: int
    _bind: Callable[[str, ast.expr], None]
    _define: Callable[[str, ast.expr, str, str], None]
    _emit: Callable[..., None]
    _hold_size: Callable[[str, str], None]
    _line: Callable[[str], str]
    _new_name: Callable[..., str]
    _print_structure: Callable[[Any], ast.expr]
    _use: Callable[[str], ast.expr]

    def _layer_call(self, call: Call, layer: Layer) -> None:
        attr = self._writer.places[call.name]
        self._body.layers[attr] = layer
        node = self._call_layer(expr(attribute("self", attr)), layer)
        self._define(layer.output, node, call.source, call.op)

    def _call_layer(self, target: ast.expr, layer: Layer) -> ast.Call:
        inputs = [self._use(value) for value in layer.inputs]
        count = len(inputs) - len(layer.names)
        keywords = [
            *(ast.keyword(*pair) for pair in zip(layer.names, inputs[count:], strict=True)),
            *(ast.keyword(name, literal(value)) for name, value in layer.options.items()),
        ]
        return self._call_part(target, inputs[:count], layer.draws, keywords)

    def _child(self, unit: Unit) -> None:
        form = self._writer._forms[id(unit)]
        target = self._target(unit, form)
        if form.layer is not None:
            node = self._call_layer(target, form.layer)
            if form.layer.results:
                self._take_results(node, tuple(map(Ref, form.layer.results)), unit)
            else:
                self._define(form.layer.output, node, unit.part.source, "")
            return
        arguments: list[ast.expr] = []
        keywords: list[ast.keyword] = []
        for one in form.arguments:
            if one.has_default:
                continue
            code = self._print_structure(self._argument_for(unit, one))
            if one.by_keyword:
                keywords.append(ast.keyword(one.name, code))
            else:
                arguments.append(code)
        if not form.arguments:  # parts in order
            arguments = [self._print_structure(structure) for _, structure in form.given]
        node = self._call_part(target, arguments, self._writer.draws(unit), keywords)
        self._take_results(node, form.returns, unit)

    def _target(self, unit: Unit, form: Form) -> ast.expr:
        """Returns what is called for a unit: a part, a method of it, or a function of the file."""
        local = local_name(self._structure, unit.path, self._unit.path)
        assert local is not None
        target = expr(attribute("self", local) if local else "self")
        return ast.Attribute(target, form.method, ast.Load()) if form.method else target

    def _argument_for(self, unit: Unit, argument: Argument) -> Any:
        """Returns what a part is given: None for what it does not use and its caller has not."""
        if argument.kind != "unused":
            return argument.structure
        passed = self._passed.get(id(unit), set())
        return map_arguments(
            argument.structure,
            lambda v: None if isinstance(v, Ref) and v.name not in passed else v,
        )

    def _find_passed(self, steps: list[Any]) -> Iterator[tuple[Unit, list[str]]]:
        """Yields the parts with the values that they are given and do not use.

        Such a value is a parameter, or one that the function computes before for something else.
        """
        known = {value for one in self._arguments for value in refs_in((one.structure,))}
        made: set[str] = set()
        for step in steps:
            if isinstance(step, Call):
                made.add(step.name)
                continue
            given = [o.structure for o in self._writer._forms[id(step)].arguments
                     if o.kind == "unused"]  # fmt: skip
            yield (
                step,
                [
                    value
                    for value in refs_in(tuple(given))
                    if value in known or (value in made and self._left[value] > 0)
                ],
            )
            made.update(step.gives)

    def _call_part(
        self,
        target: ast.expr,
        arguments: list[ast.expr],
        draws: bool,
        keywords: Sequence[ast.keyword] = (),
    ) -> ast.Call:
        """Returns a call, with a key where it draws random numbers and the target takes keys."""
        if not (draws and self._dialect.passes_keys):
            return ast.Call(target, arguments, [*keywords])
        self.keys += 1
        return ast.Call(target, arguments, [*keywords, ast.keyword("key", expr("keys()"))])

    def _take_results(self, node: ast.expr, returns: Any, unit: Unit) -> None:
        """Binds the results of a unit: one value, or a structure."""
        source = unit.part.source
        if isinstance(returns, Ref):
            self._define(returns.name, node, source, "part::x")  # whatever it did last
            return
        new = [v for v in dict.fromkeys(refs_in((returns,))) if v in unit.gives]
        hinted = naming.targets(self._line(source))
        is_carried = isinstance(returns, tuple) and any(map(self._variable_of, returns))
        is_hinted = isinstance(returns, tuple) and len(hinted) == len(returns) > 1
        if is_flat(returns) or is_hinted or is_carried:
            targets = []
            bound: dict[str, str] = {}
            counted: dict[str, str] = {}
            held: list[tuple[Any, str]] = []  # structures, with the variables that hold them
            for i, one in enumerate(returns):
                fresh = isinstance(one, Ref) and one.name in new and one.name not in self._env
                fresh = fresh and one.name not in bound  # it may be there twice
                if fresh and self._left[one.name]:
                    wanted = hinted[i] if len(hinted) == len(returns) else ""
                    target = self._new_name(one.name, wanted)
                    targets.append(target)
                    self._names.holds[target] = one.name
                    bound[one.name] = target
                elif (carried := self._variable_of(one)) and carried not in targets:
                    targets.append(carried)
                    held.append((one, carried))
                elif isinstance(one, tuple | Mapping) and any(
                    self._left[v] and v not in self._env for v in refs_in((one,))
                ):
                    wanted = hinted[i].strip("_") if len(hinted) == len(returns) else ""
                    targets.append(self._new_name(f"{unit.name} {i}", wanted or "outputs"))
                    held.append((one, targets[-1]))
                elif isinstance(one, Size) and len(hinted) == len(returns) and hinted[i] != "_":
                    targets.append(self._names.choose(hinted[i], set()))
                    self._hold_size(targets[-1], one.expression)
                    counted[one.expression] = targets[-1]
                else:
                    targets.append("_")
            self._emit(tuple(targets), expr("{0}[0]", node) if len(targets) == 1 else node)
            for size, target in counted.items():
                self._sizes.call(size, name(target))
                self._counted.add(target)
            for value, target in bound.items():
                self._bind(value, name(target))
            for one, target in held:
                self._hold(one, target, f"{unit.name} {target}", new)
                self._within[f"{unit.name} {target}"] = tuple(refs_in((one,)))
            return
        variable = self._new_name(unit.name, hinted[0] if len(hinted) == 1 else "outputs")
        self._emit((variable,), node)
        self._hold(returns, variable, unit.name, new)
        self._within[unit.name] = tuple(refs_in((returns,)))

    def _variable_of(self, structure: Any) -> str:
        """Returns the variable in which a loop carries a tuple on; empty for others."""
        is_tuple = isinstance(structure, tuple)
        return next((v for one, v in self._carried if is_tuple and one == structure), "")

    def _bind_items(self, structure: Any, parameter: str) -> None:
        """Binds what is in a structure to the items of the parameter, which stays."""
        self._left[f"parameter {parameter}"] = 10**6
        for path, made in objects_in(structure):
            self._objects.append((made, at(name(parameter), path)))
        for path, value in places(structure):
            if value in self._wanted and value not in self._env:
                self._bind(value, at(name(parameter), path))

    def _hold(self, structure: Any, variable: str, held: str, new: list[str]) -> None:
        """Binds what is in a structure that a variable holds."""
        self._wholes = [one for one in self._wholes if text(one[1]) != variable]
        self._names.holds[variable] = held
        self._left[held] = 10**6  # it stays
        for path, value in places(structure):
            if value in new and value not in self._env:
                self._bind(value, at(name(variable), path))
        for path, made in objects_in(structure):
            self._objects.append((made, at(name(variable), path)))
        self._wholes += tuples_in(structure, name(variable))
