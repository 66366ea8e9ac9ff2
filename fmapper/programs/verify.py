"""Compares two models on the same inputs, and finds the first operation where they diverge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fmapper.backends.arrays import Arrays
from fmapper.backends.discovery import adapter_of
from fmapper.backends.equality import equals, narrow_ends
from fmapper.backends.models import Models, Observation
from fmapper.errors import ConversionError
from fmapper.moves.mover import to_numpy
from fmapper.plots import draw_differences
from fmapper.programs.bind import inputs_for
from fmapper.programs.steps import (
    adapter_of_model,
    in_turn,
    source_of_callable,
    user_lowerings,
)
from fmapper.progress import step
from fmapper.render import as_html, table
from fmapper.states.matching import match, parts_of, path_of
from fmapper.tracebacks import short_traceback

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What rounding may make of the largest element of an output, by the coarser of two dtypes.
_ROUNDING = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}


# Of an operation that sorts or selects: its elements agree, their places do not.
TIES = "the same elements from other places, as there are equal ones"


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between an array of `b` and that of `a`.

    Attributes:
        path: Where it is: the output, or the operation that gives it.
        error: The largest difference of two elements; infinite where shapes, NaN or infinite
            elements do not agree.
        scale: The largest finite element of `a`, by absolute value.
        allowed: The difference that is allowed.
        note: What else does not agree.
        size: The number of elements that were compared.
    """

    path: str
    error: float
    scale: float
    allowed: float
    note: str = ""
    size: int = 1

    @property
    def ok(self) -> bool:
        """Whether the difference is allowed."""
        return not self.note and self.error <= self.allowed

    @property
    def share(self) -> float:
        """The difference relative to the largest element; infinite where something else differs."""
        if self.note:
            return math.inf
        return self.error / self.scale if self.scale else self.error

    def __str__(self) -> str:
        if self.note:
            return f"{self.path}: {self.note}"
        sign = "<=" if self.ok else ">"
        return f"{self.path}: differs by {self.error:.2e} {sign} {self.allowed:.2e}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `verify`; true if something was compared and all outputs agree.

    Attributes:
        outputs: One difference per array of the output; per number or text where there is no array.
        first: The first operation whose results differ, where they are known of both models.
        layers: The difference of each layer, that of its operation that differs most, in the order
            of `a`; for `verify(..., layers=True)`.
        exact: The largest error of `a` and of `b` against `a` in float64, relative to the largest
            element; None where that was not computed.
        modes: Which of the two was called in training mode and which was not, if they differ.
    """

    outputs: tuple[Difference, ...]
    first: Difference | None = None
    exact: tuple[float, float] | None = None
    layers: tuple[Difference, ...] = ()
    modes: str = ""

    @property
    def ok(self) -> bool:
        """Whether something was compared, and all outputs agree."""
        return self.size > 0 and all(output.ok for output in self.outputs)

    @property
    def size(self) -> int:
        """The number of elements that were compared."""
        return sum(output.size for output in self.outputs)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        wrong = [output for output in self.outputs if not output.ok]
        lines = [
            f"{len(self.outputs) - len(wrong)} of {len(self.outputs)} outputs agree",
            *(f"  {output}" for output in (wrong or self.outputs)),
        ]
        if not self.size:
            what = "are all empty" if self.outputs else "hold no arrays"
            lines = [
                f"nothing was compared: the outputs {what}. Pass inputs with non-empty outputs"
            ]
        if self.modes:
            lines.append(self.modes)
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
        if self.exact is not None:
            a, b = self.exact
            lines.append(f"against float64: a is off by {a:.2e}, b by {b:.2e} of the largest")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        told = [line for line in str(self).splitlines() if not line.startswith(" ")]
        tables = [
            table((what, "largest difference", "allowed", ""), map(_row, found))
            for what, found in (("output", self.outputs), ("layer", self.layers))
            if found
        ]
        return as_html("\n".join(told), *tables)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Plots the difference of each layer, relative to its largest element.

        Needs matplotlib, as in the extra `plot`.

        Args:
            axes: Where to draw; None for a new figure of pyplot.

        Returns:
            The axes. Their label is a sentence that can stand for the picture.

        Raises:
            ConversionError: There are no layers: the report is not of `verify(..., layers=True)`,
                or what the two models do cannot be watched.
            BackendUnavailableError: matplotlib is not installed.
        """
        if not self.layers:
            raise ConversionError(
                "there is nothing to plot: verify(..., layers=True) compares layer by layer, if "
                "convert created one of the two models from the other."
            )
        return draw_differences(self.layers, axes)


