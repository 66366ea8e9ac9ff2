"""The arrays of a model of written classes, by the names and in the layouts of its source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fmapper.programs.reading.written import source_of_model


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an array in the source.

    Attributes:
        name: Its name there, or the one that `load_weights` gives a part of an array.
        order: The order of the dimensions: `~i` is dimension i backwards; None for the same one.
        shape: The shape there.
    """

    name: str
    order: tuple[int, ...] | None
    shape: tuple[int, ...]

    def to_source(self, array: Any) -> Any:
        """Returns an array of the model in the layout of the source."""
        from fmapper.backends.namespace import array_namespace

        xp = array_namespace(array)
        if self.order is not None:
            axes = [max(i, ~i) for i in self.order]
            array = xp.reshape(array, tuple(self.shape[axis] for axis in axes))
            array = _flip(array, self.order)
            array = xp.permute_dims(array, tuple(axes.index(i) for i in range(len(axes))))
        return array if tuple(array.shape) == self.shape else xp.reshape(array, self.shape)

    def from_source(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Returns an array of the source in the layout of the model, which has this shape."""
        from fmapper.backends.namespace import array_namespace

        xp = array_namespace(array)
        if self.order is not None:
            array = xp.permute_dims(array, tuple(max(i, ~i) for i in self.order))
            array = _flip(array, self.order)
        return array if tuple(array.shape) == shape else xp.reshape(array, shape)


def _flip(array: Any, order: tuple[int, ...]) -> Any:
    from fmapper.backends.namespace import array_namespace

    axes = tuple(at for at, i in enumerate(order) if i < 0)
    return array_namespace(array).flip(array, axis=axes) if axes else array


def _stack(blocks: Sequence[Any], like: Any) -> Any:
    """Returns the arrays of blocks as one of the shape of another."""
    from fmapper.backends.namespace import array_namespace

    xp = array_namespace(blocks[0])
    return xp.reshape(xp.stack(list(blocks)), tuple(like.shape))


@dataclass(slots=True)
class Weights:
    """The arrays of a file, and those of its source.

    Attributes:
        arrays: Those of the file by the names that `state` gives them -> their places.
        slices: Arrays of the source that the file has parts of -> where those begin and end.
        stacks: Arrays of the source whose rows the file has -> the rows.
        aliases: Other names of tied arrays of the source -> the first.
        transient: Buffers that are not in the state dict of the source.
        rest: Arrays of the source that the file does not have.
        origin: The folder that they were read from.
        scanned: Lists of blocks that are one module in the file -> how many those are. `arrays` has
            the arrays of the single blocks.
    """

    arrays: dict[str, Place] = field(default_factory=dict)
    slices: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    transient: Collection[str] = ()
    rest: dict[str, Any] = field(default_factory=dict)
    origin: str = ""
    scanned: Mapping[str, int] = field(default_factory=dict)

    def rename(self, rename: Callable[[str], str]) -> Weights:
        """Returns them with other names for those of the source."""
        return replace(
            self,
            arrays={
                name: replace(place, name=rename(place.name)) for name, place in self.arrays.items()
            },
            stacks={rename(name): tuple(map(rename, rows)) for name, rows in self.stacks.items()},
            aliases={rename(other): rename(kept) for other, kept in self.aliases.items()},
            transient=tuple(map(rename, self.transient)),
            rest={rename(name): array for name, array in self.rest.items()},
        )

    def blocks_of(self, name: str) -> list[tuple[str, tuple[Any, ...]]]:
        """Returns the arrays of single blocks that an array has, and their indices."""
        for path, count in self.scanned.items():
            rest = name.removeprefix(f"{path}.")
            if rest != name and not rest[0].isdigit():
                return [
                    (part, (i, *at))
                    for i in range(count)
                    for part, at in self.blocks_of(f"{path}.{i}.{rest}")
                ]
        return [(name, ())]

    def keep_rest(self, arrays: Mapping[str, Any]) -> None:
        """Keeps those of the source's arrays that the file does not have."""
        known = {place.name for place in self.arrays.values()} | self.slices.keys()
        known |= self.stacks.keys() | {row for rows in self.stacks.values() for row in rows}
        self.rest = {name: arrays[name] for name in arrays if name not in known}


def source_weights(
    model: Any, backend: str, *, transient: bool = True
) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
    """Returns the arrays of a model of written classes by source name, and the inverse function.

    None for other models, those with arrays of another backend, and those whose arrays have no
    memory. See `Models.source_weights`.
    """
    from fmapper.backends.namespace import array_namespace
    from fmapper.states.state import refill

    held = _read(model, backend)
    if held is None:
        return None
    source, whole, own = held.source, held.whole, held.own
    found = {
        place.name: place.to_source(own[name])
        for name, place in source.arrays.items()
        if name in own
    }
    for name, parts in source.slices.items():
        ordered = sorted(parts, key=lambda part: parts[part][0])
        if all(part in found for part in ordered):
            xp = array_namespace(found[ordered[0]])
            found[name] = xp.concat([found.pop(part) for part in ordered], axis=0)
    for name, rows in reversed([*source.stacks.items()]):  # inner ones first
        if all(row in found for row in rows):
            xp = array_namespace(found[rows[0]])
            found[name] = xp.stack([found.pop(row) for row in rows])
    found = {**found, **source.rest}
    found |= {other: found[kept] for other, kept in source.aliases.items() if kept in found}
    named = {
        name: array for name, array in found.items() if transient or name not in source.transient
    }

    def back(filled: Mapping[str, Any]) -> Any:
        new = {id(whole[name]): array for name, array in held.arrays_of(filled).items()}
        return refill(model, lambda link, leaf: new.get(id(leaf), leaf))

    return named, back


def arrays_from_source(model: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
    """Returns a function that makes the arrays of a model of written classes of its source's.

    None for other models.
    """
    held = _read(model)
    return None if held is None else held.arrays_of


@dataclass(frozen=True, slots=True)
class _Held:
    """The arrays of a model of written classes.

    Attributes:
        source: Where they are in the source.
        whole: The arrays by their names in the model.
        blocks: The arrays of single blocks that each has, and their indices.
        own: These arrays.
    """

    source: Weights
    whole: Mapping[str, Any]
    blocks: Mapping[str, Sequence[tuple[str, tuple[Any, ...]]]]
    own: Mapping[str, Any]

    def arrays_of(self, filled: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays of the model by name, made of those of the source."""
        source, arrays = self.source, dict(filled)
        for name, rows in source.stacks.items():
            if name in arrays:
                arrays |= {row: arrays[name][i] for i, row in enumerate(rows)}
        for name, parts in source.slices.items():
            if name in arrays:
                arrays |= {part: arrays[name][slice(*at)] for part, at in parts.items()}
        given = {
            name: place.from_source(arrays[place.name], tuple(self.own[name].shape))
            for name, place in source.arrays.items()
            if name in self.own and place.name in arrays
        }
        new = {}
        for name, array in self.whole.items():
            blocks = self.blocks[name]
            if any(part in given for part, _ in blocks):
                several = [given.get(part, self.own[part]) for part, _ in blocks]
                new[name] = _stack(several, array) if blocks != [(name, ())] else several[0]
        return new


def _read(model: Any, backend: str = "") -> _Held | None:
    from fmapper.backends.discovery import owner_of
    from fmapper.states.materialize import is_abstract
    from fmapper.states.state import named_arrays

    built = source_of_model(model)
    if built is None:
        return None
    source = built.weights
    whole = {name: array for name, (_, array) in named_arrays(model).items()}
    blocks = {name: source.blocks_of(name) for name in whole}
    held = [
        whole[name]
        for name, parts in blocks.items()
        if any(part in source.arrays for part, _ in parts)
    ]
    if backend and any(is_abstract(array) or owner_of(array).name != backend for array in held):
        return None
    own = {
        part: array[at] if at else array
        for name, array in whole.items()
        for part, at in blocks[name]
    }
    return _Held(source, whole, blocks, own)
