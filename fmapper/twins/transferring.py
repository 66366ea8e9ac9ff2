"""`transfer`: puts the weights of one model into another that was written by somebody else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isroutine
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from fmapper.backends.dtypes import is_inexact
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import CheckpointError, TransferError
from fmapper.progress import step
from fmapper.tracebacks import short_traceback
from fmapper.twins.assign import assign
from fmapper.twins.matches import FUNCTION, ROLE, Decision
from fmapper.twins.one_sided import (
    has_nan,
    is_counter,
    is_kept,
    is_needed,
    ties_of,
    with_added_biases,
    with_one_bias,
    with_rows_cut,
    zeros,
)
from fmapper.twins.proof import IncomparableError, Inputs, Proof
from fmapper.twins.report import (
    TransferredArrays,
    TransferReport,
    ambiguous,
    describe,
    no_counterpart,
    some,
)
from fmapper.twins.sides import Entry, Side, framework_of, read_side
from fmapper.twins.writing import rules_of

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rule import Rule
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.twins.roles import Roles

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
        arrays = report.rules.apply(_lazy(a) if a.stored is None else a.stored)
        filled = b.fill(zeros(b, keep) | _weights_for(arrays, a, b), strict=not report.kept)
    if rules is None:
        _check_values(filled, a)
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
        if rules is not None:
            return a, b, _by_rules(a, b, rules, keep)
        known = _by_library(a, b, keep)
        if known is not None:
            return a, b, known
        given = example_inputs, example_kwargs, target_inputs, target_kwargs
        report = _search(a, b, keep, _inputs(*given))
        return a, b, report if a.rules is None else replace(report, rules=a.rules + report.rules)


def _check_values(filled: Any, a: Side) -> None:
    """Refuses weights that are not numbers.

    Raises:
        TransferError: Names the first, of the source if that has it as it is.
    """
    names = [n for n, e in read_side(filled, "target").entries.items() if has_nan(e)]
    if names:
        first = next((f"{n}: the source" for n, e in a.entries.items() if has_nan(e)), names[0])
        raise TransferError(
            f"{first} has NaN there, as after a training that diverged. Pass "
            "rules= to copy it all the same, those of a report for other weights"
        )


def _lazy(side: Side) -> dict[str, Any]:
    """Returns the arrays of a source; one under several names is one object."""
    first: dict[str, LazyArray] = {}
    for name, entry in side.entries.items():
        if entry.is_abstract:
            raise TransferError(f"{name}: the source has no values there, only a shape")
        first[name] = first[entry.tied_to] if entry.tied_to else entry.lazy()
    return first


def _weights_for(arrays: Mapping[str, Any], a: Side, b: Side) -> dict[str, Any]:
    """Leaves out what is not a weight, such as the states of random generators.

    Raises:
        TransferError: There are weights that the target has no place for.
    """
    left = [name for name in arrays if name not in b.entries]
    known = {name for name in left if name in a.entries and not is_needed(a.entries[name])}
    if {*left} - known:
        raise TransferError(
            f"the target has no {some([n for n in left if n not in known])}. Rename or drop them "
            "with rules="
        )
    return {name: array for name, array in arrays.items() if name not in known}


def _by_rules(a: Side, b: Side, rules: Rules, keep: Sequence[str]) -> TransferReport:
    outline = {name: entry.lazy() for name, entry in a.entries.items()}
    made = rules.apply(outline)
    first = {entry.tied_to or name for name, entry in b.entries.items() if name in made}
    missing = [n for n, e in b.entries.items() if (e.tied_to or n) not in first]
    kept, lacking = _split_kept([b.entries[name] for name in missing], keep)
    if lacking:
        raise TransferError(
            f"the rules give nothing for {some(lacking)}. Add rules for them, or list the names "
            "in keep="
        )
    arrays = tuple(
        TransferredArrays((), (name,), "", ("rules",), True, 1)
        for name in made
        if name in b.entries
    )
    return TransferReport(rules, arrays, (), tuple(kept))


def _by_library(a: Side, b: Side, keep: Sequence[str]) -> TransferReport | None:
    """Plans the transfer of arrays by rules of the library of the target, if they all fit."""
    from fmapper.checkpoints.rules.naming import Drop

    adapter = framework_of(b.tree) if b.callable and not a.callable else None
    if adapter is None:
        return None
    outline = {name: entry.lazy() for name, entry in a.entries.items()}
    try:
        rules = adapter.own_rules(b.tree, outline)
        if rules is None:
            return None
        made = rules.apply(outline)
        kept = [rule for rule in rules if not isinstance(rule, Drop) or rule.tied_to]
        report = _by_rules(a, b, rules, keep)
    except (CheckpointError, TransferError):
        return None
    shapes = {name: entry.shape for name, entry in b.entries.items()}
    fits = all(tuple(array.shape) == shapes.get(name) for name, array in made.items())
    left = {*type(rules)(kept).apply(outline)} - {*b.entries}
    return report if fits and not left else None


def _split_kept(entries: Iterable[Entry], keep: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates what stays as it is in the target from what must be filled."""
    kept: list[str] = []
    lacking: list[str] = []
    for entry in entries:
        free = entry.random or is_counter(entry) or (entry.transient and not entry.is_abstract)
        (kept if free or is_kept(entry, keep) else lacking).append(entry.name)
    return kept, lacking


