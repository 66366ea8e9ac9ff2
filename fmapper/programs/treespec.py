"""Structures of values as plain data, records for foreign classes, and how structures match."""

from __future__ import annotations

import keyword
import re
from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fmapper.backends.discovery import adapter_of
from fmapper.errors import StructureMismatchError
from fmapper.tree.nodes import NodeType, kind_of


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for the result of a call, or for an input, in the arguments of another call."""

    name: str


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype by name among the arguments of a call, told apart from a string."""

    name: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of a certain dtype among the arguments of a call: an array without dimensions."""

    value: Any
    dtype: str


@dataclass(frozen=True, slots=True)
class Size:
    """A size that is computed from those of the inputs, among the arguments of a call.

    Attributes:
        expression: Such as `2*b + 1`; see `size_of`.
    """

    expression: str


@dataclass(frozen=True, slots=True)
class Other:
    """Stands for an object that is not plain data, among the arguments of a submodule."""


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """The structure of a tree: tuples, lists, dicts and records.

    Attributes:
        kind: leaf, tuple, list, dict or record.
        children: One per child.
        keys: The keys of a dict; the fields of a record.
        name: The class of a record.
        absent: Fields that the class has too, but that were None.

    Examples:
        >>> spec = TreeSpec("dict", (TreeSpec("leaf"), TreeSpec("leaf")), ("a", "b"))
        >>> spec.flatten({"b": 2, "a": 1})
        [1, 2]
        >>> spec.unflatten([3, 4])
        {'a': 3, 'b': 4}
    """

    kind: str
    children: tuple[TreeSpec, ...] = ()
    keys: tuple[Any, ...] = ()
    name: str = ""
    absent: tuple[str, ...] = ()

    def flatten(self, tree: Any, path: str = "input") -> list[Any]:
        """Returns the leaves of a tree of this structure.

        A record may be given as a record, as any object with these attributes, as a dict or as a
        sequence.

        Raises:
            StructureMismatchError: It has another one; names the path.
        """
        if self.kind == "leaf":
            return [tree]
        found: list[Any] = []
        for at, child, spec in self._children_of(tree, path):
            found += spec.flatten(child, at)
        return found

    def unflatten(self, leaves: Any) -> Any:
        """Returns the tree with these leaves.

        Raises:
            StructureMismatchError: There are too few.
        """
        try:
            return self._build(iter(leaves))
        except StopIteration:
            raise StructureMismatchError("there are fewer leaves than the structure has") from None

    def leaf_paths(self, path: str = "input") -> list[str]:
        """Returns the printed path of each leaf."""
        if self.kind == "leaf":
            return [path]
        found: list[str] = []
        for i, child in enumerate(self.children):
            if self.kind == "dict":
                at = f"{path}[{self.keys[i]!r}]"
            else:
                at = f"{path}.{self.keys[i]}" if self.kind == "record" else f"{path}[{i}]"
            found += child.leaf_paths(at)
        return found

    def _children_of(self, tree: Any, path: str) -> Iterator[tuple[str, Any, TreeSpec]]:
        if self.kind == "dict" or (self.kind == "record" and isinstance(tree, Mapping)):
            if not isinstance(tree, Mapping) or set(tree) != set(self.keys):
                have = list(tree) if isinstance(tree, Mapping) else type(tree).__name__
                raise StructureMismatchError(
                    f"{path}: expected a dict with the keys {list(self.keys)}, got {have}"
                )
            for key, spec in zip(self.keys, self.children, strict=True):
                yield f"{path}[{key!r}]", tree[key], spec
            return
        if self.kind == "record" and all(hasattr(tree, name) for name in self.keys):
            for name, spec in zip(self.keys, self.children, strict=True):
                yield f"{path}.{name}", getattr(tree, name), spec
            return
        if self.kind == "record" and not isinstance(tree, list | tuple):
            tree = _children(tree)
        if not isinstance(tree, list | tuple) or len(tree) != len(self.children):
            size = len(tree) if isinstance(tree, list | tuple) else type(tree).__name__
            what = self.name or self.kind
            raise StructureMismatchError(
                f"{path}: expected a {what} of {len(self.children)}, got {size}"
            )
        for i, spec in enumerate(self.children):
            yield f"{path}[{i}]", tree[i], spec

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.kind == "leaf":
            return next(leaves)
        children = [spec._build(leaves) for spec in self.children]
        if self.kind == "tuple":
            return tuple(children)
        if self.kind == "list":
            return children
        if self.kind == "dict":
            return dict(zip(self.keys, children, strict=True))
        return record_type(self.name, self.keys, self.absent)(*children)


class Record(tuple[Any, ...]):
    """Base of the named tuples that stand for outputs of foreign classes.

    Fields are read as `out.logits`, `out["logits"]` or `out[0]`; fields that the class has, but
    that were None, are None. A record is a pytree everywhere, as named tuples are.
    """

    __slots__ = ()
    _fields: tuple[str, ...]
    _names: tuple[str, ...] = ()  # of the fields in the foreign class
    _absent: tuple[str, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        """Returns a field by name or by position."""
        if isinstance(key, str):
            if key not in self._fields:
                raise KeyError(f"{type(self).__name__} has no {key!r}: {', '.join(self._fields)}")
            return getattr(self, key)
        return tuple.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self._fields if isinstance(key, str) else tuple.__contains__(self, key)

    def __reduce__(self) -> Any:
        """Pickles the fields: the class is made again on loading."""
        return _make_record, (type(self).__name__, self._names, self._absent, tuple(self))


_TYPES: dict[Any, Any] = {}  # compilers look into it, but through no functools.cache


def record_type(name: str, fields: tuple[str, ...], absent: tuple[str, ...] = ()) -> Any:
    """Returns the named tuple type for a class with these fields, cached."""
    found = _TYPES.get((name, fields, absent))
    if found is None:
        found = _TYPES[name, fields, absent] = _new_type(name, fields, absent)
    return found


def _new_type(name: str, fields: tuple[str, ...], absent: tuple[str, ...]) -> Any:
    names, fields = fields, _field_names(fields)
    name = re.sub(r"\W", "_", name)  # as `Output[int]`
    name = name if name.isidentifier() and not keyword.iskeyword(name) else f"{name}_"
    name = name if name.isidentifier() else f"Record{name}"
    base = cast(Any, namedtuple)(name, fields)
    body: dict[str, Any] = {k: None for k in absent if k not in fields and k[:1] != "_"}
    body |= {"__slots__": (), "_names": names, "_absent": absent}
    return type(name, (Record, base), body)


def _field_names(fields: tuple[str, ...]) -> tuple[str, ...]:
    """Returns valid field names: without leading underscores, else numbered."""
    found: list[str] = []
    for i, field in enumerate(fields):
        own = field.lstrip("_")
        fine = own.isidentifier() and not keyword.iskeyword(own)
        taken = own in found or (own != field and own in fields)
        found.append(own if fine and not taken else f"field{i}")
    return tuple(found)


def _make_record(name: str, fields: tuple[str, ...], absent: tuple[str, ...], values: Any) -> Any:
    return record_type(name, fields, absent)(*values)


def _children(node: Any) -> Any:
    """Lists the children of a node of another class."""
    kind = kind_of(type(node))
    return [child for _, child in kind.items(node)] if isinstance(kind, NodeType) else node


def match(a: Any, b: Any) -> list[tuple[Any, Any, Any]] | str | None:
    """Pairs the parts of two structures; classes need not agree.

    The order of names does not matter, and a part that is None counts as missing. A sequence
    without names is matched with the parts of the other structure in their order.

    Returns:
        The key and both parts of each pair; how the structures differ; or None where one of them
        has no parts.
    """
    ours, theirs = parts_of(a), parts_of(b)
    if ours is None or theirs is None:
        return None
    is_sequence = [_is_sequence(a, ours), _is_sequence(b, theirs)]
    if any(is_sequence):
        if len(ours) != len(theirs):
            return f"{len(ours)} and {len(theirs)} parts"
        keys = theirs if is_sequence[0] else ours
        return list(zip(keys, ours.values(), theirs.values(), strict=True))
    ours, theirs = ours | _others(a, ours, theirs), theirs | _others(b, theirs, ours)
    ours, theirs = ({k: x for k, x in one.items() if x is not None} for one in (ours, theirs))
    if ours.keys() != theirs.keys():
        return f"the keys {list(ours)} and {list(theirs)}"
    return [(key, value, theirs[key]) for key, value in ours.items()]


def parts_of(x: Any) -> dict[Any, Any] | None:
    """Returns the parts of a structure by key; None for a leaf.

    Those of an object are its children or attributes that hold arrays.
    """
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        names = x._names if isinstance(x, Record) else x._fields
        return dict(zip(names, x, strict=True))
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    kind = kind_of(type(x))
    if isinstance(kind, NodeType):
        own = kind.children(x)
    elif hasattr(x, "__dict__") and not callable(x):
        own = vars(x)
    else:
        return None
    held = {key: one for key, one in own.items() if isinstance(key, int) or _holds_arrays(one)}
    return held or None


def _holds_arrays(x: Any) -> bool:
    """Returns whether a structure holds an array at any depth."""
    if adapter_of(x) is not None:
        return True
    found = parts_of(x)
    return found is not None and any(map(_holds_arrays, found.values()))


def path_of(path: str, key: Any) -> str:
    """Returns the path of a part."""
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"


def _is_sequence(x: Any, own: Mapping[Any, Any]) -> bool:
    return not isinstance(x, Mapping) and all(isinstance(key, int) for key in own)


def _others(x: Any, own: Mapping[Any, Any], other: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the attributes of an object that hold no arrays, but that the other structure has."""
    if isinstance(x, Mapping | tuple):
        return {}
    known = getattr(x, "__dict__", {})
    return {key: known[key] for key in other if key in known and key not in own}
