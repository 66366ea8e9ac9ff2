"""Devices of JAX by number, and their memories: in a process of eight CPUs, or on GPUs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import fmapper
from fmapper import to_gpu, to_jax, to_numpy, to_torch

np = pytest.importorskip("numpy")


def run(code: str, **env: str) -> str:
    """What a program prints that sees eight CPUs."""
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_every_device_and_memory_to_every_other() -> None:
    pytest.importorskip("jax")
    code = """
        import itertools, jax, numpy as np, fmapper
        from fmapper import Device, get_device, to_device, to_jax
        from jax.sharding import SingleDeviceSharding

        host = np.arange(12, dtype=np.float32).reshape(3, 4).T
        places = [f"jax:cpu:{i}{memory}" for i in (0, 3, 7)
                  for memory in ("", "/pinned_host", "/unpinned_host")]
        for origin, target in itertools.product(places, places):
            x = to_jax({"w": host}, device=origin)["w"]
            assert str(get_device(x)) == origin, (get_device(x), origin)
            y = to_device(target)({"w": x})["w"]
            assert str(get_device(y)) == target, (get_device(y), target)
            assert (y is x) == (origin == target), (origin, target)
            assert np.array_equal(np.asarray(y), host)
            kind = y.sharding.memory_kind
            assert kind == (target.partition("/")[2] or "device"), kind
            z = to_device(target, copy=True)(y)
            assert z.sharding == y.sharding, (origin, target, z.sharding, y.sharding)
            assert z.unsafe_buffer_pointer() != y.unsafe_buffer_pointer()
            assert np.array_equal(fmapper.to_numpy(y), host)
        place = SingleDeviceSharding(jax.devices()[5], memory_kind="pinned_host")
        assert str(get_device(to_device(place)(jax.numpy.ones(2)))) == "jax:cpu:5/pinned_host"
        mixed = [to_jax(host, device=place) for place in places]
        there = fmapper.to_cpu(mixed)
        assert {x.sharding.memory_kind for x in there} == {"device"}
        assert [str(get_device(x)) for x in there] == [place.partition("/")[0] for place in places]
        print("all right")
    """
    assert run(code) == "all right\n"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("jax:cpu:0/slow", "jax:cpu:0/slow is not available: the memories of jax:cpu:0 are device"),
        ("torch:cpu/pinned_host", "torch has one memory there"),
        ("numpy:cpu/pinned_host", "numpy has one memory there"),
    ],
)
def test_a_memory_that_is_not_there(device: str, words: str) -> None:
    backend = device.partition(":")[0]
    pytest.importorskip(backend)
    move = getattr(fmapper, f"to_{backend}")
    with pytest.raises(fmapper.DeviceUnavailableError, match=words):
        move([np.ones(2, np.float32)], device=device)


def test_arrays_in_another_memory_are_not_taken_for_those_beside_them() -> None:
    jax = pytest.importorskip("jax")
    device = jax.devices("cpu")[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    tree = [jax.numpy.ones(3), jax.device_put(jax.numpy.ones(3), pinned)]
    with pytest.raises(fmapper.MixedDevicesError, match="jax:cpu:0/pinned_host"):
        fmapper.get_device(tree)
    there = fmapper.to_cpu(tree)
    assert there[0] is tree[0]
    assert there[1].sharding.memory_kind == "device"
    plan = fmapper.plan(fmapper.to_cpu, tree)
    assert "pinned_host" in str(plan)


def test_devices_are_numbered_as_the_hardware_is() -> None:
    """Under jax.distributed `id` counts through all processes, and CUDA's numbers do not."""
    pytest.importorskip("jax")
    from fmapper_adapters.jax.arrays import devices

    class Card:
        platform, device_kind = "gpu", "card"

        def __init__(self, id: int, number: int | None) -> None:
            self.id, self.local_hardware_id = id, number

    def names(cards: list[Card], patch: pytest.MonkeyPatch) -> list[str]:
        patch.setattr(devices.jax, "local_devices", lambda backend=None: cards)
        return [str(devices.device_of(card)) for card in cards]

    with pytest.MonkeyPatch.context() as patch:
        assert names([Card(8, 0), Card(9, 1)], patch) == ["jax:gpu:0", "jax:gpu:1"]
        assert names([Card(8, 3)], patch) == ["jax:gpu:3"]
        assert names([Card(0, 0), Card(1, 0)], patch) == ["jax:gpu:0", "jax:gpu:1"], "one chip"
        assert names([Card(4, -1), Card(5, None)], patch) == ["jax:gpu:4", "jax:gpu:5"]


