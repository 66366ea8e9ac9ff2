"""What do processes read and hold that load in shards, and what is left where one of them dies?

    python benchmarks/mesh_processes.py load torch|jax [--mib 1024]
    python benchmarks/mesh_processes.py kill torch|jax [--times 50] [--patience 20]

`load`: a checkpoint of 16 matrices, read by four processes of gloo ranks or of `jax.distributed`,
one device each, as 2 by 2: the bytes that each reads of its file, over those of its shards, and
what its memory grows at most, above its shards. Bars: 1.02, and 128 MiB.
`kill`: four processes save a sharded tree over an older file; one of them, drawn at random, is
killed at a random moment of that. Then the file must be the old one or the new one to the byte, and
the others must have ended, within 30 seconds. Every other time they load instead, where the others
must have what they wanted.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import numpy as np
from _peak import CLEAR, resident
from _report import machine

import fmapper
from fmapper.checkpoints import SourceFile
from fmapper.files import meeting
from fmapper.meshes import Sharding

MIB = 2**20
RANKS = 4
RULES = {"rows.*": ("data",), "columns.*": (None, "model"), "both.*": ("model", "data")}
KINDS = ("rows", "columns", "both", "both")
LIMIT = 30


def start(framework: str, rank: int, port: int) -> Any:
    """Joins the other processes; returns the mesh."""
    address = f"127.0.0.1:{port}"
    if framework == "torch":
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        torch.distributed.init_process_group(
            "gloo", rank=rank, world_size=RANKS, init_method=f"tcp://{address}"
        )
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, RANKS, rank)
    return jax.make_mesh((2, 2), ("data", "model"))


def likes(framework: str, side: int, count: int) -> Any:
    """Returns the tree without values."""
    names = [f"{KINDS[at % 4]}.{at}" for at in range(count)]
    if framework == "torch":
        import torch

        return {name: torch.empty(side, side, device="meta") for name in names}
    import jax

    return {name: jax.ShapeDtypeStruct((side, side), "float32") for name in names}


def parts(tree: Any) -> list[Any]:
    """Returns the shards of this process."""
    return [
        array.addressable_shards[0].data if hasattr(array, "addressable_shards")
        else array.to_local()
        for array in tree.values()
    ]  # fmt: skip


def load(framework: str, rank: int, port: int, path: Path, side: int) -> None:
    """Loads in one process, and prints what that took."""
    mesh = start(framework, rank, port)
    small = path.with_name("small.safetensors")
    sharding = Sharding(mesh, RULES)
    fmapper.load(small, like=likes(framework, 64, 16), sharding=sharding)  # loads what is imported
    count, own = 0, SourceFile.read_into

    def read_into(file: Any, handle: int, out: memoryview, offset: int) -> None:
        nonlocal count
        count += len(out)
        own(file, handle, out, offset)

    SourceFile.read_into = read_into  # type: ignore[method-assign]
    CLEAR.write_text("5")
    before = resident("VmRSS")
    begun = time.perf_counter()
    tree = fmapper.load(path, like=likes(framework, side, 16), sharding=sharding)
    if framework == "jax":
        import jax

        jax.block_until_ready(tree)
    seconds = time.perf_counter() - begun
    mine = sum(part.nbytes for part in parts(tree))
    more = resident("VmHWM") - before - mine
    print(
        f"{framework}, process {rank}: shards of {mine / MIB:.0f} MiB, read {count / mine:.3f} of "
        f"them, {more / MIB:.0f} MiB of memory beside, {seconds:.1f} s",
        flush=True,
    )
    leave(framework)


def leave(framework: str) -> None:
    """Ends this process, after the others are done."""
    if framework == "torch":
        import torch

        torch.distributed.barrier()
    else:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices("done")
    os._exit(0)


def values(side: int, new: bool) -> dict[str, Any]:
    """Returns the arrays of the older or newer file."""
    return {f"{KINDS[at]}.{at}": np.full((side, side), at + 10 * new, "f") for at in range(4)}


def save_or_load(
    framework: str, rank: int, port: int, path: Path, is_load: bool, mark: Path
) -> None:
    """Does so in one process, which says when it begins; exits with 3 where there is an error."""
    mesh = start(framework, rank, port)
    sharding = Sharding(mesh, RULES)
    tree = None if is_load else sharding(values(512, True))
    fmapper.load(path, like=likes(framework, 512, 4), sharding=sharding)  # imports what that needs
    (mark / f"ready-{rank}").touch()
    while len([*mark.glob("ready-*")]) < RANKS:
        time.sleep(0.01)
    (mark / f"begun-{rank}").touch()
    try:
        if is_load:
            found = fmapper.load(path, like=likes(framework, 512, 4), sharding=sharding)
            good = all(float(np.asarray(part)[0, 0]) in (at, at + 10)
                       for at, part in enumerate(parts(found)))  # fmt: skip
            os._exit(0 if good else 4)
        fmapper.save(tree, path)
    except fmapper.FmapperError as error:
        (mark / f"error-{rank}").write_text(str(error))
        os._exit(3)
    os._exit(0)


def is_whole(path: Path) -> bool:
    """Returns whether a file is the older or the newer one."""
    found = {name: array.read() for name, array in fmapper.load(path).items()}
    return any(
        found.keys() == wanted.keys()
        and all(np.array_equal(found[name], array) for name, array in wanted.items())
        for wanted in (values(512, False), values(512, True))
    )


def kill(framework: str, times: int, patience: float) -> None:
    """Kills one process, many times; forks, so that nothing is imported again."""
    __import__(framework)
    meeting.PATIENCE = patience
    draw = random.Random(0)
    torn = hung = silent = 0
    longest = 0.0
    ends: dict[str, int] = {}
    for turn in range(times):
        is_load = turn % 2 == 1
        with tempfile.TemporaryDirectory() as folder:
            mark, path = Path(folder) / "marks", Path(folder) / "tree.safetensors"
            mark.mkdir()
            fmapper.save(values(512, False), path)
            port, pids = free_port(), []
            for rank in range(RANKS):
                pid = os.fork()
                if pid == 0:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                    save_or_load(framework, rank, port, path, is_load, mark)
                pids.append(pid)
            victim = draw.randrange(RANKS)
            while not (mark / f"begun-{victim}").exists():
                time.sleep(0.002)
            time.sleep(draw.random() ** 2 * (0.1 if is_load else 0.8))
            os.kill(pids[victim], signal.SIGKILL)
            died = time.monotonic()
            left = dict(enumerate(pids))
            while left and time.monotonic() - died < 2 * LIMIT:
                for rank, pid in [*left.items()]:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        del left[rank]
                        end = f"{'load' if is_load else 'save'} {os.waitstatus_to_exitcode(status)}"
                        if rank != victim:
                            ends[end] = ends.get(end, 0) + 1
                time.sleep(0.02)
            took = time.monotonic() - died
            longest = max(longest, took)
            hung += took > LIMIT
            for pid in left.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            torn += not is_whole(path)
            said = [one.read_text() for one in mark.glob("error-*")]
            silent += sum("process" not in text for text in said)
    print(
        f"{framework}: {times} times killed, {torn} torn, {hung} hung, longest {longest:.1f} s "
        f"with a patience of {patience:.0f} s; {silent} errors name no process; ends of the "
        f"others: {ends}"
    )


def free_port() -> int:
    """Returns a port that nobody listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    """Starts the processes, and waits for them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["load", "kill"])
    parser.add_argument("framework", choices=["torch", "jax"])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--patience", type=float, default=20)
    options = parser.parse_args()
    print(", ".join(f"{n} {v}" for n, v in machine(("fmapper", "torch", "jax")).items()))
    if options.what == "kill":
        kill(options.framework, options.times, options.patience)
        return
    side = int((options.mib * MIB / 16 / 4) ** 0.5) // 8 * 8
    with tempfile.TemporaryDirectory() as folder:
        path, port = Path(folder) / "tree.safetensors", free_port()
        one = np.ones((side, side), "f")
        fmapper.save({f"{KINDS[at % 4]}.{at}": one + at for at in range(16)}, path)
        small = {f"{KINDS[at % 4]}.{at}": np.ones((64, 64), "f") + at for at in range(16)}
        fmapper.save(small, path.with_name("small.safetensors"))
        sys.stdout.flush()
        pids = []
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                load(options.framework, rank, port, path, side)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(f"processes end with {codes}")


if __name__ == "__main__":
    main()