def _inputs(
    args: Any, kwargs: Mapping[str, Any] | None, target_args: Any, target_kwargs: Any
) -> Inputs | None:
    if args is None and kwargs is None:
        return None
    target_args = args if target_args is None else target_args
    target_kwargs = kwargs if target_kwargs is None else target_kwargs
    return Inputs(_tuple(args), kwargs or {}, _tuple(target_args), target_kwargs or {})


def _tuple(args: Any) -> tuple[Any, ...]:
    if args is None:
        return ()
    return tuple(args) if isinstance(args, tuple | list) else (args,)


@dataclass
class _Plan:
    """The pairs of a transfer, and the arrays of one side alone.

    Attributes:
        decisions: The pairs, and their layouts.
        kept: Names of the target that stay as they are.
        tied: Second names of arrays of the source -> the first, which is used.
        dropped: Names of the source that nothing takes.
        ties: Second names of arrays of the target -> the first.
        first: Rules before those of the decisions.
        last: Rules after them.
    """

    decisions: list[Decision]
    kept: list[str]
    tied: dict[str, str]
    dropped: list[str]
    ties: dict[str, str]
    first: Iterable[Rule] = ()
    last: Iterable[Rule] = ()

    def apply(
        self, decisions: Sequence[Decision], arrays: Mapping[str, LazyArray]
    ) -> tuple[Rules, dict[str, Any]]:
        """Returns the rules for decisions but the last, and what they make of a source's arrays.

        Raises:
            TransferError: They do not give what the target has.
        """
        from fmapper.checkpoints.rules.rules import Rules

        wanted = {entry.name: entry.shape for d in decisions for entry in d.match.filled}
        wanted |= {name: wanted[first] for name, first in self.ties.items()}
        problem: Exception | None = None
        for prefix in ("", "source."):
            own = rules_of(decisions, self.tied, self.dropped, self.ties, prefix)
            rules = Rules([*self.first, *own])
            try:
                made = rules.apply(arrays)
            except CheckpointError as error:  # a name of the target is one of the source, too
                problem = error
                continue
            if {name: tuple(array.shape) for name, array in made.items()} == wanted:
                return rules, made
        raise TransferError(f"the rules that were found do not fit both sides: {problem}")


def _search(a: Side, b: Side, keep: Sequence[str], inputs: Inputs | None) -> TransferReport:
    from fmapper.checkpoints.rules.rules import Rules

    given, roles = inputs, None
    if a.callable and b.callable:
        with step("recording what uses the arrays of both models"):
            given, roles = _roles(a, b, inputs)
    plan, proved = _find(a, b, keep, roles), False
    if given is not None:
        with step("comparing what both models compute"):
            proved = _prove(plan, a, b, given, roles, guessed=inputs is None)
    outline = {name: entry.lazy() for name, entry in a.entries.items()}
    rules = Rules([*plan.apply(plan.decisions, outline)[0], *plan.last])
    if a.callable and b.callable and not _is_same_class(a, b):
        _doubt_single_witnesses(plan.decisions)
    unsure = [decision for decision in plan.decisions if not decision.settled]
    if unsure:
        raise ambiguous(unsure, plan.decisions)
    arrays = tuple(map(describe, plan.decisions))
    return TransferReport(rules, arrays, tuple(plan.dropped), tuple(plan.kept), proved)


def _roles(a: Side, b: Side, inputs: Inputs | None) -> tuple[Inputs | None, Roles | None]:
    """Returns the roles of the arrays, and the inputs with which both models were recorded."""
    from fmapper.twins.guesses import guesses
    from fmapper.twins.roles import roles_of

    for given in guesses(a, b) if inputs is None else [inputs]:
        roles = roles_of(a, b, given)
        if roles is not None:
            return given, roles
    return inputs, None


