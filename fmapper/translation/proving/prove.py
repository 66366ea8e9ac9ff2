"""Runs translated source in a separate process, and compares it with the original model."""

from __future__ import annotations

import atexit
import functools
import json
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
from fmapper.translation.loading import whole_arrays

if TYPE_CHECKING:
    from fmapper.programs.program import Program
    from fmapper.translation.source_file import Source

_ERROR = re.compile(r"[\w.]*(Error|Exception)\b.*:")
# The contract of a translation: relative to the largest element.
LIMITS = {"outputs": 1e-4, "gradients": 1e-3, "steps": 1e-3, "draws": 0.0}
# What a model multiplies a rounding of its weights to says how near its translation can be: it may
# be that much off, times this, and a model that is further from itself than this cannot be proved.
OWN, MOST = 4.0, 0.01
ROUNDING = 2.0**-22
# How far the weights are moved where a rounding of them changes outputs or gradients by more than
# `MOST`: as where a grid is sampled at its own points, which is a bend of the interpolation, or as
# the logarithm of a determinant that is 1.
AWAY = 2.0**-6
_FEW = (4, 16)  # roundings of the weights by which a bend is looked for where a proof fails
RATES = (0.1, 0.01, 0.001)  # of descent: the first at which roundings stay small


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
        coarse: Where the model computes in half precision; empty where it does not.
    """

    errors: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    script: str = field(default="", repr=False)
    name: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    away: float = 0.0
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
            if not what.endswith("draws")
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
        if self.coarse and not self:
            told.append(
                f"the model computes in {self.coarse}, in which results agree to two digits"
            )
        if self.away:
            told.append(
                f"with weights moved by {self.away:.1%}, since a rounding of its own changes its "
                "outputs or gradients"
            )
        return ", ".join(told)

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
        found = origin.training_steps(model, args, kwargs, train=False)(RATES[0], 0.0)
        given = {k: v for k, v in found.items() if k.startswith(("output.", "draws"))}
        return case.compare({"eval": (given, {})}, 0.0)
    runs = {
        mode: origin.training_steps(model, args, kwargs, train=mode == "train")
        for mode in source.modes
    }
    results, away = _learn_modes(runs)
    proof = case.compare(results, away)
    if not proof and not away and _are_at_bends(runs, results, proof):
        elsewhere = {mode: _learn(run, AWAY) for mode, run in runs.items()}
        if _are_smooth(elsewhere):
            return case.compare(elsewhere, AWAY)
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

    def compare(self, results: Mapping[str, _Results], away: float) -> Proof:
        """Runs the file, and compares it with what the source gave in each mode.

        Args:
            results: Modes -> what the source gave, and how far it is from itself.
            away: How far its weights were moved for that.
        """
        import numpy as np

        arrays: dict[str, Any] = {}
        own: dict[str, float] = {}
        refused: dict[str, str] = {}
        moved: dict[str, Any] = {}
        for mode, (found, apart) in results.items():
            for key, value in found.items():
                if key == "refused":
                    refused[mode] = str(value)
                elif key.startswith("weight."):
                    moved[self._name(key)] = value
                else:
                    arrays[f"{mode}.{self._name(key)}"] = value
            own |= {f"{mode} {what}": one for what, one in apart.items()}
        for name, array in whole_arrays(self.program, to_numpy, np.stack).items():
            arrays[f"weight.{name}"] = moved.get(f"weight.{name}", array)
        inputs = [
            _describe(arg, arrays, self.origin.as_argument) for arg in ((), self._arguments())
        ]
        arrays["inputs"] = np.array(json.dumps(inputs))
        errors = self._run(arrays, [*results])
        script, coarse = self.target.proof(), _find_halves(self.program)
        return Proof(errors, own, arrays, script, self.source.name, refused, away, coarse)

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


_Run = Callable[[float, float], dict[str, Any]]
_Results = tuple[dict[str, Any], dict[str, float]]


def _learn_modes(runs: Mapping[str, _Run]) -> tuple[dict[str, _Results], float]:
    """Returns what each mode gives, and how far the weights were moved for that."""
    for away in (0.0, AWAY):
        found = {mode: _learn(run, away) for mode, run in runs.items()}
        if away == 0.0:
            first = found
        if _are_smooth(found):
            return found, away
    return first, 0.0


def _are_smooth(results: Mapping[str, _Results]) -> bool:
    """Returns whether roundings of the weights change outputs and gradients by little."""
    return all(max(own["outputs"], own["gradients"]) <= MOST for _, own in results.values())


def _are_at_bends(runs: Mapping[str, _Run], results: Mapping[str, _Results], proof: Proof) -> bool:
    """Returns whether gradients are off by no more than a few roundings of the weights change them.

    As where what a ReLU is given lies within some roundings of zero, on either side.
    """
    bounds = proof.bounds
    for what, error in proof.errors.items():
        mode, _, kind = what.rpartition(" ")
        if error <= bounds[what]:
            continue
        if kind not in ("gradients", "steps"):
            return False
        found, apart = results[mode][0], 0.0
        for times in _FEW:
            for off in (times * ROUNDING, -times * ROUNDING):
                again = runs[mode](float(found["rate"]), off)
                apart = max(apart, _find_distances(found, again)[kind])
        if OWN * apart < error:
            return False
    return True


def _learn(run: _Run, away: float) -> _Results:
    """Returns the results and steps of a model, and its sensitivity to rounding.

    The rate is so small that a rounding of the weights stays one through five steps: after larger
    steps nobody could tell a wrong program from a rounding.
    """
    import numpy as np

    own: dict[str, float] = {}
    for rate in RATES:
        found = run(rate, away)
        own = dict.fromkeys(_WORDS.values(), 0.0)
        for off in (ROUNDING, -ROUNDING):  # a bend may lie on either side
            for what, apart in _find_distances(found, run(rate, away + off)).items():
                own[what] = max(own[what], apart)
        if own["steps"] <= LIMITS["steps"] / 10:
            break
    return found | {"rate": np.array(rate)}, own


_WORDS = {"output": "outputs", "gradient": "gradients", "after": "steps"}


def _find_distances(found: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Returns the largest relative distance of outputs, gradients and steps from others."""
    import numpy as np

    gradients = [one for key, one in found.items() if key.startswith("gradient.")]
    largest = max(map(_largest, gradients), default=0.0)
    least = {"output": 1e-6, "gradient": 1e-3 * largest, "after": 1e-3}
    apart = dict.fromkeys(_WORDS.values(), 0.0)
    for key, value in found.items():
        kind = key.partition(".")[0]
        if kind not in _WORDS:
            continue
        distance = _distance(other.get(key, value), value, least[kind])
        if kind == "after" and not np.isfinite(value).all():
            distance = 1.0  # it has left the numbers
        apart[_WORDS[kind]] = max(apart[_WORDS[kind]], distance)
    return apart


