"""The programs of both models: called with new weights, or recorded without computing them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fmapper.backends.dtypes import is_inexact
from fmapper.errors import TransferError
from fmapper.files.dtypes import numpy_dtype
from fmapper.twins.sides import Entry, Side, framework_of

if TYPE_CHECKING:
    import numpy as np

    from fmapper.backends.compute import Observation

Outputs: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
Weights: TypeAlias = dict[str, bool]  # names of parameters, and whether the root of each is taken

CLOSE = 2e-4  # of the root mean square of an array, for rounding in two frameworks

_OPERATIONS = {
    "product": "mm addmm bmm baddbmm matmul linear dot_general mv dot addmv",
    "convolution": "convolution _convolution conv_general_dilated",
    "lookup": "embedding gather index index_select take",
    "factor": "mul div",
    "term": "add sub",
    "part": "cat concatenate",
}
KINDS = {op: kind for kind, ops in _OPERATIONS.items() for op in ops.split()}
PRODUCTS = ("product", "convolution")
ROOTS = ("rsqrt", "sqrt")
_REPEATS = ("expand", "repeat", "broadcast_in_dim", "tile")
_MOST_SIZES = 4  # sizes that are tried for each kind of input
_IMAGE = 32  # pixels
_DRAWS = re.compile("rand|bernoulli|normal|dropout|threefry|multinomial|poisson|exponential")


class IncomparableError(TransferError):
    """Both models cannot be compared on these inputs."""


@dataclass
class Model:
    """A side with the inputs that it is called with."""

    side: Side
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    double: bool = False  # compare in double precision, where the framework can
    _watch: Callable[[Any], Iterable[Observation]] | None = None

    @property
    def _framework(self) -> Any:
        framework = framework_of(self.side.tree)
        if framework is None:
            raise TransferError(
                f"{type(self.side.tree).__name__} is not a model that can be called, so example "
                "inputs are of no use: pass models, or leave example_inputs= out"
            )
        return framework

    @property
    def _inputs(self) -> Any:
        from fmapper.verification.models.owners import inputs_for

        return inputs_for(self._framework, self.args, self.kwargs)

    def outputs(self, model: Any, seed: int | None = None) -> Outputs:
        """Calls the model with other weights, and returns the floating arrays of its output.

        With a seed, which calls in double precision do not take, it computes in its own.
        """
        inputs, output = self._inputs, None
        try:
            if self.double and seed is None:
                output = self._framework.call_in_float64(model, *inputs, train=False)
            if output is None:
                output = self._framework.call(model, *inputs, train=False, seed=seed or 0)
        except Exception as error:  # whatever the model's own code raises
            raise IncomparableError(
                f"{type(model).__name__} cannot be called with the example inputs: "
                f"{type(error).__name__}: {error}"
            ) from error
        return floats_in(output)

    def operations(self, model: Any) -> Iterator[Observation]:
        """Yields the operations of a call with other weights; the model is recorded once."""
        try:
            if self.double:
                run = self._framework.watch(model, *self._inputs, train=False, double=True)
                yield from run or ()
                return
            if self._watch is None:
                self._watch = self._framework.watcher(model, *self._inputs)
            yield from self._watch(model)
        except Exception as error:  # whatever the model's own code raises
            raise TransferError(
                f"outputs differ, and the operations of {type(model).__name__} cannot be recorded "
                f"to find out where: {type(error).__name__}: {error}. Pass rules="
            ) from error

    def outline(self) -> list[Observation]:
        """Records the operations of a call without computing them; none where that fails."""
        seen = self._outline(self.side.tree)
        if not seen and any(entry.is_abstract for entry in self.side.entries.values()):
            values = {
                name: entry.lazy()
                for name, entry in self.side.entries.items()
                if not (entry.tied_to or entry.random)
            }
            seen = self._outline(self.side.fill(values, strict=False))
        return seen

    def _outline(self, model: Any) -> list[Observation]:
        try:
            return [*(self._framework.outline(model, *self._inputs) or ())]
        except Exception:  # whatever the model's own code raises for inputs that it does not take
            return []

    def check_draws(self, model: Any, outputs: Outputs) -> None:
        """Refuses a model that draws random numbers; keys among the inputs stay the same."""
        import numpy as np

        moved = {
            name: np.asarray(entry.lazy().read() + 1)
            for name, entry in self.side.entries.items()
            if entry.random and entry.dtype.startswith(("int", "uint")) and not entry.is_abstract
        }
        other = replace(self.side, tree=model).fill(moved, strict=False) if moved else model
        outputs = self.outputs(model, seed=0) if self.double else outputs
        if all(map(close, outputs.values(), self.outputs(other, seed=1).values())):
            return
        where = next((f", at {x.op}" for x in self.operations(model) if _DRAWS.search(x.op)), "")
        raise TransferError(
            f"{self.side.label} gives other outputs with another seed: it draws random numbers"
            f"{where}. Set it to evaluation, or pass the argument that does (deterministic=True) "
            "in example_kwargs="
        )


def floats_in(tree: Any) -> Outputs:
    """Returns the floating arrays of an output by path, in double precision."""
    import numpy as np

    from fmapper.verification.arrays import is_floating, to_host
    from fmapper.verification.models.side import arrays_in

    arrays = {path: to_host(x) for path, x in arrays_in(tree).items() if is_floating(x)}
    return {path: array.astype(np.float64) for path, array in arrays.items()}


def close(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> bool:
    """Returns whether two arrays are equal up to rounding."""
    import numpy as np

    scale = float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
    return x.shape == y.shape and bool(np.abs(x - y).max(initial=0.0) <= CLOSE * scale)


class Use(NamedTuple):
    """An operation that depends on the inputs, or an input."""

    name: str  # of its result
    seen: Observation
    op: str  # without framework and overload
    data: list[str]  # the operands that depend on the inputs; none for an input
    weights: list[Weights]  # the parameters that each of the other operands is made of

    @property
    def kind(self) -> str:
        """Its kind, such as `product` or `term`."""
        return KINDS.get(self.op, self.op)


def uses(seen: Iterable[Observation], side: Side) -> Iterator[Use]:
    """Yields the operations that depend on the inputs, with the parameters that they take."""
    weights: dict[str, Weights] = {}  # of results of parameters alone
    data: set[str] = set()
    repeated: set[str] = set()  # results of parameters alone that are there for each row
    for result in seen:
        op = result.op.rpartition("::")[2].partition(".")[0]
        if result.op == "weight" and (name := _name_of(result.module, side.entries)):
            weights[result.name] = {name: False}
        given = [operand for operand in result.operands if operand in data]
        if not given and (op in _REPEATS or not repeated.isdisjoint(result.operands)):
            repeated.add(result.name)
        if not given and KINDS.get(op) in PRODUCTS:  # of queries that are learned
            given = [operand for operand in result.operands if operand in repeated]
            for operand in given:
                yield Use(operand, result, "input", [], [weights.pop(operand, {})])
        mine = [weights[operand] for operand in result.operands if operand in weights]
        if given or result.op == "input":
            data.add(result.name)
            data.update(given)
            yield Use(result.name, result, op, given, mine)
        elif mine:
            rooted = op in ROOTS
            weights[result.name] = {n: r or rooted for of in mine for n, r in of.items()}


def _name_of(weight: str, entries: Mapping[str, Entry]) -> str:
    """Returns the name of a parameter, `layers.weight#0` for a row; empty for no weight."""
    parts = weight.split(".")
    name = _full_name(weight, entries)
    for at, part in enumerate(parts):
        if not name and part.isdigit():
            stacked = _full_name(".".join((*parts[:at], *parts[at + 1 :])), entries)
            name = f"{stacked}#{part}" if stacked else ""
    return name


def _full_name(weight: str, entries: Mapping[str, Entry]) -> str:
    names = [weight] if weight in entries else []
    names = names or [name for name in entries if name.endswith(f".{weight}")]
    if len(names) != 1 or entries[names[0]].random or entries[names[0]].transient:
        return ""
    return entries[names[0]].tied_to or names[0]


# --- inputs that both models may take ------------------------------------------------------------


def guesses(a: Side, b: Side) -> Iterator[tuple[Model, Model]]:
    """Yields both models with an input that they may take: tokens, images, vectors, sequences."""
    arrays = [*_arrays(a, b)]
    rows = ((0, 0), (..., 0), (0, ...))  # models of Equinox take one without a batch
    alone = [(x[i], y[k]) for i, k in rows for x, y in arrays if x.ndim > 1]
    few = few_bits(a, b)
    for mine, theirs in (*arrays, *alone):
        yield Model(a, (_like(a, mine, few),), {}), Model(b, (_like(b, theirs, few),), {})


def _like(side: Side, array: Any, few: Sequence[str]) -> Any:
    """Returns an input in the dtype of all weights, which torch's layers ask for."""
    dtypes = {entry.dtype for entry in side.entries.values() if is_inexact(entry.dtype)}
    same = dtypes if len(dtypes) == 1 else {array.dtype.name}
    return cast(array, (*few, *same)) if is_inexact(array.dtype.name) else array


