"""Checks of `fmapper.Sync` between processes of `jax.distributed`, two devices each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import fmapper
from fmapper.checkpoints import Rules, Transpose

Spec: Any = jax.sharding.PartitionSpec  # untyped in JAX
FOLDER = Path()
FULLY = jax.make_mesh((4,), ("data",))
TENSOR = jax.make_mesh((2, 2), ("data", "model"))


def put(values: Any, mesh: Any, *spec: Any) -> Any:
    array = jnp.asarray(values)
    place = NamedSharding(mesh, Spec(*spec))
    return jax.make_array_from_callback(array.shape, place, lambda index: np.asarray(array)[index])


def weights(factor: float) -> dict[str, Any]:
    w, b = np.arange(64.0, dtype="float32").reshape(16, 4), np.arange(8.0, dtype="float32")
    return {"w": put(factor * w, FULLY, "data"), "b": put(factor * b, FULLY, "data")}


def assert_equal(array: Any, values: Any) -> None:
    assert not array.is_fully_addressable
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def check_between_meshes() -> None:
    target = {
        "w": put(jnp.zeros((4, 16), jnp.bfloat16), TENSOR, "model", "data"),
        "b": put(jnp.zeros(8), TENSOR),
    }
    layouts = {name: array.sharding for name, array in target.items()}
    sync = fmapper.Sync(weights(0), target, Rules([Transpose("w")]))
    for factor in (1, 2, 3):
        assert sync(weights(factor)) is target
        assert_equal(target["w"], factor * np.arange(64.0).reshape(16, 4).T)
        assert_equal(target["b"], factor * np.arange(8.0))
        assert {name: array.sharding for name, array in target.items()} == layouts
        assert (sync.stats.sent, sync.stats.received) == (0, 0)


def check_what_becomes_infinite_changes_nothing() -> None:
    target = {"w": put(jnp.zeros((16, 4), jnp.float16), TENSOR, "data"), "b": weights(0)["b"]}
    held = dict(target)
    sync = fmapper.Sync(weights(0), target)
    with pytest.raises(fmapper.LossyCastError, match=r"^w: "):
        sync(weights(1e6))
    assert all(target[name] is array for name, array in held.items())


def check_off_the_mesh() -> None:
    """What one process has whole comes through the coordinator."""
    target = {"w": np.zeros((16, 4)), "b": np.zeros(8)} if jax.process_index() else None
    sync = fmapper.Sync(weights(0), target)
    sync(weights(5))
    if target is not None:
        np.testing.assert_array_equal(target["w"], 5 * np.arange(64.0).reshape(16, 4))
        np.testing.assert_array_equal(target["b"], 5 * np.arange(8.0))
        assert sync.stats.received == (32 + 4) * 8
