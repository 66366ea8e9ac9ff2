"""Taking nodes apart and putting them together: one `NodeType` per class, found once."""

from __future__ import annotations

import enum
import functools
import numbers
import types
import typing
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Self, TypeAlias

from fmapper.errors import DeclarationError, RebuildError
from fmapper.tree.functor import (
    CONTAINERS,
    Declaration,
    attribute_names,
    class_attribute,
    declaration_of,
    has_class_attribute,
    on_class,
    slot_names,
)
from fmapper.tree.no_gradient import NoGradient


class Kind(enum.Enum):
    """What an object is to a walk if it is not a node with children."""

    LEAF = "given to f, and remembered"
    ATOM = "given to f every time: numbers and strings have no identity"
    INTERNED = "an atom that counts as an array when it is moved: np.True_ and np.False_"
    CHILDLESS = "a node without children that is its own copy: None, () and no_gradient"
    PENDING = "a node that exists only once its children do"
    FITTED = "a leaf of which some nodes make something of their own: torch modules, parameters"

    __hash__ = object.__hash__  # quicker than that of an enum


LEAF, ATOM, INTERNED, CHILDLESS, PENDING, FITTED = Kind
LEAVES = frozenset({LEAF, ATOM, INTERNED})
WITHOUT_IDENTITY = frozenset({ATOM, INTERNED})


class Fitting(dict[Any, Any]):
    """Slots whose node makes something of its own of a leaf, which is then so at every place."""

    __slots__ = ()

    def fit(self, new: Any, old: Any) -> Any:
        """Returns what `new` is to be where `old` was."""
        raise NotImplementedError


class Kept(list[Any]):
    """What must outlive a walk, and what is left to do at its end.

    Attributes:
        at_end: Called with a function that gives what an object of the tree has become, and the
            object itself if it was not in the tree.
        refitted: What was fitted only after it had been put elsewhere, and what it has become.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_end: list[Callable[[Callable[[Any], Any]], None]] = []
        self.refitted: list[tuple[Any, Any]] = []


walking: ContextVar[Kept | None] = ContextVar("fmapper_walking", default=None)
"""What the walk of a user's own that is under way keeps; its nodes are rebuilt one by one."""


def at_end(keep: Callable[[Any], None], todo: Callable[[Callable[[Any], Any]], None]) -> None:
    """Has `todo(new_of)` of an opener called when all nodes of the tree are rebuilt."""
    kept = getattr(keep, "__self__", None)
    if isinstance(kept, Kept):
        kept.at_end.append(todo)


def refit(keep: Callable[[Any], None], before: Any, after: Any) -> None:
    """Has every place of a leaf that an opener fitted too late get what it has become."""
    kept = getattr(keep, "__self__", None)
    if isinstance(kept, Kept):
        kept.refitted.append((before, after))


Item: TypeAlias = "tuple[Any, Any]"
Finish: TypeAlias = "Callable[[Any], Any] | None"
Opened: TypeAlias = "tuple[Any, Iterator[Item], Any, Finish]"
Opener: TypeAlias = "Callable[[Any, Callable[[Any], None]], Opened]"
"""`open(node, keep) -> (new, items, slots, finish)`: the new node, or PENDING where it cannot
exist yet; the (key, child) pairs; where `slots[key] = new child` goes; what makes the new node of
the full slots, or None where filling them was all. `keep` is handed what must outlive the walk."""

_EMPTY = ()
_NO_CHILDREN = ("__orig_class__",)  # what typing.Generic leaves on instances; carried over
_new: Callable[[type], Any] = object.__new__
_set = object.__setattr__


