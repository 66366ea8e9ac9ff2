"""Records the results of a model, and replays them in place of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fmapper.backends.compute import Observation
from fmapper.backends.models import Models
from fmapper.errors import ConversionError, GoldensError
from fmapper.progress import step
from fmapper.tracebacks import short_traceback
from fmapper.verification.arrays import UNITS, dtype_of
from fmapper.verification.goldens.file import (
    Goldens,
    GoldenSensitivity,
    GoldenTraining,
    Observed,
    write_goldens,
)
from fmapper.verification.models.side import Sensitivity, Side, arrays_in, make_sides
from fmapper.verification.models.trial import Call, Loss, Slope, Trial
from fmapper.verification.models.turns import in_turn
from fmapper.verification.optimizers import check_name

if TYPE_CHECKING:
    from fmapper.verification.training import Measured


@short_traceback
@in_turn
def record_goldens(
    model: Any,
    inputs: Any,
    path: str | os.PathLike[str],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    gradients: bool = False,
    steps: int = 0,
    optimizer: str = "sgd",
    learning_rate: float | None = None,
    loss: Any = None,
    train: bool | None = None,
) -> None:
    """Writes the results of a model to a file that `verify` accepts in its place.

    The file contains inputs, outputs, the results of all operations, gradients and the state after
    each step, and the effect of roundings on them. To compare a model with it, neither this model
    nor its framework is needed.

    Args:
        model: A model of any framework, which is not changed.
        inputs: Its inputs: a tuple, or a single array.
        path: The file, usually with the ending `.safetensors`; it is replaced as a whole.
        example_kwargs: Inputs by keyword.
        gradients: Record the gradient of each parameter.
        steps: Record this many steps of training.
        optimizer: The optimiser by name, as for `verify`.
        learning_rate: As for `verify`.
        loss: A function of the output that returns a scalar; `verify` then needs the same for the
            other model. None: as for `verify`.
        train: Whether to record training; None for the model's current mode.

    Raises:
        ConversionError: The model cannot be recorded or trained.
        GoldensError: No file can have this name; or inputs or outputs hold an object
            other than an array, number, text, list or dict.
    """
    from fmapper.verification.losses import make_losses
    from fmapper.verification.outputs import ROUNDING_OF_DOUBLE, compare_outputs
    from fmapper.verification.pairing import floats
    from fmapper.verification.training import (
        Plan,
        measure_training,
        table_unit,
    )

    check_name(optimizer)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    with step(f"recording {type(model).__name__}") as say:
        sides = make_sides(model, model, args, example_kwargs or {}, train)
        side = sides[0]
        trial = side.trial
        if trial is None or side.adapter is None:
            raise ConversionError(
                f"{type(model).__name__} is not a model that can be recorded. Pass a module of "
                "torch, a model of JAX, or (function, parameters)."
            )
        compared = compare_outputs(sides, None, None, calm=side.trains())
        double = compared.can_double
        unit = 2 * compared.unit
        call = side.call(double=double)
        assert call is not None
        say("measuring its rounding")
        table = 2 * table_unit(compared.unit)
        moves = [(unit, False), *([(table, True), (ROUNDING_OF_DOUBLE, True)] if double else [])]
        sensitivity = []
        for off, wide in moves:
            distances = side.sensitivity(off, double=wide)
            sensitivity.append(GoldenSensitivity(off, wide, distances.outputs, distances.state))
        run = side.watch(None, double=double) or []
        limits = side.tolerance(run, None, table if double else unit, double=double)
        training = None
        if gradients or steps:
            say("training it")
            plan = Plan(
                lambda: make_losses(sides, loss), steps, (optimizer, optimizer), learning_rate
            )
            measured = measure_training(trial, plan, compared.unit, double=double)
            if measured.course.refused:
                raise ConversionError(f"it has no gradients: {measured.course.refused}")
            training = GoldenTraining(
                optimizer, measured.rate, double, loss is not None, measured.course.loss,
                dict(measured.course.gradients), measured.course.states, measured.own,
                measured.coarse() if double else measured.own,
            )  # fmt: skip
        write_goldens(
            Goldens(
                model=type(model).__name__,
                framework=side.adapter.name,
                train=side.trains(),
                args=side.args,
                kwargs=dict(side.kwargs),
                output=compared.values[0],
                wide=compared.wide[0] if compared.wide is not None else None,
                weights=dict(trial.weights),
                fixed=dict(trial.fixed),
                state=floats(trial.state),
                after=floats(call.state),
                aliases=dict(trial.aliases),
                draws=call.draws or "",
                rates=sorted(call.rates),
                unit=side.unit,
                sensitivity=sensitivity,
                operations=[
                    Observed(observation, limit)
                    for observation, limit in zip(run, limits, strict=True)
                ],
                training=training,
            ),
            path,
        )


@dataclass(frozen=True)
class GoldenSide(Side):
    """Goldens in place of a model: `model` holds the goldens."""

    is_recorded: ClassVar[bool] = True

    @classmethod
    def of(cls, goldens: Goldens) -> GoldenSide:
        """Returns the side of goldens."""
        return cls(goldens, None, goldens.args, goldens.kwargs, goldens.train)

    def output(self) -> Any:
        """Returns the output in the precision of the model."""
        return self.model.output

    def trains(self) -> bool:
        """Returns whether the call was in training."""
        return bool(self.model.train)

    @property
    def trial(self) -> Trial:
        """The arrays of the model."""
        return _GoldenTrial(self.model)

    def call(self, off: float = 0.0, seed: int = 0, *, double: bool = False) -> Call:
        """Returns the recorded call; `sensitivity` has the effect of perturbations."""
        assert not off
        call = self.trial.call({}, double=double)
        return call if double else replace(call, state=self._narrow(call.state))

    def output_in_float64(self) -> Any | None:
        """Returns the output in double precision; None if the model could not compute in it."""
        return self.model.wide

    def watch(
        self, other: Models | None, off: float = 0.0, seed: int = 0, *, double: bool = False
    ) -> list[Observation]:
        """Returns the operations, in the best precision of the model."""
        return [operation.observation for operation in self.model.operations]

    def tolerance(
        self, run: Sequence[Observation], other: Models | None, unit: float, *, double: bool
    ) -> list[float]:
        """Returns the measured tolerance of each result."""
        return [max(4 * unit, operation.tolerance) for operation in self.model.operations]

    def sensitivity(self, unit: float, *, double: bool) -> Sensitivity:
        """Returns how far the model is from itself, scaled from the measured roundings.

        The effect of a small rounding is proportional to it.
        """
        measured = [entry for entry in self.model.sensitivity if entry.double == double]
        if not measured:
            return Sensitivity()
        near = min(measured, key=lambda entry: abs(entry.off - unit))
        share = unit / near.off if near.off else 1.0
        outputs, state = (
            {key: share * distance for key, distance in distances.items()}
            for distances in (near.outputs, near.state)
        )
        return Sensitivity(outputs, state)

    def recorded_plan(self, loss: Any) -> tuple[bool, int, tuple[Any, Any]]:
        """Returns whether there are gradients, and how many steps of which optimiser.

        Raises:
            ConversionError: They were recorded with a loss and none is passed, or the reverse.
        """
        training = self.model.training
        if training is None:
            return False, 0, ("sgd", "sgd")
        if training.own_loss != (loss is not None):
            raise ConversionError(
                "the goldens were recorded with loss=: pass the same one for the model"
                if training.own_loss
                else "the goldens were recorded without loss=: leave it out"
            )
        return True, len(training.states), (training.optimizer, training.optimizer)

    def recorded_course(self, *, double: bool) -> Measured | None:
        """Returns the training of the model."""
        from fmapper.verification.training import Course, Measured

        training = self.model.training
        if training is None:
            raise GoldensError("the goldens have no gradients")
        if double and not training.double:
            raise GoldensError("the goldens are of single precision")
        gradients, states = training.gradients, training.states
        if training.double and not double:
            gradients, *states = map(self._narrow, (gradients, *states))
        course = Course(training.loss, gradients, states)
        distances = training.own if double or not training.double else training.coarse
        return Measured(course, training.rate, distances, lambda: training.coarse)

    def _narrow(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Casts arrays that were computed in double precision to the model's dtypes."""
        held = {**self.model.weights, **self.model.fixed, **self.model.state}
        return {n: x.astype(held[n].dtype) if n in held else x for n, x in arrays.items()}

    @property
    def unit(self) -> float:
        """A rounding in the coarsest dtype that the model computed in."""
        return float(self.model.unit)

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes of the weights and of the unit."""
        coarse = {name for name, unit in UNITS.items() if unit == self.model.unit}
        return frozenset({dtype_of(x) for x in self.model.weights.values()} | coarse)


class _GoldenTrial(Trial):
    """The arrays of goldens, and their one call."""

    def __init__(self, goldens: Goldens) -> None:
        self._goldens = goldens
        self.weights = goldens.weights
        self.fixed = goldens.fixed
        self.state = goldens.state
        self.aliases = goldens.aliases

    def call(self, weights: Mapping[str, Any], *, inputs: Any = None, double: bool = False) -> Call:
        """Returns the call that was recorded."""
        goldens = self._goldens
        output = goldens.wide if double and goldens.wide is not None else goldens.output
        rates = frozenset(goldens.rates)
        return Call(output, _flatten, goldens.after, goldens.draws, rates)

    def slope(
        self, weights: Mapping[str, Any], loss: Loss | None = None, *,
        state: Mapping[str, Any] | None = None, double: bool = False,
    ) -> Slope:  # fmt: skip
        """Raises, because goldens cannot be differentiated."""
        return Slope(refused="goldens cannot be differentiated")

    def draw(self, weights: Any, seeds: Any, *, double: bool = False) -> dict[float, Any]:
        """Returns nothing: goldens hold no random numbers."""
        return {}

    def noise(self, weights: Any, seeds: Any, *, double: bool = False) -> list[list[Any]]:
        """Returns nothing: goldens hold no random numbers."""
        return []


def _flatten(output: Any) -> list[Any]:
    return [*arrays_in(output).values()]
