"""Devices: what is here, what is known of it, why the rest is missing, and where a tree lives."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper import Device, DeviceInfo, device_info, get_device
from fmapper.cli.main import main

np = pytest.importorskip("numpy")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


def run(code: str, **env: str) -> str:
    """What a fresh interpreter prints that sees no GPU and for which warnings are errors."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **hidden, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- memory and names ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_the_cpu_has_the_memory_of_the_host(backend: str) -> None:
    pytest.importorskip(backend)
    device = next(d for d in fmapper.devices() if d.backend == backend)
    info = device_info(device)
    assert info.device == device
    assert info.name
    if platform.system() == "Linux":
        assert info.total is not None
        assert info.free is not None
        assert 0 < info.free <= info.total
        assert info.total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_device_stays_a_small_value() -> None:
    device = Device("torch", "cuda", 1)
    assert {device: 1}[Device("torch", "cuda", 1)] == 1
    assert Device.__slots__ == ("backend", "kind", "index", "memory")


def test_devices_are_pickled() -> None:
    device = Device("jax", "gpu", 0, "pinned_host")
    assert pickle.loads(pickle.dumps(device)) == device


def test_a_device_can_be_named_in_every_way(torch: Any, jax: Any) -> None:
    first = jax.devices("cpu")[0]
    assert device_info(first).device == Device("jax", "cpu", 0)
    assert device_info("torch:cpu").device == device_info(torch.device("cpu")).device
    assert device_info("torch:meta") == DeviceInfo(Device("torch", "meta"))


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("cpu", fmapper.DeviceError, "does not name a backend: write torch:cpu"),
        ("nonsense", fmapper.DeviceError, "is not a device"),
        (Device("jax", "cpu", (0, 1)), fmapper.DeviceError, "several devices"),
        ("numpy:cpu:1", fmapper.DeviceUnavailableError, "index is too high"),
    ],
)
def test_device_info_of_what_is_no_one_device(device: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        device_info(device)


def accelerators(torch: Any, patch: pytest.MonkeyPatch, kind: str | None, count: int = 2) -> None:
    """Makes torch one that was built for devices of a kind, and sees some of them."""

    def current(check_available: bool = False) -> Any:
        return None if kind is None or (check_available and not count) else torch.device(kind)

    patch.setattr(torch.accelerator, "current_accelerator", current)
    patch.setattr(torch.accelerator, "is_available", lambda: bool(count))
    patch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_an_accelerator_of_torch(torch: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    accelerators(torch, monkeypatch, kind)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda i: (100 + i, 200 + i))
    monkeypatch.setattr(getattr(torch, kind), "get_device_name", lambda i: f"Card {i}")
    device = Device("torch", kind, 1)
    assert device_info(device) == DeviceInfo(device, "Card 1", total=201, free=101)


def test_a_mac(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(torch, monkeypatch, "mps", 1)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 300)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 100)
    device = Device("torch", "mps", 0)
    assert device_info(device) == DeviceInfo(device, None, total=300, free=200)


@pytest.mark.parametrize(
    ("stats", "total", "free"),
    [({"bytes_limit": 300, "bytes_in_use": 100}, 300, 200), ({}, None, None), (None, None, None)],
)
def test_an_accelerator_of_jax(
    jax: Any, monkeypatch: pytest.MonkeyPatch, stats: Any, total: Any, free: Any
) -> None:
    class Card:
        platform, id, local_hardware_id, device_kind = "gpu", 8, 0, "NVIDIA H200"

        def memory_stats(self) -> Any:
            return stats

    card = Card()
    monkeypatch.setattr(
        jax, "local_devices", lambda backend=None: [card] if backend in ("gpu", None) else []
    )
    device = Device("jax", "gpu", 0)
    assert fmapper.backends.get_adapter("jax").devices() == [device]
    assert device_info(device) == DeviceInfo(device, "NVIDIA H200", total, free)


