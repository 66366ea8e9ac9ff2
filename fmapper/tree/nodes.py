"""Finding the node type of a class: declared, a container, or known to an adapter; once each."""

from __future__ import annotations

import functools
import numbers
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from fmapper.tree.containers import container_type, open_childless
from fmapper.tree.functor import CONTAINERS, Declaration, declaration_of, on_class
from fmapper.tree.no_gradient import NoGradient
from fmapper.tree.node_type import ATOM, ATOMS, CHILDLESS, FITTED, LEAF, Kind, NodeType, Opener
from fmapper.tree.objects import functor_type, restrict

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


class Source:
    """A source of node types beside the declarations: adapters and pytree registries."""

    def look(self) -> None:
        """Notices new frameworks and registrations; called before every walk."""

    def node_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a framework's own classes, such as modules."""

    def registered_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class in a pytree registry, by exact type."""

    def leaf_kind(self, cls: type) -> Kind | None:
        """Returns LEAF for a class of arrays, INTERNED for interned constants, else None."""

    def is_fitted(self, cls: type) -> bool:
        """Returns whether some nodes wrap what takes the place of leaves of a class."""
        return False

    def meet(self, cls: type) -> None:
        """Enters a class into the registries of others, when a walk first meets it."""


sources: list[Source] = []
"""Those that are asked, in this order."""

kinds: dict[type, NodeType | Kind] = {}
openers: dict[type, Opener | Kind] = {}
_unknown: list[type] = []
_generation = [object()]  # another object after every declaration; one assignment, so atomic


def forget() -> None:
    """Empties the caches of node types: after a declaration, or when an adapter was added."""
    _generation[0] = object()
    for cache in (kinds, openers):
        cache.clear()
    _unknown.clear()


def sync() -> None:
    """Notices new frameworks and classes; every public call begins with it."""
    for source in sources:
        source.look()
    while _unknown:  # somebody may know these classes by now
        try:
            cls = _unknown.pop()
        except IndexError:  # emptied by another thread
            return
        for cache in (kinds, openers):
            cache.pop(cls, None)


def kind_of(cls: type) -> NodeType | Kind:
    """Returns the node type of a class, or its kind of leaf; looked up once per class."""
    found = kinds.get(cls)
    return _look_up_once(kinds, cls, _look_up) if found is None else found


def _look_up_once(cache: dict[type, Any], cls: type, look_up: Callable[[type], Any]) -> Any:
    """Looks a class up and caches the answer, unless a declaration came in between.

    Without that, a class that another thread declares during its look-up would be found in the
    registry of JAX, where its declaration has just entered it, and be taken for a class of JAX.
    """
    while True:
        before = _generation[0]
        found = cache[cls] = look_up(cls)
        if before is _generation[0]:
            return found
        cache.pop(cls, None)


def node_type_of(node: Any) -> NodeType | None:
    """Returns the node type of an object; None for leaves, and nodes that cannot have children."""
    found = kind_of(type(node))
    return found if isinstance(found, NodeType) else None


def opener_of(cls: type) -> Opener | Kind:
    """Returns the opener of a class, or its kind of leaf; enters it into `openers`."""
    found: Opener | Kind = _look_up_once(openers, cls, _look_up_opener)
    return found


def _look_up_opener(cls: type) -> Opener | Kind:
    kind = kind_of(cls)
    if kind is LEAF and any(source.is_fitted(cls) for source in sources):
        return FITTED
    if kind is CHILDLESS:
        return open_childless
    return kind.open if isinstance(kind, NodeType) else kind


def plain_opener_of(cls: type) -> Opener | Kind:
    """Returns the opener with a plain dict, list or tuple in the place of a node."""
    kind = kind_of(cls)
    return kind.open_plain if isinstance(kind, NodeType) else opener_of(cls)


def _look_up(cls: type) -> NodeType | Kind:
    declaration = declaration_of(cls)
    if declaration is not None:
        for source in sources:
            source.meet(cls)
        return LEAF if declaration.leaf else _declared_type(cls, declaration)
    if cls is type(None) or cls is NoGradient:
        return CHILDLESS
    if cls in ATOMS:
        return ATOM
    if issubclass(cls, CONTAINERS):
        exact = cls in (*CONTAINERS, OrderedDict, defaultdict)
        return (None if exact else _from_registry(cls)) or container_type(cls)
    of_arrays = next(filter(None, (source.leaf_kind(cls) for source in sources)), None)
    if of_arrays is not None:
        return of_arrays
    if issubclass(cls, numbers.Number):
        return ATOM
    if cls in _PLAIN_LEAVES:
        return LEAF
    found = _foreign(cls) or _from_registry(cls)
    if found is None:
        _unknown.append(cls)
        return LEAF
    if found.pytree:
        for source in sources:
            source.meet(cls)
    return found


def _declared_type(cls: type, declaration: Declaration) -> NodeType:
    if declaration.rebuild is None:
        known = container_type(cls) if issubclass(cls, tuple) else _foreign(cls)
        if known is not None:
            names = declaration.children
            return known if names is None else restrict(known, names)
    return functor_type(cls, declaration)


def _foreign(cls: type) -> NodeType | None:
    return next(filter(None, (source.node_type(cls) for source in sources)), None)


def _from_registry(cls: type) -> NodeType | None:
    return next(filter(None, (source.registered_type(cls) for source in sources)), None)


on_class(lambda cls: forget())
