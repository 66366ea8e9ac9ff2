"""Layouts: the mesh axes of each dimension of an array, parsed and checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from fmapper.backends.discovery import adapters
from fmapper.backends.meshes import Box, Meshes, PackedAxes, Spec, parts_of
from fmapper.errors import PlacementError

Axes: TypeAlias = tuple[Any, ...]
"""The axes that a rule gives an array: one, several or None for each dimension."""

LOGICAL: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tensor", "model", "tp", "mp"),
    "expert": ("expert", "ep"),
    "zero": ("fsdp", "zero"),
}
"""Names of axes in models and derived rules -> usual names of mesh axes.

A name stands for the first of these that the mesh has; if the mesh has none, the dimension is not
divided.
"""

BATCH = ("batch", "data", "dp", *LOGICAL["zero"])
"""The usual names of axes that divide the batch, for predictions of communication."""


def adapter_of_mesh(mesh: Any) -> Meshes | None:
    """Returns the adapter of a mesh; None for bare sizes.

    Raises:
        TypeError: It is neither a mesh nor sizes.
    """
    if isinstance(mesh, Mapping) and mesh and all(type(n) is int for n in mesh.values()):
        return None
    for adapter in adapters(Meshes):
        if adapter.mesh_axes(mesh) is not None:
            return adapter
    raise TypeError(
        f"{mesh!r} is not a mesh: pass a jax.sharding.Mesh from jax.make_mesh, or torch's "
        f"DeviceMesh from torch.distributed.device_mesh.init_device_mesh."
    )


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh by name.

    Raises:
        TypeError: It is not a mesh.
    """
    adapter = adapter_of_mesh(mesh)
    return dict(mesh if adapter is None else adapter.mesh_axes(mesh) or {})


