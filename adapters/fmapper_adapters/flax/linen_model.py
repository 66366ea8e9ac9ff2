"""Converted models for Flax Linen: a module whose `init` returns the converted arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import linen

from fmapper import ProgramInputError, state, summary
from fmapper_adapters.flax import programs as _programs
from fmapper_adapters.flax.programs import Programs

_COLLECTIONS = {
    "param": "params",
    "frozen": "frozen",
    "statistic": "batch_stats",
    "buffer": "buffers",
}


class Start:
    """Programs with their initial arrays: a single static value for Linen, compared by identity.

    Attributes:
        programs: The programs.
        variables: The arrays in Linen's form: by collection, then nested by name.
    """

    def __init__(self, programs: Programs, arrays: Mapping[str, Any]) -> None:
        self.programs = programs
        self.variables = _collect(programs, arrays)

    def __copy__(self) -> Start:
        return self

    def __deepcopy__(self, memo: Any) -> Start:
        return self

    def __repr__(self) -> str:
        return repr(self.programs)


class LinenModel(linen.Module):
    """A model that was converted to Flax Linen.

    `init` returns the converted arrays, whatever the key: `params`, `batch_stats` (the running
    statistics of batch norms), `buffers` (other buffers) and `frozen` (parameters without
    `requires_grad`), each a dict nested by the names of the module. A tied array is there under its
    first name only.

    Attributes:
        start: The programs, and the initial arrays.
        train: The default mode of a call: True for training.
    """

    start: Any
    train: bool = False

    def _repr_html_(self) -> str:
        html: str = self.start.programs.any.program._repr_html_()
        return html + summary(self.start.variables)._repr_html_()

    @linen.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for the arguments of the module's forward.

        Unless forward has an argument of this name, `train` is accepted too. In training, the
        stream `dropout` provides the random numbers, and `batch_stats` must be mutable if there are
        any.

        Raises:
            ProgramInputError: The program was recorded for other inputs, or needs random numbers;
                or the model has no program for this mode.
        """
        programs: Programs = self.start.programs
        takes_train = any(p.name == "train" for p in programs.any.program.signature)
        train = self.train if takes_train else kwargs.pop("train", self.train)
        places, arrays = self._read()
        model = programs.bind(arrays, train=train)
        key = None
        if (train or model.is_random) and (self.has_rng("dropout") or self.is_initializing()):
            key = self.make_rng("dropout")
        if key is None and model.is_random:
            raise ProgramInputError(
                f'{model.program.name} draws random numbers: pass apply rngs={{"dropout": key}}'
            )
        outcome = model.call(args, kwargs, key=key)
        if not self.is_initializing():
            self._write(places, arrays, outcome.model)
        return outcome.output

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads variables other than parameters by (collection, key), and all arrays by name."""
        places: dict[Any, Any] = {}
        arrays: dict[str, Any] = {}
        names = {place: name for name, place in _places(self.start.programs).items()}
        scope: Any = self.scope  # not self.param, which a name of the module may shadow
        for collection, tree in self.start.variables.items():
            for key, value in tree.items():
                if collection == "params":
                    content = scope.param(key, lambda _, value=value: value)
                else:
                    place = scope.variable(collection, key, lambda value=value: value)
                    places[collection, key] = place
                    content = place.value
                inner = dict(_programs.flatten({key: content}))
                arrays.update((names[collection, path], value) for path, value in inner.items())
        return places, arrays

    def _write(self, places: Any, before: Mapping[str, Any], model: Any) -> None:
        """Writes changed arrays back to their variables."""
        after = {**model.params, **model.buffers}
        changed = {name for name in before if after[name] is not before[name]}
        if not changed:
            return
        trees = _collect(self.start.programs, after)
        at = _places(self.start.programs)
        for collection, key in dict.fromkeys(
            (at[name][0], at[name][1].split(".")[0]) for name in changed
        ):
            places[collection, key].value = trees[collection][key]


LinenModel.__module__ = "fmapper_adapters.flax"  # its public module


def from_arrays(programs: Programs, arrays: Mapping[str, Any]) -> LinenModel:
    """Returns the module for programs and their arrays.

    Raises:
        ConversionError: A child that does not hold all parameters has a name that Linen cannot
            distinguish from a collection.
    """
    if not _has_collections(programs):
        _programs.check_names(programs, frozenset({"params"}))
    return LinenModel(Start(programs, arrays), train=programs.evaluation is None)


def _has_collections(programs: Programs) -> bool:
    """Returns whether names begin with collections, as they do if the source is of Linen."""
    trained = [name for name, kind in programs.kinds.items() if kind == "param"]
    return bool(trained) and all(name.startswith("params.") for name in trained)


def _places(programs: Programs) -> dict[str, tuple[str, str]]:
    """Returns the collection of each array, and its dotted name there."""
    places = {name: (_COLLECTIONS[kind], name) for name, kind in programs.kinds.items()}
    if _has_collections(programs):
        for name, kind in programs.kinds.items():
            collection, _, path = name.partition(".")
            if path and kind != "frozen":
                places[name] = collection, path
    return places


def _collect(programs: Programs, arrays: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, dict[str, Any]] = {}
    for name, (collection, path) in _places(programs).items():
        flat.setdefault(collection, {})[path] = arrays[name]
    return {collection: _programs.nest(values) for collection, values in flat.items()}


def weights(model: LinenModel, variables: Any) -> dict[str, Any]:
    """Returns the arrays of variables by the names of the source, tied ones under each."""
    programs: Programs = model.start.programs
    names = {f"{collection}.{path}": n for n, (collection, path) in _places(programs).items()}
    arrays = {names.get(name, name): array for name, array in state(variables).items()}
    return arrays | {
        name: arrays[kept] for name, kept in programs.aliases.items() if kept in arrays
    }
