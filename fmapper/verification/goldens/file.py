"""The file of goldens: a safetensors file with everything but arrays in its metadata.

The metadata have the key `fmapper.goldens`, a JSON object. Its entry `version` is 1; the others are
the fields of `Goldens`, in which arrays and structures are encoded so:

    {"array": NAME}                 an array of the file
    {"list": [...]}, {"tuple": [...]}
    {"dict": [[KEY, ...], ...]}     keys are texts or integers
    {"value": ...}                  null, a boolean, a number or a text

Files are not trusted: every field is checked, and time and memory are in proportion to the length.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmapper.backends.compute import Observation
from fmapper.backends.discovery import adapter_of
from fmapper.errors import GoldensError
from fmapper.files.arrays import read_arrays, write_arrays
from fmapper.files.bounded_json import MOST_JSON, read_json
from fmapper.files.bounds import check_count, check_depth, check_name
from fmapper.files.safetensors import read_header
from fmapper.files.untrusted import Misfit, open_regular, path_problem, show, within
from fmapper.progress import step
from fmapper.states.matching import parts_of
from fmapper.verification.arrays import to_host

KEY = "fmapper.goldens"
_VERSION = 1
_LONGEST_LINE = 1000


@dataclass
class Goldens:
    """The results of a model, as NumPy arrays.

    Attributes:
        model: The class of the model.
        framework: Its framework.
        train: Whether it was in training mode.
        args: The inputs by position.
        kwargs: The inputs by keyword.
        output: Its output, in tuples, lists and dicts.
        weights: The arrays that it trains, by their names in `state`.
        fixed: Its parameters that are not trained.
        state: Its other floating arrays, such as running statistics.
        after: The arrays of `state` that the call has changed.
        aliases: Other names of tied arrays -> the name above.
        wide: The output in double precision; None if the model could not compute in it.
        draws: The random numbers that the call drew, described in a line.
        rates: The rates of its dropout, which was left out.
        unit: A rounding in the precision of the model.
        sensitivity: How far the model is from itself after perturbing its weights and inputs.
        operations: The operations of the call, in order.
        training: Its training; None if it was not trained.
    """

    model: str
    framework: str
    train: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    weights: dict[str, Any]
    fixed: dict[str, Any]
    state: dict[str, Any]
    after: dict[str, Any]
    aliases: dict[str, str]
    wide: Any
    draws: str
    rates: list[float]
    unit: float
    sensitivity: list[GoldenSensitivity]
    operations: list[Observed]
    training: GoldenTraining | None = None


@dataclass
class GoldenSensitivity:
    """How far a model is from itself.

    Attributes:
        off: The perturbation of its weights and inputs, relative to themselves.
        double: Whether it was called in double precision.
        outputs: The path of an output -> its largest difference.
        state: The name of a buffer -> its largest difference after the call.
    """

    off: float
    double: bool
    outputs: dict[str, float]
    state: dict[str, float]


@dataclass
class Observed:
    """An operation with its result, and the effect of roundings on it.

    Attributes:
        observation: The operation.
        tolerance: The largest difference, relative to the largest element.
    """

    observation: Observation
    tolerance: float


@dataclass
class GoldenTraining:
    """The training of a model.

    Attributes:
        optimizer: The name of the optimiser.
        rate: Its learning rate.
        double: Whether it was trained in double precision.
        own_loss: Whether the loss was a function that is not in the file.
        loss: The loss before the first step.
        gradients: The gradients before the first step.
        states: Weights and running statistics after each step.
        own: Gradients, and arrays after a step -> how much sums in another order change them.
        coarse: The same for roundings in the precision of the weights.
    """

    optimizer: str
    rate: float
    double: bool
    own_loss: bool
    loss: float
    gradients: dict[str, Any]
    states: list[dict[str, Any]]
    own: dict[str, float]
    coarse: dict[str, float]


# --- writing --------------------------------------------------------------------------------------


def write_goldens(goldens: Goldens, path: str | os.PathLike[str]) -> None:
    """Writes goldens to a file, which is replaced as a whole.

    Raises:
        GoldensError: No file can have this name, an array has a dtype that the format lacks, or
            inputs or outputs hold an object other than an array, number, text, list or dict.
    """
    arrays: dict[str, Any] = {}

    def tree(x: Any, path: str) -> Any:
        if adapter_of(x) is not None:
            arrays[path] = to_host(x)
            return {"array": path}
        if x is None or isinstance(x, bool | int | str):
            return {"value": x}
        if isinstance(x, float):
            return {"value": x if math.isfinite(x) else {"float": str(x)}}
        if type(x) in (list, tuple):
            return {type(x).__name__: [tree(y, f"{path}.{i}") for i, y in enumerate(x)]}
        parts = parts_of(x)
        if parts is None or not all(isinstance(key, str | int) for key in parts):
            raise GoldensError(
                f"{path} is of type {type(x).__name__}: goldens hold arrays, numbers, texts, lists "
                "and dicts. Record a function that takes and returns those."
            )
        return {"dict": [[key, tree(y, f"{path}.{key}")] for key, y in parts.items()]}

    def list_arrays(kind: str, of: Mapping[str, Any]) -> list[str]:
        arrays.update({f"{kind}.{name}": to_host(x) for name, x in of.items()})
        return list(of)

    about: dict[str, Any] = {
        "version": _VERSION,
        "model": goldens.model,
        "framework": goldens.framework,
        "train": goldens.train,
        "args": [tree(x, f"args.{i}") for i, x in enumerate(goldens.args)],
        "kwargs": {name: tree(x, f"kwargs.{name}") for name, x in goldens.kwargs.items()},
        "output": tree(goldens.output, "output"),
        **{kind: list_arrays(kind, getattr(goldens, kind)) for kind in _KINDS},
        "aliases": goldens.aliases,
        "wide": tree(goldens.wide, "wide"),
        "draws": goldens.draws,
        "rates": goldens.rates,
        "unit": goldens.unit,
        "sensitivity": [
            [entry.off, entry.double, _finite(entry.outputs), _finite(entry.state)]
            for entry in goldens.sensitivity
        ],
        "operations": [
            [
                *map(_line, (result.module, result.op, result.source, result.loop, result.name)),
                list(result.operands),
                [tree(x, f"operations.{i}.{k}") for k, x in enumerate(result.values)],
                operation.tolerance if math.isfinite(operation.tolerance) else 1.0,
            ]
            for i, operation in enumerate(goldens.operations)
            for result in (operation.observation,)
        ],
        "training": None,
    }  # fmt: skip
    if (training := goldens.training) is not None:
        about["training"] = {
            "optimizer": training.optimizer,
            "rate": training.rate,
            "double": training.double,
            "own_loss": training.own_loss,
            "loss": training.loss,
            "gradients": list_arrays("gradients", training.gradients),
            "states": [list_arrays(f"states.{i}", x) for i, x in enumerate(training.states)],
            "own": _finite(training.own),
            "coarse": _finite(training.coarse),
        }
    try:
        write_arrays(_path(path), arrays, {KEY: json.dumps(about, allow_nan=False)})
    except (Misfit, ValueError) as error:
        raise GoldensError(f"{path}: {error}") from None


_KINDS = ("weights", "fixed", "state", "after")


def _line(text: str) -> str:
    """Returns a text as one line without control characters."""
    return "".join(filter(str.isprintable, " ".join(text.split())))[:_LONGEST_LINE]


def _finite(bounds: Mapping[str, float]) -> dict[str, float]:
    return {path: bound for path, bound in bounds.items() if math.isfinite(bound)}


def _path(path: str | os.PathLike[str]) -> Path:
    if problem := path_problem(path):
        raise GoldensError(problem)
    return Path(path)


# --- reading --------------------------------------------------------------------------------------


def holds_goldens(path: Path) -> bool:
    """Returns whether a safetensors file contains goldens; False if it is damaged."""
    try:
        with open_regular(path) as file:
            return KEY in read_header(file, os.fstat(file.fileno()).st_size).metadata
    except (Misfit, OSError):
        return False


def read_goldens(path: str | os.PathLike[str]) -> Goldens:
    """Reads goldens from an untrusted file.

    Raises:
        GoldensError: The file holds no goldens, or is damaged; says where.
        OSError: The file does not exist, or may not be read.
    """
    source = _path(path)
    try:
        with open_regular(source) as file, step(f"reading {source.name}"):
            header = read_header(file, os.fstat(file.fileno()).st_size)
            if KEY not in header.metadata:
                raise Misfit("contains arrays, but no goldens; record_goldens writes them")
            with within(KEY):
                about = read_json(header.metadata[KEY], MOST_JSON)
                check_version(about)
                reader = _Reader(about, read_arrays(file, header.entries))
                return reader.goldens()
    except Misfit as error:
        raise GoldensError(f"{source}: {error}") from None
    except RecursionError:  # the caller is already deep in the stack
        raise GoldensError(f"{source}: is nested too deeply") from None


def check_version(about: Any) -> None:
    """Checks that metadata are of a known version.

    Raises:
        Misfit: They are not.
    """
    if type(about) is not dict or type(about.get("version")) is not int:
        raise Misfit("has no version")
    if about["version"] != _VERSION:
        raise Misfit(
            f"has version {show(about['version'])} of the format; this fmapper reads {_VERSION}"
        )


class _Reader:
    """Reads the fields of goldens; each array of the file must occur in exactly one place."""

    def __init__(self, about: Mapping[str, Any], arrays: dict[str, Any]) -> None:
        self._about = about
        self._arrays = arrays

    def goldens(self) -> Goldens:
        about, take = self._about, self._take
        goldens = Goldens(
            model=take(about, "model", _text),
            framework=take(about, "framework", _text),
            train=take(about, "train", _boolean),
            args=tuple(take(about, "args", self._trees)),
            kwargs=take(about, "kwargs", _each(self._tree)),
            output=take(about, "output", self._tree),
            **{kind: self._arrays_of(about, kind, kind) for kind in _KINDS},
            aliases=take(about, "aliases", _each(_text)),
            wide=take(about, "wide", self._tree),
            draws=take(about, "draws", _text),
            rates=take(about, "rates", lambda rates: [_bound(rate) for rate in _list(rates)]),
            unit=take(about, "unit", _bound),
            sensitivity=take(about, "sensitivity", lambda rows: [*_sensitivities(rows)]),
            operations=take(about, "operations", lambda rows: [*self._operations(rows)]),
            training=take(about, "training", self._course),
        )
        if self._arrays:
            raise Misfit(f"the array {show(next(iter(self._arrays)))} is not used")
        return goldens

    @staticmethod
    def _take(of: Mapping[str, Any], key: str, read: Callable[[Any], Any]) -> Any:
        with within(key):
            if key not in of:
                raise Misfit("is missing")
            return read(of[key])

    def _array(self, name: Any) -> Any:
        if type(name) is not str or name not in self._arrays:
            raise Misfit(f"there is no array {show(name)}, or it is in two places")
        return self._arrays.pop(name)

    def _trees(self, data: Any) -> list[Any]:
        return [self._tree(x) for x in _list(data)]

    def _tree(self, data: Any, depth: int = 0) -> Any:
        check_depth(depth)
        if type(data) is not dict or len(data) != 1:
            raise Misfit("is not an array, a structure or a value")
        ((kind, inner),) = data.items()
        if kind == "array":
            return self._array(inner)
        if kind == "value":
            return _value(inner)
        if kind in ("list", "tuple"):
            children = [self._tree(x, depth + 1) for x in _list(inner)]
            return children if kind == "list" else tuple(children)
        if kind == "dict":
            pairs = [_list(x) for x in _list(inner)]
            if not all(len(x) == 2 and type(x[0]) in (str, int) for x in pairs):
                raise Misfit("is not a dict")
            mapping = {key: self._tree(x, depth + 1) for key, x in pairs}
            if len(mapping) != len(pairs):
                raise Misfit("has a key twice")
            return mapping
        raise Misfit(f"{show(kind)} is not a kind of structure")

    def _arrays_of(self, of: Mapping[str, Any], key: str, prefix: str) -> dict[str, Any]:
        return self._take(of, key, lambda names: self._by_name(names, prefix))  # type: ignore[no-any-return]

    def _by_name(self, names: Any, prefix: str) -> dict[str, Any]:
        return {_text(name): self._array(f"{prefix}.{name}") for name in _list(names)}

    def _operations(self, data: Any) -> Iterator[Observed]:
        for i, row in enumerate(_list(data)):
            with within(i):
                if len(_list(row)) != 8:
                    raise Misfit("is not an operation")
                module, op, source, loop, name, operands, values, tolerance = row
                observation = Observation(
                    _text(module), _text(op), _text(source), tuple(self._trees(values)),
                    _text(name), tuple(map(_text, _list(operands))), _text(loop),
                )  # fmt: skip
                yield Observed(observation, _bound(tolerance))

    def _course(self, data: Any) -> GoldenTraining | None:
        if data is None:
            return None
        if type(data) is not dict:
            raise Misfit("is not an object")
        states = self._take(data, "states", _list)
        return GoldenTraining(
            optimizer=self._take(data, "optimizer", _text),
            rate=self._take(data, "rate", _bound),
            double=self._take(data, "double", _boolean),
            own_loss=self._take(data, "own_loss", _boolean),
            loss=self._take(data, "loss", _number),
            gradients=self._arrays_of(data, "gradients", "gradients"),
            states=[self._by_name(names, f"states.{i}") for i, names in enumerate(states)],
            own=self._take(data, "own", _each(_bound)),
            coarse=self._take(data, "coarse", _each(_bound)),
        )


def _sensitivities(data: Any) -> Iterator[GoldenSensitivity]:
    bounds = _each(_bound)
    for i, row in enumerate(_list(data)):
        with within(i):
            if len(_list(row)) != 4:
                raise Misfit("is not a rounding")
            yield GoldenSensitivity(
                _bound(row[0]), _boolean(row[1]), bounds(row[2]), bounds(row[3])
            )


def _list(data: Any) -> list[Any]:
    if type(data) is not list:
        raise Misfit("is not a list")
    check_count(len(data), "parts")
    return data


def _text(data: Any) -> str:
    if type(data) is not str:
        raise Misfit("is not a text")
    check_name(data)
    return data


def _boolean(data: Any) -> bool:
    if type(data) is not bool:
        raise Misfit("is neither true nor false")
    return data


def _number(data: Any) -> float:
    if type(data) not in (int, float) or not math.isfinite(data):
        raise Misfit("is not a number")
    return float(data)


def _bound(data: Any) -> float:
    if _number(data) < 0:
        raise Misfit("is negative")
    return float(data)


def _value(data: Any) -> Any:
    if type(data) is dict and set(data) == {"float"} and data["float"] in ("inf", "-inf", "nan"):
        return float(data["float"])
    if data is not None and type(data) not in (bool, int, float, str):
        raise Misfit("is not a value")
    return data


def _each(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Returns a reader of objects whose values another reads."""

    def entries(data: Any) -> dict[str, Any]:
        if type(data) is not dict:
            raise Misfit("is not an object")
        values = {}
        for key, value in data.items():
            with within(key):
                values[_text(key)] = read(value)
        return values

    return entries
