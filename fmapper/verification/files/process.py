"""Compares a translated file with what its source gave, in a process of its own.

There is no fmapper and no framework of the source in that process: `script_of` makes one script of
this module, of those that it imports, and of the runner of a framework.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fmapper.verification.models.draws import Draws
from fmapper.verification.models.spreads import Spread

STEPS = 5
Arrays = dict[str, Any]


class Runner(ABC):
    """Runs and trains the model of a file in its framework.

    Args:
        net: The file, as a module.
        name: The class of the model, or its function.
        given: What the file is compared with; see `compare_file`.
        draws: The random numbers of calls.
    """

    def __init__(self, net: Any, name: str, given: Mapping[str, Any], draws: Draws) -> None:
        self.net, self.name, self.draws = net, name, draws
        self.double = "double" in given
        self.weights = {k: self.array(value) for k, value in pick(given, "weight.").items()}
        self.given = given
        self.args, self.kwargs = map(self._build, json.loads(str(given["inputs"])))

    @classmethod
    @abstractmethod
    def prepare(cls, draws: Draws, *, double: bool) -> None:
        """Has the framework compute in a precision and draw from `draws`, before a file is run."""

    @abstractmethod
    def array(self, value: Any) -> Any:
        """Returns an array of the framework."""

    @abstractmethod
    def order(self, value: dict[str, Any]) -> list[str]:
        """Returns the keys of a dict in the order in which the source flattens it."""

    @abstractmethod
    def make(self, *, train: bool) -> Any:
        """Returns the model with `weights` and without dropout."""

    @abstractmethod
    def run(self, model: Any, *, train: bool) -> list[Any]:
        """Returns the outputs of a model."""

    @abstractmethod
    def learn(self, model: Any, *, train: bool) -> tuple[list[Any], Any]:
        """Returns the outputs of a model, and its gradients."""

    @abstractmethod
    def descend(self, model: Any, slopes: Any, rate: float) -> Any:
        """Returns the model after a step."""

    @abstractmethod
    def run_with_dropout(
        self, rate_of: Callable[[Any], float]
    ) -> Callable[[int], list[Any]] | None:
        """Returns a function of a seed that gives the outputs in training, with its own draws.

        Dropout has the rates that those of layers which share no mask become; None where neither
        dropout nor other random numbers are drawn.
        """

    @abstractmethod
    def gradients_by_name(self, model: Any, slopes: Any) -> Arrays:
        """Returns gradients by the names of the source, and in its layouts."""

    @abstractmethod
    def arrays_by_name(self, model: Any) -> Arrays:
        """Returns the arrays of the model by the names of the source, and in its layouts."""

    def leaves(self, value: Any) -> list[Any]:
        """Returns the arrays in an output, in the order of the source."""
        if isinstance(value, dict):
            value = [value[key] for key in self.order(value)]
        if isinstance(value, tuple | list):
            return [leaf for item in value for leaf in self.leaves(item)]
        return [value] if hasattr(value, "dtype") else []

    def join(self, arrays: Arrays) -> Arrays:
        """Puts slices and rows of arrays together as in the source."""
        import numpy as np

        for end, slices in getattr(self.net, "SLICES", {}).items():
            for name in [name for name in self.weights if f".{name}".endswith(f".{end}")]:
                parts = [name.removesuffix(end) + key for key in slices]
                if all(part in arrays for part in parts):
                    arrays[name] = np.concatenate([arrays.pop(part) for part in parts])
        for path, count in reversed(getattr(self.net, "STACKED", {}).items()):
            for name in [name for name in arrays if name.startswith(f"{path}.0")]:
                rest = name[len(path) + 2 :]
                rows = [arrays.pop(f"{path}.{i}{rest}") for i in range(count)]
                arrays[path + rest] = np.stack(rows)
        return arrays

    def split(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yields the arrays of blocks that are one module, with their names."""
        for path, count in getattr(self.net, "SCANNED", {}).items():
            rest = name.removeprefix(f"{path}.")
            if rest != name and not rest[0].isdigit():
                for i in range(count):
                    yield from self.split(f"{path}.{i}.{rest}", value[i])
                return
        yield name, value

    def _build(self, encoded: Any) -> Any:
        """Returns an argument from its encoding."""
        if isinstance(encoded, list):
            return tuple(self._build(item) for item in encoded)
        if not isinstance(encoded, dict):
            return encoded
        if "record" in encoded:
            return getattr(self.net, encoded["record"])(**self._build(encoded["held"]))
        if "dict" in encoded:
            return {key: self._build(item) for key, item in encoded["dict"].items()}
        return self.array(self.given[f"input.{encoded['array']}"])


def pick(given: Mapping[str, Any], prefix: str) -> Arrays:
    """Returns the entries whose keys have a prefix, without it."""
    return {key[len(prefix) :]: given[key] for key in given if key.startswith(prefix)}


