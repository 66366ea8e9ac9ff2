"""Which arrays of a tree are trained: the others are carried along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fmapper.backends.discovery import adapter_of, adapters, on_adapter
from fmapper.backends.dtypes import is_inexact
from fmapper.backends.nodes import Nodes
from fmapper.backends.undeclared import check_leaf
from fmapper.errors import DeclarationError, FmapperError, StructureMismatchError
from fmapper.tree.functor import declaration_of, has_computed_children
from fmapper.tree.keypath import KeyPath, Link, format_link, name_of
from fmapper.tree.nodes import ATOM, LEAF, LEAVES, Item, NodeType, kind_of, kinds, sync
from fmapper.tree.walk import say_where

Predicate = Callable[[Any], bool]


def trainables(tree: Any) -> dict[str, Any]:
    """The arrays of a tree that training changes, by name, each once: what an optimizer is given.

    An array is trained if it is floating or complex and nothing says otherwise:

    * a functor declared with `trainable=` trains what is below the children that it names,
    * a torch module its parameters with `requires_grad`, neither its buffers nor other tensors,
    * in Flax NNX what is in an `nnx.Param`,
    * a `torch.nn.Parameter` without `requires_grad` is frozen anywhere.

    A tied array is trained if it is at one of its places, because that is where a gradient reaches
    it; the name is that of the first such place.

    Returns:
        A dict in the order of the walk, with names as in `state`. The arrays are those of the tree.

    Raises:
        DeclarationError: `trainable=` names what an instance has no child for.
        NotAFunctorError: An object that nobody declared holds arrays.
        StructureMismatchError: Two paths have the same name, because a key has a dot in it.

    The idea is that of `Flux.trainables`, https://fluxml.ai/Flux.jl.

    Examples:
        >>> import fmapper, numpy as np
        >>> @fmapper.functor(trainable=("w",))
        ... class Scaled:
        ...     def __init__(self, w, scale):
        ...         self.w, self.scale = w, scale
        >>> list(fmapper.trainables([Scaled(np.ones(2), np.ones(1)), np.zeros(3)]))
        ['0.w', '1']
    """
    sync()
    trained = Trained(tree)
    named: dict[str, tuple[Link, Any]] = {}
    for i, array in trained.leaves.items():
        if i not in trained.links:
            continue
        link = trained.links[i]
        name = name_of(link)
        if name in named:
            raise StructureMismatchError(
                f"{format_link(link)} and {format_link(named[name][0])} are both called {name!r} "
                "when keys are joined with dots. Rename one of the keys."
            )
        named[name] = link, array
    return {name: array for name, (_, array) in named.items()}


class Trained:
    """The leaves of one tree that are trained: `leaf in Trained(tree)`.

    Args:
        tree: Anything.
        strict: Whether an undeclared holder of arrays is an error.

    Attributes:
        leaves: All arrays of the tree by id, in the order of the walk.
        links: For those that are trained: id -> the first place where they are.
    """

    def __init__(self, tree: Any, *, strict: bool = True) -> None:
        self._strict = strict
        self.leaves: dict[int, Any] = {}
        self.links: dict[int, Link] = {}
        self._look(tree)

    def __contains__(self, leaf: Any) -> bool:
        i = id(leaf)
        if i in self.leaves:
            return i in self.links
        return _by_itself(leaf)  # made anew each time its parent is read

    def _look(self, tree: Any) -> None:
        """Goes to every node once for each rule under which it is reached: cycles and ties end."""
        seen: dict[tuple[int, Predicate], Any] = {}
        stack: list[tuple[Link, Iterator[Item], Predicate, frozenset[str] | None]] = []
        stack.append((None, iter(((None, tree),)), _by_itself, None))
        while stack:
            parent, items, above, names = stack[-1]
            for key, child in items:
                link = (parent, key) if len(stack) > 1 else None
                rule = above if names is None or key in names else _not
                kind = kind_of(type(child))
                if kind is ATOM:
                    continue
                if kind in LEAVES:
                    self._meet(child, link, rule)
                    continue
                if not isinstance(kind, NodeType):
                    continue
                if rule is not _not:
                    rule = _rule_of(type(child)) or rule
                if (id(child), rule) in seen:
                    continue
                seen[id(child), rule] = child
                try:
                    below = kind.children(child)
                except FmapperError as error:
                    say_where(error, KeyPath.from_link(link).keys)
                    raise
                stack.append((link, iter(below.items()), rule, _trained_names(child, below, link)))
                break
            else:
                stack.pop()

    def _meet(self, leaf: Any, link: Link, rule: Predicate) -> None:
        adapter = adapter_of(leaf)
        if adapter is None:
            if self._strict:
                check_leaf(leaf, lambda _: link)
            return
        i = id(leaf)
        self.leaves.setdefault(i, leaf)
        if i not in self.links and is_inexact(adapter.dtype(leaf)):
            trained = adapter.is_trainable(leaf) if rule is _by_itself else rule(leaf)
            if trained:
                self.links[i] = link


def trained_arrays(tree: Any, boxes: list[Any]) -> dict[int, Any] | None:
    """The trained arrays of a tree by id, without their paths, which cost more than all else.

    None where that takes a closer look: `Trained` has the answer, or the error. The nodes to which
    a program may give another value are added to `boxes`.
    """
    found: dict[int, Any] = {}
    nodes: dict[int, tuple[Any, Predicate | None]] = {}
    stack: list[tuple[Iterator[Item], Predicate | None]] = []
    items: Iterator[Item] = iter(((None, tree),))
    rule: Predicate | None = None
    while True:
        for _, child in items:
            cls = type(child)
            kind = kinds.get(cls) or kind_of(cls)
            if kind is LEAF:
                adapter = adapter_of(child)
                if adapter is None:
                    if not _is_harmless(child):
                        return None
                elif is_inexact(adapter.dtype(child)) and (
                    adapter.is_trainable(child) if rule is None else rule(child)
                ):
                    found[id(child)] = child
            elif isinstance(kind, NodeType):
                i = id(child)
                if i in nodes:
                    if nodes[i][1] is not rule:
                        return None
                    continue
                nodes[i] = child, rule
                if kind.box is not None:
                    boxes.append(child)
                declaration = declaration_of(cls)
                if declaration is not None and (
                    declaration.trainable is not None or has_computed_children(cls)
                ):
                    return None
                stack.append((items, rule))
                rule = _rule_of(cls) or rule
                try:
                    items = iter(kind.items(child))
                except FmapperError:
                    return None
                break
        else:
            if not stack:
                return found
            items, rule = stack.pop()


def _is_harmless(leaf: Any) -> bool:
    try:
        check_leaf(leaf, lambda _: None)
    except FmapperError:
        return False
    return True


_below: dict[type, Predicate | None] = {}
on_adapter(lambda _: _below.clear())


def _rule_of(cls: type) -> Predicate | None:
    """Which arrays below a node are trained as its framework has it; None if that says nothing."""
    try:
        return _below[cls]
    except KeyError:
        said = (adapter.trained_below(cls) for adapter in adapters(Nodes))
        found = _below[cls] = next(filter(None, said), None)
        return found


def _by_itself(leaf: Any) -> bool:
    """Whether an array that nothing above it speaks of is trained."""
    adapter = adapter_of(leaf)
    return adapter is not None and is_inexact(adapter.dtype(leaf)) and adapter.is_trainable(leaf)


def _not(leaf: Any) -> bool:
    return False


def _trained_names(node: Any, have: dict[Any, Any], link: Link) -> frozenset[str] | None:
    """The children that a functor trains; None for all."""
    declaration = declaration_of(type(node))
    if declaration is None or declaration.trainable is None:
        return None
    missing = [name for name in declaration.trainable if name not in have]
    if missing:
        raise DeclarationError(
            f"{format_link(link)}: {type(node).__name__} declares {', '.join(map(repr, missing))} "
            f"trainable, but this instance has the children {', '.join(map(repr, have)) or 'none'}."
            " Correct trainable= in its declaration."
        )
    return frozenset(declaration.trainable)
