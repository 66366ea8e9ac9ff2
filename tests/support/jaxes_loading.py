"""Checks of checkpoints in shards by four processes of JAX; `meshes/test_loading.py` runs them."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fmapper
from fmapper.backends import PackedAxes
from fmapper.meshes import Sharding

FOLDER = Path()
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
TREE = {
    "rows": np.arange(64, dtype=np.float32).reshape(16, 4),
    "columns": np.arange(64, dtype=np.float32).reshape(4, 16),
    "whole": np.arange(3, dtype=np.int32),
}
RULES = {"rows": ("data",), "columns": (None, ("data", "model"))}


def check_each_process_has_its_part() -> None:
    assert jax.process_count() == 4
    new = fmapper.shard(TREE, MESH, RULES)
    assert not new["rows"].is_fully_addressable
    for shard in new["columns"].addressable_shards:
        np.testing.assert_array_equal(shard.data, TREE["columns"][shard.index])
    total = jax.jit(lambda tree: sum(x.sum() for x in tree.values()))(new)
    assert float(total) == sum(x.sum() for x in TREE.values())


def check_each_process_writes_and_reads_its_part() -> None:
    tree = fmapper.shard(TREE, MESH, RULES)
    path = FOLDER / "tree.safetensors"
    fmapper.save({**tree, "step": 4}, path)
    found = fmapper.load(path)
    assert found["step"] == 4
    for name, want in TREE.items():
        np.testing.assert_array_equal(found[name].read(), want)
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in TREE.items()}
    flat = jax.make_mesh((8,), ("model",))
    new = fmapper.load(path, like=like, strict=False, sharding=Sharding(flat, {"rows": ("model",)}))
    assert new["rows"].sharding.spec == P("model")
    for shard in new["rows"].addressable_shards:
        np.testing.assert_array_equal(shard.data, TREE["rows"][shard.index])


def check_arrays_that_hold_several() -> None:
    rules = {
        "rows": (PackedAxes(["data"], [4, 12]),),
        "columns": (None, PackedAxes(["model"], [8, 8])),
    }
    tree = fmapper.shard(TREE, MESH, rules)
    path = FOLDER / "packed.safetensors"
    fmapper.save(tree, path)
    for name, want in TREE.items():
        np.testing.assert_array_equal(fmapper.load(path)[name].read(), want)
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in TREE.items()}
    again = fmapper.load(path, like=like, sharding=Sharding(MESH, rules))
    for name in rules:
        for one, other in zip(
            again[name].blocks.addressable_shards, tree[name].blocks.addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(one.data, other.data)
    plain = fmapper.shard(tree, MESH, {"rows": ("data",)})
    for shard in plain["rows"].addressable_shards:
        np.testing.assert_array_equal(shard.data, TREE["rows"][shard.index])
