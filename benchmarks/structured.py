"""Measures models converted with `structure=True` against the same models converted flat.

    python benchmarks/structured.py --rounds 11

Forward pass and gradient of all parameters, both under `jit` with the model an argument.
"""

from __future__ import annotations

import argparse
import random
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
    return {
        "Llama": (transformers.LlamaForCausalLM(llama), {"input_ids": ids}),
        "ViT": (transformers.ViTModel(vit), {"pixel_values": torch.randn(8, 3, 64, 64)}),
        "BERT": (transformers.BertModel(bert), {"input_ids": ids}),
    }


def steps(model: Any, inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Returns a compiled forward pass and a compiled gradient step."""

    def loss(model: Any) -> Any:
        leaves = jax.tree.leaves(model(**inputs))
        return sum(jnp.mean(one**2) for one in leaves if jnp.issubdtype(one.dtype, jnp.floating))

    run = nnx.jit(lambda model: jax.tree.leaves(model(**inputs)))
    slope = nnx.jit(nnx.grad(loss))
    return {"forward": lambda: run(model), "gradient": lambda: slope(model)}


def main() -> None:
    """Prints a line for each model and step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for name, (module, inputs) in models().items():
        module.eval()
        given = fmapper.to_jax(inputs)
        sides = {
            kind: steps(
                fmapper.convert(
                    module, "flax", (), inputs, dynamic_shapes=None, structure=kind == "structured"
                ),
                given,
            )
            for kind in ("flat", "structured")
        }
        for what in ("forward", "gradient"):
            times: dict[str, list[float]] = {kind: [] for kind in sides}
            for at in range(rounds + 2):
                for kind in random.sample(sorted(sides), 2):
                    began = time.process_time()
                    jax.block_until_ready(sides[kind][what]())
                    if at > 1:
                        times[kind].append(time.process_time() - began)
            ratios = sorted(f / s for f, s in zip(times["flat"], times["structured"], strict=True))
            flat, own = (1e3 * statistics.median(times[kind]) for kind in ("flat", "structured"))
            quartiles = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
            print(
                f"{name} {what}: flat {flat:.2f} ms, structured {own:.2f} ms, "
                f"{statistics.median(ratios):.2f}x ({quartiles})",
                flush=True,
            )


if __name__ == "__main__":
    main()