def distance(value: Any, wanted: Any, scale: float) -> float:
    """Returns the largest difference, relative to the largest element or a scale."""
    import numpy as np

    value, wanted = np.asarray(value), np.asarray(wanted)
    if value.shape != wanted.shape:
        return float("inf")
    if not value.size:
        return 0.0
    a, b = value.astype(np.complex128), wanted.astype(np.complex128)
    both = np.isnan(a) & np.isnan(b) | (a == b)
    apart = np.abs(np.where(both, 0, a) - np.where(both, 0, b))
    finite = np.abs(b[np.isfinite(b)])
    error = float(apart.max() / max(finite.max(initial=0.0), scale, 1e-30))
    return float("inf") if math.isnan(error) else error


def largest_distance(arrays: Arrays, wanted: Arrays, scale: float) -> float:
    """Returns the largest distance of arrays from those of the same name."""
    errors = [
        distance(arrays[key], value, scale) if key in arrays else float("inf")
        for key, value in wanted.items()
    ]
    return max([*errors, 0.0])


def distance_with_dropout(runner: Runner, still: list[Any]) -> float:
    """Returns how far means and spreads over seeds are from those of the source.

    Dropout of one rate of the source is on at a time, or of none of them (nan). It is drawn at one
    half at least: where dropout is does not depend on its rate, and shows best there.
    """
    errors = []
    given = runner.given
    rates = given["train.rates"].tolist()
    for i, chosen in enumerate(rates):

        def rate_of(rate: Any, chosen: float = chosen) -> Any:
            if rate not in rates:
                return rate
            return max(rate, 0.5) if rate == chosen else 0.0

        spread = Spread(still)
        run = runner.run_with_dropout(rate_of)
        for seed in range(int(given["train.seeds"])):
            spread.add(still if run is None else run(seed))
        errors.append(spread.distance(given[f"train.spread.{i}"]))
    return max(errors)


def compare_mode(runner: Runner, mode: str) -> dict[str, float]:
    """Returns the distances of outputs, gradients and steps in a mode."""
    import numpy as np

    given, train = runner.given, mode == "train"
    numbered = pick(given, f"{mode}.output.")
    wanted = [numbered[str(i)] for i in range(len(numbered))]
    expected = pick(given, f"{mode}.gradient.")
    model = runner.make(train=train)
    slopes = None
    if expected:
        outputs, slopes = runner.learn(model, train=train)
    else:
        outputs = runner.run(model, train=train)
    report = {}
    drawn = runner.draws.drawn
    if drawn != given.get(f"{mode}.draws", drawn):
        report[f"{mode} draws"] = 1.0  # though these numbers may make no difference
    if len(outputs) != len(wanted):
        return report | {f"{mode} outputs": float("inf")}
    errors = [distance(a, b, 1e-6) for a, b in zip(outputs, wanted, strict=True)]
    report[f"{mode} outputs"] = max([*errors, 0.0])
    if f"{mode}.rates" in given:
        report[f"{mode} dropout"] = distance_with_dropout(runner, wanted)
    if not expected:
        return report
    largest = max([float(np.abs(g).max(initial=0)) for g in expected.values()] + [0.0])
    arrays = runner.join(runner.gradients_by_name(model, slopes))
    fixed = {k: 0 * arrays[k] for k in pick(given, f"{mode}.fixed.") if k in arrays}
    report[f"{mode} gradients"] = largest_distance(arrays, fixed | expected, 1e-3 * largest)
    for step in range(STEPS):
        if step:
            _, slopes = runner.learn(model, train=train)
        model = runner.descend(model, slopes, float(given[f"{mode}.rate"]))
    arrays = runner.join(runner.arrays_by_name(model))
    report[f"{mode} steps"] = largest_distance(arrays, pick(given, f"{mode}.after."), 1e-3)
    return report


def compare_file(kind: type[Runner], file: str, data: str, name: str, modes: list[str]) -> None:
    """Prints the distances of a file from its source, as JSON.

    Args:
        kind: Runs the model.
        file: The path of the file.
        data: That of the arrays, an `npz`: `weight.NAME` and `input.N`; `inputs`, the arguments as
            JSON; `double`, if both compute in double precision; and of each mode what `descent`
            gives.
        name: The class of the model, or its function.
        modes: `eval`, `train` or both.
    """
    import numpy as np

    given = dict(np.load(data, allow_pickle=False))
    draws = Draws()
    kind.prepare(draws, double="double" in given)
    spec = importlib.util.spec_from_file_location("translated", file)
    assert spec is not None
    assert spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    sys.modules["translated"] = net
    spec.loader.exec_module(net)
    runner = kind(net, name, given, draws)
    report: dict[str, float] = {}
    for mode in modes:
        report |= compare_mode(runner, mode)
    print(json.dumps(report))