def read_names(names: Mapping[str, Any] | None, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Returns the mesh axes that each name of an axis stands for.

    Args:
        names: The user's names -> an axis of the mesh, several, or None.
        mesh: The sizes of the axes of the mesh.

    Raises:
        PlacementError: A name stands for an axis that the mesh does not have.
    """
    meanings: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in mesh}
    for word, axes in LOGICAL.items():
        meanings.setdefault(word, tuple(itertools.islice((a for a in axes if a in mesh), 1)))
    for word, value in (names or {}).items():
        axes = _entry(value)
        for axis in axes:
            if axis not in mesh:
                raise PlacementError(
                    f"names[{word!r}] is {value!r}, but the mesh has no axis {axis!r}; "
                    f"its axes are {', '.join(mesh)}."
                )
        meanings[word] = axes
    return meanings


def read_spec(
    axes: Axes, shape: Sequence[int], mesh: Mapping[str, int], names: Mapping[str, Any]
) -> Spec:
    """Resolves a rule for an array of a shape to axes of the mesh.

    Args:
        axes: One entry for each dimension from the first on: an axis, a tuple of axes, or None.
            `...` stands for the remaining dimensions, which are not divided.
        shape: The shape of the array; one without dimensions is not divided.
        mesh: The sizes of the axes of the mesh.
        names: The axes that names stand for; see `read_names`.

    Raises:
        PlacementError: The rule is invalid, or does not fit the shape; the message lacks the path.
    """
    if not shape:
        return ()
    entries = list(axes)
    if entries.count(...) > 1:
        raise PlacementError(f"{axes!r} has `...` more than once")
    if ... in entries:
        at = entries.index(...)
        entries[at : at + 1] = [None] * max(0, len(shape) - len(entries) + 1)
    if len(entries) > len(shape) and any(_entry(e) for e in entries[len(shape) :]):
        raise PlacementError(
            f"{axes!r} has {len(entries)} entries, but the shape is {tuple(shape)}"
        )
    entries = entries[: len(shape)] + [None] * (len(shape) - len(entries))
    spec = tuple(_axes(entry, mesh, names) for entry in entries)
    used = [axis for dim in spec for axis in dim]
    for axis in used:
        if used.count(axis) > 1:
            raise PlacementError(f"{axes!r} has the axis {axis!r} of the mesh more than once")
    for place_axes, size in zip(spec, shape, strict=True):
        if isinstance(place_axes, PackedAxes):
            _check_packed(place_axes, size, parts_of(place_axes, mesh))
    return spec


def _check_packed(axes: PackedAxes, size: int, parts: int) -> None:
    if sum(axes.sizes) != size or any(part % parts for part in axes.sizes):
        raise PlacementError(
            f"arrays of sizes {', '.join(map(str, axes.sizes))} cannot be packed in a "
            f"dimension of {size}, each divided into {parts} parts: they must add up to it, and "
            "divide evenly"
        )


def _axes(entry: Any, mesh: Mapping[str, int], names: Mapping[str, Any]) -> tuple[str, ...]:
    axes: list[str] = []
    likely = next((axis for axis in LOGICAL["tensor"] if axis in mesh), next(iter(mesh), "model"))
    for word in _entry(entry):
        if word not in names:
            raise PlacementError(
                f"{word!r} is neither an axis of the mesh ({', '.join(mesh)}) nor a name that "
                f"names= translates, as in names={{{word!r}: {likely!r}}}"
            )
        axes += names[word]
    return PackedAxes(axes, entry.sizes) if isinstance(entry, PackedAxes) else tuple(axes)


def _entry(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, Iterable):
        parts = tuple(entry)
        if all(isinstance(part, str) for part in parts):
            return parts
    raise PlacementError(f"{entry!r} is not an axis, a tuple of axes or None")


def shard_shape(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of the largest part of an array."""
    return tuple(-(-size // parts_of(axes, mesh)) for axes, size in zip(spec, shape, strict=True))


def boxes_at(
    spec: Spec, shape: Sequence[int], mesh: Mapping[str, int], place: Mapping[str, int]
) -> tuple[Box, ...]:
    """Returns the boxes of an array on a device: one, or one for each of several packed arrays.

    Args:
        spec: The axes of the mesh that divide each dimension.
        shape: The shape of the array.
        mesh: The sizes of the axes of the mesh.
        place: The coordinate of the device on each axis.

    Examples:
        >>> mesh = {"data": 2, "model": 2}
        >>> boxes_at((("data", "model"), ()), (8, 3), mesh, {"data": 1, "model": 0})
        (((4, 6), (0, 3)),)
        >>> boxes_at((("data",),), (5,), mesh, {"data": 1, "model": 0})
        (((3, 5),),)
        >>> from fmapper.backends import PackedAxes
        >>> boxes_at((PackedAxes(["model"], [4, 8]),), (12,), mesh, {"data": 1, "model": 1})
        (((2, 4),), ((8, 12),))
    """
    ranges = []
    for axes, size in zip(spec, shape, strict=True):
        sizes = axes.sizes if isinstance(axes, PackedAxes) else (size,)
        ends = itertools.accumulate(sizes)
        pairs = zip(ends, sizes, strict=True)
        ranges.append([_range(end - size, end, axes, mesh, place) for end, size in pairs])
    return tuple(itertools.product(*ranges))


def _range(
    start: int, stop: int, axes: Iterable[str], mesh: Mapping[str, int], place: Mapping[str, int]
) -> tuple[int, int]:
    for axis in axes:  # if uneven, the last devices get less, as in torch
        step = -(-(stop - start) // mesh[axis])
        start = min(start + place[axis] * step, stop)
        stop = min(start + step, stop)
    return start, stop


def show_spec(spec: Spec) -> str:
    """Prints a spec: `data+expert, -, model` for three dimensions; `model in 2` for packed ones."""
    return ", ".join(map(_show_axes, spec)) or "-"


def _show_axes(axes: tuple[str, ...]) -> str:
    shown = "+".join(axes) or "-"
    return f"{shown} in {len(axes.sizes)}" if isinstance(axes, PackedAxes) else shown
