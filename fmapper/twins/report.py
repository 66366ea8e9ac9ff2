"""The result of a transfer: which array became which, why that is known, and the rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fmapper.render import as_html, columns, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fmapper.checkpoints.rules.rules import Rules

_HEADINGS = ("from", "to", "layout", "witnesses", "certainty")


@dataclass(frozen=True, slots=True)
class TransferredArrays:
    """Arrays of equal layers, and what they became.

    Attributes:
        sources: Their names in the source; a letter in braces stands for a number.
        targets: Their names in the target.
        layout: What was changed: transposed, reshaped, stacked; empty if nothing was.
        witnesses: What shows that they belong together: `names`, `shapes`, `layers` (the classes of
            both layers), `role` (what both programs do with them), `function` (both models give the
            same outputs), or `rules`.
        sure: Whether nothing else could be meant.
        count: The number of arrays of the target.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    layout: str
    witnesses: tuple[str, ...]
    sure: bool
    count: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The result of `transfer` beside the target.

    Attributes:
        rules: The rules that make the target's arrays of those of the source. They are complete:
            `load`, `convert` and `transfer` take them, and `rules.inverse()` is the way back.
        arrays: What became what.
        unused: Names of the source that nothing in the target is made of.
        kept: Names of the target that stayed as they were: states of random generators, and others
            that no source has.
        proved: Whether both models were called with new random weights and gave the same outputs.
    """

    rules: Rules
    arrays: tuple[TransferredArrays, ...]
    unused: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    proved: bool = False

    @property
    def reshaped(self) -> tuple[TransferredArrays, ...]:
        """Those whose layout was changed."""
        return tuple(one for one in self.arrays if one.layout)

    def __str__(self) -> str:
        lines = [columns([_HEADINGS, *self.rows()])]
        lines += [f"unused: {name}" for name in self.unused]
        lines += [f"kept: {name}" for name in self.kept]
        if self.proved:
            lines.append("both models give the same outputs with new random weights")
        return "\n".join(lines)

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yields the rows of the table."""
        for one in self.arrays:
            yield (
                ", ".join(one.sources),
                ", ".join(one.targets),
                one.layout,
                ", ".join(one.witnesses),
                "sure" if one.sure else "unsure",
            )

    def __rich__(self) -> RenderableType:
        return table(_HEADINGS, self.rows())

    def _repr_html_(self) -> str:
        return as_html(self)