def _prove(
    plan: _Plan, a: Side, b: Side, inputs: Inputs, roles: Roles | None, *, guessed: bool
) -> bool:
    """Compares both models with new random weights, and changes decisions until they agree.

    Returns:
        Whether they agree; False as well if they cannot be compared on inputs that are guessed.

    Raises:
        TransferError: They differ, or cannot be compared on inputs that were given.
    """
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.twins.search import Search

    before = [replace(decision) for decision in plan.decisions]
    unused = {*plan.dropped, *plan.tied}
    needed = [
        entry
        for name, entry in a.entries.items()
        if name not in unused and is_inexact(entry.dtype) and not (entry.tied_to or entry.random)
    ]
    outline = {name: entry.lazy() for name, entry in a.entries.items()}
    proof = Proof(a, b, inputs, Rules(plan.last))

    def make(chosen: Sequence[Decision]) -> dict[str, Any]:
        given = outline | {n: LazyArray.of(array) for n, array in proof.arrays.items()}
        return plan.apply(chosen, given)[1]

    try:
        proof.prepare(needed, plan.tied)
        problem = Search(proof, plan.decisions, make, roles).run()
    except IncomparableError:  # models that take something else
        if not guessed:
            raise
        plan.decisions[:] = before
        return False
    if problem and guessed:
        problem += ". They were called with inputs that fit their shapes: if they take others, "
        problem += "pass example_inputs="
    if problem:
        raise TransferError(problem)
    return True


def _is_same_class(a: Side, b: Side) -> bool:
    first, second = (x.tree[0] if isinstance(x.tree, tuple) else x.tree for x in (a, b))
    same = first is second or (type(first) is type(second) and not isroutine(first))
    names = {*a.entries}, {*b.entries}
    return same and (names[0] <= names[1] or names[0] >= names[1])


def _doubt_single_witnesses(decisions: Sequence[Decision]) -> None:
    """Makes decisions unsure on which one witness alone agrees, be that names, role or shapes.

    Shapes are a witness where no other array has them. What the outputs do not depend on, such as
    the bias of keys, goes with the rest of its module.
    """
    sizes = [tuple(prod(entry.shape) for entry in d.match.filled) for d in decisions]
    proved = [pair for d in decisions if FUNCTION in d.witnesses for pair in d.pairs]
    modules = {(source.parent, target.parent) for source, target in proved}
    for decision, size in zip(decisions, sizes, strict=True):
        witnesses = (
            decision.named,
            sizes.count(size) == 1,
            ROLE in decision.witnesses,
            all((source.parent, target.parent) in modules for source, target in decision.pairs),
        )
        if FUNCTION not in decision.witnesses and sum(witnesses) < 2:
            decision.sure = False


def _find(a: Side, b: Side, keep: Sequence[str], roles: Roles | None) -> _Plan:
    """Pairs the arrays of both sides, if need be with biases added or without some rows."""
    try:
        return _pair(a, b, keep, roles)
    except TransferError as error:
        problem = error
    added, one, cut = with_added_biases(a), with_one_bias(b), with_rows_cut(a, b)
    if added is not None:
        return replace(_pair(added[0], b, keep, roles), first=added[1])
    if one is not None:
        return replace(_pair(a, one[0], keep, roles), last=one[1])
    if cut is None:
        raise problem
    plan = replace(_pair(cut[0], b, keep, roles), first=cut[1])
    for decision in plan.decisions:  # only outputs say which rows are unused
        decision.sure &= cut[2] not in [entry.name for entry in decision.match.used]
    return plan


def _pair(a: Side, b: Side, keep: Sequence[str], roles: Roles | None) -> _Plan:
    """Pairs the arrays of both sides, without looking at values."""
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
    left = [e for e in b.entries.values() if not e.tied_to and e.name not in filled]
    kept, missing = _split_kept(left, keep)
    tied = {entry.name: entry.tied_to for entry in again if entry.name not in used}
    needed = [n for n, e in a.entries.items() if not (n in used or n in tied) and is_needed(e)]
    tied |= ties_of(needed, decisions, a, b)
    needed = [name for name in needed if name not in tied]
    if missing or needed:
        raise no_counterpart(missing, needed, a, b)
    order = {name: at for at, name in enumerate(b.entries)}
    decisions.sort(key=lambda d: order[d.match.filled[0].name])
    dropped = [name for name in a.entries if not (name in used or name in tied)]
    ties = {n: e.tied_to for n, e in b.entries.items() if e.tied_to in filled}
    return _Plan(decisions, kept, tied, dropped, ties)
