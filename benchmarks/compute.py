"""What do `fmapper.value_and_grad` and `jit` add to those of the frameworks?

    python benchmarks/compute.py [--rounds 31] [--case NAME ...] [--json FILE]

The models are those of `examples/`: a recurrent network at batch 1, where all is overhead, and a
convolutional one at batch 256. Each row computes the same loss and gradient; all of a case run
interleaved in one process. Jitted, both are compiled in the same way: `torch.compile` of what they
do to tensors, or `jax.jit`; `fmapper.jit`, which takes the model apart at each call, is a row of
its own. The ratio is the median, over the rounds, of our time by that of the peer in the same
round. The exit status is 1 where it is above 1.05 for the peer that the bar names, or where a step
that `fmap` makes is recorded more than once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from _interleave import interleave, paired
from _report import machine, plain

BAR: Final = 1.05
OURS: Final = "fmapper"
PACKAGES: Final = ("fmapper", "torch", "jax", "numpy")
ROOT: Final = Path(__file__).resolve().parent.parent


def program(name: str) -> Any:
    """Import one of the examples."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Case:
    """Calls that do the same.

    Attributes:
        calls: by name, ours among them.
        peer: the name of the one that the bar is about.
    """

    calls: dict[str, Callable[[], Any]]
    peer: str


def recurrent(mover: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Make the loss, the model and the rest of the arguments of the recurrent network."""
    import numpy as np

    from fmapper import fmap, random

    rnn = program("rnn_sine")
    data = (np.ones((1, 1)), np.zeros((1, 6)), np.ones((1, 1)))
    model, data = fmap(mover, (rnn.ContextRNN(random.key(0)), data))
    return (lambda model, *args: rnn.loss_of(model, *args)[0]), model, data


def convolutional(mover: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Make the loss, the model and the rest of the arguments of the convolutional network."""
    from fmapper import fmap, random

    cnn = program("cifar_cnn")
    (images, labels), _ = cnn.digits()
    data = images[:256], labels[:256]
    model, data = fmap(mover, (cnn.CNN(random.key(0)), data))
    return cnn.loss_of, model, data


def torch_case(make: Callable[[Any], Any], *, compiled: bool) -> Case:
    """Compare with `torch.func`, and with autograd by hand."""
    import torch

    import fmapper

    loss, model, data = make(fmapper.to_torch(dtype="float32"))
    leaves = fmapper.trainables(model)

    def of_dict(values: dict[str, Any], *args: Any) -> Any:
        return loss(fmapper.load_state(model, values), *args)

    def rebuilt(values: Sequence[Any], *args: Any) -> Any:
        new = iter(values)
        return loss(fmapper.fmap(lambda _: next(new), model), *args)

    def by_hand(*args: Any) -> Any:
        values = [leaf.detach().requires_grad_() for leaf in leaves.values()]
        value = rebuilt(values, *args)
        return value.detach(), torch.autograd.grad(value, values)

    ours = fmapper.value_and_grad(loss)
    functional = torch.func.grad_and_value(rebuilt)
    values = tuple(leaves.values())
    if compiled:

        def flat(values: Sequence[Any], *args: Any) -> Any:
            new = iter(values)
            value, gradient = ours(fmapper.fmap(lambda _: next(new), model), *args)
            return [value, *fmapper.trainables(gradient).values()]

        def captured(function: Callable[..., Any]) -> Callable[..., Any]:
            recorded = torch.fx.experimental.proxy_tensor.make_fx(function)(values, *data)
            program: Callable[..., Any] = torch.compile(recorded)
            return program

        mine, theirs, whole = captured(flat), captured(functional), fmapper.jit(ours)
        return Case(
            {
                OURS: lambda: mine(values, *data),
                "fmapper.jit, on the model": lambda: whole(model, *data),
                "torch.func": lambda: theirs(values, *data),
            },
            "torch.func",
        )
    return Case(
        {
            OURS: lambda: ours(model, *data),
            "torch.func": lambda: functional(values, *data),
            "torch.autograd by hand": lambda: by_hand(*data),
        },
        "torch.func",
    )


def jax_case(make: Callable[[Any], Any], *, compiled: bool) -> Case:
    """Compare with `jax.value_and_grad` of the same model, which JAX takes apart itself."""
    import jax

    import fmapper

    loss, model, data = make(fmapper.to_jax(dtype="float32"))
    ours, theirs = fmapper.value_and_grad(loss), jax.value_and_grad(loss)
    if compiled:
        mine, jitted = fmapper.jit(ours), jax.jit(theirs)
        inner = jax.jit(ours)
        calls = {
            OURS: lambda: jax.block_until_ready(inner(model, *data)),
            "fmapper.jit, on the model": lambda: jax.block_until_ready(mine(model, *data)),
            "jax": lambda: jax.block_until_ready(jitted(model, *data)),
        }
    else:
        calls = {
            OURS: lambda: jax.block_until_ready(ours(model, *data)),
            "jax": lambda: jax.block_until_ready(theirs(model, *data)),
        }
    return Case(calls, "jax")


CASES: Final = {
    f"{backend} {kind}, {'jitted' if compiled else 'eager'}": (case, make, compiled)
    for backend, case in (("torch", torch_case), ("jax", jax_case))
    for kind, make in (("RNN", recurrent), ("CNN", convolutional))
    for compiled in (False, True)
}


def recordings(mover: Any, steps: int = 100) -> int:
    """Count how often a step that `fmap` makes is recorded in so many calls."""
    import fmapper

    loss, model, data = recurrent(mover)
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return loss(*args)

    @fmapper.jit
    def step(model: Any, *args: Any) -> Any:
        gradient = fmapper.grad(counted)(model, *args)
        return fmapper.fmap(lambda p, g: p - 0.1 * g, model, gradient)

    for _ in range(steps):
        model = step(model, *data)
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print a table, and say by the exit status whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": machine(PACKAGES), "cases": {}}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    met = True
    for name in options.case:
        make_case, make, compiled = CASES[name]
        case = make_case(make, compiled=compiled)
        timings = interleave(case.calls, options.rounds, sample=0.02)
        print(f"\n{name}")
        rows = report["cases"][name] = {}
        for call, seconds in timings.items():
            ratio, low, high = paired(timings[OURS], seconds)
            rows[call] = {"seconds": median(seconds), "ratio": ratio, "quartiles": [low, high]}
            about = ""
            if call == case.peer:
                met &= ratio <= BAR
                about = "met" if ratio <= BAR else "MISSED"
            print(
                f"  {call:<30}{1e6 * median(seconds):>10.0f} us   ours by it {ratio:5.2f} "
                f"({low:.2f} to {high:.2f})  {about}"
            )
    import fmapper

    for backend in ("torch", "jax"):
        count = recordings(getattr(fmapper, f"to_{backend}")(dtype="float32"))
        report[f"recordings in {backend}"] = count
        met &= count == 1
        print(f"\na step made by fmap, 100 calls in {backend}: recorded {count} time(s)")
    if options.json:
        options.json.write_text(json.dumps(plain(report), indent=1, allow_nan=False))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
