"""Node types of declared classes: attributes as children, with the default or a custom rebuild."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fmapper.errors import DeclarationError, RebuildError
from fmapper.tree.classes import attribute_names, class_attribute, slot_names
from fmapper.tree.containers import container_type
from fmapper.tree.functor import Declaration, declaration_of
from fmapper.tree.nodes import (
    ATOMS,
    LEAF,
    Kind,
    NodeType,
    Opened,
    Opener,
    Source,
    opener,
    own_type_of,
)

_NO_CHILDREN = ("__orig_class__",)  # set on instances by typing.Generic; carried over
_new: Callable[[type], Any] = object.__new__
_set = object.__setattr__


class Declarations(Source):
    """The source of node types for declared classes and their subclasses."""

    def kind(self, cls: type) -> NodeType | Kind | None:
        """Returns the declared node type or kind of a class; None without a declaration."""
        declaration = declaration_of(cls)
        if declaration is None:
            return None
        if declaration.leaf:
            return LEAF
        names = declaration.children
        if declaration.rebuild is None:
            node_type = container_type(cls) if issubclass(cls, tuple) else own_type_of(cls)
            if node_type is not None:
                return node_type if names is None else restrict(node_type, names)
        functor = functor_type(cls, declaration)
        functor.computed = any(
            isinstance(class_attribute(cls, name), property) for name in names or ()
        )
        return functor


def functor_type(cls: type, declaration: Declaration) -> NodeType:
    """Makes the node type of a class from its declaration."""
    names = declaration.children
    slots, cached = slot_names(cls), cached_names(cls)
    if names is None:
        names = attribute_names(cls)
    read = _reader(names, slots, cached, optional=declaration.children is None)
    if declaration.rebuild is not None:
        return _custom(cls, declaration.rebuild, read)
    in_dict = getattr(cls, "__dictoffset__", 0) != 0 and not slots and _can_be_empty(cls)
    if in_dict and not any(_is_data_descriptor(cls, name) for name in names or ()):
        open = _open_all(cls, cached) if names is None else _open_named(cls, names, cached, read)
    else:
        open = _open_any(cls, slots, cached, read)
    return NodeType(open, lambda node: read(node).items())


def cached_names(cls: type) -> tuple[str, ...]:
    """Returns the names under which `functools.cached_property` caches values."""
    names = [
        name
        for base in cls.__mro__
        for name, value in base.__dict__.items()
        if isinstance(value, functools.cached_property)
    ]
    for base in cls.__mro__:  # attrs turns the cached properties of a class with slots into slots
        if "__attrs_attrs__" in base.__dict__:
            fields = {field.name for field in base.__dict__["__attrs_attrs__"]}
            names += [name for name in base.__dict__.get("__slots__", ()) if name not in fields]
    return tuple(names)


def _reader(
    names: tuple[str, ...] | None,
    slots: tuple[str, ...],
    cached: tuple[str, ...],
    *,
    optional: bool,
) -> Callable[[Any], dict[str, Any]]:
    """Makes `node -> {name: child}`; `optional` names (fields) may be unset, others not."""

    def read(node: Any) -> dict[str, Any]:
        if names is not None:
            values = {}
            for name in names:
                try:
                    values[name] = getattr(node, name)
                except AttributeError:
                    if not optional:
                        raise _no_such_child(node, name) from None
            return values
        values = {name: getattr(node, name) for name in slots if hasattr(node, name)}
        values.update(getattr(node, "__dict__", {}))
        for name in (*cached, *_NO_CHILDREN):
            values.pop(name, None)
        return values

    return read


def _no_such_child(node: Any, name: str) -> DeclarationError:
    have = [*slot_names(type(node)), *getattr(node, "__dict__", {})]
    return DeclarationError(
        f"{type(node).__name__} declares the child {name!r}, but this instance has no such "
        f"attribute. It has: {', '.join(have) or 'none'}. Correct children= in its declaration."
    )


def _is_data_descriptor(cls: type, name: str) -> bool:
    return hasattr(type(class_attribute(cls, name)), "__set__")


def _can_be_empty(cls: type) -> bool:
    try:
        _new(cls)
    except TypeError:
        return False
    return True


def _open_all(cls: type, cached: tuple[str, ...]) -> Opener:
    """Makes an opener for a node whose children are all of `vars(node)`."""
    generic = issubclass(cls, typing.Generic)

    def open(node: Any, keep: Callable[[Any], None]) -> Opened:
        source = node.__dict__.copy()
        for name in cached:
            source.pop(name, None)
        new = _new(cls)
        slots = new.__dict__
        slots.update(source)
        if generic:
            for name in _NO_CHILDREN:
                source.pop(name, None)
        keep(source)
        return new, iter(source.items()), slots, None

    return open


def _open_named(
    cls: type,
    names: tuple[str, ...],
    cached: tuple[str, ...],
    read: Callable[[Any], dict[str, Any]],
) -> Opener:
    """Makes an opener for named children in `vars(node)`, with code generated for the class."""
    pairs = "".join(f"({name!r}, state[{name!r}])," for name in names)
    drops = "".join(f"\n    slots.pop({name!r}, None)" for name in cached)
    source = f"""
