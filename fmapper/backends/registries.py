"""Functors as pytrees of other libraries: dynamic children, and a static rest."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias, cast

from fmapper.backends.discovery import adapter_of, adapters
from fmapper.backends.equality import digest, equals
from fmapper.backends.framework import Framework
from fmapper.backends.nodes import Nodes
from fmapper.backends.undeclared import holds_arrays
from fmapper.errors import TransformError
from fmapper.tree import nodes
from fmapper.tree.classes import slot_names
from fmapper.tree.fmap import fmap
from fmapper.tree.functor import declaration_of
from fmapper.tree.keypath import KeyPath, format_keys
from fmapper.tree.nodes import ATOM, CHILDLESS, CONTAINERS, NodeType, no_gradient
from fmapper.tree.objects import cached_names
from fmapper.tree.walk import visit


@dataclasses.dataclass(frozen=True, slots=True)
class PyTreeRules:
    """The rules by which a pytree registry classifies objects.

    Attributes:
        is_dynamic: Whether an object is an array, or a node that the registry enters; depends on
            its class only.
        opens: Whether the registry enters containers of exactly this class.
        leaves: `(container, is_leaf) -> leaves`, by the registry.
        flatten: `(container, is_leaf) -> (leaves, structure)`, by the registry. The structure has
            the methods `unflatten` and `flatten_up_to` of treespecs in JAX and torch.
    """

    is_dynamic: Callable[[Any], bool]
    opens: Callable[[type], bool]
    leaves: Callable[[Any, Callable[[Any], bool]], list[Any]]
    flatten: Callable[[Any, Callable[[Any], bool]], tuple[list[Any], Any]]


Pattern: TypeAlias = "bool | tuple[Any, list[bool]]"
"""Which parts of a child are dynamic: all, none, or those of a container, by its structure."""


class Constant:
    """A static value in a container that has arrays, too: a node without children to a registry.

    It keeps a copy of a container, because it is part of the key of a compiled program.
    """

    __slots__ = ("_hash", "_value")

    dynamic: tuple[str, ...] = ()

    def __init__(self, value: Any) -> None:
        self._value = snapshot(value)
        self._hash = digest(self._value)

    def value(self) -> Any:
        """Returns the value; a container is a new one."""
        return snapshot(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and equals(self._value, other._value)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Constant({self._value!r})"


class Static:
    """All of a functor but its dynamic children: hashable, comparable, and without its arrays.

    Static children are compared by `equals`. Containers among them are copies, so that changing one
    in place gives the functor another structure instead of changing this one.
    """

    __slots__ = ("_hash", "carried", "cls", "dynamic", "names", "patterns", "static", "whole")

    def __init__(
        self,
        cls: type,
        names: tuple[str, ...],
        patterns: dict[str, Pattern],
        static: dict[str, Any],
        carried: dict[str, Any],
        *,
        whole: Any = None,
    ) -> None:
        self._hash: int | None = None
        self.cls, self.names = cls, names
        self.dynamic, self.patterns = tuple(patterns), patterns
        self.static, self.carried, self.whole = static, carried, whole

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and self.cls is other.cls
            and self.names == other.names
            and self.dynamic == other.dynamic
            and _are_equal(self.static, other.static)
            and _are_equal(self.carried, other.carried)
            and (self.whole is other.whole or equals(self.whole, other.whole))
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.cls, self.names, self.dynamic, digest(self.static)))
        return self._hash

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.static.items())
        return f"{self.cls.__qualname__}({shown})" if shown else self.cls.__qualname__


def _are_equal(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Compares by `equals`, quickly if most values are identical."""
    if len(mine) != len(other):
        return False
    for name, value in mine.items():
        if name not in other or (value is not other[name] and not equals(value, other[name])):
            return False
    return True


def flatten(node: Any, rules: PyTreeRules | None) -> tuple[list[Any], Static | Constant]:
    """Splits a functor into its dynamic children, in order, and the rest of it.

    Args:
        node: The functor.
        rules: The rules of the registry. None: all children are dynamic but those declared static.

    Raises:
        TransformError: A child that is declared static holds an array that is being traced.
    """
    cls = type(node)
    if cls is Constant:
        return [], node
    kind = nodes.kind_of(cls)
    if not isinstance(kind, NodeType):  # registered as a subclass, then declared a leaf
        return [], Static(cls, (), {}, {}, {}, whole=node)
    have = kind.children(node)
    marked = _marks.get(id(node))
    by_name: dict[str, Pattern] = {} if marked is None else marked[1]
    declared = _static_names(cls)
    patterns: dict[str, Pattern] = {}
    dynamic: list[Any] = []
    static: dict[str, Any] = {}
    for name, child in have.items():
        if name in declared:
            _check_concrete(cls, name, child)
            pattern: Pattern = False
        elif name in by_name:
            pattern = by_name[name]
        else:
            pattern = _pattern(child, rules)
        if pattern is False:
            static[name] = child if type(child) in _PLAIN else snapshot(child)
        else:
            patterns[name] = pattern
            dynamic.append(child if pattern is True else _wrap_constants(child, *pattern))
    slots, cached = slots_and_cached(cast(Any, cls))
    carried = {
        name: snapshot(value)
        for name, value in _attributes(node, slots)
        if name not in have and name not in cached
    }
    return dynamic, Static(cls, tuple(have), patterns, static, carried)


