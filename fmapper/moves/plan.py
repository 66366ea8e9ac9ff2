"""What a mover would do to a tree: said before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fmapper.backends.arrays import Device
from fmapper.backends.dtypes import itemsize
from fmapper.errors import FmapperError
from fmapper.moves.carry import UNTOUCHED, Route, carry_out
from fmapper.moves.route import Generator
from fmapper.tree.keypath import KeyPath, format_keys
from fmapper.tree.leaves import MovedLeaves, PerTree, Where, for_tree, is_batch
from fmapper.tree.nodes import NodeType, sync

if TYPE_CHECKING:
    from rich.console import RenderableType

Action = Literal["moved", "cast", "shared", "skipped", "refused"]
_SHOWN = 40  # leaves in the table that `print` gives


@dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """What becomes of one leaf.

    Attributes:
        path: Where it is; a tied leaf is there once, with its first path.
        action: `moved` to other memory, `cast` to another dtype (and moved, if need be), `shared`:
            made an array of the other backend on the same memory, `skipped`: the very same object,
            `refused`: the move would raise.
        reason: Why it is skipped or refused, or what a cast depends on.
        origin: The device that it is on; None for what is no array.
        device: The device that it is to be on.
        dtype: Its dtype.
        new_dtype: The dtype that it is to have.
        nbytes: Bytes of new memory: 0 for what is shared, skipped or refused.
    """

    path: KeyPath
    action: Action
    reason: str = ""
    origin: Device | None = None
    device: Device | None = None
    dtype: str | None = None
    new_dtype: str | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a mover does to each leaf of a tree; made by `plan`, and given to `report=`.

    Printing it gives a table; `leaves` has the same as data.

    Attributes:
        mover: The mover, as it prints.
        leaves: What becomes of each leaf, in the order of the walk.
    """

    mover: str
    leaves: tuple[PlannedLeaf, ...]

    def __iter__(self) -> Iterator[PlannedLeaf]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def having(self, action: Action) -> tuple[PlannedLeaf, ...]:
        """The leaves to which this happens."""
        return tuple(leaf for leaf in self.leaves if leaf.action == action)

    @property
    def refused(self) -> tuple[PlannedLeaf, ...]:
        """The leaves for which the move would raise; if there are any, nothing would be moved."""
        return self.having("refused")

    @property
    def nbytes(self) -> int:
        """Bytes of new memory on all devices."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def bytes_by_way(self) -> dict[tuple[Device, Device], int]:
        """Bytes of new memory for each pair of devices, (from, to)."""
        ways: dict[tuple[Device, Device], int] = {}
        for leaf in self.leaves:
            if leaf.nbytes and leaf.origin is not None and leaf.device is not None:
                way = leaf.origin, leaf.device
                ways[way] = ways.get(way, 0) + leaf.nbytes
        return ways

    def __str__(self) -> str:
        """The table, as plain text."""
        from rich.console import Console

        console = Console(width=120, color_system=None, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()

    def __rich__(self) -> RenderableType:
        """The table: those that are refused first, then as many of the others as fit."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"plan of {self.mover}", title_justify="left", caption_justify="left")
        for name in ("path", "from", "to", "dtype"):
            table.add_column(name, overflow="fold")
        table.add_column("memory", justify="right")
        table.add_column("what", overflow="fold")
        ranked = sorted(self.leaves, key=lambda leaf: leaf.action != "refused")
        for leaf in ranked[:_SHOWN]:
            cast = leaf.new_dtype not in (None, leaf.dtype)
            row = (
                format_keys(leaf.path),
                str(leaf.origin or ""),
                str(leaf.device or ""),
                f"{leaf.dtype} -> {leaf.new_dtype}" if cast else leaf.dtype or "",
                readable_bytes(leaf.nbytes) if leaf.nbytes else "",
                f"{leaf.action}: {leaf.reason}" if leaf.reason else leaf.action,
            )
            style = "red" if leaf.action == "refused" else None
            table.add_row(*map(Text, row), style=style)
        table.caption = "\n".join(self._totals())
        return table

    def _totals(self) -> Iterator[str]:
        if len(self) > _SHOWN:
            yield f"... and {len(self) - _SHOWN} leaves more"
        counts: dict[str, int] = {}
        for leaf in self.leaves:
            counts[leaf.action] = counts.get(leaf.action, 0) + 1
        yield ", ".join(f"{count} {action}" for action, count in counts.items()) or "no leaves"
        for (origin, device), size in self.bytes_by_way().items():
            yield f"{origin} -> {device}: {readable_bytes(size)}"


class Router(Protocol):
    """What can be planned: a mover."""

    @property
    def copy(self) -> bool | None:
        """Whether it copies."""
        ...

    def check_node(self, node: Any, node_type: NodeType, where: Where) -> None:
        """Raises for a node that holds arrays beside its children."""
        ...

    def check_borrowed(self, node: Any, missing: Any, where: Where) -> None:
        """Raises for a node that borrows an array that nothing else in the tree has."""
        ...

    @property
    def uncast(self) -> Router:
        """The same without a change of dtype."""
        ...

    def routes(self, leaves: Sequence[Any], where: Where) -> tuple[list[Route], list[int]]:
        """What is to become of the arrays among leaves, and which leaves are none."""
        ...

    def generator(self, leaf: Any, where: Where, place: int) -> Generator | None:
        """What is to become of a random generator; None if the leaf is none."""
        ...


