"""The result of a transfer: which array became which, why that is known, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fmapper.errors import AmbiguousTransferError, TransferError
from fmapper.render import as_html, columns, table
from fmapper.twins.groups import Group
from fmapper.twins.matches import NAMES, Decision, rules_of
from fmapper.twins.sides import Side

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fmapper.checkpoints.rules.rules import Rules

_HEADINGS = ("from", "to", "layout", "witnesses", "sure")


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
        proved: Whether both models were called with new random weights and gave the same outputs,
            to 2e-4 of their root mean square.
    """

    rules: Rules
    arrays: tuple[TransferredArrays, ...]
    unused: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    proved: bool = False

    @property
    def reshaped(self) -> tuple[TransferredArrays, ...]:
        """Those whose layout was changed."""
        return tuple(array for array in self.arrays if array.layout)

    @property
    def lossy(self) -> tuple[str, ...]:
        """The rules that have no inverse, or one that restores values up to rounding."""
        from fmapper.checkpoints.rules.arithmetic import Offset, Sum
        from fmapper.checkpoints.rules.naming import Drop

        return tuple(
            str(rule)
            for rule in self.rules
            if isinstance(rule, Sum | Offset)
            or (isinstance(rule, Drop) and not rule.tied_to and not rule.forget)
        )

    def __str__(self) -> str:
        lines = [columns([_HEADINGS, *self.rows()])]
        lines += [f"unused: {name}" for name in self.unused]
        lines += [f"kept: {name}" for name in self.kept]
        lines += [f"not exactly invertible: {rule}" for rule in self.lossy]
        if self.proved:
            lines.append("both models give the same outputs with new random weights")
        return "\n".join(lines)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the rows of the table."""
        for array in self.arrays:
            names = (", ".join(names) for names in (array.sources, array.targets))
            yield (*names, array.layout, " ".join(array.witnesses), "yes" if array.sure else "no")

    def __rich__(self) -> RenderableType:
        return table(_HEADINGS, self.rows())

    def _repr_html_(self) -> str:
        return as_html(self)


def describe(decision: Decision) -> TransferredArrays:
    """Returns what a report says of a decision."""
    match = decision.match
    return TransferredArrays(
        tuple(group.name for group in match.sources),
        tuple(group.name for group in match.targets),
        str(decision.option),
        (NAMES,) * decision.named + decision.witnesses,
        decision.settled,
        len(match.filled),
    )


def no_counterpart(
    missing: Sequence[str], needed: Sequence[str], a: Side, b: Side
) -> TransferError:
    """Returns the error that lists what of the target and of the source is left."""
    lines = [
        f"{name}: {[*b.entries[name].shape]} of the target, has no counterpart in the source"
        for name in missing
    ]
    for name in needed:
        shape = a.entries[name].shape
        alike = [n for n, e in a.entries.items() if e.shape == shape and n not in needed]
        lines.append(f"{name}: {[*shape]} of the source, has no place in the target")
        if alike and len(shape) > 1:
            lines[-1] += f" (of one shape with {some(alike)}: what a target ties must be equal)"
    shown = lines[:20] + [f"and {len(lines) - 20} more"] * (len(lines) > 20)
    return TransferError(
        "the architectures differ, or the arrays are not alike enough to be paired:\n"
        + "\n".join(f"  {line}" for line in shown)
        + "\nkeep= lists names of the target that stay as they are; rules= says what becomes what, "
        "and drops what is not needed."
    )


def ambiguous(
    unsure: Sequence[Decision], decisions: Sequence[Decision], *, compared: bool
) -> AmbiguousTransferError:
    """Returns the error that lists for what is unsure the candidates and their rules."""
    candidates: dict[str, list[tuple[str, str, str]]] = {}
    lines = []
    for decision, target in [(d, target) for d in unsure for target in d.match.targets]:
        candidates[target.name] = [*_candidates(decision, target)]
        lines.append(f"  {target.name} {[*target.shapes[0]]}:")
        shown = (f"    {name}: {why}. {rule}" for name, why, rule in candidates[target.name])
        lines += [*dict.fromkeys(shown)][:6]
    return AmbiguousTransferError(
        f"{len(lines)} lines on what names and shapes leave open:\n"
        + "\n".join(lines)
        + (
            "\nThe outputs of both models do not tell, so pass"
            if compared
            else "\nPass example_inputs=, with which both models are compared; or"
        )
        + " the rule that is right, in rules=, after error.rules, those for all that is settled.",
        candidates,
        rules_of([decision for decision in decisions if decision.settled]),
    )


def _candidates(decision: Decision, target: Group) -> Iterator[tuple[str, str, str]]:
    """Yields the sources that a target may be made of, the evidence, and the rules for that."""
    matches = [decision.match, *(m for m in decision.others if target in m.targets)]
    for match in matches:
        for option in match.options[: 1 if decision.option.certain and len(matches) > 1 else 4]:
            rules = rules_of([Decision(match, option, True, ())])
            words = {word for g in match.sources for word in g.words.path & target.words.path}
            why = f"the names share {', '.join(sorted(words))}" if words else "the shapes agree"
            why += f", but {decision.doubt}" if decision.doubt else ""
            names = " + ".join(group.name for group in match.sources)
            yield names, why + (f" ({option})" if str(option) else ""), "; ".join(map(str, rules))


def some(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
