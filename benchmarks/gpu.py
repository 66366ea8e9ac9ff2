"""How fast does a model reach the GPU, beside `Module.to`, loops, and the link itself?

    python benchmarks/gpu.py [--rounds 15] [--case NAME ...] [--gigabytes 8] [--json FILE]
    PYTHONPATH=tests python benchmarks/gpu.py --simulated --case tiny

Every way of a case gets the same CPU tensors, once per round, in a shuffled order. Making a fresh
CPU model for `Module.to`, which moves in place, and freeing what came out are not timed; waiting
for the device is. `link` is a pinned buffer of 1 GiB copied to the device in the same rounds.
Ratios are medians of the ratios within a round. Without CUDA there is nothing to do, unless the GPU
of the tests is simulated, whose copies cost next to nothing: what is left is the time in Python.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from _interleave import paired

# JAX would take three quarters of the GPU when it first looks at it, and leave torch the rest.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

OURS: Final = "fmapper.fmap(to_gpu, model)"
MODULE: Final = "model.to('cuda')"
LOOP: Final = "a loop of tensor.to('cuda')"
BARE: Final = "the batched upload alone"
JAX: Final = "a loop of jax.device_put"
LINK: Final = "link: pinned"
LINK_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Way:
    """One way to the GPU: what it is given, made anew and untimed, and the call."""

    prepare: Callable[[], Any]
    call: Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """A model, and what is asked of it."""

    name: str
    title: str
    make: Callable[[float], Any]  # gigabytes -> a torch module on the CPU
    bar: str
    passes: Callable[[dict[str, Row]], tuple[bool, str]]


@dataclass
class Row:
    """One line of a table."""

    way: str
    nbytes: int
    ms: float = 0.0
    first_ms: float = 0.0  # the first call of the process, with all that is made for it
    gb_per_s: float = 0.0
    ratio: float = 0.0  # to Module.to
    ratio_q1: float = 0.0
    ratio_q3: float = 0.0
    seconds: list[float] = field(default_factory=list)


# --- the models ----------------------------------------------------------------------------------


def resnet50(_: float) -> Any:
    """Build the 161 parameters and 159 buffers of ResNet-50, without its forward pass."""
    from torch import nn

    def unit(i: int, o: int, k: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, k, bias=False), nn.BatchNorm2d(o)]

    layers, width = unit(3, 64, 7), 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            parts = unit(width, planes, 1) + unit(planes, planes, 3) + unit(planes, 4 * planes, 1)
            if block == 0:
                parts += unit(width, 4 * planes, 1)
            width = 4 * planes
            layers.append(nn.Sequential(*parts))
    model = nn.Sequential(*layers, nn.Linear(2048, 1000))
    assert len(model.state_dict()) == 320
    return model


def tiny(_: float) -> Any:
    """Build 100 modules of 100 parameters of 1 kB."""
    import torch
    from torch import nn

    parts = [nn.ParameterList(torch.randn(256) for _ in range(100)) for _ in range(100)]
    return nn.Sequential(*parts)


def large(gigabytes: float) -> Any:
    """Build 200 parameters of so many gigabytes in all."""
    import torch
    from torch import nn

    return nn.ParameterList(torch.ones(int(gigabytes * 1e9 / 800)) for _ in range(200))


def against_module(factor: float) -> Callable[[dict[str, Row]], tuple[bool, str]]:
    """Ask for so many times the speed of `Module.to`."""

    def passes(rows: dict[str, Row]) -> tuple[bool, str]:
        speedup = 1 / rows[OURS].ratio
        return speedup >= factor, f"{speedup:.2f}x the speed of {MODULE}"

    return passes


def against_link(share: float) -> Callable[[dict[str, Row]], tuple[bool, str]]:
    """Ask for a share of the rate of the link."""

    def passes(rows: dict[str, Row]) -> tuple[bool, str]:
        ours, link = rows[OURS], rows[LINK]
        reached, _, _ = paired(
            [link.seconds[i] / link.nbytes for i in range(len(link.seconds))],
            [ours.seconds[i] / ours.nbytes for i in range(len(ours.seconds))],
        )
        return reached >= share, f"{reached:.2f} of the rate of the pinned link"

    return passes


CASES: Final = (
    Case("resnet50", "ResNet-50, 320 tensors", resnet50, ">= 1x Module.to", against_module(1)),
    Case("tiny", "10 000 tensors of 1 kB", tiny, ">= 2x Module.to", against_module(2)),
    Case("large", "200 large tensors", large, ">= 0.9 of the link", against_link(0.9)),
)


# --- timing --------------------------------------------------------------------------------------


def ways(model: Any, link_bytes: int) -> tuple[dict[str, Way], int]:
    """Give the ways to the GPU for one CPU model, and its bytes."""
    import torch

    import fmapper
    from fmapper_adapters.torch.arrays import pinned

    cuda = torch.device("cuda")
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    staging = torch.empty(link_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(link_bytes, dtype=torch.uint8, device=cuda)

    def fresh() -> Any:
        """Build a CPU model whose tensors are new objects on the same memory."""
        known = {id(tensor): torch.nn.Parameter(tensor.detach()) for tensor in model.parameters()}
        return fmapper.fmap(lambda leaf: known.get(id(leaf), leaf), model)

    found = {
        OURS: Way(lambda: model, partial(fmapper.fmap, fmapper.to_gpu(strict=True))),
        BARE: Way(lambda: tensors, lambda given: pinned.upload(given, cuda)),
        MODULE: Way(fresh, lambda given: given.to(cuda)),
        LOOP: Way(lambda: tensors, lambda given: [tensor.to(cuda) for tensor in given]),
        LINK: Way(lambda: staging, lambda given: target.copy_(given, non_blocking=True)),
    }
    put = jax_loop()
    if put is not None:
        arrays = [tensor.numpy() for tensor in tensors]
        found[JAX] = Way(lambda: arrays, put)
    return found, sum(tensor.nbytes for tensor in tensors)


def jax_loop() -> Callable[[Any], Any] | None:
    """Give a loop of `jax.device_put`, where JAX sees a GPU."""
    try:
        import jax

        device = jax.devices("gpu")[0]
    except (ImportError, RuntimeError):  # RuntimeError: JAX's answer for a platform it lacks
        return None
    return lambda arrays: jax.block_until_ready([jax.device_put(a, device) for a in arrays])


def run_case(case: Case, rounds: int, gigabytes: float, link_bytes: int) -> dict[str, Row]:
    """Time all ways of a case against each other."""
    found, nbytes = ways(case.make(gigabytes), link_bytes)
    rows = {name: Row(name, link_bytes if name == LINK else nbytes) for name in found}
    order = list(found)
    shuffle = random.Random(0).shuffle
    for name, way in found.items():
        rows[name].first_ms = once(way) * 1e3
        once(way)
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            rows[name].seconds.append(once(found[name]))
    for row in rows.values():
        row.ms = median(row.seconds) * 1e3
        row.gb_per_s = row.nbytes / median(row.seconds) / 1e9
        row.ratio, row.ratio_q1, row.ratio_q3 = paired(row.seconds, rows[MODULE].seconds)
    return rows


def once(way: Way) -> float:
    """Return the seconds of one call, the device's work included."""
    import torch

    given = way.prepare()
    gc.collect()
    gc.disable()
    try:
        torch.cuda.synchronize()
        start = perf_counter()
        result = way.call(given)
        torch.cuda.synchronize()
        seconds = perf_counter() - start
    finally:
        gc.enable()
    del result
    return seconds


