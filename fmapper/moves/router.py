"""The steps of every move: collect the leaves, route them, carry them; `fmap` refills the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.backends.node_type import Aside
from fmapper.moves.collect import Leaves
from fmapper.tree.nodes import ATOM, NodeType, kind_of

if TYPE_CHECKING:
    from fmapper.moves.carry import Where
    from fmapper.moves.mover import Mover
    from fmapper.moves.plan import Plan

Group = tuple["Mover", Sequence[int]]


class Router:
    """Chooses the mover of each leaf: a mover itself, a placement by its rules."""

    __slots__ = ()

    @property
    def on_report(self) -> Callable[[Plan], object] | None:
        """The function that is called after a move, with its `Plan`."""
        return None

    def for_tree(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Router:
        """Returns the router for one tree: itself, unless it depends on paths."""
        return self

    def groups(self, leaves: Sequence[Any], where: Where) -> Iterable[Group]:
        """Groups leaves by mover: yields movers and indices."""
        raise NotImplementedError

    def mover_of_node(self, node: Any) -> Mover | None:
        """Returns the mover for everything below a node."""
        raise NotImplementedError

    def why_kept(self, leaf: Any) -> str:
        """Explains why no mover takes a leaf."""
        return "it stays with its node"

    def __fmap__(
        self, tree: Any, is_leaf: Callable[[Any], bool] | None, cache: dict[Any, Any] | None
    ) -> tuple[dict[int, Any], Callable[[Any], Any]]:
        """Moves all leaves of a tree, or none; see `fmapper.tree.tree_map.TreeFunction`."""
        move = Move(self, tree, is_leaf, cache or ())
        collected = move.found
        for node, kind in collected.nodes:
            move.check_node(node, kind)
        for node, leaf in collected.missing if cache is not None else ():  # else ties are not kept
            move.check_borrowed(node, leaf)
        leaves = [*collected.by_id.values()]
        reports = move.reports(leaves)
        memo = {}
        if cache is not None:
            memo = dict(zip(collected.by_id, move.carry(leaves), strict=True))
        for report, plan in reports:
            report(plan)
        return memo, move.alone


class Move:
    """One router and the leaves of one tree."""

    def __init__(
        self, router: Router, tree: Any, is_leaf: Callable[[Any], bool] | None, skip: Any
    ) -> None:
        self.router = router.for_tree(tree, is_leaf)
        self.found = Leaves(tree, is_leaf, skip)

    def check_node(self, node: Any, kind: NodeType) -> None:
        """Raises NotAFunctorError for a node that would leave arrays behind."""
        mover = self.router.mover_of_node(node)
        if mover is not None:
            mover.check_node(node, kind, self.found.where)

    def check_borrowed(self, node: Any, leaf: Any) -> None:
        """Raises MoveError for a node that borrows a leaf which nothing else in the tree has."""
        for mover, _ in self.groups([leaf]):
            mover.check_borrowed(node, leaf, self.found.where)

    def where(self, leaves: Sequence[Any]) -> Where:
        """Returns a function from the index of a leaf to its path."""
        return lambda at: self.found.where(leaves[at])

    def groups(self, leaves: Sequence[Any]) -> Iterable[Group]:
        """Groups leaves by mover: yields movers and indices."""
        aside = self.found.aside
        if not aside:
            return self.router.groups(leaves, self.where(leaves))
        groups: dict[Mover, list[int]] = {}
        for rule in (None, Aside.UNCAST):
            places = [at for at, leaf in enumerate(leaves) if aside.get(id(leaf)) is rule]
            part = [leaves[at] for at in places]
            for mover, chosen in self.router.groups(part, self.where(part)) if part else ():
                target = mover if rule is None else mover.uncast
                groups.setdefault(target, []).extend(places[at] for at in chosen)
        return groups.items()

    def reports(self, leaves: Sequence[Any]) -> list[tuple[Callable[[Plan], object], Plan]]:
        """Returns the report functions to call after the move, each with its plan."""
        wanted = [(self.router.on_report, repr(self.router), leaves)]
        for mover, places in self.groups(leaves):
            if mover.report is not self.router.on_report:
                part = [leaves[at] for at in places]
                wanted.append((mover.report, repr(mover), part))
        if all(report is None for report, _, _ in wanted):
            return []
        from fmapper.moves.plan import Plan, plan_leaves

        return [
            (report, Plan(name, tuple(plan_leaves(self, part))))
            for report, name, part in wanted
            if report is not None
        ]

    def carry(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Moves all leaves or none, and returns the results."""
        routed = []
        for mover, places in self.groups(leaves):
            part = leaves if len(places) == len(leaves) else [leaves[at] for at in places]
            routed.append((mover, places, part, mover.routes(part, self.where(part))))
        results = list(leaves)
        for mover, places, part, (routes, others) in routed:
            moved = mover.carry(routes, others, part, self.where(part))
            if part is leaves:
                return moved
            for at, new in zip(places, moved, strict=True):
                results[at] = new
        return results

    def alone(self, leaf: Any) -> Any:
        """Moves a leaf that was not collected, because its node creates it on each access."""
        return leaf if kind_of(type(leaf)) is ATOM else self.carry([leaf])[0]
