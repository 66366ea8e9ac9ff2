"""Checks of `fmapper.Sync` between processes that share a folder, one of which may be killed.

`sync/test_processes.py` runs them in a process of their own, which forks.
"""

from __future__ import annotations

import os
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import Rename, Rules
from fmapper.sync import Folder

SHAPES = {f"layers.{i}.weight": (64, 256) for i in range(12)}
LIMIT = 3.0  # seconds that a process waits for others
SLACK = 5.0  # seconds that a busy machine takes beside


def state(value: float) -> dict[str, Any]:
    return {name: np.full(shape, value, "float32") for name, shape in SHAPES.items()}


def fork(*roles: Callable[[], object]) -> list[int]:
    """Runs functions in processes of their own; they end with 0 if all is well."""
    children = []
    for role in roles:
        child = os.fork()
        if child == 0:
            try:
                role()
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def connect(path: Path, rank: int, size: int, *, gloo: bool) -> Folder | None:
    """Returns a folder as transport; or joins a group of gloo, which is the default."""
    if not gloo:
        return Folder(path, rank, size)
    import torch

    store = f"file://{path / 'store'}"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size, init_method=store)
    return None


def train(
    path: Path,
    rank: int,
    size: int,
    steps: int = 1_000_000,
    *,
    delta: bool = False,
    gloo: bool = False,
) -> None:
    """Changes all weights in each step; every third call is without a delta."""
    source, transport = state(0), connect(path, rank, size, gloo=gloo)
    sync = fmapper.Sync(source, None, transport=transport, timeout=LIMIT)
    (path / f"process-{rank}-begins").touch()
    for step in range(1, steps + 1):
        for array in source.values():
            np.add(array, 1, out=array)
        sync(delta=delta and step % 3 != 0)


def run(
    path: Path,
    rank: int,
    size: int,
    steps: int = 1_000_000,
    *,
    delta: bool = False,
    gloo: bool = False,
) -> None:
    """Syncs until a process has gone: the model is as one call has left it."""
    target = state(0)
    expected = 0.0
    began = time.monotonic()
    try:
        transport = connect(path, rank, size, gloo=gloo)
        sync = fmapper.Sync(None, target, transport=transport, timeout=LIMIT)
        for step in range(1, steps + 1):
            began = time.monotonic()
            sync(delta=delta and step % 3 != 0)
            expected = float(step)
            assert values_of(target) == {expected}
        whole = sum(array.nbytes for array in target.values())
        assert not delta or sync.stats.received < 1.1 * whole
    except fmapper.SyncError as error:
        said = str(error)
        assert time.monotonic() - began < LIMIT + SLACK
        assert "rank 0" in said
    assert values_of(target) == {expected}
    (path / f"process-{rank}-last").write_text(str(expected))


def values_of(target: dict[str, Any]) -> set[float]:
    return {float(x) for array in target.values() for x in np.unique(array)}


def check_two_trainers_and_two_runners() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        roles = [lambda rank=rank: train(path, rank, 4, 6) for rank in (0, 1)]
        roles += [lambda rank=rank: run(path, rank, 4, 6) for rank in (2, 3)]
        assert [ended(child) for child in fork(*roles)] == [0] * 4
        assert [path for path in path.iterdir() if not path.name.startswith("process")] == []


def check_changes_alone() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        roles = [lambda: train(path, 0, 2, 8, delta=True), lambda: run(path, 1, 2, 8, delta=True)]
        assert [ended(child) for child in fork(*roles)] == [0] * 2


def check_a_trainer_that_is_killed(times: int = 3) -> None:
    rng = random.Random(0)
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            kill_after(rng.uniform(0.1, 0.5), Path(folder))


def check_a_trainer_of_gloo_that_is_killed(times: int = 3) -> None:
    """Once it has begun: who joins a group waits for all others."""
    fmapper.to_torch(state(0))  # imports it once, and not in each process
    rng = random.Random(0)
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            kill_after(rng.uniform(0.0, 0.3), Path(folder), gloo=True)


def kill_after(seconds: float, path: Path, *, gloo: bool = False) -> None:
    trainer, *runners = fork(
        lambda: train(path, 0, 3, gloo=gloo),
        lambda: run(path, 1, 3, gloo=gloo),
        lambda: run(path, 2, 3, gloo=gloo),
    )
    while gloo and not (path / "process-0-begins").exists():
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(trainer, signal.SIGKILL)
    ended(trainer)
    assert [ended(child) for child in runners] == [0, 0]
    one, other = (float((path / f"process-{rank}-last").read_text()) for rank in (1, 2))
    assert one == other


def check_a_trainer_that_stalls() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        trainer, runner = fork(lambda: train(path, 0, 2), lambda: run(path, 1, 2))
        time.sleep(0.4)
        os.kill(trainer, signal.SIGSTOP)
        assert ended(runner) == 0
        os.kill(trainer, signal.SIGKILL)
        ended(trainer)


