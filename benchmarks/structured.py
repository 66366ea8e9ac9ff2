"""Measures models converted with `structure=True` against the same models converted flat.

    python benchmarks/structured.py --rounds 15
    python benchmarks/structured.py --to torch --only 'BERT|ViT'
    python benchmarks/structured.py --device cuda

Forward pass and gradient of all parameters, compiled with the model's arrays as arguments: in Flax
by `jax.jit` over the state of `nnx.split`, or by `nnx.jit` over the model, which walks it at each
call; in PyTorch eagerly. Time of the processor, or of the clock on a GPU, medians, and how many
times as fast the structured model is.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx

import fmapper

Steps = dict[str, Callable[[], Any]]


def models() -> dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    """Returns the models with what they are called with."""
    ids = torch.randint(0, 1000, (4, 128))
    common: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    llama = transformers.LlamaConfig(vocab_size=1000, use_cache=False, **common)
    vit = transformers.ViTConfig(image_size=64, patch_size=8, **common)
    bert = transformers.BertConfig(vocab_size=1000, **common)
    gpt2 = transformers.GPT2Config(
        vocab_size=1000, n_positions=128, n_embd=256, n_layer=4, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    resnet = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], layer_type="basic"
    )
    images = {"pixel_values": torch.randn(8, 3, 64, 64)}
    return {
        "Llama": (transformers.LlamaForCausalLM(llama), {"input_ids": ids}),
        "ViT": (transformers.ViTModel(vit), images),
        "BERT": (transformers.BertModel(bert), {"input_ids": ids}),
        "GPT-2": (transformers.GPT2LMHeadModel(gpt2), {"input_ids": ids}),
        "ResNet": (transformers.ResNetModel(resnet), images),
    }


def loss_of(results: Any) -> Any:
    """Returns the sum of the mean squares of floating results."""
    leaves = [one for one in jax.tree.leaves(results) if jnp.issubdtype(one.dtype, jnp.floating)]
    return sum(jnp.mean(one**2) for one in leaves)


def steps_of_flax(model: Any, inputs: dict[str, Any]) -> Steps:
    """Returns compiled forward passes and gradient steps."""
    inputs = fmapper.to_jax(inputs)
    graph, state, rest = nnx.split(model, nnx.Param, ...)

    def run(state: Any) -> Any:
        return jax.tree.leaves(nnx.merge(graph, state, rest)(**inputs))

    forward, slope = jax.jit(run), jax.jit(jax.value_and_grad(lambda state: loss_of(run(state))))
    walking = nnx.jit(lambda model: jax.tree.leaves(model(**inputs)))
    walking_slope = nnx.jit(nnx.value_and_grad(lambda model: loss_of(model(**inputs))))
    return {
        "forward": lambda: jax.block_until_ready(forward(state)),
        "gradient": lambda: jax.block_until_ready(slope(state)),
        "forward, nnx.jit": lambda: jax.block_until_ready(walking(model)),
        "gradient, nnx.jit": lambda: jax.block_until_ready(walking_slope(model)),
    }


def steps_of_torch(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Steps:
    """Returns eager forward passes and gradient steps."""
    params = list(model.parameters())

    def forward() -> list[torch.Tensor]:
        found = torch.utils._pytree.tree_leaves(model(**inputs))
        return [one for one in found if isinstance(one, torch.Tensor) and one.is_floating_point()]

    def slope() -> Any:
        loss = sum((one**2).mean() for one in forward())
        return torch.autograd.grad(loss, params, allow_unused=True)

    return {"forward": torch.no_grad()(forward), "gradient": slope}


def compare(name: str, sides: dict[str, Steps], rounds: int, clock: Callable[[], float]) -> None:
    """Prints a line for each step of a model."""
    for what in sides["flat"]:
        times: dict[str, list[float]] = {kind: [] for kind in sides}
        for at in range(rounds + 2):
            for kind in random.sample(sorted(sides), 2):
                began = clock()
                sides[kind][what]()
                if at > 1:
                    times[kind].append(clock() - began)
        ratios = sorted(f / s for f, s in zip(times["flat"], times["structured"], strict=True))
        flat, own = (1e3 * statistics.median(times[kind]) for kind in ("flat", "structured"))
        quartiles = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
        print(
            f"{name} {what}: flat {flat:.2f} ms, structured {own:.2f} ms, "
            f"{statistics.median(ratios):.2f}x ({quartiles})",
            flush=True,
        )


def main() -> None:
    """Prints the ratios of each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--to", choices=["flax", "torch"], default="flax")
    parser.add_argument("--only", default="", help="a pattern of names of models")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    steps = {"flax": steps_of_flax, "torch": steps_of_torch}[options.to]
    for name, (module, given) in models().items():
        if not re.search(options.only, name):
            continue
        module.eval().to(options.device)
        inputs = {key: value.to(options.device) for key, value in given.items()}
        sides = {}
        for kind in ("flat", "structured"):
            model = fmapper.convert(
                module, "flax", (), inputs, dynamic_shapes=None, structure=kind == "structured"
            )
            if options.to == "torch":  # what PyTorch gets of a model of Flax
                model = fmapper.convert(
                    model, "torch", (), fmapper.to_jax(inputs), structure=kind == "structured"
                )
            sides[kind] = steps(model, inputs)
        compare(name, sides, options.rounds, clock)


if __name__ == "__main__":
    main()
