"""One of two compared models, with its inputs and its mode."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fmapper.backends.compute import Observation
from fmapper.backends.discovery import adapter_of
from fmapper.backends.models import Models
from fmapper.errors import ConversionError
from fmapper.states.matching import parts_of, path_of
from fmapper.tree.fmap import fmap
from fmapper.verification.arrays import UNITS, dtype_of, is_floating, move, to_host
from fmapper.verification.differences import OWN, distances, measure
from fmapper.verification.goldens.file import Goldens
from fmapper.verification.models.owners import (
    adapter_of_arrays,
    adapter_of_model,
    inputs_for,
    source_of_callable,
)
from fmapper.verification.models.trial import Call, Trial

SEEDS = (1, 2, 3)  # for perturbations


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How far a model is from itself.

    Attributes:
        outputs: The path of an output -> its largest difference.
        state: The name of a buffer -> its largest difference after the call.
    """

    outputs: dict[str, float] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """A model with its inputs.

    Attributes:
        model: The model.
        adapter: Its framework; None for a function without one.
        args: Its inputs by position.
        kwargs: Its inputs by keyword.
        train: Whether it is called in training; None for its current mode.
        outputs: Brings its output into the form of the other model's.
    """

    model: Any
    adapter: Models | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool | None
    outputs: Callable[[Any], Any] = lambda output: output
    is_recorded: ClassVar[bool] = False  # whether results come from a file

    def output(self) -> Any:
        """Calls the model as it is."""
        if self.adapter is None:
            return self.outputs(self.model(*self.args, **self.kwargs))
        given = inputs_for(self.adapter, self.args, self.kwargs)
        return self.outputs(self.adapter.call(self.model, *given, train=self.train))

    def trains(self) -> bool:
        """Returns whether the call is in training."""
        if self.adapter is None or self.train is not None:
            return bool(self.train)
        return any(self.adapter.modes(self.model, self.args, self.kwargs).values())

    @functools.cached_property
    def is_converted(self) -> bool:
        """Whether `convert` made the model."""
        adapter = self.adapter
        return adapter is not None and (
            adapter.program_of(self.model) is not None
            or adapter.source_weights(self.model) is not None
        )

    @functools.cached_property
    def trial(self) -> Trial | None:
        """The model as a trial; None if it cannot be trained."""
        if self.adapter is None:
            return None
        try:
            given = inputs_for(self.adapter, self.args, self.kwargs)
            return self.adapter.trial(self.model, *given, train=self.train)
        except ConversionError:
            return None

    def call(self, off: float = 0.0, seed: int = 0, *, double: bool = False) -> Call | None:
        """Calls the model without dropout; None if that is impossible.

        Args:
            off: The perturbation of weights and inputs.
            seed: The seed of the perturbation.
            double: Whether to compute in double precision.
        """
        trial = self.trial
        if trial is None:
            return None
        weights = {name: move(x, off, seed) for name, x in trial.weights.items()}
        inputs = None
        if off:
            inputs = fmap(lambda x: _move(x, off, seed), (self.args, dict(self.kwargs)))
        return trial.call(weights, inputs=inputs, double=double)

    def output_in_float64(self) -> Any | None:
        """Returns the output in double precision; None if that is impossible."""
        if self.adapter is None:
            return None
        given = inputs_for(self.adapter, self.args, self.kwargs)
        output = self.adapter.call_in_float64(self.model, *given, train=self.train)
        return None if output is None else self.outputs(output)

    def watch(
        self, other: Models | None, off: float = 0.0, seed: int = 0, *, double: bool = False
    ) -> list[Observation] | None:
        """Returns the operations of a call, divided as for the other framework.

        None if they cannot be watched, for example because the model cannot be recorded.
        """
        if self.adapter is None:
            return None
        args, kwargs = self.args, self.kwargs
        if off:
            args, kwargs = fmap(lambda x: _move(x, off, seed), (args, dict(kwargs)))
        given = inputs_for(self.adapter, args, kwargs)
        whole = () if other is None else other.lowers_whole({})
        options: Any = {"double": True} if double else {}  # third-party adapters may not accept it
        try:
            run = self.adapter.watch(self.model, *given, whole=whole, train=self.train, **options)
            return None if run is None else [*run]
        except ConversionError:
            return None

    def hides_steps(self, other: Models | None) -> bool:
        """Returns whether `watch` for the other framework leaves operations whole."""
        return other is not None and bool(other.lowers_whole({}))

    def sensitivity(self, unit: float, *, double: bool) -> Sensitivity:
        """Returns how far the model is from itself after perturbing weights and inputs."""
        sensitivity = Sensitivity()
        base = self.call(double=double)
        for seed in SEEDS if base is not None else ():
            moved = self.call(unit, seed, double=double)
            if base is None or moved is None:
                break
            for path, distance in distances(base.output, moved.output).items():
                sensitivity.outputs[path] = max(sensitivity.outputs.get(path, 0.0), distance)
            for name, x in base.state.items():
                distance = _distance(to_host(x), to_host(moved.state[name]))
                sensitivity.state[name] = max(sensitivity.state.get(name, 0.0), distance)
        return sensitivity

    def tolerance(
        self, run: Sequence[Observation], other: Models | None, unit: float, *, double: bool
    ) -> list[float]:
        """Returns how far each result of a run may be off, relative to its largest element.

        That is the effect of a rounding of weights and inputs.
        """
        moved = self.watch(other, unit, 1, double=double) or ()
        if len(moved) != len(run):
            return [4 * unit] * len(run)
        limits = []
        for result, again in zip(run, moved, strict=True):
            share = 0.0
            for x, y in zip(result.values, again.values, strict=False):
                if is_floating(x):
                    error, scale, _, note = measure(to_host(x), to_host(y))
                    share = max(share, 0.0 if note or not scale else error / scale)
            limits.append(max(4 * unit, OWN * share))
        return limits

    def recorded_plan(self, loss: Any) -> tuple[bool, int, tuple[Any, Any]]:
        """Returns whether goldens have gradients, and how many steps of which optimiser."""
        raise NotImplementedError

    def recorded_course(self, *, double: bool) -> Any | None:
        """Returns the recorded training of goldens; None for a model."""
        return None

    @functools.cached_property
    def dtypes(self) -> frozenset[str]:
        """The floating dtypes in which it computes, as far as known."""
        call = None if self.is_converted else self.call()
        if call is not None and self.trial is not None:
            weights = (*self.trial.weights.values(), *self.trial.fixed.values())
            return call.find_dtypes() | {dtype_of(x) for x in weights}
        return frozenset(dtype_of(x) for x in arrays_in((self.args, dict(self.kwargs))).values())

    @property
    def unit(self) -> float:
        """A rounding in the coarsest dtype in which it computes."""
        return max((UNITS.get(dtype, 0.0) for dtype in self.dtypes), default=0.0)


