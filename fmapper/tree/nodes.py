"""Node types, and their lookup, once per class, in the sources of node types."""

from __future__ import annotations

import enum
import functools
import numbers
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias, final

CONTAINERS: tuple[type, ...] = (tuple, list, dict, deque)


class Kind(enum.Enum):
    """The kind of an object that is not a node with children."""

    LEAF = "given to f, and remembered"
    ATOM = "given to f every time: numbers and strings have no identity"
    INTERNED = "an atom that counts as an array when it is moved: np.True_ and np.False_"
    CHILDLESS = "a node without children that is its own copy: None, () and no_gradient"
    PENDING = "a node that exists only once its children do"

    __hash__ = object.__hash__  # quicker than that of an enum


LEAF, ATOM, INTERNED, CHILDLESS, PENDING = Kind
LEAVES = frozenset({LEAF, ATOM, INTERNED})
WITHOUT_IDENTITY = frozenset({ATOM, INTERNED})
ATOMS = frozenset({int, float, complex, bool, str, bytes, type(Ellipsis), type(NotImplemented)})


@final
class NoGradient:
    """The class of `no_gradient`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "no_gradient"

    def __reduce__(self) -> str:
        return "no_gradient"  # the same object again, also for copy.copy and pickle


no_gradient = NoGradient()
"""The gradient of everything that is not trained, such as a number or a frozen weight.

It is a node without children, so that maps over a gradient leave it alone, and `fmap` over a model
and its gradient keeps the leaf of the model there. Only a torch module has None instead, because it
holds nothing but tensors.
"""

# --- what a walk keeps ---------------------------------------------------------------------------


class Kept(list[Any]):
    """Objects that must outlive a walk, and tasks to run at its end.

    Attributes:
        at_end: Tasks; each is called with a function that maps an object of the tree to its new
            object, and any other object to itself.
        memo: The memo of the walk, if its keys are the ids of one tree and it began empty.
        again: The results that the memo returned for further places.
        alike: By the id of the `new` passed to `like`: `new`, the leaf `old`, and the result.
    """

    def __init__(self) -> None:
        self.at_end: list[Callable[[Callable[[Any], Any]], None]] = []
        self.memo: dict[Any, Any] = {}
        self.again: list[Any] = []
        self.alike: dict[int, tuple[Any, Any, Any]] = {}


walking: ContextVar[Kept | None] = ContextVar("fmapper_walking", default=None)
"""The `Kept` of a user's walk in progress, whose nodes are rebuilt one by one."""


def at_end(keep: Callable[[Any], None], todo: Callable[[Callable[[Any], Any]], None]) -> None:
    """Schedules `todo(new_of)` for when all nodes of the tree are rebuilt."""
    kept = getattr(keep, "__self__", None)
    if isinstance(kept, Kept):
        kept.at_end.append(todo)


def like(keep: Callable[[Any], None], new: Any, old: Any, make: Callable[[Any, Any], Any]) -> Any:
    """Returns `make(new, old)`, which replaces `new` throughout the tree.

    For nodes that wrap every new leaf in a class of their own, as torch modules do with parameters.
    """
    kept = getattr(keep, "__self__", None)
    if not isinstance(kept, Kept):
        return make(new, old)
    is_known = kept.memo.get(id(old)) is new
    if is_known and not kept.again:  # it has no other place
        result = kept.memo[id(old)] = make(new, old)
        return result
    _, earlier, result = kept.alike.get(id(new), (None, None, None))
    if earlier is not old:
        result = make(new, old)
        kept.alike[id(new)] = new, old, result
        if is_known:
            kept.memo[id(old)] = result
    return result


# --- node types ----------------------------------------------------------------------------------

Item: TypeAlias = "tuple[Any, Any]"
Finish: TypeAlias = "Callable[[Any], Any] | None"
Opened: TypeAlias = "tuple[Any, Iterator[Item], Any, Finish]"
Opener: TypeAlias = "Callable[[Any, Callable[[Any], None]], Opened]"
"""`open(node, keep) -> (new, items, slots, finish)`.

The new node, or PENDING if it cannot exist yet; the (key, child) pairs; the dict or list that
receives `slots[key] = new child`; a function that makes the new node from the filled slots, or None
if filling them completes it. `keep` is called with objects that must outlive the walk.
"""


