"""Structures of values as plain data, and records for foreign classes."""

from __future__ import annotations

import keyword
import re
from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast

from fmapper.errors import StructureMismatchError
from fmapper.tree.nodes import NodeType, kind_of

_PLAIN = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the result of a call, or to an input, in the arguments of another call."""

    name: str


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype among the arguments of a call, distinct from a string."""

    name: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number with a dtype among the arguments of a call: an array without dimensions."""

    value: Any
    dtype: str


@dataclass(frozen=True, slots=True)
class Size:
    """A size that is computed from those of the inputs, among the arguments of a call.

    Attributes:
        expression: An expression such as `2*b + 1`; see `size_of`.
    """

    expression: str


@dataclass(frozen=True, slots=True)
class Other:
    """A placeholder for an object that is not plain data, among the arguments of a submodule."""


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """The structure of a tree: tuples, lists, dicts and records.

    Attributes:
        kind: leaf, tuple, list, dict or record.
        children: The structure of each child.
        keys: The keys of a dict; the fields of a record.
        name: The class of a record.
        absent: Further fields of the class, which were None.
        fixed: Names and values of other fields that are numbers, strings or None: the recording is
            valid only for these values.

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
    fixed: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def plain_fields(fields: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """Returns the fields besides the children that are numbers, strings or None."""
        return tuple(
            (name, value)
            for name, value in fields.items()
            if type(value) in (bool, int, float, str, NoneType) and name[:1] != "_"
        )

    def flatten(self, tree: Any, path: str = "input") -> list[Any]:
        """Returns the leaves of a tree of this structure.

        A record may be a record, any object with these attributes, a dict or a sequence. Its
        `fixed` fields, if present, must have the same values.

        Raises:
            StructureMismatchError: The structure, or the value of a fixed field, differs; names the
                path.
        """
        if self.kind == "leaf":
            return [tree]
        leaves: list[Any] = []
        for at, child, spec in self._children_of(tree, path):
            leaves += spec.flatten(child, at)
        return leaves

    def unflatten(self, leaves: Any) -> Any:
        """Returns the tree with these leaves.

        Raises:
            StructureMismatchError: There are too few leaves.
        """
        try:
            return self._build(iter(leaves))
        except StopIteration:
            raise StructureMismatchError("there are fewer leaves than the structure has") from None

    def leaf_paths(self, path: str = "input") -> list[str]:
        """Returns the printed path of each leaf."""
        if self.kind == "leaf":
            return [path]
        paths: list[str] = []
        for i, child in enumerate(self.children):
            if self.kind == "dict":
                at = f"{path}[{self.keys[i]!r}]"
            else:
                at = f"{path}.{self.keys[i]}" if self.kind == "record" else f"{path}[{i}]"
            paths += child.leaf_paths(at)
        return paths

    def _children_of(self, tree: Any, path: str) -> Iterator[tuple[str, Any, TreeSpec]]:
        if self.fixed:
            self._check_fixed(tree, path)
        if self.kind == "dict" or (self.kind == "record" and isinstance(tree, Mapping)):
            others = {name for name, _ in self.fixed}
            if not isinstance(tree, Mapping) or set(tree) - others != set(self.keys):
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

    def _check_fixed(self, tree: Any, path: str) -> None:
        for name, value in self.fixed:
            is_mapping = isinstance(tree, Mapping)
            given = tree.get(name, value) if is_mapping else getattr(tree, name, value)
            if type(given) is not type(value) or repr(given) != repr(value):  # NaN is NaN
                what = repr(given) if isinstance(given, _PLAIN) else f"a {type(given).__name__}"
                raise StructureMismatchError(
                    f"{path}.{name}: expected {value!r}, which the examples fixed, got {what}; "
                    f"convert the model with examples that have it"
                )

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
        return record_type(self.name, self.keys, self.absent, self.fixed)(*children)


class Record(tuple[Any, ...]):
    """Base of the named tuples that replace outputs of foreign classes.

    Fields are read as `out.logits`, `out["logits"]` or `out[0]`; absent fields of the class are
    None. Like all named tuples, a record is a pytree in every framework.
    """

    __slots__ = ()
    _fields: tuple[str, ...]
    _names: tuple[str, ...] = ()  # names of the fields in the foreign class
    _absent: tuple[str, ...] = ()
    _fixed: tuple[tuple[str, Any], ...] = ()

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
        """Pickles the fields; the class is created again on loading."""
        cls = type(self)
        return _make_record, (cls.__name__, cls._names, cls._absent, cls._fixed, tuple(self))


_TYPES: dict[Any, Any] = {}  # compilers can trace a dict, but not functools.cache


def record_type(
    name: str,
    fields: tuple[str, ...],
    absent: tuple[str, ...] = (),
    fixed: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """Returns a cached named tuple type for a class with these fields.

    Args:
        name: The name of the class.
        fields: The fields whose values vary.
        absent: Fields that are None in all records.
        fixed: Fields that have the same value in all records, with these values.
    """
    key = name, fields, absent, repr(fixed)  # 1 and True are equal
    record = _TYPES.get(key)
    if record is None:
        record = _TYPES[key] = _new_type(name, fields, absent, fixed)
    return record


def _new_type(
    name: str,
    fields: tuple[str, ...],
    absent: tuple[str, ...],
    fixed: tuple[tuple[str, Any], ...],
) -> Any:
    names, fields = fields, _field_names(fields)
    name = re.sub(r"\W", "_", name)  # for example `Output[int]`
    name = name if name.isidentifier() and not keyword.iskeyword(name) else f"{name}_"
    name = name if name.isidentifier() else f"Record{name}"
    base = cast(Any, namedtuple)(name, fields)
    others = dict.fromkeys(absent) | dict(fixed)
    body = {k: v for k, v in others.items() if k not in fields and k[:1] != "_"}
    body |= {"__slots__": (), "_names": names, "_absent": absent, "_fixed": fixed}
    return type(name, (Record, base), body)


def _field_names(fields: tuple[str, ...]) -> tuple[str, ...]:
    """Returns valid field names: without leading underscores, else numbered."""
    names: list[str] = []
    for i, field in enumerate(fields):
        name = field.lstrip("_")
        fine = name.isidentifier() and not keyword.iskeyword(name)
        taken = name in names or (name != field and name in fields)
        names.append(name if fine and not taken else f"field{i}")
    return tuple(names)


def _make_record(name: str, fields: Any, absent: Any, fixed: Any, values: Any) -> Any:
    return record_type(name, fields, absent, fixed)(*values)


def _children(node: Any) -> Any:
    """Lists the children of a node of another class."""
    kind = kind_of(type(node))
    return [child for _, child in kind.items(node)] if isinstance(kind, NodeType) else node