def _distance(x: Any, y: Any) -> float:
    error, _, _, note = measure(x, y)
    return math.inf if note else error


def make_sides(
    a: Any, b: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool | None,
    inputs_of_b: Any = None, outputs_of_b: Callable[[Any], Any] | None = None,
) -> tuple[Side, Side]:  # fmt: skip
    """Pairs both models with their inputs, and with keywords that are framework options."""
    if isinstance(a, Goldens):
        from fmapper.verification.goldens.recording import GoldenSide

        golden = GoldenSide.of(a)
        _, other = make_sides(None, b, a.args, a.kwargs, a.train, inputs_of_b, outputs_of_b)
        return golden, other
    other_args, other_kwargs = _inputs_of_b(inputs_of_b, args, kwargs)
    given = ((args, kwargs), (other_args, other_kwargs))
    models = _with_adapters((a, b), given)
    for name, (model, adapter) in zip("ab", models, strict=True):
        if adapter is None and not (model is None or callable(model)):
            raise ConversionError(
                f"{name} is {model!r:.80}, which is neither a model nor a function. Pass a model "
                "of any framework, a function, or (function, parameters)."
            )
    options = [() if adapter is None else adapter.options(model) for model, adapter in models]
    ours, theirs = (
        Side(model, adapter, own_args, {
            name: x for name, x in named.items() if name in accepted or name not in others
        }, train)
        for (model, adapter), (own_args, named), accepted, others in zip(
            models, given, options, reversed(options), strict=True
        )
    )  # fmt: skip
    if outputs_of_b is None:
        return ours, theirs
    return ours, Side(theirs.model, theirs.adapter, theirs.args, theirs.kwargs, train, outputs_of_b)


def _inputs_of_b(
    given: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns the inputs of `b` by position and by keyword."""
    if given is None:
        return args, kwargs
    if callable(given):
        given = given(*args, **kwargs)
        given = given if isinstance(given, tuple | dict) else (given,)
    if isinstance(given, Mapping):
        return (), given
    if not isinstance(given, tuple):
        raise ConversionError(
            "inputs_of_b takes a tuple of inputs, a dict of inputs by keyword, or a function that "
            f"makes one from the inputs of a; not {type(given).__name__}."
        )
    if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        return given
    return given, {} if kwargs else kwargs


def _with_adapters(
    models: tuple[Any, Any], given: Sequence[tuple[Any, Any]]
) -> list[tuple[Any, Models | None]]:
    """Pairs both models with their frameworks.

    A bare function belongs to a framework other than that of the other model, if that can trace it;
    otherwise to the framework of its inputs, or to none.

    Args:
        models: The models.
        given: The inputs of each, by position and by keyword.
    """
    adapters = [adapter_of_model(model) for model in models]
    for i, model in enumerate(models):
        if adapters[i] is None and isinstance(model, tuple):
            adapters[i] = source_of_callable(model, None)
        elif adapters[i] is None and callable(model):
            other = adapters[1 - i]
            owner = None if other is None else source_of_callable(model, other)
            if owner is None or not _records(owner, model, given[i]):
                owner = adapter_of_arrays(arrays_in(given[i]).values())
            adapters[i] = owner
    return [
        (model if adapter is None else adapter.as_model(model), adapter)
        for model, adapter in zip(models, adapters, strict=True)
    ]


def _records(adapter: Models, model: Any, given: tuple[Any, Any]) -> bool:
    """Returns whether a framework can record a function; it cannot record NumPy functions."""
    try:
        trial = adapter.trial(model, *inputs_for(adapter, *given), train=None)
        trial.call(trial.weights).find_dtypes()
    except Exception:  # any code may fail on unexpected arguments
        return False
    return True


def _move(x: Any, off: float, seed: int) -> Any:
    if adapter_of(x) is None:
        return x
    array = to_host(x)
    return move(array, off, seed) if is_floating(array) else x


def arrays_in(output: Any) -> dict[str, Any]:
    """Returns the arrays in an output by path, as arrays of their framework."""
    arrays: dict[str, Any] = {}

    def look(x: Any, path: str, around: frozenset[int]) -> None:
        if id(x) in around:
            return
        if adapter_of(x) is not None:
            arrays[path] = x
            return
        for key, part in (parts_of(x) or {}).items():
            look(part, path_of(path, key), around | {id(x)})

    look(output, "output", frozenset())
    return arrays
