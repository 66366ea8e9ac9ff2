"""The proof by function: with new random weights, both models must give the same outputs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fmapper.errors import TransferError
from fmapper.twins.sides import Entry, Side, framework_of

if TYPE_CHECKING:
    import numpy as np

    from fmapper.backends.compute import Observation
    from fmapper.checkpoints.lazy import LazyArray
    from fmapper.checkpoints.rules.rules import Rules

Path: TypeAlias = tuple[Any, ...]


class IncomparableError(TransferError):
    """Both models cannot be compared on these inputs."""


_DRAWS = re.compile("rand|bernoulli|normal|dropout|threefry|multinomial|poisson|exponential")
_CLOSE = 2e-4  # of the root mean square of an array, for rounding in two frameworks


_OPERATIONS = {
    "product": "mm addmm bmm baddbmm matmul linear dot_general mv dot addmv",
    "convolution": "convolution _convolution conv_general_dilated",
    "lookup": "embedding gather index index_select take",
    "factor": "mul div",
    "term": "add sub",
    "part": "cat concatenate",
}
_REPEATS = ("expand", "repeat", "broadcast_in_dim", "tile")
KINDS = {op: kind for kind, ops in _OPERATIONS.items() for op in ops.split()}


@dataclass(frozen=True)
class Inputs:
    """The inputs that both models are called with.

    Attributes:
        args: Those of the source by position.
        kwargs: Those of the source by keyword.
        target_args: Those of the target by position.
        target_kwargs: Those of the target by keyword.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target_args: tuple[Any, ...]
    target_kwargs: Mapping[str, Any]


class Print(NamedTuple):
    """Properties of an array that do not depend on the order of its elements."""

    size: int
    scale: float
    values: tuple[float, ...]

    def is_like(self, other: Print) -> bool:
        """Returns whether two arrays have the same elements, up to rounding."""
        if self.size != other.size or abs(self.scale - other.scale) > _CLOSE * self.scale:
            return False
        pairs = zip(self.values, other.values, strict=True)
        return all(abs(a - b) <= 5 * _CLOSE for a, b in pairs)


class Trial(NamedTuple):
    """The result of a call of the target with the weights of the source.

    Attributes:
        agrees: Whether the outputs are those of the source.
        matches: For each operation, whether its result is one of the source.
        place: The place of the first operation from which on results differ.
        weights: The names of the target's weights shortly before such operations.
    """

    agrees: bool
    matches: tuple[bool, ...] = ()
    place: str = ""
    weights: frozenset[str] = frozenset()

    @property
    def score(self) -> tuple[bool, int]:
        """How well the target agrees with the source: outputs first, then operations."""
        return self.agrees, sum(self.matches)


