"""Returns caches that a call has changed as objects of the caller's classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from fmapper.programs.bind import by_name, names_of_arguments
from fmapper.programs.program import Program
from fmapper.programs.treespec import TreeSpec
from fmapper.tree.nodes import NodeType, kind_of

Steps: TypeAlias = "tuple[Any, ...]"


class Echoes:
    """Outputs that have the class and structure of an argument.

    A program returns records in place of foreign classes. A cache that goes through a loop must
    keep its class: if the caller passed an object of the class, the output is one, too.

    Args:
        program: The program; each structure must belong to one argument and one output only.
    """

    def __init__(self, program: Program) -> None:
        positional, keyword = program.in_spec.children
        given = [
            *zip(names_of_arguments(program), positional.children, strict=True),
            *zip(keyword.keys, keyword.children, strict=True),
        ]
        arguments = [
            ((name, *steps), spec) for name, tree in given for steps, spec in _records(tree)
        ]
        outputs = [(steps, spec) for steps, spec in _records(program.out_spec, inner=True)]
        self._program = program
        self._pairs: list[tuple[Steps, Steps, TreeSpec]] = []
        for source, spec in arguments:
            same = [steps for steps, other in outputs if other == spec]
            if len(same) == 1 and sum(other == spec for _, other in arguments) == 1:
                self._pairs.append((source, same[0], spec))

    def put(self, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Replaces records in the output by objects of the caller's classes."""
        if not self._pairs:
            return output
        given = by_name(self._program, args, kwargs)
        for source, steps, spec in self._pairs:
            node = _at(given, source)
            kind = kind_of(type(node))
            if isinstance(kind, NodeType) and kind.pytree:
                output = _with(output, steps, node, spec)
        return output


def _records(
    spec: TreeSpec, *, inner: bool = False, steps: Steps = ()
) -> list[tuple[Steps, TreeSpec]]:
    """Returns the records in builtin containers and, with `inner`, in other records."""
    records = [(steps, spec)] if spec.kind == "record" else []
    if spec.kind in ("tuple", "list", "dict") or (inner and spec.kind == "record"):
        keys = spec.keys if spec.kind == "dict" else range(len(spec.children))
        for key, child in zip(keys, spec.children, strict=True):
            records += _records(child, inner=inner, steps=(*steps, key))
    return records


def _at(tree: Any, steps: Steps) -> Any:
    for step in steps:
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):  # passed as an object of another class
            return None
    return tree


def _with(tree: Any, steps: Steps, node: Any, spec: TreeSpec) -> Any:
    """Replaces the record at the steps by an object like `node`."""
    if not steps:
        return _like(node, spec, tree)
    step, rest = steps[0], steps[1:]
    if isinstance(tree, dict):
        return tree | {step: _with(tree[step], rest, node, spec)}
    parts = list(tree)
    parts[step] = _with(parts[step], rest, node, spec)
    if isinstance(tree, list):
        return parts
    return tuple(parts) if type(tree) is tuple else type(tree)(*parts)


def _like(node: Any, spec: TreeSpec, new: Any) -> Any:
    """Creates an object of the class of `node` with the contents of a record."""
    if spec.kind == "leaf":
        return new
    if spec.kind == "dict":
        return {key: _like(node[key], child, new[key]) for key, child in _parts(spec)}
    if spec.kind != "record":
        return type(new)(_like(node[i], child, new[i]) for i, child in enumerate(spec.children))
    kind = kind_of(type(node))
    if not isinstance(kind, NodeType) or not kind.pytree:
        return new
    names = [name for name, _ in _parts(spec)]
    values = [
        _like(getattr(node, name), field, new[i]) for i, (name, field) in enumerate(_parts(spec))
    ]
    return _replace(node, kind, dict(zip(names, values, strict=True)))


def _replace(node: Any, kind: NodeType, values: dict[str, Any]) -> Any:
    """Returns a node with other children and attributes."""
    children = kind.children(node)
    rebuilt = kind.rebuild(node, children | {key: values[key] for key in values.keys() & children})
    for name in values.keys() - children.keys():
        object.__setattr__(rebuilt, name, values[name])
    return rebuilt


def _parts(spec: TreeSpec) -> zip[tuple[Any, TreeSpec]]:
    return zip(spec.keys, spec.children, strict=True)