def _largest(array: Any) -> float:
    import numpy as np

    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def _distance(found: Any, wanted: Any, least: float) -> float:
    """Returns the relative distance of numbers; 1 where one is not finite."""
    import numpy as np

    if found.shape != wanted.shape or found.dtype.kind not in "fc":
        return 0.0
    finite = np.isfinite(wanted)
    apart = np.abs(found[finite] - wanted[finite])
    apart = np.where(np.isfinite(apart), apart, 1.0)
    return float(apart.max(initial=0.0) / max(_largest(wanted), least, 1e-30))


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return any(map(_holds_arrays, value))
    return hasattr(value, "shape")


def _describe(value: Any, arrays: dict[str, Any], given: Callable[[Any], Any]) -> Any:
    """Encodes arguments as JSON; arrays go to `arrays`.

    Raises:
        ConversionError: It holds an object of a class of its own.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {"dict": {str(key): _describe(one, arrays, given) for key, one in value.items()}}
    if isinstance(value, tuple | list):
        return [_describe(one, arrays, given) for one in value]
    try:
        array = to_numpy(given(value))
    except FmapperError as error:
        raise ConversionError(f"a file cannot be given a {type(value).__name__}: {error}") from None
    number = sum(key.startswith("input.") for key in arrays)
    arrays[f"input.{number}"] = array
    return {"array": number}


def write_test(file: Path, proof: Proof) -> Path:
    """Writes a test of a translated file, and the data of the test, next to it.

    It runs with pytest, and needs neither fmapper nor the framework of the source.

    Returns:
        The test.
    """
    import numpy as np

    data = file.with_name(f"{file.stem}_data.npz")
    script = file.with_name(f"{file.stem}_proof.py")
    test = file.with_name(f"test_{file.stem}.py")
    given: dict[str, Any] = {key: np.asarray(value) for key, value in proof.data.items()}
    np.savez(data, **given)
    script.write_text(proof.script, encoding="utf-8")
    modes = sorted({what.split()[0] for what in proof.errors})
    test.write_text(_TEST.format(
        file=file.name, script=script.name, data=data.name, name=proof.name,
        modes=json.dumps(modes), limits=proof.bounds,
    ), encoding="utf-8")  # fmt: skip
    return test


_TEST = '''"""{file} gives what its source gave: outputs, gradients, five steps of training."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIMITS = {limits}


def test_it_computes_what_its_source_does():
    files = [HERE / "{script}", HERE / "{file}", HERE / "{data}"]
    command = [sys.executable, *map(str, files), "{name}", \'{modes}\']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors
    for what, error in errors.items():
        assert error <= LIMITS.get(what, 0), what
'''
