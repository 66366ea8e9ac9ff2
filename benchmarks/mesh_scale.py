"""What do large models take on large meshes, by plans alone?

    python benchmarks/mesh_scale.py [--lower [LAYERS]]

Models of transformers without memory, in bfloat16: Llama of 8 and 70 billion parameters, and
DeepSeek-V3 of 671. Each is planned on 8 to 4,096 devices, 8 of them in a process: `model` goes over
the devices of a process, by the model's own rules, and `fsdp` over the processes, dividing the
largest dimension that is left of each array. No array is made. Printed as a table of Markdown, with
the time and the memory that planning took.

Per device: the weights; with gradients and Adam, 16 bytes a parameter. Per process: what it reads.
A forward pass: how often devices add up, what each sends of one token for that (a ring passes each
number on twice, but for one part of it), and what it receives of weights that others keep.

`--lower` records the program of the Llama of 70 billion instead, derives its rules, and lowers it
for 64 devices that there are not, on an abstract mesh.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as hub
from _report import machine

import fmapper
from fmapper.meshes import Sharding

LOCAL = 8
DEVICES = (8, 64, 512, 4096)
BIG: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "Llama, 8B": lambda: hub.LlamaForCausalLM(hub.LlamaConfig(
        **BIG, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32)),
    "Llama, 70B": lambda: hub.LlamaForCausalLM(hub.LlamaConfig(
        **BIG, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64)),
    "DeepSeek-V3, 671B": lambda: hub.DeepseekV3ForCausalLM(hub.DeepseekV3Config()),
}  # fmt: skip


def rest(module: Any, parts: int) -> dict[str, Any]:
    """Give the model's own rules, with `fsdp` on the largest dimension that is left."""
    specs = Sharding({"model": LOCAL}, "model").specs(module)
    rules: dict[str, Any] = {}
    for name, array in fmapper.state(module).items():
        axes: list[Any] = [own[0] if own else None for own in specs.get(name, [()] * array.ndim)]
        free = [(size, at) for at, size in enumerate(array.shape)
                if axes[at] is None and size % parts == 0]  # fmt: skip
        if parts > 1 and free:
            axes[max(free)[1]] = "fsdp"
        rules[name] = tuple(axes)
    return rules


def gib(number: float) -> str:
    """Print bytes."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**28 else f"{number / 2**20:.1f} MiB"


def lower(layers: int) -> None:
    """Record, derive, plan and lower a model that no machine here could hold."""
    import jax
    from jax.sharding import AbstractMesh

    with torch.device("meta"):
        config = hub.LlamaConfig(
            **BIG, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers,
            num_attention_heads=64)  # fmt: skip
        module = hub.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        ids = torch.zeros((8, 128), dtype=torch.int64)
    begun = time.perf_counter()
    example = {"input_ids": ids, "use_cache": False}
    model = fmapper.convert(module, "jax", example_kwargs=example, check=False)
    recorded = time.perf_counter()
    mesh = AbstractMesh((8, 8), ("data", "model"))
    plan = fmapper.plan(Sharding(mesh, "derive"), model)
    planned = time.perf_counter()
    new = fmapper.shard(model, mesh, "derive")
    rows = fmapper.shard(jax.ShapeDtypeStruct((8, 128), "int32"), mesh, ("data",))
    call = jax.jit(lambda model, ids: model(input_ids=ids, use_cache=False)["logits"])
    text = call.trace(new, rows).lower(lowering_platforms=("cpu",)).as_text()
    lowered = time.perf_counter()
    print(
        f"{layers} layers: recorded in {recorded - begun:.0f} s, planned in "
        f"{planned - recorded:.1f} s ({len(plan.sums)} sums, {gib(plan.nbytes_per_device)} of "
        f"{gib(plan.nbytes)} a device), lowered in {lowered - planned:.0f} s to "
        f"{len(text) / 2**20:.1f} MiB of text"
    )


def tell_memory() -> None:
    """Print how much memory all this took."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{memory:.2f} GiB of memory at most, with what was imported")


def main() -> None:
    """Plan each model on each mesh, or lower one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lower", nargs="?", type=int, const=80)
    layers = parser.parse_args().lower
    if layers:
        lower(layers)
        return tell_memory()
    print(", ".join(f"{n} {v}" for n, v in machine(("fmapper", "torch", "transformers")).items()))
    print("| model | mesh | weights a device | with Adam | a process reads | sums | sent a token "
          "| weights received | planned in |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        with torch.device("meta"):
            module = make().to(torch.bfloat16)
        hidden = module.config.hidden_size
        for devices in DEVICES:
            begun = time.perf_counter()
            mesh = {"fsdp": devices // LOCAL, "model": LOCAL}
            plan = fmapper.plan(Sharding(mesh, rest(module, mesh["fsdp"])), module)
            sums = len(fmapper.plan(Sharding({"model": LOCAL}, "model"), module).sums)
            seconds = time.perf_counter() - begun
            own = plan.nbytes_per_device
            alone = fmapper.plan(Sharding({"fsdp": 1, "model": LOCAL}, rest(module, 1)), module)
            sent = sums * hidden * 2 * 2 * (LOCAL - 1) / LOCAL
            read = plan.nbytes_of_process({"model": LOCAL})
            cells = [name, f"{mesh['fsdp']} by {LOCAL}", gib(own), gib(own * 8), gib(read),
                     str(sums), f"{sent / 2**20:.2f} MiB", gib(alone.nbytes_per_device - own),
                     f"{seconds:.1f} s"]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
        del module
    return tell_memory()


if __name__ == "__main__":
    main()