@dataclass
class Proof:
    """Both models, the source with new random weights.

    Attributes:
        source: The source.
        target: The target.
        inputs: The inputs.
        last: The rules that follow those of the decisions.
        arrays: The random weights of the source by name.
    """

    source: Side
    target: Side
    inputs: Inputs
    last: Rules
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def prepare(self, entries: Iterable[Entry], equal: Mapping[str, str]) -> None:
        """Fills the source with new random weights, and calls it.

        Args:
            entries: The weights.
            equal: Names of others -> the names of those that they are equal to.

        Raises:
            IncomparableError: The source cannot be called, or its outputs are not finite.
            TransferError: It draws random numbers.
        """
        import numpy as np

        self.arrays = {entry.name: _random(entry, at) for at, entry in enumerate(entries)}
        ties = {n: e.tied_to for n, e in self.source.entries.items() if e.tied_to} | dict(equal)
        self.arrays |= {n: self.arrays[of] for n, of in ties.items() if of in self.arrays}
        given = {n: x for n, x in self.arrays.items() if not self.source.entries[n].tied_to}
        self._model = _fill(self.source, given)
        self._outputs = _outputs(self._model, self.inputs.args, self.inputs.kwargs)
        if not self._outputs:
            raise IncomparableError(
                "the source returns no floating arrays, so nothing can be compared"
            )
        if not all(np.isfinite(x).all() for x in self._outputs.values()):
            raise IncomparableError(
                "the source gives infinities or NaN with random weights, so nothing can be "
                "compared. Pass other example_inputs=, or rules="
            )
        _check_draws(self.source, self._model, self.inputs.args, self.inputs.kwargs, self._outputs)
        self._seen: dict[int, list[Print]] | None = None
        self._watch: Callable[[Any], Iterable[Observation]] | None = None

    def run(self, arrays: Mapping[str, Any], *, watch: bool = False) -> Trial:
        """Calls the target with the source's random weights, as rules have made them its own.

        Args:
            arrays: The weights of the target by name.
            watch: Whether to compare every operation, too.
        """
        from fmapper.verification.models.owners import inputs_for

        model = _fill(self.target, self.last.apply(_lazy(arrays)))
        args, kwargs = self.inputs.target_args, self.inputs.target_kwargs
        outputs = _outputs(model, args, kwargs)
        agrees = self._agree(outputs)
        both = (self._outputs.values(), outputs.values())
        sizes = [{_size(x) for x in side} for side in both]
        if not sizes[0] & sizes[1]:
            shapes = " and ".join(str([x.shape for x in side]) for side in both)
            raise IncomparableError(
                "the outputs of both models have other shapes, so they cannot be compared: "
                f"{shapes}. Pass inputs of both as example_inputs= and target_inputs="
            )
        if not watch:
            return Trial(agrees)
        if self._seen is None:
            self._seen = defaultdict(list)
            adapter = _adapter(self._model)
            given = inputs_for(adapter, self.inputs.args, self.inputs.kwargs)
            seen = _observe(self._model, lambda one: adapter.watch(one, *given, train=False))
            for step in _steps(seen):
                for print_ in step.prints:
                    self._seen[print_.size].append(print_)
        steps = [*_steps(_observe(model, self._watch_target), Names(self.target).find)]
        matches = tuple(all(map(self._is_seen, step.prints)) for step in steps)
        recovers = [*matches]  # whether results that depend on one match again
        for at in reversed(range(len(steps))):
            for parent in steps[at].parents:
                recovers[parent] = recovers[parent] or recovers[at]
        first = [
            step
            for at, step in enumerate(steps)
            if not recovers[at] and all(recovers[parent] for parent in step.parents)
        ]
        weights = frozenset(name for step in first for near in step.weights for name in near)
        return Trial(agrees, matches, first[0].place if first else "", weights)

    def _watch_target(self, model: Any) -> Iterable[Observation] | None:
        """Yields the operations of the target, which is recorded once."""
        if self._watch is None:
            from fmapper.verification.models.owners import inputs_for

            adapter = _adapter(model)
            args, kwargs = self.inputs.target_args, self.inputs.target_kwargs
            self._watch = adapter.watcher(model, *inputs_for(adapter, args, kwargs))
        return self._watch(model)

    def check_target(self, arrays: Mapping[str, Any]) -> None:
        """Raises `TransferError` if the target draws random numbers."""
        model = _fill(self.target, self.last.apply(_lazy(arrays)))
        args, kwargs = self.inputs.target_args, self.inputs.target_kwargs
        _check_draws(self.target, model, args, kwargs, _outputs(model, args, kwargs))

    def _is_seen(self, print_: Print) -> bool:
        """Returns whether a result is one of the source."""
        assert self._seen is not None
        return any(print_.is_like(other) for other in self._seen[print_.size])

    def _agree(self, outputs: Mapping[Path, np.ndarray[Any, Any]]) -> bool:
        """Returns whether all outputs of the side that has fewer are among those of the other.

        They are compared by their places if both have them at the same ones, else in their order.
        """
        few, many = sorted((self._outputs, outputs), key=len)
        if few.keys() == many.keys() and all(_size(few[at]) == _size(many[at]) for at in few):
            return bool(few) and all(_alike(few[at], many[at]) for at in few)
        left = defaultdict(list)
        for y in many.values():
            left[_size(y)].append(y)
        rest = {size: iter(found) for size, found in left.items()}
        return bool(few) and all(
            any(_alike(x, y) for y in rest.get(_size(x), ())) for x in few.values()
        )


def _random(entry: Entry, at: int) -> np.ndarray[Any, Any]:
    """Returns random values that a model can compute with, also where they are variances."""
    import numpy as np

    from fmapper.files.dtypes import numpy_dtype

    generator = np.random.default_rng([0, at])
    if len(entry.shape) < 2:
        values = generator.uniform(0.5, 1.5, entry.shape)
    else:
        scale = math.prod(entry.shape) ** -0.25
        values = generator.normal(0.0, scale, entry.shape)
    return values.astype(numpy_dtype(entry.dtype))


