"""How much memory and time does a step of training an adapter take, of a model and merged?

    python benchmarks/lora.py [--rounds 5]

Memory is what XLA plans for the compiled step: arguments and temporary arrays.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import process_time
from typing import Any

from _interleave import interleave
from _report import machine

LAYERS, SIZE, ROWS, RANK = 12, 1024, 16, 8


def steps() -> tuple[dict[str, Any], dict[str, int], int]:
    """A step of each kind, its memory, and the bar: base, four adapters and a layer."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import torch

    import fmapper
    from fmapper.training import LoraAdapter, LowRank

    layers = [torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)]
    net = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.Tanh())])
    x = torch.randn(ROWS, SIZE)
    model = fmapper.convert(net, "jax", (x,))
    draw = np.random.default_rng(0).normal
    adapter = LoraAdapter({
        name: LowRank(
            draw(size=(RANK, SIZE)).astype("f"), np.zeros((SIZE, RANK), "f"), scale=1.0
        )
        for name, _ in net.named_parameters()
    })  # fmt: skip
    adapter = fmapper.to_jax(adapter)
    adam = optax.adam(1e-3)

    def step(merge: bool, adapter: Any, state: Any, model: Any, x: Any) -> Any:
        def loss(adapter: Any) -> Any:
            tuned = model.replace(params=adapter(model.params)) if merge else adapter(model)
            return (tuned(x) ** 2).mean()

        updates, state = adam.update(jax.grad(loss)(adapter), state)
        return optax.apply_updates(adapter, updates), state

    given = adapter, adam.init(adapter), model, jnp.asarray(x.numpy())
    calls, memory = {}, {}
    for name, merge in (("merged", True), ("model", False)):
        run = jax.jit(step, static_argnums=0).lower(merge, *given).compile()
        used = run.memory_analysis()
        memory[name] = used.argument_size_in_bytes + used.temp_size_in_bytes
        calls[name] = lambda run=run: jax.block_until_ready(run(*given))
    base, own = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (model.params, adapter))
    return calls, memory, base + 4 * own + 4 * SIZE**2


def main() -> None:
    """Print a line for each kind of step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(", ".join(f"{n} {v}" for n, v in machine(("fmapper", "torch", "jax", "optax")).items()))
    calls, memory, bar = steps()
    timings = interleave(calls, rounds, sample=0.02, clock=process_time)
    for name, times in timings.items():
        size = f"{memory[name] / 2**20:.1f} MiB of {bar / 2**20:.1f} MiB"
        print(f"{name}: {size}, {1e3 * median(times):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
