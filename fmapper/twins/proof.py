"""The proof by function: with new random weights, both models must give the same outputs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.dtypes import is_inexact
from fmapper.twins.recorded import (
    CLOSE,
    PRODUCTS,
    IncomparableError,
    Model,
    Outputs,
    cast,
    close,
    few_bits,
    floats_in,
    uses,
)
from fmapper.twins.sides import Entry, Side

if TYPE_CHECKING:
    import numpy as np

    from fmapper.backends.compute import Observation


class Trial(NamedTuple):
    """The result of a call of the target with the weights of the source; the first two rank it."""

    agrees: bool  # the outputs are those of the source
    matches: int = 0  # how many operations have results that are some of the source
    place: str = ""  # of the first operation from which on results differ
    weights: frozenset[str] = frozenset()  # of the target, shortly before such operations
    partial: bool = False  # the outputs differ, but only what depends on weights that are kept


class Proof:
    """Both models, the source with new random weights, equal ones for what is tied.

    Weights of the target that are kept have no counterpart: what depends on them is not compared.
    """

    def __init__(
        self,
        source: Model,
        target: Model,
        unused: Iterable[str],
        tied: Mapping[str, str],
        kept: Collection[str],
    ) -> None:
        import numpy as np

        from fmapper.checkpoints.lazy import LazyArray

        entries = source.side.entries
        ties = {name: entry.tied_to for name, entry in entries.items() if entry.tied_to} | {**tied}
        left = {*unused, *ties}
        few = few_bits(source.side, target.side)
        source.double = target.double = bool(few)
        self._kept = {name: target.side.entries[name] for name in kept}
        self.arrays = {
            name: LazyArray.of(random_values(entry, at, few))
            for at, (name, entry) in enumerate(entries.items())
            if is_inexact(entry.dtype) and not (entry.random or name in left)
        }
        self.arrays |= {name: self.arrays[of] for name, of in ties.items() if of in self.arrays}
        first = {name: x for name, x in self.arrays.items() if not entries[name].tied_to}
        self._source, self._target = source, target
        self._model = source.side.fill(first, strict=False)
        self._outputs = source.outputs(self._model)
        if not self._outputs:
            raise IncomparableError(
                "the source returns no floating arrays, so nothing can be compared"
            )
        if not all(np.isfinite(x).all() for x in self._outputs.values()):
            raise IncomparableError(
                "the source gives infinities or NaN with random weights, so nothing can be "
                "compared. Pass other example_inputs=, or rules="
            )
        source.check_draws(self._model, self._outputs)
        self._seen: dict[int, np.ndarray[Any, Any]] = {}  # results by their size, one in a row

    def run(self, arrays: Mapping[str, Any], *, watch: bool = False) -> Trial:
        """Calls the target with weights, and compares every operation, too, if asked to."""
        model = self._fill(arrays)
        outputs = self._target.outputs(model)
        try:
            agrees = self._agree(outputs)
        except IncomparableError:
            if not self._kept:
                raise
            agrees = False
        watch |= bool(self._kept) and not agrees
        return self._compare(model, agrees=agrees) if watch else Trial(agrees)

    def _fill(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the target with arrays, and random ones where one that is kept has no values."""
        from fmapper.checkpoints.lazy import LazyArray

        new = {
            name: LazyArray.of(random_values(entry, at))
            for at, (name, entry) in enumerate(self._kept.items())
            if entry.is_abstract
        }
        return self._target.side.fill({**new, **arrays}, strict=False)

    def _compare(self, model: Any, *, agrees: bool) -> Trial:
        import numpy as np

        if not self._seen:
            results: dict[int, list[Any]] = defaultdict(list)
            for step in _steps(self._source.operations(self._model), self._source.side):
                for elements in step.results:
                    results[elements.size].append(elements)
            self._seen = {size: np.stack(rows) for size, rows in results.items()}
        steps = [*_steps(self._target.operations(model), self._target.side)]
        matches = [all(map(self._is_seen, step.results)) for step in steps]
        recovers = [*matches]  # whether results that depend on one match again
        for at in reversed(range(len(steps))):
            for parent in steps[at].parents:
                recovers[parent] = recovers[parent] or recovers[at]
        depends: list[bool] = []  # on weights that are kept
        for step in steps:
            of = any(depends[parent] for parent in step.parents)
            depends.append(of or not step.weights.isdisjoint(self._kept))
        first = [
            step
            for at, step in enumerate(steps)
            if not (recovers[at] or depends[at])
            and all(recovers[parent] for parent in step.parents)
        ]
        if any(depends) and not agrees:
            compared = [at for at in range(len(steps)) if not depends[at]]
            taken = {name for at in compared for name in steps[at].weights}
            shown = {name for at in compared if recovers[at] for name in steps[at].weights}
            if taken and taken == shown:
                return Trial(True, sum(matches), partial=True)
        weights = frozenset(name for step in first for name in step.weights)
        return Trial(agrees, sum(matches), first[0].place if first else "", weights)

    def check_target(self, arrays: Mapping[str, Any]) -> None:
        """Raises `TransferError` if the target draws random numbers."""
        model = self._fill(arrays)
        self._target.check_draws(model, self._target.outputs(model))

    def _is_seen(self, elements: np.ndarray[Any, Any]) -> bool:
        """Returns whether a result has the elements of one of the source, in any order."""
        import numpy as np

        rows = self._seen.get(elements.size)
        allowed = CLOSE * float(np.sqrt(np.mean(np.square(elements))))
        return rows is not None and bool((np.abs(rows - elements).max(1) <= allowed).any())

    def _agree(self, outputs: Outputs) -> bool:
        """Compares all outputs of the side with fewer, by their places or else in their order."""
        few, many = sorted((self._outputs, outputs), key=len)
        if not Counter(map(_size, few.values())) <= Counter(map(_size, many.values())):
            both = ([x.shape for x in side.values()] for side in (self._outputs, outputs))
            raise IncomparableError(
                "the outputs of both models have other shapes, so they cannot be compared: "
                f"{' and '.join(map(str, both))}. Pass inputs of both as example_inputs= and "
                "target_inputs="
            )
        if few.keys() == many.keys() and all(_size(few[at]) == _size(many[at]) for at in few):
            return bool(few) and all(_alike(few[at], many[at]) for at in few)
        left = defaultdict(list)
        for y in many.values():
            left[_size(y)].append(y)
        rest = {size: iter(arrays) for size, arrays in left.items()}
        return bool(few) and all(any(_alike(x, y) for y in rest[_size(x)]) for x in few.values())


