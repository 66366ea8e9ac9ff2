"""Formats a profile as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fmapper.profiles.timing import Timing
from fmapper.render import readable_bytes, readable_seconds, unit_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fmapper.profiles.result import Profile, ProfileCell

_COLUMNS = ["device", "batch", "in", "compute", "out", "total", "moving", "first", "bytes", "bound"]
_DROPPED = ("first", "bytes", "bound")  # if they do not fit
_WIDE = 106


def render(profile: Profile, width: int) -> Iterator[RenderableType]:
    """Yields the table, the verdicts and the notes, wrapped to a width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = _COLUMNS if width >= _WIDE else [name for name in _COLUMNS if name not in _DROPPED]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in shown:
        table.add_column(name, justify="left" if name in ("device", "bound") else "right")
    last = None
    for cell in profile.cells:
        if last not in (None, cell.device):
            table.add_section()
        row = _row(cell, "" if cell.device == last else cell.device, wide=width >= _WIDE)
        table.add_row(*(Text(row[name]) for name in shown), style="dim" if cell.predicted else "")
        last = cell.device
    yield Text(f"Where the time of {profile.model} goes", style="bold")
    yield table
    yield Text("Medians of one run, +- half the distance of the quartiles.", style="dim")
    if profile.accelerator is not None:
        text = f"~ is predicted for {profile.accelerator}, with the least and the most in brackets."
        yield Text(text, style="dim")
    by_device: dict[str, list[str]] = {}
    for size, device in profile.fastest.items():
        by_device.setdefault(device, []).append(f"{size:,}")
    runs = "; ".join(f"{device} at {', '.join(sizes)}" for device, sizes in by_device.items())
    if len(profile.devices) > 1:
        yield Text(f"Fastest of what was measured, by batch size: {runs}.")
    for verdict in profile.verdicts:
        yield Text(f"{verdict.device}: {verdict.reason}", style="bold")
        yield Text(f"  {verdict.advice}")
    yield from (Text(f"note: {note}", style="yellow") for note in profile.notes)


def _row(cell: ProfileCell, device: str, *, wide: bool) -> dict[str, str]:
    mark = "~" if cell.predicted else ""
    compute = mark + readable_seconds(cell.compute.median)
    return {
        "device": device,
        "batch": f"{cell.batch_size:,}",
        "in": mark + readable_seconds(cell.transfer_in.median),
        "compute": _with_spread(cell.compute) if wide and not mark else compute,
        "out": mark + readable_seconds(cell.transfer_out.median),
        "total": _with_spread(cell.total),
        "moving": f"{mark}{cell.share_moving.median:.0%}",
        "first": "" if cell.first_call is None else readable_seconds(cell.first_call),
        "bytes": readable_bytes(cell.bytes_in + cell.bytes_out),
        "bound": cell.bound or "",
    }


def _with_spread(timing: Timing) -> str:
    """Formats a time with its spread: relative, or the ends of a prediction in the same unit."""
    median = readable_seconds(timing.median)
    if timing.n == 0:
        size = unit_of(timing.median)[0]
        return f"~{median} ({timing.lower / size:.3g}..{timing.upper / size:.3g})"
    if timing.n == 1 or not timing.median:
        return median
    return f"{median} +-{(timing.upper - timing.lower) / 2 / timing.median:.0%}"