class NodeType:
    """How instances of a class are flattened and rebuilt; adapters make these for theirs.

    The attributes that stand here with their defaults are for others: see `fmapper.backends`.

    Args:
        children: `node -> {key: child}`, in order.
        rebuild: `(node, new_children) -> new node`. Needed where `shell` is not given.
        shell: `node -> new node without children`. Where it is given, the shell exists before its
            children do, so that cycles through the node work.
        fill: `(shell, node, new_children) -> None` puts the children into the shell.
        plain: What `fmapstructure` puts in its place: dict, list or tuple.
    """

    carried: Callable[[Any], Iterable[Item]] | None = None
    borrowed: tuple[Any, ...] = ()
    aside: Callable[[Any], Iterable[Item]] | None = None
    follows: Callable[[Any], Iterable[Item]] | None = None
    passengers: Callable[[Any], Iterable[Item]] | None = None
    put: Callable[[Any, Mapping[Any, Any]], object] | None = None
    static: Callable[[Any], Any] | None = None
    box: Callable[[Any], Iterable[Item]] | None = None
    pytree: bool = False

    def __init__(
        self,
        children: Callable[[Any], Mapping[Any, Any]],
        rebuild: Callable[[Any, Mapping[Any, Any]], Any] | None = None,
        *,
        shell: Callable[[Any], Any] | None = None,
        fill: Callable[[Any, Any, Mapping[Any, Any]], None] | None = None,
        plain: type = dict,
    ) -> None:
        if (shell is None) != (fill is None) or (shell is None) == (rebuild is None):
            raise TypeError("NodeType takes rebuild, or shell and fill.")

        def open(node: Any, keep: Callable[[Any], None]) -> Opened:
            found = children(node)
            keep(found)
            if shell is None:
                assert rebuild is not None
                return PENDING, iter(found.items()), dict(found), functools.partial(rebuild, node)
            new = shell(node)

            def finish(slots: Mapping[Any, Any]) -> Any:
                assert fill is not None
                fill(new, node, slots)
                return new

            return new, iter(found.items()), dict(found), finish

        self.open: Opener = open
        self._items: Callable[[Any], Iterable[Item]] = lambda node: children(node).items()
        self.plain = plain

    @classmethod
    def opening(
        cls, open: Opener, items: Callable[[Any], Iterable[Item]], plain: type = dict
    ) -> Self:
        """Makes a node type with its own opener: the fast way, for types that are walked often.

        Args:
            open: See `Opener`.
            items: `node -> [(key, child)]`, in order.
            plain: As above.
        """
        made: Self = _new(cls)
        made.open, made._items, made.plain = open, items, plain
        return made

    def items(self, node: Any) -> Iterable[Item]:
        """Returns the (key, child) pairs of a node, in order."""
        return self._items(node)

    def children(self, node: Any) -> dict[Any, Any]:
        """Returns the children of a node by key, in order."""
        return dict(self._items(node))

    def rebuild(self, node: Any, new_children: Mapping[Any, Any]) -> Any:
        """Returns a new node with other children; the keys must be those of `children(node)`."""
        kept: list[Any] | None = walking.get()
        new, items, slots, finish = self.open(node, [].append if kept is None else kept.append)
        if new is CHILDLESS:
            return node
        for key, _ in items:
            slots[key] = new_children[key]
        return new if finish is None else finish(slots)

    def open_plain(self, node: Any, keep: Callable[[Any], None]) -> Opened:
        """Opens a node so that a plain dict, list or tuple takes its place."""
        items = tuple(self._items(node))
        keep(items)
        if node is _EMPTY:
            return CHILDLESS, iter(()), (), None
        if self.plain is dict:
            out: Any = dict(items)
            return out, iter(items), out, None
        slots = [child for _, child in items]
        positions = enumerate(slots.copy())
        if self.plain is list:
            return slots, positions, slots, None
        return PENDING, positions, slots, tuple


# --- builtin containers -------------------------------------------------------------------------


def _open_list(node: Any, keep: Callable[[Any], None]) -> Opened:
    source = node.copy()
    keep(source)
    new = source.copy()
    return new, enumerate(source), new, None


def open_dict(node: Any, keep: Callable[[Any], None]) -> Opened:
    """Opens a dict: a shell with the same keys."""
    source = node.copy()
    keep(source)
    new = source.copy()
    return new, iter(source.items()), new, None


def open_childless(node: Any, keep: Callable[[Any], None]) -> Opened:
    """Opens a node without children, which is its own copy."""
    return CHILDLESS, iter(()), None, None


def _open_tuple(node: Any, keep: Callable[[Any], None]) -> Opened:
    if not node:
        return CHILDLESS, iter(()), None, None
    return PENDING, enumerate(node), [None] * len(node), tuple


def _list_like(cls: type) -> NodeType:
    """Opens deques and subclasses of list: a shell of the same class, extended at the end."""
    native: Any = deque if issubclass(cls, deque) else list

    def open(node: Any, keep: Callable[[Any], None]) -> Opened:
        new: Any = native.__new__(cls)
        if native is deque:
            deque.__init__(new, maxlen=node.maxlen)
        _carry_attributes(node, new)
        source = list(native.__iter__(node))
        keep(source)

        def finish(slots: list[Any]) -> Any:
            native.extend(new, slots)
            return new

        return new, enumerate(source), source.copy(), finish

    return NodeType.opening(open, lambda node: enumerate(native.__iter__(node)), list)