def _fill(side: Side, arrays: Mapping[str, Any]) -> Any:
    return side.fill(_lazy(arrays), strict=False)


def _lazy(arrays: Mapping[str, Any]) -> dict[str, LazyArray]:
    from fmapper.checkpoints.lazy import LazyArray

    made: dict[int, LazyArray] = {}  # what is tied stays one object
    for x in arrays.values():
        if id(x) not in made:
            made[id(x)] = x if isinstance(x, LazyArray) else LazyArray.of(x)
    return {name: made[id(x)] for name, x in arrays.items()}


def _outputs(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int = 0
) -> dict[Path, np.ndarray[Any, Any]]:
    """Calls a model, and returns the floating arrays of its output."""
    from fmapper.verification.models.owners import inputs_for

    adapter = _adapter(model)
    given = inputs_for(adapter, args, kwargs)
    try:
        output = adapter.call(model, *given, train=False, seed=seed)
    except Exception as error:  # whatever the model's own code raises
        raise IncomparableError(
            f"{type(model).__name__} cannot be called with the example inputs: "
            f"{type(error).__name__}: {error}"
        ) from error
    return dict(_by_place(output))


def _observe(
    model: Any, watch: Callable[[Any], Iterable[Observation] | None]
) -> Iterator[Observation]:
    """Yields the operations of a call of a model.

    Raises:
        TransferError: They cannot be recorded.
    """
    try:
        yield from watch(model) or ()
    except Exception as error:  # whatever the model's own code raises
        raise TransferError(
            f"outputs differ, and the operations of {type(model).__name__} cannot be recorded to "
            f"find out where: {type(error).__name__}: {error}. Pass rules="
        ) from error


def _check_draws(
    side: Side,
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Mapping[Path, np.ndarray[Any, Any]],
) -> None:
    """Refuses a model that gives other outputs with another seed.

    Random keys among the inputs are the same in every call.

    Raises:
        TransferError: It gives other outputs with another seed; names the operation.
    """
    import numpy as np

    from fmapper.verification.models.owners import inputs_for

    counts = [e for e in side.entries.values() if e.random and e.dtype.startswith(("int", "uint"))]
    moved = {e.name: np.asarray(e.lazy().read() + 1) for e in counts if not e.is_abstract}
    other = _fill(replace(side, tree=model), moved) if moved else model
    if all(map(_close, outputs.values(), _outputs(other, args, kwargs, seed=1).values())):
        return
    adapter = _adapter(model)
    given = inputs_for(adapter, args, kwargs)
    seen = _observe(model, lambda one: adapter.watch(one, *given, train=False))
    where = next((f", at {one.op}" for one in seen if _DRAWS.search(one.op)), "")
    raise TransferError(
        f"{side.label} gives other outputs with another seed: it draws random numbers{where}. Set "
        "it to evaluation, or pass the argument that does (deterministic=True) in example_kwargs="
    )


def _adapter(model: Any) -> Any:
    adapter = framework_of(model)
    if adapter is None:
        raise TransferError(
            f"{type(model).__name__} is not a model that can be called, so example inputs are of "
            "no use: pass models, or leave example_inputs= out"
        )
    return adapter


def _by_place(tree: Any, path: Path = ()) -> Iterator[tuple[Path, np.ndarray[Any, Any]]]:
    """Yields the floating arrays of an output on the host, in double precision, by their places."""
    import numpy as np

    from fmapper.backends.discovery import adapter_of
    from fmapper.backends.dtypes import is_inexact
    from fmapper.moves.mover import to_numpy
    from fmapper.states.matching import parts_of

    adapter = adapter_of(tree)
    if adapter is None:
        for key, part in (parts_of(tree) or {}).items():
            yield from _by_place(part, (*path, key))
    elif is_inexact(adapter.dtype(tree)):
        yield path, np.asarray(to_numpy(tree, copy=None)).astype(np.float64)


