"""Plans of moves, made before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload, runtime_checkable

from fmapper.backends.arrays import Device
from fmapper.backends.discovery import adapter_of
from fmapper.backends.node_type import Aside
from fmapper.errors import FmapperError
from fmapper.files.dtypes import itemsize
from fmapper.moves.carry import UNTOUCHED, Route, carry_out
from fmapper.moves.route import Generator
from fmapper.moves.router import Move, Router
from fmapper.render import as_html, as_text, readable_bytes
from fmapper.tracebacks import short_traceback
from fmapper.tree.keypath import KeyPath, format_keys
from fmapper.tree.nodes import sync

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType

Action = Literal["moved", "cast", "shared", "skipped", "refused"]
P_co = TypeVar("P_co", covariant=True)
_SHOWN = 40  # leaves in the printed table


@dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """The plan of one leaf.

    Attributes:
        path: Its path; a tied leaf is listed once, with its first path.
        action: `moved` to other memory, `cast` to another dtype (and moved, if need be), `shared`:
            made an array of the other backend on the same memory, `skipped`: the very same object,
            `refused`: the move would raise.
        reason: Why it is skipped or refused, or what a cast depends on.
        origin: Its device; None if it is not an array.
        device: Its device after the move.
        dtype: Its dtype.
        new_dtype: Its dtype after the move.
        nbytes: Bytes of new memory: 0 if it is shared, skipped or refused.
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
    """The plan of a move, leaf by leaf; made by `plan`, and passed to `report=`.

    It prints as a table; `leaves` has the same data.

    Attributes:
        mover: The mover, as it prints.
        leaves: The plan of each leaf, in the order of the walk.
    """

    mover: str
    leaves: tuple[PlannedLeaf, ...]

    def __iter__(self) -> Iterator[PlannedLeaf]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def having(self, action: Action) -> tuple[PlannedLeaf, ...]:
        """Returns the leaves with an action."""
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
        """Returns the bytes of new memory for each pair of devices, (from, to)."""
        ways: dict[tuple[Device, Device], int] = {}
        for leaf in self.leaves:
            if leaf.nbytes and leaf.origin is not None and leaf.device is not None:
                way = leaf.origin, leaf.device
                ways[way] = ways.get(way, 0) + leaf.nbytes
        return ways

    def __str__(self) -> str:
        """Returns the table, as plain text."""
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def plot(self, depth: int = 1, axes: Axes | None = None) -> Axes:
        """Plots new memory by part of the model, one colour per device.

        Needs matplotlib, as in the extra `plot`.

        Args:
            depth: How many keys of a path name a part: 1 for `encoder`, 2 for `encoder.layers`.
            axes: The axes to draw on; None for a new figure of pyplot.

        Returns:
            The axes. Their label is a sentence that can stand for the picture.

        Raises:
            BackendUnavailableError: matplotlib is not installed.
        """
        from fmapper.plots import draw_memory

        sizes: dict[str, dict[str, int]] = {}
        for leaf in self.leaves:
            if leaf.nbytes:
                part = sizes.setdefault(format_keys(leaf.path.keys[:depth]), {})
                device = str(leaf.device)
                part[device] = part.get(device, 0) + leaf.nbytes
        return draw_memory(self.mover, sizes, axes)

    def __rich__(self) -> RenderableType:
        """Returns the table: refused leaves first, then as many of the others as fit."""
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


@runtime_checkable
class Planner(Protocol[P_co]):
    """A mover with plans of its own, such as a sharding."""

    def plan(self, tree: Any) -> P_co:
        """Plans what the mover would do to a tree."""


