"""Node types of adapters: how to flatten a class, and what moves and transforms need to know."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Self, TypedDict, Unpack

from fmapper.tree import nodes
from fmapper.tree.nodes import Item


class Aside(enum.Enum):
    """A rule for a leaf that does not move like the others."""

    STAYS = "it stays where it is and what it is"
    UNCAST = "it moves, but keeps its dtype"


class Facts(TypedDict, total=False):
    """Optional facts about a `NodeType`.

    Attributes:
        carried: `node -> [(name, value)]`, what the node holds besides its children; movers check
            that it contains no arrays.
        borrowed: Keys of children with arrays that belong to another node, such as an optimizer's
            parameters, which belong to its model; movers check that the tree contains that node,
            too.
        aside: `node -> [(leaf, Aside)]`, the leaves that do not move as all others do.
        follows: `node -> [(leaf, other leaf)]`, the leaves that move to the target of another leaf.
        passengers: `node -> [(name, object)]`, objects that only movers see, such as random
            generators among the settings. The opener puts the moved objects into place with
            `at_end`.
        put: `(node, new_children) -> None` replaces the children of a node in place, for `move_`.
        static: `node -> value`, a value or dict of values that determines what the node computes; a
            program is compiled again if it changes. Needed if that is not simply the other
            attributes.
        box: `node -> [(key, child)]`, the children that a call may replace, such as the value of an
            NNX variable or a torch buffer; transformations then write the new value to the caller's
            node, too.
        constants: `node -> keys`, the children whose arrays are part of the computation, such as
            the constants of a program: they move with the node, but are not in states or
            checkpoints.
        pytree: Whether to register the class with the pytree registries of other frameworks, like a
            functor: with dynamic children, and static other attributes.
    """

    carried: Callable[[Any], Iterable[Item]]
    borrowed: tuple[Any, ...]
    aside: Callable[[Any], Iterable[tuple[Any, Aside]]]
    follows: Callable[[Any], Iterable[tuple[Any, Any]]]
    passengers: Callable[[Any], Iterable[Item]]
    put: Callable[[Any, Mapping[Any, Any]], object]
    static: Callable[[Any], Any] | None
    box: Callable[[Any], Iterable[Item]]
    constants: Callable[[Any], Container[Any]] | None
    pytree: bool


class NodeType(nodes.NodeType):
    """A node type with the facts that moves and transforms ask for.

    Args:
        children: `node -> {key: child}`, in order.
        rebuild: `(node, new_children) -> new node`. Needed without `shell`.
        shell: `node -> new node without children`. The shell exists before its children do, so that
            cycles through the node work.
        fill: `(shell, node, new_children) -> None` puts the children into the shell.
        plain: The class that `fmapstructure` uses instead: dict, list or tuple.
        facts: Further facts for movers and transformations, see `Facts`.
    """

    def __init__(
        self,
        children: Callable[[Any], Mapping[Any, Any]],
        rebuild: Callable[[Any, Mapping[Any, Any]], Any] | None = None,
        *,
        shell: Callable[[Any], Any] | None = None,
        fill: Callable[[Any, Any, Mapping[Any, Any]], None] | None = None,
        plain: type = dict,
        **facts: Unpack[Facts],
    ) -> None:
        if (shell is None) != (fill is None) or (shell is None) == (rebuild is None):
            raise TypeError("NodeType takes rebuild, or shell and fill.")

        def open_shell(node: Any, keep: Callable[[Any], None]) -> nodes.Opened:
            assert shell is not None
            contents = children(node)
            keep(contents)
            new = shell(node)

            def finish(slots: Mapping[Any, Any]) -> Any:
                assert fill is not None
                fill(new, node, slots)
                return new

            return new, iter(contents.items()), dict(contents), finish

        open = open_shell if rebuild is None else nodes.opener(children, rebuild)
        super().__init__(open, lambda node: children(node).items(), plain)
        self._learn(facts)

    @classmethod
    def from_opener(
        cls,
        open: nodes.Opener,
        items: Callable[[Any], Iterable[Item]],
        plain: type = dict,
        **facts: Unpack[Facts],
    ) -> Self:
        """Makes a node type from an opener, which is faster.

        Args:
            open: See `fmapper.tree.nodes.Opener`.
            items: `node -> [(key, child)]`, in order.
            plain: As above.
            facts: As above.
        """
        node_type: Self = object.__new__(cls)
        nodes.NodeType.__init__(node_type, open, items, plain)
        node_type._learn(facts)
        return node_type

    def _learn(self, facts: Facts) -> None:
        unknown = sorted(facts.keys() - Facts.__annotations__.keys())
        if unknown:
            raise TypeError(
                f"NodeType has no option {', '.join(map(repr, unknown))}; besides the functions "
                f"that take nodes apart, it accepts {', '.join(sorted(Facts.__annotations__))}."
            )
        vars(self).update(facts)