def plan(mover: Router | PerTree, tree: Any) -> Plan:
    """What a mover would do to each leaf of a tree. Nothing is moved and nothing is allocated.

    What depends on the values is not known: whether integers fit a narrower dtype, for example.

    Args:
        mover: `to_gpu`, `to_jax(dtype="bfloat16")` ...
        tree: Anything.

    Returns:
        A plan: print it, or look at its `leaves`, `refused` and `bytes_by_way()`. The same comes
        from a move that is really made, with `report=`: `to_gpu(model, report=print)`.

    Raises:
        TypeError: `mover` is no mover.
        CycleError: Never; a leaf is there once, however often it is reached.

    Examples:
        >>> import fmapper, numpy as np
        >>> made = fmapper.plan(fmapper.to_torch, {"w": np.ones(2), "n": [np.int8(1), "name"]})
        >>> [(str(leaf.path), leaf.action, leaf.nbytes) for leaf in made]
        [('w', 'moved', 16), ('n[0]', 'moved', 1)]
    """
    if not is_batch(mover):
        raise TypeError(
            f"plan takes a mover first, such as fmapper.to_gpu, not {mover!r}; then the tree."
        )
    sync()
    planner = _Planner(for_tree(mover, tree))
    MovedLeaves(planner, tree)
    return Plan(repr(mover), (*planner.nodes, *planner.leaves))


class _Planner:
    """Stands in for the mover in a walk that moves nothing."""

    def __init__(self, mover: Router) -> None:
        self.mover = mover
        self.nodes: list[PlannedLeaf] = []
        self.leaves: list[PlannedLeaf] = []

    def check_node(self, node: Any, node_type: NodeType, where: Where) -> None:
        try:
            self.mover.check_node(node, node_type, where)
        except FmapperError as error:
            self.nodes.append(
                PlannedLeaf(KeyPath.from_link(where(node)), "refused", _reason(error))
            )

    def check_borrowed(self, node: Any, missing: Any, where: Where) -> None:
        try:
            self.mover.check_borrowed(node, missing, where)
        except FmapperError as error:
            path = KeyPath.from_link(where(node))
            if path not in [known.path for known in self.nodes]:
                self.nodes.append(PlannedLeaf(path, "refused", _reason(error)))

    @property
    def uncast(self) -> _Planner:
        other = _Planner(self.mover.uncast)
        other.nodes, other.leaves = self.nodes, self.leaves
        return other

    def move_leaves(self, leaves: Sequence[Any], where: Where) -> Sequence[Any]:
        self.leaves += planned(self.mover, leaves, where)
        return leaves


def planned(mover: Router, leaves: Sequence[Any], where: Where) -> list[PlannedLeaf]:
    """What a mover does to each of these leaves."""
    found = []
    for place, leaf in enumerate(leaves):
        path = KeyPath.from_link(where(place))
        chosen = getattr(mover, "router_of", None)
        try:
            own = mover if chosen is None else chosen(leaf)
            routes, _ = own.routes([leaf], lambda _: None)
        except FmapperError as error:
            found.append(PlannedLeaf(path, "refused", _reason(error)))
            continue
        if routes:
            found.append(_planned(path, routes[0], own.copy))
        else:
            found.append(_planned_other(path, leaf, own.generator(leaf, lambda _: None, place)))
    return found


def _planned_other(path: KeyPath, leaf: Any, generator: Generator | None) -> PlannedLeaf:
    if generator is None:
        return PlannedLeaf(path, "skipped", f"no array to move: {type(leaf).__name__}")
    ends = generator.origin, generator.device
    if generator.stays:
        return PlannedLeaf(path, "skipped", "a random generator stays where it is", *ends)
    same = generator.origin.kind == generator.device.kind
    what = "with its state" if same else "seeded from its state"
    return PlannedLeaf(path, "moved", f"a random generator, {what}", *ends)


def _planned(path: KeyPath, route: Route, copy: bool | None) -> PlannedLeaf:
    (array,) = route.arrays
    action: Action = "cast" if route.is_cast else "moved"
    reason = ""
    nbytes = 0
    try:
        if route.device.kind != "meta":
            nbytes = route.source.nbytes(array)
            if route.is_cast:
                nbytes = nbytes // itemsize(route.dtype) * itemsize(route.held)
        if route.is_there and copy is not True:
            action, reason = "skipped", route.note or "it is there already"
        elif copy is False:
            carry_out([route], [array], lambda _: None, copy=False)
            action = "shared"
        elif route.shares(copy):
            action = "shared"
        elif route.device.kind != "meta" and (
            route.source is not route.target or route.origin.kind == "meta"
        ):
            route.source.check(array)
    except (FmapperError, RuntimeError, TypeError) as error:
        action, reason = "refused", _reason(error)
    if action == "cast" and route.held != route.wanted and not reason:
        reason = f"{route.target.name} holds no {route.wanted}"
    elif action == "cast":
        narrower = itemsize(route.held) < itemsize(route.dtype)
        reason = "if its values fit" if narrower and route.device.kind != "meta" else ""
    return PlannedLeaf(
        path,
        action,
        reason,
        route.origin,
        route.device,
        route.dtype,
        route.held,
        nbytes if action in ("moved", "cast") else 0,
    )


def _reason(error: Exception) -> str:
    return str(error).removeprefix("model: ").replace(f". {UNTOUCHED}", ".")


def readable_bytes(n: int) -> str:
    """A number of bytes in the largest unit that leaves something before the point.

    Examples:
        >>> readable_bytes(16), readable_bytes(3 << 20)
        ('16 B', '3.0 MiB')
    """
    size, units = float(n), iter(("KiB", "MiB", "GiB", "TiB"))
    if n < 1024:
        return f"{n} B"
    while size >= 1024:
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}"
