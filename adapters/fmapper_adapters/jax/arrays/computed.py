"""Arrays computed by one compiled function, and messages between processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fmapper.backends import Compute
from fmapper_adapters.jax import _private
from fmapper_adapters.jax.arrays import devices
from fmapper_adapters.jax.arrays.packed import PackedArray

_PIECE = 2 << 20  # bytes of a message in one value of the coordinator
_PAUSE = 1000  # milliseconds before a process asks again
_Spec: Any = jax.sharding.PartitionSpec  # untyped in JAX
_groups = itertools.count()


class Computed(Compute):
    """The part of the adapter that computes arrays on all devices of a mesh at once."""

    def domain(self, array: Any) -> str:
        """Returns the devices of an array on a mesh, in their order.

        Returns "" for CPU devices of a single process: these can read each other's shards, whereas
        XLA may gather whole arrays to reshard them.
        """
        if isinstance(array, PackedArray | jax.ShapeDtypeStruct):
            return ""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            return super().domain(array)
        mesh_devices = sharding.mesh.devices.flat
        is_near = mesh_devices[0].platform == "cpu" and sharding.is_fully_addressable
        if is_near or sharding.memory_kind not in (None, devices.usual_memory(mesh_devices[0])):
            return ""
        return f"devices {[device.id for device in mesh_devices]}"

    def compile_for(
        self, run: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]], like: Sequence[Any]
    ) -> Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]:
        """Compiles a function with XLA; its results are sharded like the arrays in `like`."""
        lie = [array.sharding for array in like]
        mesh = lie[0].mesh if isinstance(lie[0], NamedSharding) else None
        everywhere = lie[0] if mesh is None else NamedSharding(mesh, _Spec())

        def copy(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            values, flags = run(arrays)
            return [jnp.copy(value) for value in values], flags

        compiled = jax.jit(copy, out_shardings=(lie, everywhere))
        return lambda arrays: compiled(jax.device_put(list(arrays), [*map(_implicit, arrays)]))


def _implicit(array: jax.Array) -> Any:
    """Returns the sharding of an array on a mesh where XLA chooses the shardings of results."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def by_coordinator() -> tuple[Callable[[memoryview, int], object], Callable[[int], Any]]:
    """Returns functions that send and receive bytes through the coordinator of `jax.distributed`.

    It is meant for few bytes: arrays on a mesh are sent by collectives.
    """
    client, rank, group = _private.coordinator(), jax.process_index(), next(_groups)
    sent: dict[int, Any] = {}
    received: dict[int, Any] = {}

    def name(sender: int, receiver: int, numbers: dict[int, Any], other: int) -> str:
        number = next(numbers.setdefault(other, itertools.count()))
        return f"fmapper/sync/{group}/{sender}/{receiver}/{number}"

    def send(data: memoryview, other: int) -> None:
        for start in range(0, max(len(data), 1), _PIECE):
            end = start + _PIECE
            more = b"\1" if end < len(data) else b"\0"
            client.key_value_set_bytes(name(rank, other, sent, other), more + data[start:end])

    def receive(other: int) -> Any:
        pieces = []
        while True:
            key = name(other, rank, received, other)
            piece = _private.wait_for_message(client, key, _PAUSE)
            client.key_value_delete(key)
            pieces.append(np.frombuffer(piece, np.uint8)[1:])
            if piece[:1] == b"\0":
                return np.concatenate(pieces)

    return send, receive
