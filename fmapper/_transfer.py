"""Carrying a batch of arrays to where they are wanted: cast, copy, share; all of them or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fmapper._adapter import Adapter, Device, Exchange
from fmapper._dtypes import is_inexact
from fmapper._errors import (
    CopyNeededError,
    FmapperError,
    LossyCastError,
    MoveError,
    PrecisionWarning,
    TieWarning,
    UnsupportedLeafError,
)
from fmapper._keypath import Link, format_link
from fmapper._views import ViewTie, find_view_ties, transplant
from fmapper._warn import warn


@dataclass(frozen=True, slots=True)
class Step:
    """What is to happen to one array.

    Attributes:
        link: Where it sits.
        array: The array.
        source: The adapter whose array it is.
        target: The adapter whose array it is to become.
        origin: The device that it is on.
        device: The device that it is wanted on.
        dtype: Its dtype.
        wanted: The dtype that it is to have.
        held: The dtype in which the target holds `wanted`.
    """

    link: Link
    array: Any
    source: Adapter
    target: Adapter
    origin: Device
    device: Device
    dtype: str
    wanted: str
    held: str

    @property
    def is_there(self) -> bool:
        """Whether the array is already what is wanted."""
        return self.origin == self.device and self.dtype == self.held

    @property
    def is_cast(self) -> bool:
        """Whether the dtype changes."""
        return self.dtype != self.held


def carry_out(steps: Sequence[Step], *, copy: bool | None) -> list[Any]:
    """The moved arrays, in order; what is there already is the very same object.

    Raises:
        MoveError: An array could not be moved. Nothing that was given has changed.
        LossyCastError: An array has values that its new dtype cannot hold.
    """
    results: list[Any] = [step.array for step in steps]
    todo = [index for index, step in enumerate(steps) if copy is True or not step.is_there]
    groups: dict[tuple[str, str, Device], list[int]] = {}
    for index in todo:
        step = steps[index]
        groups.setdefault((step.source.name, step.target.name, step.device), []).append(index)
    for group in groups.values():
        chosen = [steps[index] for index in group]
        ties = [] if copy is False else find_view_ties([s.array for s in chosen], chosen[0].source)
        views = {tie.view: tie for tie in ties}
        bases = [at for at in range(len(chosen)) if at not in views]
        moved = dict(zip(bases, _moved([chosen[at] for at in bases], copy), strict=True))
        lost: list[ViewTie] = []
        for at, tie in views.items():
            lost += _restore_view(at, tie, chosen, moved, copy)
        for at, index in enumerate(group):
            results[index] = moved[at]
        _warn_of_lost_ties(lost, chosen)
    _warn_of_precision([steps[index] for index in todo])
    return results


def _moved(steps: Sequence[Step], copy: bool | None) -> list[Any]:
    """Moves arrays between one pair of backends; an error names the first that is not done."""
    done: list[Any] = []
    try:
        for new in _stream(steps, copy):
            done.append(new)
    except FmapperError:
        raise
    except Exception as error:
        raise _failure(steps[min(len(done), len(steps) - 1)], error) from error
    return done


def _stream(steps: Sequence[Step], copy: bool | None) -> Iterable[Any]:
    if not steps:
        return
    source, target, device = steps[0].source, steps[0].target, steps[0].device
    if source is not target:
        exchanges = _exchanges(steps, copy)
        for step, new in zip(steps, target.take(exchanges, device, copy=copy), strict=True):
            yield _checked_cast(target, new, step) if target.dtype(new) != step.held else new
    elif any(step.is_cast for step in steps):
        for step in steps:
            _no_copy_asked(step, copy)
            new = _checked_cast(source, step.array, step) if step.is_cast else step.array
            if step.origin == device and (step.is_cast or copy is not True):
                yield new
            else:
                yield from source.to_device([new], device, copy=copy)
    else:
        for step in steps:
            _no_copy_asked(step, copy)
        yield from source.to_device([step.array for step in steps], device, copy=copy)


def _exchanges(steps: Sequence[Step], copy: bool | None) -> Iterator[Exchange]:
    """The arrays as the source gives them, cast there where the source holds the new dtype."""
    for step in steps:
        source, array = step.source, step.array
        if step.is_cast:
            _no_copy_asked(step, copy)
        fresh = step.is_cast and source.storable(step.held) == step.held
        if fresh:
            array = _checked_cast(source, array, step)
        for exchange in source.export([array], step.device):
            if copy is False and exchange.private:
                raise BufferError(f"an array of this layout leaves {source.name} as a copy only")
            # A cast array is nobody else's; read-only memory of it is still not to be written to.
            fresh = fresh and exchange.device is None and exchange.data.flags.writeable
            yield dataclasses.replace(exchange, private=True) if fresh else exchange


def _no_copy_asked(step: Step, copy: bool | None) -> None:
    if copy is False:
        what = f"from {step.dtype} to {step.held}" if step.is_cast else f"to {step.device}"
        raise BufferError(f"going {what} takes a copy")


def _checked_cast(adapter: Adapter, array: Any, step: Step) -> Any:
    new, survived = adapter.cast(array, step.held)
    if not survived:
        kind = "values do not fit"
        if not is_inexact(step.dtype):
            kind = "integers do not fit"
        elif is_inexact(step.held):
            complex_to_real = step.dtype.startswith("complex") > step.held.startswith("complex")
            kind = (
                "imaginary parts are lost" if complex_to_real else "finite values become infinite"
            )
        limit = ""
        if step.held != step.wanted:
            limit = f" ({step.target.name} holds no {step.wanted} here)"
        raise LossyCastError(
            f"{format_link(step.link)}: {kind} going from {step.dtype} to {step.held}{limit}. "
            "Scale the values, or keep a wider dtype"
            + (" (for JAX: jax.config.update('jax_enable_x64', True))." if limit else ".")
        )
    return new


def _failure(step: Step, error: Exception) -> Exception:
    kind = MoveError
    if isinstance(error, TypeError):
        kind = UnsupportedLeafError
    elif isinstance(error, BufferError):
        kind = CopyNeededError
    way_out = " Leave copy=False out to allow copies." if kind is CopyNeededError else ""
    return kind(
        f"{format_link(step.link)}: cannot take {step.dtype} from {step.origin} to {step.device}: "
        f"{str(error).rstrip('.')}. Nothing was moved, and the tree is as it was.{way_out}"
    )


def _restore_view(
    at: int, tie: ViewTie, steps: Sequence[Step], moved: dict[int, Any], copy: bool | None
) -> list[ViewTie]:
    """Makes an array a view of its moved base, or moves it alone; returns the tie if it is lost."""
    step, base = steps[at], steps[tie.base]
    source, target, new_base = step.source, step.target, moved[tie.base]
    old, old_base = source.memory(step.array), source.memory(base.array)
    there = target.memory(new_base)
    shape = source.shape(step.array)
    same_dtype = (step.dtype, step.held) == (base.dtype, base.held)
    if old is not None and old_base is not None and there is not None and same_dtype:
        place = transplant(old, shape, old_base, source.shape(base.array), there)
        if place is not None:
            try:
                moved[at] = target.view(new_base, shape, *place, step.array)
            except TypeError:  # the target has no such views
                pass
            else:
                return []
    moved.update(zip([at], _moved([step], copy), strict=True))
    return [tie]


def _warn_of_lost_ties(ties: Sequence[ViewTie], steps: Sequence[Step]) -> None:
    if ties:
        pairs = [
            f"{format_link(steps[tie.view].link)} with {format_link(steps[tie.base].link)}"
            for tie in ties
        ]
        target = steps[0].target.name
        warn(
            f"ties by view are lost, because {target} cannot express them: {_some(pairs)}. "
            "Each is an array of its own now, with the right values.",
            TieWarning,
        )


def _warn_of_precision(steps: Sequence[Step]) -> None:
    narrowed: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        if step.held != step.wanted and is_inexact(step.wanted):
            narrowed.setdefault((step.wanted, step.held), []).append(format_link(step.link))
    if narrowed:
        what = "; ".join(
            f"{wanted} became {held}: {_some(paths)}" for (wanted, held), paths in narrowed.items()
        )
        target = next(step.target.name for step in steps if step.held != step.wanted)
        way_out = ", or set jax_enable_x64" if target == "jax" else ""
        warn(
            f"{target} holds nothing wider here, so {what}. "
            f"Ask for it with dtype= to say that you mean it{way_out}.",
            PrecisionWarning,
        )


def _some(names: Sequence[str], at_most: int = 8) -> str:
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")
