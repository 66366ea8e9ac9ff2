"""What a GPU makes of fmapper: up, down, from files, between frameworks, and whole models.

    python benchmarks/gpu_rows.py [--only PATTERN] [--seconds 300] [--json FILE]
    python benchmarks/gpu_rows.py --tiny     # small, on the CPU: whether it all runs

`up`: models to the device, beside `Module.to`, JAX's `device_put` of a list, and one packed copy
with a compiled split; large ones beside the parts of the way, each alone: allocating, filling
pinned memory, the link, and threads. `down`: models from the device to the host, beside
`Tensor.cpu`, `jax.device_get`, one compiled flatten, and JAX's pinned memory. `file`: a
safetensors file in memory to the device, beside safetensors itself and reading alone. `between`:
tensors of torch to JAX on one card, beside a copy on the card, and the memory after many of them.
`model`: forward and a step of training, converted to JAX and as classes of Flax, beside torch eager
and `torch.compile`, and back from Flax to torch. No row begins once the time is up. Medians of
rounds in which every way is timed, in a shuffled order.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from _interleave import Call, Prepared, interleave
from _report import machine
from link import MemoryReader

import fmapper
from fmapper.backends import threads_for_memory
from fmapper_adapters.torch.arrays import pinned, streaming

GB = 1e9
PACKAGES = ("torch", "jax", "flax", "transformers", "safetensors", "fmapper")


class Place(NamedTuple):
    """Where it runs, and how large things are."""

    torch: str
    jax: Any
    scale: float  # of the number of elements
    rounds: int

    @property
    def is_gpu(self) -> bool:
        return self.torch != "cpu"

    def wait(self, *arrays: Any) -> None:
        """Waits for the device."""
        jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
        if self.is_gpu:
            torch.cuda.synchronize()


class Row(NamedTuple):
    """A table's row: the seconds of each way."""

    name: str
    nbytes: int
    seconds: dict[str, float]