@pytest.mark.gpu("torch")
def test_a_real_gpu_of_torch(torch: Any) -> None:
    kept = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:0")
    info = device_info("torch:cuda:0")
    assert info.name == torch.cuda.get_device_name(0)
    assert info.total == torch.cuda.mem_get_info(0)[1]
    assert info.free is not None
    assert info.free <= info.total - kept.nbytes


@pytest.mark.gpu("jax")
def test_a_real_gpu_of_jax(jax: Any) -> None:
    info = device_info("jax:gpu:0")
    assert info.name == jax.devices("gpu")[0].device_kind
    assert info.total is not None
    assert info.free is not None
    assert 0 < info.free <= info.total


# --- the memory of a container -------------------------------------------------------------------


def machine(root: Path, files: dict[str, Any]) -> Path:
    """A file system as Linux shows it, with a GiB of memory of which half is free."""
    given = {"proc/meminfo": "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 524288 kB\n"}
    for name, text in {**given, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
MIB = 2**20


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        pytest.param({}, 1024, 512, id="no groups"),
        pytest.param({"proc/self/cgroup": "0::/"}, 1024, 512, id="no limit of the root"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                f"{V2}/memory.max": 100 * MIB,
                f"{V2}/memory.current": 40 * MIB,
            },
            100,
            60,
            id="v2 in a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b",
                f"{V2}/a/memory.max": 100 * MIB,
                f"{V2}/a/memory.current": 40 * MIB,
                f"{V2}/a/b/memory.max": "max",
                f"{V2}/a/b/memory.current": 30 * MIB,
            },
            100,
            60,
            id="v2 limit of the group above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                f"{V2}/memory.max": 100 * MIB,
                f"{V2}/memory.current": 90 * MIB,
                f"{V2}/memory.stat": f"anon 1\ninactive_file {50 * MIB}\ninactive_anon 7",
            },
            100,
            60,
            id="v2 cached files can be dropped",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/deadbeef\n0::/",
                f"{V1}/memory.limit_in_bytes": 200 * MIB,
                f"{V1}/memory.usage_in_bytes": 150 * MIB,
                f"{V1}/memory.stat": f"total_inactive_file {10 * MIB}\ninactive_file 5",
            },
            200,
            60,
            id="v1 own folder out of sight",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/",
                f"{V1}/memory.limit_in_bytes": 9223372036854771712,
                f"{V1}/memory.usage_in_bytes": 150 * MIB,
            },
            1024,
            512,
            id="v1 without a limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                f"{V2}/memory.max": 100 * MIB,
                f"{V2}/memory.current": 140 * MIB,
            },
            100,
            0,
            id="over the limit",
        ),
    ],
)
def test_host_memory(tmp_path: Path, files: dict[str, Any], total: int, free: int) -> None:
    from fmapper.machine import host_memory

    assert host_memory(machine(tmp_path, files)) == (total * MIB, free * MIB)


def test_a_host_that_says_nothing(tmp_path: Path) -> None:
    from fmapper.machine import host_memory, processor_name

    assert host_memory(tmp_path) == (None, None)
    assert processor_name(tmp_path) == platform.processor() or platform.machine()