# --- printing ------------------------------------------------------------------------------------


def print_rows(case: Case, rows: dict[str, Row]) -> None:
    """Print the table of one case."""
    print(f"\n{case.name}: {case.title}, {rows[OURS].nbytes / 1e6:.1f} MB")
    print(f"  {'way':30} {'ms':>10} {'GB/s':>7} {'first ms':>10} {'x Module.to':>12}  quartiles")
    for row in rows.values():
        ratio = "-" if row.way == LINK else f"{row.ratio:.2f}"
        spread = "" if row.way == LINK else f"{row.ratio_q1:.2f} to {row.ratio_q3:.2f}"
        print(
            f"  {row.way:30} {row.ms:10.2f} {row.gb_per_s:7.1f} {row.first_ms:10.2f} "
            f"{ratio:>12}  {spread}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="samples of each way (15)")
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"which of: {', '.join(names)} (all)")  # fmt: skip
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the large case (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    parser.add_argument("--simulated", action="store_true", help="on the GPU of the tests")
    args = parser.parse_args(argv)
    if args.simulated:
        from support.simulated_gpu import install

        install("eager")
    try:
        import torch
    except ModuleNotFoundError:
        print("torch is not installed: nothing to measure.")
        return 0
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing to measure.")
        return 0

    print(f"torch {torch.__version__}  {torch.cuda.get_device_name()}  {os.cpu_count()} CPUs")
    tables: dict[str, dict[str, Row]] = {}
    verdicts: dict[str, str] = {}
    missed = False
    for case in CASES:
        if case.name in args.case:
            link_bytes = LINK_BYTES >> 10 if args.simulated else LINK_BYTES
            rows = tables[case.name] = run_case(case, args.rounds, args.gigabytes, link_bytes)
            print_rows(case, rows)
            passed, what = case.passes(rows)
            missed |= not passed
            verdicts[case.name] = f"{'PASS' if passed else 'FAIL'}  {what} ({case.bar})"
    print(f"\n{OURS}; {args.rounds} rounds")
    for name, result in verdicts.items():
        print(f"  {name:12} {result}")
    if args.json:
        report = {
            "versions": {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()},
            "rounds": args.rounds,
            "cases": {n: [asdict(row) for row in rows.values()] for n, rows in tables.items()},
            "verdicts": verdicts,
        }
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