def _row(one: Difference) -> tuple[str, ...]:
    numbers = ("", "") if one.note else (f"{one.error:.2e}", f"{one.allowed:.2e}")
    return one.path, *numbers, one.note or ("agrees" if one.ok else "differs")


@short_traceback
@in_turn
def verify(
    a: Any,
    b: Any,
    *inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    layers: bool = False,
) -> Report:
    """Calls two models with the same inputs and compares every output.

    Each is called in the mode in which it is, training or evaluation, and stays as it is. Where
    they differ and both can be watched, as a torch module and what was converted from it, the first
    operation whose results differ is named with its module; and where `a` can be run in float64,
    the error of both against that tells whose rounding it is.

    Args:
        a: A model of any framework, or any callable.
        b: The other one.
        inputs: What both are called with; arrays are brought to the backend of each model.
        example_kwargs: The same by keyword, as `convert` takes them.
        rtol: What may differ, relative to the largest element of an output. None: by dtype, 1e-4
            for float32.
        atol: What may differ in any case.
        exact: Run `a` in float64 even where the outputs agree.
        layers: Compare every operation of both, so that the report has `layers`, and plots them.

    Examples:
        >>> import fmapper, torch
        >>> linear = torch.nn.Linear(2, 3)
        >>> x = torch.ones(4, 2)
        >>> bool(fmapper.verify(linear, fmapper.convert(linear, "jax", (x,)), x))
        True
    """
    return compare(a, b, inputs, example_kwargs or {}, rtol, atol, exact=exact, layers=layers)


def compare(
    a: Any,
    b: Any,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rtol: float | None = None,
    atol: float | None = None,
    *,
    exact: bool = False,
    layers: bool = False,
    train: bool | None = None,
) -> Report:
    """Compares two models as `verify` does, both in a mode; None for that in which each is."""
    with step(f"comparing {type(a).__name__} and {type(b).__name__}") as say:
        sides = _sides(a, b, inputs, kwargs, train)
        got = [side.output() for side in sides]
        outputs = tuple(_differences(got[0], got[1], "output", rtol, atol))
        outputs = outputs or tuple(_plain_values(got[0], "output"))
        agree = all(output.ok for output in outputs)
        first = rounding = None
        if not agree:
            say("looking for the first operation that differs")
            first = next((one for _, one in _operations(sides, rtol, atol) if not one.ok), None)
        by_layer: dict[str, Difference] = {}
        for layer, one in _operations(sides, rtol, atol) if layers else ():
            worst = by_layer.get(layer)
            if worst is None or (one.ok, -one.share) < (worst.ok, -worst.share):
                by_layer[layer] = replace(one, path=layer or "model")
        if exact or not agree:
            say(f"running {type(a).__name__} in float64")
            rounding = _exact(sides[0], got)
        modes = "" if agree else _other_modes(sides)
    return Report(outputs, first, rounding, tuple(by_layer.values()), modes)