def test_the_name_of_the_processor(tmp_path: Path) -> None:
    from fmapper.machine import processor_name

    root = machine(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Abacus: 3000\n"})
    assert processor_name(root) == "Abacus: 3000"


# --- the table -----------------------------------------------------------------------------------


def test_the_table(
    torch: Any, jax: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    accelerators(torch, monkeypatch, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")

    def memory(index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return 3 << 29, 140 << 30

    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = (line for line in lines if "torch:cuda:0" in line)
    assert [cell.strip() for cell in first.strip("│|").replace("|", "│").split("│")] == [
        "torch:cuda:0",
        "NVIDIA H200",
        "140.0 GiB",
        "1.5 GiB",
    ]
    (second,) = (line for line in lines if "torch:cuda:1" in line)
    assert "does not answer: CUDA error: out of memory" in second
    assert any("numpy:cpu" in line and "GiB" in line for line in lines)
    assert not any(line.startswith("torch:") for line in lines), "nothing of torch is missing"


@pytest.mark.nightly
def test_the_table_says_what_is_missing() -> None:
    code = (
        HIDE
        + """
    hide("jax")
    from fmapper.cli.main import main
    main(["devices"])
    """
    )
    pytest.importorskip("torch")
    out = run(code, COLUMNS="40")
    assert "\njax: jax is not installed" in out
    assert re.search(r"pip install 'jax>=[\d.]+'", out), "not folded, so that it can be copied"
    (line,) = (line for line in out.splitlines() if line.startswith("torch: "))
    assert "CPU-only build" in line or "finds no driver or no device" in line


def test_the_table_of_nothing() -> None:
    code = (
        HIDE
        + """
    hide("jax", "torch", "numpy")
    from fmapper.cli.main import main
    main(["devices"])
    """
    )
    out = run(code)
    assert out.startswith("No backend is installed.\n")
    for name in ("numpy", "torch", "jax"):
        assert f"Install it: pip install '{name}>=" in out


@pytest.mark.nightly
def test_the_table_without_unicode() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fmapper", "devices"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| numpy:cpu |" in done.stdout


def test_rich_is_loaded_when_something_is_printed() -> None:
    assert run("import sys, fmapper; print('rich' in sys.modules)") == "False\n"


# --- what is missing -----------------------------------------------------------------------------

HIDE = """
    import importlib.machinery, sys

    def hide(*names):
        class Hiding(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name.partition(".")[0] in names:
                    return None
                return super().find_spec(name, path, target)
        at = sys.meta_path.index(importlib.machinery.PathFinder)
        sys.meta_path[at] = Hiding
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("missing", "word"), [("torch", "torch:cuda:0"), ("jax", "jax:gpu")])
def test_the_framework_is_missing(missing: str, word: str) -> None:
    """A device of a framework that is not installed is a good one, just not here."""
    code = (
        HIDE
        + f"""
    hide({missing!r})
    import numpy, fmapper
    for call in (fmapper.to_device, fmapper.device_info):
        try:
            call({word!r})
        except fmapper.DeviceUnavailableError as error:
            print(error)
    """
    )
    lines = run(code).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{word} is not available: {missing} is not installed")
        assert re.search(rf"Install it: pip install '{missing}>=[\d.]+'\. Here: ", line)
        assert "numpy:cpu" in line.partition("Here: ")[2]


@pytest.mark.nightly
def test_a_framework_that_is_broken(tmp_path: Path) -> None:
    """Its shared libraries are missing, say: the others go on, and asking for it says why."""
    (tmp_path / "jax.py").write_text("raise OSError('libfoo.so: cannot open shared object file')")
    code = """
    import numpy, fmapper
    from fmapper.backends.device import missing_devices
    print("numpy:cpu" in map(str, fmapper.devices()), "|", missing_devices()["jax"])
    for word in ("jax:cpu", "jax:gpu:0"):
        try:
            fmapper.device_info(word)
        except fmapper.BackendUnavailableError as error:
            print("raised", "|", error)
    """
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    lines = run(code, PYTHONPATH=paths).splitlines()
    assert [line.partition(" | ")[0] for line in lines] == ["True", "raised", "raised"]
    for line in lines:
        assert "jax is installed but does not work: libfoo.so" in line


def refused(device: str) -> str:
    backend, kind, *index = device.split(":")
    with pytest.raises(fmapper.DeviceUnavailableError) as caught:
        fmapper.backends.get_adapter(backend).find_device(kind, int(index[0]) if index else None)
    text = str(caught.value)
    assert text.startswith(f"{device} is not available: ")
    return text


@pytest.fixture
def no_cuda(torch: Any, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A build for CUDA on a machine without a driver."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    accelerators(torch, monkeypatch, None, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_the_build_is_missing(torch: Any, no_cuda: pytest.MonkeyPatch) -> None:
    no_cuda.setattr(torch.version, "cuda", None)
    text = refused("torch:cuda:0")
    assert "CPU-only build" in text
    assert "https://pytorch.org" in text
    assert "driver" not in text
    assert text.endswith("Here: torch:cpu.")


@pytest.mark.parametrize(
    ("version", "what"), [(("13.0", None), "CUDA 13.0"), ((None, "6.4"), "ROCm 6.4")]
)
def test_the_driver_is_missing(
    torch: Any, no_cuda: pytest.MonkeyPatch, version: tuple[Any, Any], what: str
) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check.\nmore")

    accelerators(torch, no_cuda, "cuda", 0)
    no_cuda.setattr(torch.version, "cuda", version[0])
    no_cuda.setattr(torch.version, "hip", version[1])
    no_cuda.setattr(torch.cuda, "init", init)
    text = refused("torch:cuda:0")
    assert f"built for {what}, but finds no driver or no device: Found no NVIDIA driver" in text
    assert "CPU-only" not in text
    assert "VISIBLE" not in text
    assert "more" not in text


def test_the_gpus_are_hidden(torch: Any, no_cuda: pytest.MonkeyPatch) -> None:
    accelerators(torch, no_cuda, "cuda", 0)
    no_cuda.setattr(torch.cuda, "init", lambda: None)
    no_cuda.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "(CUDA_VISIBLE_DEVICES is '-1')" in refused("torch:cuda:0")


def test_the_index_is_too_high(torch: Any, no_cuda: pytest.MonkeyPatch) -> None:
    accelerators(torch, no_cuda, "cuda")
    text = refused("torch:cuda:2")
    assert "the index is too high, torch sees 2 of kind cuda" in text
    assert "Here: torch:cpu, torch:cuda:0, torch:cuda:1." in text


def test_a_build_for_other_devices(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(torch, monkeypatch, "xpu", 1)
    assert "this torch is built for devices of kind xpu" in refused("torch:mps:0")


def test_devices_of_any_kind_are_devices(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(torch, monkeypatch, "hpu")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    adapter = fmapper.backends.get_adapter("torch")
    assert list(map(str, adapter.devices())) == ["torch:cpu", "torch:hpu:0", "torch:hpu:1"]
    assert str(adapter.find_device("hpu", 0)) == "torch:hpu:0"
    assert str(adapter.find_device("gpu", None)) == "torch:hpu:1", "the current one"


def test_a_forked_process_cannot_use_it(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(torch, monkeypatch, "cuda")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for word in ("cuda", "gpu:1"):
        with pytest.raises(fmapper.DeviceUnavailableError, match=r"was forked .*context\('spawn'"):
            fmapper.to_device(word, strict=True)(torch.ones(2))


JAX_MISSING = """
    import jax, fmapper
    for word in {words!r}:
        kind, *index = word.split(":")
        try:
            fmapper.backends.get_adapter("jax").find_device(kind, int(index[0]) if index else None)
        except fmapper.DeviceUnavailableError as error:
            print(word, "|", str(error).replace(chr(10), " "))
"""


def jax_says(*words: str, before: str = "", **env: str) -> dict[str, str]:
    code = textwrap.dedent(before) + textwrap.dedent(JAX_MISSING).format(words=words)
    lines = run(code, **env).splitlines()
    return dict(line.split(" | ", 1) for line in lines)


@pytest.mark.nightly
def test_the_plugin_of_jax_is_missing(jax: Any) -> None:
    if importlib.util.find_spec("jax_plugins") is not None:
        pytest.skip("a plugin is installed here")
    said = jax_says("gpu:0", "tpu:0", JAX_PLATFORMS="")
    assert "no gpu plugin is installed (for CUDA: pip install 'jax[cuda" in said["gpu:0"]
    assert "libtpu is not installed" in said["tpu:0"]


@pytest.mark.nightly
def test_the_driver_of_a_plugin_is_missing(jax: Any, tmp_path: Path) -> None:
    """A namespace package `jax_plugins`, as the CUDA wheels bring it, that finds no GPU."""
    plugin = tmp_path / "jax_plugins" / "xla_fake"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("def initialize(): pass\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = jax_says("gpu:0", JAX_PLATFORMS="", PYTHONPATH=paths)
    assert re.search(r"CPU only: jax_plugins\.\w+ finds no driver or no GPU", said["gpu:0"])


@pytest.mark.nightly
def test_a_setting_of_jax_is_to_blame(jax: Any) -> None:
    said = jax_says("gpu:0", JAX_PLATFORMS="cpu")
    assert "jax_platforms (or JAX_PLATFORMS) is 'cpu'" in said["gpu:0"]


@pytest.mark.nightly
def test_jax_cannot_start(jax: Any) -> None:
    """The other backends go on, and asking for JAX says why."""
    before = """
    import numpy, fmapper
    print("devices", "|", *{d.backend for d in fmapper.devices()} - {"torch"})
    print("tree", "|", fmapper.get_device([numpy.ones(1)]))
    """
    said = jax_says("cpu", "gpu", before=before, JAX_PLATFORMS="nosuch")
    assert said["devices"] == "numpy"
    assert said["tree"] == "numpy:cpu"
    for kind in ("cpu", "gpu"):
        assert "jax cannot start with jax_platforms (or JAX_PLATFORMS) 'nosuch'" in said[kind]
        assert said[kind].endswith("Here: nothing.")


@pytest.mark.nightly
def test_the_index_of_jax_is_too_high(jax: Any) -> None:
    said = jax_says("cpu:8", XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert "jax:cpu:8 is not available: the index is too high" in said["cpu:8"]
    assert "jax sees 8 of kind cpu" in said["cpu:8"]
    assert "jax:cpu:0, jax:cpu:1" in said["cpu:8"]


# --- where a tree lives --------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [None, (), [], {}, {"a": [(), None, "x", 3, 2.5, 1j, True]}])
def test_a_tree_without_arrays(tree: Any) -> None:
    assert get_device(tree) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.float32(1),
        lambda: np.True_,
        lambda: np.array(1.0),
        lambda: np.empty((0, 3)),
        lambda: np.array(["x"], object),
        lambda: np.ma.masked_array([1.0], [True]),
    ],
)
def test_numpy_is_on_the_host(make: Any) -> None:
    assert get_device({"x": [make()]}) == Device("numpy", "cpu")


def test_strings_and_dates_of_numpy_are_no_arrays() -> None:
    assert get_device([np.str_("x"), np.datetime64("2020-01-01")]) is None


def test_modules(torch: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert get_device(module) == Device("torch", "cpu")
    assert get_device(torch.nn.ReLU()) is None
    assert get_device(torch.nn.LazyLinear(2)) == Device("torch", "cpu")
    module[1] = torch.nn.BatchNorm1d(2, device="meta")
    with pytest.raises(fmapper.MixedDevicesError) as caught:
        get_device(module)
    cpu, meta = str(caught.value).splitlines()[1:3]
    assert cpu == "  torch:cpu: model[0].weight, model[0].bias"
    assert meta.startswith("  torch:meta: model[1].weight, model[1].bias, model[1].running_mean")


def test_meta_and_fake_tensors(torch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert get_device(torch.ones(2, device="meta")) == Device("torch", "meta")
    with FakeTensorMode():
        assert get_device(torch.ones(2)) == Device("torch", "cpu")


def test_a_long_list_of_paths_is_cut() -> None:
    tree: Any = [np.ones(1) for _ in range(10)]
    torch = pytest.importorskip("torch")
    with pytest.raises(fmapper.MixedDevicesError, match=r"model\[7\] and 2 more"):
        get_device([*tree, torch.ones(1)])


def test_a_deep_tree_costs_no_paths() -> None:
    """Each array at depth n has a path of n keys: writing them all out would take minutes."""
    tree: Any = None
    for _ in range(20_000):
        tree = [np.ones(1), tree]
    assert get_device(tree) == Device("numpy", "cpu")


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "eval_shape"])
def test_tracers_are_on_the_default_device(jax: Any, transform: str) -> None:
    seen = []

    def inside(x: Any) -> Any:
        seen.append(get_device({"x": x}))
        return x.sum()

    x = jax.numpy.ones((2, 2))
    if transform == "eval_shape":
        jax.eval_shape(inside, x)
    else:
        getattr(jax, transform)(lambda x: inside(x).sum())(x)
    assert seen[0] == Device("jax", "cpu" if jax.default_backend() == "cpu" else "gpu", 0)


# --- eight devices -------------------------------------------------------------------------------

EIGHT = """
    import json
    import jax, numpy as np, jax.numpy as jnp, fmapper
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from fmapper import get_device, to_cpu, to_device, to_jax, to_numpy

    out = {}
    cpu = jax.devices()
    mesh = Mesh(np.array(cpu), ("x",))
    values = np.arange(16, dtype=np.float32)
    split = jax.device_put(values, NamedSharding(mesh, PartitionSpec("x")))
    copied = jax.device_put(values, NamedSharding(mesh, PartitionSpec()))
    part = jax.device_put(values, NamedSharding(Mesh(np.array(cpu[5:3:-1]), ("x",)),
                                                PartitionSpec("x")))
    one = jax.device_put(values, cpu[1])

    def place(x):
        return sorted(d.id for d in x.devices())

    def error(call):
        try:
            return repr(call())
        except fmapper.FmapperError as error:
            return f"{type(error).__name__}: {error}"

    out["devices"] = [str(d) for d in fmapper.devices() if d.backend == "jax"]
    out["get"] = [str(get_device(x)) for x in (split, copied, part, one)]
    out["same"] = str(get_device({"a": split, "b": [copied]}))
    out["mixed"] = error(lambda: get_device({"a": split, "b": [part, one], "c": jnp.ones(1)}))

    # to one device
    for name, source in {"split": split, "copied": copied, "one": one}.items():
        for spelt in ("jax:cpu:3", "cpu:3", cpu[3], get_device(jax.device_put(0, cpu[3]))):
            new = to_device(spelt)({"w": source})["w"]
            assert place(new) == [3] and np.array_equal(np.asarray(new), values), (name, spelt)
            assert place(to_jax(source, device=spelt)) == [3]
    mixed = to_device("cpu:1")({"a": split, "b": one, "c": part, "d": copied})
    assert mixed["b"] is one and all(place(x) == [1] for x in mixed.values())
    out["stays"] = [to_cpu(one) is one, to_jax(one) is one, to_device("cpu:1")(one) is one]
    out["split stays"] = [to_jax(split) is split, to_jax(copied) is copied]
    out["split to cpu"] = [place(to_cpu(split)), place(to_device("cpu")(part))]
    half = to_jax(split, dtype="float16")
    out["cast"] = [str(half.dtype), place(half), np.asarray(half).tolist()]

    # to NumPy: gathered
    out["numpy"] = [to_numpy(x).tolist() for x in (split, copied, part)]
    host = to_numpy(split, copy=True)
    host[0] = 7
    out["untouched"] = np.asarray(split).tolist()

    # copies
    out["elsewhere"] = error(lambda: to_device("cpu:2", copy=False)(one))
    new = to_device("cpu:1", copy=True)(one)
    out["copy"] = [new is one, new.unsafe_buffer_pointer() == one.unsafe_buffer_pointer(),
                   place(new), place(to_device("cpu:2", copy=True)(one)),
                   place(to_device("cpu:2")(one))]
    to_device("cpu:2")(one).delete()
    out["source"] = [one.is_deleted(), np.asarray(one).tolist()]
    tied = to_device("cpu:6")({"a": one, "b": one, "c": split})
    out["tied"] = [tied["a"] is tied["b"], place(tied["a"]), place(tied["c"])]

    # the default device
    host = np.ones(3, np.float32)
    def places():
        return [place(to_jax(host))[0], place(to_jax(host, device="cpu"))[0],
                place(to_jax(host, device="cpu:0"))[0], place(to_jax(host, copy=True))[0],
                place(to_cpu(one))[0], place(to_jax(one))[0]]
    with jax.default_device(cpu[5]):
        out["context"] = places()
        jax.jit(lambda x: out.update(traced=str(get_device(x))) or x)(host)
        jax.jit(lambda x: out.update(beside=str(get_device([x, one]))) or x)(host)
    jax.config.update("jax_default_device", cpu[6])
    out["config"] = places()
    jax.config.update("jax_default_device", "cpu")
    out["config by name"] = places()
    jax.config.update("jax_default_device", None)
    out["none"] = places()
    jax.jit(lambda x: out.update(sharded=str(get_device(x))) or x)(split)
    out["several"] = error(lambda: to_device(get_device(split)))
    out["index"] = error(lambda: to_device("cpu:8")(one))
    print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def eight() -> Any:
    """What the script finds out; JAX reads the number of devices when it starts."""
    pytest.importorskip("jax")
    return json.loads(run(EIGHT, XLA_FLAGS="--xla_force_host_platform_device_count=8"))


ALL = "jax:cpu:0,1,2,3,4,5,6,7"
RANGE = [float(i) for i in range(16)]


@pytest.mark.nightly
def test_eight_devices_are_listed(eight: Any) -> None:
    assert eight["devices"] == [f"jax:cpu:{i}" for i in range(8)]


@pytest.mark.nightly
def test_get_device_of_sharded_arrays(eight: Any) -> None:
    assert eight["get"] == [ALL, ALL, "jax:cpu:4,5", "jax:cpu:1"]
    assert eight["same"] == ALL


@pytest.mark.nightly
def test_get_device_of_a_mixed_tree_of_jax(eight: Any) -> None:
    assert eight["mixed"].splitlines()[1:5] == [
        f"  {ALL}: model.a",
        "  jax:cpu:4,5: model.b[0]",
        "  jax:cpu:1: model.b[1]",
        "  jax:cpu:0: model.c",
    ]
    assert eight["mixed"].startswith("MixedDevicesError: ")


@pytest.mark.nightly
def test_moves_between_devices_of_jax(eight: Any) -> None:
    assert eight["stays"] == [True] * 3
    assert eight["split stays"] == [True] * 2
    assert eight["split to cpu"] == [[0], [0]]
    assert eight["cast"] == ["float16", list(range(8)), RANGE]
    assert eight["tied"] == [True, [6], [6]]


def test_a_sharded_array_is_gathered_for_numpy(eight: Any) -> None:
    assert eight["numpy"] == [RANGE] * 3
    assert eight["untouched"] == RANGE


def test_copies_between_devices_of_jax(eight: Any) -> None:
    assert eight["elsewhere"].startswith("CopyNeededError: model: ")
    assert eight["copy"] == [False, False, [1], [2], [2]]
    assert eight["source"] == [False, RANGE]


@pytest.mark.parametrize(
    ("how", "default"), [("context", 5), ("config", 6), ("config by name", 0), ("none", 0)]
)
def test_the_default_device_of_jax(eight: Any, how: str, default: int) -> None:
    """New arrays go there; `cpu:0` means `cpu:0`; what is on a device of JAX stays there."""
    assert eight[how] == [default, default, 0, default, 1, 1]


def test_tracers_go_with_the_arrays_beside_them(eight: Any) -> None:
    assert eight["traced"] == "jax:cpu:5"
    assert eight["beside"] == "jax:cpu:1"
    assert eight["sharded"] == "jax:cpu:0"


def test_several_devices_are_no_target(eight: Any) -> None:
    assert eight["several"] == f"DeviceError: {ALL} stands for several devices; name one of them."
    assert "jax:cpu:8 is not available: the index is too high" in eight["index"]
