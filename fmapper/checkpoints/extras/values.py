"""Numbers and texts of checkpoints, and their places in a tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from fmapper.backends.discovery import adapters
from fmapper.backends.models import Models
from fmapper.backends.nodes import Nodes
from fmapper.checkpoints.lazy import LazyArray
from fmapper.files.untrusted import show
from fmapper.tree.fmap import fmap_with_path
from fmapper.tree.keypath import KeyPath, name_of
from fmapper.tree.nodes import CONTAINERS, NodeType
from fmapper.tree.walk import visit

T = TypeVar("T")
VALUES = (bool, int, float, str)


def is_value(leaf: Any) -> bool:
    """Returns whether a leaf is a number or text that checkpoints keep."""
    return type(leaf) in VALUES


def values_in(tree: Any) -> dict[str, Any]:
    """Returns the numbers and texts of a tree by name."""
    return {
        name_of(link): leaf
        for link, leaf, node_type in visit(tree)
        if node_type is None and is_value(leaf)
    }


def with_values(tree: T, values: Mapping[str, Any]) -> T:
    """Returns a tree with other numbers and texts, by name; keeps those without a new value."""

    def value(path: KeyPath, leaf: Any) -> Any:
        if not is_value(leaf):
            return leaf
        new = values.get(name_of(path), leaf)
        return bool(new) if type(leaf) is bool else new  # formats without bools have 0 and 1

    return fmap_with_path(value, tree)


def number_as_array(number: Any, shape: tuple[int, ...], dtype: str) -> LazyArray | None:
    """Converts a number to a scalar array of a tree's shape and dtype; None if its kind differs."""
    import numpy as np

    if shape or isinstance(number, str):
        return None
    if dtype == "bool":
        return LazyArray.of(np.bool_(number)) if number in (0, 1) else None
    if type(number) is float and dtype.startswith(("float", "bfloat")):
        return LazyArray.of(np.float64(number)).astype(dtype)
    is_whole = type(number) is int and dtype.startswith(("int", "uint"))
    return LazyArray.of(np.int64(number)) if is_whole and -(2**63) <= number < 2**63 else None


def array_as_number(array: LazyArray, number: Any) -> Any:
    """Converts a scalar array to a number of the same kind as another; None if it is not one."""
    kinds: dict[type, tuple[str, ...]] = {
        bool: ("bool",),
        int: ("int", "uint"),
        float: ("float", "bfloat"),
    }
    kind = kinds.get(type(number))
    if array.shape or kind is None or not array.dtype.name.startswith(kind):
        return None
    return type(number)(array.read()[()])


def find_clashes(
    checkpoint: Mapping[str, Any], values: Mapping[str, Any], arrays: Collection[str]
) -> Iterator[str]:
    """Describes the names under which checkpoint and tree have values of different kinds.

    Args:
        checkpoint: Arrays, numbers and texts by name.
        values: The numbers and texts of the tree by name.
        arrays: The names of its arrays.
    """
    for name, stored in checkpoint.items():
        if is_value(stored) and name in arrays:
            yield f"{name}: {show(stored)} in the checkpoint, an array in the tree"
        elif name in values and isinstance(stored, LazyArray):
            yield f"{name}: an array in the checkpoint, {show(values[name])} in the tree"
        elif name in values and not _fits(stored, values[name]):
            yield f"{name}: {show(stored)} in the checkpoint, {show(values[name])} in the tree"


def _fits(stored: Any, value: Any) -> bool:
    """Returns whether a stored number or text can take the place of another one."""
    if isinstance(stored, str) or isinstance(value, str):
        return type(stored) is type(value)
    return type(value) is not bool or stored in (0, 1)  # some formats have no bools


def missing_values(
    checkpoint: Mapping[str, Any],
    values: Mapping[str, Any],
    tree: Any,
    objects: Collection[str],
) -> list[str]:
    """Returns the names of numbers and texts that a checkpoint of a tree would have.

    In plain containers these are all that the checkpoint lacks. The fields of an object may be
    settings, which files of other libraries lack: they are missing only if the checkpoint has some
    of them, but not all.

    Args:
        checkpoint: Arrays, numbers and texts by name.
        values: The numbers and texts of the tree by name.
        tree: The tree.
        objects: The names of objects that were saved with all of their fields.
    """
    absent = [name for name in values if name not in checkpoint]
    if not absent:
        return []
    nodes = _names_of_nodes(tree, lambda node: not isinstance(node, CONTAINERS))
    stored = (name for name, value in checkpoint.items() if is_value(value))
    saved = {above for name in stored for above in _places_above(name)} | {*objects}

    def is_setting(name: str) -> bool:
        holder = next((above for above in _places_above(name) if above in nodes), None)
        return holder is not None and holder not in saved

    return [name for name in absent if not is_setting(name)]


def names_of_objects(tree: Any) -> set[str]:
    """Returns the names of the objects of a tree that have numbers and texts as children."""
    return _names_of_nodes(
        tree, lambda node: not isinstance(node, CONTAINERS) and not _holds_arrays_alone(node)
    )


def leftover_values(checkpoint: Mapping[str, Any], names: Collection[str], tree: Any) -> list[str]:
    """Returns the names of stored numbers and texts for which a tree has no place.

    Other libraries may have saved settings below modules that have only arrays as children: these
    are not left over.
    """
    left = [name for name, value in checkpoint.items() if is_value(value) and name not in names]
    modules = _names_of_nodes(tree, _holds_arrays_alone) if left else set()
    return [name for name in left if modules.isdisjoint(_places_above(name))]


def _names_of_nodes(tree: Any, is_kind: Callable[[Any], bool]) -> set[str]:
    return {
        name_of(link)
        for link, node, node_type in visit(tree)
        if isinstance(node_type, NodeType) and is_kind(node)
    }


def _places_above(name: str) -> Iterator[str]:
    """Yields the names of the nodes above a leaf, the nearest first, without the root."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _holds_arrays_alone(node: Any) -> bool:
    """Returns whether a node is a converted model, or a module whose numbers are not children."""
    return any(adapter.program_of(node) is not None for adapter in adapters(Models)) or any(
        adapter.node_type(type(node)) is not None for adapter in adapters(Nodes)
    )
