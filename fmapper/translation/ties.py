"""The parts of a model that are at several places: its constructor sets them there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fmapper.programs.program import Program
from fmapper.translation.lists import with_names
from fmapper.translation.places import Node, common_path
from fmapper.translation.units import Structure, local_name


def with_called_names(program: Program) -> Program:
    """Returns a program whose parts have the names by which sequences call them.

    `self.bn1` may be nothing but a second name of the item of `nn.Sequential(conv, self.bn1)`: the
    file has the item, in the place where it is called.
    """
    called = {part.path for part in program.parts}
    others: dict[str, list[str]] = {}
    for path, first in program.first_paths.items():
        owner, _, last = path.rpartition(".")
        is_item = last.isdigit() and program.types.get(owner, "").endswith(".Sequential")
        if path != first and path in called and is_item:
            others.setdefault(first, []).append(path)
    renamed: dict[str, str] = {}
    for first in sorted(others):
        is_own = not any(f"{one}.".startswith(f"{first}.") for one in called)
        is_inside = any(first.startswith(f"{one}.") for one in renamed)
        if is_own and not is_inside and len(others[first]) == 1:
            renamed[first] = others[first][0]
    return _rename(program, renamed) if renamed else program


def _rename(program: Program, renamed: dict[str, str]) -> Program:
    def rename(path: str) -> str:
        for first, other in renamed.items():
            if path == first or path.startswith(f"{first}."):
                return other + path[len(first) :]
        return path

    held = (*program.parameters, *program.buffers)
    before = {name: rename(name) for name in held if rename(name) != name}
    made = with_names(program, rename)
    aliases = {other: name for other, name in made.aliases.items() if other != name} | before
    inner = made.evaluation and _rename(made.evaluation, renamed)
    return replace(made, aliases=aliases, evaluation=inner)


def tied_paths(structure: Structure) -> dict[str, str]:
    """Maps the other paths by which parts are called to those where they are."""
    found: dict[str, str] = {}
    for unit in structure.root.units():
        parent = unit.parent
        assert parent is not None
        called = local_name(structure, unit.path, parent.path)
        if not called:
            continue
        full = f"{parent.path}.{called}" if parent.path else str(called)
        if full != unit.path:
            found[full] = unit.path
    return found


def fill_tied(root: Node, structure: Structure) -> None:
    """Adds parts at their other paths, where objects of the same class have them too.

    Those objects are then constructed in the same way.
    """
    types = structure.program.types
    for full, path in tied_paths(structure).items():
        (here, _, name), (there, _, known) = full.rpartition("."), path.rpartition(".")
        owner, other = root.find(here), root.find(there)
        is_like = name == known and here in types and types[here] == types.get(there)
        if is_like and owner is not None and other is not None and name in other.children:
            children = {name: other.children[name], **owner.children}
            order = [one for one in other.children if one in children]  # of one class
            owner.children.clear()
            owner.children.update({one: children[one] for one in [*order, *children]})


def find_owner(root: Node, path: str, is_list: Callable[[Node], bool]) -> str:
    """Returns the innermost submodule around a path that is an object of a class.

    Args:
        root: The tree.
        path: The path.
        is_list: Returns whether a submodule is a list or a sequence.
    """
    node: Node | None = root
    owner = ""
    for step in path.split(".") if path else []:
        node = node.children.get(step) if node is not None else None
        if node is not None and not is_list(node):
            owner = node.path
    return owner


def ties_below(
    root: Node, structure: Structure, path: str, is_list: Callable[[Node], bool]
) -> dict[str, str]:
    """Maps the other paths of parts to those where they are, for what one constructor ties."""
    return {
        full: known
        for full, known in tied_paths(structure).items()
        if find_owner(root, common_path(full, known), is_list) == path
    }
