"""`transfer`: puts the weights of one model into another that was written by somebody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import isroutine
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from fmapper.errors import CheckpointError, TransferError
from fmapper.progress import step
from fmapper.tracebacks import short_traceback
from fmapper.tree.pattern import Pattern
from fmapper.twins.assign import assign
from fmapper.twins.matches import FUNCTION, ROLE, Decision, derive, make
from fmapper.twins.one_sided import (
    Arrays,
    Change,
    Variant,
    has_nan,
    is_counter,
    is_free,
    is_kept,
    is_needed,
    ties_of,
    variants,
    zeros,
)
from fmapper.twins.proof import Proof
from fmapper.twins.recorded import IncomparableError, Model, guesses
from fmapper.twins.report import (
    TransferredArrays,
    TransferReport,
    ambiguous,
    describe,
    no_counterpart,
    some,
)
from fmapper.twins.roles import Roles, roles_of
from fmapper.twins.search import Search
from fmapper.twins.sides import Side, framework_of, read_side

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules

T = TypeVar("T")


@short_traceback
def transfer(
    source: Any,
    target: T,
    *,
    rules: Rules | None = None,
    keep: Sequence[str] = (),
    example_inputs: Any = None,
    target_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    target_kwargs: Mapping[str, Any] | None = None,
) -> tuple[T, TransferReport]:
    """Puts the weights of one model into another with other names and layouts.

    Arrays are paired by their names, by their shapes and the classes of their layers, by what the
    programs of both models do with them, and, with example inputs, by what both compute: with new
    random weights, both must give the same outputs. What is not sure is an error that lists the
    candidates, and never a guess.

    Args:
        source: A model of any framework, a Linen module with its variables as a pair, a dict of
            arrays, or the path of a checkpoint, of which only headers are read while planning.
        target: What is to be filled, a model or any tree. It is not changed. It may have no memory:
            torch's device `meta`, `nnx.eval_shape`, `jax.eval_shape`.
        rules: How the names and layouts of the source become those of the target; then nothing is
            searched for. Those of a report, or others.
        keep: Patterns for names of the target that stay as they are.
        example_inputs: What both models are called with, by position. Without them, models are
            recorded, and called where something stays open, with inputs that fit their shapes.
        target_inputs: What the target is called with, if that is something else.
        example_kwargs: What the source is called with by keyword.
        target_kwargs: What the target is called with by keyword; None for `example_kwargs`.

    Returns:
        A new target with the weights, and the report, whose `rules` repeat the transfer. Backend,
        device and dtype are those of the target.

    Raises:
        AmbiguousTransferError: Several pairs are possible; lists them with their evidence, and the
            rule that settles each.
        TransferError: The architectures differ: an array of either side has no counterpart, or the
            outputs differ.
        StructureMismatchError: With `rules`: what they give does not fit the target.

    Examples:
        >>> import fmapper, torch
        >>> theirs = {"fc.w": torch.ones(2, 3), "fc.b": torch.zeros(2)}
        >>> linear, report = fmapper.transfer(theirs, torch.nn.Linear(3, 2))
        >>> report.rules
        Rules([
            Rename(['fc.w', 'fc.b'], ['weight', 'bias']),
        ])
    """
    given = example_inputs, example_kwargs, target_inputs, target_kwargs
    a, b, report = plan_transfer(source, target, rules, keep, *given)
    with step("copying the weights"):
        arrays = report.rules.apply(a.arrays() if a.stored is None else a.stored)
        free = {name for name, entry in a.entries.items() if not is_needed(entry)}
        left = [name for name in arrays if name not in b.entries and name not in free]
        if left:
            raise TransferError(f"the target has no {some(left)}. Rename or drop them with rules=")
        made = {name: array for name, array in arrays.items() if name in b.entries}
        filled = b.fill(zeros(b, keep) | made, strict=not report.kept)
    names = [n for n, e in read_side(filled, "target").entries.items() if has_nan(e)]
    if names and rules is None:
        first = next((f"{n}: the source" for n, e in a.entries.items() if has_nan(e)), names[0])
        raise TransferError(
            f"{first} has NaN there, as after a training that diverged. Pass "
            "rules= to copy it all the same, those of a report for other weights"
        )
    return filled, report


def plan_transfer(
    source: Any,
    target: Any,
    rules: Rules | None = None,
    keep: Sequence[str] = (),
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    target_inputs: Any = None,
    target_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Side, Side, TransferReport]:
    """Plans a transfer, without copying weights; the arguments are those of `transfer`."""
    a, b = read_side(source, "source", classes=rules is None), read_side(target, "target")
    with step("pairing the arrays of both models"):
        report = _by_library(a, b, keep) if rules is None else _by_rules(a, b, rules, keep)
        if report is not None:
            return a, b, report
        models = None
        if example_inputs is not None or example_kwargs is not None:
            target_inputs = example_inputs if target_inputs is None else target_inputs
            target_kwargs = example_kwargs if target_kwargs is None else target_kwargs
            models = (
                Model(a, _tuple(example_inputs), example_kwargs or {}),
                Model(b, _tuple(target_inputs), target_kwargs or {}),
            )
        report = _search(a, b, keep, models)
        return a, b, report if a.rules is None else replace(report, rules=a.rules + report.rules)


def _tuple(args: Any) -> tuple[Any, ...]:
    several = isinstance(args, tuple | list)
    return () if args is None else tuple(args) if several else (args,)


def _by_rules(a: Side, b: Side, rules: Rules, keep: Sequence[str]) -> TransferReport:
    made = rules.apply(a.outline)
    first = {entry.tied_to or name for name, entry in b.entries.items() if name in made}
    left = [entry for name, entry in b.entries.items() if (entry.tied_to or name) not in first]
    lacking = [e.name for e in left if not (is_free(e) or is_kept(e, keep))]
    if lacking:
        raise TransferError(
            f"the rules give nothing for {some(lacking)}. Add rules for them, or list the names "
            "in keep="
        )
    names = [name for name in made if name in b.entries]
    arrays = (TransferredArrays((), (name,), "", ("rules",), True, 1) for name in names)
    return TransferReport(rules, tuple(arrays), (), tuple(entry.name for entry in left))


def _by_library(a: Side, b: Side, keep: Sequence[str]) -> TransferReport | None:
    """Plans the transfer of arrays by rules of the library of the target, if they all fit."""
    from fmapper.checkpoints.rules.naming import Drop

    adapter = framework_of(b.tree) if b.callable and not a.callable else None
    try:
        rules = adapter.own_rules(b.tree, a.outline) if adapter is not None else None
        if rules is None:
            return None
        made = rules.apply(a.outline)
        kept = [rule for rule in rules if not isinstance(rule, Drop) or rule.tied_to]
        left = {*type(rules)(kept).apply(a.outline)} - {*b.entries}
        report = _by_rules(a, b, rules, keep)
    except (CheckpointError, TransferError):
        return None
    fits = all(n in b.entries and tuple(x.shape) == b.entries[n].shape for n, x in made.items())
    return report if fits and not left else None


@dataclass
class _Plan:
    a: Side
    b: Side
    sides: Variant
    decisions: list[Decision]
    kept: list[str]  # names of the target that stay as they are
    tied: dict[str, str]  # second names of arrays of the source -> the first, which is used
    dropped: list[str]  # names of the source that nothing takes

    def make(self, arrays: Arrays, decisions: Sequence[Decision], change: Change = dict) -> Arrays:
        """Makes the arrays of the target of those of the source, by some decisions and a change."""
        made = self.sides.last(change(make(decisions, self.sides.first(arrays))))
        ties = {n: e.tied_to for n, e in self.b.entries.items() if e.tied_to in made}
        return made | {name: made[of] for name, of in ties.items()}

    @property
    def rules(self) -> Rules:
        """The rules for all decisions."""
        from fmapper.checkpoints.rules.naming import Drop
        from fmapper.checkpoints.rules.rules import Rules

        escape = Pattern.escape
        drops = [Drop(escape(name), tied_to=escape(of)) for name, of in self.tied.items()]
        if self.dropped:
            drops.append(Drop([*map(escape, self.dropped)], forget=True))
        left = {*self.tied, *self.dropped}
        used = [entry for name, entry in self.a.entries.items() if name not in left]
        return Rules([*drops, *derive(used, lambda arrays: self.make(arrays, self.decisions))])


def _search(
    a: Side, b: Side, keep: Sequence[str], given: tuple[Model, Model] | None
) -> TransferReport:
    models, roles, proved = given, None, False
    kept = {name for name, e in b.entries.items() if is_kept(e, keep) and is_needed(e)}
    if a.callable and b.callable:
        with step("recording what uses the arrays of both models"):
            tries = ((x, roles_of(*x, kept)) for x in (guesses(a, b) if given is None else [given]))
            models, roles = next((attempt for attempt in tries if attempt[1]), (given, None))
    plan = _find(a, b, keep, roles)
    if models is not None:
        with step("comparing what both models compute"):
            proved = _prove(plan, models, roles, kept, guessed=given is None)
    rules = plan.rules
    if a.callable and b.callable and not _is_same_class(a, b):
        _doubt_single_witnesses(plan.decisions)
    unsure = [decision for decision in plan.decisions if not decision.settled]
    if unsure:
        raise ambiguous(unsure, plan.decisions, compared=proved or given is not None)
    arrays = tuple(map(describe, plan.decisions))
    return TransferReport(rules, arrays, tuple(plan.dropped), tuple(plan.kept), proved)


def _prove(
    plan: _Plan,
    models: tuple[Model, Model],
    roles: Roles | None,
    kept: Collection[str],
    *,
    guessed: bool,
) -> bool:
    """Changes decisions until both models agree; returns whether all of their outputs do."""
    before = [replace(decision) for decision in plan.decisions]
    try:
        proof = Proof(*models, plan.dropped, plan.tied, kept)
        make = partial(plan.make, models[0].side.outline | proof.arrays)
        search = Search(proof, plan.decisions, make, roles)
        problem = search.run()
    except IncomparableError:  # models that take something else
        if not guessed:
            raise
        plan.decisions[:] = before
        return False
    if problem:
        hint = ". They were called with inputs that fit their shapes: if they take others, pass "
        raise TransferError(problem + (f"{hint}example_inputs=" if guessed else ""))
    return not search.partial


def _is_same_class(a: Side, b: Side) -> bool:
    first, second = (x.tree[0] if isinstance(x.tree, tuple) else x.tree for x in (a, b))
    same = first is second or (type(first) is type(second) and not isroutine(first))
    return same and (a.entries.keys() <= b.entries.keys() or a.entries.keys() >= b.entries.keys())


def _doubt_single_witnesses(decisions: Sequence[Decision]) -> None:
    """Makes decisions unsure on which one witness alone agrees, be that names, role or shapes.

    Shapes are a witness where no other array has them, not even one whose name has another number.
    What the outputs do not depend on, such as the bias of keys, goes with the rest of its module.
    """
    matches = [decision.match for decision in decisions]
    used = Counter(prod(entry.shape) for match in matches for entry in match.used)
    filled = Counter(prod(entry.shape) for match in matches for entry in match.filled)
    proved = [pair for d in decisions if FUNCTION in d.witnesses for pair in d.match.pairs]
    modules = {(source.parent, target.parent) for source, target in proved}
    for decision, match in zip(decisions, matches, strict=True):
        witnesses = (
            decision.named,
            all(used[prod(entry.shape)] == 1 for entry in match.used)
            and all(filled[prod(entry.shape)] == 1 for entry in match.filled),
            ROLE in decision.witnesses,
            all((s.parent, t.parent) in modules for s, t in match.pairs),
        )
        if FUNCTION not in decision.witnesses and sum(witnesses) < 2:
            decision.sure = False
            decision.doubt = decision.doubt or "no second witness agrees"


def _find(a: Side, b: Side, keep: Sequence[str], roles: Roles | None) -> _Plan:
    """Pairs the arrays of both sides, if need be with biases added or without some rows."""
    problems: list[TransferError] = []
    for sides in variants(a, b):
        try:
            plan = _pair(a, b, sides, keep, roles)
        except TransferError as error:
            problems.append(error)
            continue
        for decision in plan.decisions:
            decision.sure &= sides.unsure not in [entry.name for entry in decision.match.used]
        return plan
    raise problems[0]


def _pair(
    source: Side, target: Side, sides: Variant, keep: Sequence[str], roles: Roles | None
) -> _Plan:
    a, b = sides.a, sides.b
    sources = [e for e in a.entries.values() if not (e.random or e.tied_to)]
    targets = [e for e in b.entries.values() if not (e.random or e.tied_to or is_kept(e, keep))]
    if not all(any(map(is_counter, side)) for side in (sources, targets)):
        sources, targets = ([e for e in side if not is_counter(e)] for side in (sources, targets))
    decisions = assign(sources, targets, roles)
    filled = {entry.name for decision in decisions for entry in decision.match.filled}
    again = [entry for entry in a.entries.values() if entry.tied_to]  # as the target ties less
    decisions += assign(again, [e for e in targets if e.name not in filled]) if again else []
    filled = {entry.name for decision in decisions for entry in decision.match.filled}
    used = {entry.name for decision in decisions for entry in decision.match.used}
    kept = [name for name, e in b.entries.items() if not e.tied_to and name not in filled]
    missing = [n for n in kept if not (is_free(b.entries[n]) or is_kept(b.entries[n], keep))]
    tied = {entry.name: entry.tied_to for entry in again if entry.name not in used}
    needed = [n for n, e in a.entries.items() if not (n in used or n in tied) and is_needed(e)]
    tied |= ties_of(needed, decisions, a, b)
    needed = [name for name in needed if name not in tied]
    if missing or needed:
        raise no_counterpart(missing, needed, a, b)
    order = {name: at for at, name in enumerate(b.entries)}
    decisions.sort(key=lambda d: order[d.match.filled[0].name])
    dropped = [name for name in a.entries if not (name in used or name in tied)]
    return _Plan(source, target, sides, decisions, kept, tied, dropped)
