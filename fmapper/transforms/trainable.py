"""Finds the arrays of a tree that are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fmapper.backends.discovery import adapter_of, adapters
from fmapper.backends.dtypes import is_inexact
from fmapper.backends.nodes import Nodes
from fmapper.backends.undeclared import check_leaf
from fmapper.errors import DeclarationError, StructureMismatchError
from fmapper.tree.functor import declaration_of
from fmapper.tree.keypath import Link, format_link, name_of
from fmapper.tree.nodes import NodeType, make_cache, sync
from fmapper.tree.walk import walk

Predicate = Callable[[Any], bool]


def trainables(tree: Any) -> dict[str, Any]:
    """Returns the trainable arrays by name, each once, for an optimizer.

    An array is trained if it is floating or complex, unless one of these rules excludes it:

    * a functor declared with `trainable=` trains only arrays below the children that it names,
    * a torch module trains its parameters with `requires_grad`, not its buffers or other tensors,
    * Flax NNX trains only the arrays in an `nnx.Param`,
    * a `torch.nn.Parameter` without `requires_grad` is always frozen.

    A tied array is trained if it is trained at any of its places, because a gradient reaches it
    there; its name is that of the first such place.

    Returns:
        A dict in the order of the walk, with names as in `state`. The arrays are those of the tree.

    Raises:
        DeclarationError: `trainable=` names a child that an instance lacks.
        NotAFunctorError: An undeclared object holds arrays.
        StructureMismatchError: Two paths have the same name, because a key contains a dot.

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
    """The trained leaves of a tree: `leaf in Trained(tree)`.

    Args:
        tree: Anything.
        strict: Whether an undeclared holder of arrays is an error.

    Attributes:
        leaves: All arrays of the tree by id, in the order of the walk.
        links: For trained arrays: id -> the first place where they are trained.
        boxes: The nodes whose value a program may change.
        computes: Whether a node computes its children, which may be new on each access.
    """

    def __init__(self, tree: Any, *, strict: bool = True) -> None:
        self.leaves: dict[int, Any] = {}
        self.links: dict[int, Link] = {}
        self.computes = False
        boxes: dict[int, Any] = {}
        for link, value, kind, rule in walk(tree, state=_say(type(tree)).rule, down=_rule_below):
            if isinstance(kind, NodeType):
                declared = _say(type(value))
                if declared.names is not None:
                    _check_names(value, declared.names, kind.children(value), link)
                self.computes = self.computes or kind.computed
                if kind.box is not None:
                    boxes[id(value)] = value
            elif kind is None:
                self._meet(value, link, rule, strict)
        self.boxes = list(boxes.values())

    def _meet(self, leaf: Any, link: Link, rule: Predicate | None, strict: bool) -> None:
        adapter = adapter_of(leaf)
        if adapter is None:
            if strict:
                check_leaf(leaf, lambda _: link)
            return
        i = id(leaf)
        self.leaves.setdefault(i, leaf)
        if is_inexact(adapter.dtype(leaf)):
            trained = adapter.is_trainable(leaf) if rule is None else rule(leaf)
            if trained:
                self.links.setdefault(i, link)

    def __contains__(self, leaf: Any) -> bool:
        i = id(leaf)
        if i in self.leaves:
            return i in self.links
        return _by_itself(leaf)  # created on each access to its parent


def _rule_below(rule: Predicate | None, node: Any, key: Any, child: Any) -> Predicate | None:
    """Derives the rule for a child from the rule of its node."""
    if rule is _not:
        return _not
    declared = _known.get(type(node)) or _say(type(node))
    if declared.names is not None and key not in declared.names:
        return _not
    declared = _known.get(type(child)) or _say(type(child))
    return declared.rule or rule


class _Said(NamedTuple):
    """The declaration of a class about training.

    Attributes:
        rule: The framework's predicate for trained arrays below it; None if it has none.
        names: The children that a functor trains; None for all.
    """

    rule: Predicate | None
    names: tuple[str, ...] | None


_known: dict[type, _Said] = make_cache()


def _say(cls: type) -> _Said:
    try:
        return _known[cls]
    except KeyError:
        rules = (adapter.training_rule(cls) for adapter in adapters(Nodes))
        declaration = declaration_of(cls)
        names = None if declaration is None else declaration.trainable
        declared = _Said(next(filter(None, rules), None), names)
        return _known.setdefault(cls, declared)


def _by_itself(leaf: Any) -> bool:
    """Returns whether an array without a rule is trained."""
    adapter = adapter_of(leaf)
    return adapter is not None and is_inexact(adapter.dtype(leaf)) and adapter.is_trainable(leaf)


def _not(leaf: Any) -> bool:
    return False


def _check_names(node: Any, names: tuple[str, ...], have: dict[Any, Any], link: Link) -> None:
    """Raises DeclarationError for trainable children that an instance lacks."""
    missing = [name for name in names if name not in have]
    if missing:
        raise DeclarationError(
            f"{format_link(link)}: {type(node).__name__} declares {', '.join(map(repr, missing))} "
            "trainable, but this instance has the children "
            f"{', '.join(map(repr, have)) or 'none'}. Correct trainable= in its declaration."
        )
