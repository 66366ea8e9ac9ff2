"""Summaries of trees: the path, size and device of each object, and ties."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fmapper.render import as_html, as_text, readable_bytes
from fmapper.states.inventory import HIDES, Inventory, SummaryRow
from fmapper.tree.keypath import format_keys
from fmapper.tree.nodes import sync

if TYPE_CHECKING:
    from rich.console import RenderableType


class Summary:
    """The summary of a tree, made by `summary`. It prints as a tree, also in notebooks.

    Attributes:
        rows: Every place of the tree, parents first. Nothing is folded or left out here.
        totals: (device, dtype) -> arrays, numbers, bytes.
    """

    def __init__(self, places: Inventory, depth: int | None, max_rows: int, fold: bool) -> None:
        self.rows = tuple(places.rows)
        self.totals = places.totals()
        self._places, self._depth, self._max_rows, self._fold = places, depth, max_rows, fold

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; tied arrays and views are counted once."""
        return sum(total.nbytes for total in self.totals.values())

    def __str__(self) -> str:
        """Returns the tree, as plain text."""
        return as_text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __rich__(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, caption_justify="left", show_footer=False)
        for name in ("", "class", "shape", "dtype", "device"):
            table.add_column(name, overflow="fold")
        table.add_column("bytes", justify="right")
        table.add_column("trained")
        cut = False
        for guide, key, what, row, nbytes in self._lines():
            if table.row_count == self._max_rows:
                cut = True
                break
            place = Text(guide, style="dim") + Text(key, style="bold")
            style = "red" if row.note == HIDES else "dim" if row.same_as is not None else ""
            table.add_row(
                place,
                Text(what, style=style),
                Text("" if row.shape is None else str(row.shape)),
                Text(row.dtype or ""),
                Text(row.device or ""),
                Text(readable_bytes(nbytes) if nbytes else ""),
                Text("" if row.trainable is None else "yes" if row.trainable else "no"),
            )
        table.caption = "\n".join(self._footer(cut=cut))
        return table

    def _footer(self, *, cut: bool) -> Iterator[str]:
        if cut:
            yield f"... cut after {self._max_rows} lines: {len(self.rows)} rows in all"
        for (device, dtype), total in self.totals.items():
            counts = _count(total.arrays, "array"), _count(total.numbers, "number")
            yield f"{device} {dtype}: {', '.join(counts)}, {readable_bytes(total.nbytes)}"
        trained = self._places.numbers_trained()
        yield f"{readable_bytes(self.nbytes)} in all; {_count(trained, 'number')} trained"

    def _lines(self) -> Iterator[tuple[str, str, str, SummaryRow, int]]:
        """Yields the parts of each line, with like items folded and depth limited."""
        places = self._places
        stack: list[Iterator[tuple[list[int], bool]]] = [iter([([0], True)])]
        guides = [""]
        while stack:
            for run, is_last in stack[-1]:
                row, below = self.rows[run[0]], places.below[run[0]]
                depth = len(stack) - 1
                hidden = bool(below) and depth == self._depth
                what = _describe(row, len(below) if hidden else 0)
                key = format_keys([places.keys[run[0]]], root="") if depth else "model"
                if len(run) > 1:
                    key = f"[{places.keys[run[0]]}..{places.keys[run[-1]]}]"
                    what = f"{len(run)} x {what}"
                guide = "" if not depth else guides[-1] + ("└─ " if is_last else "├─ ")
                yield guide, key, what, row, sum(self.rows[at].nbytes for at in run)
                if below and not hidden:
                    stack.append(places.runs(run[0], fold=self._fold))
                    guides.append("" if not depth else guides[-1] + ("   " if is_last else "│  "))
                    break
            else:
                stack.pop()
                guides.pop()


def summary(
    tree: Any, *, depth: int | None = None, max_rows: int = 200, fold: bool = True
) -> Summary:
    """Summarises a tree: class, shape, dtype, device and bytes of each place.

    A repeated object is shown by its first path and not entered again, so that ties are visible and
    cycles end; its bytes are counted once. A run of like items in a list is folded into one line
    (`[0..11] 12 x Block`), followed by the contents of the first item.

    Args:
        tree: Anything. Values of arrays are not read.
        depth: The depth of the printed tree; None for no limit.
        max_rows: The maximal number of printed lines.
        fold: Whether to fold like items.

    Returns:
        A `Summary`: print it, or look at its `rows` and `totals`.

    Examples:
        >>> import fmapper, numpy as np
        >>> w = np.ones((2, 3))
        >>> made = fmapper.summary({"embed": w, "head": {"w": w, "b": np.ones(2)}})
        >>> made.nbytes, [str(row.path) for row in made.rows if row.same_as is not None]
        (64, ['head.w'])

    Marking repeats by their first path follows treescope, https://treescope.readthedocs.io.
    """
    sync()
    return Summary(Inventory(tree), depth, max_rows, fold)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def _describe(row: SummaryRow, hidden: int) -> str:
    if row.same_as is not None:
        return f"{row.cls}, same as {format_keys(row.same_as)}"
    if row.view_of is not None:
        return f"{row.cls}, view of {format_keys(row.view_of)}"
    if hidden:
        return f"{row.cls} ({hidden} inside)"
    return f"{row.cls}: {row.note}" if row.note else row.cls