def _dict_like(cls: type) -> NodeType:
    """Opens dicts that are not `dict` itself: type, order, default factory and attributes stay."""
    native: Any = next(base for base in (OrderedDict, defaultdict, dict) if issubclass(cls, base))
    assign = native.__setitem__

    def open(node: Any, keep: Callable[[Any], None]) -> Opened:
        new: Any = native.__new__(cls)
        if native is defaultdict:
            new.default_factory = node.default_factory
        _carry_attributes(node, new)
        source = dict(native.items(node))
        keep(source)

        def finish(slots: dict[Any, Any]) -> Any:
            for key, child in slots.items():
                assign(new, key, child)
            return new

        return new, iter(source.items()), source.copy(), finish

    return NodeType.opening(open, native.items)


def _tuple_like(cls: type) -> NodeType:
    """Returns tuples that are not `tuple` itself; a namedtuple has its field names as keys."""
    try:
        tuple.__new__(cls)
        make: Callable[[Iterable[Any]], Any] = functools.partial(tuple.__new__, cls)
    except TypeError:  # made in C (torch.Size, struct sequences): only its own constructor will do
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

    return NodeType.opening(open, items, tuple if fields is None else dict)


def _carry_attributes(node: Any, new: Any) -> None:
    """Carries over the attributes of a container subclass, which are not children."""
    attributes = getattr(node, "__dict__", None)
    if attributes is node:  # a dict whose attributes are its items
        _set(new, "__dict__", new)
    elif attributes:
        new.__dict__.update(attributes)
    for name in slot_names(type(node)):
        if hasattr(node, name):
            _set(new, name, getattr(node, name))


_LIST = NodeType.opening(_open_list, enumerate, list)
_DICT = NodeType.opening(open_dict, dict.items)
_TUPLE = NodeType.opening(_open_tuple, enumerate, tuple)


_EXACT: dict[type, NodeType] = {list: _LIST, dict: _DICT, tuple: _TUPLE}


def _container(cls: type) -> NodeType:
    exact = _EXACT.get(cls)
    if exact is not None:
        return exact
    if issubclass(cls, tuple):
        return _tuple_like(cls)
    return _dict_like(cls) if issubclass(cls, dict) else _list_like(cls)


# --- functors -----------------------------------------------------------------------------------


def _functor(cls: type, declaration: Declaration) -> NodeType:
    names = declaration.children
    if declaration.rebuild is None:
        foreign = _container(cls) if issubclass(cls, tuple) else _foreign(cls)
        if foreign is not None:
            return foreign if names is None else _restrict(foreign, names)
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
    return NodeType.opening(open, lambda node: read(node).items())


def cached_names(cls: type) -> tuple[str, ...]:
    """Returns what `functools.cached_property` keeps: computed from children, not state."""
    names = [
        name
        for base in cls.__mro__
        for name, value in base.__dict__.items()
        if isinstance(value, functools.cached_property)
    ]
    for base in cls.__mro__:  # attrs turns those of a class with slots into slots
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
            found = {}
            for name in names:
                try:
                    found[name] = getattr(node, name)
                except AttributeError:
                    if not optional:
                        raise _no_such_child(node, name) from None
            return found
        found = {name: getattr(node, name) for name in slots if hasattr(node, name)}
        found.update(getattr(node, "__dict__", {}))
        for name in (*cached, *_NO_CHILDREN):
            found.pop(name, None)
        return found

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
    """Opens a node whose children are all of `vars(node)`."""
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
    """Opens the named attributes, which live in `vars(node)`, as children: made once per class."""
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
    """Returns slots, properties and mixtures: the shell is filled at the end."""

    def open(node: Any, keep: Callable[[Any], None]) -> Opened:
        found = read(node)
        keep(found)
        try:
            new = _new(cls)
        except TypeError as error:
            raise RebuildError(
                f"{cls.__name__} cannot be made empty ({error}): give a rebuild."
            ) from error
        for name in slots:
            if name not in found and name not in cached and hasattr(node, name):
                _set(new, name, getattr(node, name))
        state = getattr(node, "__dict__", None)
        if state:
            new.__dict__.update(
                (name, value)
                for name, value in state.items()
                if name not in found and name not in cached
            )

        def finish(filled: dict[str, Any]) -> Any:
            for name, child in filled.items():
                try:
                    _set(new, name, child)
                except AttributeError as error:
                    raise RebuildError(
                        f"the child {name!r} of {cls.__name__} cannot be set ({error}): "
                        "give the declaration a rebuild."
                    ) from error
            return new

        return new, iter(found.items()), found.copy(), finish

    return open


