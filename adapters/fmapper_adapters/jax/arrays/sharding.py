"""Arrays on meshes: their layout, and arrays assembled from the shards of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from fmapper.backends import Box, Meshes, Spec

if TYPE_CHECKING:
    from fmapper.meshes import DimensionRule

_Spec: Any = jax.sharding.PartitionSpec  # untyped in JAX
_shape_only: Any = jax.ShapeDtypeStruct
_typeof: Any = getattr(jax, "typeof", None)  # since JAX 0.6


class JaxMeshes(Meshes):
    """The facet of the adapter for `jax.sharding.Mesh`es and arrays on them."""

    def mesh_axes(self, mesh: Any) -> Mapping[str, int] | None:
        """Returns the axes of a mesh, or of an `AbstractMesh`, which has no devices."""
        return dict(mesh.shape) if isinstance(mesh, Mesh | AbstractMesh) else None

    def shard(
        self, arrays: Sequence[Any], mesh: Any, specs: Sequence[Spec], where: Callable[[int], str]
    ) -> Iterable[Any]:
        """Moves all arrays with one `device_put`, which copies nothing already in place."""
        wanted = [named_sharding(mesh, spec) for spec in specs]
        results = list(arrays)
        moving = []
        for at, (array, sharding) in enumerate(zip(arrays, wanted, strict=True)):
            if isinstance(array, jax.ShapeDtypeStruct):
                results[at] = _shape_only(array.shape, array.dtype, sharding=sharding)
            elif not _lies(array, sharding):
                moving.append(at)
        news = jax.device_put([arrays[at] for at in moving], [wanted[at] for at in moving])
        for at, new in zip(moving, news, strict=True):
            results[at] = new
        return results

    def own_boxes(self, mesh: Any, shape: Sequence[int], spec: Spec) -> Sequence[Box]:
        """Returns the boxes that the devices of this process hold."""
        sharding = named_sharding(mesh, spec)
        indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
        return list(dict.fromkeys(_box(index, shape) for index in indices))

    def assemble(
        self,
        shape: Sequence[int],
        dtype: str,
        mesh: Any,
        spec: Spec,
        read: Callable[[Box], np.ndarray[Any, Any]],
    ) -> Any:
        """Reads each box once, and puts it on its devices."""
        sharding = named_sharding(mesh, spec)
        devices: dict[Box, list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
            devices.setdefault(_box(index, shape), []).append(device)
        parts = []
        for box, own in devices.items():
            part = read(box)
            parts += jax.device_put([part] * len(own), own)
        dtype_: Any = np.dtype(jax.numpy.dtype(dtype))
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts, dtype=dtype_)

    def process(self) -> tuple[int, int]:
        """Returns the process of `jax.distributed`; 0 of 1 where it was not started."""
        if not jax.distributed.is_initialized():
            return 0, 1
        return jax.process_index(), jax.process_count()

    def writers(self, array: Any) -> Mapping[Box, int] | None:
        """Returns the parts of an array that spans processes, each with its writer."""
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return None
        found: dict[Box, int] = {}
        places: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
        for device, index in places.items():
            box = _box(index, array.shape)
            found[box] = min(device.process_index, found.get(box, device.process_index))
        return found

    def held_parts(self, array: Any) -> Mapping[Box, Any]:
        """Returns the shards on devices of this process."""
        return {_box(one.index, array.shape): one.data for one in array.addressable_shards}

    def join(self, shape: Sequence[int], mesh: Any, spec: Spec, parts: Mapping[Box, Any]) -> Any:
        """Joins parts to an array; those already on their device stay."""
        sharding = named_sharding(mesh, spec)
        places = sharding.addressable_devices_indices_map(tuple(shape))
        arrays = [jax.device_put(parts[_box(i, shape)], device) for device, i in places.items()]
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)

    def dimension_rule(self, op: str) -> DimensionRule | None:
        """Returns the dimension rule of an operation of torch."""
        from fmapper_adapters.jax.aten.dimensions import RULES

        return RULES.get(op)

    def layout(self, array: Any) -> tuple[Any, Spec] | None:
        """Returns mesh and spec of a sharded array; None for others."""
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return None
        entries = [_axes(entry) for entry in tuple(sharding.spec)]
        return sharding.mesh, (*entries, *[()] * (len(array.shape) - len(entries)))


def named_sharding(mesh: Any, spec: Spec) -> NamedSharding:
    """Returns the sharding of a spec in its canonical form."""
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, _Spec(*entries))


def count_devices(values: Iterable[Any]) -> int:
    """Returns among how many devices of a mesh arrays may be divided: 1 without a mesh.

    Inside of a `shard_map` the axes that it divides by itself do not count.
    """
    for value in values if _typeof is not None else ():
        if not isinstance(value, jax.Array):
            continue
        mesh = getattr(getattr(_typeof(value), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty:
            manual = getattr(mesh, "manual_axes", ())
            return math.prod(size for axis, size in mesh.shape.items() if axis not in manual)
    return 1


def _lies(array: Any, sharding: NamedSharding) -> bool:
    """Returns whether an array already has this sharding on this mesh."""
    own = getattr(array, "sharding", None)
    return not isinstance(array, jax.core.Tracer) and own == sharding and array.committed


def _box(index: Any, shape: Sequence[int]) -> Box:
    ranges = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in ranges)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
