"""Runs translated source in a separate process, and compares it with the original model."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmapper.backends.models import Models
from fmapper.errors import ConversionError, FmapperError
from fmapper.moves.mover import to_numpy
from fmapper.programs.bind import bind
from fmapper.translation.code import identifier
from fmapper.translation.functions.forms import Made
from fmapper.translation.loading import whole_arrays
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
from fmapper.verification.models.spreads import Spread

if TYPE_CHECKING:
    from fmapper.programs.program import Program
    from fmapper.translation.source_file import Source

_ERROR = re.compile(r"[\w.]*(Error|Exception)\b.*:")


class HalfPrecisionError(ConversionError):
    """The parameters of a model are too coarse for a proof."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The distance of a translated model from its source.

    Attributes:
        errors: `eval outputs`, `eval gradients`, `eval steps` and the same for `train` -> the
            largest difference, relative to the largest element; and `eval draws` where the file
            draws more or fewer random numbers, even if these make no difference.
        own: Likewise, how far the source is from itself when its weights are off by a rounding.
        data: What was compared with: the arrays of the source, what it was given, and what it gave.
        script: The script that compares.
        name: The class of the model in the file.
        refused: Modes in which the source cannot be differentiated, so that its outputs alone were
            compared -> why.
        away: How far the weights were moved, relative to themselves, before anything was compared.
        double: Whether both computed in double precision.
        coarse: Where the model computes in half precision; empty where it does not.
    """

    errors: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    script: str = field(default="", repr=False)
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
        """Returns whether all that was compared in a mode agrees."""
        bounds = self.bounds
        return all(error <= bounds[k] for k, error in self.errors.items() if k.startswith(mode))

    @property
    def bounds(self) -> dict[str, float]:
        """How far each may be: the contract, or what a rounding of the weights does, four times."""
        found = {}
        for what in self.errors:
            own = self.own.get(what, 0.0)
            found[what] = max(LIMITS[what.rpartition(" ")[2]], OWN * own if own <= MOST else 0.0)
        return found

    def __str__(self) -> str:
        told = [
            f"{what} {error:.1e}"
            + (f" (a rounding of its weights: {self.own[what]:.1e})" if self._is_own(what) else "")
            for what, error in self.errors.items()
            if not what.endswith(("draws", "dropout"))
        ]
        told += [
            f"{what.split()[0]} draws other random numbers than its source"
            for what in self.errors
            if what.endswith("draws")
        ]
        told += [
            f"{mode} gradients not compared, since the source has none ({why})"
            for mode, why in self.refused.items()
        ]
        told += [self._tell_dropout(error) for what, error in self.errors.items()
                 if what.endswith("dropout")]  # fmt: skip
        if self.coarse and not self:
            told.append(
                f"the model computes in {self.coarse}, in which results agree to two digits"
            )
        how = [f"with weights moved by {self.away:.1%}"] if self.away else []
        how += ["in double precision"] if self.double else []
        if how:
            reason = "since a rounding of its own changes its outputs or gradients"
            told.append(f"{' and '.join(how)}, {reason}")
        return ", ".join(told)

    def _tell_dropout(self, error: float) -> str:
        same = "are those of its source" if error <= LIMITS["dropout"] else "differ"
        return (
            f"all of these without dropout; with it, means and spreads over {SEEDS} seeds {same} "
            f"(within {error:.1f} standard errors)"
        )

    def _is_own(self, what: str) -> bool:
        return self.bounds[what] > LIMITS[what.rpartition(" ")[2]]


def prove(
    source: Source,
    program: Program,
    model: Any,
    origin: Models,
    target: Models,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    only_evaluation: bool = False,
) -> Proof:
    """Measures the distance of a file's outputs, gradients and five steps from its model's.

    The file runs in a fresh process, which imports neither fmapper nor the model's framework.

    Args:
        source: The file.
        program: The program that it was written from.
        model: The model.
        origin: The adapter of its framework.
        target: The adapter of the file's framework.
        args: What the model is called with, by position.
        kwargs: What it is called with by keyword.
        only_evaluation: Compare nothing but the outputs in evaluation.

    Raises:
        ConversionError: The file does not run; says what the process said.
        HalfPrecisionError: The model has parameters of half precision.
    """
    _refuse_halves(program, source.name)
    case = _Case(source, program, origin, target, args, kwargs)
    if only_evaluation:
        found = descent(origin.trial(model, args, kwargs, train=False, parts=True))(RATES[0], 0.0)
        given = {k: v for k, v in found.items() if k.startswith(("output.", "draws"))}
        return case.compare({"eval": Results(given, {})}, Conditions())
    runs = {
        mode: descent(origin.trial(model, args, kwargs, train=mode == "train", parts=True))
        for mode in source.modes
    }
    proof = None
    for conditions, results in learn_modes(runs):
        try:
            proof = case.compare(results, conditions, runs.get("train"))
        except ConversionError:
            if not conditions.double:
                raise
            continue  # the file itself asks for single precision
        if proof:
            return proof
    if proof is None:
        conditions, results = learn_plainly(runs)
        proof = case.compare(results, conditions, runs.get("train"))
    if proof or conditions.away or conditions.double:
        return proof
    if are_at_bends(runs, results, conditions, proof.errors, proof.bounds):
        conditions = Conditions(AWAY)
        elsewhere = {mode: learn(run, conditions) for mode, run in runs.items()}
        if all(one.are_smooth for one in elsewhere.values()):
            return case.compare(elsewhere, conditions, runs.get("train"))
    return proof


@dataclass(frozen=True, slots=True)
class _Case:
    """A file, its source, and what both are called with."""

    source: Source
    program: Program
    origin: Models
    target: Models
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def compare(
        self, results: Mapping[str, Results], conditions: Conditions, train: Run | None = None
    ) -> Proof:
        """Runs the file, and compares it with what the source gave in each mode.

        Args:
            results: Modes -> what the source gave, and how far it is from itself.
            conditions: How it was run.
            train: Runs the source in training, if it has that mode.
        """
        import numpy as np

        arrays: dict[str, Any] = {}
        own: dict[str, float] = {}
        refused: dict[str, str] = {}
        moved: dict[str, Any] = {}
        for mode, result in results.items():
            for key, value in result.found.items():
                if key == "refused":
                    refused[mode] = str(value)
                elif key.startswith("weight."):
                    moved[self._name(key)] = value
                else:
                    arrays[f"{mode}.{self._name(key)}"] = value
            own |= {f"{mode} {what}": one for what, one in result.own.items()}
        if train is not None and "train" in results:
            arrays |= self._draw(train, results["train"], conditions)
        for name, array in whole_arrays(self.program, to_numpy, np.stack).items():
            arrays[f"weight.{name}"] = moved.get(f"weight.{name}", array)
        as_argument, objects = self.origin.as_argument, self.source.objects
        inputs = [_describe(arg, arrays, as_argument, objects) for arg in ((), self._arguments())]
        if conditions.double:
            arrays = {name: _double(array) for name, array in arrays.items()}
            arrays["double"] = np.array(1)
        arrays["inputs"] = np.array(json.dumps(inputs))
        errors = self._run(arrays, [*results])
        script, coarse = self.target.proof(), _find_halves(self.program)
        how = conditions.away, conditions.double
        return Proof(errors, own, arrays, script, self.source.name, refused, *how, coarse)

    def _draw(self, train: Run, result: Results, conditions: Conditions) -> dict[str, Any]:
        """Returns how far outputs in training are from those without dropout, over many seeds.

        Nothing where neither the source nor the file has dropout.
        """
        import numpy as np

        keys = [key for key in result.found if key.startswith("output.")]
        still = [result.found[f"output.{i}"] for i in range(len(keys))]
        drawn = conditions.draw(train) or {math.nan: []}
        if len(drawn) == 1 and "dropout" not in self.source.code.lower():
            return {}
        arrays = {"train.rates": np.array([*drawn]), "train.seeds": np.array(SEEDS)}
        for i, outputs in enumerate(drawn.values()):
            spread = Spread(still)
            for each in outputs or [still]:
                spread.add(each)
            arrays[f"train.spread.{i}"] = spread.result()
        return arrays

    def _name(self, key: str) -> str:
        """Returns a key with the name that the file has for an array of the source."""
        kind, dot, name = key.partition(".")
        return f"{kind}{dot}{self.program.aliases.get(name, name)}"

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments of the file, by name."""
        source, kwargs = self.source, self.kwargs
        known = {identifier(name): arg for name, arg in kwargs.items() if _holds_arrays(arg)}
        for name, arg in kwargs.items():  # options such as Linen's keys, where the file draws
            if isinstance(arg, Mapping):
                known |= {f"{name}_{key}": one for key, one in arg.items()}
        told = {name: known[name] for name in source.parameters if name in known}
        told |= {n: arg for n, arg in zip(source.positional, self.args, strict=False) if n}
        every = bind(self.program, self.args, kwargs) if source.leaves else []
        return told | {name: every[at] for name, at in source.leaves.items()}

    def _run(self, arrays: Mapping[str, Any], modes: list[str]) -> dict[str, float]:
        """Returns the errors that a process of its own finds.

        Raises:
            ConversionError: It ended with an error.
        """
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            file, data = Path(folder) / "translated.py", Path(folder) / "data.npz"
            file.write_text(self.source.code, encoding="utf-8")
            given: dict[str, Any] = {key: np.asarray(value) for key, value in arrays.items()}
            np.savez(data, **given)
            script = Path(folder) / "proof.py"
            script.write_text(self.target.proof(), encoding="utf-8")
            files = [str(script), str(file), str(data)]
            command = [sys.executable, *files, self.source.name, json.dumps(modes)]
            environment = {
                "JAX_COMPILATION_CACHE_DIR": _cache(),
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_TRACEBACK_FILTERING": "off",
            }
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False
            )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            last = [line for line in lines if _ERROR.match(line)][-1:] or lines[-1:]
            last = last or [f"its process ended with {done.returncode} and no word"]
            raise ConversionError(
                f"{self.source.name}: the generated file does not run: {last[0]}. It was not saved."
            )
        errors: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return errors


