"""Writes a program as a file: its classes, and the loading of their arrays."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.programs.program import Program, refs_in
from fmapper.translation.classes import Classes, Method, Sketch, combine_modes, refusal, with_masks
from fmapper.translation.code import attribute_name, expr, identifier, literal, text
from fmapper.translation.functions import changes, results
from fmapper.translation.functions.bodies import BodyWriter
from fmapper.translation.functions.forms import Body, Form, objects_in
from fmapper.translation.functions.keys import attributes_for, units_that_draw
from fmapper.translation.functions.parameters import (
    by_position,
    find_varying,
    leaves_in_objects,
    takes_first,
)
from fmapper.translation.loading import weights_of
from fmapper.translation.places import (
    Node,
    arrays_at,
    at_place,
    chain_result,
    chain_value,
    class_at,
    differs_by_module,
    is_chain,
    is_item,
    place_of_layer,
    size_of_array,
    title_of,
)
from fmapper.translation.source_file import Source
from fmapper.translation.statements.shared_values import with_own_values
from fmapper.translation.ties import fill_tied, ties_below
from fmapper.translation.units import Unit, structure_of, uses_of, with_inner

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect, Layer


def write(
    program: Program,
    dialect: Dialect,
    *,
    evaluation: Program | None = None,
) -> Source:
    """Writes a program with its parts as source code.

    Args:
        program: The program.
        dialect: The dialect of the target.
        evaluation: What the model does in evaluation, where that is another program.

    Raises:
        ConversionError: There is something in it that cannot be written.
    """
    writer = _Writer(program, dialect)
    writer.write_bodies()
    if evaluation is not None:
        writer.evaluation = other = _Writer(evaluation, dialect)
        other.records, other.fixed = writer.records, writer.owners
        other.drawing = units_that_draw(writer.structure, writer.forms)
        other.write_bodies()
    return writer.file()


class _Writer:
    def __init__(self, program: Program, dialect: Dialect) -> None:
        self.program = program = with_own_values(program, dialect.draws)
        self.dialect = dialect
        self.structure = structure_of(program)
        self.forms: dict[int, Form] = {}
        self.hints: dict[str, str] = {}
        self.owners: dict[str, tuple[str, tuple[int, ...] | None]] = {}
        self.records: dict[str, dict[str, str]] = {}  # their fields, and what those are if no array
        self.bodies: dict[str, list[tuple[str, Body]]] = {}
        self.root = Node("")
        self.sequences: dict[str, int] = {}  # their paths -> how many parts they have
        self.places: dict[str, str] = {}  # calls that are layers -> where those are
        self.loaded: set[str] = set()  # arrays that the file does not have the values of
        self.evaluation: _Writer | None = None  # of another program for evaluation
        self.fixed: Mapping[str, Any] | None = None  # what training has the arrays of layers as
        self.drawing: frozenset[tuple[str, str]] = frozenset()  # what takes keys in training

    # --- units --------------------------------------------------------------------------------

    def write_bodies(self) -> None:
        """Writes the functions, and finds all parts."""
        root = self.structure.root
        self._find_layers(root)
        self._find_sequences(root)
        self._claim_layers_of_calls(root)
        self._write_units(root)
        changes.refuse_lost(self.structure, self.forms, self.bodies, self.owners)
        self._build_tree()

    def _find_layers(self, root: Unit) -> None:
        """Finds the units that are layers of the target."""
        for unit in root.units():
            layer = self.dialect.layer_of_unit(self.structure, unit)
            if layer and takes_first(unit, layer.inputs) and self._can_claim(layer, unit.path):
                self.forms[id(unit)] = Form(layer)
        for units in root.by_path().values():  # all calls of a submodule, or none
            layers = [self.forms[id(unit)].layer for unit in units if id(unit) in self.forms]
            if len(layers) < len(units) or len({text(one.made) for one in layers if one}) > 1:
                for unit in units:
                    self.forms.pop(id(unit), None)
        for unit in root.units():  # not those in layers, whose steps are calls then
            form = self.forms.get(id(unit))
            if form is not None and form.layer is not None:
                self._claim(form.layer, unit.path)
                unit.steps = list(unit.calls())  # what is called inside is part of the layer

    def _claim(self, layer: Layer, path: str) -> None:
        self.owners |= arrays_at(self.structure, layer, path)

    def _can_claim(self, layer: Layer, path: str) -> bool:
        """Returns whether the arrays of a layer are in that layer in training, too."""
        held = arrays_at(self.structure, layer, path).items()
        return self.fixed is None or held <= self.fixed.items()

    def _find_sequences(self, root: Unit) -> None:
        """Finds the units that call their parts in sequence."""
        by_path = root.by_path()
        for path, units in by_path.items():
            called = {s.path for u in units for s in u.steps if isinstance(s, Unit)}
            alone = all(
                inner.startswith(f"{path}.") and uses_of(by_path[inner]) == len(units)
                for inner in called
            )
            chains = alone and all(is_chain(self.structure, unit) for unit in units)
            if chains and self.dialect.has_sequences:
                own = {*called, *(key for key in self.program.types if is_item(key, path))}
                self.sequences[path] = 1 + max(int(key.rpartition(".")[2]) for key in own)
                for unit in units:
                    given = (("x", chain_value(self.structure, unit)),)
                    self.forms[id(unit)] = Form(given=given, returns=chain_result(unit))

    def _claim_layers_of_calls(self, root: Unit) -> None:
        """Finds the layers among single calls, which then own their arrays."""
        uses: Counter[str] = Counter()
        for call in self.program.graph.walk():
            uses.update(refs_in((call.args, call.kwargs)))
        for unit in [root, *root.units()]:
            if id(unit) in self.forms:
                continue
            start = len(unit.path) + bool(unit.path)
            taken = {child.path[start:].partition(".")[0] for child in unit.units()}
            for step in with_inner(unit.steps):
                layer = self.dialect.layer_of_call(self.structure, unit, step)
                if layer and all(uses[a] == 1 for a in layer.arrays):
                    attr = place_of_layer(self.structure, unit, layer, taken)
                    path = f"{unit.path}.{attr}" if unit.path else attr
                    if self._can_claim(layer, path):
                        taken.add(attr)
                        self.places[step.name] = attr
                        self._claim(layer, path)

    def _write_units(self, root: Unit) -> None:
        """Writes the bodies, inner ones first; a submodule that is called twice has one class."""
        parts = (self.structure, self.dialect, self.forms, self.hints, self.owners, self.places)
        writer = BodyWriter(*parts, varying=find_varying(self.structure), drawing=self.drawing)
        whole = results.results_of(self.program, self.records)
        self.objects = [made for _, made in objects_in(whole)]
        root.part = results.with_given_objects(self.program, root.part, self.records)

        def visit(unit: Unit) -> None:
            form = self.forms.get(id(unit))
            if form is not None and form.layer is not None:
                return
            for step in unit.steps:
                if isinstance(step, Unit):
                    visit(step)
            if unit.path in self.sequences and self._takes_sizes(unit):
                del self.sequences[unit.path]
                others = [one for one in root.units() if one.path == unit.path]
                for one in others:
                    self.forms.pop(id(one), None)
            if unit.path in self.sequences:
                return
            form = writer.write(unit, self._returns(unit))
            assert form.body is not None
            form.method = self._method(unit, form, form.body)
            self.forms[id(unit)] = form

        visit(root)

    def _takes_sizes(self, unit: Unit) -> bool:
        """Returns whether parts of a unit are given sizes, which parts of a sequence cannot be."""
        return any(
            isinstance(step, Unit) and self.forms[id(step)].takes_sizes for step in unit.steps
        )

    def _returns(self, unit: Unit) -> Any:
        if unit.parent is None:
            return results.results_of(self.program, self.records)
        return results.results_of_unit(unit, self.structure.root, self.objects)

    def _method(self, unit: Unit, form: Form, body: Body) -> str:
        """Returns the method of a body: that of an equal call, or a new one."""
        known = self.bodies.setdefault(unit.path, [])
        found = results.find_method(known, form)
        if found is not None:
            return found
        wanted = unit.part.method if unit.part.method not in self.dialect.own_methods() else ""
        method = identifier(wanted) if wanted else ""
        taken = {one for one, _ in known}
        if method in taken:
            method = identifier(wanted or "call", {wanted or "call", *taken})
        known.append((method, body))
        return method

    # --- the tree of submodules ---------------------------------------------------------------

    def _node(self, path: str) -> Node:
        node, walked = self.root, ""
        for step in path.split(".") if path else []:
            walked = f"{walked}.{step}" if walked else step
            node = node.children.setdefault(step, Node(walked))
        return node

    def _build_tree(self) -> None:
        """Builds the tree of layers and arrays."""
        for unit in self.structure.root.units():
            form = self.forms[id(unit)]
            if form.layer is not None:
                self._node(unit.path).layer = form.layer
            else:
                self._node(unit.path)
        for path, bodies in self.bodies.items():
            for _, body in bodies:
                for attr, layer in body.layers.items():
                    self._node(f"{path}.{attr}" if path else attr).layer = layer
                for local, target in body.arrays.items():
                    self._node(f"{path}.{local}" if path else local).array = target
        fill_tied(self.root, self.structure)

    # --- classes ------------------------------------------------------------------------------

    def file(self) -> Source:
        """Returns the file, after `write_bodies`."""
        made: dict[str, ast.expr] = {}
        known = Classes({*self.records, *self.dialect.reserved_names()})
        for node in self._parts(self.root):
            cls = known.add(self._sketch_modes(node, made))
            made[node.path] = self.dialect.make(cls)
        *_, root = classes = known.all()
        code = self.dialect.file(self, classes, root)
        modes = ("eval", "train") if self.program.train else ("eval",)
        weights, inside = weights_of(self), self._in_layers()
        own = self.forms[id(self.structure.root)].arguments
        names = tuple(one.name for one in own), by_position(self.structure.root, own)
        dissolved = self.structure.dissolved
        found = Source(code, root.name, weights, inside, dissolved, modes, *names)
        found.leaves = leaves_in_objects(self.structure, own)
        found.objects = {one.name: one.structure for one in own if any(objects_in(one.structure))}
        return found

    def _parts(self, node: Node) -> Iterator[Node]:
        """Yields the submodules below a place that have classes, inner ones first."""
        for child in node.children.values():
            yield from self._parts(child)
        if self._is_class(node):
            yield node

    def _is_class(self, node: Node) -> bool:
        return not (
            node.array
            or node.layer is not None
            or node.path in self.sequences
            or self._is_list(node)
            or self._as_mapping(node, dict.fromkeys(node.children, expr("None"))) is not None
        )

    def _as_mapping(self, node: Node, parts: Mapping[str, ast.expr]) -> ast.expr | None:
        """Returns parts by name that nobody calls as one, if the target has an object for them."""
        is_plain = class_at(self.program, node.path) == "ModuleDict" and bool(parts)
        named = {attribute_name(key): part for key, part in parts.items()}
        return self.dialect.mapping(named) if is_plain and node.path not in self.bodies else None

    def _is_list(self, node: Node) -> bool:
        return (
            bool(node.children)
            and node.path not in self.bodies
            and all(key.isdigit() for key in node.children)
        )

    def _is_sequence_or_list(self, node: Node) -> bool:
        return node.path in self.sequences or self._is_list(node)

    def _sketch_modes(self, node: Node, made: Mapping[str, ast.expr]) -> Sketch:
        """Returns the sketch of a submodule, with what it does in evaluation if that is another."""
        found = self._sketch(node, made)
        known = self.evaluation and self.evaluation.root.find(node.path)
        if self.evaluation and known:
            combine_modes(found, self.evaluation._sketch(known, made), self.dialect)
        return found

    def _sketch(self, node: Node, made: Mapping[str, ast.expr]) -> Sketch:
        kind = self.program.types.get(node.path, "")
        title = title_of(kind, node.path)
        if not node.path:
            title = identifier(self.program.name or title)
        sketch = Sketch(node.path, title)
        for key, child in node.children.items():
            sketch.made.append((attribute_name(key), self._make(child, made)))
        sketch.made += attributes_for(self.bodies.get(node.path, []))
        for method, body in self.bodies.get(node.path, []):
            taken = self.program.ones_like, body.parameters, body.lines()
            own, lines = with_masks(*taken, self.dialect)
            keys = ("key=None",) if "*" in own else ("*", "key=None")
            given = (*own, *(keys if body.randoms else ()))
            made_of = (given, lines, [*body.shapes], body.comments)
            sketch.methods.append(Method(method or "__call__", *made_of))
        sketch.ties = self._ties(node)
        return sketch

    def _make(self, node: Node, made: Mapping[str, ast.expr]) -> ast.expr:
        if node.layer is not None:
            return node.layer.made
        if node.array:
            return self._array(node.array)
        if node.path in made:
            return made[node.path]
        if node.path in self.sequences:
            return self.dialect.sequence(self._items(node, self.sequences[node.path], made))
        if self._is_list(node):
            items = self._items(node, 1 + max(map(int, node.children)), made)
            parts = [literal(None) if item is None else item for item in items]
            are_arrays = all(child.array for child in node.children.values())
            return self.dialect.arrays(parts) if are_arrays else self.dialect.parts(parts)
        found = self._as_mapping(node, {k: self._make(o, made) for k, o in node.children.items()})
        if found is None:  # it is a class in evaluation, and a layer in training
            raise refusal(node.path)
        return found

    def _items(self, node: Node, count: int, made: Mapping[str, ast.expr]) -> list[ast.expr | None]:
        found = (node.children.get(str(i)) for i in range(count))
        return [None if child is None else self._make(child, made) for child in found]

    def _array(self, target: str) -> ast.expr:
        program = self.program
        if target in program.parameters:
            array = program.parameters[target]
            if target not in program.frozen:
                return self.dialect.parameter(array)
        elif target in program.buffers:
            array = program.buffers[target]
        else:
            raise ConversionError(f"{target} is the state of a generator: it cannot be translated")
        varies = differs_by_module(program, target)
        saved = target not in program.transient
        if saved and self.dialect.is_loaded(array, varies=varies):
            self.loaded.add(target)
            return self.dialect.loaded_array(array)
        kind = "FrozenParam" if target in program.frozen else "Buffer"
        return self.dialect.frozen_array(array, kind=kind, saved=saved)

    def _ties(self, node: Node) -> list[str]:
        """Returns the statements that tie a submodule to its other paths."""
        start = len(self.place(node.path))
        pairs = ties_below(self.root, self.structure, node.path, self._is_sequence_or_list)
        places = ([at_place(self.place(one)[start:]) for one in pair] for pair in pairs.items())
        return [f"{mine} = {theirs}" for mine, theirs in places]

    def _arrays(self) -> dict[str, tuple[str, tuple[int, ...] | None]]:
        found = {path: (target, order) for target, (path, order) in self.owners.items()}
        for path, bodies in self.bodies.items():
            for _, body in bodies:
                for local, target in body.arrays.items():
                    found[f"{path}.{local}" if path else local] = (target, None)
        return found

    def place(self, path: str) -> tuple[str, ...]:
        """Returns the attributes and indices of a part's path."""
        found: list[str] = []
        node: Node | None = self.root
        for step in path.split(".") if path else []:
            indexed = node is not None and (node.path in self.sequences or self._is_list(node))
            indexed = (indexed and node is not self.root) or node is None or node.layer is not None
            found.append(step if indexed else attribute_name(step))
            node = node.children.get(step) if node is not None else None
        return tuple(found)

    def _in_layers(self) -> tuple[int, int]:
        sizes = {key: size_of_array(array) for key, array in self.program.parameters.items()}
        return sum(sizes[key] for key in self.owners if key in sizes), sum(sizes.values())
