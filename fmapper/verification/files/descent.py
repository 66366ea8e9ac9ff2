"""Runs a trial and trains it by gradient descent, from slightly perturbed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fmapper.verification.arrays import dtype_of, move, to_host, widen
from fmapper.verification.models.trial import Call, Trial

STEPS = 5


def descent(
    trial: Trial, leaves: Callable[[Call], list[Any]] = lambda call: call.leaves
) -> Callable[..., dict[str, Any]]:
    """Returns a function that runs a model and trains it for five steps.

    The loss is the sum of the means of all floating outputs times `cos(0), cos(1), ...`.

    Args:
        trial: The model.
        leaves: Returns the arrays in the output of a call, in order.

    Returns:
        A function of the learning rate, of a perturbation `off` and, by keyword, of whether to
        compute in `double` precision: weights are first multiplied by `1 + off * cos(0), 1 + off *
        cos(1), ...`. It returns NumPy arrays: `output.0` and so on, `gradient.NAME`, and
        `after.NAME`, the parameters after the steps; or the outputs and `refused`, the reason why
        the framework cannot differentiate the model. With a perturbation also `weight.NAME`, the
        parameters before the steps. With `seeds` it returns the result of `Trial.draw` instead.
        `weights` replace those of the model.
    """

    def run(
        rate: float, off: float, *, double: bool = False, seeds: Sequence[int] = (),
        weights: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        held = trial.weights if weights is None else weights
        weights = {name: move(widen(x) if double else x, off) for name, x in held.items()}
        if seeds:
            return trial.draw(weights, seeds, double=double)
        results = {f"weight.{name}": x for name, x in weights.items()} if off else {}
        call = trial.call(weights, double=double)
        outputs = [to_host(x) for x in leaves(call)]
        results |= {f"output.{i}": x for i, x in enumerate(outputs)}
        if call.draws is not None:
            results["draws"] = call.draws
        if not weights or not any(x.dtype.name.startswith(("float", "bfloat")) for x in outputs):
            return results
        return results | _train(trial, weights, rate, double=double)

    return run


def _train(
    trial: Trial, weights: Mapping[str, Any], rate: float, *, double: bool
) -> dict[str, Any]:
    """Returns the gradients, and the arrays that five steps have changed."""
    import numpy as np

    results: dict[str, Any] = {}
    state = None
    learned: list[str] = []
    before = {name: np.array(to_host(x)) for name, x in trial.state.items()}
    for step in range(STEPS):
        slope = trial.slope(weights, state=state, double=double)
        if slope.refused:
            return {"refused": np.array(slope.refused)}
        if not slope.gradients:
            return {}
        if step == 0:
            learned = [name for name in weights if name in slope.gradients]
            results = {f"gradient.{name}": slope.gradients[name] for name in learned}
        state = slope.state
        rates = {name: np.asarray(rate, x.real.dtype) for name, x in weights.items()}
        weights = {
            name: (x - rates[name] * slope.gradients[name]).astype(x.dtype)
            if name in slope.gradients
            else x
            for name, x in weights.items()
        }
    results |= {f"after.{name}": weights[name] for name in learned}
    floats = {n: x for n, x in before.items() if dtype_of(x).startswith(("float", "bfloat"))}
    for name in (*trial.fixed, *floats):
        results[f"fixed.{name}"] = np.zeros(())  # a frozen array must not get a gradient
    for name, old in floats.items():  # such as batch statistics
        new = to_host((state or {})[name])
        if not np.array_equal(new, old):
            results[f"after.{name}"] = new
    return results
