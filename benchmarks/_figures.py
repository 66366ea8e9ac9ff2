"""What `commits.py` measures: prints seconds of the processor by name, as one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

BEGUN = time.process_time()
import fmapper  # noqa: E402

IMPORTED = time.process_time() - BEGUN

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from _networks import TextSize  # noqa: E402
from _twins import Decoder, Encoder, ResNet  # noqa: E402
from torch import nn  # noqa: E402

FOUND: dict[str, float] = {"import": IMPORTED}
ONLY = sys.argv[1] if len(sys.argv) > 1 else ""


def measure(name: str, call: Callable[[], object], repeats: int = 10, number: int = 1) -> None:
    """Note the least time of a call that was called once before."""
    if ONLY not in name:
        return
    times = []
    call()
    for _ in range(repeats):
        begun = time.process_time()
        for _ in range(number):
            call()
        times.append((time.process_time() - begun) / number)
    FOUND[name] = min(times)


def once(name: str, call: Callable[[], Any]) -> Any:
    """Note the time of the first call, and give what it gives."""
    begun = time.process_time()
    result = call()
    if ONLY in name:
        FOUND[name] = time.process_time() - begun
    return result


# --- walks and moves -----------------------------------------------------------------------------


@fmapper.functor(children=("a", "b"))
class Pair:
    """Two children."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


def deep(depth: int) -> Any:
    """Return a tree of pairs with lists in them."""
    return np.zeros(1) if depth == 0 else Pair(deep(depth - 1), [deep(depth - 1)])


def chain(length: int) -> Any:
    """Return a path of pairs."""
    tree: Any = np.zeros(1)
    for _ in range(length):
        tree = Pair(tree, np.zeros(1))
    return tree


def walks() -> None:
    """Measure walks over four trees, and moves by the leaf."""
    dense = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(100)]
    trees = {
        "a dict of 10,000": {f"k{i}": np.zeros(1) for i in range(10_000)},
        "a path of 300": chain(300),
        "4,095 objects": deep(11),
        "100 modules": nn.Sequential(*dense),
    }
    for name, tree in trees.items():
        measure(f"walk: {name}", lambda tree=tree: fmapper.fmap(lambda x: x, tree))
    measure("walk: get_device of 100 modules", lambda: fmapper.get_device(trees["100 modules"]))
    measure("walk: trainables of 100 modules", lambda: fmapper.trainables(trees["100 modules"]))
    host = {f"k{i}": np.zeros(4, np.float32) for i in range(2000)}
    torchs = fmapper.to_torch(host)
    measure("move: 2,000 to torch", lambda: fmapper.fmap(fmapper.to_torch, host))
    measure("move: 2,000 to JAX", lambda: fmapper.fmap(fmapper.to_jax, host))
    measure("move: 2,000 that are there", lambda: fmapper.fmap(fmapper.to_cpu, torchs))
    params = {"w": torch.randn(8, 8), "b": torch.zeros(8)}
    x = torch.randn(2, 8)
    step = fmapper.jit(lambda p, x: torch.tanh(x @ p["w"]) + p["b"])
    measure("jit: a call in torch", lambda: step(params, x), number=50)
    jparams, jx = fmapper.to_jax(params), fmapper.to_jax(x)
    jstep = fmapper.jit(lambda p, x: jnp.tanh(x @ p["w"]) + p["b"])
    measure("jit: a call in JAX", lambda: jstep(jparams, jx), number=50)


# --- converted models ----------------------------------------------------------------------------


def ready(tree: Any) -> Any:
    """Wait for what JAX computes."""
    return jax.block_until_ready(jax.tree.leaves(tree))


def to_jax(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
    """Measure a module's conversion to JAX, and its calls there."""
    module = module.eval()
    model = once(f"convert: {name} to JAX", lambda: fmapper.convert(module, "jax", args, kwargs))
    inputs = fmapper.to_jax(args)
    run = jax.jit(lambda model, *args: model(*args, **(kwargs or {})))
    measure(f"run: {name} in JAX", lambda: ready(run(model, *inputs)))
    measure(f"run: {name} in JAX, not compiled", lambda: ready(model(*inputs, **(kwargs or {}))), 3)


def to_torch(name: str, module: Any, args: tuple[Any, ...]) -> None:
    """Measure a model's conversion to torch, and its calls there."""
    model = once(f"convert: {name} to torch", lambda: fmapper.convert(module, "torch", args))
    inputs = fmapper.to_torch(args)
    with torch.no_grad():
        measure(f"run: {name} in torch", lambda: model(*inputs))


def models() -> None:
    """Measure conversions and converted models, both ways."""
    from transformers import (
        BertConfig,
        BertModel,
        LlamaConfig,
        LlamaForCausalLM,
        ResNetConfig,
        ResNetModel,
    )

    torch.set_num_threads(1)
    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
             "intermediate_size": 128, "vocab_size": 200}  # fmt: skip
    ids = torch.arange(16)[None]
    to_jax("an encoder", BertModel(BertConfig(**small)), (ids,))
    decoder = LlamaForCausalLM(LlamaConfig(**small))
    to_jax("a decoder", decoder, (ids,), {"use_cache": False})
    to_jax("ResNet-50", ResNetModel(ResNetConfig()), (torch.randn(1, 3, 96, 96),))
    size = TextSize(length=16, width=64, layers=4, heads=4, vocabulary=200)
    texts = jnp.arange(16)[None], jnp.ones((1, 16), jnp.int32)
    to_torch("an encoder", Encoder(size), texts)
    to_torch("a decoder", Decoder(size), texts[:1])
    to_torch("ResNet-50", ResNet((3, 4, 6, 3)), (jnp.ones((1, 96, 96, 3)),))


walks()
models()
print(json.dumps(FOUND))
