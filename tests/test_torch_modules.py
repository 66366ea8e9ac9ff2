"""`torch.nn.Module` as a node: a new module comes back, with everything that the old one had."""

import numpy as np
import pytest

import fmapper
from fmapper import fmap, to_torch

torch = pytest.importorskip("torch")
nn = torch.nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.scale = torch.full((4,), 2.0)
        self.kernel_size = (3, 3)
        self.extra = {"table": torch.arange(4.0)}
        self.name = "net"

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale * self.mask + self.extra["table"]
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.norm(x))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


TOKENS = torch.tensor([0, 3, 1, 4])


def test_a_new_module_with_new_tensors_computes_the_same(net):
    new = fmap(lambda x: x.clone(), net)
    assert type(new) is Net
    assert torch.equal(new(TOKENS), net(TOKENS))
    old = dict(net.named_parameters())
    assert list(old) == [name for name, _ in new.named_parameters()]
    for name, parameter in new.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter is not old[name]
        assert parameter.data_ptr() != old[name].data_ptr()
    with torch.no_grad():
        new.head.weight.zero_()
    assert net.head.weight.abs().sum() > 0


def test_ties_buffers_names_and_modes_are_kept(net):
    new = fmap(lambda x: x.clone(), net)
    assert new.head.weight is new.embed.weight
    assert list(new.state_dict()) == list(net.state_dict())
    assert "mask" not in new.state_dict()
    assert not new.training
    assert not new.norm.training
    assert [name for name, _ in new.named_buffers()] == [name for name, _ in net.named_buffers()]
    assert new.name == "net"


def test_tensors_in_attributes_and_containers_move_too_and_sizes_do_not(net):
    new = to_torch(dtype="float64")(net)
    assert new.scale.dtype == new.extra["table"].dtype == torch.float64
    assert {parameter.dtype for parameter in new.parameters()} == {torch.float64}
    assert new.norm.num_batches_tracked.dtype == torch.int64
    assert new.kernel_size == (3, 3)
    assert net.scale.dtype == torch.float32
    assert new(TOKENS).dtype == torch.float64


def test_an_undeclared_object_with_tensors_in_an_attribute_does_not_stay_behind(net):
    class Head:
        def __init__(self):
            self.weight = torch.ones(2)

    net.own_head = Head()
    with pytest.raises(fmapper.NotAFunctorError, match=r"model: Net holds arrays in \.own_head"):
        to_torch(dtype="float64")(net)
    assert to_torch(dtype="float64", strict=False)(net).own_head is net.own_head
    net.config = type("Config", (), {})()
    net.own_head = None
    assert to_torch(dtype="float64")(net).config is net.config


def test_an_attribute_that_becomes_a_tensor_is_a_child_from_then_on():
    class Gated(nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.gate = gate

    for gate, children in ((1.0, []), (torch.ones(1), ["gate"]), (2.0, []), (None, [])):
        assert list(fmapper.children(Gated(gate))) == children
    other = Gated(None)
    del other.gate
    other.mask = torch.ones(1)
    assert list(fmapper.children(other)) == ["mask"]


def test_modules_in_plain_lists_and_cycles_through_attributes():
    parent = nn.Sequential(nn.Linear(1, 1))
    parent[0].parent = [parent]
    parent.blocks = [nn.ReLU()]
    new = to_torch(dtype="float64")(parent)
    assert new[0].parent[0] is new
    assert new.blocks[0] is not parent.blocks[0]
    assert new[0].weight.dtype == torch.float64


def test_an_exported_graph_moves():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    new = to_torch(dtype="float64")(graph)
    assert new(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64


def test_a_functor_that_is_a_module_moves_as_a_module():
    @fmapper.functor
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1)

    assert to_torch(dtype="float64")(Block()).inner.weight.dtype == torch.float64


def test_hooks_are_kept_and_are_not_shared(net):
    calls = []
    net.head.register_forward_hook(lambda *_: calls.append("old"))
    new = fmap(lambda x: x.clone(), net)
    new.head.register_forward_hook(lambda *_: calls.append("new"))
    net(TOKENS)
    assert calls == ["old"]
    new(TOKENS)
    assert calls == ["old", "old", "new"]


def test_frozen_parameters_stay_frozen_and_keep_attributes_and_gradients(net):
    net.blocks[0].weight.requires_grad_(False)
    net.head.weight.tag = "tied"
    net(TOKENS).sum().backward()
    new = to_torch(dtype="float64")(net)
    assert not new.blocks[0].weight.requires_grad
    assert new.blocks[1].weight.requires_grad
    assert new.head.weight.tag == "tied"
    assert new.head.weight.grad.dtype == torch.float64
    assert torch.equal(new.head.weight.grad, net.head.weight.grad.double())


def test_meta_is_a_device_and_ties_survive_it(net):
    new = fmapper.to_device("meta")(net)
    assert {parameter.device.type for parameter in new.parameters()} == {"meta"}
    assert new.head.weight is new.embed.weight


def test_modules_inside_functors_and_containers(net):
    @fmapper.functor
    class Agent:
        def __init__(self, actor, critic):
            self.actor, self.critic = actor, critic

    new = fmap(lambda x: x.clone(), Agent(net, [net]))
    assert new.actor is new.critic[0]
    assert new.actor is not net


def test_what_a_module_cannot_hold_points_the_way(net):
    pytest.importorskip("jax")
    with pytest.raises(fmapper.RebuildError, match=r"state\(module\).*convert\(module") as caught:
        fmapper.to_numpy(net)
    assert str(caught.value).startswith("model.embed: Embedding.weight must be a tensor")
    assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
    arrays = fmapper.to_numpy(fmapper.state(net))
    assert arrays["embed.weight"] is arrays["head.weight"]
    assert np.array_equal(arrays["embed.weight"], net.embed.weight.detach())


def test_paths_in_modules():
    net = Net()
    assert fmapper.get_path(net, "blocks[1].weight") is net.blocks[1].weight
    with pytest.raises(ValueError, match="boom") as caught:
        fmap(lambda x: _fail_on(net.blocks[1].bias, x), net)
    assert caught.value.__notes__ == ["at model.blocks[1].bias"]


def _fail_on(wanted, x):
    if x is wanted:
        raise ValueError("boom")
    return x


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(2, 3, num_layers=2, bidirectional=True),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
        nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(1))]),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten()),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_of_torch_come_back_equal(module):
    new = fmap(lambda x: x.clone(), module)
    assert type(new) is type(module)
    old_state, new_state = module.state_dict(), new.state_dict()
    assert list(old_state) == list(new_state)
    assert all(torch.equal(old_state[name], new_state[name]) for name in old_state)
    assert [type(p) for p in new.parameters()] == [type(p) for p in module.parameters()]
