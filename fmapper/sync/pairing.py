"""Which rules bring one model's names and layouts to another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fmapper.backends.discovery import adapters
from fmapper.backends.models import Models

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.sync.ends import End


def rules_between(source: Any, target: Any, a: End, b: End, rules: Rules | None) -> Rules:
    """Returns the rules that are given; else those that bring the source to the target.

    There are none to find where both have the same names: a model and what was made of it, another
    of its class, or a state. For others `transfer` searches.
    """
    from fmapper.checkpoints.rules.rules import Rules

    if rules is not None:
        return rules
    is_generator = a.generator is not None or b.generator is not None
    if (is_generator or _are_related(source, target)) and _have_same_names(a, b):
        return Rules()
    recorded = _of_written_classes(source, target, a, b)
    if recorded is not None:
        return recorded
    if is_generator:
        return Rules()  # what is missing is said by name
    from fmapper.twins.transferring import plan_transfer

    return plan_transfer(source, target, keep=b.keep)[2].rules


def _of_written_classes(source: Any, target: Any, a: End, b: End) -> Rules | None:
    """Returns the rules between a model and what `convert(..., structure=True)` made of it."""
    from fmapper.checkpoints.rules.naming import Drop
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.errors import CheckpointError
    from fmapper.translation.reading.weights import arrays_from_source

    for model, other, back in ((target, a, False), (source, b, True)):
        function = arrays_from_source(model)
        if function is None:
            continue
        state = {entry.name: entry.value for entry in other.entries.values()}
        try:
            rules = Rules.record(function, state)
            if back:  # what the model does not have, such as counters, stays as it is
                kept = [r for r in rules if not isinstance(r, Drop) or r.tied_to]
                rules = Rules(kept).inverse()
            return rules
        except (CheckpointError, KeyError):  # the other is not its source
            continue
    return None


def _are_related(source: Any, target: Any) -> bool:
    """Returns whether equal names mean the same arrays."""
    if isinstance(source, Mapping) or isinstance(target, Mapping):
        return True
    first, second = (x[0] if isinstance(x, tuple) else x for x in (source, target))
    if isinstance(first, type(second)) or isinstance(second, type(first)):  # FSDP makes subclasses
        return True
    made = (adapter.program_of(x) for adapter in adapters(Models) for x in (source, target))
    return any(program is not None for program in made)


def _have_same_names(a: End, b: End) -> bool:
    return all(
        name in a.outlines and a.outlines[name].shape == outline.shape
        for name, outline in b.outlines.items()
        if not (outline.free or outline.tied_to or (name in a.outlines and a.outlines[name].random))
    )