@short_traceback
@overload
def plan(mover: Planner[P_co], tree: Any) -> P_co: ...
@overload
def plan(mover: Router, tree: Any) -> Plan: ...
def plan(mover: Any, tree: Any) -> Any:
    """Plans a move: what a mover would do to each leaf. Nothing is moved or allocated.

    Effects that depend on values are unknown, for example whether integers fit a narrower dtype.

    Args:
        mover: `to_gpu`, `to_jax(dtype="bfloat16")` ...
        tree: Anything.

    Returns:
        A plan: print it, or look at its `leaves`, `refused` and `bytes_by_way()`. An actual move
        passes the same plan to `report=`: `to_gpu(model, report=print)`. For a
        `fmapper.meshes.Sharding` it is a `fmapper.meshes.ShardPlan`.

    Raises:
        TypeError: `mover` is not a mover.
        CycleError: Never; each leaf is listed once, however often it is reached.

    Examples:
        >>> import fmapper, numpy as np
        >>> made = fmapper.plan(fmapper.to_torch, {"w": np.ones(2), "n": [np.int8(1), "name"]})
        >>> [(str(leaf.path), leaf.action, leaf.nbytes) for leaf in made]
        [('w', 'moved', 16), ('n[0]', 'moved', 1)]
    """
    if not isinstance(mover, Router):
        raise TypeError(
            f"plan takes a mover as its first argument, such as fmapper.to_gpu, not {mover!r}."
        )
    sync()
    if isinstance(mover, Planner):
        return mover.plan(tree)
    move = Move(mover, tree, None, ())
    refused: dict[KeyPath, PlannedLeaf] = {}

    def check(node: Any, check: Callable[[], None]) -> None:
        try:
            check()
        except FmapperError as error:
            path = KeyPath.from_link(move.found.where(node))
            refused.setdefault(path, PlannedLeaf(path, "refused", _reason(error)))

    for node, kind in move.found.nodes:
        check(node, partial(move.check_node, node, kind))
    for node, leaf in move.found.missing:
        check(node, partial(move.check_borrowed, node, leaf))
    leaves = plan_leaves(move, [*move.found.by_id.values()])
    return Plan(repr(mover), (*refused.values(), *leaves))


def plan_leaves(move: Move, leaves: Iterable[Any]) -> Iterator[PlannedLeaf]:
    """Yields the plan of each leaf, routed one by one so that each has its own error."""
    for leaf in leaves:
        if move.found.aside.get(id(leaf)) is Aside.STAYS:
            continue
        path = KeyPath.from_link(move.found.where(leaf))
        try:
            mover = next((mover for mover, _ in move.groups([leaf])), None)
            if mover is None:
                yield _plan_kept(path, leaf, move.router.why_kept(leaf))
                continue
            routes, _ = mover.routes([leaf], lambda _: None)
            if routes:
                yield _plan(path, routes[0], mover.copy)
            else:
                yield _planned_other(path, leaf, mover.generator(leaf, lambda _: None, 0))
        except FmapperError as error:
            yield PlannedLeaf(path, "refused", _reason(error))


def _plan_kept(path: KeyPath, leaf: Any, why: str) -> PlannedLeaf:
    adapter = adapter_of(leaf)
    if adapter is None:
        return _planned_other(path, leaf, None)
    device, dtype = adapter.device(leaf), adapter.dtype(leaf)
    return PlannedLeaf(path, "skipped", why, device, device, dtype, dtype)


def _planned_other(path: KeyPath, leaf: Any, generator: Generator | None) -> PlannedLeaf:
    if generator is None:
        return PlannedLeaf(path, "skipped", f"no array to move: {type(leaf).__name__}")
    ends = generator.origin, generator.device
    if generator.stays:
        return PlannedLeaf(path, "skipped", "a random generator stays where it is", *ends)
    same = generator.origin.kind == generator.device.kind
    what = "with its state" if same else "seeded from its state"
    return PlannedLeaf(path, "moved", f"a random generator, {what}", *ends)


def _plan(path: KeyPath, route: Route, copy: bool | None) -> PlannedLeaf:
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
        reason = f"{route.target.name} does not support {route.wanted}"
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
