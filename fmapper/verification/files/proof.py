"""Runs a translated file in a separate process, and compares it with the original model."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.verification.arrays import widen
from fmapper.verification.files.conditions import (
    AWAY,
    LIMITS,
    MOST,
    OWN,
    RATES,
    SEEDS,
    Conditions,
    Results,
    Run,
    are_at_bends,
    learn,
    learn_modes,
    learn_plainly,
)
from fmapper.verification.files.descent import descent
from fmapper.verification.models.spreads import Spread, with_effect

if TYPE_CHECKING:
    from fmapper.verification.models.trial import Trial

_ERROR = re.compile(r"[\w.]*(Error|Exception)\b.*:")


@dataclass(frozen=True, slots=True)
class Proof:
    """The distance of a translated model from its source.

    Attributes:
        errors: `eval outputs`, `eval gradients`, `eval steps` and the same for `train` -> the
            largest difference, relative to the largest element; and `eval draws` if the file draws
            more or fewer random numbers, even if these make no difference.
        own: Likewise, how far the source is from itself with weights off by a rounding.
        data: The data of the comparison: the arrays, inputs and results of the source.
        framework: The framework of the file.
        name: The class of the model in the file.
        refused: Modes in which the source cannot be differentiated, so that only outputs were
            compared -> the reason.
        away: How far the weights were moved, relative to themselves, before the comparison.
        double: Whether both computed in double precision.
        coarse: The half precision in which the model computes; empty if none.
    """

    errors: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    framework: str = ""
    name: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    away: float = 0.0
    double: bool = False
    coarse: str = ""

    def __bool__(self) -> bool:
        bounds = self.bounds
        return bool(self.errors) and all(
            error <= bounds[what] for what, error in self.errors.items()
        )

    def holds(self, mode: str) -> bool:
        """Returns whether everything that was compared in a mode agrees."""
        bounds = self.bounds
        return all(error <= bounds[k] for k, error in self.errors.items() if k.startswith(mode))

    @property
    def bounds(self) -> dict[str, float]:
        """The bound of each error: the contract, or four times the effect of a rounding."""
        bounds = {}
        for what in self.errors:
            distance = self.own.get(what, 0.0)
            bounds[what] = max(
                LIMITS[what.rpartition(" ")[2]], OWN * distance if distance <= MOST else 0.0
            )
        return bounds

    def __str__(self) -> str:
        texts = [
            f"{what} {error:.1e}"
            + (f" (a rounding of its weights: {self.own[what]:.1e})" if self._is_own(what) else "")
            for what, error in self.errors.items()
            if not what.endswith(("draws", "dropout"))
        ]
        texts += [
            f"{what.split()[0]} draws other random numbers than its source"
            for what in self.errors
            if what.endswith("draws")
        ]
        texts += [
            f"{mode} gradients not compared, since the source has none ({why})"
            for mode, why in self.refused.items()
        ]
        texts += [self._tell_dropout(error) for what, error in self.errors.items()
                 if what.endswith("dropout")]  # fmt: skip
        if self.coarse and not self:
            texts.append(
                f"the model computes in {self.coarse}, in which results agree to two digits"
            )
        conditions = [f"with weights moved by {self.away:.1%}"] if self.away else []
        conditions += ["in double precision"] if self.double else []
        if conditions:
            reason = "since a rounding of its own changes its outputs or gradients"
            texts.append(f"{' and '.join(conditions)}, {reason}")
        return ", ".join(texts)

    def _tell_dropout(self, error: float) -> str:
        same = "are those of its source" if error <= LIMITS["dropout"] else "differ"
        return (
            f"all of these without dropout; with it, means and spreads over {SEEDS} seeds {same} "
            f"(within {error:.1f} standard errors)"
        )

    def _is_own(self, what: str) -> bool:
        return self.bounds[what] > LIMITS[what.rpartition(" ")[2]]


@dataclass(frozen=True, slots=True)
class File:
    """A file for another framework, and its inputs.

    Attributes:
        code: The file.
        name: The class of the model in it, or its function.
        modes: `eval`, `train` or both.
        framework: Its framework.
        names: Names of the model's arrays -> those of `weights`, if they differ.
        weights: The NumPy arrays that the file loads, by name.
        inputs: The arguments by position and by keyword, as JSON.
        arrays: The NumPy arrays in these, as `input.N`.
        by_key: Whether the model's framework flattens dicts in the order of their sorted keys.
        coarse: The half precision in which the model computes; empty if none.
        double: Whether to compare in double precision alone, as where arrays are of half precision.
        flags: Further arguments of a call that tell the model its mode -> their values in training.
    """

    code: str
    name: str
    modes: Sequence[str]
    framework: str
    names: Mapping[str, str]
    weights: Mapping[str, Any]
    inputs: Any
    arrays: Mapping[str, Any]
    by_key: bool = False
    coarse: str = ""
    double: bool = False
    flags: Mapping[str, bool] = field(default_factory=dict)

    def prove(self, trial: Callable[[bool], Trial], *, only_evaluation: bool = False) -> Proof:
        """Measures the distance of outputs, gradients and five steps from those of the model.

        The file runs in a fresh process, which does not import the model's framework.

        Args:
            trial: Returns the model in a mode, in training if it is given True.
            only_evaluation: Whether to compare only the outputs in evaluation.

        Raises:
            ConversionError: The file does not run; quotes the output of the process.
        """
        if only_evaluation:
            conditions = Conditions(double=self.double)
            results = conditions.run(descent(trial(False)), RATES[0])
            outputs = {k: v for k, v in results.items() if k.startswith(("output.", "draws"))}
            return self._compare({"eval": Results(outputs, {})}, conditions)
        runs = {mode: descent(trial(mode == "train")) for mode in self.modes}
        proof = None
        for conditions, by_mode in learn_modes(runs, double=self.double):
            try:
                proof = self._compare(by_mode, conditions, runs.get("train"))
            except ConversionError:
                if not conditions.double:
                    raise
                continue  # the file itself requires single precision
            if proof:
                return proof
        if proof is None:
            conditions, by_mode = learn_plainly(runs, double=self.double)
            proof = self._compare(by_mode, conditions, runs.get("train"))
        if proof or conditions.away or conditions.double:
            return proof
        if are_at_bends(runs, by_mode, conditions, proof.errors, proof.bounds):
            conditions = Conditions(AWAY)
            elsewhere = {mode: learn(run, conditions) for mode, run in runs.items()}
            if all(results.are_smooth for results in elsewhere.values()):
                return self._compare(elsewhere, conditions, runs.get("train"))
        return proof

    def _compare(
        self, results: Mapping[str, Results], conditions: Conditions, train: Run | None = None
    ) -> Proof:
        """Runs the file, and compares it with the model's results in each mode.

        Args:
            results: Modes -> the model's results, and how far it is from itself.
            conditions: The conditions under which it was run.
            train: Runs the model in training, if it has that mode.
        """
        import numpy as np

        arrays: dict[str, Any] = {f"weight.{name}": x for name, x in self.weights.items()}
        sensitivity: dict[str, float] = {}
        refused: dict[str, str] = {}
        for mode, result in results.items():
            for key, value in result.found.items():
                kind, dot, name = key.partition(".")
                place = f"{kind}{dot}{self.names.get(name, name)}"
                if key == "refused":
                    refused[mode] = str(value)
                elif kind != "weight":
                    arrays[f"{mode}.{place}"] = value
                elif place in arrays:  # as it was perturbed
                    arrays[place] = value
            sensitivity |= {f"{mode} {what}": error for what, error in result.own.items()}
        if train is not None and "train" in results:
            arrays |= self._draw(train, results["train"], conditions)
        arrays |= self.arrays
        if conditions.double:
            arrays = {name: widen(array) for name, array in arrays.items()}
            arrays["double"] = np.array(1)
        if self.by_key:
            arrays["by_key"] = np.array(1)
        arrays["inputs"] = np.array(json.dumps(self.inputs))
        arrays["flags"] = np.array(json.dumps(dict(self.flags)))
        errors = self._run(arrays, [*results])
        settings = conditions.away, conditions.double
        return Proof(
            errors, sensitivity, arrays, self.framework, self.name, refused, *settings, self.coarse
        )

    def _draw(self, train: Run, result: Results, conditions: Conditions) -> dict[str, Any]:
        """Returns the distances of outputs in training from those without dropout, over many seeds.

        Empty if neither the model nor the file has dropout.
        """
        import numpy as np

        keys = [key for key in result.found if key.startswith("output.")]
        still = [result.found[f"output.{i}"] for i in range(len(keys))]
        drawn = with_effect(conditions.draw(train)) or {math.nan: []}
        if len(drawn) == 1 and "dropout" not in self.code.lower():
            return {}
        arrays = {"train.rates": np.array([*drawn]), "train.seeds": np.array(SEEDS)}
        for i, outputs in enumerate(drawn.values()):
            spread = Spread(still)
            for output in outputs or [still]:
                spread.add(output)
            arrays[f"train.spread.{i}"] = spread.result()
        return arrays

    def _run(self, arrays: Mapping[str, Any], modes: list[str]) -> dict[str, float]:
        """Runs the file in a separate process and returns the errors.

        Raises:
            ConversionError: The process ended with an error.
        """
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            file, data = Path(folder) / "translated.py", Path(folder) / "data.npz"
            file.write_text(self.code, encoding="utf-8")
            given: dict[str, Any] = {key: np.asarray(value) for key, value in arrays.items()}
            np.savez(data, **given)
            command = [sys.executable, "-m", "fmapper.verification.files.process"]
            command += [self.framework, str(file), str(data), self.name, *modes]
            environment = {"JAX_COMPILATION_CACHE_DIR": _cache(), **os.environ}
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False
            )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            last = [line for line in lines if _ERROR.match(line)][-1:] or lines[-1:]
            last = last or [f"its process ended with {done.returncode} and no output"]
            raise ConversionError(
                f"{self.name}: the generated file does not run: {last[0]}. It was not saved."
            )
        errors: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return errors


@functools.cache
def _cache() -> str:
    """Returns a compilation cache for proofs: a file for evaluation repeats programs."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
