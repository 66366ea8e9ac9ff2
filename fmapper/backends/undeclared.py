"""Finds undeclared objects that hold arrays: a forgotten `@functor`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fmapper.backends.discovery import adapter_of
from fmapper.errors import NotAFunctorError
from fmapper.tree.classes import slot_names
from fmapper.tree.functor import declaration_of
from fmapper.tree.keypath import Link, format_link
from fmapper.tree.nodes import CONTAINERS, LEAF, Item, Kind, NodeType, no_gradient
from fmapper.tree.objects import cached_names
from fmapper.tree.walk import visit, walk

_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, bytearray, range, slice)
_BARE = frozenset({dict, list, tuple})  # they have no attributes
_get = object.__getattribute__  # a class's `__getattr__` may raise anything
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def check_leaf(
    leaf: Any,
    where: Callable[[Any], Link],
    place: Any = None,
    others: Callable[[], Iterable[Any]] = tuple,
) -> None:
    """Raises for a leaf that is not an array but holds some.

    Args:
        leaf: The leaf.
        where: Returns the path of the leaf from `place`; called only for an error.
        place: The argument of `where`.
        others: Returns the other leaves of the tree, whose classes the error names, too.

    Raises:
        NotAFunctorError: The leaf holds arrays; names the path, the class, the fields and the way
            out.
    """
    if issubclass(type(leaf), _OPAQUE) or declaration_of(type(leaf)) is not None:
        return
    fields = [label for label, part in _parts(leaf) if holds_arrays(part)]
    if fields:
        raise NotAFunctorError(
            f"{format_link(where(place))}: {_refusal(leaf, fields)}{_further(leaf, others())}"
        )


def check_carried(node: Any, node_type: NodeType, where: Callable[[Any], Link]) -> None:
    """Raises for a node that holds undeclared arrays besides its children.

    That is a dataclass that keeps arrays outside its fields, or a container subclass that keeps
    them in attributes. With `children=` in its declaration, the rest is carried over.
    """
    cls = type(node)
    if cls in _BARE:
        return
    declaration = declaration_of(cls)
    if declaration is not None and (
        declaration.children is not None or declaration.rebuild is not None
    ):
        return
    if node_type.carried is not None:
        suspects = [(name, value) for name, value in node_type.carried(node) if holds_arrays(value)]
        inner = [value for _, value, _ in visit(node, once=True)] if suspects else []
        fields = [f".{name}" for name, value in suspects if holds_arrays(value, besides=inner)]
        if fields:
            raise NotAFunctorError(
                f"{format_link(where(node))}: {cls.__name__} holds arrays in {', '.join(fields)}, "
                "in objects that are not functors, so they would be left behind. Decorate the "
                "classes of "
                "those objects with @fmapper.functor, or mark them with @fmapper.leaf."
            )
        return
    if declaration is None and not isinstance(node, CONTAINERS):
        return
    state = getattr(node, "__dict__", None)
    if not state:
        return
    declared = {key for key, _ in node_type.items(node)} | set(cached_names(cls))
    fields = [
        f".{name}" for name, value in state.items() if name not in declared and holds_arrays(value)
    ]
    if fields:
        beside = "items" if declaration is None else "fields"
        raise NotAFunctorError(
            f"{format_link(where(node))}: {cls.__name__} holds arrays in {', '.join(fields)}, "
            f"besides its {beside}, so they would be left behind. Make them fields, or declare the "
            f"children: @fmapper.functor(children=(...)) on {cls.__name__}."
        )


def holds_arrays(x: Any, *, besides: Iterable[Any] = ()) -> bool:
    """Returns whether an object is an array, or holds one: a child, attribute, cell or item.

    Args:
        x: Anything; it is not changed.
        besides: Objects to ignore, and everything that is reached only through them.
    """
    skip = {id(value) for value in besides}
    return any(
        adapter_of(value) is not None or value is no_gradient  # in the place of an array
        for _, value, kind, _ in walk(x, enter=_enter_all, skip=skip)
    )


def _enter_all(value: Any, kind: NodeType | Kind) -> Iterable[Item] | None:
    """Yields everything that an object holds, whether it is a child or not."""
    if isinstance(kind, NodeType):
        return kind.items(value) if kind.carried is None else vars(value).items()
    is_closed = kind is not LEAF or declaration_of(type(value)) is not None
    return None if is_closed or adapter_of(value) is not None else _parts(value)


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """Yields the contents of an undeclared object, each with its name in errors."""
    cls = type(x)  # not isinstance, which asks the object for its class
    if issubclass(cls, _OPAQUE):
        return
    if issubclass(cls, types.MethodType):
        yield "the object it is bound to", x.__self__
        return
    if issubclass(cls, functools.partial):
        yield "func", x.func
        yield from ((f"args[{i}]", value) for i, value in enumerate(x.args))
        yield from ((f"keywords[{name!r}]", value) for name, value in x.keywords.items())
    if issubclass(cls, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            try:
                yield f"its closure ({name})", cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        yield from (("its defaults", value) for value in defaults)
    if issubclass(cls, set | frozenset):
        yield from (("its items", value) for value in x)
    if issubclass(cls, types.MappingProxyType):
        yield from ((f"[{key!r}]", value) for key, value in x.items())
    for name in slot_names(cls):
        try:
            yield f".{name}", _get(x, name)
        except AttributeError:  # not set
            continue
    try:
        state = _get(x, "__dict__")
    except AttributeError:
        return
    yield from ((f".{name}", value) for name, value in state.items())


def _further(leaf: Any, others: Iterable[Any]) -> str:
    """Lists the other classes in a leaf, and in other leaves, that must be declared as well."""
    lines: dict[type, str] = {}
    for _, value, kind, _ in walk([leaf, *others], enter=_enter_all):
        cls = type(value)
        if cls in lines or cls is type(leaf) or isinstance(kind, NodeType):
            continue
        if declaration_of(cls) is not None or adapter_of(value) is not None:
            continue
        if issubclass(cls, (*_OPAQUE, *_FUNCTIONS, set, frozenset, types.MappingProxyType)):
            continue
        fields = [label for label, part in _parts(value) if holds_arrays(part)]
        if fields:
            lines[cls] = f"{cls.__name__} holds arrays in {', '.join(dict.fromkeys(fields))}"
    if not lines:
        return ""
    return f" So must these classes be declared: {'; '.join(lines.values())}."


def _refusal(leaf: Any, fields: list[str]) -> str:
    cls = type(leaf).__name__
    held = ", ".join(dict.fromkeys(fields))
    if isinstance(leaf, _FUNCTIONS):
        name = getattr(leaf, "__qualname__", cls)
        return (
            f"{cls} {name} holds arrays in {held} and cannot be rebuilt around new ones. Make it "
            "a class with those arrays as attributes, a __call__, and @fmapper.functor above it; "
            "or pass strict=False to leave it as it is."
        )
    if isinstance(leaf, set | frozenset | types.MappingProxyType):
        return (
            f"{cls} holds arrays in {held} but is not a container with keys. Use a list or a dict."
        )
    names = "".join(f"{field[1:]!r}, " for field in fields if field.startswith("."))
    names = names.rstrip() if names.count(",") == 1 else names.removesuffix(", ")
    return (
        f"{cls} holds arrays in {held} but is not a functor. Decorate it with @fmapper.functor, or "
        f"mark it with @fmapper.leaf. For a class that you do not own: fmapper.functor("
        f"{cls}, children=({names}))."
    )