def timed(place: Place, name: str, nbytes: int, ways: dict[str, Call]) -> Row:
    """Times the ways against each other, the device's work included."""

    def whole(way: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            result = way(*given)
            place.wait(*[x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
            return result

        return call

    def ready(prepare: Callable[[], Any]) -> Any:
        given = prepare()
        place.wait(*[x for x in jax.tree.leaves(given) if isinstance(x, jax.Array)])
        return given

    calls: dict[str, Call] = {
        key: Prepared(partial(ready, way.prepare), whole(way.call))
        if isinstance(way, Prepared)
        else whole(way)
        for key, way in ways.items()
    }
    interleave(calls, 1, once=True)
    seconds = interleave(calls, place.rounds, once=True)
    return Row(name, nbytes, {key: median(values) for key, values in seconds.items()})


def arrays(place: Place, count: int, nbytes: float) -> dict[str, torch.Tensor]:
    """Tensors by name on the device, of so many bytes each."""
    size = max(16, int(nbytes * place.scale / 4))
    return {f"layers.{n}": torch.rand(size, device=place.torch) for n in range(count)}


def up(place: Place) -> Iterator[Row]:
    """From the host to the device."""
    move = fmapper.to_gpu(strict=True) if place.is_gpu else fmapper.to_cpu(copy=True)
    count = 10_000 if place.is_gpu else 50
    small = [torch.rand(256) for _ in range(count)]
    model = torch.nn.ParameterList(small)
    device = torch.device(place.torch)

    def fresh() -> Any:
        return torch.nn.ParameterList(x.detach() for x in model)

    def parameters() -> list[torch.Tensor]:
        return [torch.nn.Parameter(torch.empty_like(x, device=device)) for x in small]

    size = sum(x.nbytes for x in small)
    yield timed(place, f"up, {count} x 1 kB", size, {
        "fmap(to_gpu, model)": partial(fmapper.fmap, move, model),
        "Module.to": Prepared(fresh, lambda module: module.to(device)),
        "upload alone": lambda: pinned.upload(small, device),
        "a loop of Tensor.to": lambda: [x.to(device, copy=True) for x in small],
        "new parameters alone": parameters,
    })  # fmt: skip
    some = [x.numpy() for x in small[:500]]
    put = partial(jax.device_put, device=place.jax)
    split = jax.jit(lambda flat: jnp.split(flat, len(some)))
    yield timed(place, f"up, {len(some)} x 1 kB, JAX", size * len(some) // count, {
        "to_jax": lambda: fmapper.to_jax(some, device=place.jax, copy=True),
        "jax.device_put of the list": lambda: put(some),
        "packed, and a compiled split": lambda: split(put(np.concatenate(some))),
        "a loop of jax.device_put": lambda: list(map(put, some)),
    })  # fmt: skip
    for name, count, nbytes in [("1 x 8 GB", 1, 8 * GB), ("200 x 40 MB", 200, 40e6)]:
        large = [torch.ones(max(16, int(nbytes * place.scale / 4))) for _ in range(count)]
        size = sum(x.nbytes for x in large)
        ways: dict[str, Call] = {
            "fmap(to_gpu, model)": partial(fmapper.fmap, move, torch.nn.ParameterList(large)),
            "upload alone": partial(pinned.upload, large, device),
            "allocating alone": partial(_all_empty, large, device),
            "filling pinned memory alone": partial(_fill_piece, large, place),
        }
        if place.is_gpu:
            ways["by threads"] = partial(streaming.fill, list(map(MemoryReader, large)), device)
            host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
            there = torch.empty_like(host, device=device)
            ways["link: 1 GiB, pinned"] = partial(there.copy_, host)
        yield timed(place, f"up, {name}", size, ways)


def down(place: Place) -> Iterator[Row]:
    """From the device to the host."""
    for name, count, nbytes in [("1 x 1 GB", 1, GB), ("320 x 3 MB", 320, 3e6)]:
        tensors = arrays(place, count, nbytes)
        model = torch.nn.ParameterList(tensors.values())
        there = {n: jax.device_put(fmapper.to_jax(x.cpu()), place.jax) for n, x in tensors.items()}
        size = sum(x.nbytes for x in tensors.values())
        host = torch.empty(size, dtype=torch.uint8, pin_memory=place.is_gpu)
        packed = torch.empty(size, dtype=torch.uint8, device=place.torch)
        flatten = jax.jit(lambda xs: jnp.concatenate([x.reshape(-1) for x in xs]))

        def fresh(there: dict[str, Any] = there) -> dict[str, Any]:
            return {n: jnp.copy(x) for n, x in there.items()}  # JAX keeps what it has sent down

        ways: dict[str, Call] = {
            "fmap(to_cpu, model)": partial(fmapper.fmap, fmapper.to_cpu, model),
            "a loop of Tensor.cpu": partial(_all_to_cpu, tensors),
            "fmap(to_numpy, arrays of JAX)": Prepared(fresh, fmapper.to_numpy),
            "jax.device_get": Prepared(fresh, jax.device_get),
            "a compiled flatten, one copy": Prepared(
                fresh, lambda given, flatten=flatten: np.asarray(flatten(list(given.values())))
            ),
            "pinned memory of JAX": Prepared(fresh, partial(_by_pinned_memory, place)),
            "link: pinned": partial(host.copy_, packed),
        }
        yield timed(place, f"down, {name}", size, ways)


def file(place: Place) -> Iterator[Row]:
    """From a file in memory to the device."""
    import safetensors.torch

    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for name, count, nbytes in [("100 x 80 MB", 100, 80e6), ("2,000 x 1 MB", 2000, 1e6)]:
        tensors = arrays(place, count if place.is_gpu else 8, nbytes)
        size = sum(x.nbytes for x in tensors.values())
        with tempfile.TemporaryDirectory(dir=folder) as where:
            path = Path(where) / "weights.safetensors"
            safetensors.torch.save_file({n: x.cpu() for n, x in tensors.items()}, path)
            like = {n: torch.empty_like(x, device="meta") for n, x in tensors.items()}
            shape: Any = jax.ShapeDtypeStruct  # untyped in JAX
            shapes = {n: shape(x.shape, "float32") for n, x in tensors.items()}
            ways: dict[str, Call] = {
                "load, torch": partial(fmapper.load, path, like=like, device=place.torch),
                "safetensors, torch": partial(safetensors.torch.load_file, path, place.torch),
                "load, JAX": partial(fmapper.load, path, like=shapes, device=place.jax),
                "safetensors, JAX": partial(_put_file, path, place.jax),
                "reading alone": partial(_read, path, place),
            }
            yield timed(place, f"file, {name}", size, ways)


def between(place: Place) -> Iterator[Row]:
    """From torch to JAX and back on one device, and the memory after many moves."""
    tensors = arrays(place, 50, 40e6)
    size = sum(x.nbytes for x in tensors.values())
    there = fmapper.to_jax(tensors)
    ways: dict[str, Call] = {
        "to_jax, copies": lambda: fmapper.to_jax(tensors),
        "to_jax, copy=False": lambda: fmapper.fmap(fmapper.to_jax(copy=False), tensors),
        "to_torch, copies": lambda: fmapper.to_torch(there),
        "to_torch, copy=False": lambda: fmapper.fmap(fmapper.to_torch(copy=False), there),
        "Tensor.clone": lambda: [x.clone() for x in tensors.values()],
        "jnp.copy": lambda: [jnp.copy(x) for x in there.values()],
    }
    yield timed(place, "between, 50 x 40 MB", size, ways)
    if place.is_gpu:
        small = arrays(place, 20, 1e6)

        def used() -> tuple[int, int]:
            place.wait()
            return torch.cuda.memory_allocated(), place.jax.memory_stats()["bytes_in_use"]

        fmapper.to_torch(fmapper.to_jax(small))
        before = used()
        for _ in range(1000):
            fmapper.to_torch(fmapper.to_jax(small))
        grown = sum(used()) - sum(before)
        yield Row("between, memory after 1,000 moves", grown, {})


def model(place: Place) -> Iterator[Row]:
    """Forward and a step of training."""
    import transformers
    from flax import nnx

    big = place.is_gpu
    ids = torch.randint(0, 1000, (8, 128) if big else (2, 8))
    images = {
        "pixel_values": torch.rand(32 if big else 1, 3, 224 if big else 32, 224 if big else 32)
    }
    small: dict[str, Any] = {} if big else {"hidden_size": 32, "num_hidden_layers": 1}
    small |= {} if big else {"num_attention_heads": 2, "intermediate_size": 64}
    llama = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    llama |= {"intermediate_size": 5632, "num_key_value_heads": 8, "vocab_size": 32000}
    resnet = {} if big else {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}
    vit = small if big else small | {"image_size": 32, "patch_size": 16}
    more = llama if big else small | {"vocab_size": 1000}
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, torch.Tensor], str]] = {
        "ResNet-50": ("ResNet", resnet, images, "float32"),
        "ViT-B/16": ("ViT", vit, images, "float32"),
        "BERT-base": ("Bert", small, {"input_ids": ids}, "float32"),
        "Llama 1B": ("Llama", more | {"use_cache": False}, {"input_ids": ids}, "bfloat16"),
    }
    for name, (kind, options, given, dtype) in cases.items():
        torch.manual_seed(0)
        make = getattr(transformers, f"{kind}Model")
        module = (
            make(getattr(transformers, f"{kind}Config")(**options))
            .eval()
            .to(place.torch, getattr(torch, dtype))
        )
        inputs = {
            k: x.to(place.torch, getattr(torch, dtype) if x.is_floating_point() else x.dtype)
            for k, x in given.items()
        }
        flat: Any = fmapper.convert(module, "jax", (), inputs, check=False)
        twin: Any = fmapper.convert(module, "flax", (), inputs, structure=True, check=False)
        back: Any = fmapper.convert(
            twin, "torch", (), fmapper.to_jax(inputs), check=False
        ).to(place.torch)  # fmt: skip
        compiled = torch.compile(module) if big else module
        parts: Any = nnx.split(twin, nnx.Param, ...)
        graph, params, rest = parts
        of_jax = fmapper.to_jax(inputs)

        def of_flat(weights: Any, call: Any = flat, x: Any = of_jax) -> Any:
            return call.replace(params=weights)(**x)

        def of_twin(weights: Any, graph: Any = graph, rest: Any = rest, x: Any = of_jax) -> Any:
            return nnx.merge(graph, weights, rest)(**x)

        yield timed(place, f"model, {name}, forward", 0, {
            "converted to JAX": partial(jax.jit(of_flat), flat.params),
            "classes of Flax": partial(jax.jit(of_twin), params),
            "torch, eager": _quiet(module, inputs),
            "torch.compile": _quiet(compiled, inputs),
            "back in torch, eager": _quiet(back, inputs),
        })  # fmt: skip
        yield timed(place, f"model, {name}, step", 0, {
            "converted to JAX": partial(_step_of(of_flat), flat.params),
            "classes of Flax": partial(_step_of(of_twin), params),
            "torch, eager": _torch_step(module, inputs),
            "torch.compile": _torch_step(compiled, inputs),
        })  # fmt: skip