def _custom(
    cls: type,
    rebuild: Callable[[Any, Mapping[str, Any]], Any],
    read: Callable[[Any], dict[str, Any]],
) -> NodeType:
    """Returns a functor with a rebuild of its own, held to what it promises."""

    def rebuild_checked(node: Any, new_children: Mapping[str, Any]) -> Any:
        new = rebuild(node, dict(new_children))
        what = f"rebuild of {cls.__name__}"
        if type(new) is not type(node):
            raise RebuildError(f"{what} returned {_a(new)}, not a {cls.__name__}.")
        if new is node:
            raise RebuildError(
                f"{what} returned the node it was given. "
                "It must make a new one and leave its argument alone."
            )
        try:
            found, again = read(new), read(new)
        except DeclarationError as error:
            raise RebuildError(f"{what} forgot a child: {error.args[0]}") from error
        for key, child in new_children.items():
            if key in found and found[key] is not again[key]:
                continue  # the class makes this child anew each time it is read
            if key not in found or not _same(found[key], child):
                got = _a(found[key]) if key in found else "nothing"
                raise RebuildError(
                    f"{what} forgot the child {key!r}: it was given {_a(child)}, the new node "
                    f"holds {got}. It must store the children as they are, without converting or "
                    "copying them."
                )
        return new

    return NodeType(read, rebuild_checked)


def _same(held: Any, given: Any) -> bool:
    """Tells whether a rebuilt node holds the child it was given, or a copy of that list or dict."""
    if held is given:
        return True
    if isinstance(held, list | tuple) and isinstance(given, list | tuple):
        return len(held) == len(given) and all(map(_same, held, given))
    if isinstance(held, dict) and isinstance(given, dict):
        return held.keys() == given.keys() and all(_same(held[key], given[key]) for key in held)
    return type(held) is type(given) and type(held) in _ATOMS and held == given


def _a(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _restrict(kind: NodeType, names: tuple[str, ...]) -> NodeType:
    """Returns a node type of which only the declared children are children."""

    def children(node: Any) -> dict[Any, Any]:
        found = kind.children(node)
        for name in names:
            if name not in found:
                raise _no_such_child(node, name)
        return {name: found[name] for name in names}

    def rebuild(node: Any, new_children: Mapping[Any, Any]) -> Any:
        return kind.rebuild(node, kind.children(node) | dict(new_children))

    return NodeType(children, rebuild)  # the rest of the children counts as static, by identity


# --- finding the node type of a class -----------------------------------------------------------

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(Ellipsis), type(NotImplemented)})
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
    """One that the look-up asks beside the declarations: the adapters, the pytree registries."""

    def look(self) -> None:
        """Takes notice of frameworks and registrations that are new; called before every walk."""

    def node_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class by its kind, as of a module of a framework."""

    def registered_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class in a pytree registry, by exact type."""

    def leaf_kind(self, cls: type) -> Kind | None:
        """Returns LEAF for a class of arrays, INTERNED for one of such constants, else None."""

    def is_fitted(self, cls: type) -> bool:
        """Tells whether there are nodes with slots that are `Fitting` for leaves of a class."""
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
    """Takes notice of what is new since the last call; every call into fmapper begins with it."""
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
    """Tells how instances of a class are taken apart, or that they are leaves; once per class."""
    found = kinds.get(cls)
    return _look_up_once(kinds, cls, _look_up) if found is None else found


def _look_up_once(cache: dict[type, Any], cls: type, look_up: Callable[[type], Any]) -> Any:
    """Looks a class up and remembers the answer, unless a declaration came in between.

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
    """Returns what `openers[cls]` is to be; entered there."""
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
    """Returns the opener that puts a plain dict, list or tuple in the place of a node."""
    kind = kind_of(cls)
    return kind.open_plain if isinstance(kind, NodeType) else opener_of(cls)


def _look_up(cls: type) -> NodeType | Kind:
    declaration = declaration_of(cls)
    if declaration is not None:
        for source in sources:
            source.meet(cls)
        return LEAF if declaration.leaf else _functor(cls, declaration)
    if cls is type(None) or cls is NoGradient:
        return CHILDLESS
    if cls in _ATOMS:
        return ATOM
    if issubclass(cls, CONTAINERS):
        exact = cls in (*CONTAINERS, OrderedDict, defaultdict)
        return (None if exact else _from_registry(cls)) or _container(cls)
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


def _foreign(cls: type) -> NodeType | None:
    return next(filter(None, (source.node_type(cls) for source in sources)), None)


def _from_registry(cls: type) -> NodeType | None:
    return next(filter(None, (source.registered_type(cls) for source in sources)), None)


on_class(lambda cls: forget())
