"""`torch.nn.Module` as a node: a new module comes back, with everything that the old one had."""

import functools
import threading
import weakref

import pytest

import fmapper
from fmapper import fmap, to_cpu, to_torch

np = pytest.importorskip("numpy")
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


# --- what refers to the module -------------------------------------------------------------------


def zero(x):
    return torch.zeros_like(x)


def wrapped(compute):
    return lambda x: compute(x) + 0


class SelfReferring(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.call = {
            "bound method": self.compute,
            "closure": lambda x: self.inner(x) + 0,
            "closure over a method": wrapped(self.compute),
            "partial": functools.partial(self.compute),
            "partial of a module": functools.partial(lambda m, x: m(x), self.inner),
            "method of a child": self.inner.forward,
            "weak reference": weakref.ref(self.inner),
            "list": [self.compute],
        }[way]

    def compute(self, x):
        return self.inner(x)

    def forward(self, x):
        call = self.call[0] if isinstance(self.call, list) else self.call
        return call()(x) if isinstance(call, weakref.ref) else call(x)


REFERENCES = [
    "bound method",
    "closure",
    "closure over a method",
    "partial",
    "partial of a module",
    "method of a child",
    "weak reference",
    "list",
]


@pytest.mark.parametrize("way", REFERENCES)
def test_what_refers_to_the_old_module_refers_to_the_new_one(way):
    module = SelfReferring(way)
    x = torch.ones(1, 2)
    expected = module(x)
    new = fmap(zero, module)
    assert not new(x).any()
    assert torch.equal(module(x), expected)
    moved = to_torch(dtype="float64")(to_torch(dtype="float16")(module))
    assert moved(x.double()).dtype == torch.float64
    assert list(fmapper.state(module)) == ["inner.weight", "inner.bias"]


def test_a_method_of_a_parent_held_by_a_child_and_one_of_a_stranger():
    parent, stranger = SelfReferring("bound method"), nn.Linear(2, 2)
    parent.inner.above = parent.compute
    new = fmap(zero, [parent])[0]
    assert new.inner.above.__self__ is new
    parent.inner.above = stranger.forward
    assert fmap(zero, parent).inner.above.__self__ is stranger
    with pytest.raises(fmapper.NotAFunctorError, match=r"inner: Linear holds arrays in \.above"):
        to_torch(dtype="float64")(parent)


def test_a_recursive_closure_keeps_what_it_shares():
    module = nn.Linear(2, 2)
    count = 0

    def call(x, depth=1):
        nonlocal count
        count += 1
        return call(x, depth - 1) if depth else module(x)

    module.call = call
    new = fmap(zero, module)
    assert not new.call(torch.ones(1, 2)).any()
    assert module.call(torch.ones(1, 2)).any()
    assert count == 4


def test_hooks_that_are_methods_and_their_handles():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(2, 2)
            self.seen = []
            self.handle = self.register_forward_hook(self.remember)
            self.body.register_forward_hook(self.remember)
            self.register_load_state_dict_pre_hook(self.before_load)

        def remember(self, *_):
            self.seen.append(len(self.seen))

        @staticmethod
        def before_load(module, *_):
            module.seen.append("load")

        def forward(self, x):
            return self.body(x)

    old = Features()
    new = fmap(lambda x: x.clone(), old)
    new.seen = []
    new(torch.ones(1, 2))
    assert (old.seen, new.seen) == ([], [0, 1])
    new.load_state_dict(old.state_dict())
    assert (old.seen, new.seen) == ([], [0, 1, "load"])
    new.handle.remove()
    assert len(old._forward_hooks) == 1
    assert not new._forward_hooks


def test_hooks_of_parameters_are_kept():
    module, calls = nn.Linear(2, 2), []
    module.weight.register_hook(lambda grad: calls.append("grad"))
    module.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    for new in (fmap(lambda x: x.clone(), module), to_torch(dtype="float64")(module)):
        calls.clear()
        new(torch.ones(1, 2, dtype=new.weight.dtype)).sum().backward()
        assert calls == ["grad", "accumulated"]
    assert module.weight.grad is None


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_module_computes_with_the_new_weights(in_place):
    module = nn.Sequential(nn.Linear(2, 2))
    if in_place:
        module.compile(backend="eager", dynamic=False)
    compiled = module if in_place else torch.compile(module, backend="eager")
    x = torch.ones(1, 2)
    expected = compiled(x)
    new = fmap(zero, compiled)
    assert type(new) is type(compiled)
    assert not new(x).any()
    assert torch.equal(compiled(x), expected)
    assert list(new.state_dict()) == list(compiled.state_dict())
    if in_place:
        assert new._compiled_call_impl is not None
    else:
        assert new._orig_mod is not module
    assert to_torch(dtype="float64")(compiled)(x.double()).dtype == torch.float64


def test_an_exported_graph_knows_its_module():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    new = to_torch(dtype="float64")(to_torch(dtype="float16")(graph))
    assert new.graph.owning_module is new
    assert graph.graph.owning_module is graph


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("way", ["script", "trace"])
def test_torchscript_is_refused_by_name(way):
    inner = nn.Linear(2, 2)
    module = (
        torch.jit.script(inner) if way == "script" else torch.jit.trace(inner, torch.ones(1, 2))
    )
    for use in (to_cpu, fmapper.state, lambda tree: fmap(zero, tree)):
        with pytest.raises(fmapper.UnsupportedLeafError, match=r"^model\[0\]: .*TorchScript"):
            use([module])


def test_lazy_modules_are_refused_until_they_have_run():
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(
        fmapper.RebuildError, match=r"^model\[0\]: LazyLinear .*run the module once"
    ):
        fmap(lambda x: x, lazy)
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"\[0\]\.weight"):
        to_cpu(copy=True)(lazy)
    lazy(torch.ones(1, 3))
    assert to_cpu(copy=True)(lazy)[0].weight.shape == (2, 3)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_modules_are_refused():
    quantized = pytest.importorskip("torch.ao.nn.quantized")
    if not torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch cannot quantize")
    module = nn.Sequential(quantized.Linear(2, 2))
    with pytest.raises(fmapper.UnsupportedLeafError, match="packed weights"):
        to_cpu(module)