def _size(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Returns a shape whose order is that of images with channels first and last alike."""
    return tuple(sorted(array.shape))


def _close(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> bool:
    import numpy as np

    scale = float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
    return x.shape == y.shape and bool(np.abs(x - y).max(initial=0.0) <= _CLOSE * scale)


def _alike(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> bool:
    """Returns whether two arrays are the same, or are with their channels first and last."""
    if x.ndim != y.ndim:
        return False
    if _close(x, y):
        return True
    if x.ndim < 3:
        return False
    last = x.transpose(0, *range(2, x.ndim), 1)
    first = x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1))
    return _close(last, y) or _close(first, y)


def print_of_values(array: np.ndarray[Any, Any]) -> Print | None:
    """Returns the print of an array; None where all arrays would have it."""
    import numpy as np

    if array.size < 2 or not np.isfinite(array).all():
        return None
    scale = float(np.sqrt(np.mean(np.square(array))))
    if not scale:
        return None
    unit = array.ravel() / scale
    values = (unit.mean(), np.mean(unit**3), unit.max(), unit.min())
    return Print(array.size, scale, tuple(map(float, values)))


class _Step(NamedTuple):
    """An operation that depends on the inputs.

    Attributes:
        place: Where it is.
        prints: Its results.
        parents: The numbers of the steps whose results it takes.
        weights: The weights that it depends on from the last product with one, and those from the
            product before that.
    """

    place: str
    prints: tuple[Print, ...]
    parents: frozenset[int]
    weights: tuple[frozenset[str], frozenset[str]]


def _steps(
    seen: Iterable[Observation] | None, name_of: Callable[[str], str] = str
) -> Iterator[_Step]:
    """Yields the operations that depend on the inputs of a model."""
    names: dict[str, frozenset[str]] = defaultdict(frozenset)  # of weights, by results of these
    data: dict[str, tuple[frozenset[int], frozenset[str], frozenset[str]]] = {}
    repeated: set[str] = set()  # results of weights alone that are there for each row
    count = 0
    for one in seen or ():
        if one.op == "input":
            data[one.name] = (frozenset(), frozenset(), frozenset())
            continue
        if one.op == "weight":
            names[one.name] = frozenset([name_of(one.module).partition("#")[0]])
        own = frozenset(name for operand in one.operands for name in names[operand])
        operands = [operand for operand in one.operands if operand in data]
        if not operands and repeats(one, repeated):
            repeated.add(one.name)
        if not operands and is_product(one.op):  # of queries that are learned
            operands = [operand for operand in one.operands if operand in repeated]
            data |= {name: (frozenset(), names[name], frozenset()) for name in operands}
        if not operands:
            names[one.name] |= own
            continue
        given = [data[operand] for operand in operands]
        parents, last, before = (frozenset().union(*sets) for sets in zip(*given, strict=True))
        last, before = (own, last) if own and is_product(one.op) else (last | own, before)
        arrays = (plain for array in one.values for _, plain in _by_place(array))
        prints = tuple(filter(None, map(print_of_values, arrays)))
        if prints:
            where = f"{one.module}: " if one.module else ""
            line = f" ({one.source})" if one.source else ""
            yield _Step(f"{where}{one.op}{line}", prints, parents, (last, before))
            parents, count = frozenset([count]), count + 1
        data[one.name] = (parents, last, before)


# --- the weights of programs ---------------------------------------------------------------------


def is_product(op: str) -> bool:
    """Returns whether an operation is a matrix product or a convolution."""
    return KINDS.get(plain(op)) in ("product", "convolution")


def repeats(one: Observation, repeated: Container[str]) -> bool:
    """Returns whether a result of weights alone is repeated, or is made of one that is."""
    return plain(one.op) in _REPEATS or any(name in repeated for name in one.operands)


def plain(op: str) -> str:
    """Returns the name of an operation without its framework and overload."""
    return op.rpartition("::")[2].partition(".")[0]


class Names:
    """The names of parameters in programs, as those of a side and the rows of these."""

    def __init__(self, side: Side) -> None:
        self._entries = side.entries
        self._ends: dict[str, list[str]] = defaultdict(list)
        for name in side.entries:
            parts = name.split(".")
            for at in range(len(parts)):
                self._ends[".".join(parts[at:])].append(name)

    def find(self, name: str) -> str:
        """Returns the name of a parameter, `layers.weight#0` for a row; empty for no weight."""
        parts = name.split(".")
        first = self._find(name)
        for at, part in enumerate(parts):
            if not first and part.isdigit():
                stacked = self._find(".".join((*parts[:at], *parts[at + 1 :])))
                first = f"{stacked}#{part}" if stacked else ""
        return first

    def _find(self, name: str) -> str:
        names = [name] if name in self._entries else self._ends.get(name, [])
        if len(names) != 1 or self._entries[names[0]].random or self._entries[names[0]].transient:
            return ""
        return self._entries[names[0]].tied_to or names[0]
