"""The witness of role: which operation uses a parameter, and between which others it stands.

Both models are recorded without computing anything. Of each program remains the graph of the
places where it uses parameters: `attention.query` is a product, after the scale of a norm, and the
result reaches `attention.out` through an exponential. Two places are paired where they are the only
ones like that beside a pair; so pairs spread from the inputs through the models.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from fmapper.twins.matches import Match
from fmapper.twins.recorded import PRODUCTS, ROOTS, Model, Use, Weights, uses

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
_DEPTH = 3  # how far around a place others are looked at


@dataclass(eq=False)
class _Place:
    """An operation on data that takes parameters."""

    kind: str  # what it does with them
    weights: Weights
    before: dict[
        _Place, bool
    ]  # whose results reach it, and whether that is through a bent function
    after: dict[_Place, bool] = field(default_factory=dict)
    sizes: list[tuple[int, bool]] = field(default_factory=list)  # of the parameters, with roots


class Roles:
    """Which parameters of two models have the same role, as far as their programs tell."""

    def __init__(
        self, source: list[_Place], target: list[_Place], kept: Container[str] = ()
    ) -> None:
        self._twins: dict[str, set[str]] = defaultdict(set)
        self._sources: dict[str, set[str]] = defaultdict(set)
        self.parts: dict[str, set[str]] = {}  # of a parameter, those of the other side
        alone = [place for place in target if any(name in kept for name in place.weights)]
        twins = _pairs(source, target, alone)
        for whole, parts in _wholes(twins):
            names = [name for place in (whole, *parts) for name in place.weights]
            if len(names) == 1 + len(parts):
                self.parts[names[0]] = {*names[1:]}
        for a, b in twins.items():
            for root in (True, False):
                mine = [name for name, of in a.weights.items() if of is root]
                theirs = [name for name, of in b.weights.items() if of is root]
                if len(mine) == len(theirs) == 1:
                    self._twins[mine[0]].add(theirs[0])
                    self._sources[theirs[0]].add(mine[0])

    def agree(self, match: Match) -> bool | None:
        """Returns whether parameters have the same roles; None where that is not known."""
        answers: set[bool | None] = set()
        for parts, entry in match.rows():
            if len(match.many) > 1:
                names = {part.name for group in parts for part in group}
                answers.add(self.parts[entry.name] == names if entry.name in self.parts else None)
                continue
            for row, part in enumerate(parts[0]):
                name = f"{entry.name}#{row}" if match.over else entry.name
                a, b = (name, part.name) if match.back else (part.name, name)
                has_role = a in self._twins or b in self._sources
                # several where one side alone is tied
                answers.add(b in self._twins.get(a, ()) if has_role else None)
        return False if False in answers else None if None in answers else True


def roles_of(source: Model, target: Model, kept: Container[str]) -> Roles | None:
    """Returns the roles in two models; None where one of them cannot be recorded.

    Weights of the target that are kept have none.
    """
    mine = [*uses(source.outline(), source.side)]
    theirs = [*uses(target.outline(), target.side)] if mine else []
    given = _contents(source, mine), _contents(target, theirs)
    if len({*given[0]}) < len(given[0]) or sorted(given[0]) != sorted(given[1]):
        given = ([], [])
    a, b = _places(source, mine, given[0]), _places(target, theirs, given[1])
    return Roles(a, b, kept) if a and b else None


def _contents(model: Model, seen: Sequence[Use]) -> list[bytes]:
    """Returns the sorted elements of each input; none where their order may be another."""
    import numpy as np

    from fmapper.backends.discovery import adapter_of
    from fmapper.verification.arrays import to_host

    count = sum(use.seen.op == "input" for use in seen)
    if model.kwargs or len(model.args) != count or None in map(adapter_of, model.args):
        return []
    return [np.sort(to_host(x).astype(complex), None).tobytes() for x in model.args]


def _places(model: Model, seen: Sequence[Use], contents: Sequence[bytes]) -> list[_Place]:
    """Returns where a model uses its parameters, after its ends; empty if unknown.

    Those are the outputs, and the inputs as one, or each where their contents are given.
    """
    inputs = {key: _Place("inputs", {}, {}) for key in (b"", *sorted(contents))}
    order = iter(contents)
    places: list[_Place] = []
    fronts: dict[str, dict[_Place, bool]] = {}  # of results that depend on the inputs
    for use in seen:
        reached: dict[_Place, bool] = {}
        for at, name in enumerate(use.data):
            for place, bent in fronts[name].items():
                reached[place] = reached.get(place, False) or bent or _bends(use.op, at)
        if use.op in ROOTS:  # a norm by its own deviation bends nothing
            reached = dict.fromkeys(reached, False)
        for kind, given in _roles_in(use) if use.data else ():
            last = next(iter(reached))
            if len(reached) == 1 and _is_scale_of(last, kind, given):
                last.weights |= given
                continue
            place = _Place(kind, {**given}, reached)
            for other, bent in reached.items():
                other.after[place] = bent
            places.append(place)
            reached = {place: False}
        key = next(order, b"") if use.seen.op == "input" else b""
        fronts[use.name] = reached or {inputs[key]: False}
    ends = [place for place in (*places, inputs[b""]) if not place.after]
    outputs = _Place("outputs", {}, dict.fromkeys(ends, False))
    for place in outputs.before:
        place.after[outputs] = False
    rows = Counter(n.partition("#")[0] for n in {n for p in places for n in p.weights})
    for place in places:
        for name, root in place.weights.items():
            whole = name.partition("#")[0]  # of those that are stacked, a row
            size = prod(model.side.entries[whole].shape) // rows[whole]
            place.sizes.append((size, root))
    return [*inputs.values(), outputs, *places] if fronts else []


def _is_scale_of(last: _Place, kind: str, given: Weights) -> bool:
    """Returns whether parameters scale what a deviation divides, one factor in other models."""
    roots = {*last.weights.values(), *given.values()}
    return (
        kind == last.kind == "factor"
        and not last.after
        and len(roots) == 2
        and (len({*last.weights.values()}) == len({*given.values()}) == 1)
    )


def _bends(op: str, at: int) -> bool:
    return op in _BENT or ("scaled_dot_product" in op and at < 2)


def _roles_in(use: Use) -> Iterator[tuple[str, Weights]]:
    """Yields what an operation does with parameters, in the order in which others do."""
    given, kind = use.weights, use.kind
    if "norm" in use.op and len(given) in _NORMS:
        kinds = _NORMS[len(given)]
        if len(given) == 4:  # with statistics
            scale, bias, mean, var = given
            given, kinds = [mean, {**scale, **dict.fromkeys(var, True)}, bias], _WITH_STATISTICS
        elif len(given) == 2 and "batch" in use.op:
            given, kinds = [given[0], dict.fromkeys(given[1], True)], _WITH_STATISTICS[:2]
        yield from zip(kinds, given, strict=True)
        return
    if kind in PRODUCTS and given:
        given = given if use.seen.operands[0] in use.data else given[::-1]
        yield kind, given[0]
        given, kind = given[1:], "term"
    for weights in given:
        yield kind, weights


def _pairs(a: list[_Place], b: list[_Place], alone: list[_Place]) -> dict[_Place, _Place]:
    """Returns the places of two programs that are the only ones like that beside another pair.

    Where some of the second are without a twin, the outputs are not a pair to begin with.
    """
    looks = _looks(a), _looks(b)
    ends = ("inputs",) if alone else ("inputs", "outputs")
    twins = {x: y for x, y in zip(a, b, strict=False) if x.kind in ends}
    taken = {*twins.values(), *alone}
    depth = _DEPTH
    while depth >= 0:
        queue = [*twins.items()]
        before = len(twins)
        while queue and (depth == _DEPTH or len(twins) == before):
            mine, theirs = queue.pop()
            for ours, other in ((mine.after, theirs.after), (mine.before, theirs.before)):
                free = [place for place in ours if place not in twins]
                left = [place for place in other if place not in taken]
                keys = {p: (ours[p], looks[0][depth][p]) for p in free}
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


def _wholes(twins: Mapping[_Place, _Place]) -> Iterator[tuple[_Place, list[_Place]]]:
    """Yields the places beside a pair that stand for several of the other program."""
    taken = {*twins.values()}
    for a, b in twins.items():
        free = [place for place in a.after if place not in twins]
        left = [place for place in b.after if place not in taken]
        for wholes, parts in ((free, left), (left, free)):
            sizes = [sum(n for p in places for n, _ in p.sizes) for places in (wholes, parts)]
            alike = len({place.kind for place in (*wholes, *parts)}) == 1
            if len(wholes) == 1 < len(parts) and alike and sizes[0] == sizes[1]:
                yield wholes[0], parts
                biases = [p for part in parts for p in part.after if p.kind == "term"]
                of_whole = [p for p in wholes[0].after if p.kind == "term"]
                if len(of_whole) == 1 and len(biases) == len(parts):
                    yield of_whole[0], biases


def _looks(places: list[_Place]) -> list[dict[_Place, int]]:
    """Returns numbers that say what is around each place, up to each distance."""
    looks = [{p: hash((p.kind, tuple(sorted(p.sizes)))) for p in places}]
    for _ in range(_DEPTH):
        last = looks[-1]
        looks.append({
            place: hash((
                last[place],
                tuple(sorted((bent, last[other]) for other, bent in place.before.items())),
                tuple(sorted((bent, last[other]) for other, bent in place.after.items())),
            ))
            for place in places
        })  # fmt: skip
    return looks
