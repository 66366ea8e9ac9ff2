"""The two sides of a transfer: their arrays by name, without the values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmapper.errors import TransferError

if TYPE_CHECKING:
    from fmapper.backends.models import Models
    from fmapper.checkpoints.lazy import LazyArray
    from fmapper.checkpoints.rules.rules import Rules

# Fields of layers in dicts: of Linen's variables, and of files with them.
_FIELDS = {"kernel": "outputs last", "embedding": "rows"}
_RANDOM = ("RngStream", "RngKey", "RngCount", "Rngs")


@dataclass(frozen=True, eq=False)
class Entry:
    """An array of a side."""

    name: str  # as `state` gives it
    shape: tuple[int, ...]
    dtype: str
    value: Any  # the array itself
    layer: str = ""  # the class of a library that it is a field of, as `torch.Linear`
    layout: str = ""  # where that has its outputs; see `Models.weight_layouts`
    trained: bool = True  # training changes it, or that is not known
    tied_to: str = ""  # the first name of the same array; empty if that is this one
    random: bool = False  # it is the state of a random generator, and no weight
    transient: bool = False  # checkpoints of its framework leave it out

    @property
    def is_abstract(self) -> bool:
        """Whether it has a shape and no values."""
        from fmapper.states.materialize import is_abstract

        return is_abstract(self.value)

    def lazy(self) -> LazyArray:
        """Returns the array as one that is read on demand; a constant where it has no values."""
        from fmapper.checkpoints.lazy import LazyArray
        from fmapper.checkpoints.save import as_lazy
        from fmapper.files.dtypes import numpy_dtype

        if not isinstance(self.value, LazyArray) and self.is_abstract:
            return LazyArray.full(self.shape, 0, numpy_dtype(self.dtype))
        return as_lazy(self.name, self.value)


@dataclass(frozen=True, eq=False)
class Side:
    """A model or state."""

    tree: Any  # the model, or the arrays by name
    label: str  # what messages call it
    entries: Mapping[str, Entry]  # by name, those that are tied under each name
    # For a folder of the Hub, its arrays, and the rules that make those of its class of them.
    rules: Rules | None = None
    stored: Mapping[str, Any] | None = None

    @property
    def outline(self) -> dict[str, LazyArray]:
        """Its arrays, with constants in the place of those that have no values."""
        return {name: entry.lazy() for name, entry in self.entries.items()}

    def arrays(self) -> dict[str, LazyArray]:
        """Returns its arrays, if all have values; one under several names is one object."""
        for name, entry in self.entries.items():
            if entry.is_abstract:
                raise TransferError(f"{name}: {self.label} has no values there, only a shape")
        first = self.outline
        return {name: first[entry.tied_to or name] for name, entry in self.entries.items()}

    @property
    def callable(self) -> bool:
        """Whether it is a model that can be called."""
        return not isinstance(self.tree, Mapping) and framework_of(self.tree) is not None

    def fill(self, arrays: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Returns the tree with arrays in the place of its own, in the dtypes that those have."""
        from fmapper.backends.dtypes import is_inexact
        from fmapper.checkpoints.lazy import LazyArray
        from fmapper.states.materialize import check_constants, fill
        from fmapper.states.state import place_as_before, weights_of

        check_constants(self.tree)
        own, back = weights_of(self.tree) or (self.tree, lambda filled: filled)
        cast = {
            name: array.astype(self.entries[name].dtype, name)
            if isinstance(array, LazyArray) and is_inexact(self.entries[name].dtype)
            else array
            for name, array in arrays.items()
        }
        return back(fill(own, cast, strict=strict, place=place_as_before))


def framework_of(model: Any) -> Models | None:
    """Returns the framework of a model, or of a function with its parameters; None for neither."""
    from fmapper.verification.models.owners import adapter_of_model, source_of_callable

    owner = adapter_of_model(model)
    return source_of_callable(model, None) if owner is None and isinstance(model, tuple) else owner