class NodeType:
    """The functions that flatten and rebuild instances of a class.

    Other rooms use the attributes with defaults: see the node types of `fmapper.backends`.

    Args:
        open: See `Opener`.
        items: `node -> [(key, child)]`, in order.
        plain: The class that `fmapstructure` uses instead: dict, list or tuple.
    """

    carried: Callable[[Any], Iterable[Item]] | None = None
    borrowed: tuple[Any, ...] = ()
    aside: Callable[[Any], Iterable[Item]] | None = None
    follows: Callable[[Any], Iterable[Item]] | None = None
    passengers: Callable[[Any], Iterable[Item]] | None = None
    put: Callable[[Any, Mapping[Any, Any]], object] | None = None
    static: Callable[[Any], Any] | None = None
    box: Callable[[Any], Iterable[Item]] | None = None
    constants: Callable[[Any], Container[Any]] | None = None
    pytree: bool = False
    computed: bool = False  # whether a child may be another object each time it is read

    def __init__(
        self, open: Opener, items: Callable[[Any], Iterable[Item]], plain: type = dict
    ) -> None:
        self.open, self.items, self.plain = open, items, plain

    def children(self, node: Any) -> dict[Any, Any]:
        """Returns the children of a node by key, in order."""
        return dict(self.items(node))

    def rebuild(self, node: Any, new_children: Mapping[Any, Any]) -> Any:
        """Returns a new node with other children; the keys must be those of `children(node)`."""
        kept = walking.get()
        new, items, slots, finish = self.open(node, (Kept() if kept is None else kept).append)
        for key, _ in items:
            slots[key] = new_children[key]
        return new if finish is None else finish(slots)

    def open_plain(self, node: Any, keep: Callable[[Any], None]) -> Opened:
        """Opens a node with a plain dict, list or tuple in its place."""
        items = tuple(self.items(node))
        keep(items)
        if self.plain is dict:
            out: Any = dict(items)
            return out, iter(items), out, None
        slots = [child for _, child in items]
        positions = enumerate(slots.copy())
        if self.plain is list:
            return slots, positions, slots, None
        return PENDING, positions, slots, tuple


def opener(
    children: Callable[[Any], Mapping[Any, Any]], rebuild: Callable[[Any, Mapping[Any, Any]], Any]
) -> Opener:
    """Makes an opener for nodes that exist only once their children do."""

    def open(node: Any, keep: Callable[[Any], None]) -> Opened:
        contents = children(node)
        keep(contents)
        return PENDING, iter(contents.items()), dict(contents), functools.partial(rebuild, node)

    return open


# --- the lookup ---------------------------------------------------------------------------------


class Source:
    """A source of node types: declarations, builtins, adapters. It is notified of new classes."""

    def look(self) -> None:
        """Notices new frameworks and registrations; called before every walk."""

    def kind(self, cls: type) -> NodeType | Kind | None:
        """Returns the node type of a class, or its kind of leaf; None for an unknown class."""
        return None

    def node_type(self, cls: type) -> NodeType | None:
        """Returns the node type that a class has by itself, whatever was declared."""
        return None

    def registered_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class in a pytree registry, by exact type."""
        return None

    def meet(self, cls: type) -> None:
        """Registers a class of nodes with other registries, when a walk first meets it."""

    def hear(self, news: Any) -> None:
        """Takes note of a newly declared class, a subclass of a declared one, or an adapter."""


sources: list[Source] = []
"""All sources, asked and notified in this order."""

kinds: dict[type, NodeType | Kind] = {}
_caches: list[dict[type, Any]] = [kinds]
_unknown: list[type] = []
_generation = [object()]  # replaced after every declaration; one assignment, so atomic


def make_cache() -> dict[type, Any]:
    """Returns a dict for facts about classes, which is emptied whenever these may change."""
    _caches.append({})
    return _caches[-1]


def forget() -> None:
    """Empties the caches of facts about classes."""
    _generation[0] = object()
    for cache in _caches:
        cache.clear()
    _unknown.clear()


def tell(news: Any) -> None:
    """Notifies all sources of a class or an adapter; see `Source.hear`."""
    forget()
    for source in sources:
        source.hear(news)


def sync() -> None:
    """Notices new frameworks and classes; every public call begins with it."""
    for source in sources:
        source.look()
    while _unknown:  # a source may know these classes by now
        try:
            kinds.pop(_unknown.pop(), None)
        except IndexError:  # emptied by another thread
            return


def kind_of(cls: type) -> NodeType | Kind:
    """Returns the node type of a class, or its kind of leaf; looked up once per class.

    The result is discarded if a class was declared meanwhile. Otherwise a class that another thread
    declares during the lookup would be found in JAX's registry, where its declaration has just put
    it, and be mistaken for a class of JAX.
    """
    kind = kinds.get(cls)
    while kind is None:
        before = _generation[0]
        kind = kinds[cls] = _look_up(cls)
        if before is not _generation[0]:
            kinds.pop(cls, None)
            kind = None
    return kind


def node_type_of(node: Any) -> NodeType | None:
    """Returns the node type of an object; None for leaves, and nodes that cannot have children."""
    kind = kind_of(type(node))
    return kind if isinstance(kind, NodeType) else None


def plain_type_of(cls: type) -> NodeType | Kind:
    """Returns a node type that rebuilds a plain dict, list or tuple in the place of a node."""
    kind = kind_of(cls)
    return NodeType(kind.open_plain, kind.items) if isinstance(kind, NodeType) else kind


def own_type_of(cls: type) -> NodeType | None:
    """Returns the node type that a class has by itself, whatever was declared."""
    return next(filter(None, (source.node_type(cls) for source in sources)), None)


def registered_type_of(cls: type) -> NodeType | None:
    """Returns the node type of a class in the pytree registry of a framework."""
    return next(filter(None, (source.registered_type(cls) for source in sources)), None)


def _look_up(cls: type) -> NodeType | Kind:
    answers = (source.kind(cls) for source in sources)
    answer: NodeType | Kind | None = next((kind for kind in answers if kind is not None), None)
    if answer is None and issubclass(cls, numbers.Number):
        return ATOM
    if answer is None:
        _unknown.append(cls)
        return LEAF
    if isinstance(answer, NodeType):
        for source in sources:
            source.meet(cls)
    return answer