def check_other_names_are_refused_in_all_processes() -> None:
    def one(path: Path, rank: int) -> None:
        ends = (state(0), None) if rank == 0 else (None, {**state(0), "more": np.ones(3)})
        with pytest.raises(fmapper.SyncError, match="more: the source has nothing for it"):
            fmapper.Sync(*ends, transport=Folder(path, rank, 2), timeout=LIMIT)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        assert [ended(c) for c in fork(lambda: one(path, 0), lambda: one(path, 1))] == [0, 0]


def check_a_process_without_memory_is_named_at_once() -> None:
    def take(path: Path) -> None:
        from fmapper.sync import here

        def fail(self: Any, end: Any) -> Any:
            raise MemoryError

        target = state(0)
        sync = fmapper.Sync(None, target, transport=Folder(path, 1, 2), timeout=60.0)
        here.Here._prepare = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            sync()
        assert values_of(target) == {0.0}
        while not (path / "process-0-knows").exists():  # one that has ended is noticed, too
            time.sleep(0.05)

    def give(path: Path) -> None:
        sync = fmapper.Sync(state(3), None, transport=Folder(path, 0, 2), timeout=60.0)
        began = time.monotonic()
        with pytest.raises(fmapper.SyncError, match="rank 1"):
            sync()
        seconds = time.monotonic() - began
        (path / "process-0-knows").touch()
        assert seconds < 2 * SLACK

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        assert [ended(child) for child in fork(lambda: give(path), lambda: take(path))] == [0, 0]


def check_arrays_that_cannot_be_packed_are_said_to_all() -> None:
    """Also to a process that gets all of its own arrays."""

    def give(path: Path, rank: int) -> None:
        from fmapper.sync import exchange

        sync = fmapper.Sync(state(3), None, transport=Folder(path, rank, 3), timeout=60.0)
        if rank == 0:
            exchange._Packet.pack = fail  # type: ignore[method-assign]
        with pytest.raises(
            (MemoryError, fmapper.SyncError), match="no room" if rank == 0 else told
        ):
            sync()

    def fail(self: Any) -> Any:
        raise MemoryError("no room")

    def take(path: Path) -> None:
        target = state(0)
        sync = fmapper.Sync(None, target, transport=Folder(path, 2, 3), timeout=60.0)
        began = time.monotonic()
        with pytest.raises(fmapper.SyncError, match=told):
            sync()
        assert time.monotonic() - began < SLACK
        assert values_of(target) == {0.0}

    told = (
        "^rank 0 cannot pack arrays: MemoryError: no room. The running model has its old weights$"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        roles = [lambda: give(path, 0), lambda: give(path, 1), lambda: take(path)]
        assert [ended(child) for child in fork(*roles)] == [0, 0, 0]


def check_rules_of_one_process_are_those_of_all() -> None:
    rules = Rules([Rename("layers.{i}.weight", "blocks.{i}")])

    def give(path: Path) -> None:
        fmapper.Sync(state(3), None, rules, transport=Folder(path, 0, 2), timeout=LIMIT)()

    def take(path: Path) -> None:
        target = {f"blocks.{i}": np.zeros((64, 256), "float32") for i in range(12)}
        fmapper.Sync(None, target, transport=Folder(path, 1, 2), timeout=LIMIT)()
        assert values_of(target) == {3.0}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        assert [ended(child) for child in fork(lambda: give(path), lambda: take(path))] == [0, 0]
        with pytest.raises(fmapper.SyncError, match="files of another Folder"):
            Folder(path, 0, 2)


def check_a_path_has_one_folder_in_a_process() -> None:
    """Two would count messages apart, so that one could take those of the other."""
    with tempfile.TemporaryDirectory() as folder:
        Folder(folder, 0, 2)
        with pytest.raises(fmapper.SyncError, match="files of another Folder"):
            Folder(folder, 0, 2)


def check_processes_of_other_machines_are_waited_for() -> None:
    """Their numbers mean nothing here."""

    def elsewhere(path: Path) -> None:
        platform.node = lambda: "elsewhere"
        Folder(path, 1, 2)

    with tempfile.TemporaryDirectory() as folder:
        assert ended(fork(lambda: elsewhere(Path(folder)))[0]) == 0
        message = Path(folder) / "message"
        message.write_bytes(b"weights")
        threading.Timer(0.3, message.rename, [Path(folder) / "1-0-0"]).start()
        assert bytes(Folder(folder, 0, 2).receive(1)) == b"weights"


if __name__ == "__main__":
    fmapper.state(state(0))
    _, name, *times = sys.argv
    globals()[name](*map(int, times))
