"""Compares a translated file with the results of its source, in a separate process.

The process does not import the framework of the source:

    python -m fmapper.verification.files.process FRAMEWORK FILE DATA NAME [MODE ...]

It prints the distances as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from fmapper.backends.discovery import get_adapter
from fmapper.backends.models import Models
from fmapper.verification.arrays import is_floating, widen
from fmapper.verification.files.descent import descent
from fmapper.verification.models.spreads import Spread, with_effect
from fmapper.verification.models.trial import Call, Trial
from fmapper.verification.pairing import Pairing, arrays_of, follow_elements

Arrays = dict[str, Any]
_BLOCK = 1 << 20  # elements that are compared at a time, in complex numbers of double precision


@dataclass
class Translated:
    """The model of a file in a mode.

    Attributes:
        net: The file, as a module.
        name: The class of the model, or its function.
        target: The adapter of its framework.
        given: The data of the source; see `compare_file`.
        train: The mode.
    """

    net: ModuleType
    name: str
    target: Models
    given: Mapping[str, Any]
    train: bool

    @cached_property
    def weights(self) -> Arrays:
        """The arrays of the source by name, perturbed if they were for the source."""
        return pick(self.given, "weight.")

    @cached_property
    def trial(self) -> Trial:
        """The model as it is called and trained, with the arrays of the source."""
        return self._fill(self.weights)

    @cached_property
    def pairing(self) -> Pairing:
        """The pairing of the source's elements with the model's, by `load_weights`."""
        ours = {name: x for name, x in self.weights.items() if is_floating(x)}

        def fill(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
            return arrays_of(self._fill({**self.weights, **numbers}))

        return Pairing(*follow_elements(fill, ours, arrays_of(self.trial)))

    def run(self, rate: float) -> Arrays:
        """Runs `descent`; results have the names and layouts of the source.

        Arrays that the model does not hold get no gradient, and stay as they are.
        """
        import numpy as np

        pushed = self.pairing.push({n: x for n, x in self.weights.items() if is_floating(x)})
        weights = {
            n: pushed.get(n, x).astype(widen(x).dtype if self.double else x.dtype)
            for n, x in self.trial.weights.items()
        }
        run = descent(self.trial, self._leaves)
        results = run(rate, 0.0, double=self.double, weights=weights)
        slopes = self.pairing.pull(pick(results, "gradient."), add=True)
        after = self.pairing.pull(pick(results, "after."))
        rest = {name: x for name, x in results.items() if name.startswith(("output.", "draws"))}
        return {
            **rest,
            **{f"gradient.{n}": slopes.get(n, np.zeros(x.shape)) for n, x in self.weights.items()},
            **{f"after.{n}": after.get(n, x) for n, x in self.weights.items()},
        }

    def draw(self, seeds: Sequence[int]) -> dict[float, list[list[Any]]]:
        """Returns the outputs for each seed by the rate of dropout, like `Trial.draw`."""
        drawn = self.trial.draw(self.trial.weights, seeds, double=self.double)
        return {rate: [[x[i] for i in self._order] for x in every] for rate, every in drawn.items()}

    def _leaves(self, call: Call) -> list[Any]:
        """Returns the arrays in an output in the order of the source."""
        flat = call.leaves
        places = {id(x): i for i, x in enumerate(flat)}
        order = [places[id(x)] for x in _arrays_in(call.output, by_key="by_key" in self.given)]
        self._order = order if len(order) == len(flat) else [*range(len(flat))]
        return [flat[i] for i in self._order]

    @property
    def double(self) -> bool:
        """Whether both compute in double precision."""
        return "double" in self.given

    def _fill(self, weights: Mapping[str, Any]) -> Trial:
        """Returns the model as a trial, with other arrays."""
        args, kwargs = map(self._build, json.loads(str(self.given["inputs"])))
        model, options = self.target.open_file(self.net, self.name, weights, train=self.train)
        flags = json.loads(str(self.given["flags"]))
        modes = {name: value is self.train for name, value in flags.items()}
        return self.target.trial(model, args, {**kwargs, **modes, **options}, train=None)

    def _build(self, encoded: Any) -> Any:
        """Decodes an argument."""
        if isinstance(encoded, list):
            return tuple(self._build(item) for item in encoded)
        if not isinstance(encoded, dict):
            return encoded
        if "record" in encoded:
            return getattr(self.net, encoded["record"])(**self._build(encoded["held"]))
        if "dict" in encoded:
            return {key: self._build(item) for key, item in encoded["dict"].items()}
        return self.given[f"input.{encoded['array']}"]


def _arrays_in(value: Any, *, by_key: bool) -> list[Any]:
    """Returns the arrays in an output; those of dicts in sorted order if `by_key`."""
    if isinstance(value, dict):
        value = [value[key] for key in (sorted(value) if by_key else value)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _arrays_in(item, by_key=by_key)]
    return [value] if hasattr(value, "dtype") else []


def pick(given: Mapping[str, Any], prefix: str) -> Arrays:
    """Returns the entries whose keys have a prefix, without it."""
    return {key[len(prefix) :]: given[key] for key in given if key.startswith(prefix)}


def compare_mode(model: Translated) -> dict[str, float]:
    """Returns the distances of outputs, gradients and steps in a mode."""
    import numpy as np

    mode = "train" if model.train else "eval"
    given = pick(model.given, f"{mode}.")
    expected = pick(given, "gradient.")
    results = model.run(float(given.get("rate", 0.0)))
    report = {}
    if "draws" in given and results.get("draws", given["draws"]) != given["draws"]:
        report[f"{mode} draws"] = 1.0  # even if these numbers make no difference
    ours, theirs = pick(given, "output."), pick(results, "output.")
    if ours.keys() != theirs.keys():
        return report | {f"{mode} outputs": math.inf}
    report[f"{mode} outputs"] = _largest_distance(theirs, ours, 1e-6)
    if "rates" in given:
        report[f"{mode} dropout"] = _distance_of_dropout(model, given)
    if not expected:
        return report
    if "refused" in results:
        raise ValueError(f"it has no gradients: {results['refused']}")
    largest = max(float(np.abs(g).max(initial=0)) for g in expected.values())
    slopes = pick(results, "gradient.")
    fixed = {k: np.zeros_like(slopes[k]) for k in pick(given, "fixed.") if k in slopes}
    report[f"{mode} gradients"] = _largest_distance(slopes, fixed | expected, 1e-3 * largest)
    after = pick(given, "after.")
    report[f"{mode} steps"] = _largest_distance(pick(results, "after."), after, 1e-3)
    return report


def _distance_of_dropout(model: Translated, given: Mapping[str, Any]) -> float:
    """Returns the distance of means and spreads over seeds from those of the source.

    Dropout of one rate at a time is enabled, at one half at least: the places of dropout do not
    depend on its rate, and are best detected at that rate. The key nan is for all other noise,
    without dropout.
    """
    ours = pick(given, "output.")
    still = [ours[str(i)] for i in range(len(ours))]
    seeds = range(int(given["seeds"]))
    drawn = {str(rate): outputs for rate, outputs in with_effect(model.draw(seeds)).items()}
    rates = [*map(str, given["rates"].tolist())]
    if {*drawn} - {"nan"} != {*rates} - {"nan"}:
        return math.inf
    errors = []
    for i, rate in enumerate(rates):
        spread = Spread(still)
        outputs = drawn.get(rate) or [still]
        for seed in seeds:
            spread.add(outputs[seed % len(outputs)])
        errors.append(spread.distance(given[f"spread.{i}"]))
    return max(errors)


def _largest_distance(arrays: Arrays, wanted: Arrays, scale: float) -> float:
    """Returns the largest distance of arrays from those of the same name."""
    errors = [
        _distance(arrays[key], value, scale) if key in arrays else math.inf
        for key, value in wanted.items()
    ]
    return max([*errors, 0.0])


def _distance(value: Any, wanted: Any, scale: float) -> float:
    """Returns the largest difference, relative to the largest element or a scale."""
    import numpy as np

    value, wanted = np.asarray(value), np.asarray(wanted)
    if value.shape != wanted.shape:
        return math.inf
    if not value.size:
        return 0.0
    ours, theirs = value.reshape(-1), wanted.reshape(-1)
    error = finite = 0.0
    for start in range(0, value.size, _BLOCK):
        a, b = (x[start : start + _BLOCK].astype(np.complex128) for x in (ours, theirs))
        both = np.isnan(a) & np.isnan(b) | (a == b)
        distances = np.abs(np.where(both, 0, a) - np.where(both, 0, b))
        error = np.maximum(error, distances.max())  # which is nan if one of them is
        finite = max(finite, np.abs(b[np.isfinite(b)]).max(initial=0.0))
    error = float(error / max(finite, scale, 1e-30))
    return math.inf if math.isnan(error) else error


def compare_file(
    framework: str, file: str, data: str, name: str, modes: Sequence[str]
) -> dict[str, float]:
    """Returns the distances of a file from its source.

    Args:
        framework: The framework of the file.
        file: Its path.
        data: The path of the data, an `npz`: `weight.NAME` and `input.N`; `inputs`, the arguments
            as JSON; `flags`, further ones that tell the mode, with their values in training;
            `double`, if both compute in double precision; `by_key`, if the source flattens
            dicts by their sorted keys; and for each mode the results of `descent`.
        name: The class of the model, or its function.
        modes: `eval`, `train` or both.
    """
    import numpy as np

    given = dict(np.load(data, allow_pickle=False))
    target = get_adapter(framework, Models)
    spec = importlib.util.spec_from_file_location("translated", file)
    assert spec is not None
    assert spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    sys.modules["translated"] = net
    spec.loader.exec_module(net)
    report: dict[str, float] = {}
    previous: Pairing | None = None
    for mode in modes:
        model = Translated(net, name, target, given, mode == "train")
        if previous is not None and previous.places.keys() == arrays_of(model.trial).keys():
            model.pairing = previous
        report |= compare_mode(model)
        previous = model.pairing
    return report


# XLA can deadlock if computations are dispatched while others run; and the first weights compile
# ten times as fast with keys of rbg.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_TRACEBACK_FILTERING": "off",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
}

if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    _framework, _file, _data, _name, *_modes = sys.argv[1:]
    print(json.dumps(compare_file(_framework, _file, _data, _name, _modes)))
