"""Checks of a mesh of torch with one process; `meshes/test_loading.py` runs them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fmapper

FOLDER = Path()
MESH = init_device_mesh("cpu", (1,), mesh_dim_names=("model",))


def check_what_one_process_holds_is_written() -> None:
    tree = fmapper.shard({"w": torch.arange(8.0), "n": torch.ones(2)}, MESH, {"w": ("model",)})
    assert tree["w"].placements == (Shard(0),)
    fmapper.save(tree, FOLDER / "tree.safetensors")
    found = fmapper.load(FOLDER / "tree.safetensors", like=tree)
    assert torch.equal(found["w"].full_tensor(), torch.arange(8.0))
    assert found["w"].placements == (Shard(0),)
