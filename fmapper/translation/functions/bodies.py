"""Writes one call of a submodule as the statements of a function."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.programs.program import Call, refs_in
from fmapper.programs.treespec import Ref
from fmapper.translation import naming
from fmapper.translation.code import (
    attribute,
    bare_condition,
    expr,
    identifier,
    is_true,
    literal,
    name,
    text,
)
from fmapper.translation.functions.calls import Calls
from fmapper.translation.functions.expressions import Expressions
from fmapper.translation.functions.flow import Flow
from fmapper.translation.functions.forms import (
    Argument,
    Body,
    Form,
    Statement,
    condition_on,
    is_flat,
    tuples_in,
)
from fmapper.translation.functions.keys import ordered_draws, take_keys
from fmapper.translation.functions.parameters import Parameters, print_signature, sign
from fmapper.translation.functions.shapes import (
    name_inputs,
    name_locally,
    name_place,
    name_sizes,
    shapes_of,
)
from fmapper.translation.functions.variables import Variables
from fmapper.translation.guards.expressions import is_code
from fmapper.translation.guards.sizes import Sizes, UnknownSize
from fmapper.translation.scans.derivatives import Enclosing, call_derived
from fmapper.translation.scans.steps import units_in, with_loops
from fmapper.translation.statements.origins import comments_on
from fmapper.translation.units import Structure, Unit, is_of_library, with_inner

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect, Layer


class BodyWriter(Parameters):
    """Writes the body of one unit, after the bodies of the units in it.

    Args:
        structure: The program.
        dialect: The target.
        forms: How the units in it are called.
        hints: The names that values got elsewhere.
        owners: The arrays that layers hold, with their places there.
        places: The layers that are single calls -> their paths from the unit.
        varying: Classes of submodules, with arguments that are other numbers in each of them.
        drawing: Paths and methods of units that take keys, which they may not need themselves.
    """

    def __init__(
        self,
        structure: Structure,
        dialect: Dialect,
        forms: Mapping[int, Form],
        hints: dict[str, str],
        owners: Mapping[str, tuple[str, tuple[int, ...] | None]],
        places: Mapping[str, str],
        varying: Collection[tuple[str, str]] = (),
        drawing: Collection[tuple[str, str]] = (),
    ) -> None:
        self.places = places
        self.varying, self._drawing = varying, drawing
        self._structure, self._dialect = structure, dialect
        self._forms = forms
        self.hints = hints
        self._owners = owners
        self._size_names = name_inputs(structure)  # of all functions
        self._local_names: dict[str, str] = {}  # of the one that is written

    def write(self, unit: Unit, returns: Any) -> Form:
        """Returns the form of a unit: its parameters, and its body.

        Args:
            unit: The unit.
            returns: The structure of what it gives.
        """
        arguments, bare = self._parameters(unit)
        given = tuple((one.name, one.structure) for one in arguments if one.kind == "used")
        sizes: dict[str, str] = {}
        named: frozenset[str] = frozenset()
        self._name_locally(unit, given)
        while True:
            signature = sign(unit, arguments, sizes)
            run = _Run(self, unit, signature, bare, sizes, named)
            try:
                body = run.write(returns)
            except UnknownSize as error:
                kept = {one for one in run.told_at_first if error.is_of(one)} - named
                if kept:
                    named |= kept  # what told it is gone: a variable of its own keeps it
                    continue
                if error.symbol in sizes:
                    raise ConversionError(f"{unit.path}: the size {error.symbol}") from None
                sizes |= self._size_parameter(arguments, error.symbol, {*sizes})
                continue
            often = run.often_asked()
            if not often <= named or run.reserved != self._dialect.reserved_names():
                named |= often
                continue
            if run.keys or (unit.path, unit.part.method) in self._drawing:
                take_keys(body, run.keys)
            shapes = shapes_of(self._structure.values, given, returns)
            body.shapes.append(name_sizes(shapes, self.size_name))
            return Form(None, body, "", given, returns, signature)

    def write_inner(self, structure: Structure, returns: Any, enclosing: Enclosing | None) -> Form:
        """Returns the form of a function that the file has beside the model."""
        writer = BodyWriter(structure, self._dialect, {}, {}, {}, {})
        writer.enclosing = enclosing
        return writer.write(structure.root, returns)

    def call_derived(self, call: Call, given: list[ast.expr], names: set[str]) -> ast.expr:
        """Returns the call of a function that has a derivative of its own."""
        return call_derived(call, given, self, self._dialect, names)

    def draws(self, unit: Unit) -> bool:
        """Returns whether a unit that is written draws random numbers."""
        form = self._forms[id(unit)]
        if form.layer is not None:
            return form.layer.draws
        if form.body is not None:
            return form.body.randoms
        return any(self.draws(step) for step in unit.steps if isinstance(step, Unit))

    def _name_locally(self, unit: Unit, given: Any) -> None:
        """Names the sizes of a function, without numbers where one has a name alone there."""
        values = [*refs_in(tuple(structure for _, structure in given)), *unit.given]
        for step in unit.steps:
            values += [step.name] if isinstance(step, Call) else step.gives
        known = [self._structure.values.get(value, ("", ()))[1] for value in values]
        self._local_names = name_locally(known, self._global_name)

    def size_name(self, symbol: str, at: int, ndim: int) -> str:
        """Names a size after the dimension where it first occurs, a symbol apart from others."""
        return self._local_names.get(symbol) or self._global_name(symbol, at, ndim)

    def _global_name(self, symbol: str, at: int, ndim: int) -> str:
        wanted = name_place(at, ndim)
        if not symbol.isidentifier():
            return wanted
        if symbol not in self._size_names:
            self._size_names[symbol] = identifier(wanted, set(self._size_names.values()))
        return self._size_names[symbol]


class _Run(Variables, Expressions, Flow, Calls):
    """One attempt to write a body."""

    def __init__(
        self,
        writer: BodyWriter,
        unit: Unit,
        arguments: tuple[Argument, ...],
        wanted: set[str],
        sizes: Mapping[str, str],
        named: frozenset[str],
    ) -> None:
        parameters = tuple(one.name for one in arguments)
        self.reserved = writer._dialect.reserved_names()
        self.keys = 0  # how many are given to what draws
        reserved = self.reserved | ({"key", "keys"} if writer._dialect.passes_keys else set())
        super().__init__(writer._structure, unit, writer, parameters, sizes, named, reserved)
        self._writer = writer
        self.owners = writer._owners
        self._dialect = writer._dialect
        self._body.parameters = print_signature(arguments)
        self._arguments = arguments
        self._size_parameters = sizes
        self._wanted = wanted
        self._returns: Any = None
        self._layers = self._find_layers()
        self._passed: dict[int, set[str]] = {}  # parts -> values that they do not use but are given
        self._carried: list[tuple[Any, str]] = []  # tuples of loops, and their variables
        self.told_at_first: frozenset[str] = frozenset()  # sizes that the parameters tell

    # --- what there is ------------------------------------------------------------------------

    def _find_layers(self) -> dict[str, Layer]:
        """Returns the layers among the own calls, by the name of the call."""
        found: dict[str, Layer] = {}
        for call in with_inner(self._unit.steps):
            if call.name in self._writer.places:
                layer = self._dialect.layer_of_call(self._structure, self._unit, call)
                assert layer is not None
                found[call.name] = layer
        return found

    def write(self, returns: Any) -> Body:
        self._returns = returns
        steps = with_loops(self._unit.steps)
        self._in_order = ordered_draws(self._unit, self._dialect.draws)
        self._count(steps, returns)
        self._take_parameters()
        if self._unit.parent is None:
            self._check_sizes()
        self._name_constants(self._constants())
        for step in steps:
            if isinstance(step, Call):
                self._call(step)
            else:
                self._child(step)
        self._mutations()
        result = self._print_structure(returns)
        last = self._body.statements[-1] if self._body.statements else None
        is_library = is_of_library(self._structure, self._unit)
        is_whole = is_library or (last is not None and last.origin.startswith("return "))
        if is_whole and last is not None and last.targets == (getattr(result, "id", None),):
            self._body.statements.pop()
            result = last.node
        made = next((s for s in steps if isinstance(s, Call) and Ref(s.name) == returns), None)
        origin = self._line(made.source) if made and not isinstance(result, ast.Name) else ""
        self._body.statements.append(Statement(None, result, origin=origin))
        self._check_arguments()
        self._drop_unused_sizes()
        self._drop_unused_statements()
        self._body.comments = comments_on(self._body.statements)
        return self._body

    def _count(self, steps: list[Any], returns: Any) -> None:
        """Counts how often each value is used, and by which steps."""

        def use(value: str, step: Any) -> None:
            self._left[value] += 1
            self._users.setdefault(value, []).append(step)

        for step in steps:
            if isinstance(step, Call):
                for call in with_inner([step]):
                    layer = self._layers.get(call.name)
                    refs = layer.inputs if layer else refs_in((call.args, call.kwargs))
                    for value in refs:
                        use(value, call)
                    for value in self._inputs_of(call):
                        use(value, call)
            for unit in units_in([step]):
                for value in self._pass_values(self._writer._forms[id(unit)], unit):
                    use(value, unit)
        for value in refs_in((returns,)):
            use(value, None)
        for value, _ in self._buffer_values():
            use(value, None)
        for unit, passed in self._find_passed(self._unit.steps):
            self._passed[id(unit)] = {*passed}
            for value in passed:
                use(value, unit)
        for step in steps:  # in a loop each round needs them
            for unit in units_in([step]) if isinstance(step, Call) else ():
                for value in self._passed.get(id(unit), ()):
                    use(value, step)

    def _buffer_values(self) -> Iterator[tuple[str, str]]:
        """Maps values to the buffers of this submodule that they update."""
        program = self._structure.program
        layered = {drop for layer in self._layers.values() for drop in layer.drops}
        own = {step.name for step in self._unit.steps if isinstance(step, Call)}
        path = f"{self._unit.path}." if self._unit.path else ""
        for value, output in zip(program.graph.outputs, program.outputs, strict=True):
            target = str(output.target)
            if output.kind != "buffer" or not isinstance(value, Ref) or value.name in layered:
                continue
            if value.name in own and target.startswith(path) and target not in self._writer._owners:
                yield value.name, target

    def _pass_values(self, form: Form, unit: Unit) -> Iterator[str]:
        """Returns the arguments of a unit's call."""
        if form.layer is not None:
            yield from form.layer.inputs
            return
        for one in form.arguments:
            if one.kind == "used" or (one.is_fixed and not one.has_default):
                yield from refs_in((one.structure,))
        if not form.arguments:  # parts in order
            yield from refs_in(tuple(structure for _, structure in form.given))

    def _take_parameters(self) -> None:
        self._bind_parameters()
        self.told_at_first = self._sizes.symbols()

    def _bind_parameters(self) -> None:
        for size, parameter in self._size_parameters.items():
            self._hold_size(parameter, size)
        for one in self._arguments:
            if one.kind != "size":
                self._names.holds[one.name] = f"parameter {one.name}"
        for one in self._arguments:
            parameter, structure = one.name, one.structure
            if one.kind not in ("used", "unused"):
                continue
            if isinstance(structure, Ref):
                self._bind(structure.name, name(parameter))
                self._names.holds[parameter] = structure.name
            elif is_flat(structure):
                self._wholes.append((structure, name(parameter)))
                if one.kind == "unused":
                    self._left[f"parameter {parameter}"] = 10**6
                    continue
                self._bind_items(structure, parameter)
            else:
                self._wholes += tuples_in(structure, name(parameter))
                self._bind_items(structure, parameter)

    def _call(self, call: Call) -> None:
        layer = self._layers.get(call.name)
        if layer is not None:
            self._layer_call(call, layer)
            return
        whole = call.args[0] if call.op == "sym::getitem" else None
        if isinstance(whole, Ref) and (call.name in self._env or whole.name in self._layers):
            return  # it was unpacked, or is nowhere
        if call.op.partition("::")[2].startswith("_assert"):
            self._assertion(call)
            return
        if call.op.startswith("flow::"):
            self._flow(call)
            return
        if self._left[call.name] <= 0:
            return  # a layer does what it was for
        node = self._print(call)
        count = len(call.result)
        picks = self._picks(call)
        if count > 1 and picks and len(picks) > 1:
            targets = ["_"] * count
            hinted = naming.targets(self._line(call.source))
            for pick in picks:
                index = int(pick.args[1])
                target = self._new_name(pick.name, hinted[index] if len(hinted) == count else "")
                self._names.holds[target] = pick.name
                targets[index] = target
            self._emit(tuple(targets), node, self._line(call.source))
            for pick in picks:
                target = targets[int(pick.args[1])]
                self._names.holds[target] = pick.name
                self._bind(pick.name, name(target))
                self._hints[pick.name] = target
            return
        if len(picks) == 1 and isinstance(node, ast.Tuple):
            self._define(picks[0].name, node.elts[int(picks[0].args[1])], call.source, call.op)
            return
        self._define(call.name, node, call.source, call.op)

    def _assertion(self, call: Call) -> None:
        condition = bare_condition(literal(self._argument(call.args[0])))
        if is_true(condition):
            return
        message = call.args[1] if len(call.args) > 1 else ""
        if not message:
            message = "this must hold, since it did for the examples of the model"
        self._body.statements.append(Statement((), self._dialect.check(condition, message)))

    def _check_arguments(self) -> None:
        """Writes the check of the arguments that have one value, or must not be None."""
        condition = condition_on(self._arguments)
        if condition is None:
            return
        at = int(text(self._body.statements[0].node).startswith("check_shapes("))
        self._body.statements.insert(at, Statement((), self._dialect.check(*condition)))

    def _check_sizes(self) -> None:
        """Writes the checks of the model's inputs: sizes, and decisions by them."""
        program = self._structure.program
        arrays = []
        sizes = Sizes({})
        for value, given in zip(program.graph.inputs, program.inputs, strict=True):
            if given.kind == "user" and given.is_array() and given.shape and value in self._env:
                words = [
                    self._size_word(size, i, given.shape) for i, size in enumerate(given.shape)
                ]
                arrays.append((self._env[value].node, words))
                sizes.learn(self._env[value])
        statements = []
        for guard in dict.fromkeys(program.guards):
            size = sizes.code(guard.expression)
            size = self._size(guard.expression) if isinstance(size, str) else size
            condition = expr(f"{{0}} {guard.relation} {{1}}", size, guard.value)
            if not any(isinstance(one, ast.Name) for one in ast.walk(condition)):
                continue  # of numbers alone, for which it was recorded
            message = guard.question.rpartition(" at ")[0] or guard.question
            message = text(condition) if is_code(message) else message
            statements.append(Statement((), self._dialect.check(condition, message)))
        if arrays:
            shapes = [(node, " ".join(words)) for node, words in arrays]
            statements.insert(0, Statement((), self._dialect.check_shapes(shapes)))
        names = {
            one.id for s in statements for one in ast.walk(s.node) if isinstance(one, ast.Name)
        }
        local = names & (self._names.holds.keys() - {one.name for one in self._arguments})
        at = 0 if not local else len(self._body.statements)
        self._body.statements[at:at] = statements

    def _size_word(self, size: int | str, at: int, shape: tuple[int | str, ...]) -> str:
        if isinstance(size, int):
            return str(size)
        return self._writer.size_name(size, at, len(shape)) if size.isidentifier() else "_"

    def _picks(self, call: Call) -> list[Call]:
        """Returns the calls that pick a result, if nothing else uses the whole."""
        users = self._users.get(call.name, [])
        picks = [u for u in users if isinstance(u, Call) and u.op == "sym::getitem"]
        return picks if len(picks) == len(users) else []

    def _mutations(self) -> None:
        """Writes the new values of buffers."""
        for value, target in self._buffer_values():
            local = target[len(self._unit.path) + bool(self._unit.path) :]
            self._body.arrays.setdefault(local, target)
            self._body.written.append(target)
            written = self._dialect.write_array(expr(attribute("self", local)), self._use(value))
            self._body.statements.append(written)
