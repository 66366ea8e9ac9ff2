"""What does a sync cost, in one process and between several, beside what people write by hand?

    python benchmarks/sync.py one [--rounds 9]     one process, against memcpy
    python benchmarks/sync.py many [--arrays 37000]  planning and a call of many small tensors
    python benchmarks/sync.py ranks                four processes: bytes sent and needed, seconds
    python benchmarks/sync.py pairs                two that train and two that run, through files
    python benchmarks/sync.py devices              eight devices of JAX in one process
    python benchmarks/sync.py leak [--calls 10000] memory after many calls

`one`: seconds of a call over those of copying arrays of these sizes with NumPy, and the usual ways:
`load_state_dict`, `generator.replace`. Bar: 0.8 of memcpy where layouts and dtypes agree.
`ranks`: models of transformers and a ResNet by FSDP2 and by tensor parallelism, every pair of
layouts. Bytes that come over those of the parts that a process holds of the target and lacks of the
source: 1.01 at most, without a collective; seconds beside `full_tensor` of each and a copy.
`pairs`: the same between a program of two processes and another one. `devices`: from one mesh to
another, beside `jax.device_put`.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from statistics import median
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
if "devices" in sys.argv:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import numpy as np
import torch
from _interleave import interleave, paired
from _peak import resident
from _report import machine

import fmapper
from fmapper.checkpoints import Rules, Transpose
from fmapper.sync import Folder

RANKS = 4
PARTS = ("one", "many", "ranks", "pairs", "devices", "leak", "rank", "pair")
MIB = 2**20


def llama(hidden: int, layers: int) -> Any:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": 1000}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, **heads)).eval()


def layers(count: int = 32, size: int = 1024) -> dict[str, torch.Tensor]:
    """Square matrices by name."""
    return {f"layers.{n}.weight": torch.randn(size, size) for n in range(count)}


def one(rounds: int) -> None:
    """Prints a line for each pair of models in one process."""
    import jax.numpy as jnp

    def zeros(dtype: Any) -> dict[str, Any]:
        return {name: jnp.zeros((1024, 1024), dtype) for name in source}

    def empty() -> dict[str, Any]:
        return {name: torch.empty_like(array) for name, array in source.items()}

    source = layers()
    model = llama(512, 8)
    state = model.state_dict()
    pairs = {
        "torch to torch": (source, empty(), None),
        "torch to JAX": (source, zeros("float32"), None),
        "torch to JAX, bfloat16": (source, zeros("bfloat16"), None),
        "torch to JAX, transposed": (source, zeros("float32"), Rules([Transpose("*.weight")])),
        "JAX to torch": (
            zeros("float32"),
            {n: torch.empty_like(x) for n, x in source.items()},
            None,
        ),
    }
    for batch in (1, 4):
        generator = fmapper.generator(model, max_length=32, batch=batch, to="jax", check=False)
        pairs[f"Llama to a generator, batch {batch}"] = model, generator, None
    for name, (trainer, target, rules) in pairs.items():
        begun = time.perf_counter()
        sync = fmapper.Sync(trainer, target, rules)
        sync()
        first = time.perf_counter() - begun
        sync()
        sizes = [array.nbytes for array in sync.plan]
        pairs_of_memory = [(np.empty(n, np.uint8), np.ones(n, np.uint8)) for n in sizes]

        def memcpy(arrays: Any = pairs_of_memory) -> None:
            for to, froms in arrays:
                np.copyto(to, froms)

        calls: dict[str, Any] = {"sync": sync, "memcpy": memcpy}
        if name == "torch to torch":
            module = torch.nn.ParameterDict({n.replace(".", "_"): x for n, x in target.items()})
            other_state = {n.replace(".", "_"): x for n, x in source.items()}
            calls["load_state_dict"] = lambda m=module, s=other_state: m.load_state_dict(s)
        if "generator" in name:
            calls["replace"] = lambda g=target: g.replace(params=state)
        seconds = interleave(calls, rounds)
        rate = paired(seconds["memcpy"], seconds["sync"])[0]
        rest = " ".join(
            f"{key} {median(values) / median(seconds['sync']):.2f}x"
            for key, values in seconds.items()
            if key not in ("sync", "memcpy")
        )
        size = sync.stats.nbytes / MIB
        print(
            f"{name:32} {size:5.0f} MiB {1e3 * median(seconds['sync']):7.1f} ms "
            f"{rate:5.2f} of memcpy; first call with plan {first / median(seconds['sync']):4.0f}x "
            f"{rest}"
        )


def many(count: int) -> None:
    """Prints seconds for planning and calls of many small tensors."""
    source = {f"layers.{n}.weight": torch.randn(16, 16) for n in range(count)}
    target = {name: torch.empty_like(array) for name, array in source.items()}
    fmapper.Sync({"a": np.ones(1)}, {"a": np.ones(1)})
    begun, cpu = time.perf_counter(), time.process_time()
    sync = fmapper.Sync(source, target)
    planned, cpu = time.perf_counter() - begun, time.process_time() - cpu
    sync()

    def by_hand() -> None:
        torch._foreach_copy_([*target.values()], [*source.values()])

    calls = {"sync": sync, "_foreach_copy_": by_hand}
    seconds = interleave(calls, 7)
    print(f"{count} tensors: planned in {planned:.1f} s ({cpu:.1f} s of a processor)", end="; ")
    print(*(f"{name} {1e3 * median(values):.0f} ms" for name, values in seconds.items()), end="; ")
    print(
        "of a processor:",
        *(f"{name} {of_a_processor(call):.0f} ms" for name, call in calls.items()),
    )


def of_a_processor(call: Any) -> float:
    """Returns the milliseconds that processors take for a call, however busy they are."""
    times = []
    for _ in range(9):
        begun = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - begun))
    return median(times)


def leak(calls: int) -> None:
    """Prints how the memory of the process grows over many calls."""
    source = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    target = fmapper.convert(source, "flax", (torch.ones(1, 64),))
    sync = fmapper.Sync(source, target)
    for _ in range(200):
        sync()
    before = resident("VmRSS")
    for _ in range(calls):
        sync()
    grown = (resident("VmRSS") - before) / MIB
    print(f"{calls} calls: {grown:.1f} MiB more, of 0.13 MiB of weights")


def models() -> dict[str, Any]:
    """Models to be sharded, and the rules of a tensor-parallel layout."""
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        ResNetConfig,
        ResNetModel,
        T5Config,
        T5ForConditionalGeneration,
    )

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mixtral = MixtralConfig(**sizes, **heads, num_hidden_layers=2, num_local_experts=4)
    t5 = T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    resnet = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
    columns, rows = ("model",), (None, "model")
    experts, attention = {"experts": columns}, {"o_proj": rows, "*_proj": columns}
    return {
        "Llama": (lambda: llama(64, 2), {"down_proj": rows} | attention),
        "Mixtral": (lambda: MixtralForCausalLM(mixtral), experts | attention),
        "T5": (lambda: T5ForConditionalGeneration(t5), {"wi": columns, "wo": rows, "q": columns}),
        "ResNet": (lambda: ResNetModel(resnet), {"convolution": columns}),
    }


def join(number: int, size: int, port: int) -> Any:
    """Joins a group of processes; returns what lays a model out in it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", rank=number, world_size=size, init_method=f"tcp://127.0.0.1:{port}"
    )
    flat = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))

    def laid_out(make: Any, rules: Any, layout: str) -> Any:
        torch.manual_seed(0)
        model = make()
        if layout == "tensor":
            return fmapper.shard(model, mesh, rules, uneven="replicate")
        if layout == "FSDP":
            fully_shard(model, mesh=flat)
        return model

    return laid_out


