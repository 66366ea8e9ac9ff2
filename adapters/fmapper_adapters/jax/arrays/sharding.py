"""Arrays on meshes: their layout, and arrays assembled from the shards of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from fmapper.backends import Box, Meshes, Packed, PackedAxes, Spec
from fmapper_adapters.jax.arrays.computed import Computed, by_coordinator
from fmapper_adapters.jax.arrays.packed import PackedArray, blocks_of, boxes_in_order, pack

if TYPE_CHECKING:
    from fmapper.meshes import DimensionRule

_Spec: Any = jax.sharding.PartitionSpec  # untyped in JAX
_shape_only: Any = jax.ShapeDtypeStruct
_place = attrgetter("shape", "dtype", "sharding")
_WITHOUT_PLACE = (jax.core.Tracer, PackedArray)
_typeof: Any = getattr(jax, "typeof", None)  # since JAX 0.6


class JaxMeshes(Computed, Meshes):
    """The facet of the adapter for `jax.sharding.Mesh`es and arrays on them."""

    def places(self, arrays: Sequence[Any]) -> Iterator[Any]:
        """Yields shapes, dtypes and shardings, but of tracers and packed arrays."""
        if any(issubclass(cls, _WITHOUT_PLACE) for cls in {*map(type, arrays)}):
            return super().places(arrays)
        return map(_place, arrays)

    def mesh_axes(self, mesh: Any) -> Mapping[str, int] | None:
        """Returns the axes of a mesh, or of an `AbstractMesh`, which has no devices."""
        return dict(mesh.shape) if isinstance(mesh, Mesh | AbstractMesh) else None

    def shard(
        self, arrays: Sequence[Any], mesh: Any, specs: Sequence[Spec], where: Callable[[int], str]
    ) -> Iterable[Any]:
        """Moves all arrays with one `device_put`, which copies nothing already in place.

        Those with packed axes become `PackedArray`s.
        """
        wanted = [named_sharding(mesh, spec) for spec in specs]
        results = [_in_blocks(a, s, mesh) for a, s in zip(arrays, specs, strict=True)]
        moving = []
        for at, (result, sharding) in enumerate(zip(results, wanted, strict=True)):
            array = blocks_of(result)
            if isinstance(array, jax.ShapeDtypeStruct):
                new = _shape_only(array.shape, array.dtype, sharding=sharding)
                results[at] = _like(new, result)
            elif not _lies(array, sharding):
                moving.append(at)
        news = jax.device_put(
            [blocks_of(results[at]) for at in moving], [wanted[at] for at in moving]
        )
        for at, new in zip(moving, news, strict=True):
            results[at] = _like(new, results[at])
        return results

    def boxes_by_process(
        self, mesh: Any, shape: Sequence[int], spec: Spec
    ) -> Mapping[int, Sequence[Box]]:
        """Returns the boxes that the devices of each process hold."""
        how = _blocks(shape, spec, mesh)
        held = tuple(shape if how is None else how.blocks.shape)
        boxes: dict[int, dict[Box, None]] = {}
        places: Mapping[Any, Any] = named_sharding(mesh, spec).devices_indices_map(held)
        for device, index in places.items():
            box = _box(index, held)
            inner = [box] if how is None else [part for part, _ in boxes_in_order(how, box)]
            boxes.setdefault(device.process_index, {}).update(dict.fromkeys(inner))
        return {process: [*held] for process, held in boxes.items()}

    def own_boxes(self, mesh: Any, shape: Sequence[int], spec: Spec) -> Sequence[Box]:
        """Returns the boxes that the devices of this process hold."""
        how = _blocks(shape, spec, mesh)
        held = shape if how is None else how.blocks.shape
        places = named_sharding(mesh, spec).addressable_devices_indices_map(tuple(held))
        boxes = dict.fromkeys(_box(index, held) for index in places.values())
        return (
            [*boxes] if how is None else [box for b in boxes for box, _ in boxes_in_order(how, b)]
        )

    def assemble(
        self,
        shape: Sequence[int],
        dtype: str,
        mesh: Any,
        spec: Spec,
        read: Callable[[Box], np.ndarray[Any, Any]],
    ) -> Any:
        """Reads each box once, and puts it on its devices."""
        sharding, how = named_sharding(mesh, spec), _blocks(shape, spec, mesh)
        held = tuple(shape if how is None else how.blocks.shape)
        devices: dict[Box, list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(held).items():
            devices.setdefault(_box(index, held), []).append(device)
        parts = []
        for box, holders in devices.items():
            if how is None:
                part = read(box)
            else:
                part = np.concatenate([read(b) for b, _ in boxes_in_order(how, box)], how.dim)
                part = part.reshape([stop - start for start, stop in box])
            parts += jax.device_put([part] * len(holders), holders)
        dtype_: Any = np.dtype(jax.numpy.dtype(dtype))
        made = jax.make_array_from_single_device_arrays(held, sharding, parts, dtype=dtype_)
        return made if how is None else how.with_blocks(made)

    def process(self) -> tuple[int, int]:
        """Returns the process of `jax.distributed`; 0 of 1 if it was not started."""
        if not jax.distributed.is_initialized():
            return 0, 1
        return jax.process_index(), jax.process_count()

    def messages(self) -> tuple[Callable[[memoryview, int], object], Callable[[int], Any]]:
        """Returns functions that go through the coordinator."""
        return by_coordinator()

    def writers(self, array: Any) -> Mapping[Box, int] | None:
        """Returns the parts of an array that spans processes, each with its writer."""
        if not isinstance(array, jax.Array | PackedArray) or array.is_fully_addressable:
            return None
        boxes: dict[Box, int] = {}
        held = blocks_of(array).shape
        places: Mapping[Any, Any] = array.sharding.devices_indices_map(held)
        for device, index in places.items():
            for box, _ in _boxes_of(array, _box(index, held)):
                boxes[box] = min(device.process_index, boxes.get(box, device.process_index))
        return boxes

    def held_parts(self, array: Any) -> Mapping[Box, Any]:
        """Returns the shards on devices of this process; shapes alone of an abstract array."""
        if isinstance(array, jax.ShapeDtypeStruct):
            places = array.sharding.addressable_devices_indices_map(array.shape)
            boxes = (_box(index, array.shape) for index in places.values())
            sizes = {box: [stop - start for start, stop in box] for box in boxes}
            make: Any = jax.ShapeDtypeStruct
            return {box: make(shape, array.dtype) for box, shape in sizes.items()}
        blocks = blocks_of(array)
        return {
            box: shard.data if part is None else _cut(shard.data, part, box)
            for shard in blocks.addressable_shards
            for box, part in _boxes_of(array, _box(shard.index, blocks.shape))
        }

    def join(self, shape: Sequence[int], mesh: Any, spec: Spec, parts: Mapping[Box, Any]) -> Any:
        """Joins parts to an array; those already on their device stay."""
        sharding, how = named_sharding(mesh, spec), _blocks(shape, spec, mesh)
        held = tuple(shape if how is None else how.blocks.shape)
        places = sharding.addressable_devices_indices_map(held)

        def local(box: Box) -> Any:
            if how is None:
                return parts[box]
            pieces = [parts[inner] for inner, _ in boxes_in_order(how, box)]
            return jnp.concatenate(pieces, how.dim).reshape([stop - start for start, stop in box])

        arrays = [jax.device_put(local(_box(i, held)), device) for device, i in places.items()]
        made = jax.make_array_from_single_device_arrays(held, sharding, arrays)
        return made if how is None else how.with_blocks(made)

    def packings(self, node: Any) -> Iterable[tuple[str, Any, Packed]]:
        """Returns the parameters of a converted model that pack several arrays side by side."""
        if not getattr(type(node), "is_converted_model", False):
            return
        for name, packed in node.packed.items():
            yield name, node.params[name], packed

    def dimension_rule(self, op: str) -> DimensionRule | None:
        """Returns the dimension rule of an operation of torch."""
        from fmapper_adapters.jax.aten import table

        return table.dims(op)

    def layout(self, array: Any) -> tuple[Any, Spec] | None:
        """Returns mesh and spec of a sharded array; None for others."""
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return None
        entries = [_axes(entry) for entry in tuple(sharding.spec)]
        entries += [()] * (len(blocks_of(array).shape) - len(entries))
        if isinstance(array, PackedArray):
            del entries[array.dim]
            entries[array.dim] = PackedAxes(entries[array.dim], array.sizes)
        return sharding.mesh, tuple(entries)


def named_sharding(mesh: Any, spec: Spec) -> NamedSharding:
    """Returns the sharding of a spec in its canonical form; for packed axes that of the blocks."""
    entries: list[Any] = []
    for axes in spec:
        entries.append(axes[0] if len(axes) == 1 else tuple(axes) or None)
        entries += [None] * isinstance(axes, PackedAxes)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, _Spec(*entries))


def count_devices(values: Iterable[Any]) -> int:
    """Returns the number of devices of a mesh that may share an array; 1 without a mesh.

    Within a `shard_map`, its manual axes do not count.
    """
    for value in values if _typeof is not None else ():
        if not isinstance(value, jax.Array):
            continue
        mesh = getattr(getattr(_typeof(value), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty:
            manual = getattr(mesh, "manual_axes", ())
            return math.prod(size for axis, size in mesh.shape.items() if axis not in manual)
    return 1


def _blocks(shape: Sequence[int], spec: Spec, mesh: Any) -> PackedArray | None:
    """Returns a packed array without values if the spec packs arrays, else None."""
    for at, axes in enumerate(spec):
        if isinstance(axes, PackedAxes):
            count = math.prod(mesh.shape[axis] for axis in axes)
            return pack(_shape_only(tuple(shape), bool), at, axes.sizes, count)
    return None


def _in_blocks(array: Any, spec: Spec, mesh: Any) -> Any:
    """Returns an array in the order that a spec asks for."""
    how, ordered = _blocks(array.shape, spec, mesh), array
    if isinstance(array, PackedArray):
        if how is not None and (array.dim, array.sizes, array.count) == (
            how.dim, how.sizes, how.count,
        ):  # fmt: skip
            return array
        ordered = array.in_order()
    return ordered if how is None else pack(ordered, how.dim, how.sizes, how.count)


def _like(new: Any, old: Any) -> Any:
    return old.with_blocks(new) if isinstance(old, PackedArray) else new


def _boxes_of(array: Any, box: Box) -> Iterator[tuple[Box, Box | None]]:
    """Yields the boxes of an array on a device; for a packed one, with their boxes in its shard."""
    if isinstance(array, PackedArray):
        yield from boxes_in_order(array, box)
    else:
        yield box, None


def _cut(part: Any, where: Box, box: Box) -> Any:
    """Cuts a box of an array out of a device's part of it."""
    starts, stops = zip(*where, strict=True)
    return lax.slice(part, starts, stops).reshape([stop - start for start, stop in box])


def _lies(array: Any, sharding: NamedSharding) -> bool:
    """Returns whether an array already has this sharding on this mesh."""
    current = getattr(array, "sharding", None)
    return not isinstance(array, jax.core.Tracer) and current == sharding and array.committed


def _box(index: Any, shape: Sequence[int]) -> Box:
    ranges = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in ranges)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
