"""Compares two models on the same inputs, also in training, and finds where they first part."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from fmapper.errors import ConversionError
from fmapper.progress import step
from fmapper.tracebacks import short_traceback
from fmapper.verification.differences import (
    CONVERTED,
    Difference,
    difference,
    divergence,
    pairs_of,
)
from fmapper.verification.models.turns import in_turn
from fmapper.verification.report import Parting, Report, part_at

if TYPE_CHECKING:
    from fmapper.verification.models.side import Side
    from fmapper.verification.outputs import Outputs
    from fmapper.verification.pairing import ArrayRules
    from fmapper.verification.training import Plan


@short_traceback
@in_turn
def verify(
    a: Any,
    b: Any,
    *inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    gradients: bool = False,
    steps: int = 0,
    optimizer: Any = "sgd",
    learning_rate: float | None = None,
    loss: Any = None,
    rules: ArrayRules | Literal["transfer"] | None = None,
    train: bool | Literal["both"] | None = None,
    inputs_of_b: Any = None,
    outputs_of_b: Callable[[Any], Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    layers: bool = False,
) -> Report:
    """Tests whether two models compute the same, and if not, finds where they first part.

    Both are called with the same inputs, and neither is changed. They may be of any frameworks,
    converted or written by hand. If their outputs differ and both can be recorded, the report names
    the first operation whose operands agree and whose result does not; results are paired by their
    values, so names may differ.

    The share of rounding in a difference is measured: `a` is compared with itself after perturbing
    its weights and inputs by a rounding, and both are run in float64, if they can be.
    `Report.undecided` lists what could not be decided.

    Args:
        a: A model of any framework, or any callable; or the path of goldens from `record_goldens`.
            These contain inputs and mode, and the recorded outputs, gradients and steps are
            compared. A bare function belongs to a framework other than that of the other model, if
            that can trace it; otherwise to the framework of its inputs. A NumPy function is called
            with the inputs as they are.
        b: The other one.
        inputs: The inputs of both; arrays are moved to the backend of each model.
        example_kwargs: The same by keyword, as `convert` takes them.
        gradients: Compare the gradient of each parameter, and the arrays that a call changes.
        steps: Train both for this many steps, and compare their parameters after each.
        optimizer: `"sgd"`, `"momentum"` or `"adam"`, computed alike for both; or a pair of one of
            each framework: a `torch.optim.Optimizer` of the model, or a function that makes one
            for a module or for its parameters; a transformation of optax for models of JAX, which
            sees parameters in dicts, nested at the dots of their names.
        learning_rate: The learning rate of an optimiser by name; None for one so small that
            training does not amplify roundings.
        loss: A function of the output that returns a scalar, or a pair of such functions, one for
            each framework. None: the sum of the means of all floating arrays of the output with
            fixed weights, so that every element of the output counts.
        rules: The pairing of parameters: rules from the names and layouts of `fmapper.state(a)` to
            those of `fmapper.state(b)`; `"transfer"` to find them. None if names are equal, or
            `convert` made one of the models. Outputs alone need none.
        train: Whether to call both in training; None for each model's current mode, `"both"` for
            one mode after the other. Dropout in training is compared by means and spreads over
            seeds.
        inputs_of_b: The inputs of `b` if they differ: a tuple, a dict of inputs by keyword, or a
            function that makes one from the inputs of `a`.
        outputs_of_b: A function that brings the output of `b` into the form of that of `a`.
        rtol: The allowed difference, relative to the largest element; None for the measured one.
        atol: The allowed absolute difference.
        exact: Run `a` in float64 even if the outputs agree.
        layers: Compare every operation of both, so that the report has `layers` and can plot them.

    Raises:
        ConversionError: `optimizer`, `loss` or `inputs_of_b` is invalid, or a model cannot be
            trained.
        StructureMismatchError: Parameters cannot be paired; says what to pass.

    Examples:
        >>> import fmapper, torch
        >>> linear = torch.nn.Linear(2, 3)
        >>> x = torch.ones(4, 2)
        >>> bool(fmapper.verify(linear, fmapper.convert(linear, "jax", (x,)), x))
        True
    """
    from fmapper.verification.training import check_optimizers

    if steps < 0:
        raise ConversionError(f"steps={steps}: a model is trained for 0 steps or more")
    if isinstance(a, str | os.PathLike):
        from fmapper.verification.goldens.file import read_goldens

        a = read_goldens(a)
        if inputs or example_kwargs or train is not None:
            raise ConversionError(
                "goldens hold their inputs and the mode in which they were recorded. Leave out "
                "inputs and train; inputs_of_b changes what the other model is called with."
            )
    settings: dict[str, Any] = {
        "gradients": gradients, "steps": steps, "optimizers": check_optimizers(optimizer),
        "learning_rate": learning_rate, "loss": loss, "rules": rules, "inputs_of_b": inputs_of_b,
        "outputs_of_b": outputs_of_b, "exact": exact, "layers": layers,
    }  # fmt: skip
    given = (a, b, inputs, example_kwargs or {}, rtol, atol)
    if train != "both":
        return compare(*given, train=train, **settings)
    return _join(compare(*given, train=False, **settings), compare(*given, train=True, **settings))


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
    gradients: bool = False,
    steps: int = 0,
    optimizers: tuple[Any, Any] = ("sgd", "sgd"),
    learning_rate: float | None = None,
    loss: Any = None,
    rules: Any = None,
    inputs_of_b: Any = None,
    outputs_of_b: Callable[[Any], Any] | None = None,
) -> Report:
    """Compares two models like `verify` in one mode; None for the current mode of each."""
    from fmapper.verification.location import locate, worst_by_layer
    from fmapper.verification.losses import make_losses
    from fmapper.verification.models.side import make_sides
    from fmapper.verification.outputs import compare_outputs
    from fmapper.verification.random import compare_draws
    from fmapper.verification.training import Plan

    with step(f"comparing {type(a).__name__} and {type(b).__name__}") as say:
        sides = make_sides(a, b, inputs, kwargs, train, inputs_of_b, outputs_of_b)
        if sides[0].is_recorded:
            gradients, steps, optimizers = sides[0].recorded_plan(loss)
        compared = compare_outputs(sides, rtol, atol)
        mode = "train" if sides[0].trains() else "eval"
        place = _settle(sides, compared, mode) if compared.strict else None
        draws = compare_draws(compared) if rtol is None else ()  # may judge outputs again
        report = Report(compared.differences, undecided=tuple(compared.undecided), draws=draws)
        report = replace(report, divergence=_divergence(compared))
        if gradients or steps:
            say("training both")
            losses = functools.partial(make_losses, sides, loss)
            plan = Plan(losses, steps, optimizers, learning_rate, rtol, atol or 0.0)
            report = _add_training(report, sides, compared, plan, rules, mode)
        agree = all(outcome.ok for outcome in (*report.outputs, *report.draws))
        if not agree:
            say("looking for the first operation that differs")
            weights = next((outcome for outcome in report.weights if not outcome.ok), None)
            drawn = next((outcome for outcome in report.draws if not outcome.ok), None)
            first: Difference | None = None
            if weights is not None:
                first = part_at(weights, "weights", name=weights.path, mode=mode)
            elif drawn is not None and all(outcome.ok for outcome in report.outputs):
                first = part_at(drawn, "draws", name=drawn.path, mode=mode)
            first = first or place or locate(sides, compared, mode)
            report = replace(report, first=first or report.first)
        by_layer = worst_by_layer(sides, compared) if layers else ()
        if (exact or not agree) and not compared.random:
            say(f"running {type(a).__name__} in float64")
            report = replace(report, exact=compared.exact())
        return replace(report, layers=by_layer, modes="" if agree else _other_modes(sides))


def _add_training(
    report: Report, sides: tuple[Side, Side], compared: Outputs, plan: Plan, rules: Any, mode: str
) -> Report:
    """Adds gradients, steps and buffers to a report."""
    from fmapper.verification.pairing import pair_arrays
    from fmapper.verification.training import (
        compare_buffers,
        compare_training,
        compare_weights,
        first_parting,
    )

    trials = sides[0].trial, sides[1].trial
    adapters = sides[0].adapter, sides[1].adapter
    if trials[0] is None or trials[1] is None:
        side = sides[trials[0] is not None]
        raise ConversionError(
            f"{type(side.model).__name__} cannot be trained by verify: it is not a model of a "
            "framework with gradients. Leave out gradients and steps, or pass a module of torch, "
            "a model of JAX, or (function, parameters)."
        )
    both = (trials[0], trials[1])
    inputs = tuple((side.args, side.kwargs) for side in sides)
    pairing = pair_arrays(sides[0].model, sides[1].model, adapters, both, rules, inputs)
    weights = compare_weights(both, pairing, plan)
    buffers, lacking = compare_buffers(
        sides, pairing, plan, compared.unit, double=compared.can_double
    )
    undecided = [*report.undecided, *lacking]
    infinite = next(
        (outcome for outcome in compared.differences if outcome.error == float("inf")), None
    )
    if infinite is not None:
        undecided.append(f"gradients and steps: the losses are not comparable, since {infinite}")
        return replace(report, weights=weights, buffers=buffers, undecided=tuple(undecided))
    if compared.random:
        undecided.append(f"gradients and steps: {compared.random}")
        return replace(report, weights=weights, buffers=buffers, undecided=tuple(undecided))
    trained = compare_training(
        sides[0], both, pairing, plan, compared.unit, double=compared.can_double
    )
    first: Parting | None = None
    wrong = next((outcome for outcome in buffers if not outcome.ok), None)
    off = next((outcome for outcome in weights if not outcome.ok), None)
    if off is not None:
        first = part_at(off, "weights", name=off.path, mode=mode)
    elif wrong is not None:
        first = part_at(wrong, "buffers", name=wrong.path, mode=mode)
    else:
        first = first_parting(trained, mode)
    return replace(
        report, weights=weights, buffers=buffers, loss=trained.loss, gradients=trained.gradients,
        steps=trained.steps, undecided=(*undecided, *trained.undecided), first=first,
    )  # fmt: skip


def _settle(sides: tuple[Side, Side], compared: Outputs, mode: str) -> Parting | None:
    """Decides whether a table in single precision explains differences in float64.

    If the first operation that differs has no such table as operand, they are not allowed.
    """
    from fmapper.verification.location import locate

    loose = compared.differences
    if not all(outcome.ok for outcome in loose):
        return None
    compared.differences = compared.strict
    place = locate(sides, compared, mode)
    if place is None or place.rounded:
        compared.differences = loose
        return None
    compared.undecided.clear()
    return place


def _divergence(compared: Outputs) -> float | None:
    """Returns the divergence of the logits; None if the output has no such field."""
    for pair in compared.pairs:
        field = pair.path.rpartition(".")[2]
        if "logits" in field and not pair.note and pair.x.ndim and pair.x.shape == pair.y.shape:
            return divergence(pair.x, pair.y)
    return None


def _other_modes(sides: tuple[Side, Side]) -> str:
    """Says which of two models was called in training; empty if both or none were."""
    a, b = (side.trains() for side in sides)
    if a is b:
        return ""
    return f"{'ab'[b]} was called in training mode, and {'ab'[a]} in evaluation mode"


def _join(evaluation: Report, training: Report) -> Report:
    """Merges the reports of both modes."""

    def name_with(outcomes: tuple[Difference, ...], mode: str) -> tuple[Difference, ...]:
        return tuple(replace(outcome, path=f"{mode}: {outcome.path}") for outcome in outcomes)

    def both(field: str) -> Any:
        ours, theirs = getattr(evaluation, field), getattr(training, field)
        return (*name_with(ours, "eval"), *name_with(theirs, "train"))

    return replace(
        training,
        **{field: both(field) for field in ("outputs", "gradients", "buffers", "draws")},
        steps=tuple(
            (*name_with(of_eval, "eval"), *name_with(of_train, "train"))
            for of_eval, of_train in zip(evaluation.steps, training.steps, strict=False)
        ),
        first=evaluation.first or training.first,
        exact=evaluation.exact or training.exact,
        layers=evaluation.layers,
        divergence=evaluation.divergence,
        loss=training.loss if evaluation.loss is None or evaluation.loss.ok else evaluation.loss,
        weights=evaluation.weights or training.weights,
        undecided=tuple(dict.fromkeys((*evaluation.undecided, *training.undecided))),
    )


def differences(a: Any, b: Any) -> list[Difference]:
    """Compares two outputs, allowing for rounding: returns one difference per array."""
    return [difference(pair, CONVERTED) for pair in pairs_of(a, b)]
