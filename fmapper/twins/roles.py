"""The witness of role: which operation uses a parameter, and between which others it stands.

Both models are recorded without computing anything. Of each program remains the graph of the
places where it uses parameters: `attention.query` is a product, after the scale of a norm, and the
result reaches `attention.out` through an exponential. Two places are paired where they are the only
ones like that beside a pair; so pairs spread from the inputs through the models.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from fmapper.twins.matches import Match
from fmapper.twins.proof import KINDS, Inputs, Names, is_product, plain, repeats
from fmapper.twins.sides import Side, framework_of

if TYPE_CHECKING:
    from fmapper.backends.compute import Observation

# Norms as one operation: what they do with the weights that they take, by how many these are.
_NORMS: dict[int, tuple[str, ...]] = {1: ("factor",), 2: ("factor", "term"), 4: ()}
_WITH_STATISTICS = ("term", "factor", "term")
# Operations that are not linear, as between `gate` and what it is multiplied by.
_CURVES = (
    "exp exp2 tanh logistic sigmoid erf erfc gelu silu softmax _softmax log_softmax _log_softmax "
    "relu max maximum clamp clamp_min clamp_max elu leaky_relu hardtanh hardswish hardsigmoid mish "
    "softplus custom_jvp_call sin cos"
)
_BENT = frozenset(_CURVES.split())
_ROOTS = frozenset(["rsqrt", "sqrt"])
_DEPTH = 3  # how far around a place others are looked at

Weights = dict[str, bool]  # the names of parameters, and whether their root is taken


@dataclass(eq=False)
class _Place:
    """An operation on data that takes parameters.

    Attributes:
        kind: What it does with them.
        weights: The parameters.
        before: The places whose results reach it, and whether that is through a bent function.
        after: The places that its result reaches.
    """

    kind: str
    weights: Weights
    before: dict[_Place, bool]
    after: dict[_Place, bool] = field(default_factory=dict)


class Roles:
    """Which parameters of two models have the same role, as far as their programs tell.

    Args:
        source: The places of the source.
        target: The places of the target.
        sizes: Of each side, the numbers of elements of its parameters.
    """

    def __init__(
        self,
        source: list[_Place],
        target: list[_Place],
        sizes: tuple[Mapping[str, int], Mapping[str, int]],
    ) -> None:
        self._twins: dict[str, set[str]] = defaultdict(set)
        self._sources: dict[str, set[str]] = defaultdict(set)
        self._parts: dict[str, frozenset[str]] = {}  # of a parameter, those of the other side
        twins = _pairs(source, target, sizes)
        for whole, parts in _wholes(twins, sizes):
            if all(len(place.weights) == 1 for place in (whole, *parts)):
                names = frozenset(name for place in parts for name in place.weights)
                self._parts[next(iter(whole.weights))] = names
        for a, b in twins.items():
            for root in (True, False):
                mine = [name for name, of in a.weights.items() if of is root]
                theirs = [name for name, of in b.weights.items() if of is root]
                if len(mine) == len(theirs) == 1:
                    self._twins[mine[0]].add(theirs[0])
                    self._sources[theirs[0]].add(mine[0])

    def agree(self, match: Match) -> bool | None:
        """Returns whether parameters have the same roles; None where that is not known."""
        found: set[bool | None] = set()
        if len(match.many) > 1:
            for parts, entry in match.rows():
                known = self._parts.get(entry.name)
                names = {part.name for group in parts for part in group}
                found.add(None if known is None else known == names)
            return False if False in found else None if None in found else True
        for parts, entry in match.rows():
            rows = [entry.name] if not match.over else row_names(entry.name, len(parts[0]))
            for part, row in zip(parts[0], rows, strict=True):
                a, b = (row, part.name) if match.back else (part.name, row)
                found.add(self._agree(a, b))
        return False if False in found else None if None in found else True

    def is_part(self, name: str, whole: str) -> bool:
        """Returns whether a parameter is a part of one of the other side."""
        return name in self._parts.get(whole, ())

    def _agree(self, a: str, b: str) -> bool | None:
        if a in self._twins or b in self._sources:  # several where one side alone is tied
            return b in self._twins.get(a, ())
        return None


def row_names(name: str, count: int) -> list[str]:
    """Returns the names of the rows of parameters that are stacked."""
    return [f"{name}#{row}" for row in range(count)]


def roles_of(a: Side, b: Side, given: Inputs) -> Roles | None:
    """Returns the roles in two models that are called with inputs.

    None where one of them cannot be recorded, or takes something else.

    Args:
        a: The source.
        b: The target.
        given: The inputs.
    """
    mine = places_of(a, given.args, given.kwargs)
    theirs = places_of(b, given.target_args, given.target_kwargs) if mine else []
    if not mine or not theirs:
        return None
    return Roles(mine, theirs, (_sizes(a, mine), _sizes(b, theirs)))


def _sizes(side: Side, places: list[_Place]) -> dict[str, int]:
    """Returns the number of elements of each parameter, or of a row of those that are stacked."""
    names = {name for place in places for name in place.weights}
    rows = Counter(name.partition("#")[0] for name in names)
    sizes = {name: prod(entry.shape) for name, entry in side.entries.items()}
    return {n: sizes[whole] // rows[whole] for n in names if (whole := n.partition("#")[0])}


def places_of(side: Side, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[_Place]:
    """Returns the places where a model uses its parameters, in order, after its inputs and outputs.

    Empty where it cannot be recorded, or takes something else.
    """
    import numpy as np

    from fmapper.checkpoints.lazy import LazyArray
    from fmapper.files.dtypes import numpy_dtype
    from fmapper.verification.models.owners import inputs_for

    def record(model: Any) -> list[Observation]:
        adapter = framework_of(model)
        if adapter is None:
            return []
        given = inputs_for(adapter, args, kwargs)
        try:
            return [*(adapter.outline(model, *given) or ())]
        except Exception:  # whatever the model's own code raises for inputs that it does not take
            return []

    seen = record(side.tree)
    if not seen and any(entry.is_abstract for entry in side.entries.values()):
        zeros = {
            name: LazyArray.of(np.zeros(entry.shape, numpy_dtype(entry.dtype)))
            for name, entry in side.entries.items()
            if not (entry.tied_to or entry.random)
        }
        seen = record(side.fill(zeros, strict=False))
    return _places(seen, Names(side)) if seen else []


def _places(seen: Iterable[Observation], names: Names) -> list[_Place]:
    inputs = _Place("inputs", {}, {})
    places = [inputs]
    weights: dict[str, Weights] = {}  # of results of parameters alone
    fronts: dict[str, dict[_Place, bool]] = {}  # of results that depend on the inputs
    repeated: set[str] = set()  # results of parameters alone that are there for each row
    for one in seen:
        op = plain(one.op)
        if one.op == "weight":
            name = names.find(one.module)
            if name:
                weights[one.name] = {name: False}
            continue
        if one.op == "input":
            fronts[one.name] = {inputs: False}
            continue
        own = [weights[name] for name in one.operands if name in weights]
        data = [name for name in one.operands if name in fronts]
        if not data and repeats(one, repeated):
            repeated.add(one.name)
        if not data and is_product(op):  # of queries that are learned
            data = [name for name in one.operands if name in repeated]
            own = [weights[n] for n in one.operands if n in weights and n not in repeated]
            fronts |= {name: {inputs: False} for name in data}
        if not data:
            if own:
                rooted = op in _ROOTS
                weights[one.name] = {n: r or rooted for given in own for n, r in given.items()}
            continue
        found: dict[_Place, bool] = {}
        for at, name in enumerate(data):
            for place, bent in fronts[name].items():
                found[place] = found.get(place, False) or bent or _bends(op, at)
        if op in _ROOTS:  # a norm by its own deviation bends nothing
            found = dict.fromkeys(found, False)
        for kind, given in _uses(op, own, first=one.operands[0] in data):
            last = next(iter(found))
            if len(found) == 1 and _is_scale_of(last, kind, given):
                last.weights |= given
                continue
            place = _Place(kind, {**given}, found)
            for other, bent in found.items():
                other.after[place] = bent
            places.append(place)
            found = {place: False}
        fronts[one.name] = found
    outputs = _Place("outputs", {}, {place: False for place in places if not place.after})
    for place in outputs.before:
        place.after[outputs] = False
    return [inputs, outputs, *places[1:]]


def _is_scale_of(last: _Place, kind: str, given: Weights) -> bool:
    """Returns whether parameters scale what was divided by a deviation, or the reverse.

    Both are one factor in models that multiply them first.
    """
    roots = {*last.weights.values(), *given.values()}
    return (
        kind == last.kind == "factor"
        and not last.after
        and len(roots) == 2
        and (len({*last.weights.values()}) == len({*given.values()}) == 1)
    )


def _bends(op: str, at: int) -> bool:
    return op in _BENT or ("scaled_dot_product" in op and at < 2)


def _uses(op: str, own: list[Weights], *, first: bool) -> Iterator[tuple[str, Weights]]:
    """Yields what an operation does with parameters, in the order in which others do."""
    if "norm" in op and len(own) in _NORMS:
        kinds = _NORMS[len(own)]
        if len(own) == 4:  # with statistics
            scale, bias, mean, var = own
            own, kinds = [mean, {**scale, **dict.fromkeys(var, True)}, bias], _WITH_STATISTICS
        elif len(own) == 2 and "batch" in op:
            own, kinds = [own[0], dict.fromkeys(own[1], True)], _WITH_STATISTICS[:2]
        yield from zip(kinds, own, strict=True)
        return
    kind = KINDS.get(op, op)
    if kind in ("product", "convolution") and own:
        own = own if first else own[::-1]
        yield kind, own[0]
        own, kind = own[1:], "term"
    for given in own:
        yield kind, given


# --- pairs ----------------------------------------------------------------------------------------


def _pairs(
    a: list[_Place], b: list[_Place], sizes: tuple[Mapping[str, int], Mapping[str, int]]
) -> dict[_Place, _Place]:
    """Returns the places of two programs that are the only ones like that beside another pair."""
    looks = [_looks(a, sizes[0]), _looks(b, sizes[1])]
    twins = {a[0]: b[0], a[1]: b[1]}
    taken = {*b[:2]}
    depth = _DEPTH
    while depth >= 0:
        queue = [*twins.items()]
        before = len(twins)
        while queue and (depth == _DEPTH or len(twins) == before):
            mine, theirs = queue.pop()
            for own, other in ((mine.after, theirs.after), (mine.before, theirs.before)):
                free = [place for place in own if place not in twins]
                left = [place for place in other if place not in taken]
                keys = {p: (own[p], looks[0][depth][p]) for p in free}
                others = {p: (other[p], looks[1][depth][p]) for p in left}
                counts, theirs_too = Counter(keys.values()), Counter(others.values())
                by_key = {key: place for place, key in others.items()}
                for place, key in keys.items():
                    if counts[key] == theirs_too[key] == 1:
                        twins[place] = by_key[key]
                        taken.add(by_key[key])
                        queue.append((place, by_key[key]))
        depth = _DEPTH if len(twins) > before else depth - 1
    return twins


def _wholes(
    twins: Mapping[_Place, _Place], sizes: tuple[Mapping[str, int], Mapping[str, int]]
) -> Iterator[tuple[_Place, list[_Place]]]:
    """Yields the places beside a pair that stand for several of the other program."""
    taken = {*twins.values()}
    for a, b in twins.items():
        free = [place for place in a.after if place not in twins]
        left = [place for place in b.after if place not in taken]
        for whole, parts, own, others in ((free, left, *sizes), (left, free, *sizes[::-1])):
            kinds = {place.kind for place in (*whole, *parts)}
            if len(whole) == 1 < len(parts) and len(kinds) == 1:
                total = sum(others[name] for place in parts for name in place.weights)
                if sum(own[name] for name in whole[0].weights) == total:
                    yield whole[0], parts
                    biases = [p for part in parts for p in part.after if p.kind == "term"]
                    of_whole = [p for p in whole[0].after if p.kind == "term"]
                    if len(of_whole) == 1 and len(biases) == len(parts):
                        yield of_whole[0], biases


def _looks(places: list[_Place], sizes: Mapping[str, int]) -> list[dict[_Place, int]]:
    """Returns numbers that say what is around each place, up to each distance."""
    found = [
        {
            place: hash((
                place.kind,
                tuple(sorted((sizes[name], root) for name, root in place.weights.items())),
            ))
            for place in places
        }
    ]  # fmt: skip
    for _ in range(_DEPTH):
        last = found[-1]
        found.append({
            place: hash((
                last[place],
                tuple(sorted((bent, last[other]) for other, bent in place.before.items())),
                tuple(sorted((bent, last[other]) for other, bent in place.after.items())),
            ))
            for place in places
        })  # fmt: skip
    return found