def random_values(entry: Entry, seed: int, dtypes: Collection[str] = ()) -> np.ndarray[Any, Any]:
    """Returns random values that a model can compute with, also where they are variances.

    They are those of dtypes that hold less, too.
    """
    import numpy as np

    generator = np.random.default_rng([0, seed])
    if len(entry.shape) < 2:
        values = generator.uniform(0.5, 1.5, entry.shape)
    else:
        values = generator.normal(0.0, math.prod(entry.shape) ** -0.25, entry.shape)
    return cast(values, (*dtypes, entry.dtype))


def _size(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Returns sizes that are those of images with channels first and last, and of one alone."""
    return tuple(sorted(n for n in array.shape if n != 1))


def _alike(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> bool:
    """Returns whether two arrays are the same, or are with their channels first and last."""
    x, y = (x, y) if x.ndim == y.ndim else (x.squeeze(), y.squeeze())  # one without a batch
    if close(x, y) or x.ndim < 3:
        return close(x, y)
    last = x.transpose(0, *range(2, x.ndim), 1)
    first = x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1))
    return close(last, y) or close(first, y)


class _Step(NamedTuple):
    place: str
    results: list[np.ndarray[Any, Any]]  # sorted elements, of those that have several finite ones
    parents: frozenset[int]  # the numbers of the steps whose results it takes
    weights: frozenset[str]  # that it depends on from the last but one product with one


def _steps(seen: Iterable[Observation], side: Side) -> Iterator[_Step]:
    import numpy as np

    empty: frozenset[Any] = frozenset()
    # for each result: the steps, the weights from the last product on, and those before
    data: dict[str, tuple[frozenset[int], frozenset[str], frozenset[str]]] = {}
    count = 0
    for use in uses(seen, side):
        mine = frozenset(name.partition("#")[0] for of in use.weights for name in of)
        given = [data[operand] for operand in use.data] or [(empty, empty, empty)]
        parents, last, before = (frozenset().union(*sets) for sets in zip(*given, strict=True))
        last, before = (mine, last) if mine and use.kind in PRODUCTS else (last | mine, before)
        arrays = (x for of in use.seen.values for x in floats_in(of).values() if use.data)
        arrays = (x for x in arrays if x.size > 1 and np.isfinite(x).all() and x.any())
        results = [np.sort(x, None) for x in arrays]
        if results:
            where = f"{use.seen.module}: " if use.seen.module else ""
            line = f" ({use.seen.source})" if use.seen.source else ""
            yield _Step(f"{where}{use.seen.op}{line}", results, parents, last | before)
            parents, count = frozenset([count]), count + 1
        data[use.name] = (parents, last, before)