def read_side(x: Any, role: str, *, classes: bool = True) -> Side:
    """Reads the names, shapes and classes of a model, a state, or a checkpoint on disk.

    With `classes`, a folder of the Hub is read as the model of its class.

    Raises:
        TransferError: It holds no arrays.
    """
    from fmapper.checkpoints.load import load
    from fmapper.tree.nodes import sync

    sync()
    label = f"the {role}"
    if isinstance(x, str | os.PathLike):
        label = str(x)
        model = _read_folder(Path(x), label) if classes else None
        if model is not None:
            return model
        x = load(x)
    entries = _entries_of(x)
    if not entries:
        raise TransferError(
            f"{label} holds no arrays: {type(x).__name__}. Pass a model, a Linen module with its "
            "variables as a pair, a dict of arrays, or the path of a checkpoint."
        )
    return Side(x, label, entries)


def _read_folder(path: Path, label: str) -> Side | None:
    """Returns the model of a folder of the Hub, without memory; None for what is not one."""
    from fmapper.checkpoints.extras.settings import CONFIG
    from fmapper.checkpoints.lazy import LazyArray
    from fmapper.checkpoints.load import load
    from fmapper.checkpoints.pretrained import find_pretrained
    from fmapper.errors import CheckpointError

    if not (path / CONFIG).is_file():
        return None
    stored = {name: x for name, x in load(path).items() if isinstance(x, LazyArray)}
    try:
        pretrained = find_pretrained(path, None, stored)
    except CheckpointError:  # a class that is not known here: the arrays alone
        return None
    if pretrained.quantization is not None:
        return None
    rules = pretrained.rules(stored)
    made = rules.apply(stored)
    entries = {
        name: replace(entry, value=made[entry.tied_to if name not in made else name])
        for name, entry in _entries_of(pretrained.model).items()
        if name in made or entry.tied_to in made
    }
    return None if {*made} - {*entries} else Side(pretrained.model, label, entries, rules, stored)


def _entries_of(x: Any) -> dict[str, Entry]:
    from fmapper.backends.discovery import owner_of
    from fmapper.checkpoints.lazy import LazyArray
    from fmapper.states.state import arrays_by_name, identity_of
    from fmapper.states.transient import transient_in
    from fmapper.transforms.trainable import Trained

    layer_of, trained, transient = _layers(x), Trained(x, strict=False), transient_in(x)
    first: dict[Any, str] = {}
    entries = {}
    for name, array in arrays_by_name(x).items():
        adapter = owner_of(array)
        same = first.setdefault(identity_of(name, array), name)
        layer, layout = layer_of(name)
        entries[name] = Entry(
            name,
            tuple(adapter.shape(array)),
            adapter.dtype(array),
            array,
            layer,
            layout if layer else _FIELDS.get(name.rpartition(".")[2], ""),
            isinstance(array, LazyArray) or array in trained,
            "" if same == name else same,
            layer.rpartition(".")[2] in _RANDOM or bool(adapter.stays(array)),
            id(array) in transient,
        )
    return entries


def _layers(tree: Any) -> Callable[[str], tuple[str, str]]:
    """Returns a function that gives the layer that an array is a field of, and its layout."""
    from fmapper.backends.discovery import adapters
    from fmapper.backends.models import Models
    from fmapper.tree.keypath import name_of
    from fmapper.tree.walk import visit

    libraries = adapters(Models)
    by_class: dict[type, tuple[str, str]] = {}
    layers: dict[str, tuple[str, str]] = {}
    for link, node, node_type in visit(tree):
        if node_type is None or isinstance(node, dict | list | tuple):
            continue
        cls, name = type(node), name_of(link)
        if cls not in by_class:
            by_class[cls] = next(filter(None, (x.layer(cls) for x in libraries)), ("", ""))
        if not layers.get(name, ("", ""))[0]:
            layers[name] = by_class[cls]
    return lambda name: layers.get(name.rpartition(".")[0], ("", ""))
