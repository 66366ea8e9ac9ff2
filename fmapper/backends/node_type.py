"""Node types of adapters: how a class is taken apart, and what moves and transforms ask of it."""

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
        carried: `node -> [(name, value)]`, what the node holds beside its children; movers see to
            it that there are no arrays in it.
        borrowed: Keys of children with arrays that belong to others, as the parameters of an
            optimizer do to its model; movers see to it that the others are in the tree, too.
        aside: `node -> [(leaf, Aside)]`, the leaves that do not move as all others do.
        follows: `node -> [(leaf, other leaf)]`, the leaves that go where another one goes.
        passengers: `node -> [(name, object)]`, what only movers see: random generators among the
            settings. The opener puts what has become of them into place with `at_end`.
        put: `(node, new_children) -> None` gives a node other children in place, for `move_`.
        static: `node -> what else decides what the node computes`, a dict of values to compare or
            one; needed where that is not simply the other attributes, so that a compiled program is
            made anew for another one.
        box: `node -> [(key, child)]`, the children to which a program may give another value, such
            as what is in a variable of NNX or a buffer of torch; transformations see to it that
            the node they were given gets it, too.
        constants: `node -> keys`, the children whose arrays belong to what the node computes, such
            as the constants of a program: they move with it, and no state or checkpoint has them.
        pytree: Whether the pytree registries of other frameworks are to know the class, as they
            know functors: its children are dynamic there, and its other attributes are static.
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
        rebuild: `(node, new_children) -> new node`. Needed where `shell` is not given.
        shell: `node -> new node without children`. Where it is given, the shell exists before its
            children do, so that cycles through the node work.
        fill: `(shell, node, new_children) -> None` puts the children into the shell.
        plain: What `fmapstructure` puts in its place: dict, list or tuple.
        facts: What else movers and transformations ask, see `Facts`.
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
            found = children(node)
            keep(found)
            new = shell(node)

            def finish(slots: Mapping[Any, Any]) -> Any:
                assert fill is not None
                fill(new, node, slots)
                return new

            return new, iter(found.items()), dict(found), finish

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
        """Makes a node type with an opener of its own, which is faster.

        Args:
            open: See `fmapper.tree.nodes.Opener`.
            items: `node -> [(key, child)]`, in order.
            plain: As above.
            facts: As above.
        """
        made: Self = object.__new__(cls)
        nodes.NodeType.__init__(made, open, items, plain)
        made._learn(facts)
        return made

    def _learn(self, facts: Facts) -> None:
        unknown = sorted(facts.keys() - Facts.__annotations__.keys())
        if unknown:
            raise TypeError(
                f"NodeType has no option {', '.join(map(repr, unknown))}; besides the functions "
                f"that take nodes apart, it accepts {', '.join(sorted(Facts.__annotations__))}."
            )
        vars(self).update(facts)