def few_bits(a: Side, b: Side) -> list[str]:
    """Returns the dtypes of 16 bits of weights of two models."""
    from fmapper.verification.arrays import HALVES

    both = (*a.entries.values(), *b.entries.values())
    return sorted({entry.dtype for entry in both} & HALVES)


def cast(values: np.ndarray[Any, Any], dtypes: Iterable[str]) -> np.ndarray[Any, Any]:
    """Returns values that all dtypes have, in the last of them."""
    for dtype in dtypes:
        values = values.astype(numpy_dtype(dtype))
    return values


def _arrays(a: Side, b: Side) -> Iterator[tuple[Any, Any]]:
    """Yields an array for the source and one for the target, most likely ones first."""
    import numpy as np

    random = np.random.default_rng(0)
    entries = [e for side in (a, b) for e in side.entries.values() if not (e.random or e.transient)]
    tables = [e.shape[0] for e in entries if e.layout == "rows" and len(e.shape) == 2]
    if tables:
        least = min([rows for rows in tables if rows > 6] or tables)  # not of types of tokens
        tokens = np.arange(1, 7, dtype=np.int32).reshape(1, 6) * 5 % least
        yield tokens, tokens
    for space in (2, 1):
        kernels = [e.shape for e in entries if len(e.shape) == space + 2]
        rows = [e.shape[-2] for e in entries if len(e.shape) in (2, space + 1)]
        patch = max((s[-1] if s[-1] == s[2] else s[0] for s in kernels), default=1)
        for channels in _first(n for shape in kernels for n in shape[1:3]):
            for size in _sizes(rows, patch, space):
                image = random.normal(size=(1, channels, *[size] * space)).astype("f4")
                last = np.ascontiguousarray(np.moveaxis(image, 1, -1))
                yield from product((image, last), repeat=2)
    shapes = sorted((e.shape for e in entries if 0 < len(e.shape) < 4), key=lambda s: len(s) == 1)
    sizes = [n for shape in shapes for n in (shape[-1], shape[0])]
    common = [size for size, _ in Counter(sizes).most_common(_MOST_SIZES)]
    for size in dict.fromkeys([*_first(sizes), *common]):
        for shape in ((1, 5, size), (2, size)):  # also what takes vectors takes sequences, mostly
            vectors = random.normal(size=shape).astype("f4")
            yield vectors, vectors


def _sizes(rows: Iterable[int], patch: int, space: int) -> list[int]:
    """Returns sizes that fill a table of positions with patches, then a usual one."""
    if space == 1:
        return _first(n * stride for n in (*rows, _IMAGE) for stride in (1, 2))
    roots = ((isqrt(n - more), n - more) for n in rows for more in range(3) if n > more)
    return [*_first(patch * root for root, n in roots if root * root == n)[:2], _IMAGE]


def _first(sizes: Iterable[int]) -> list[int]:
    return [*dict.fromkeys(sizes)][:_MOST_SIZES]