def open(node, keep):
    state = node.__dict__
    try:
        items = ({pairs})
    except KeyError:
        items = tuple(read(node).items())
    keep(items)
    new = _new(cls)
    slots = new.__dict__
    slots.update(state){drops}
    return new, iter(items), slots, None
"""
    scope: dict[str, Any] = {"_new": _new, "cls": cls, "read": read}
    exec(compile(source, f"<fmapper open {cls.__name__}>", "exec"), scope)
    opener: Opener = scope["open"]
    return opener


def _open_any(
    cls: type,
    slots: tuple[str, ...],
    cached: tuple[str, ...],
    read: Callable[[Any], dict[str, Any]],
) -> Opener:
    """Makes an opener for slots, properties or a mixture, which fills the shell at the end."""

    def open(node: Any, keep: Callable[[Any], None]) -> Opened:
        contents = read(node)
        keep(contents)
        try:
            new = _new(cls)
        except TypeError as error:
            raise RebuildError(
                f"{cls.__name__} cannot be created empty ({error}): pass rebuild=."
            ) from error
        for name in slots:
            if name not in contents and name not in cached and hasattr(node, name):
                _set(new, name, getattr(node, name))
        state = getattr(node, "__dict__", None)
        if state:
            new.__dict__.update(
                (name, value)
                for name, value in state.items()
                if name not in contents and name not in cached
            )

        def finish(filled: dict[str, Any]) -> Any:
            for name, child in filled.items():
                try:
                    _set(new, name, child)
                except AttributeError as error:
                    raise RebuildError(
                        f"the child {name!r} of {cls.__name__} cannot be set ({error}): pass "
                        f"rebuild= in the declaration."
                    ) from error
            return new

        return new, iter(contents.items()), contents.copy(), finish

    return open


def _custom(
    cls: type,
    rebuild: Callable[[Any, Mapping[str, Any]], Any],
    read: Callable[[Any], dict[str, Any]],
) -> NodeType:
    """Makes the node type of a functor with a rebuild of its own, and checks each result."""

    def rebuild_checked(node: Any, new_children: Mapping[str, Any]) -> Any:
        new = rebuild(node, dict(new_children))
        what = f"rebuild of {cls.__name__}"
        if type(new) is not type(node):
            raise RebuildError(f"{what} returned {_a(new)}, not a {cls.__name__}.")
        if new is node:
            raise RebuildError(
                f"{what} returned its argument. It must create a new node and must not modify its "
                f"argument."
            )
        try:
            rebuilt, again = read(new), read(new)
        except DeclarationError as error:
            raise RebuildError(f"{what} forgot a child: {error.args[0]}") from error
        for key, child in new_children.items():
            if key in rebuilt and rebuilt[key] is not again[key]:
                continue  # the class makes a new child on each access
            if key not in rebuilt or not _same(rebuilt[key], child):
                actual = _a(rebuilt[key]) if key in rebuilt else "nothing"
                raise RebuildError(
                    f"{what} forgot the child {key!r}: it got {_a(child)}, but the new node holds "
                    f"{actual}. It must store the children without converting or copying them."
                )
        return new

    return NodeType(opener(read, rebuild_checked), lambda node: read(node).items())


def _same(held: Any, given: Any) -> bool:
    """Returns whether a rebuilt node holds the child it was given, or an equal list or dict."""
    if held is given:
        return True
    if isinstance(held, list | tuple) and isinstance(given, list | tuple):
        return len(held) == len(given) and all(map(_same, held, given))
    if isinstance(held, dict) and isinstance(given, dict):
        return held.keys() == given.keys() and all(_same(held[key], given[key]) for key in held)
    return type(held) is type(given) and type(held) in ATOMS and held == given


def _a(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def restrict(kind: NodeType, names: tuple[str, ...]) -> NodeType:
    """Narrows a node type to the declared children."""

    def children(node: Any) -> dict[Any, Any]:
        contents = kind.children(node)
        for name in names:
            if name not in contents:
                raise _no_such_child(node, name)
        return {name: contents[name] for name in names}

    def rebuild(node: Any, new_children: Mapping[Any, Any]) -> Any:
        return kind.rebuild(node, kind.children(node) | dict(new_children))

    # The other children count as static, by identity.
    return NodeType(opener(children, rebuild), lambda node: children(node).items())
