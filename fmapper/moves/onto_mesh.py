"""Moves arrays of any backend onto a mesh; each process reads only its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fmapper.backends.arrays import Arrays
from fmapper.backends.discovery import adapter_of
from fmapper.backends.meshes import Box, Meshes, PackedAxes, Spec, uneven_dimension
from fmapper.errors import CopyNeededError, PlacementError
from fmapper.moves.mover import Mover, to_numpy


def bring(array: Any, mesh: Any, spec: Spec, adapter: Meshes, *, copy: bool | None = None) -> Any:
    """Moves an array of any backend onto a mesh.

    Args:
        array: The array.
        mesh: The mesh.
        spec: The axes of the mesh that divide each dimension.
        adapter: The adapter of the mesh.
        copy: False shares the memory of shards with another framework, and raises if it cannot.

    Raises:
        CopyNeededError: `copy=False`, and the memory of a shard cannot be shared.
        PlacementError: This process lacks data of a part that it should hold.
    """
    assert isinstance(adapter, Arrays)
    source = _arrays(array)
    if source is adapter:
        return next(iter(adapter.shard([array], mesh, [spec], lambda _: "")))
    shape, dtype = source.shape(array), source.dtype(array)
    if isinstance(source, Meshes) and source.layout(array) is not None:
        return _bridge(array, source, mesh, spec, adapter, copy)
    if source.device(array).kind == "meta":
        hollow = adapter.abstract(shape, adapter.storable(dtype) or dtype)
        return next(iter(adapter.shard([hollow], mesh, [spec], lambda _: "")))
    if adapter.storable(dtype) != dtype:
        whole = Mover("shard", adapter.name)(array)
        return next(iter(adapter.shard([whole], mesh, [spec], lambda _: "")))

    def read(box: Box) -> Any:
        return source.read_box(array, box)

    return adapter.assemble(shape, dtype, mesh, spec, read)


def place_as(old: Any, new: Any) -> Any:
    """Shards new values like an array on a mesh; returns None if the division is uneven."""
    adapter = _arrays(old)
    assert isinstance(adapter, Meshes)
    layout = adapter.layout(old)
    assert layout is not None
    mesh, spec = layout
    if not adapter.divides_unevenly:
        axes = adapter.mesh_axes(mesh) or {}
        if uneven_dimension(spec, _arrays(old).shape(old), axes) is not None:
            return None
    return _arrays(old).like(bring(new, mesh, spec, adapter), old)


def _bridge(
    array: Any, source: Meshes, mesh: Any, spec: Spec, adapter: Meshes, copy: bool | None
) -> Any:
    """Moves an array from a mesh of another framework to this one.

    Each process assembles its parts from those that it holds, without communication.
    """
    assert isinstance(source, Arrays)
    assert isinstance(adapter, Arrays)
    if copy is False and any(isinstance(axes, PackedAxes) for axes in spec):
        raise CopyNeededError(
            "copy=False: packed arrays must be joined again, which copies them. Omit copy=False"
        )
    _check_parts(array, source, mesh, spec, adapter, copy)
    shape, held = source.shape(array), source.held_parts(array)
    move = Mover("shard", adapter.name, copy=copy)
    parts = {
        box: move(held[box] if box in held else _paste(box, held))
        for box in adapter.own_boxes(mesh, shape, spec)
    }
    return adapter.join(shape, mesh, spec, parts)


def _check_parts(
    array: Any, source: Meshes, mesh: Any, spec: Spec, adapter: Meshes, copy: bool | None
) -> None:
    """Checks that every process holds the parts that it needs.

    Either all processes raise or none: a single one that continued would wait forever.

    Raises:
        CopyNeededError: `copy=False`, and a process holds a part in pieces.
        PlacementError: A process lacks some of a part.
    """
    assert isinstance(source, Arrays)
    shape, layout = source.shape(array), source.layout(array)
    assert layout is not None
    held = source.boxes_by_process(layout[0], shape, layout[1])
    needed = adapter.boxes_by_process(mesh, shape, spec)
    worlds = source.process()[1], adapter.process()[1]
    lacking, pieces = [], []
    for process in range(max(worlds)):
        # A framework that was not started across processes sees only itself in each of them.
        boxes = held.get(process if worlds[0] > 1 else 0, ())
        for box in needed.get(process if worlds[1] > 1 else 0, ()):
            if sum(_common(box, other) for other in boxes) < _common(box, box):
                lacking.append((process, box, boxes))
            elif box not in boxes:
                pieces.append((process, box, boxes))
    if lacking:
        raise PlacementError(
            f"{_describe(*lacking[0])}, and the rest is in other processes. Reshard it in its own "
            "framework first."
        )
    if copy is False and pieces:
        raise CopyNeededError(f"copy=False: {_describe(*pieces[0])} in one piece")


def _common(box: Box, other: Box) -> int:
    """Returns the number of elements that two boxes have in common."""
    ranges = zip(box, other, strict=True)
    return math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in ranges)


def _describe(process: int, box: Box, held: Sequence[Box]) -> str:
    return f"process {process} holds {[*held]}, but needs {box}"


def _paste(box: Box, held: Mapping[Box, Any]) -> Any:
    """Assembles a part from several others, on the host."""
    import numpy as np

    parts = {piece: to_numpy(array) for piece, array in held.items()}
    new = np.empty([stop - start for start, stop in box], next(iter(parts.values())).dtype)
    for piece, values in parts.items():
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece, strict=True)]
        if all(start < stop for start, stop in common):
            to = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(common, box, strict=True))
            of = tuple(slice(s - c, e - c) for (s, e), (c, _) in zip(common, piece, strict=True))
            new[to] = values[of]
    return new


def _arrays(array: Any) -> Arrays:
    adapter = adapter_of(array)
    assert adapter is not None
    return adapter
