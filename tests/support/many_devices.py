"""Runs checks where there are many devices, in a process of its own, and says how each went.

python tests/support/many_devices.py jax sharding        # eight devices that XLA makes of this CPU
python tests/support/many_devices.py gloo sharding 4     # four processes that talk over loopback
python tests/support/many_devices.py jaxes loading 4     # the same of JAX, two devices each
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARK = "outcome: "


def run(
    kind: str, name: str, *, ranks: int = 1, only: Collection[str] = (), timeout: int = 600
) -> dict[str, str]:
    """Runs the `check_*` of `tests/support/{kind}_{name}.py`; returns what went wrong, by name.

    The text is empty for one that passed. With several ranks each runs all, in the same order.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if kind in ("jax", "jaxes"):
        count = 8 if kind == "jax" else 1 if name == "bridge" else 2
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, kind, name, str(ranks), str(port), folder]
        checks = [check for check in names(kind, name) if not only or check in only]
        processes = [
            subprocess.Popen(
                [*command, str(rank), *checks],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        outcome: dict[str, str] = {}
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
            if __name__ == "__main__" and rank == 0:
                print(*(line for line in output.splitlines() if line.startswith("note: ")))
            lines = [line for line in output.splitlines() if line.startswith(MARK)]
            for line in lines:
                check, text = json.loads(line.removeprefix(MARK))
                outcome[check] = outcome.get(check, "") + (f"rank {rank}: {text}" if text else "")
            if process.returncode:
                outcome[""] = f"rank {rank} ended with {process.returncode}: {output[-3000:]}"
    return outcome


def names(kind: str, name: str) -> list[str]:
    """Returns the names of the checks, without importing the file."""
    text = (HERE / f"{kind}_{name}.py").read_text()
    return [
        line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def check_")
    ]


def chosen(module: Any) -> set[str]:
    """Returns the checks among the tests of a module that pytest is going to run."""
    items = [item for item in module.session.items if item.path == module.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {each["check"] for each in params if "check" in each}


def main(
    kind: str, name: str, ranks: int, port: int, folder: str, rank: int, checks: Iterable[str]
) -> None:
    """Runs the checks in this process."""
    if kind == "gloo" or name == "bridge":
        import torch

        torch.distributed.init_process_group(
            "gloo", rank=rank, world_size=ranks, init_method=f"tcp://127.0.0.1:{port}"
        )
    if kind == "jaxes":
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port + 1}", ranks, rank)
    spec: Any = importlib.util.spec_from_file_location("checks", HERE / f"{kind}_{name}.py")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["checks"] = module
    spec.loader.exec_module(module)
    module.FOLDER = Path(folder)
    for check in checks:
        try:
            getattr(module, check)()
            text = ""
        except Exception:
            text = traceback.format_exc()
        print(MARK + json.dumps([check, text]), flush=True)
    if kind == "gloo":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _, kind, name, *rest = sys.argv
    if len(rest) < 2:
        for check, text in run(kind, name, ranks=int((rest or ["1"])[0])).items():
            print(check, text or "ok")
    else:
        main(kind, name, int(rest[0]), int(rest[1]), rest[2], int(rest[3]), rest[4:])