def unflatten(static: Static | Constant, children: Iterable[Any], rules: PyTreeRules | None) -> Any:
    """Rebuilds a functor around dynamic children, which may be any objects of a registry.

    Args:
        static: The static rest that `flatten` returned.
        children: The new dynamic children, in order.
        rules: The rules that were passed to `flatten`. If other parts of the new functor would be
            dynamic by them, it is marked so that its structure stays the same.
    """
    if isinstance(static, Constant):
        return static.value()
    if static.whole is not None:
        return static.whole
    given = dict(zip(static.dynamic, children, strict=True))
    kept = static.static
    values = {name: given[name] if name in given else snapshot(kept[name]) for name in static.names}
    declaration = declaration_of(static.cls)
    new: Any = object.__new__(static.cls)
    for name, value in static.carried.items():
        object.__setattr__(new, name, snapshot(value))
    if declaration is not None and declaration.rebuild is not None:
        new = declaration.rebuild(new, values)
    else:
        for name, value in values.items():
            object.__setattr__(new, name, value)
    if rules is not None and any(
        _pattern(child, rules) != static.patterns[name]
        for name, child in given.items()
        if static.patterns[name] is not True or adapter_of(child) is None
    ):
        _mark(new, static.patterns)
    return new


@lru_cache(1024)
def slots_and_cached(cls: type) -> tuple[tuple[str, ...], frozenset[str]]:
    """Returns the slots of a class, and the attributes that are computed from children."""
    return slot_names(cls), frozenset(cached_names(cls))


def _static_names(cls: type) -> tuple[str, ...]:
    declaration = declaration_of(cls)
    return () if declaration is None else declaration.static


def _check_concrete(cls: type, name: str, child: Any) -> None:
    if type(child) in _PLAIN:
        return
    for link, leaf, kind in visit(child, once=True):
        adapter = adapter_of(leaf) if kind is None else None
        if adapter is not None and adapter.is_traced(leaf):
            where = format_keys(KeyPath.from_link(link), root=f"{cls.__name__}.{name}")
            raise TransformError(
                f"{where} is being traced, but {name!r} is declared static, so it would become a "
                f"constant of the program. Take {name!r} out of static= in the declaration of "
                f"{cls.__name__}."
            )


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _pattern(child: Any, rules: PyTreeRules | None) -> Pattern:
    """Finds which parts of a child are dynamic.

    Raises:
        CycleError: An array is in a container that contains itself, which no registry flattens.
    """
    if rules is None:
        return True
    cls = type(child)
    if cls in _PLAIN:
        return child is None and rules.is_dynamic(child)
    if not issubclass(cls, CONTAINERS):
        return rules.is_dynamic(child)
    parts: Iterable[Any] = _values(child) if cls in _BARE else (child,)
    verdicts = _verdicts(parts, rules)
    is_tied = False
    if None in verdicts.values():  # it holds more than its leaves
        try:
            parts, is_tied = _leaves(child, rules)
        except (TypeError, ValueError):  # a dict with keys that cannot be sorted
            return holds_arrays(child)
        verdicts = _verdicts(parts, rules)
    answers = {*verdicts.values()}
    if None in answers:
        answers = {_is_dynamic_part(part, verdicts) for part in parts}
    if False in answers and verdicts.get(type(None)):  # a node that is neither
        answers = {_is_dynamic_part(part, verdicts) for part in parts if part is not None}
    if answers == {False}:
        return False
    if is_tied:
        for _ in visit(child, is_leaf=_is_no_container):
            pass
    if False not in answers:
        return True
    parts, structure = rules.flatten(child, _is_no_container)
    return structure, [_is_dynamic_part(part, verdicts) for part in parts]