def differences(a: Any, b: Any) -> list[Difference]:
    """Compares two outputs, with rounding allowed for: one difference per array."""
    return list(_differences(a, b, "output", None, None))


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the models with its inputs, and its mode; None for that in which it is."""

    model: Any
    adapter: Models | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool | None

    def output(self) -> Any:
        if self.adapter is None:
            return self.model(*self.args, **self.kwargs)
        given = inputs_for(self.adapter, self.args, self.kwargs)
        return self.adapter.call(self.model, *given, train=self.train)

    def trains(self) -> bool:
        if self.adapter is None or self.train is not None:
            return bool(self.train)
        return any(self.adapter.modes(self.model, self.args, self.kwargs).values())

    def operations(self, other: Models | None) -> Iterable[Observation] | None:
        """Returns the operations of a model, decomposed as for the other framework.

        None where they cannot be watched, as those of a model that cannot be recorded.
        """
        if self.adapter is None or other is None:
            return None
        given = inputs_for(self.adapter, self.args, self.kwargs)
        whole = other.lowers_whole(user_lowerings(other))
        try:
            return self.adapter.watch(self.model, *given, whole=whole, train=self.train)
        except ConversionError:
            return None

    def output_in_float64(self) -> Any | None:
        if self.adapter is None:
            return None
        given = inputs_for(self.adapter, self.args, self.kwargs)
        return self.adapter.call_in_float64(self.model, *given, train=self.train)


def _sides(
    a: Any, b: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool | None
) -> list[_Side]:
    """Pairs both models with their keywords: inputs, and options of their frameworks."""
    models = _with_adapters(a, b)
    options = [() if adapter is None else adapter.options(model) for model, adapter in models]
    return [
        _Side(model, adapter, args, {
            name: value for name, value in kwargs.items() if name in own or name not in theirs
        }, train)
        for (model, adapter), own, theirs in zip(models, options, reversed(options), strict=True)
    ]  # fmt: skip


def _other_modes(sides: list[_Side]) -> str:
    """Says which of two models was in training; empty if both or none were."""
    a, b = (side.trains() for side in sides)
    if a is b:
        return ""
    return f"{'ab'[b]} was called in training mode, and {'ab'[a]} in evaluation mode"


def _with_adapters(a: Any, b: Any) -> list[tuple[Any, Models | None]]:
    """Pairs both models with their frameworks; a bare function takes the remaining one."""
    known = [adapter_of_model(model) for model in (a, b)]
    for i, model in enumerate((a, b)):
        other = known[1 - i]
        if known[i] is None and other is not None:
            known[i] = source_of_callable(model, other)
    return list(zip((a, b), known, strict=True))


def _differences(
    a: Any,
    b: Any,
    path: str,
    rtol: float | None,
    atol: float | None,
    around: Set[tuple[int, int]] = frozenset(),
) -> Iterator[Difference]:
    """Yields one difference per array; structures are compared by contents, not by class.

    Arrays in parts with names are compared by name, in sequences by position.

    Args:
        a: An output, or a part of one.
        b: The other one.
        path: Where they are.
        rtol: What may differ, relative to the largest element.
        atol: What may differ in any case.
        around: The structures that they are in, which they may hold again.
    """
    if (id(a), id(b)) in around:
        return
    if adapter_of(a) is not None or adapter_of(b) is not None:
        yield _difference(a, b, path, rtol, atol)
        return
    pairs = match(a, b)
    if pairs is None:
        if not equals(a, b) and a != b:
            yield Difference(path, math.inf, 0.0, 0.0, f"{a!r} and {b!r}")
    elif isinstance(pairs, str):
        yield Difference(path, math.inf, 0.0, 0.0, pairs)
    else:
        for key, value, other in pairs:
            inner = {*around, (id(a), id(b))}
            yield from _differences(value, other, path_of(path, key), rtol, atol, inner)


def _plain_values(x: Any, path: str, around: Set[int] = frozenset()) -> Iterator[Difference]:
    """Yields the numbers and strings of an output without arrays."""
    if id(x) in around:
        return
    parts = parts_of(x)
    if parts is None and x is not None:
        yield Difference(path, 0.0, 0.0, 0.0)
    for key, value in (parts or {}).items():
        yield from _plain_values(value, path_of(path, key), {*around, id(x)})


def _difference(a: Any, b: Any, path: str, rtol: float | None, atol: float | None) -> Difference:
    a, b = _as_array(a, b), _as_array(b, a)
    owner = adapter_of(a)
    if owner is None or adapter_of(b) is None:
        return Difference(path, math.inf, 0.0, 0.0, f"{type(a).__name__} and {type(b).__name__}")
    error, scale, dtype, note = _compare(a, b)
    factor = _ROUNDING.get(dtype, 0.0) if rtol is None else rtol
    size = math.prod(owner.shape(a))
    return Difference(path, error, scale, factor * scale + (atol or 0.0), note, size)


def _as_array(x: Any, other: Any) -> Any:
    """Returns a number as an array if the other is an array without dimensions."""
    import numpy as np

    is_scalar = isinstance(x, bool | int | float | complex) and getattr(other, "shape", None) == ()
    return np.asarray(x) if is_scalar else x


def _adapter_of_array(array: Any) -> Arrays:
    adapter = adapter_of(array)
    assert adapter is not None
    return adapter


def _portable(array: Any) -> Any:
    adapter = adapter_of(array)
    return array if adapter is None else adapter.portable(array)


def _compare(a: Any, b: Any) -> tuple[float, float, str, str]:
    """Returns the largest difference and element, the coarser dtype, and the errors."""
    import numpy as np

    first, second = to_numpy([_portable(a), _portable(b)], copy=None)
    dtype = max(first.dtype.name, second.dtype.name, key=lambda name: _ROUNDING.get(name, 0.0))
    if first.shape != second.shape:
        return math.inf, 0.0, dtype, f"shape {first.shape} and {second.shape}"
    if not first.size:
        return 0.0, 0.0, dtype, ""
    if dtype not in _ROUNDING:  # integers and bools; int64 may be int32 in JAX
        wrong = int((narrow_ends(first, second) != narrow_ends(second, first)).sum())
        return 0.0, 0.0, dtype, f"{wrong} of {first.size} elements are not equal" if wrong else ""
    wide = np.complex128 if np.iscomplexobj(first) else np.float64
    x, y = first.astype(wide), second.astype(wide)
    finite = np.isfinite(x)
    scale = float(np.abs(x[finite]).max()) if finite.any() else 0.0
    if (np.isnan(x) != np.isnan(y)).any():
        return math.inf, scale, dtype, "NaN at other places"
    special = ~finite & ~np.isnan(x)
    if (x[special] != y[special]).any() or not np.isfinite(y[finite]).all():
        return math.inf, scale, dtype, "infinite at other places"
    error = float(np.abs(x[finite] - y[finite]).max()) if finite.any() else 0.0
    return error, scale, dtype, ""


def _operations(
    sides: list[_Side], rtol: float | None, atol: float | None
) -> Iterator[tuple[str, Difference]]:
    """Yields layer and difference of each result that both have, in the order of `a`."""
    a, b = sides
    watched = [a.operations(b.adapter), b.operations(a.adapter)]
    if watched[0] is None or watched[1] is None:
        return
    theirs = dict(_occurrences(watched[1]))
    for key, seen in _occurrences(watched[0]):
        other = theirs.get(key)
        if other is None:
            continue
        where = f"in {seen.module}: " if seen.module else ""
        source = f" ({seen.source})" if seen.source else ""
        path = f"{where}{seen.op}{source}"
        pairs = zip(seen.values, other.values, strict=False)
        found = [_difference(x, y, path, rtol, atol) for x, y in pairs]
        for i, one in enumerate(found):
            is_tie = i > 0 and found[0].ok and one.scale == 0 and not math.isinf(one.error)
            tied = not one.ok and is_tie
            yield seen.module, replace(one, note=f"{TIES}: {one.note}") if tied else one


def _occurrences(seen: Iterable[Observation]) -> Iterator[tuple[tuple[str, str, int], Observation]]:
    """Yields each result with its module, operation and occurrence."""
    counts: dict[tuple[str, str], int] = {}
    for one in seen:
        key = one.module, one.op
        counts[key] = counts.get(key, 0) + 1
        yield (*key, counts[key]), one


def _exact(side: _Side, got: list[Any]) -> tuple[float, float] | None:
    """Returns the errors of both outputs against `a` in float64."""
    reference = side.output_in_float64()
    if reference is None:
        return None
    errors = []
    for outputs in got:
        found = _differences(reference, outputs, "output", None, None)
        errors.append(max((d.error / d.scale for d in found if d.scale), default=0.0))
    return errors[0], errors[1]
