"""How fast is `fmapper.fmap` over whole modules, beside what their own frameworks offer?

    python benchmarks/modules.py [--rounds 31] [--case NAME ...] [--json FILE]

All calls of a case run interleaved in one process. The ratio of a row is the median, over the
rounds, of the time of the row that the bar is about, divided by its own in the same round: how many
times faster. The exit status is 1 where `fmapper.fmap` misses the bar of its case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from _interleave import interleave, paired
from _report import machine, plain

OURS: Final = "fmapper.fmap"
PACKAGES: Final = ("fmapper", "flax", "jax", "torch", "numpy")
Calls = dict[str, Callable[[], Any]]


def identity(leaf: Any) -> Any:
    """Return the leaf."""
    return leaf


# --- Flax NNX: split, map, merge -----------------------------------------------------------------

SPLIT: Final = "nnx.split + jax.tree.map + nnx.merge"


def nnx_calls() -> Calls:
    """Map the identity over 150 Linear in 15 blocks, 300 parameters, with ties kept or lost."""
    import jax
    from flax import nnx

    import fmapper

    rngs = nnx.Rngs(0)
    model = nnx.List(
        [nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(10)]) for _ in range(15)]
    )

    def split_map_merge() -> Any:
        graph, values = nnx.split(model)
        return nnx.merge(graph, jax.tree.map(identity, values))

    calls: Calls = {
        OURS: lambda: fmapper.fmap(identity, model),
        SPLIT: split_map_merge,
        "nnx.clone": lambda: nnx.clone(model),
        "jax.tree.map, ties lost": lambda: jax.tree.map(identity, model),
        "fmapper.to_cpu, all there": lambda: fmapper.to_cpu(model),
    }
    for name, call in calls.items():
        found = len(jax.tree.leaves(nnx.state(call(), nnx.Param)))
        if found != 300:
            raise AssertionError(f"{name}: {found} parameters of 300")
    return calls


# --- torch: Module.to ----------------------------------------------------------------------------

TO: Final = 'Module.to("cpu"), in place'
DOUBLE: Final = "Module.to(float64), in place"


def torch_model() -> Any:
    """Build 150 Linear in 15 blocks: 300 parameters."""
    from torch import nn

    return nn.Sequential(*(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))) for _ in range(15)))


def torch_calls() -> Calls:
    """Map the identity over 300 parameters, and move them to where they are."""
    import fmapper

    model = torch_model()
    return {
        OURS: lambda: fmapper.fmap(identity, model),
        TO: lambda: model.to("cpu"),
        "fmapper.to_cpu, all there": lambda: fmapper.to_cpu(model),
    }


def torch_moves() -> Calls:
    """Make new values for 300 parameters: a copy, or float64 and back."""
    import copy

    import torch

    import fmapper

    model, other = torch_model(), torch_model()

    def there_and_back() -> Any:
        other.to(torch.float64)
        return other.to(torch.float32)

    to_double, to_single = fmapper.to_cpu(dtype="float64"), fmapper.to_cpu(dtype="float32")
    return {
        OURS: lambda: to_single(to_double(model)),
        DOUBLE: there_and_back,
        "fmapper.to_cpu(copy=True)": lambda: fmapper.to_cpu(model, copy=True),
        "copy.deepcopy": lambda: copy.deepcopy(model),
    }


# --- the cases -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Calls on one module, and the bar: how many times faster ours is to be than another."""

    name: str
    title: str
    make: Callable[[], Calls]
    against: str
    bar: float


CASES: Final = (
    Case("nnx", "a Flax NNX model: 150 Linear in 15 blocks, 300 parameters", nnx_calls, SPLIT, 3.0),
    Case("torch", "a torch module: 150 Linear in 15 blocks, 300 parameters", torch_calls, TO, 1.0),
    Case("cast", "the same to float64 and back; there is no bar", torch_moves, DOUBLE, 0.0),
)


@dataclass
class Row:
    """One line of a table: microseconds, and how many times faster than the row of the bar."""

    call: str
    us: float
    faster: float
    faster_q1: float
    faster_q3: float


def run_case(case: Case, rounds: int) -> list[Row]:
    """Time all calls of a case against each other."""
    timings = interleave(case.make(), rounds)
    rows = []
    for name, seconds in timings.items():
        middle, low, high = paired(timings[case.against], seconds)
        rows.append(Row(name, median(seconds) * 1e6, middle, low, high))
    return rows


def print_rows(case: Case, rows: Sequence[Row]) -> bool:
    """Print the table of a case; return whether the bar is met."""
    print(f"\n{case.name}: {case.title}")
    print(f"  {'call':40} {'us':>10} {'times faster':>13}")
    for row in rows:
        print(f"  {row.call:40} {row.us:10.1f} {row.faster:13.2f}")
    ours = next(row for row in rows if row.call == OURS)
    passed = ours.faster >= case.bar
    print(
        f"  {'PASS' if passed else 'FAIL'}  {ours.faster:.2f}x faster than {case.against} "
        f"(quartiles {ours.faster_q1:.2f} to {ours.faster_q3:.2f}), the bar is {case.bar:.1f}"
    )
    return passed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=31, help="samples of each call (31)")
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"which of: {', '.join(names)} (all)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    options = parser.parse_args(argv)
    about = machine(PACKAGES)
    print("  ".join(f"{name} {version}" for name, version in about.items()))
    results: dict[str, Any] = {"machine": about}
    passed = True
    for case in CASES:
        if case.name in options.case:
            rows = run_case(case, options.rounds)
            passed &= print_rows(case, rows)
            results[case.name] = [dataclasses.asdict(row) for row in rows]
    if options.json:
        options.json.write_text(json.dumps(plain(results), indent=2, allow_nan=False) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