def _leaves(container: Any, rules: PyTreeRules) -> tuple[list[Any], bool]:
    """Returns the leaves of nested containers, and whether one of these occurs twice.

    Each container is opened once: JAX may end the process if it flattens one that contains itself.
    """
    opened: dict[int, Any] = {}

    def is_leaf(value: Any) -> bool:
        if issubclass(type(value), CONTAINERS) and id(value) not in opened:
            opened[id(value)] = value
            return False
        return True

    leaves = rules.leaves(container, is_leaf)
    again = {
        cls for cls in {*map(type, leaves)} if issubclass(cls, CONTAINERS) and rules.opens(cls)
    }
    return [leaf for leaf in leaves if type(leaf) not in again] if again else leaves, bool(again)


def _verdicts(parts: Iterable[Any], rules: PyTreeRules) -> dict[type, bool | None]:
    """Returns for each class among the parts whether it is dynamic; None for containers."""
    return {
        cls: None if issubclass(cls, CONTAINERS) else rules.is_dynamic(part)
        for cls, part in {type(part): part for part in parts}.items()
    }


def _is_dynamic_part(part: Any, verdicts: dict[type, bool | None]) -> bool:
    verdict = verdicts[type(part)]
    return holds_arrays(part) if verdict is None else verdict


def _wrap_constants(child: Any, structure: Any, flags: list[bool]) -> Any:
    """Returns a container with its static parts wrapped."""
    try:
        parts = structure.flatten_up_to(child)
    except (TypeError, ValueError):  # a registry has put another object there
        return child
    pairs = zip(parts, flags, strict=True)
    return structure.unflatten([part if flag else Constant(part) for part, flag in pairs])


def snapshot(value: Any) -> Any:
    """Copies the containers of a static value, which others may change, but not their contents."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, CONTAINERS):
        if type(value) in _BARE and all(type(part) in _PLAIN for part in _values(value)):
            return value if type(value) is tuple else cast(Any, value).copy()
        return fmap(_copy_leaf, value, is_leaf=_is_no_container)
    return _copy_leaf(value)


_BARE = frozenset({dict, list, tuple})


def _values(container: Any) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def _is_no_container(value: Any) -> bool:
    return not isinstance(value, CONTAINERS)


def _copy_leaf(value: Any) -> Any:
    return value.copy() if type(value) in (set, bytearray) else value


_marks: dict[int, tuple[Any, dict[str, Pattern]]] = {}


def _mark(node: Any, patterns: dict[str, Pattern]) -> None:
    i = id(node)
    try:
        _marks[i] = (weakref.ref(node, lambda _: _marks.pop(i, None)), patterns)
    except TypeError:  # slots without __weakref__: held on to for a while
        _marks[i] = (node, patterns)
        _held.append(i)
        if len(_held) > _HELD_AT_MOST:
            _marks.pop(_held.popleft(), None)


_held: deque[int] = deque()
_HELD_AT_MOST = 4096


def _attributes(node: Any, slots: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
    for name in slots:
        if hasattr(node, name):
            yield name, getattr(node, name)
    yield from getattr(node, "__dict__", {}).items()


def is_dynamic(child: Any) -> bool:
    """Returns whether a child is an array, a node or a container; the rest is static."""
    if child is no_gradient:
        return False
    kind = nodes.kind_of(type(child))
    if isinstance(kind, NodeType) or kind is CHILDLESS:
        return True
    return kind is not ATOM and adapter_of(child) is not None


# --- registration ---------------------------------------------------------------------------------

_classes: dict[type, None] = {Constant: None}
_registering = threading.RLock()


def _enroll(cls: type) -> None:
    """Registers a functor class with every loaded pytree registry, and with later ones."""
    with _registering:
        if cls in _classes or not _is_for_registries(cls):
            return
        _classes[cls] = None
        for adapter in adapters(Nodes):
            _tell(adapter, cls)


def _enroll_all(adapter: Framework) -> None:
    if isinstance(adapter, Nodes):
        for cls in tuple(_classes):
            _tell(adapter, cls)


def _tell(adapter: Nodes, cls: type) -> None:
    if adapter.node_type(cls) is None:  # libraries register their own classes
        adapter.register_functor(cls)


def _is_for_registries(cls: type) -> bool:
    """Returns whether a class is a functor, and not a leaf or known to other libraries."""
    kinds = [kind for adapter in adapters(Nodes) if (kind := adapter.node_type(cls)) is not None]
    declaration = declaration_of(cls)
    if declaration is None:
        return any(kind.pytree for kind in kinds)
    return not (declaration.leaf or issubclass(cls, CONTAINERS) or kinds)


class _Enrolling(nodes.Source):
    def meet(self, cls: type) -> None:
        _enroll(cls)

    def hear(self, news: Any) -> None:
        if isinstance(news, type):
            _enroll(news)
        else:
            _enroll_all(news)


nodes.sources.append(_Enrolling())