@pytest.mark.nightly
def test_messages_and_other_backends_do_not_start_jax() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    code = """
        import jax, numpy as np, torch, fmapper
        from jax._src.xla_bridge import backends_are_initialized

        torch.accelerator.current_accelerator = lambda *_, **__: torch.device("xpu")
        torch.accelerator.device_count = lambda: 1
        torch.accelerator.current_device_index = lambda: 0
        try:
            fmapper.to_device("nonsense")
        except fmapper.DeviceError as error:
            assert "torch:xpu:0" in str(error), error
        with fmapper.use_backend("torch"):
            assert "torch:xpu:0" in str(fmapper.plan(fmapper.to_gpu, [np.ones(2)]))
        assert not backends_are_initialized()
        fmapper.devices()
        assert backends_are_initialized()
        print("all right")
    """
    assert run(code) == "all right\n"


# --- on GPUs -------------------------------------------------------------------------------------


def places() -> list[str]:
    """Every GPU that torch and JAX see, of each at most two, with the memories of JAX's."""
    import jax
    import torch

    found = ["torch:cpu", "jax:cpu:0", "numpy:cpu"]
    found += [f"torch:cuda:{i}" for i in range(min(2, torch.cuda.device_count()))]
    for i in range(min(2, len(jax.local_devices(backend="gpu")))):
        found += [f"jax:gpu:{i}", f"jax:gpu:{i}/pinned_host"]
    return found


def put(x: Any, place: str) -> Any:
    backend = place.partition(":")[0]
    move = {"torch": to_torch, "jax": to_jax, "numpy": to_numpy}[backend]
    return move(x) if backend == "numpy" else move(x, device=place)


@pytest.mark.gpu("torch", "jax")
def test_every_place_to_every_other() -> None:
    import torch

    small = np.arange(12, dtype=np.float32).reshape(3, 4)
    large = np.random.default_rng(0).random((700, 900), np.float32)
    for origin, target in itertools.product(places(), places()):
        for host in (small, small.T, large):
            tree = {"a": host, "tie": host}
            there = put(tree, origin)
            new = put(there, target)
            assert str(fmapper.get_device(new)) == target, (origin, target)
            assert new["a"] is new["tie"]
            back = to_numpy(new)["a"]
            assert np.array_equal(back, host), (origin, target)
            if "cuda" in origin and origin != target:  # it is a copy, and was read in time
                there["a"].fill_(-1)
                torch.cuda.synchronize(there["a"].device)
                assert np.array_equal(to_numpy(new)["a"], host), (origin, target)


@pytest.mark.gpu("torch", "jax")
def test_from_a_gpu_that_is_not_the_current_one() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("it takes two GPUs")
    x = torch.arange(5.0, device="cuda:1")
    assert torch.cuda.current_device() == 0
    new = to_jax({"x": x})["x"]
    assert str(fmapper.get_device(new)) == "jax:gpu:1"
    assert np.asarray(new).tolist() == [0, 1, 2, 3, 4]
    assert str(fmapper.get_device(to_torch(new))) == "torch:cuda:1"


@pytest.mark.gpu("jax")
def test_pinned_memory_counts_as_elsewhere() -> None:
    pinned = to_jax([np.ones(3, np.float32)], device="gpu:0/pinned_host")
    assert str(fmapper.get_device(pinned)) == "jax:gpu:0/pinned_host"
    there = to_gpu(pinned, strict=True)
    assert str(fmapper.get_device(there)) == "jax:gpu:0"
    assert there[0].sharding.memory_kind == "device"


@pytest.mark.gpu("torch", "jax")
def test_memory_that_the_other_library_keeps_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from fmapper.cli.main import main

    fmapper.devices()  # which starts JAX
    assert main(["devices"]) == 0
    setting = "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    assert setting in capsys.readouterr().out
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(fmapper.MoveError, match=f"out of memory(.|\n)*{setting}"):
        to_gpu(torch.ones(1).expand(total), strict=True)


@pytest.mark.gpu("jax")
def test_what_fails_late_is_blamed_on_the_right_array(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    put = jax.device_put

    class Late:
        """What XLA gives where memory runs out after it has returned."""

        def __init__(self, array: Any) -> None:
            self.array = array

        def block_until_ready(self) -> Any:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    def late(arrays: Any, *args: Any, **kwargs: Any) -> Any:
        found = put(arrays, *args, **kwargs)
        return [Late(x) if x.shape == (5,) else x for x in found]

    tree = {"first": np.ones(2, np.float32), "second": np.ones(5, np.float32), "third": np.ones(3)}
    monkeypatch.setattr(jax, "device_put", late)
    with pytest.raises(fmapper.MoveError, match=r"model\.second.*Out of memory"):
        to_jax(tree, device="gpu:0", dtype="float32")