def pair(number: int, port: int) -> None:
    """Measures the pairs of layouts between two programs, as a process of one of them."""
    laid_out = join(number % 2, 2, port + number // 2)
    folder = f"/dev/shm/fmapper-{port}"
    for name, (make, rules) in models().items():
        for froms in ("FSDP", "tensor"):
            for to in ("FSDP", "tensor", "whole"):
                model = laid_out(make, rules, to if number // 2 else froms)
                ends = (None, model) if number // 2 else (model, None)
                way = Folder(f"{folder}-{name}-{froms}-{to}", number, RANKS)
                sync = fmapper.Sync(*ends, Rules(), transport=way)
                sync()
                begun = time.perf_counter()
                sync()
                seconds = time.perf_counter() - begun
                if number // 2:
                    held = sum(
                        x.to_local().nbytes if hasattr(x, "to_local") else x.nbytes
                        for x in {id(x): x for x in model.parameters()}.values()
                    )
                    held += sum(x.nbytes for x in model.buffers() if x.is_floating_point())
                    print(
                        f"{name:8} {froms:6} to {to:6} rank {number} holds {held / MIB:6.2f} MiB, "
                        f"{sync.stats.received / held:.4f} of it came; {1e3 * seconds:6.0f} ms",
                        flush=True,
                    )
    torch.distributed.destroy_process_group()


def devices(rounds: int) -> None:
    """Prints a line for each pair of layouts on eight devices of one process."""
    import jax

    flat, mesh = jax.make_mesh((8,), ("data",)), jax.make_mesh((2, 4), ("data", "model"))
    for name, (make, rules) in models().items():
        state = fmapper.to_jax({n: x for n, x in make().state_dict().items() if x.dim()})
        by_layout = {
            "FSDP": fmapper.shard(state, flat, {"*": ("data",)}, uneven="replicate"),
            "tensor": fmapper.shard(state, mesh, rules, uneven="replicate"),
        }
        for froms, source in by_layout.items():
            for to, example in (*by_layout.items(), ("whole", state)):
                layouts = {key: array.sharding for key, array in example.items()}
                target = {n: jax.device_put(0 * array, layouts[n]) for n, array in state.items()}
                sync = fmapper.Sync(source, target)
                calls = {
                    "sync": sync,
                    "device_put": lambda s=source, to=layouts: jax.block_until_ready(
                        jax.device_put(s, to)
                    ),
                }
                seconds = interleave(calls, rounds)
                for key, array in target.items():
                    assert array.sharding.is_equivalent_to(layouts[key], array.ndim)
                    np.testing.assert_array_equal(array, state[key])
                print(
                    f"{name:8} {froms:6} to {to:6} {sync.stats.nbytes / MIB:6.2f} MiB; "
                    + ", ".join(f"{n} {1e3 * median(t):.0f} ms" for n, t in seconds.items()),
                    flush=True,
                )


def rank(number: int, port: int) -> None:
    """Measures the pairs of layouts as one of the processes."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    laid_out = join(number, RANKS, port)
    for name, (make, rules) in models().items():
        for froms in ("FSDP", "tensor"):
            for to in ("FSDP", "tensor", "whole"):
                source, target = laid_out(make, rules, froms), laid_out(make, rules, to)
                sync = fmapper.Sync(source, target)
                sync()
                with CommDebugMode() as collectives:
                    begun = time.perf_counter()
                    sync()
                    seconds = time.perf_counter() - begun
                begun = time.perf_counter()
                whole = {
                    n: x.full_tensor() if isinstance(x, DTensor) else x
                    for n, x in source.state_dict().items()
                }
                usual = time.perf_counter() - begun
                del whole
                needed = sum(array.sent for array in sync.plan)
                counts = [None] * RANKS
                torch.distributed.all_gather_object(counts, (sync.stats.received, seconds, usual))
                if number == 0:
                    came = sum(count[0] for count in counts)
                    total = collectives.get_total_counts()
                    print(
                        f"{name:8} {froms:6} to {to:6} needed {needed / MIB:6.2f} MiB, came "
                        f"{came / needed if needed else 1:.4f} of it, {total} collectives; "
                        f"{1e3 * max(c[1] for c in counts):6.0f} ms, "
                        f"full_tensor of all {1e3 * max(c[2] for c in counts):6.0f} ms",
                        flush=True,
                    )
    torch.distributed.destroy_process_group()


def ranks(part: str) -> None:
    """Starts the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, part, "--port", str(port)]
    others = [subprocess.Popen([*command, "--number", str(n)]) for n in range(RANKS)]
    assert [other.wait() for other in others] == [0] * RANKS


def main() -> None:
    """Prints one part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--arrays", type=int, default=37_000)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    if given.part in ("rank", "pair"):
        (rank if given.part == "rank" else pair)(given.number, given.port)
        return
    print(machine(("torch", "jax", "transformers")))
    if given.part == "one":
        one(given.rounds)
    elif given.part == "many":
        many(given.arrays)
    elif given.part == "leak":
        leak(given.calls)
    elif given.part == "devices":
        devices(given.rounds)
    else:
        ranks(given.part.removesuffix("s"))


if __name__ == "__main__":
    main()
