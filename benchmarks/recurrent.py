"""How fast are recurrent nets of Flax that were converted to torch, beside torch's own?

    python benchmarks/recurrent.py [--rounds 9]

One thread, float32, times of the processor; calls run interleaved in one process.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import process_time
from typing import Any

from _interleave import interleave
from _report import machine

CASES = (("OptimizedLSTMCell", 64, 8, 64, 128), ("LSTMCell", 64, 8, 64, 128),
         ("OptimizedLSTMCell", 128, 32, 128, 256), ("GRUCell", 64, 8, 64, 128))  # fmt: skip


def calls(cell: str, steps: int, batch: int, width: int, size: int) -> dict[str, Any]:
    """A call of each net, and one with gradients."""
    import torch
    from flax import nnx

    import fmapper

    torch.set_num_threads(1)
    net = nnx.RNN(getattr(nnx, cell)(width, size, rngs=nnx.Rngs(0)))
    x = torch.randn(batch, steps, width)
    ours = fmapper.convert(net, "torch", (x.numpy(),)).eval()
    kind = torch.nn.GRU if "GRU" in cell else torch.nn.LSTM
    theirs = kind(width, size, batch_first=True)
    found: dict[str, Any] = {}
    for name, call in (("converted", ours), ("torch's own", lambda x: theirs(x)[0])):
        found[name] = torch.no_grad()(lambda call=call: call(x))
        found[f"{name}, gradients"] = lambda call=call: call(x).sum().backward()
    return found


def main() -> None:
    """Print a line for each cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(", ".join(f"{n} {v}" for n, v in machine(("fmapper", "torch", "jax", "flax")).items()))
    for cell, *sizes in CASES:
        timings = interleave(calls(cell, *sizes), rounds, sample=0.02, clock=process_time)
        times = ", ".join(f"{name} {1e3 * median(t):.2f} ms" for name, t in timings.items())
        print(f"{cell}, steps, batch, width, units {sizes}: {times}", flush=True)


if __name__ == "__main__":
    main()
