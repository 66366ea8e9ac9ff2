"""Checks of loading in shards by four processes of torch; `meshes/test_loading.py` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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
    path = FOLDER / "whole.safetensors"
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


def check_each_process_writes_its_part() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8))
    net.register_buffer("count", torch.arange(3))
    optimizer = torch.optim.Adam(net.parameters())
    net[1](net[0](torch.ones(8))).sum().backward()
    optimizer.step()
    rules = {"0": (("data", "model"),), "1.weight": ("data", "model")}
    whole = {"net": net, "optimizer": optimizer, "epoch": 3}
    tree = fmapper.shard(whole, MESH, rules)
    for name in ("net.safetensors", "folder"):
        fmapper.save(tree, FOLDER / name, "safetensors")
        found = fmapper.load(FOLDER / name)
        assert found["epoch"] == 3
        for key, want in fmapper.state(whole).items():
            assert torch.equal(torch.from_numpy(found[key].read()), want.detach()), (name, key)
    torch.distributed.barrier()
    with pytest.raises(FileExistsError, match="not an empty folder"):
        fmapper.save(tree, FOLDER / "folder", "safetensors")
    torch.distributed.barrier()
    assert sorted(path.name for path in FOLDER.iterdir() if "parts" not in path.name) == [
        "folder", "net.safetensors", "whole.safetensors"]  # fmt: skip
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("model",))
    like = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)).to("meta")
    like.register_buffer("count", torch.arange(3, device="meta"))
    new = fmapper.load(
        FOLDER / "net.safetensors", like={"net": like}, strict=False,
        sharding=Sharding(flat, {"0.weight": (None, "model")}),
    )["net"]  # fmt: skip
    assert new[0].weight.placements == (Shard(1),)
    assert torch.equal(new[0].weight.full_tensor(), net[0].weight)


def check_formats_that_one_process_writes_are_refused() -> None:
    tree = fmapper.shard({"w": torch.ones(8)}, MESH, {"w": ("data",)})
    with pytest.raises(
        fmapper.CheckpointError, match="several processes can write only safetensors"
    ):
        fmapper.save(tree, FOLDER / "tree.npz")
