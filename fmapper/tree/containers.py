"""Builtin classes: the node types of containers and their subclasses, and plain leaves."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from fmapper.tree.classes import attribute_names, has_class_attribute, slot_names
from fmapper.tree.nodes import (
    ATOM,
    ATOMS,
    CHILDLESS,
    CONTAINERS,
    LEAF,
    PENDING,
    Item,
    Kind,
    NodeType,
    NoGradient,
    Opened,
    Source,
    registered_type_of,
)

_PLAIN_LEAVES = frozenset(
    {
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        types.ModuleType,
        functools.partial,
        bytearray,
        range,
        slice,
        set,
        frozenset,
    }
)


class Builtins(Source):
    """The source of node types for Python's builtin classes."""

    def kind(self, cls: type) -> NodeType | Kind | None:
        """Returns the kind of a builtin class or of a container's subclass; None for others."""
        if cls is type(None) or cls is NoGradient:
            return CHILDLESS
        if cls in ATOMS:
            return ATOM
        if issubclass(cls, CONTAINERS):
            exact = cls in (*CONTAINERS, OrderedDict, defaultdict)
            return (None if exact else registered_type_of(cls)) or container_type(cls)
        return LEAF if cls in _PLAIN_LEAVES else None


def _open_list(node: Any, keep: Callable[[Any], None]) -> Opened:
    source = node.copy()
    keep(source)
    new = source.copy()
    return new, enumerate(source), new, None


def _open_dict(node: Any, keep: Callable[[Any], None]) -> Opened:
    source = node.copy()
    keep(source)
    new = source.copy()
    return new, iter(source.items()), new, None


def _open_tuple(node: Any, keep: Callable[[Any], None]) -> Opened:
    return PENDING, enumerate(node), [None] * len(node), tuple


def _filled_last(cls: type) -> NodeType:
    """Makes the node type of a subclass of list or dict: an empty shell, filled at the end.

    Order, default factory, length and attributes are kept; methods of the class are not called.
    """
    natives = (OrderedDict, defaultdict, dict, deque, list)
    native: Any = next(base for base in natives if issubclass(cls, base))
    has_keys = issubclass(cls, dict)

    def items(node: Any) -> Iterable[Item]:
        return native.items(node) if has_keys else enumerate(native.__iter__(node))

    def open(node: Any, keep: Callable[[Any], None]) -> Opened:
        new: Any = native.__new__(cls)
        if native is deque:
            deque.__init__(new, maxlen=node.maxlen)
        if native is defaultdict:
            new.default_factory = node.default_factory
        _carry_attributes(node, new)
        source = dict(items(node))
        keep(source)

        def finish(slots: dict[Any, Any]) -> Any:
            if has_keys:
                for key, child in slots.items():
                    native.__setitem__(new, key, child)
            else:
                native.extend(new, slots.values())
            return new

        return new, iter(source.items()), source.copy(), finish

    return NodeType(open, items, dict if has_keys else list)


def _tuple_like(cls: type) -> NodeType:
    """Makes the node type of a tuple subclass; the keys of a namedtuple are its field names."""
    try:
        tuple.__new__(cls)
        make: Callable[[Iterable[Any]], Any] = functools.partial(tuple.__new__, cls)
    except TypeError:  # made in C (torch.Size, struct sequences): needs its own constructor
        make = cls
    hidden = has_class_attribute(cls, "n_sequence_fields")
    fields = attribute_names(cls)

    def finish(node: Any, slots: Any) -> Any:
        if hidden:  # a struct sequence has fields beyond its items
            new = cls(slots, node.__reduce__()[1][1])
        else:
            new = make(slots if fields is None else slots.values())
        _carry_attributes(node, new)
        return new

    def items(node: Any) -> Iterable[Item]:
        values = tuple.__iter__(node)
        return enumerate(values) if fields is None else zip(fields, values, strict=True)

    def open(node: Any, keep: Callable[[Any], None]) -> Opened:
        slots: Any = [None] * len(node) if fields is None else dict.fromkeys(fields)
        return PENDING, iter(items(node)), slots, functools.partial(finish, node)

    return NodeType(open, items, tuple if fields is None else dict)


def _carry_attributes(node: Any, new: Any) -> None:
    """Carries over the attributes of a container subclass, which are not children."""
    attributes = getattr(node, "__dict__", None)
    if attributes is node:  # a dict whose attributes are its items
        object.__setattr__(new, "__dict__", new)
    elif attributes:
        new.__dict__.update(attributes)
    for name in slot_names(type(node)):
        if hasattr(node, name):
            object.__setattr__(new, name, getattr(node, name))


DICT = NodeType(_open_dict, dict.items)
_EXACT: dict[type, NodeType] = {
    dict: DICT,
    list: NodeType(_open_list, enumerate, list),
    tuple: NodeType(_open_tuple, enumerate, tuple),
}


def container_type(cls: type) -> NodeType:
    """Returns the node type of a builtin container, or of a class that derives from one."""
    if cls in _EXACT:
        return _EXACT[cls]
    return _tuple_like(cls) if issubclass(cls, tuple) else _filled_last(cls)
