"""Declarations of classes: `@functor`, `@leaf`, and the registry behind them."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypedDict, TypeVar, Unpack, cast, overload

from fmapper.errors import DeclarationError
from fmapper.tree.classes import attribute_names, class_attribute, has_class_attribute, slot_names
from fmapper.tree.nodes import CONTAINERS, tell

C = TypeVar("C", bound=type)
Rebuild = Callable[[Any, Mapping[str, Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a class.

    Attributes:
        cls: The class that was declared; its subclasses inherit the declaration.
        children: The names of the children, or None for all instance attributes.
        rebuild: `(node, new_children) -> new node`, or None for the default rebuild.
        leaf: True for `@leaf`: `f` gets the whole object.
        trainable: The names of the children that training changes, or None for all.
        static: The names of the children that the registries of frameworks treat as settings.
        repr: Whether instances print as a tree.
    """

    cls: type
    children: tuple[str, ...] | None = None
    rebuild: Rebuild | None = None
    leaf: bool = False
    trainable: tuple[str, ...] | None = None
    static: tuple[str, ...] = ()
    repr: bool = False


_declared: dict[type, Declaration] = {}
_DUNDER = "__fmapper__"


def declaration_of(cls: type) -> Declaration | None:
    """Returns the declaration that instances of `cls` follow: its own, or the nearest inherited."""
    for base in cls.__mro__:
        declaration = _declared.get(base) or base.__dict__.get(_DUNDER)
        if declaration is not None:
            return declaration
    return None


class _Options(TypedDict, total=False):
    children: Iterable[str] | None
    rebuild: Rebuild | None
    trainable: Iterable[str] | None
    static: Iterable[str]
    repr: bool


@overload
def functor(cls: C, /, **options: Unpack[_Options]) -> C: ...
@overload
def functor(**options: Unpack[_Options]) -> Callable[[C], C]: ...
def functor(
    cls: Any = None,
    /,
    *,
    children: Iterable[str] | None = None,
    rebuild: Rebuild | None = None,
    trainable: Iterable[str] | None = None,
    static: Iterable[str] = (),
    repr: bool = False,
) -> Any:
    """Declares which attributes of a class are its children, so that trees of it can be mapped.

    Works bare, with arguments, and as a call on a class that is not yours. Subclasses inherit the
    declaration and may make their own. The default rebuild makes a new instance without calling
    `__init__` or `__post_init__` and carries over everything else by reference; values that
    `functools.cached_property` keeps are dropped, because they were computed from the old children.

    Args:
        cls: The class.
        children: Names of the attributes that are children, in the order in which they are walked.
            None: all of them, that is the fields of a dataclass or attrs class, else the
            `__slots__` of all bases and `vars(obj)`. `()`: a node without children.
        rebuild: `(node, new_children) -> new node`, where `new_children` maps names to children. It
            must not change its arguments, and the new node must hold the children it was given.
        trainable: Names of the children that training changes; see `trainables`. None: all of them.
            Walks and moves ignore it.
        static: Names of children that the pytree registries of JAX, torch and optree treat as
            settings, whatever they hold: a program is compiled again for other values. Numbers and
            strings are always settings. Walks and moves ignore it.
        repr: Whether instances print as `fmapper.summary` shows them, in notebooks, too: as a tree
            with shapes, dtypes and devices, ties marked, like items folded, cut after 40 lines.

    Returns:
        The class itself.

    Raises:
        DeclarationError: The class has another declaration of its own already, or `children` names
            something that the class cannot have, or `trainable` or `static` something that is not
            a child.

    Examples:
        >>> import fmapper
        >>> @fmapper.functor
        ... class Affine:
        ...     def __init__(self, w, b):
        ...         self.w, self.b = w, b
        >>> doubled = fmapper.fmap(lambda x: 2 * x, Affine(3, 4))
        >>> doubled.w, doubled.b
        (6, 8)
    """
    if cls is None:
        return lambda cls: functor(
            cls, children=children, rebuild=rebuild, trainable=trainable, static=static, repr=repr
        )
    _check_class("functor", cls)
    names = None if children is None else _names(cls, children, "children")
    trained = None if trainable is None else _names(cls, trainable, "trainable")
    settings = _names(cls, static, "static")
    _check_children(cls, names, trained or (), "trainable", "trained")
    _check_children(cls, names, settings, "static", "static")
    if set(settings) & set(trained or ()):
        both = ", ".join(f"{name!r}" for name in settings if name in (trained or ()))
        raise DeclarationError(
            f"functor: {cls.__name__} names {both} in trainable= and in static=. A static child "
            f"cannot be trained."
        )
    if rebuild is not None and not callable(rebuild):
        raise DeclarationError(f"functor: rebuild of {cls.__name__} is not callable: {rebuild!r}.")
    if rebuild is None and issubclass(cls, CONTAINERS) and not has_class_attribute(cls, "_fields"):
        raise DeclarationError(
            f"functor: {cls.__name__} derives from a builtin container, so it is already a node "
            f"whose items are its children. Remove the declaration, or pass rebuild=."
        )
    _declare(Declaration(cls, names, rebuild, trainable=trained, static=settings, repr=repr))
    if repr:
        type.__setattr__(cls, "__repr__", lambda self: str(_summary(self)))
        type.__setattr__(cls, "_repr_html_", lambda self: _summary(self)._repr_html_())
    return cls


def _summary(node: Any) -> Any:
    from fmapper import summary  # not defined yet when this module loads

    return summary(node, max_rows=40)


def leaf(cls: C, /) -> C:
    """Declares a class as a leaf: a walk passes its instances to `f` whole and never enters them.

    Raises:
        DeclarationError: The class has a declaration of its own already.

    Examples:
        >>> import fmapper
        >>> @fmapper.leaf
        ... class Tokenizer:
        ...     pass
        >>> fmapper.is_leaf(Tokenizer())
        True
    """
    _check_class("leaf", cls)
    _declare(Declaration(cls, leaf=True))
    return cls


