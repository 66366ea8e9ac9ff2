"""A profile as a table in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fmapper._plan import readable_bytes
from fmapper._timing import Timing

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fmapper._profile_result import Profile, ProfileCell

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def readable_seconds(seconds: float) -> str:
    """Three digits and a unit.

    Examples:
        >>> readable_seconds(0.00123), readable_seconds(12.0), readable_seconds(0.0)
        ('1.23 ms', '12 s', '0')
    """
    if seconds == 0:
        return "0"
    size, unit = _unit(seconds)
    return f"{seconds / size:.3g} {unit}" if seconds / size < 999.5 else f"{seconds:,.0f} s"


def _unit(seconds: float) -> tuple[float, str]:
    return next((pair for pair in _UNITS if seconds >= 0.9995 * pair[0]), _UNITS[-1])


def readable_batch(size: int) -> str:
    """Two digits are all that a break-even has.

    Examples:
        >>> readable_batch(2713), readable_batch(8)
        ('2,700', '8')
    """
    digits = len(str(size))
    return f"{round(size, 2 - digits):,}" if digits > 2 else str(size)


def rendered(profile: Profile) -> RenderableType:
    """The table, the verdicts and the notes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"Where the time of {profile.model} goes"), title_justify="left")
    table.add_column("device", no_wrap=True)
    for name in ("batch", "in", "compute", "out", "total", "moving", "first", "bytes"):
        table.add_column(name, justify="right", no_wrap=name == "total")
    table.add_column("bound")
    last = None
    for cell in profile.cells:
        if last not in (None, cell.device):
            table.add_section()
        name = "" if cell.device == last else cell.device
        table.add_row(*map(Text, (name, *_row(cell))), style="dim" if cell.predicted else "")
        last = cell.device
    lines = [
        "Medians of one run, +- half the distance of the quartiles. ~ is predicted (least..most)."
    ]
    if profile.accelerator is not None:
        lines.append(f"Predictions are for: {profile.accelerator}.")
    by_device: dict[str, list[str]] = {}
    for size, device in profile.fastest.items():
        by_device.setdefault(device, []).append(f"{size:,}")
    runs = "; ".join(f"{device} at {', '.join(sizes)}" for device, sizes in by_device.items())
    if len(profile.devices) > 1 and runs:
        lines.append(f"Fastest of what was measured, by batch size: {runs}.")
    parts: list[RenderableType] = [table, *(Text(line, style="dim") for line in lines)]
    for verdict in profile.verdicts:
        parts.append(Text(f"{verdict.device}: {verdict.reason}", style="bold"))
        if verdict.advice:
            parts.append(Text(f"  {verdict.advice}"))
    parts += [Text(f"note: {note}", style="yellow") for note in profile.notes]
    return Group(*parts)


def _row(cell: ProfileCell) -> tuple[str, ...]:
    moving, mark = f"{cell.share_moving.median:.0%}", "~" if cell.predicted else ""
    first = "" if cell.first_call is None else readable_seconds(cell.first_call)
    return (
        f"{cell.batch_size:,}",
        mark + readable_seconds(cell.transfer_in.median),
        mark + readable_seconds(cell.compute.median) if mark else _with_spread(cell.compute),
        mark + readable_seconds(cell.transfer_out.median),
        _with_spread(cell.total),
        mark + moving,
        first,
        readable_bytes(cell.bytes_in + cell.bytes_out),
        cell.bound or "",
    )


def _with_spread(timing: Timing) -> str:
    """With the relative distance of the quartiles, or the ends of a prediction in the same unit."""
    median = readable_seconds(timing.median)
    if timing.n == 0:
        size = _unit(timing.median)[0]
        return f"~{median} ({timing.lower / size:.3g}..{timing.upper / size:.3g})"
    if timing.n == 1 or not timing.median:
        return median
    return f"{median} +-{(timing.upper - timing.lower) / 2 / timing.median:.0%}"
