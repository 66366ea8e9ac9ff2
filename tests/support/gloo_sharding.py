"""Checks of `fmapper.shard` by four processes of torch; `meshes/test_sharding.py` has them run."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fmapper
from fmapper.meshes import Sharding
from fmapper.tree.keypath import name_of

FOLDER = Path()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
RULES = {"up": ("model",), "down.weight": (None, "model")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.back = nn.Parameter(torch.eye(8))

    def forward(self, x: Any) -> Any:
        return self.head(self.down(torch.relu(self.up(x))))


def step(net: Any, optimizer: Any, x: Any) -> Any:
    y = net(x)
    (y**2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y


def check_a_model_and_its_optimizer_in_training() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    step(net, optimizer, x)
    with CommDebugMode() as sent:
        new, new_optimizer = fmapper.shard((net, optimizer), MESH, RULES)
        batch = fmapper.shard(x, MESH, ("data",))
    assert sent.get_total_counts() == 0
    assert isinstance(new.up.weight, nn.Parameter)
    assert new.up.weight.placements == (Replicate(), Shard(0))
    assert new.up.bias.placements == (Replicate(), Shard(0))
    assert new.down.weight.placements == (Replicate(), Shard(1))
    assert new.down.weight.to_local().shape == (8, 8)
    assert new.head.weight is new.back
    assert new_optimizer.state[new.down.weight]["exp_avg"].placements == (Replicate(), Shard(1))
    assert not isinstance(net.up.weight, DTensor)
    assert batch.placements == (Shard(0), Replicate())
    for _ in range(2):
        want = step(net, optimizer, x)
        with implicit_replication():
            got = step(new, new_optimizer, batch)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-6)
    for (name, wanted), given in zip(net.named_parameters(), new.parameters(), strict=True):
        torch.testing.assert_close(given.full_tensor(), wanted, rtol=1e-5, atol=1e-6, msg=name)


def check_arrays_of_others_are_read_a_part_at_a_time() -> None:
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    new = fmapper.shard({"w": array}, MESH, {"w": (("data", "model"),)})["w"]
    array[:] = -1
    rank = torch.distributed.get_rank()
    want = torch.arange(64.0).reshape(8, 8)
    assert torch.equal(new.to_local(), want[2 * rank : 2 * rank + 2])
    assert torch.equal(new.full_tensor(), want)


def check_what_lies_there_is_given_back_and_the_rest_is_sent() -> None:
    once = fmapper.shard({"w": torch.arange(64.0).reshape(8, 8)}, MESH, {"w": ("data",)})
    assert fmapper.shard(once, MESH, {"w": ("data",)})["w"] is once["w"]
    other = fmapper.shard(once, MESH, {"w": (None, "model")})["w"]
    assert other.placements == (Replicate(), Shard(1))
    assert torch.equal(other.full_tensor(), torch.arange(64.0).reshape(8, 8))


def check_a_state_goes_where_the_old_arrays_lie() -> None:
    torch.manual_seed(0)
    net, other = Net(), Net()
    new = fmapper.shard(net, MESH, RULES)
    wanted = fmapper.to_torch(fmapper.to_numpy(fmapper.state(other), copy=True))
    for state in (wanted, fmapper.to_numpy(wanted), fmapper.shard(wanted, MESH, {})):
        filled = fmapper.load_state(new, state)
        assert filled.head.weight is filled.back
        for name, parameter in filled.named_parameters():
            old = new.get_parameter(name)
            assert isinstance(parameter, nn.Parameter)
            assert (parameter.placements, parameter.device_mesh) == (old.placements, MESH)
            assert torch.equal(parameter.full_tensor(), wanted[name])
        with torch.no_grad():
            for parameter in filled.parameters():
                parameter.to_local().fill_(-1)
        for name, array in fmapper.to_torch(state).items():
            held = array.full_tensor() if isinstance(array, DTensor) else array
            assert torch.equal(held, wanted[name])


def check_copies_and_casts_stay_on_the_mesh() -> None:
    net = fmapper.shard(Net(), MESH, RULES)
    twin = fmapper.to_torch(net, copy=True)
    half = fmapper.to_torch(net, dtype="float16")
    empty = fmapper.to_device("meta")(net)
    for name, old in net.named_parameters():
        for new in (twin, half, empty):
            made = new.get_parameter(name)
            assert isinstance(made.data, DTensor)
            assert made.placements == old.placements
        assert torch.equal(half.get_parameter(name).to_local(), old.to_local().half())
        assert torch.equal(twin.get_parameter(name).to_local(), old.to_local())
        assert twin.get_parameter(name).to_local().data_ptr() != old.to_local().data_ptr()
        assert empty.get_parameter(name).device.type == "meta"
    assert twin.head.weight is twin.back
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"divided among processes"):
        fmapper.to_numpy(fmapper.state(net))
    gathered = fmapper.to_numpy(fmapper.shard(fmapper.state(net), MESH, None))
    for name, tensor in net.named_parameters():
        np.testing.assert_array_equal(gathered[name], tensor.full_tensor().detach().numpy())
    model = fmapper.convert(torch.nn.Linear(4, 2), "jax", (torch.ones(3, 4),))
    new = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}
    loaded = model.load_state_dict(fmapper.shard(new, MESH, None))
    np.testing.assert_array_equal(loaded.params["weight"], np.ones((2, 4)))


def check_what_a_dtensor_cannot_be_is_refused_by_name() -> None:
    tree = {"w": torch.ones(8, 8), "b": torch.ones(3)}
    with pytest.raises(fmapper.PlacementError, match=r"model.w: .*in the order of its mesh"):
        fmapper.shard(tree, MESH, {"w": (("model", "data"),)})
    with pytest.raises(fmapper.PlacementError, match=r"model.b.*does not divide evenly by 2"):
        fmapper.shard(tree, MESH, {"*": ("model",)})
    with pytest.raises(fmapper.PlacementError, match=r"model\.s: .*torch\.sparse_coo.*to_dense"):
        fmapper.shard({"s": torch.eye(4).to_sparse()}, MESH, {"s": ("model",)})
    for layer in (nn.LSTM(4, 4), nn.EmbeddingBag(8, 4)):
        with pytest.raises(fmapper.PlacementError, match=r"model\[0\]: torch cannot compute a"):
            fmapper.shard(nn.Sequential(layer), MESH, ())
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("model",))
    on_flat = fmapper.shard(tree, flat, {"w": ("model",)})
    with pytest.raises(fmapper.PlacementError, match=r"model.w: is on another mesh"):
        fmapper.shard(on_flat, MESH, {"w": ("model",)})
    with pytest.raises(ValueError, match="have no names"):
        fmapper.shard(tree, init_device_mesh("cpu", (4,)), {"w": ("model",)})


class Sent(TorchDispatchMode):
    """Counts what processes send each other; torch's own mode stumbles over hooks of modules."""

    def __enter__(self) -> Any:
        self.counts: Counter[str] = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        name = func.name().rpartition("::")[2]
        is_sent = func.namespace == "_c10d_functional" and "wait" not in name
        if (is_sent and "_wrap" not in name) or func.namespace == "c10d":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Pictures(nn.Module):
    """Convolutions and norms, with channels that rules divide, and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding="same", padding_mode="reflect")
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 16, 3, groups=4, dilation=2)
        self.second = nn.Conv2d(16, 8, 3, stride=2)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1)
        self.back = nn.ConvTranspose2d(6, 4, (3, 2), bias=False)
        self.last = nn.BatchNorm2d(4, momentum=None, affine=False)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)

    def forward(self, x: Any) -> Any:
        x = self.grouped(torch.relu(self.norm(self.first(x))))
        x = self.up(torch.relu(self.second(x)), output_size=(6, 6))
        return self.depthwise(self.last(self.back(x)))


def check_convolutions_and_norms_in_parts() -> None:
    torch.manual_seed(0)
    rules = {
        "whole": (),
        "channels": {"first": ("model",), "norm": ("model",), "grouped": ("model",),
                     "second.weight": (None, "model"), "up.weight": (None, "model"),
                     "up.bias": ("model",), "back.weight": ("model",), "depthwise": ("model",)},
        "memory": {"*.weight": ("data",), "depthwise": ("data", None)},
        "other": {"first.bias": ("model",), "grouped.weight": (None, "model"),
                  "last.running_mean": ("model",), "depthwise.weight": ("model",)},
    }  # fmt: skip
    x = torch.randn(6, 4, 9, 9, dtype=torch.float64)
    for name, own in rules.items():
        net = Pictures().double().train()
        new = fmapper.shard(net, MESH, own)
        for place in (("data",), (), (None, "model"), (None, None, "data", "model")):
            batch = fmapper.shard(x, MESH, place, uneven="replicate")
            with implicit_replication():
                got = new(batch)
                (got**3).mean().backward()
            want = net(x)
            (want**3).mean().backward()
            torch.testing.assert_close(got.full_tensor(), want, msg=f"{name}, {place}")
            for key, old in net.named_parameters():
                given = new.get_parameter(key).grad
                torch.testing.assert_close(
                    given.full_tensor(), old.grad, msg=f"{name}, {place}, {key}"
                )
            for key, old in net.named_buffers():
                torch.testing.assert_close(new.get_buffer(key).full_tensor(), old, msg=key)
        net.eval(), new.eval()
        with implicit_replication(), torch.no_grad():
            got = new(batch)
            torch.testing.assert_close(got.full_tensor(), net(x))
            torch.testing.assert_close(new.first(x[0]).full_tensor(), net.first(x[0]))
        again = fmapper.fmap(lambda leaf: leaf, new)
        assert again.first.weight is new.first.weight
        assert isinstance(again.first, nn.Conv2d)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        new.first(x)


def check_norms_and_convolutions_along_the_batch_send_nothing() -> None:
    net = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ConvTranspose1d(8, 4, 3)).eval()
    x = torch.randn(4, 4, 9)
    new, batch = fmapper.shard(net, MESH, ()), fmapper.shard(x, MESH, ("data",))
    with implicit_replication(), torch.no_grad(), Sent() as sent:
        got = new(batch)
    assert got.placements == (Shard(0), Replicate())
    assert not sent.counts
    torch.testing.assert_close(got.full_tensor(), net(x))


class OwnConvolution(nn.Conv2d):
    def forward(self, x: Any) -> Any:
        return super().forward(x * 2)


def check_convolutions_that_torch_cannot_divide_are_refused_by_name() -> None:
    net = nn.Sequential(OwnConvolution(4, 8, 3), OwnConvolution(8, 4, 3))
    for rules in ({"0": ("model",)}, {"1.weight": (None, "model")}, {"0.bias": ("model",)}):
        with pytest.raises(
            fmapper.PlacementError, match=r"model\[[01]\]\.(weight|bias): torch's conv"
        ):
            fmapper.shard(net, MESH, rules)
    x = torch.ones(2, 4, 8, 8)
    with implicit_replication():
        found = fmapper.shard(net, MESH, ())(fmapper.shard(x, MESH, ("data",)))
    torch.testing.assert_close(found.full_tensor(), net(x))


def experts_of(name: str, implementation: str) -> Any:
    import transformers
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_local_experts": 4}
    if name == "mixtral":
        module: Any = MixtralExperts(transformers.MixtralConfig(**sizes))
    else:  # with biases, transposed, gate and up in turns
        module = GptOssExperts(transformers.GptOssConfig(**sizes))
    module.config._experts_implementation = implementation
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


FEATURES = {
    "mixtral": {"gate_up_proj": (None, "model"), "down_proj": (None, None, "model")},
    "gpt_oss": {
        "gate_up_proj": (None, None, "model"),
        "down_proj": (None, "model"),
        "gate_up_proj_bias": (None, "model"),
    },
}


def check_experts_in_parts() -> None:
    torch.manual_seed(0)
    x, scores = torch.randn(12, 8), torch.rand(12, 4).softmax(-1)
    values, chosen = scores.topk(2)
    by_expert, zero = {"*_proj": ("model",)}, {"*_proj": (None, "data")}
    gathered = {"all_gather_into_tensor": 2}
    for name, implementation, rules, counts in (
        ("mixtral", "grouped_mm", FEATURES["mixtral"], {"all_reduce": 1}),
        ("mixtral", "batched_mm", FEATURES["mixtral"], {"all_reduce": 1}),
        ("mixtral", "eager", FEATURES["mixtral"], gathered),
        ("mixtral", "grouped_mm", {}, {}),
        ("mixtral", "grouped_mm", by_expert, gathered),
        ("mixtral", "grouped_mm", zero, gathered),
        ("gpt_oss", "grouped_mm", FEATURES["gpt_oss"], {"all_reduce": 1}),
    ):
        module = experts_of(name, implementation)
        new = fmapper.shard(module, MESH, rules)
        given = [t.clone().requires_grad_(t.is_floating_point()) for t in (x, chosen, values)]
        parts = [fmapper.shard(t, MESH, ("data",)) for t in (x, chosen, values)]
        own = [t.detach().requires_grad_(t.is_floating_point()) for t in parts]
        with Sent() as sent:
            found = new(*own)
        assert sent.counts == counts, (sent.counts, name, implementation, rules)
        wanted = module(*given)
        np.testing.assert_allclose(whole(found), wanted.detach(), rtol=1e-5, atol=1e-5)
        (found**2).mean().backward()
        (wanted**2).mean().backward()
        pairs = [(own[0], given[0]), (own[2], given[2])]
        pairs += zip(new.parameters(), module.parameters(), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(whole(a.grad), b.grad, rtol=1e-5, atol=1e-5)
        for a, b in zip(new.parameters(), module.parameters(), strict=True):
            np.testing.assert_array_equal(whole(a), b.detach())
        for again in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
            assert type(again) is type(new)
            np.testing.assert_allclose(whole(again(*own)), whole(found), rtol=1e-6, atol=1e-6)


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy()


def check_modules_of_fully_shard() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)), torch.randn(4, 8)
    path = FOLDER / "net.safetensors"
    if torch.distributed.get_rank() == 0:
        fmapper.save(net, path)
    torch.distributed.barrier()
    hollow = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).to("meta")
    rules = {"0": ("model",), "2.weight": (None, "model")}
    new = fmapper.shard(hollow, MESH["model"], rules)
    for module in (new[0], new[2], new):
        fully_shard(module, mesh=MESH["data"])
    by_option = fmapper.shard(hollow, MESH, rules, fsdp={nn.Linear: "data"})
    for name, own in new.named_parameters():
        other = by_option.get_parameter(name)
        assert other.is_meta
        assert (other.placements, other.device_mesh) == (own.placements, own.device_mesh)
        assert other.to_local().shape == own.to_local().shape
    by_option.load_state_dict(fmapper.load(path, like=by_option.state_dict()), assign=True)
    with pytest.raises(fmapper.RebuildError, match=r"like=module\.state_dict\(\)"):
        fmapper.load(path, like=new)
    with Sent() as sent:
        new.load_state_dict(fmapper.load(path, like=new.state_dict()), assign=True)
    assert not sent.counts
    weight = new[0].weight  # of 16 rows by two axes
    assert weight.placements[1] == Shard(0)
    assert weight.to_local().shape == (4, 8)
    assert new[2].bias.to_local().shape in ((3,), (2,))  # of 5
    fmapper.save(new, FOLDER / "again.safetensors")
    torch.distributed.barrier()
    again = fmapper.load(FOLDER / "again.safetensors")
    for name, want in net.named_parameters():
        np.testing.assert_array_equal(again[name].read(), want.detach(), err_msg=name)
        assert torch.equal(by_option.get_parameter(name).full_tensor(), want)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, new)]
    with implicit_replication():
        for _ in range(2):
            want, got = step(net, optimizers[0], x), step(new, optimizers[1], x)
            torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.Sequential(Block(), Block())
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.layers(self.first(x))))


def check_fsdp_where_asked() -> None:
    own = MESH["data"].get_local_rank()
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    cases: tuple[tuple[Any, Any, Any], ...] = (
        ({"data": 2, "model": 2}, {"up": ("model",), "down.weight": (None, "model")},
         {Block: "data"}),
        ({"data": 2, "model": 2}, {}, {"layers.*": ("data", "model"), "first": ("data", "model")}),
        ({"data": 2, "model": 2}, {"head": (None, "model")}, {Block: "data", nn.Linear: "data"}),
    )  # fmt: skip
    for at, (sizes, rules, fsdp) in enumerate(cases):
        torch.manual_seed(0)
        net = Stack().eval()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        step(net, optimizer, x)
        with Sent() as sent:
            new, new_optimizer = fmapper.shard((net, optimizer), MESH, rules, fsdp=fsdp)
        assert not sent.counts
        assert type(net.layers[0]) is Block
        assert isinstance(new, FSDPModule)
        assert isinstance(new.layers[0], FSDPModule)
        plan = fmapper.plan(Sharding(sizes, rules, fsdp=fsdp), net)
        parts = {name_of(leaf.path): leaf.shard for leaf in plan}
        for name, mine in new.named_parameters():
            assert isinstance(mine, DTensor), name
            assert mine.numel() > mine.to_local().numel(), name
            assert MESH.get_coordinate() != [0, 0] or mine.to_local().shape == parts[name], name
            assert new_optimizer.state[mine]["exp_avg"].placements == mine.placements, name
        for _ in range(2):
            want = step(net, optimizer, x)
            with implicit_replication():
                got = step(new, new_optimizer, x[4 * own : 4 * own + 4])
            got = got.full_tensor() if isinstance(got, DTensor) else got
            torch.testing.assert_close(got, want[4 * own : 4 * own + 4], rtol=1e-5, atol=1e-5)
        path = FOLDER / f"fsdp{at}.safetensors"
        fmapper.save(new, path)
        for name, want in net.named_parameters():
            given = torch.from_numpy(fmapper.load(path)[name].read())
            torch.testing.assert_close(given, want.detach(), rtol=1e-5, atol=1e-5)


def check_patterns_of_fsdp_are_those_of_rules() -> None:
    """`*` is anything, whole keys match anywhere, and the outermost modules are taken."""
    for pattern, wanted in (
        ("layers.*", {"a.layers.0", "a.layers.1"}),
        ("layers[*]", {"a.layers.0", "a.layers.1"}),
        ("a.*.up", {"a.layers.0.up", "a.layers.1.up"}),
        ("*.down", {"a.layers.0.down", "a.layers.1.down", "b.down"}),
        ("b", {"b"}),
    ):
        net = nn.Sequential(OrderedDict(a=Stack(), b=Block()))
        tree = fmapper.shard({"net": net}, MESH, {}, fsdp={pattern: "data"})
        units = {n for n, m in tree["net"].named_modules() if isinstance(m, FSDPModule)}
        assert units - {""} == wanted, (pattern, units)


def check_what_fsdp_cannot_be_is_refused_by_name() -> None:
    net = Stack()
    for asked, match in (
        ({"layer.*": "data"}, r"'layer\.\*', which matches no module. There are first, layers"),
        ({nn.Conv1d: "data"}, "fsdp= names Conv1d, which matches no module"),
        ({1: "data"}, "not by 1"),
        ({}, "names no module"),
        ("rows", "write an axis of the mesh"),
        ({"*": "data"}, r"'\*': \.\.\.} would gather all parameters together"),
        (("model", "data"), r"or two in its order, the one with copies"),
        ("data", "do not declare which of their parameters are gathered together"),
        ({nn.Sequential: "data", nn.ModuleList: "data"}, "ModuleList, which matches no module"),
    ):
        with pytest.raises(fmapper.PlacementError, match=match):
            fmapper.shard(net, MESH, {}, fsdp=asked)
    with pytest.raises(fmapper.PlacementError, match="data is for fsdp= alone"):
        fmapper.shard(net, MESH, {"head": ("data",)}, fsdp={Block: "data"})
    with pytest.raises(fmapper.PlacementError, match="this tree has none"):
        fmapper.shard({"w": torch.ones(8)}, MESH, {}, fsdp={Block: "data"})
    lists = nn.Sequential(nn.ModuleList([Block()]))
    with pytest.raises(fmapper.PlacementError, match=r"model\[0\]: torch's fully_shard refuses it"):
        fmapper.shard(lists, MESH, {}, fsdp={nn.ModuleList: "data"})
    net.layers[1].up.weight = net.layers[0].up.weight
    with pytest.raises(fmapper.PlacementError, match=r"layers\.0\.up\.weight and layers\.1\.up"):
        fmapper.shard(net, MESH, {}, fsdp={Block: "data"})


def check_uneven_parts_are_written_whole() -> None:
    array = torch.arange(15.0).reshape(5, 3)
    for placements in ([Shard(0), Shard(0)], [Shard(0), Replicate()], [Shard(1), Shard(0)]):
        tree = {"w": distribute_tensor(array, MESH, placements)}
        path = FOLDER / f"uneven{len([*FOLDER.iterdir()])}.safetensors"
        torch.distributed.barrier()
        fmapper.save(tree, path)
        np.testing.assert_array_equal(fmapper.load(path)["w"].read(), array)
        back = fmapper.load(path, like=tree)["w"]
        assert list(back.placements) == placements
        assert torch.equal(back.to_local(), tree["w"].to_local())
        torch.distributed.barrier()


def check_models_without_memory() -> None:
    net = fmapper.shard(Net().to("meta"), MESH, RULES)
    assert net.up.weight.is_meta
    assert net.up.weight.to_local().shape == (8, 8)
    assert net.up.weight.shape == (16, 8)


def check_rules_that_follow_from_a_program_of_jax() -> None:
    from jax_decoder import decoder, parameters  # this file runs as a script

    model = fmapper.convert((decoder, parameters()), "torch", (np.ones((2, 6), np.int32),)).eval()
    ids = torch.arange(12, dtype=torch.int32).reshape(2, 6)
    new = fmapper.shard(model, MESH, "derive")
    assert new.get_parameter("layers.0.q").placements == (Replicate(), Shard(1))
    assert new.get_parameter("layers.1.down").placements == (Replicate(), Shard(0))
    want = model(ids)
    (want**2).mean().backward()
    with implicit_replication():
        got = new(fmapper.shard(ids, MESH, ("data",)))
        (got**2).mean().backward()
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5)
    for (name, old), given in zip(model.named_parameters(), new.parameters(), strict=True):
        assert isinstance(given.grad, DTensor)
        largest = float(old.grad.abs().max())
        torch.testing.assert_close(
            given.grad.full_tensor(), old.grad, rtol=1e-4, atol=1e-5 * largest, msg=name
        )


def check_the_plan_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).eval()
    new = fmapper.shard(module, MESH, "model")
    assert new.lm_head.weight.placements == (Replicate(), Shard(0))
    assert new.model.layers[0].mlp.down_proj.weight.placements == (Replicate(), Shard(1))
    assert new.model.norm.weight.placements == (Replicate(), Replicate())
    ids = torch.arange(16).reshape(2, 8)
    # torch's own attention for CPUs knows no DTensors
    with implicit_replication(), sdpa_kernel(SDPBackend.MATH), Sent() as sent:
        got = new(input_ids=ids, use_cache=False).logits
    assert sent.counts == {"all_reduce": 5}  # two a layer, and one of the embedding
    plan = fmapper.plan(Sharding({"model": 2}, "model"), module)
    assert len(plan.sums) == 5
    assert plan.sums[:2] == ("model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight")
    assert fmapper.plan(Sharding({"model": 1}, "model"), module).sums == ()
    want = module(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5)
    (want**2).mean().backward()
    with implicit_replication(), sdpa_kernel(SDPBackend.MATH):  # each process has the whole batch
        (got**2).mean().backward()
    for (name, old), mine in zip(module.named_parameters(), new.parameters(), strict=True):
        wanted = old.grad / old.grad.abs().max()
        given = mine.grad.full_tensor() / old.grad.abs().max()
        torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5, msg=name)
    gathered = fmapper.shard(module, MESH, "model", fsdp="data")
    assert isinstance(gathered.model.layers[1], FSDPModule)
    assert not isinstance(gathered.model.layers[1].mlp, FSDPModule)
    own = MESH["data"].get_local_rank()
    with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
        got = gathered(input_ids=ids[own : own + 1], use_cache=False).logits
    torch.testing.assert_close(got.full_tensor(), want[own : own + 1], rtol=1e-5, atol=1e-5)