def _check_class(function: str, cls: object) -> None:
    if not isinstance(cls, type):
        raise DeclarationError(
            f"{function}: {cls!r} is not a class. Declare the class of the object, not the object."
        )
    name = cls.__name__
    if getattr(builtins, name, None) is cls:
        raise DeclarationError(
            f"{name} is a builtin, whose role in a walk is fixed. Declare a class of your own."
        )


def _names(cls: type, given: Iterable[str], option: str) -> tuple[str, ...]:
    if isinstance(given, str):
        raise DeclarationError(
            f"functor: {option} of {cls.__name__} is the string {given!r}. "
            f"Write a tuple: {option}=({given!r},)."
        )
    names = tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise DeclarationError(
                f"functor: {option} of {cls.__name__} must be attribute names, not {name!r}."
            )
    if len(set(names)) < len(names):
        raise DeclarationError(f"functor: {option} of {cls.__name__} repeats a name: {names}.")
    allowed = _known_names(cls)
    missing = [name for name in names if allowed is not None and name not in allowed]
    if missing:
        raise DeclarationError(
            f"functor: {cls.__name__} has no attribute {', '.join(map(repr, missing))}. "
            f"It has: {', '.join(sorted(allowed or ())) or 'none'}."
        )
    return names


def _check_children(
    cls: type, children: tuple[str, ...] | None, names: tuple[str, ...], option: str, word: str
) -> None:
    strangers = [name for name in names if children is not None and name not in children]
    if strangers:
        raise DeclarationError(
            f"functor: {option} of {cls.__name__} names {', '.join(map(repr, strangers))}, but its "
            f"children are {', '.join(map(repr, children or ())) or 'none'}. Only a child can be "
            f"{word}."
        )


def _known_names(cls: type) -> set[str] | None:
    """Returns all names that instances can have; None if that depends on the instance."""
    fields = attribute_names(cls)
    free = getattr(cls, "__dictoffset__", 0) != 0
    if fields is None and free:
        return None
    if free and any(
        has_class_attribute(cls, hook) for hook in ("__post_init__", "__attrs_post_init__")
    ):
        return None
    inherited = {name for base in cls.__mro__[:-1] for name in base.__dict__}
    names = set(fields or ()) | set(slot_names(cls)) | inherited
    return {name for name in names if not (name.startswith("__") and name.endswith("__"))}


def _declare(declaration: Declaration) -> None:
    cls = declaration.cls
    before = _declared.get(cls) or cls.__dict__.get(_DUNDER)
    if before is not None and not _say_the_same(before, declaration):
        raise DeclarationError(
            f"{cls.__module__}.{cls.__qualname__} is already declared as {_spell(before)}, and "
            f"now as {_spell(declaration)}. A class can be declared only once. To treat a "
            f"subclass differently, declare the subclass."
        )
    if cls in _declared:
        return
    _declared[cls] = declaration
    is_mutable = cls.__flags__ & _HEAP_TYPE and not cls.__flags__ & _IMMUTABLE_TYPE
    if is_mutable and not class_attribute(cls, "_is_protocol"):  # a protocol counts its attributes
        # Class decorators that make a new class of this one (slots=True) copy its attributes.
        type.__setattr__(cls, _DUNDER, declaration)
        _watch_subclasses(cls)
    classes = [cls]
    for base in classes:
        tell(base)
        derived: list[type] = type.__subclasses__(base)
        classes += [sub for sub in derived if sub not in classes]


def _say_the_same(a: Declaration, b: Declaration) -> bool:
    """Returns whether two declarations agree, as when a notebook cell runs again."""
    mine, other = (dataclasses.replace(side, cls=object, rebuild=None) for side in (a, b))
    return mine == other and _do_the_same(a.rebuild, b.rebuild)


def _do_the_same(a: Any, b: Any) -> bool:
    if a is b or not (isinstance(a, FunctionType) and isinstance(b, FunctionType)):
        return bool(a is b or (a is not None and a == b))
    return (
        a.__code__ == b.__code__
        and a.__module__ == b.__module__
        and _function_contents(a) == _function_contents(b)
    )


def _function_contents(function: FunctionType) -> list[Any]:
    """Returns the defaults and closure of a function: plain values as repr, others as id."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            cells.append(cell)
    return [repr(x) if type(x) in (int, float, bool, str) else id(x) for x in (*defaults, *cells)]


def _spell(declaration: Declaration) -> str:
    """Returns a declaration as its author would write it."""
    if declaration.leaf:
        return "@leaf"
    given = {
        "children": declaration.children,
        "trainable": declaration.trainable,
        "static": declaration.static or None,
        "repr": declaration.repr or None,
    }
    options = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if declaration.rebuild is not None:
        options.append(f"rebuild={getattr(declaration.rebuild, '__qualname__', '...')}")
    return f"@functor({', '.join(options)})" if options else "@functor"


_IMMUTABLE_TYPE = 1 << 8
_HEAP_TYPE = 1 << 9


def _watch_subclasses(cls: type) -> None:
    """Announces every new subclass of `cls`; its `__init_subclass__` is kept."""
    original = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(sub: type, **kwargs: Any) -> None:
        if original is not None:
            original.__get__(None, sub)(**kwargs)
        else:
            owner: Any = next(base for base in sub.__mro__ if base.__dict__.get(name) is hook)
            super(owner, sub).__init_subclass__(**kwargs)
        tell(sub)

    name = "__init_subclass__"
    hook: Any = classmethod(cast(Any, __init_subclass__))
    type.__setattr__(cls, name, hook)
