"""How fast is a converted model, beside torch and beside the same model written in Flax?

    python benchmarks/convert.py [--case NAME ...] [--batch N ...] [--size small|full]
                                 [--compile] [--rounds 15] [--clock wall|cpu] [--json FILE]

All calls of a case run interleaved in one process, with the same weights and inputs; their outputs
are compared first. A ratio is the median, over the rounds, of the time of a peer by ours in the
same round: how many times as fast the converted model is. The exit status is 1 where it is below
1.0 for the Flax twin or for torch eager. `--clock cpu` counts the processor time of the whole
process, which a loaded machine disturbs less than the time of the clock.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

from _interleave import interleave, paired
from _report import machine, plain

BAR: Final = 1.0
OURS: Final = "fmapper"
EAGER: Final = "torch eager"
TWIN: Final = "Flax twin"
PACKAGES: Final = ("fmapper", "torch", "jax", "flax", "torchax", "numpy")
LIKE: Final = 1e-3  # of the largest element: another order of sums, over many layers
RESNETS: Final = {"ResNet-50": (3, 4, 6, 3), "ResNet-101": (3, 4, 23, 3)}
CASES: Final = (*RESNETS, "VGG-19", "detector", "encoder", "decoder")
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Made:
    """A torch model with inputs, and its twin, if there is one, with its own."""

    model: Any
    inputs: tuple[Any, ...]
    twin: Any = None
    twin_inputs: tuple[Any, ...] = ()


def make(case: str, batch: int, *, small: bool) -> Made:
    """Build one of the cases."""
    import _networks
    import torch

    torch.manual_seed(0)
    if case in ("encoder", "decoder"):
        return _text(case, batch, small=small)
    side = 64 if small else 224
    x = torch.randn(batch, 3, side, side)
    if case == "VGG-19":
        return Made(_networks.VGG(512 if small else 4096), (x,))
    if case == "detector":
        width, layers = (64, 2) if small else (256, 6)
        size = (RESNETS["ResNet-50"], width, layers, (side // 32) ** 2)
        return Made(_networks.Detector(*size), (x,))
    import _twins

    depths = RESNETS[case]
    twin = _twins.ResNet(depths) if case == "ResNet-50" else None
    return Made(_networks.ResNet(depths), (x,), twin, (x.permute(0, 2, 3, 1).contiguous(),))


def _text(case: str, batch: int, *, small: bool) -> Made:
    import _networks
    import _twins
    import torch

    size = _networks.TextSize(4, 256, 8, 1000, 128) if small else _networks.TextSize()
    ids = torch.randint(0, size.vocabulary, (batch, 128))
    if case == "decoder":
        return Made(_networks.Decoder(size), (ids,), _twins.Decoder(size), (ids,))
    mask = (torch.arange(128) < torch.randint(64, 129, (batch, 1))).long()
    return Made(_networks.Encoder(size), (ids, mask), _twins.Encoder(size), (ids, mask))


def calls_of(
    made: Made, *, compile: bool, clock: Callable[[], float] = perf_counter
) -> tuple[Calls, dict[str, float]]:
    """All calls of a case, and the seconds that making them took."""
    import jax
    import torch

    import fmapper

    model = made.model.eval()

    def of_torch(function: Any) -> Callable[[], Any]:
        def run() -> Any:
            with torch.inference_mode():
                return function(*made.inputs)

        return run

    start = clock()
    converted = fmapper.convert(model, "jax", made.inputs)
    inputs = fmapper.to_jax(made.inputs)
    seconds = {"convert": clock() - start}
    calls: Calls = {
        OURS: lambda: jax.block_until_ready(converted(*inputs)),
        EAGER: of_torch(model),
    }
    if compile:
        calls["torch.compile"] = of_torch(torch.compile(model))
    if made.twin is not None:
        import _twins

        _twins.load(made.twin, model.state_dict())
        calls[TWIN] = _twins.jitted(made.twin, *fmapper.to_jax(made.twin_inputs))
    if find_spec("torchax"):
        import torchax

        start = clock()
        state, function = torchax.extract_jax(model)
        run = jax.jit(function)
        seconds["torchax.extract_jax"] = clock() - start
        calls["torchax"] = lambda: jax.block_until_ready(run(state, inputs))
    for name, call in calls.items():
        start = clock()
        call()
        seconds[f"first call of {name}"] = clock() - start
    return calls, seconds


def check(calls: Calls) -> None:
    """Compare what all calls give."""
    import fmapper

    want = list(fmapper.fleaves(fmapper.to_numpy(calls[EAGER]())))
    for name, call in calls.items():
        for a, b in zip(want, fmapper.fleaves(fmapper.to_numpy(call())), strict=True):
            error = abs(a - b).max() / abs(a).max()
            if not error < LIKE:
                raise AssertionError(f"{name} is off by {error:.1e} of the largest element")


def print_rows(timings: dict[str, list[float]], rows: dict[str, Any]) -> bool:
    """Print the table of a case, fill the report, say whether the bars are met."""
    met = True
    for name, seconds in timings.items():
        ratio, low, high = paired(seconds, timings[OURS])
        rows[name] = {"seconds": median(seconds), "ratio": ratio, "quartiles": [low, high]}
        about = ""
        if name in (EAGER, TWIN):
            met &= ratio >= BAR
            about = "met" if ratio >= BAR else "MISSED"
        print(
            f"  {name:<16}{1e3 * median(seconds):>10.2f} ms   ours is {ratio:5.2f}x as fast "
            f"({low:.2f} to {high:.2f})  {about}",
            flush=True,
        )
    return met


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the tables, and say by the exit status whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", default=["ResNet-50", "encoder", "decoder"],
                        choices=CASES, metavar="NAME", help=", ".join(CASES))  # fmt: skip
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--compile", action="store_true", help="also torch.compile")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": machine(PACKAGES), "cases": {}}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    clock = process_time if options.clock == "cpu" else perf_counter
    met = True
    for case in options.case:
        for batch in options.batch:
            title = f"{case} ({options.size}), batch {batch}"
            print(f"\n{title}", flush=True)
            made = make(case, batch, small=options.size == "small")
            calls, seconds = calls_of(made, compile=options.compile, clock=clock)
            check(calls)
            timings = interleave(calls, options.rounds, sample=0.02, clock=clock)
            rows = report["cases"][title] = {"seconds": seconds, "calls": {}}
            met &= print_rows(timings, rows["calls"])
            print("  " + ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    if options.json:
        options.json.write_text(json.dumps(plain(report), indent=1, allow_nan=False))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
