"""Paths of submodules, and of layers for which the model's code has no submodules."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fmapper.programs.program import refs_in
from fmapper.programs.reading.titles import class_name
from fmapper.programs.treespec import Ref
from fmapper.translation.code import identifier
from fmapper.translation.naming import singular
from fmapper.translation.units import Structure, Unit, is_own, local_array

if TYPE_CHECKING:
    from fmapper.programs.program import Program
    from fmapper.translation.dialect import Layer


@dataclass(slots=True)
class Node:
    """A place in the tree of submodules.

    Attributes:
        path: The path in the source.
        children: By the last part of their paths.
        layer: The layer that it is.
        array: The array that it is.
    """

    path: str
    children: dict[str, Node] = field(default_factory=dict)
    layer: Layer | None = None
    array: str = ""

    def find(self, path: str) -> Node | None:
        """Returns the place of a path below this one; None if there is none."""
        found: Node | None = self
        for step in path.split(".") if path else []:
            found = found.children.get(step) if found is not None else None
        return found


def place_of_layer(structure: Structure, unit: Unit, layer: Layer, taken: Container[str]) -> str:
    """Returns the path of a layer from the unit that calls it.

    That is the submodule itself if the layer has all of its arrays, else a part of it; one without
    arrays is an attribute of the unit.

    Args:
        structure: The program.
        unit: The unit.
        layer: The layer.
        taken: The paths of others there.
    """
    if not layer.arrays:
        return identifier(layer.name, taken)
    local = local_array(structure, unit, next(iter(layer.arrays))) or ""
    path = local.rpartition(".")[0]
    full = f"{unit.path}.{path}" if unit.path else path
    units = structure.root.units()
    is_called = any(one.path == full or one.path.startswith(f"{full}.") for one in units)
    if not path or is_called or path in taken:
        return identifier(layer.name, taken)
    program = structure.program
    arrays = {*program.parameters, *program.buffers}
    there = {name for name in arrays if name.startswith(f"{full}.")}
    held = {str(structure.inputs[array].target) for array in layer.arrays}
    if there <= held:
        return path
    if len(held) == 1 and _is_item_of_equal(program, *held):
        return local
    last = identifier(layer.name if layer.name != path.rpartition(".")[2] else "layer")
    while f"{path}.{last}" in taken or f"{full}.{last}" in there - held:
        last += "_"
    return f"{path}.{last}"


def _is_item_of_equal(program: Program, name: str) -> bool:
    """Returns whether an array is an item of a list of arrays of one shape."""
    owner, _, last = name.rpartition(".")
    arrays = {**program.parameters, **program.buffers}
    items = [array for one, array in arrays.items() if one.rpartition(".")[0] == owner]
    return last.isdigit() and len({tuple(one.shape) for one in items}) == 1


def title_of(kind: str, path: str) -> str:
    """Returns what the class of a submodule is called: a container is called after its place.

    Examples:
        >>> title_of("models.Block", "layers.0"), title_of("torch.nn.ModuleDict", "gpt.word_parts")
        ('Block', 'WordParts')
        >>> title_of("", "blocks.0"), title_of("nn.Module", "encoder.down.1")
        ('Block', 'Down')
    """
    name = kind.rpartition(".")[2]
    steps = [step for step in path.split(".") if step and not step.isdigit()]
    if name in ("", "Module", "ModuleDict", "Sequential") and steps:
        is_item = name in ("", "Module") and path.rpartition(".")[2].isdigit()
        is_item &= steps[-1].endswith("s")
        name = class_name(singular(steps[-1], "") if is_item else steps[-1])
    return identifier(name or "Model")


def is_item(path: str, owner: str) -> bool:
    """Returns whether a submodule is an item of a list or sequence."""
    parent, _, key = path.rpartition(".")
    return parent == owner and key.isdigit() and bool(owner)


def arrays_at(
    structure: Structure, layer: Layer, path: str
) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Maps the arrays of a layer at a path to where they are, and the order of their dimensions."""
    return {
        str(structure.inputs[array].target): (f"{path}.{attr}" if path else attr, order)
        for array, (attr, order) in layer.arrays.items()
    }


def is_chain(structure: Structure, unit: Unit) -> bool:
    """Returns whether a unit does nothing but call its items in order.

    Each is given what the one before it gives: one array, or a tuple of arrays.
    """

    def takes(one: Unit, value: Any) -> bool:
        given = [name for name in one.given if not is_own(structure, one, name)]
        return value is not None and bool(given) and {*given} <= {*refs_in((value,))}

    value, last = chain_value(structure, unit), -1
    if not unit.steps or not unit.gives or not takes(unit, value):
        return False
    for step in unit.steps:
        if not isinstance(step, Unit) or not is_item(step.path, unit.path) or step.part.method:
            return False
        at = int(step.path.rpartition(".")[2])
        arrays = [one for one in step.part.arguments.values() if [*refs_in((one,))]]
        if not takes(step, value) or len(arrays) > 1 or at <= last:
            return False
        if isinstance(value, tuple) and [*map(_as_tuples, arrays)] != [value]:
            return False
        value, last = _as_tuples(step.part.result), at
        if not _is_flat(value) or {*step.gives} != {*refs_in((value,))}:
            return False
    alike = value in (Ref(unit.gives[0]), _as_tuples(unit.part.result))
    return alike and {*unit.gives} == {*refs_in((value,))}


def chain_value(structure: Structure, unit: Unit) -> Any:
    """Returns what a unit that may be a chain is given: an array, or a tuple of arrays."""
    given = [name for name in unit.given if not is_own(structure, unit, name)]
    if len(given) == 1:
        return Ref(given[0])
    arrays = [one for one in unit.part.arguments.values() if [*refs_in((one,))]]
    value = _as_tuples(arrays[0]) if len(arrays) == 1 else None
    return value if _is_flat(value) else None


def chain_result(unit: Unit) -> Any:
    """Returns what a chain gives: what its last item does."""
    last = unit.steps[-1]
    assert isinstance(last, Unit)
    return _as_tuples(last.part.result)


def _is_flat(value: Any) -> bool:
    """Returns whether something is an array, or a tuple of arrays."""
    return all(isinstance(one, Ref) for one in (value if isinstance(value, tuple) else (value,)))


def _as_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return tuple(map(_as_tuples, value))
    return value


def class_at(program: Program, path: str) -> str:
    """Returns the name of the source's class of a submodule."""
    return program.types.get(path, "").rpartition(".")[2]


def at_place(steps: Iterable[str]) -> str:
    """Returns the code for the part of a module at attributes and indices.

    Examples:
        >>> at_place(("net", "0", "item_1"))
        'self.net[0].item_1'
    """
    return "self" + "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in steps)


def common_path(a: str, b: str) -> str:
    """Returns the path of the innermost common submodule."""
    found = []
    for one, other in zip(a.split("."), b.split("."), strict=False):
        if one != other:
            break
        found.append(one)
    return ".".join(found)


def differs_by_module(program: Program, target: str) -> bool:
    """Returns whether modules of the class that has an array have other values in its place."""
    owner, _, attr = target.rpartition(".")
    arrays = {**program.buffers, **program.parameters}
    peers = [path for path, kind in program.types.items() if kind == program.types.get(owner)]
    found = [arrays[f"{path}.{attr}"] for path in peers if f"{path}.{attr}" in arrays]
    own = arrays[target]
    return any(one.shape != own.shape or bool((one != own).any()) for one in found)


def size_of_array(array: Any) -> int:
    """Returns the number of elements of an array."""
    return math.prod(int(size) for size in array.shape)