def _all_empty(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty_like(x, device=device) for x in tensors]


def _fill_piece(tensors: list[torch.Tensor], place: Place) -> None:
    """Copies tensors into one piece of pinned memory, again and again, in torch's threads."""
    piece = torch.empty(pinned.PIECE // 4, pin_memory=place.is_gpu)
    for x in tensors:
        for part in x.split(len(piece)):
            piece[: len(part)].copy_(part)


def _by_pinned_memory(place: Place, arrays: dict[str, Any]) -> list[Any]:
    memory = "pinned_host" if place.is_gpu else None
    there = jax.sharding.SingleDeviceSharding(place.jax, memory_kind=memory)
    return [np.asarray(x) for x in jax.device_put(list(arrays.values()), there)]


def _read(path: Path, place: Place) -> None:
    """Reads a file into pinned memory by several threads, a piece each, again and again."""
    size, handle = path.stat().st_size, os.open(path, os.O_RDONLY)
    threads = threads_for_memory()

    def read(first: int) -> None:
        piece = torch.empty(streaming.PIECE, dtype=torch.uint8, pin_memory=place.is_gpu).numpy()
        for at in range(first * len(piece), size, threads * len(piece)):
            os.preadv(handle, [piece], at)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    os.close(handle)


def _all_to_cpu(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [x.cpu().clone() for x in tensors.values()]


def _put_file(path: Path, device: Any) -> Any:
    import safetensors.flax

    return jax.device_put(safetensors.flax.load_file(path), device)


def _jax_loss(results: Any) -> Any:
    leaves = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.mean(jnp.square(x.astype("float32"))) for x in leaves)


def _step_of(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a compiled step of gradient descent: new parameters of old ones."""
    slope = jax.grad(lambda weights: _jax_loss(run(weights)))

    def descend(weight: Any, gradient: Any) -> Any:
        return weight - 1e-3 * gradient.astype(weight.dtype)

    return jax.jit(lambda weights: jax.tree.map(descend, weights, slope(weights)))


def _torch_loss(results: Any) -> Any:
    given = dict(results.items()) if hasattr(results, "items") else results
    leaves = torch.utils._pytree.tree_leaves(given)
    return sum(x.float().square().mean() for x in leaves if torch.is_tensor(x))


def _torch_step(call: Any, inputs: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """Returns the same step, which writes the parameters."""
    weights = [p for p in call.parameters() if p.requires_grad]

    def step() -> None:
        _torch_loss(call(**inputs)).backward()
        with torch.no_grad():
            used = [p for p in weights if p.grad is not None]
            torch._foreach_add_(used, [p.grad for p in used], alpha=-1e-3)
        call.zero_grad(set_to_none=True)

    return step


def _quiet(call: Any, inputs: dict[str, torch.Tensor]) -> Callable[[], Any]:
    return torch.no_grad()(lambda: call(**inputs))


ROWS = {"up": up, "down": down, "file": file, "between": between, "model": model}


def main() -> None:
    """Prints the rows, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="a pattern of names of rows")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="begin no row after that (300)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.monotonic()
    if options.tiny:
        place = Place("cpu", jax.devices("cpu")[0], 1e-4, 2)
    elif torch.cuda.is_available():
        place = Place("cuda", jax.devices("gpu")[0], 1.0, options.rounds)
    else:
        print("torch sees no CUDA device: nothing to measure.")
        return
    found: list[Row] = []
    print(machine(PACKAGES), flush=True)
    for name, rows in ROWS.items():
        if not re.search(options.only, name):
            continue
        for row in rows(place):
            found.append(row)
            rate = {key: row.nbytes / s / GB if row.nbytes else 0 for key, s in row.seconds.items()}
            shown = [
                f"{key} {1e3 * s:.2f} ms" + (f" ({rate[key]:.1f} GB/s)" if row.nbytes else "")
                for key, s in row.seconds.items()
            ] or [f"{row.nbytes} bytes"]
            print(f"{row.name}: {'; '.join(shown)}", flush=True)
            if options.json:
                report = {"machine": machine(PACKAGES), "rows": [row._asdict() for row in found]}
                options.json.write_text(json.dumps(report, indent=2))
            if time.monotonic() - began > options.seconds:
                print("the time is up")
                return


if __name__ == "__main__":
    main()
