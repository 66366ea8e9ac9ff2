"""How much memory and time does a step of training an adapter take, merged and apart?

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


HEADS = 16


def models() -> dict[str, tuple[Any, Any, Any]]:
    """Functions of parameters and an array, the parameters, and rules from those of torch."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx

    import fmapper
    from fmapper.checkpoints import Rename, Reshape, Rules, Transpose

    layers = [torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)]
    net = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.Tanh())])
    model = fmapper.convert(net, "jax", (torch.randn(ROWS, SIZE),))
    flax = nnx.Sequential(*[
        part
        for _ in range(LAYERS)
        for part in (nnx.Linear(SIZE, SIZE, use_bias=False, rngs=nnx.Rngs(0)), jnp.tanh)
    ])  # fmt: skip
    shape = (SIZE, HEADS, SIZE // HEADS)

    def heads(params: Any, x: Any) -> Any:
        for at in range(LAYERS):
            x = jnp.tanh(jnp.einsum("bi,ihd->bhd", x, params[f"{2 * at}.heads"])).reshape(x.shape)
        return x

    renames = [Rename("{n}.weight", "{n}.heads"), Transpose("{n}.heads")]
    return {
        "JaxModel": (lambda params, x: model.replace(params=params)(x), model.params, None),
        "Flax": (
            lambda params, x: fmapper.load_state(flax, params)(x),
            fmapper.state(flax),
            Rules([Rename("{n}.weight", "layers.{n}.kernel"), Transpose("layers.{n}.kernel")]),
        ),
        "heads": (
            heads,
            {
                f"{2 * at}.heads": jax.random.normal(jax.random.key(at), shape) / 32
                for at in range(LAYERS)
            },
            Rules([*renames, Reshape("{n}.heads", shape, back=(SIZE, SIZE))]),
        ),
    }


def steps() -> tuple[dict[str, Any], dict[str, int], int]:
    """A step of each kind, its memory, and the bar: base, four adapters and a layer."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import fmapper
    from fmapper.training import LoraAdapter, LowRank

    draw = np.random.default_rng(0).normal
    zeros = np.zeros((SIZE, RANK), "f")
    adapter = fmapper.to_jax(LoraAdapter({
        f"{2 * at}.weight": LowRank(draw(size=(RANK, SIZE)).astype("f"), zeros, scale=1.0)
        for at in range(LAYERS)
    }))  # fmt: skip
    adam = optax.adam(1e-3)
    x = jnp.asarray(draw(size=(ROWS, SIZE)).astype("f"))
    calls, memory = {}, {}
    for name, (function, params, rules) in models().items():
        placed = adapter if rules is None else adapter.place(rules)
        for merges in (True, False):

            def step(
                adapter: Any, state: Any, params: Any, x: Any, f: Any = function, m: bool = merges
            ) -> Any:
                def loss(adapter: Any) -> Any:
                    y = f(adapter(params), x) if m else adapter.apply(f, params, x)
                    return (y**2).mean()

                updates, state = adam.update(jax.grad(loss)(adapter), state)
                return optax.apply_updates(adapter, updates), state

            given = placed, adam.init(placed), params, x
            run: Any = jax.jit(step).lower(*given).compile()
            used: Any = run.memory_analysis()
            kind = f"{name}, {'merged' if merges else 'apart'}"
            memory[kind] = used.argument_size_in_bytes + used.temp_size_in_bytes
            calls[kind] = lambda run=run, given=given: jax.block_until_ready(run(*given))
    own = sum(x.nbytes for x in jax.tree.leaves(adapter))
    return calls, memory, 4 * LAYERS * SIZE**2 + 4 * own + 4 * SIZE**2


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
