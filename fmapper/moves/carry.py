"""Moves batches of arrays to their targets by casting, copying or sharing; all or none."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from fmapper.backends.arrays import HOST, Arrays, Device, Exchange
from fmapper.backends.discovery import get_adapter, memory_advice
from fmapper.backends.dtypes import is_inexact
from fmapper.errors import (
    BatchError,
    CheckpointError,
    CopyNeededError,
    FmapperError,
    LossyCastError,
    MoveError,
    PrecisionWarning,
    TieWarning,
    UnsupportedLeafError,
)
from fmapper.moves.host_copy import host_copies
from fmapper.moves.view_ties import ViewTie, find_view_ties, remake
from fmapper.progress import is_wanted, step
from fmapper.tree.keypath import Link, format_link
from fmapper.warn import warn

Where = Callable[[int], Link]

_LARGE = 1 << 28  # bytes; moving less is too fast to notice
_OUT_OF_MEMORY = re.compile("out of memory|RESOURCE_EXHAUSTED", re.IGNORECASE)
UNTOUCHED = "Nothing was moved, and the tree is as it was."


@dataclass(slots=True, eq=False)
class Route:
    """Arrays of one dtype on one device, and their target.

    Attributes:
        source: The adapter to which the arrays belong.
        target: The adapter of the results.
        origin: The device of the arrays.
        device: The device for the results.
        dtype: The dtype of the arrays.
        wanted: The dtype that was asked for.
        held: The dtype in which the target stores `wanted`.
        places: The index of each array in the list of leaves.
        arrays: The arrays.
        note: Why the arrays stay although a move was asked for.
    """

    source: Arrays
    target: Arrays
    origin: Device
    device: Device
    dtype: str
    wanted: str
    held: str
    places: Sequence[int]
    arrays: Sequence[Any]
    note: str = ""

    @property
    def is_there(self) -> bool:
        """Whether the arrays are already at their target."""
        return self.origin == self.device and self.dtype == self.held

    @property
    def is_cast(self) -> bool:
        """Whether the dtype changes."""
        return self.dtype != self.held

    def shares(self, copy: bool | None) -> bool:
        """Returns whether the results share the memory of the arrays."""
        if copy is not None or self.source is self.target:
            return copy is False
        in_one_place = not isinstance(self.origin.index, tuple)
        on_host = self.origin.kind == self.device.kind == "cpu" and in_one_place
        return on_host and self.source.frozen and self.target.read_only and not self.is_cast


class _Batch:
    """The arrays with one source and one target, of any dtypes."""

    def __init__(self, routes: Sequence[Route], where: Where) -> None:
        self.routes = routes
        self.where = where
        self.source, self.origin = routes[0].source, routes[0].origin
        self.target, self.device = routes[0].target, routes[0].device
        if len(routes) == 1:
            self.arrays, self.places = routes[0].arrays, routes[0].places
        else:
            self.arrays = [array for route in routes for array in route.arrays]
            self.places = [place for route in routes for place in route.places]
        self.is_cast = any(route.is_cast for route in routes)
        self.ends = list(itertools.accumulate(len(route.arrays) for route in routes))

    def route(self, at: int) -> Route:
        return self.routes[bisect.bisect_right(self.ends, at)]

    @property
    def casts(self) -> list[int]:
        """The indices of arrays whose dtype changes."""
        if not self.is_cast:
            return []
        return [at for at in range(len(self.arrays)) if self.route(at).is_cast]

    def path(self, at: int) -> str:
        return format_link(self.where(self.places[at]))

    def part(self, ats: Sequence[int]) -> _Batch:
        """Returns a batch of some of the arrays."""
        by_route: dict[Route, list[int]] = {}
        for at in ats:
            by_route.setdefault(self.route(at), []).append(at)
        routes = [
            dataclasses.replace(
                route,
                places=[self.places[at] for at in chosen],
                arrays=[self.arrays[at] for at in chosen],
            )
            for route, chosen in by_route.items()
        ]
        return _Batch(routes, self.where)

    def failure(self, at: int, error: Exception) -> Exception:
        """Returns the error to raise when one of the arrays cannot be moved."""
        if isinstance(error, BatchError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        kind: type[Exception] = MoveError
        if isinstance(error, CheckpointError | LossyCastError):
            kind = type(error)
        elif isinstance(error, TypeError):
            kind = UnsupportedLeafError
        elif isinstance(error, BufferError):
            kind = CopyNeededError
        way_out = " Leave copy=False out to allow copies." if kind is CopyNeededError else ""
        if self.device.is_accelerator and _OUT_OF_MEMORY.search(str(error)):
            way_out = "".join(f" {advice}." for advice in memory_advice())
        return kind(
            f"{self.path(at)}: cannot take {self.route(at).dtype} from {self.origin} to "
            f"{self.device}: {str(error).rstrip('.') or type(error).__name__}. "
            f"{UNTOUCHED}{way_out}"
        )

    def finish(self, results: Callable[[], Iterable[Any]]) -> list[Any]:
        """Returns the results, or raises the error of the first array without one."""
        moved: list[Any] = []
        try:
            moved.extend(results())
        except BatchError as error:
            cause = error.__cause__
            reason = cause if isinstance(cause, Exception) else error
            raise self.failure(error.index, reason) from reason
        except FmapperError:
            raise
        except Exception as error:
            raise self.failure(min(len(moved), len(self.arrays) - 1), error) from error
        return moved

    def export(self, arrays: Sequence[Any]) -> Exchange:
        """Exports the arrays from the source; an error names the array that cannot be."""
        try:
            return self.source.export(arrays, self.device)
        except Exception as error:
            for at, array in enumerate(arrays):
                try:
                    self.source.export([array], self.device)
                except Exception as own:
                    raise self.failure(at, own) from own
            raise self.failure(0, error) from error


def carry_out(
    routes: Iterable[Route],
    leaves: Sequence[Any],
    where: Where,
    *,
    copy: bool | None,
    ties: bool = True,
) -> list[Any]:
    """Moves the arrays of the routes; those already in place are not copied.

    Args:
        routes: The routes of the arrays among the leaves.
        leaves: All leaves.
        where: Returns the path of a leaf by its index.
        copy: As for a mover.
        ties: Whether arrays that share memory still share it afterwards, or get separate memory.

    Raises:
        MoveError: An array could not be moved. No argument has changed.
        LossyCastError: An array has values that its new dtype cannot hold.
    """
    results = list(leaves)
    groups: dict[Any, list[Route]] = {}
    todo = []
    for route in routes:
        if route.is_there and copy is not True:
            at = route.source.unusable(route.arrays)
            if at is not None:
                reason = TypeError("it no longer has values: it was deleted, or donated")
                raise _Batch([route], where).failure(at, reason)
            continue
        todo.append(route)
        key = route.source.name, route.target.name, route.origin, route.device
        groups.setdefault(key, []).append(route)
    large = _what_is_large(todo) if is_wanted() else ""
    for group in groups.values():
        batch = _Batch(group, where)
        with step(large) if large else nullcontext():
            moved = _with_ties(batch, copy) if ties else _move(batch, copy)
        if len(group) == 1 and len(moved) == len(results):  # the batch has all arrays, in order
            results = moved
            continue
        for place, new in zip(batch.places, moved, strict=True):
            results[place] = new
    _warn_of_precision(todo, where)
    return results


def _what_is_large(routes: Iterable[Route]) -> str:
    """Describes a move that is large enough to take long."""
    size = sum(route.source.nbytes(array) for route in routes for array in route.arrays)
    return f"moving {size / (1 << 30):.1f} GiB" if size >= _LARGE else ""


def _with_ties(batch: _Batch, copy: bool | None) -> list[Any]:
    """Moves arrays; those that were views of others are views again."""
    arrays, source = batch.arrays, batch.source
    if copy is False or not source.may_share_memory(arrays):
        return _move(batch, copy)
    views = {tie.view: tie for tie in find_view_ties(arrays, source)}
    if not views:
        return _move(batch, copy)
    bases = batch.part([at for at in range(len(arrays)) if at not in views])
    by_place = dict(zip(bases.places, _move(bases, copy), strict=True))
    moved = {at: by_place[place] for at, place in enumerate(batch.places) if place in by_place}
    lost: list[ViewTie] = []
    for at, tie in views.items():
        lost += _restore_view(at, tie, batch, moved, copy)
    _warn_of_lost_ties(lost, batch)
    return [moved[at] for at in range(len(arrays))]


def _move(batch: _Batch, copy: bool | None) -> list[Any]:
    """Moves arrays; lazy ones are read in portions."""
    if batch.source is batch.target:
        return _move_at_once(batch, copy)
    portion = batch.source.portion(batch.arrays, None if batch.is_cast else batch.device)
    if portion is None:
        return _move_at_once(batch, copy)
    results: list[Any] = []
    sizes = list(map(batch.source.nbytes, batch.arrays))
    for ats in _portions(sizes, portion):
        results += _move_at_once(batch.part(ats), copy)
    return results


def _portions(sizes: Sequence[int], most: int) -> Iterable[list[int]]:
    """Groups the indices of arrays into portions of at most `most` bytes, or one larger array."""
    ats: list[int] = []
    size = 0
    for at, nbytes in enumerate(sizes):
        if ats and size + nbytes > most:
            yield ats
            ats, size = [], 0
        ats.append(at)
        size += nbytes
    if ats:
        yield ats


def _move_at_once(batch: _Batch, copy: bool | None) -> list[Any]:
    if batch.device.kind == "meta" and copy is not False:
        return batch.finish(lambda: _abstract(batch, copy))
    if batch.source is batch.target:
        return batch.finish(lambda: _within(batch, copy))
    exchange = _exchange(batch, copy)
    target = batch.target
    new = batch.finish(lambda: target.take(exchange, batch.device, share=copy is False))
    if not batch.is_cast:
        return new
    wrong = [at for at, array in enumerate(new) if target.dtype(array) != batch.route(at).held]
    return _cast(target, new, wrong, batch)


def _abstract(batch: _Batch, copy: bool | None) -> Iterable[Any]:
    """Creates abstract arrays with the shapes and dtypes of the batch."""
    source, target = batch.source, batch.target
    if source is not target:
        for at, array in enumerate(batch.arrays):
            yield target.abstract(source.shape(array), batch.route(at).held)
        return
    arrays: Iterable[Any] = batch.arrays
    if copy or batch.origin != batch.device:
        arrays = source.to_device(batch.arrays, batch.device, copy=copy)
    yield from _cast(source, arrays, batch.casts, batch)


def _within(batch: _Batch, copy: bool | None) -> Iterable[Any]:
    """Moves arrays between devices of one backend."""
    source, device = batch.source, batch.device
    if copy is False:
        raise _no_copy(batch, 0)
    if not batch.is_cast:
        return source.to_device(batch.arrays, device, copy=copy)
    casts = _cast(source, batch.arrays, batch.casts, batch)
    if batch.origin != device:
        return source.to_device(casts, device, copy=None)
    if copy is True:  # arrays that were cast are copies
        same = [at for at in range(len(casts)) if not batch.route(at).is_cast]
        copies = source.to_device([casts[at] for at in same], device, copy=True)
        for at, new in zip(same, copies, strict=True):
            casts[at] = new
    return casts


def _exchange(batch: _Batch, copy: bool | None) -> Exchange:
    """Exports arrays in a form that the other backend can take."""
    source, target, arrays = batch.source, batch.target, batch.arrays
    casts = batch.casts
    if casts and copy is False:
        raise _no_copy(batch, casts[0])
    fresh = [at for at in casts if source.storable(batch.route(at).held) == batch.route(at).held]
    if source.frozen:  # it could not export its cast arrays without another copy
        exchange = _cast_on_host(batch, batch.export(arrays), fresh)
    else:
        arrays = _cast(source, arrays, fresh, batch) if fresh else arrays
        exchange = batch.export(arrays)
    if copy is False:
        for at, (array, data) in enumerate(zip(arrays, exchange.data, strict=True)):
            if at in exchange.private or not source.is_view(data, array):
                reason = BufferError(
                    f"an array of this layout can leave {source.name} only as a copy"
                )
                raise batch.failure(at, reason)
        return exchange
    if copy is None and exchange.frozen and target.read_only:
        return exchange
    if batch.device.kind != "cpu" or exchange.device is not None or not target.keeps_memory:
        return exchange
    # Nobody else holds arrays that are cast or private, unless the source made them read-only.
    private = {at for at in (*exchange.private, *fresh) if exchange.data[at].flags.writeable}
    others = (
        [at for at in range(len(arrays)) if at not in private] if private else range(len(arrays))
    )
    given = [exchange.data[at] for at in others] if private else exchange.data
    try:
        copies = host_copies(given, order=target.order)
    except BatchError as error:
        cause = MemoryError(str(error.__cause__))
        raise batch.failure(others[error.index], cause) from error.__cause__
    if private:
        data = list(exchange.data)
        for at, new in zip(others, copies, strict=True):
            data[at] = new
        copies = data
    return Exchange(copies, private=range(len(copies)))


def _cast_on_host(batch: _Batch, exchange: Exchange, casts: Sequence[int]) -> Exchange:
    """Casts some arrays of an exchange into new memory."""
    if not casts or exchange.device is not None:
        return exchange
    data = _cast(get_adapter(HOST.backend, Arrays), exchange.data, casts, batch)
    private = {*exchange.private, *casts}
    return dataclasses.replace(exchange, data=data, private=private, owners=None)


def _no_copy(batch: _Batch, at: int) -> Exception:
    route = batch.route(at)
    what = f"from {route.dtype} to {route.held}" if route.is_cast else f"to {route.device}"
    return batch.failure(at, BufferError(f"going {what} needs a copy"))


def _cast(
    adapter: Arrays, arrays: Iterable[Any], chosen: Sequence[int], batch: _Batch
) -> list[Any]:
    """Casts the chosen arrays to the dtypes of their routes.

    Raises:
        LossyCastError: One of them has values that its new dtype cannot hold.
    """
    results = list(arrays)
    for route, members in itertools.groupby(chosen, key=batch.route):
        ats = list(members)
        done = 0
        try:
            for new, survived in adapter.casts([results[at] for at in ats], route.held):
                if not survived:
                    raise _lossy(batch, ats[done])
                results[ats[done]] = new
                done += 1
        except BatchError as error:
            cause = error.__cause__
            reason = cause if isinstance(cause, Exception) else error
            raise batch.failure(ats[error.index], reason) from reason
        except FmapperError:
            raise
        except Exception as error:
            raise batch.failure(ats[done], error) from error
    return results


def _lossy(batch: _Batch, at: int) -> LossyCastError:
    step = batch.route(at)
    kind = "values do not fit"
    if not is_inexact(step.dtype):
        kind = "integers do not fit"
    elif is_inexact(step.held):
        complex_to_real = step.dtype.startswith("complex") > step.held.startswith("complex")
        kind = "imaginary parts are lost" if complex_to_real else "finite values become infinite"
    limit = ""
    if step.held != step.wanted:
        limit = f" ({step.target.name} does not support {step.wanted} here)"
    return LossyCastError(
        f"{batch.path(at)}: {kind} going from {step.dtype} to {step.held}{limit}. "
        "Scale the values, or keep a wider dtype"
        + (f": {step.target.widened_by}." if limit and step.target.widened_by else ".")
    )


def _restore_view(
    at: int, tie: ViewTie, batch: _Batch, moved: dict[int, Any], copy: bool | None
) -> list[ViewTie]:
    """Makes an array a view of its moved base, or moves it alone and returns the lost tie."""
    view, base = batch.route(at), batch.route(tie.base)
    array, base_array = batch.arrays[at], batch.arrays[tie.base]
    source, target, new_base = batch.source, batch.target, moved[tie.base]
    if (view.dtype, view.held) == (base.dtype, base.held):
        remade = remake(array, base_array, new_base, source, target)
        if remade is not None:
            moved[at] = remade
            return []
    (moved[at],) = _move(batch.part([at]), copy)
    return [tie]


def _warn_of_lost_ties(ties: Sequence[ViewTie], batch: _Batch) -> None:
    if ties:
        pairs = [f"{batch.path(tie.view)} with {batch.path(tie.base)}" for tie in ties]
        warn(
            f"ties by view are lost, because {batch.target.name} cannot express them: "
            f"{_some(pairs)}. Each is an independent array now, with the right values.",
            TieWarning,
        )


def _warn_of_precision(routes: Sequence[Route], where: Where) -> None:
    narrowed: dict[tuple[str, str], list[int]] = {}
    for route in routes:
        if route.held != route.wanted and is_inexact(route.wanted):
            narrowed.setdefault((route.wanted, route.held), []).extend(route.places)
    if narrowed:
        what = "; ".join(
            f"{wanted} became {held}: {_some([format_link(where(at)) for at in sorted(places)])}"
            for (wanted, held), places in narrowed.items()
        )
        target = next(route.target for route in routes if route.held != route.wanted)
        way_out = f", or write {target.widened_by}" if target.widened_by else ""
        warn(
            f"{target.name} supports nothing wider here, so {what}. Pass dtype= to confirm that "
            f"this is intended"
            f"{way_out}.",
            PrecisionWarning,
        )


def _some(names: Sequence[str], at_most: int = 8) -> str:
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")
