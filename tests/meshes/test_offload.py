"""`fmapper.meshes.offload`: layers that lie elsewhere are brought ahead of their use."""

import sys
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import fmapper  # noqa: E402
from fmapper.meshes import device_map, offload  # noqa: E402

PATIENCE = 120  # seconds for what takes milliseconds, on a machine with other work
LAYER = (8 * 8 + 8) * 4  # bytes of a Linear(8, 8)
X = torch.linspace(-1, 1, 16).reshape(2, 8)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        first, second = x.split(4, -1)
        return {"sum": first + second * x.shape[0], "x": x}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def in_jax(net):
    return fmapper.convert(net, "jax", (X,))


@pytest.fixture(scope="module")
def in_torch():
    rng = np.random.default_rng(0)
    params = [{"w": rng.standard_normal((8, 8)).astype(np.float32) / 4} for _ in range(5)]

    def call(params, x):
        for layer in params:
            x = x + jax.nn.relu(x @ layer["w"])
        return x

    return fmapper.convert((call, params), "torch", (X.numpy(),)).eval()


def agrees(given, wanted):
    assert given.keys() == wanted.keys()
    for name, want in wanted.items():
        np.testing.assert_allclose(given[name], want.detach(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_layers_wait_on_the_host(net, in_jax):
    plan = device_map(in_jax, {"cpu:0": 4 * LAYER, "cpu": None}, ahead=1)
    assert [plan.device_of(f"layers.{n}") for n in range(5)] == ["cpu:0"] * 2 + ["cpu"] * 3
    assert plan.room == 2 * LAYER
    model = offload(in_jax, plan)
    brought = [placed.brought for placed in model._stages]
    assert [[*map(str, arrays)] for arrays in brought] == [
        [], *([f"layers.{n}.weight", f"layers.{n}.bias"] for n in (2, 3, 4))
    ]  # fmt: skip
    waiting = {x.sharding.memory_kind for arrays in brought for x in arrays.values()}
    assert waiting == {"pinned_host"}
    assert len({id(placed.model) for placed in model._stages}) == 3  # two layers are one program
    agrees(model(X.numpy()), net(X))
    assert "4 stages" in repr(model)


def test_layers_are_brought_ahead_and_within_the_room(in_torch, tmp_path, monkeypatch):
    size = 8 * 8 * 4
    plan = device_map(in_torch, {"cpu": 3 * size, "disk": None}, ahead=1)
    model = offload(in_torch, plan, folder=tmp_path)
    assert (plan.room, plan.nbytes["disk"]) == (2 * size, 4 * size)
    module = sys.modules["fmapper.meshes.streaming"]
    alive, most, begun = set(), [0], [threading.Event() for _ in range(4)]
    own, counter = module._bring, iter(begun)

    def bring(batch):
        made = own(batch)
        for tensor in made.values():
            alive.add(id(tensor))
            weakref.finalize(tensor, alive.discard, id(tensor))
        most[0] = max(most[0], len(alive))
        next(counter).set()
        return made

    monkeypatch.setattr(module, "_bring", bring)
    streamed = [placed for placed in model._stages if placed.brought]
    for at, placed in enumerate(streamed[:-1]):

        def call(*arrays, run=placed.model, after=begun[at + 1]):
            assert after.wait(PATIENCE), "the next layer does not come while this one computes"
            return run(*arrays)

        object.__setattr__(placed, "model", call)
    found = model(X)
    torch.testing.assert_close(found, in_torch(X))
    assert not found.requires_grad  # nothing that was brought is kept for gradients
    assert most[0] == 2
    assert not alive


def test_sizes_that_vary_and_several_devices(net):
    model = fmapper.convert(net, "jax", (X,), dynamic_shapes=["batch, _"])
    small = offload(model, device_map(model, {"cpu:0": 2 * LAYER, "cpu": None}))
    assert len(small._stages) > 2
    x = torch.ones(5, 8)
    agrees(small(x=x.numpy()), net(x))
    with pytest.raises(fmapper.ProgramInputError, match=r"Net: x: .*8"):
        small(np.ones(8, np.float32))


def test_arrays_of_a_checkpoint(net, in_jax, tmp_path):
    fmapper.save(net, tmp_path / "net.safetensors")
    hollow = fmapper.to_jax(in_jax, device="meta")
    plan = device_map(hollow, {"cpu:0": 2 * LAYER, "cpu": LAYER, "disk": None})
    with pytest.raises(fmapper.PlacementError, match=r"layers\.0\.weight.*state="):
        offload(hollow, plan)
    model = offload(hollow, plan, state=fmapper.load(tmp_path / "net.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]
    agrees(model(X.numpy()), net(X))


class Shifted(Net):
    def forward(self, x):
        return super().forward(x + torch.tensor([[0.5], [0.25]]))


@pytest.mark.parametrize("to", ["jax", "flax"])
def test_constants_of_the_program_stay_with_it(to):
    net = Shifted().eval()
    model = fmapper.convert(net, to, (X,))
    small = offload(model, device_map(model, {"cpu:0": 3 * LAYER, "cpu": None}))
    agrees(small(X.numpy()), net(X))


def test_what_cannot_be_is_refused(net, in_jax):
    plan = device_map(in_jax, {"cpu:0": 2 * LAYER, "cpu": None})
    with pytest.raises(fmapper.PlacementError, match="has no program"):
        offload(net, plan)
    with pytest.raises(fmapper.PlacementError, match="folder="):
        offload(in_jax, device_map(in_jax, {"cpu:0": 2 * LAYER, "disk": None}))
    with pytest.raises(fmapper.PlacementError, match="the room is 100 B"):
        offload(in_jax, plan, room=100)
    with pytest.raises(fmapper.PlacementError, match=r"the device 99 of the plan: .*gpu"):
        offload(in_jax, device_map(in_jax, {99: 2 * LAYER, "cpu": None}))
    with pytest.raises(fmapper.ProgramInputError, match="x is a tracer"):
        jax.jit(offload(in_jax, plan))(X.numpy())


def test_an_error_ends_what_is_on_its_way(in_torch, tmp_path):
    size = 8 * 8 * 4
    plan = device_map(in_torch, {"cpu": 3 * size, "disk": None}, ahead=1)
    model = offload(in_torch, plan, folder=tmp_path)
    (tmp_path / "offloaded.safetensors").unlink()
    for _ in range(2):
        with pytest.raises((fmapper.FmapperError, OSError)):
            model(X)
    workers = [t for t in threading.enumerate() if t.name == "fmapper.DeviceLoader"]
    for thread in workers:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in workers)


def test_programs_that_change_their_arrays_are_refused():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    model = fmapper.convert(module, "jax", (X,), train=True, check=False)
    plan = device_map(model, {"cpu:0": 2 * LAYER, "cpu": None})
    with pytest.raises(fmapper.ConversionError, match=r"changes buffer 1\.running_mean"):
        offload(model, plan)


@pytest.mark.nightly
def test_parameters_in_memory_of_the_host(in_jax, net):
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    model = in_jax.replace(params=jax.device_put(in_jax.params, there))
    agrees(model(X.numpy()), net(X))
    agrees(jax.jit(lambda m, x: m(x))(model, X.numpy()), net(X))

    def loss(params):
        return (in_jax.replace(params=params)(X.numpy())["sum"] ** 2).sum()

    wanted = jax.jit(jax.grad(loss))(in_jax.params)
    found = jax.jit(jax.grad(loss))(model.params)
    for name, gradient in found.items():
        assert gradient.sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-5, atol=1e-6)
