"""Checks of loading in shards by four processes of torch; `meshes/test_loading.py` runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

import fmapper
from fmapper.checkpoints import SourceFile
from fmapper.meshes import Sharding

FOLDER = Path()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


@contextlib.contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Counts the bytes that this process reads from checkpoints, in the one element of a list."""
    count = [0]
    own = SourceFile.read_into

    def read_into(file: Any, handle: int, out: memoryview, offset: int) -> None:
        count[0] += len(out)
        own(file, handle, out, offset)

    SourceFile.read_into = read_into
    try:
        yield count
    finally:
        SourceFile.read_into = own


def check_a_module_without_memory_reads_its_own_shards() -> None:
    path = FOLDER / "whole.safetensors"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2048, 1024), nn.Linear(1024, 2048))
    if torch.distributed.get_rank() == 0:
        fmapper.save(net, path)
    torch.distributed.barrier()
    rules = {"0": ("model",), "1.weight": (None, "model")}
    like = nn.Sequential(nn.Linear(2048, 1024), nn.Linear(1024, 2048)).to("meta")
    with bytes_read() as read, CommDebugMode() as sent:
        new = fmapper.load(path, like=like, sharding=Sharding(MESH, rules))
    mine = sum(p.to_local().nbytes for p in new.parameters())
    assert mine <= read[0] <= 1.02 * mine, (mine, read[0])
    assert sent.get_total_counts() == 0
    assert isinstance(new[0].weight, nn.Parameter)
    assert new[0].weight.placements == (Replicate(), Shard(0))
    for (name, want), got in zip(net.named_parameters(), new.parameters(), strict=True):
        assert torch.equal(got.full_tensor(), want), name


def check_modules_that_gather_their_parameters_read_their_own_shards() -> None:
    path = FOLDER / "gathered.safetensors"
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(2048, 1024), nn.Linear(1024, 2048), nn.BatchNorm1d(2048))  # noqa: E731
    net = make().eval()
    if torch.distributed.get_rank() == 0:
        fmapper.save({"net": net, "epoch": 3}, path)
    torch.distributed.barrier()
    rules = {"0": ("model",), "1.weight": (None, "model")}
    for own, dtype in ((rules, None), ({}, None), (rules, "bfloat16")):
        sharding = Sharding(MESH, own, fsdp={nn.Linear: "data"})
        like = {"net": make().eval().to("meta"), "epoch": 0}
        with bytes_read() as read, CommDebugMode() as sent:
            found = fmapper.load(path, like=like, dtype=dtype, sharding=sharding)
        assert sent.get_total_counts() == 0
        new = found["net"]
        assert found["epoch"] == 3
        assert isinstance(new[0], FSDPModule)
        local = [p.to_local() for p in new.parameters()]
        mine = sum(4 * array.numel() for array in (*local, *new.buffers()))
        assert mine <= read[0] <= 1.02 * mine, (mine, read[0])
        assert new[1].weight.to_local().numel() == net[1].weight.numel() // (4 if own else 2)
        for (name, want), got in zip(net.named_parameters(), new.parameters(), strict=True):
            assert isinstance(got, nn.Parameter)
            assert torch.equal(got.full_tensor(), want.to(got.dtype)), name
        if dtype is None:
            x = torch.randn(4, 2048)
            with implicit_replication():
                got = new(x)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            torch.testing.assert_close(got, net(x), rtol=1e-5, atol=1e-5)
    filled = fmapper.materialize(
        make().to("meta"),
        net.state_dict(),
        sharding=Sharding(MESH, rules, fsdp={nn.Linear: "data"}),
    )
    assert torch.equal(filled[0].weight.full_tensor(), net[0].weight)


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
        "folder", "gathered.safetensors", "net.safetensors", "whole.safetensors"]  # fmt: skip
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


def check_a_folder_of_the_hub_with_tied_weights_whose_parameters_are_gathered() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2,
                         tie_word_embeddings=True)  # fmt: skip
    torch.manual_seed(0)
    module, folder = LlamaForCausalLM(config).eval(), FOLDER / "llama"
    if torch.distributed.get_rank() == 0:
        module.save_pretrained(folder)
    torch.distributed.barrier()
    sharding = Sharding(MESH, "model", fsdp="data")
    new = fmapper.from_pretrained(folder, "torch", sharding=sharding)
    assert isinstance(new.model.layers[1], FSDPModule)
    assert new.lm_head.weight is new.model.embed_tokens.weight
    assert new.lm_head.weight.to_local().shape == (16, 32)
    ids, own = torch.arange(16).reshape(2, 8), MESH["data"].get_local_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, new)]
    for _ in range(2):
        want = module(input_ids=ids, use_cache=False).logits
        (want**2).mean().backward()
        with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
            got = new(input_ids=ids[own : own + 1], use_cache=False).logits
            (got**2).mean().backward()
        got = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(got, want[own : own + 1], rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
