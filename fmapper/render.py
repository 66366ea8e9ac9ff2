"""Prints what rich can render: as plain text, and as HTML for notebooks."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDTH = 120
_PRE = '<pre style="line-height: 1.2; overflow-x: auto">{code}</pre>'


def as_text(renderable: RenderableType) -> str:
    """Returns plain text of 120 columns at most, without blanks at the end of lines."""
    console = _recording(renderable, color=False)
    return "\n".join(map(str.rstrip, console.export_text().splitlines())).rstrip()


def as_html(*renderables: RenderableType) -> str:
    """Returns HTML with the columns and colours of a terminal; what is not markup is escaped."""
    consoles = [_recording(renderable, color=True) for renderable in renderables]
    return "".join(c.export_html(inline_styles=True, code_format=_PRE) for c in consoles)


def pairs(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Returns a title above names with a text beside each; rows without a text are left out."""
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

    made = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


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
