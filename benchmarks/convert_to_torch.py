"""How fast is a Flax model that was converted to torch, beside one that was written in torch?

    python benchmarks/convert_to_torch.py [--case NAME ...] [--batch N ...] [--train]
                                          [--compile] [--rounds 15] [--clock wall|cpu] [--json FILE]

Both have the same weights and inputs; their outputs are compared first. Calls run interleaved in
one process. A ratio is the median, over the rounds, of the time of the torch twin by ours in the
same round, eager against eager and compiled against compiled: how many times as fast the converted
model is. The exit status is 1 where it is below 0.9 eager, or below 1.0 compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

from _interleave import interleave, paired
from _report import machine, plain

BARS: Final = {"eager": 0.9, "compiled": 1.0}
PACKAGES: Final = ("fmapper", "torch", "jax", "flax", "numpy")
LIKE: Final = 1e-3  # of the largest element: another order of sums, over many layers
CASES: Final = ("MLP", "CNN", "encoder", "decoder")


def make(case: str, batch: int) -> tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]:
    """The torch model, the Flax model with its weights, and the inputs of both."""
    import _networks
    import _twins
    import torch

    torch.manual_seed(0)
    inputs: tuple[Any, ...]
    if case == "MLP":
        ours, twin = _networks.MLP((256, 512, 512, 10)), _twins.MLP((256, 512, 512, 10))
        inputs = twins = (torch.randn(batch, 256),)
    elif case == "CNN":
        ours, twin = _networks.ResNet((3, 4, 6, 3)), _twins.ResNet((3, 4, 6, 3))
        inputs = (torch.randn(batch, 3, 64, 64),)
        twins = (inputs[0].permute(0, 2, 3, 1).contiguous(),)
    else:
        size = _networks.TextSize(4, 256, 8, 1000, 128)
        ids = torch.randint(0, size.vocabulary, (batch, 128))
        if case == "decoder":
            ours, twin, inputs = _networks.Decoder(size), _twins.Decoder(size), (ids,)
        else:
            mask = (torch.arange(128) < torch.randint(64, 129, (batch, 1))).long()
            ours, twin, inputs = _networks.Encoder(size), _twins.Encoder(size), (ids, mask)
        twins = inputs
    ours.eval()
    _twins.load(twin, ours.state_dict())
    return ours, twin, inputs, twins


def run_of(model: Any, inputs: tuple[Any, ...], *, train: bool) -> Callable[[], Any]:
    """A call; for `train` with the gradients of all parameters."""
    import torch

    def forward() -> Any:
        with torch.no_grad():
            return model(*inputs)

    def step() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(*inputs).square().mean()
        loss.backward()
        return loss.detach()

    return step if train else forward


def measured(options: argparse.Namespace, case: str, batch: int, clock: Any) -> dict[str, Any]:
    """Time all calls of a case."""
    import torch

    import fmapper

    twin, source, inputs, own = make(case, batch)
    start = clock()
    ours = fmapper.convert(source, "torch", own).eval()
    found: dict[str, Any] = {"convert": clock() - start}
    own = tuple(x.int() if x.dtype is torch.int64 else x for x in own)
    pairs = {"eager": (ours, twin)}
    if options.compile:
        pairs["compiled"] = (torch.compile(ours), torch.compile(twin))
    for name, (a, b) in pairs.items():
        calls = {
            "fmapper": run_of(a, own, train=options.train),
            "torch twin": run_of(b, inputs, train=options.train),
        }
        got, want = (call() for call in calls.values())
        error = float((got - want).abs().max() / want.abs().max())
        if not error < LIKE:
            raise AssertionError(f"{case}, {name}: off by {error:.1e} of the largest element")
        timings = interleave(calls, options.rounds, sample=0.02, clock=clock)
        ratio, low, high = paired(timings["torch twin"], timings["fmapper"])
        found[name] = {
            "ratio": ratio,
            "quartiles": [low, high],
            "seconds": {key: median(values) for key, values in timings.items()},
            "met": ratio >= BARS[name],
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the table, and say by the exit status whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES, metavar="NAME",
                        help=", ".join(CASES))  # fmt: skip
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--train", action="store_true", help="with gradients")
    parser.add_argument("--compile", action="store_true", help="also under torch.compile")
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
            title = f"{case}, batch {batch}{', with gradients' if options.train else ''}"
            found = report["cases"][title] = measured(options, case, batch, clock)
            print(f"\n{title}: converted in {found['convert']:.2f} s", flush=True)
            for name in BARS:
                if name not in found:
                    continue
                row = found[name]
                ours, twin = (1e3 * x for x in row["seconds"].values())
                low, high = row["quartiles"]
                print(
                    f"  {name:<10}{ours:>9.2f} ms, torch twin {twin:>9.2f} ms: "
                    f"{row['ratio']:.2f}x as fast ({low:.2f} to {high:.2f})  "
                    f"{'met' if row['met'] else 'MISSED'}",
                    flush=True,
                )
                met &= row["met"]
    if options.json:
        options.json.write_text(json.dumps(plain(report), indent=1, allow_nan=False))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
