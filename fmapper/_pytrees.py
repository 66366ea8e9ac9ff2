"""Functors as pytrees of other libraries: taken apart into dynamic children and static rest."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from fmapper import _nodes
from fmapper._adapter import Adapter
from fmapper._discovery import adapter_of, adapters, on_adapter
from fmapper._functor import CONTAINERS, declaration_of, on_class, slot_names
from fmapper._gradient import no_gradient
from fmapper._nodes import NodeType

NAMESPACE = "fmapper"


class Static:
    """All of a functor but its dynamic children: hashable, comparable, and holding no array of it.

    Static children are compared by identity, then by `==`; what cannot be compared differs.
    """

    __slots__ = ("carried", "cls", "dynamic", "names", "static", "whole")

    def __init__(
        self,
        cls: type,
        names: tuple[str, ...],
        dynamic: tuple[str, ...],
        static: dict[str, Any],
        carried: dict[str, Any],
        *,
        whole: Any = None,
    ) -> None:
        self.cls, self.names, self.dynamic = cls, names, dynamic
        self.static, self.carried, self.whole = static, carried, whole

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and self.cls is other.cls
            and self.names == other.names
            and self.dynamic == other.dynamic
            and _equal(self.static, other.static)
            and _equal(self.carried, other.carried)
            and same(self.whole, other.whole)
        )

    def __hash__(self) -> int:
        return hash((self.cls, self.names, self.dynamic))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.static.items())
        return f"{self.cls.__qualname__}({shown})" if shown else self.cls.__qualname__


def _equal(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    return mine.keys() == other.keys() and all(same(mine[key], other[key]) for key in mine)


def same(mine: Any, other: Any) -> bool:
    if mine is other:
        return True
    if type(mine) is not type(other):
        return False
    if isinstance(mine, float | complex):  # 0.0 == -0.0, and NaN is not even itself
        return repr(mine) == repr(other)
    try:
        return bool(mine == other)
    except (TypeError, ValueError, RuntimeError):  # arrays and the like: `==` has no one answer
        return False


def take_apart(node: Any, is_dynamic: Callable[[Any], bool]) -> tuple[list[Any], Static]:
    """The dynamic children of a functor, in order, and the rest of it."""
    cls = type(node)
    kind = _nodes.kind_of(cls)
    if not isinstance(kind, NodeType):  # registered as a subclass, then declared a leaf: one whole
        return [], Static(cls, (), (), {}, {}, whole=node)
    have = kind.children(node)
    marked = _marks.get(id(node))
    was_dynamic = marked[1] if marked is not None else ()
    dynamic = tuple(
        name for name, child in have.items() if name in was_dynamic or is_dynamic(child)
    )
    static = {name: child for name, child in have.items() if name not in dynamic}
    cached = _nodes.cached_names(cls)
    carried = {
        name: value for name, value in _attributes(node) if name not in have and name not in cached
    }
    return [have[name] for name in dynamic], Static(cls, tuple(have), dynamic, static, carried)


def put_together(
    static: Static, children: Iterable[Any], is_dynamic: Callable[[Any], bool] | None = None
) -> Any:
    """The functor with these dynamic children; pytree libraries put all sorts of objects there.

    Args:
        static: What `take_apart` has left.
        children: The new dynamic children, in order.
        is_dynamic: The rule by which `take_apart` goes. A child for which it is false would be
            static the next time, so the new functor is marked: its structure stays what it is.
    """
    if static.whole is not None:
        return static.whole
    given = dict(zip(static.dynamic, children, strict=True))
    values = {name: given[name] if name in given else static.static[name] for name in static.names}
    declaration = declaration_of(static.cls)
    new: Any = object.__new__(static.cls)
    for name, value in static.carried.items():
        object.__setattr__(new, name, value)
    if declaration is not None and declaration.rebuild is not None:
        new = declaration.rebuild(new, values)
    else:
        for name, value in values.items():
            object.__setattr__(new, name, value)
    if is_dynamic is not None and not all(map(is_dynamic, given.values())):
        _mark(new, static.dynamic)
    return new


_marks: dict[int, tuple[Any, tuple[str, ...]]] = {}


def _mark(node: Any, names: tuple[str, ...]) -> None:
    i = id(node)
    try:
        _marks[i] = (weakref.ref(node, lambda _: _marks.pop(i, None)), names)
    except TypeError:  # slots without __weakref__: held on to for a while
        _marks[i] = (node, names)
        _held.append(i)
        if len(_held) > _HELD_AT_MOST:
            _marks.pop(_held.popleft(), None)


_held: deque[int] = deque()
_HELD_AT_MOST = 4096


def _attributes(node: Any) -> Iterable[tuple[str, Any]]:
    for name in slot_names(type(node)):
        if hasattr(node, name):
            yield name, getattr(node, name)
    yield from getattr(node, "__dict__", {}).items()


def is_dynamic(child: Any) -> bool:
    """Whether a child is an array, a node or a container; the rest is static to a compiler."""
    if child is no_gradient:
        return False
    kind = _nodes.kind_of(type(child))
    if isinstance(kind, NodeType) or kind is _nodes.CHILDLESS:
        return True
    return kind is not _nodes.ATOM and adapter_of(child) is not None


# --- registration ---------------------------------------------------------------------------------

_classes: dict[type, None] = {}
_registering = threading.RLock()
_new_for_optree: list[type] = []


def _enroll(cls: type) -> None:
    """Makes a functor class known to every pytree registry that is loaded, and to later ones."""
    with _registering:
        if cls in _classes or not _is_plain_functor(cls):
            return
        _classes[cls] = None
        _new_for_optree.append(cls)
        for adapter in adapters():
            adapter.register_functor(cls)
    _register_with_optree()


def _enroll_all(adapter: Adapter) -> None:
    for cls in tuple(_classes):
        adapter.register_functor(cls)


def _is_plain_functor(cls: type) -> bool:
    """Not a leaf, and not a node type that other libraries have rules of their own for."""
    declaration = declaration_of(cls)
    if declaration is None or declaration.leaf or issubclass(cls, CONTAINERS):
        return False
    return all(adapter.node_type(cls) is None for adapter in adapters())


def _register_with_optree() -> None:
    if not _new_for_optree or "optree" not in sys.modules:
        return
    import optree

    with _registering:
        _enter_into_optree(optree)


def _enter_into_optree(optree: Any) -> None:
    while _new_for_optree:
        cls = _new_for_optree.pop()
        if optree.register_pytree_node.get(cls, namespace=NAMESPACE) is None:
            optree.register_pytree_node(
                cls,
                _optree_flatten,
                cast(Any, put_together),
                path_entry_type=optree.GetAttrEntry,
                namespace=NAMESPACE,
            )


def _optree_flatten(node: Any) -> tuple[list[Any], Static, tuple[str, ...]]:
    children, static = take_apart(node, lambda _: True)
    return children, static, static.dynamic


def _optree_type(cls: type) -> NodeType | None:
    """The node type of a class that somebody registered with optree."""
    if "optree" not in sys.modules:
        return None
    import optree

    entry = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    if entry is None or entry.kind is not optree.PyTreeKind.CUSTOM:
        return None

    def children(node: Any) -> dict[Any, Any]:
        flat = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
        return dict(zip(flat.entries, flat.children, strict=True))

    def rebuild(node: Any, new_children: Mapping[Any, Any]) -> Any:
        flat = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
        return flat.unflatten_func(flat.metadata, [new_children[key] for key in flat.entries])

    def static(node: Any) -> Any:
        return optree.tree_flatten_one_level(node, namespace=NAMESPACE).metadata

    return NodeType(children, rebuild, static=static)


on_class(_enroll)
_nodes.on_functor(_enroll)
on_adapter(_enroll_all)
_nodes.before_walk(_register_with_optree)
_nodes.add_finders(framework=lambda _: None, registry=_optree_type, leaf=lambda _: None)
