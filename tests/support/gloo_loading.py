"""Checks of loading in shards by four processes of torch; `meshes/test_loading.py` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import fmapper
from fmapper.checkpoints import SourceFile
from fmapper.meshes import Sharding

FOLDER = Path()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


def check_a_module_without_memory_reads_its_own_shards() -> None:
    path = FOLDER.parent / f"{torch.distributed.get_world_size()}-ranks.safetensors"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2048, 1024), nn.Linear(1024, 2048))
    if torch.distributed.get_rank() == 0:
        fmapper.save(net, path)
    torch.distributed.barrier()
    count = 0
    own = SourceFile.read_into

    def read_into(file: Any, handle: int, out: memoryview, offset: int) -> None:
        nonlocal count
        count += len(out)
        own(file, handle, out, offset)

    SourceFile.read_into = read_into
    rules = {"0": ("model",), "1.weight": (None, "model")}
    try:
        like = nn.Sequential(nn.Linear(2048, 1024), nn.Linear(1024, 2048)).to("meta")
        with CommDebugMode() as sent:
            new = fmapper.load(path, like=like, sharding=Sharding(MESH, rules))
    finally:
        SourceFile.read_into = own
    mine = sum(p.to_local().nbytes for p in new.parameters())
    assert mine <= count <= 1.02 * mine
    assert sent.get_total_counts() == 0
    assert isinstance(new[0].weight, nn.Parameter)
    assert new[0].weight.placements == (Replicate(), Shard(0))
    for (name, want), got in zip(net.named_parameters(), new.parameters(), strict=True):
        assert torch.equal(got.full_tensor(), want), name
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        path.unlink()
