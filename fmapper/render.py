"""Renders rich's objects as text and as HTML for notebooks, and formats sizes and times."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDTH = 120
_PRE = '<pre style="line-height: 1.2; overflow-x: auto">{code}</pre>'


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = {
    "B": 1,
    **{f"{c}iB": 1 << 10 * n for n, c in enumerate("KMGT", 1)},
    **{f"{c}B": 1000**n for n, c in enumerate("KMGT", 1)},
    "kB": 1000,
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|k?B)\s*")


def as_text(renderable: RenderableType) -> str:
    """Renders plain text of at most 120 columns, without trailing blanks."""
    console = _recording(renderable, color=False)
    return "\n".join(map(str.rstrip, console.export_text().splitlines())).rstrip()


def as_html(*renderables: RenderableType) -> str:
    """Renders HTML with the columns and colours of a terminal."""
    consoles = [_recording(renderable, color=True) for renderable in renderables]
    return "".join(c.export_html(inline_styles=True, code_format=_PRE) for c in consoles)


def pairs(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Renders a title above names and texts; rows without a text are left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, text in rows:
        if text:
            table.add_row(Text(name, style="dim"), Text(text))
    return Group(Text(title, style="bold"), table)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> RenderableType:
    """Returns a table of texts."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Prints rows of texts in columns; rich takes a minute for 100,000 of them.

    Examples:
        >>> print(columns([("array", "bytes"), ("w", "4")]))
        array  bytes
        w      4
    """
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in lines)


def readable_bytes(n: int) -> str:
    """Formats a number of bytes in the largest unit of which there is at least one.

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


def parse_bytes(text: str) -> int | None:
    """Parses a size such as `1.5GiB` or `800MB` into bytes; returns None for other texts.

    Examples:
        >>> parse_bytes("1.5GiB"), parse_bytes("800 MB"), parse_bytes("much")
        (1610612736, 800000000, None)
    """
    match = _AMOUNT.fullmatch(text)
    return None if match is None else int(float(match[1]) * _BYTES[match[2]])


def readable_seconds(seconds: float) -> str:
    """Formats a time with three digits and a unit.

    Examples:
        >>> readable_seconds(0.00123), readable_seconds(12.0), readable_seconds(0.0)
        ('1.23 ms', '12 s', '0')
    """
    if seconds == 0:
        return "0"
    size, unit = unit_of(seconds)
    return f"{seconds / size:.3g} {unit}" if seconds / size < 999.5 else f"{seconds:,.0f} s"


def unit_of(seconds: float) -> tuple[float, str]:
    """Returns the unit in which to print a time: its length in seconds, and its name."""
    return next((pair for pair in _UNITS if seconds >= 0.9995 * pair[0]), _UNITS[-1])


def readable_batch(size: int) -> str:
    """Formats a batch size to two digits, the precision of a break-even.

    Examples:
        >>> readable_batch(2713), readable_batch(8)
        ('2,700', '8')
    """
    digits = len(str(size))
    return f"{round(size, 2 - digits):,}" if digits > 2 else str(size)


def _recording(renderable: RenderableType, *, color: bool) -> Console:
    from rich.console import Console

    console = Console(
        width=_WIDTH,
        file=io.StringIO(),
        record=True,
        color_system="truecolor" if color else None,
        force_terminal=color,
        force_jupyter=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(renderable)
    return console
