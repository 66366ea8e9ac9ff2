"""Measures a model whose blocks are one, called by a scan, against the same one with a list.

    taskset -c 1 python benchmarks/scanned.py --layers 24 --rounds 7

A Llama, converted to Flax with `structure=True`, with and without `scan=True`; forward pass and
gradient of all parameters under `nnx.jit`. Lines of StableHLO; seconds of the processor for tracing
and lowering, and for compiling, of fresh programs; milliseconds for a run. Medians, both in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import torch
import transformers
from flax import nnx

import fmapper


def _forward(model: Any, ids: Any) -> Any:
    return model(ids)["logits"]


def _gradient(model: Any, ids: Any) -> Any:
    return nnx.grad(lambda model: (_forward(model, ids) ** 2).mean())(model)


def _processor(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = jax.block_until_ready(call())
    return time.process_time() - start, result


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Measures scanned blocks against lists.")
    parser.add_argument("--layers", type=int, default=24, help="blocks of the model")
    parser.add_argument("--rounds", type=int, default=7, help="programs of each kind")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_attention_heads=4,
        num_hidden_layers=options.layers, use_cache=False,
    )  # fmt: skip
    source = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 1000, (2, 32))
    models = {
        name: fmapper.convert(
            source, "flax", (), {"input_ids": ids}, structure=True, scan=name == "scan", check=False
        )
        for name in ("list", "scan")
    }
    given = ids.numpy()
    print("| | list | scan |\n|---|---|---|")
    for what, function in (("forward", _forward), ("gradient", _gradient)):
        rows: dict[str, dict[str, list[float]]] = {}
        for _ in range(options.rounds):
            for name, model in models.items():
                fresh = nnx.jit(lambda model, ids, function=function: function(model, ids))
                spent, lowered = _processor(lambda f=fresh, m=model: f.lower(m, given))
                lines = len(lowered.as_text().splitlines())
                compiling, compiled = _processor(lowered.compile)
                compiled(model, given)
                running, _ = _processor(lambda c=compiled, m=model: c(m, given))
                found = {
                    "lines of StableHLO": lines, "tracing and lowering, s": spent,
                    "compiling, s": compiling, "a run, ms": 1000 * running,
                }  # fmt: skip
                for title, number in found.items():
                    rows.setdefault(title, {}).setdefault(name, []).append(number)
        for title, by_name in rows.items():
            cells = [f"{statistics.median(numbers):,.4g}" for numbers in by_name.values()]
            print(f"| {what}: {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