@pytest.mark.parametrize("name", ["lock", "file"])
def test_a_lock_or_a_file_is_carried_over(name, tmp_path):
    module = nn.Linear(2, 2)
    with (tmp_path / "log").open("w") as file:
        module.other = threading.Lock() if name == "lock" else file
        assert fmap(lambda x: x.clone(), module).other is module.other
        assert to_cpu(copy=True)(module).other is module.other


# --- ties with places outside -------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        lambda m: (m, {"w": m.weight}),
        lambda m: ({"w": m.weight}, m),
        lambda m: [(m.weight,), m, [m]],
        lambda m: {"m": m, "w": (m.weight, m.weight)},
    ],
)
@pytest.mark.parametrize("cache", [False, True])
def test_a_parameter_outside_of_its_module_stays_tied(tree, cache):
    module = nn.Linear(2, 2)
    memo = {}
    options = {"cache": memo} if cache else {}
    new = fmap(lambda x: x.clone(), tree(module), **options)
    found = fmapper.fcollect(new)
    modules = [x for x in found if isinstance(x, nn.Module)]
    parameters = [x for x in found if isinstance(x, torch.Tensor)]
    assert len(modules) == 1
    assert {id(p) for p in parameters} == {id(modules[0].weight), id(modules[0].bias)}
    assert all(type(p) is nn.Parameter for p in parameters)
    if cache:
        assert fmap(lambda x: x.clone(), module, cache=memo) is modules[0]


def test_a_parameter_that_no_module_holds_becomes_what_f_makes_of_it():
    w = nn.Parameter(torch.ones(2))
    assert fmap(lambda x: 2 * x, [w])[0].grad_fn is not None


def test_a_step_on_a_module_and_its_gradients():
    module = nn.Linear(2, 2)
    grads = fmap(torch.ones_like, module)
    tree = fmap(
        lambda p, g: p - g, {"w": module.weight, "m": module}, {"w": grads.weight, "m": grads}
    )
    assert tree["w"] is tree["m"].weight
    assert torch.equal(tree["w"], module.weight - 1)


def test_modules_that_are_leaves_stay_tied_to_each_other_and_to_arrays():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    reports = []
    mover = to_cpu(copy=True, report=reports.append)
    new = fmap(mover, [first, second, first.weight], is_leaf=lambda x: isinstance(x, nn.Linear))
    assert new[0].weight is new[1].weight is new[2]
    assert new[2] is not first.weight
    assert len(reports) == 1


class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.generator = torch.Generator().manual_seed(3)
        self.inner = torch.nn.Dropout()
        self.inner.generator = self.generator


def test_a_generator_in_an_attribute_goes_along():
    """A copy draws the same numbers on its own; plain functions do not see it."""
    net = Noisy()
    new = fmapper.to_cpu(copy=True)(net)
    assert new.generator is not net.generator
    assert new.inner.generator is new.generator
    drawn = torch.rand(3, generator=new.generator)
    assert torch.equal(drawn, torch.rand(3, generator=net.generator))
    assert fmapper.to_cpu(net).generator is net.generator
    assert fmap(lambda x: x * 2, net).generator is net.generator
    said = {str(leaf.path): leaf.action for leaf in fmapper.plan(fmapper.to_cpu(copy=True), net)}
    assert said["generator"] == "moved"
    kept = fmapper.place(net, {"linear": fmapper.to_cpu(copy=True)})
    assert kept.generator is net.generator
    moved = fmapper.place(net, {"*": fmapper.to_cpu(copy=True)})
    assert moved.generator is moved.inner.generator is not net.generator


def test_hooks_follow_under_a_walk_of_ones_own():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = 0
            self.linear = torch.nn.Linear(2, 2)
            self.linear.register_forward_hook(self.count)

        def count(self, *_):
            self.seen += 1

        def forward(self, x):
            return self.linear(x)

    net = Counting()

    def walk(recurse, node):  # not the default one itself, which has a way of its own
        return fmapper.default_walk(recurse, node)

    new = fmap(fmapper.to_cpu(copy=True), net, walk=walk)
    new(torch.ones(2))
    assert (new.seen, net.seen) == (1, 0)