_HALVES = ("bfloat16", "float16")


def _find_halves(program: Program) -> str:
    """Returns a dtype of half precision that a model computes in, and where."""
    calls = [
        (dtype, call.source)
        for call in program.graph.walk()
        for dtype, _ in call.result
        if dtype in _HALVES
    ]
    for dtype, place in calls:
        if place and not place.startswith("<"):
            return f"{dtype} at {place}"
    return calls[0][0] if calls else ""


def _refuse_halves(program: Program, name: str) -> None:
    """Raises for parameters whose roundings hide what a proof looks for.

    Raises:
        HalfPrecisionError: There is one; names it.
    """
    for path, array in program.parameters.items():
        dtype = str(array.dtype).rpartition(".")[2]
        if dtype in _HALVES:
            raise HalfPrecisionError(
                f"{name}: {path} is of {dtype}, in which results agree to two or three digits, too "
                "few to compare a file with its model. Translate the model in float32; or write "
                "this one for evaluation, without a proof, by fmapper.source"
            )


@functools.cache
def _cache() -> str:
    """Returns a folder for what proofs compile: a file for evaluation alone repeats the other's."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _double(array: Any) -> Any:
    """Returns an array in double precision, if it is of single precision."""
    import numpy as np

    array = np.asarray(array)
    wider = {"float32": np.float64, "complex64": np.complex128}.get(str(array.dtype))
    return array if wider is None else array.astype(wider)


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return any(map(_holds_arrays, value))
    return hasattr(value, "shape")


def _describe(
    value: Any, arrays: dict[str, Any], given: Callable[[Any], Any], structure: Any = None
) -> Any:
    """Encodes arguments as JSON; arrays go to `arrays`, objects are those in the structure.

    Raises:
        ConversionError: It holds another object of a class of its own.
    """
    if isinstance(structure, Made):
        held = {key: getattr(value, key) for key in structure}
        return {"record": structure.cls, "held": _describe(held, arrays, given, {**structure})}
    if value is None or isinstance(value, str | bool) or isinstance(structure, int | float):
        return value
    if isinstance(value, Mapping):
        inner = structure if isinstance(structure, Mapping) else {}
        return {
            "dict": {
                str(key): _describe(one, arrays, given, inner.get(str(key)))
                for key, one in value.items()
            }
        }
    if isinstance(value, tuple | list):
        items = structure if isinstance(structure, tuple) else ()
        pairs = itertools.zip_longest(value, items[: len(value)])
        return [_describe(one, arrays, given, inner) for one, inner in pairs]
    try:
        array = to_numpy(given(value))
    except FmapperError as error:
        raise ConversionError(f"a file cannot be given a {type(value).__name__}: {error}") from None
    number = sum(key.startswith("input.") for key in arrays)
    arrays[f"input.{number}"] = array
    return {"array": number}
