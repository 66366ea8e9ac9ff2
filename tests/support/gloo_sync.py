"""Checks of `fmapper.Sync` by four processes of torch; `sync/test_processes.py` has them run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fmapper

FOLDER = Path()
RANK = torch.distributed.get_rank()
FLAT = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
SAID = r"^rank 2 cannot pack arrays: MemoryError: no room\. The running model has its old weights$"
TENSOR = {"up": ("model",), "down.weight": (None, "model")}


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        self.head = nn.Linear(8, 7)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.zeros(8))


def make(seed: int = 0, width: int = 16) -> Net:
    torch.manual_seed(seed)
    return Net(width)


def change(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Gives a model other values, the same in all processes; returns them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            new = torch.randn(tuple(tensor.shape), generator=generator).to(tensor.dtype)
            found[name] = new
            if isinstance(tensor, DTensor):
                new = distribute_tensor(new, tensor.device_mesh, tensor.placements)
            tensor.copy_(new)
    return found


def assert_values(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        torch.testing.assert_close(whole, values[name].to(whole.dtype), rtol=0, atol=0, msg=name)


def trainer(width: int = 16) -> nn.Module:
    net = make(0, width)
    for layer in (net.up, net.down, net.head):
        fully_shard(layer, mesh=FLAT)
    fully_shard(net, mesh=FLAT)
    return net


def check_fully_sharded_to_tensor_parallel() -> None:
    source = trainer()
    target = fmapper.shard(make(1), MESH, TENSOR)
    held = target.up.weight
    sync = fmapper.Sync(source, target)
    for seed in (2, 3):
        values = change(source, seed)
        assert sync() is target
        assert_values(target, values)
    assert target.up.weight is held


def check_only_what_is_needed_is_sent() -> None:
    source = trainer()
    target = fmapper.shard(make(1), MESH, TENSOR)
    sync = fmapper.Sync(source, target)
    change(source, 2)
    sync()
    needed = 0
    for name, wanted in target.named_parameters():
        local = wanted.to_local() if isinstance(wanted, DTensor) else wanted
        own = dict(source.named_parameters())[name].to_local()
        del own
        needed += local.nbytes
    assert sync.stats.nbytes == needed + target.mean.nbytes + 4
    counts = [None] * 4
    torch.distributed.all_gather_object(counts, (sync.stats.sent, sync.stats.received))
    assert sum(sent for sent, _ in counts) == sum(received for _, received in counts)
    payload = sum(received for _, received in counts)
    assert sync.plan.sent <= payload <= sync.plan.sent + 8 * 4 * 4 * len(sync.plan)
    whole = sum(p.numel() * 4 for p in make().parameters())
    assert sync.plan.sent < 4 * whole


def check_tensor_parallel_to_fully_sharded() -> None:
    source = fmapper.shard(make(1), MESH, TENSOR)
    target = trainer()
    sync = fmapper.Sync(source, target)
    values = change(source, 5)
    sync()
    assert_values(target, values)


def check_rows_that_do_not_divide_evenly() -> None:
    pair = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    source, target = make(0), make(1)
    fully_shard(source.head, mesh=pair)  # 7 rows over 4 processes
    sync = fmapper.Sync(source, target)
    values = change(source, 6)
    sync()
    assert_values(target, values)


def check_shards_of_other_sizes_than_their_mesh_gives_are_refused() -> None:
    """`fully_shard` makes such ones on a mesh whose ranks do not ascend."""
    pair = init_device_mesh("cpu", (4,))
    local, whole = torch.zeros(3, 7), torch.Size([7, 7])  # 2, 2, 2, and 1 row by the mesh
    shards = DTensor.from_local(local, pair, [Shard(0)], shape=whole, stride=(7, 1))
    with pytest.raises(fmapper.PlacementError, match=r"\[3, 7\] in this process, but \[[12], 7\]"):
        fmapper.Sync({"w": torch.zeros(7, 7)}, {"w": shards})


def check_the_mesh_that_fully_shard_makes_by_itself() -> None:
    """Its axes have no names."""
    source, target = make(0), make(1)
    fully_shard(source)
    fully_shard(target)
    sync = fmapper.Sync(source, target)
    values = change(source, 6)
    sync()
    assert_values(target, values)
    loaded = fmapper.load_state(target.state_dict(), {n: 2 * v for n, v in values.items()})
    for name, tensor in loaded.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, 2 * values[name])


def check_a_cast_is_sent_as_the_target_has_it() -> None:
    source, target = trainer(), make(1).bfloat16()
    sync = fmapper.Sync(source, target)
    values = change(source, 7)
    sync()
    assert_values(target, values)
    whole = sum(p.numel() * 2 for p in target.parameters())
    assert sync.stats.received <= whole


def check_a_source_in_two_processes_and_a_target_in_the_others() -> None:
    source = make(0) if RANK < 2 else None
    target = make(1) if RANK >= 2 else None
    sync = fmapper.Sync(source, target)
    generator = torch.Generator().manual_seed(8)
    values = {n: torch.randn(p.shape, generator=generator) for n, p in make().state_dict().items()}
    if source is not None:
        source.load_state_dict(values)
    sync()
    if target is not None:
        assert_values(target, values)
    whole = sum(p.nbytes for p in make().state_dict().values())
    assert (sync.stats.sent, sync.stats.received)[RANK >= 2] - whole < 64


def check_one_that_cannot_begin_stops_all() -> None:
    source, target = trainer(), make(1)
    before = copy.deepcopy(target.state_dict())
    sync = fmapper.Sync(source, target)
    change(source, 9)
    if RANK == 2:
        target.scale = torch.ones(3)
    with pytest.raises(fmapper.SyncError, match=r"rank 2 cannot begin|scale"):
        sync()
    if RANK == 2:
        target.scale = torch.ones(())
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name])
    values = change(source, 10)
    sync()  # nobody has failed: the next call works
    assert_values(target, values)


def check_arrays_that_cannot_be_packed_are_said_to_all() -> None:
    from fmapper.sync import exchange

    source, target = trainer(), make(1)
    before = copy.deepcopy(target.state_dict())
    sync = fmapper.Sync(source, target)
    change(source, 9)
    pack = exchange._Packet.pack

    def fail(self: Any) -> Any:
        raise MemoryError("no room")

    if RANK == 2:
        exchange._Packet.pack = fail  # type: ignore[method-assign]
    kind, text = (MemoryError, "no room") if RANK == 2 else (fmapper.SyncError, SAID)
    with pytest.raises(kind, match=text):
        sync()
    exchange._Packet.pack = pack  # type: ignore[method-assign]
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(fmapper.SyncError, match="an earlier call has failed"):
        sync()
    values = change(source, 10)
    fmapper.Sync(source, target)()
    assert_values(target, values)


def check_changes_alone_are_sent() -> None:
    source, target = trainer(), make(1)
    sync = fmapper.Sync(source, target)
    change(source, 11)
    sync(delta=True)
    whole = sync.stats.received
    with torch.no_grad():
        source.scale.add_(1)
    sync(delta=True)
    assert sync.stats.received < max(whole / 10, 100)
    values = {
        n: (t.full_tensor() if isinstance(t, DTensor) else t)
        for n, t in [*source.named_parameters(), *source.named_buffers()]
    }
    assert_values(target, values)


def check_a_generator_in_another_framework() -> None:
    import jax
    import numpy as np
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, **sizes)
    model = LlamaForCausalLM(config).eval()
    generator = fmapper.generator(
        copy.deepcopy(model), max_length=12, to="jax", check=False, max_new_tokens=4
    )
    prompt = np.array([[1, 2, 3]])
    generator(prompt)
    whole = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=FLAT)
    fully_shard(model, mesh=FLAT)
    sync = fmapper.Sync(model, generator)
    values = change(model, 12)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(values[name])
    assert sync() is generator
    answer = whole.generate(torch.tensor(prompt), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert np.asarray(generator(prompt)).tolist()[0][: answer.shape[1]] == answer[0].tolist()
    assert isinstance(next(iter(generator.live_arrays().values())), jax.Array)
