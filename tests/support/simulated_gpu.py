"""Runs the tests marked `gpu` where there is no GPU.

    PYTHONPATH=tests python -m pytest -p support.simulated_gpu -m gpu

It takes a C++ compiler and ninja; the extension is built once, into `SIMULATED_GPU_BUILD`, and
`simulated_gpu.cpp` says what it simulates. Further variables: `SIMULATED_GPU_MODE` ("late",
"random", "eager"), `SIMULATED_GPU_SEED`, and `SIMULATED_GPU_MISTAKE`, one of `MISTAKES`, which the
tests must find.

It shows the order of copies, the reuse of memory, exactness, devices and failure. It cannot show
speed, CUDA graphs, random numbers of a GPU, and a missing `record_stream` (its kernels run when
they are called): `HARDWARE` lists the tests that wait for a real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

MODES = ("late", "eager", "random")
DEVICES = 2
CAPACITY = 2 << 30

HARDWARE = {
    "test_functional.py::test_torch_on_a_gpu": "kernels of cuDNN",
    "test_materialize.py::test_straight_to_the_gpu": "random numbers of a GPU",
    "test_models_on_a_gpu.py": "storages that copy themselves",
    "test_plan.py::test_a_generator_goes_to_the_gpu_with_its_model": "random numbers of a GPU",
    "test_profile.py::test_a_gpu_is_measured_and_waited_for": "speed",
    "test_profile.py::test_a_gpu_is_calibrated_in_five_seconds": "speed",
    "test_torch_optim.py::test_on_a_gpu_it_goes_on_as_with_load_state_dict": "fused optimizers",
}


def _no_pieces_awaited(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    """`download` returns before the last copies have arrived."""
    monkeypatch.setattr(link._Pieces, "finish", lambda self: None)


def _no_event_awaited(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    """A piece counts as arrived as soon as somebody asks."""

    class Reached(torch.Event):
        def synchronize(self) -> None: ...

    monkeypatch.setattr(link.torch, "Event", Reached)


def _one_buffer(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    """Pinned memory is written again while a copy still reads it."""
    buffers: dict[Any, torch.Tensor] = {}

    def allocate(self: Any, like: torch.Tensor) -> torch.Tensor:
        self._wait(link.UNDER_WAY - 1)
        key = self.device, like.dtype
        if key not in buffers or buffers[key].numel() < like.numel():
            buffers[key] = torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
        return buffers[key][: like.numel()].view(like.shape)

    monkeypatch.setattr(link._Pieces, "allocate", allocate)


def _another_stream(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    """Copies go to a stream of their own, which nobody waits for."""
    start = link._Pieces.start

    def elsewhere(self: Any, *args: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            start(self, *args)

    monkeypatch.setattr(link._Pieces, "start", elsewhere)


def _workers_do_not_wait(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    """A thread empties a piece before it has arrived."""
    monkeypatch.setattr(link.Workers, "wait", lambda self: None)


def _workers_elsewhere(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    """Threads work on the default stream, which nobody waits for."""
    monkeypatch.setattr(link.Workers, "_begin", lambda self: None)


def _no_handover(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    """A batch that another thread has moved is used before its copies are done."""
    from fmapper_adapters.torch.arrays import threads

    monkeypatch.setattr(threads, "hand_over", lambda tensors: None)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "pieces": _no_pieces_awaited,
    "event": _no_event_awaited,
    "buffer": _one_buffer,
    "stream": _another_stream,
    "handover": _no_handover,
    "arrival": _workers_do_not_wait,
    "begin": _workers_elsewhere,
}


def build() -> Any:
    """Build the extension, or load what was built before."""
    from torch.utils.cpp_extension import load

    os.environ.setdefault("MAX_JOBS", "1")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # ninja
    place = Path(os.environ.get("SIMULATED_GPU_BUILD", ".pytest_cache/simulated_gpu")).resolve()
    place.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_suffix(".cpp")
    flags = ["-O1", "-std=c++20", "-w"]
    return load("simulated_gpu", [str(source)], build_directory=str(place), extra_cflags=flags)


def install(mode: str = "late", seed: int = 0) -> Any:
    """Make torch believe that there are GPUs, before anything has asked it."""
    extension = build()
    extension.setup(MODES.index(mode), seed, DEVICES, CAPACITY)
    cuda: Any = torch.cuda

    def index_of(device: Any = None) -> int:
        return int(cuda._utils._get_device_index(device, optional=True))

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, torch.device("cuda", index_of(device)), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Any:
            device = torch.device("cuda")
            return super().__new__(cls, device, enable_timing=enable_timing, blocking=blocking)

        def record(self, stream: Any = None) -> None:
            super().record(cuda.current_stream() if stream is None else stream)

        def wait(self, stream: Any = None) -> None:
            super().wait(cuda.current_stream() if stream is None else stream)

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.device = cuda.current_device()
                self.before = cuda.current_stream(self.stream.device)
                torch.accelerator.set_stream(self.stream)

        def __exit__(self, *args: object) -> None:
            if self.stream is not None:
                torch.accelerator.set_stream(self.before)
                torch.accelerator.set_device_index(self.device)

    def current_stream(device: Any = None) -> Any:
        found = torch.accelerator.current_stream(torch.device("cuda", index_of(device)))
        return Stream(
            stream_id=found.stream_id,
            device_index=found.device_index,
            device_type=found.device_type,
        )

    def exchange_device(index: int) -> int:
        before = torch.accelerator.current_device_index()
        if index >= 0:
            torch.accelerator.set_device_index(index)
        return before

    class Properties:
        name, total_memory = "Simulated GPU", CAPACITY

    for name, value in {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(index_of(device)),
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(
            stream_id=0, device_index=index_of(device), device_type=1
        ),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(
            torch.device("cuda", index_of(device))
        ),
        "mem_get_info": lambda device=None: extension.mem_info(index_of(device)),
        "memory_allocated": lambda device=None: extension.allocated(index_of(device)),
        "max_memory_allocated": lambda device=None: extension.peak(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(index_of(device)),
        "get_device_name": lambda device=None: Properties.name,
        "get_device_properties": lambda device=None: Properties,
        "_sleep": lambda cycles: extension.sleep(),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
    }.items():
        setattr(cuda, name, value)
    torch._C._cuda_getDeviceCount = lambda: DEVICES
    torch._C._cuda_getDevice = torch.accelerator.current_device_index
    torch._C._cuda_exchangeDevice = exchange_device
    torch._C._cuda_maybeExchangeDevice = exchange_device
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"
    return extension


EXTENSION = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    """Simulate a GPU from here on."""
    mode = os.environ.get("SIMULATED_GPU_MODE", "late")
    seed = int(os.environ.get("SIMULATED_GPU_SEED", "0"))
    config.stash[EXTENSION] = install(mode, seed)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Pass over files without a test for GPUs: some import what looks for parts of a real one."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (is_test and "mark.gpu" not in collection_path.read_text()) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what waits for hardware."""
    for item in items:
        for name, reason in HARDWARE.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"not simulated: {reason}"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what the simulation did: a run without a late copy has shown nothing."""
    terminalreporter.write_line(f"simulated GPU: {config.stash[EXTENSION].counts()}")


@pytest.fixture(autouse=True)
def mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mistake, where one is asked for."""
    planted = os.environ.get("SIMULATED_GPU_MISTAKE")
    if planted:
        from fmapper_adapters.torch.arrays import pinned as _link

        MISTAKES[planted](monkeypatch, _link)
