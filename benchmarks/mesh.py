"""What does a model on a mesh give, and what does it send?

    python benchmarks/mesh.py [llama mixtral vit t5 resnet] [--eager]

Eight devices that XLA makes of this CPU, as a mesh of 4 by 2: Auto, Explicit, and one axis of each;
set by `jax.set_mesh` or not. Outputs and gradients under `jax.jit` (and without, `--eager`) are
compared with those of one device, relative to their largest; then what a forward pass sends is
counted in the compiled program, for the model's own rules and for those that are derived from it.
What many processes do is checked and timed by `python tests/support/many_devices.py`: `gloo loading
4`, `jaxes loading 4` and `jaxes bridge 4`.

JAX itself cannot differentiate outside of jit on an Explicit mesh that is not set; that is left
out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import torch
import transformers as hub
from _report import machine
from jax.sharding import AxisType

import fmapper
from fmapper.meshes import Sharding

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
IMAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "image_size": 16, "patch_size": 8}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
IDS = torch.arange(64).reshape(8, 8)
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "llama": (lambda: hub.LlamaForCausalLM(hub.LlamaConfig(**TEXT)),
              {"input_ids": IDS, "use_cache": False}, "logits"),
    "mixtral": (lambda: hub.MixtralForCausalLM(hub.MixtralConfig(**TEXT, num_local_experts=4)),
                {"input_ids": IDS, "use_cache": False}, "logits"),
    "vit": (lambda: hub.ViTModel(hub.ViTConfig(**IMAGE)),
            {"pixel_values": torch.ones(8, 3, 16, 16)}, "last_hidden_state"),
    "t5": (lambda: hub.T5ForConditionalGeneration(hub.T5Config(**T5)),
           {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}, "logits"),
    "resnet": (lambda: hub.ResNetModel(hub.ResNetConfig(**RESNET)),
               {"pixel_values": torch.rand(8, 3, 32, 32)}, "last_hidden_state"),
}  # fmt: skip
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SENT = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
BAR = 1e-5


def halves(name: str, array: Any) -> tuple[Any, ...]:
    """Divide the first dimension that is even, whatever is sent then."""
    at = next((at for at, size in enumerate(array.shape) if size % 2 == 0), None)
    return () if at is None else (*[None] * at, "model")


def difference(given: Any, wanted: Any) -> float:
    """Largest difference of two trees, relative to the largest element."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in
             zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True)]  # fmt: skip
    return float(max(abs(a - b).max() for a, b in pairs) / max(abs(b).max() for _, b in pairs))


class Case:
    """A model, its batch, and what it gives on one device."""

    def __init__(self, name: str) -> None:
        make, example, self.output = MODELS[name]
        torch.manual_seed(0)
        self.name = name
        self.model = fmapper.convert(make().eval(), "jax", example_kwargs=example, check=False)
        self.fixed = {n: x for n, x in example.items() if not isinstance(x, torch.Tensor)}
        self.batch = {n: x.numpy() for n, x in example.items() if n not in self.fixed}
        self.wanted = {what: jax.jit(call)(self.model, self.batch)
                       for what, call in self.calls().items()}  # fmt: skip

    def forward(self, model: Any, batch: Any) -> Any:
        """The output that is compared."""
        return model(**batch, **self.fixed)[self.output]

    def gradient(self, model: Any, batch: Any) -> Any:
        """Gradients of a loss in all parameters."""

        def loss(params: Any) -> Any:
            return (self.forward(model.replace(params=params), batch) ** 2).mean()

        return jax.grad(loss)(model.params)

    def calls(self) -> dict[str, Callable[[Any, Any], Any]]:
        """What is compared, by name."""
        return {"outputs": self.forward, "gradients": self.gradient}


def compare(case: Case, *, eager: bool) -> int:
    """Print a line for each mesh; return how many miss the bar."""
    missed = 0
    for kinds in ((AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
        model, batch = (fmapper.shard(case.model, mesh, halves),
                        fmapper.shard(case.batch, mesh, ("data",)))  # fmt: skip
        for is_set in (False, True):
            cells = []
            for what, call in case.calls().items():
                ways = {"jit": jax.jit(call)} | ({"eager": call} if eager else {})
                if EXPLICIT in kinds and not is_set and what == "gradients":
                    ways.pop("eager", None)
                for way, run in ways.items():
                    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
                        found = difference(run(model, batch), case.wanted[what])
                    missed += found > BAR
                    cells.append(f"{what} {way} {found:.0e}")
            place = f"{'/'.join(kind.name for kind in kinds)}{', set' * is_set}"
            print(f"{case.name}, {place}: {', '.join(cells)}", flush=True)
    return missed


def count(case: Case) -> None:
    """Print what a forward pass sends, by rules."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO))
    batch = fmapper.shard(case.batch, mesh, ("data",))
    for rules in ("model", "derive"):
        try:
            plan = fmapper.plan(Sharding(mesh, rules), case.model)
        except fmapper.PlacementError:
            print(f"{case.name}, {rules}: the model says nothing", flush=True)
            continue
        model = fmapper.shard(case.model, mesh, rules)
        text = jax.jit(case.forward).lower(model, batch).compile().as_text()
        sent = ", ".join(f"{n} {what}" for what, n in Counter(re.findall(SENT, text)).items())
        planned = f" (planned {len(plan.sums)} sums)" if plan.sums else ""
        part = plan.nbytes_per_device / plan.nbytes
        print(f"{case.name}, {rules}: {sent}{planned}, {part:.0%} of the bytes on each device")


def main() -> None:
    """Compare and count, for each family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(MODELS))
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    print(", ".join(f"{n} {v}" for n, v in machine(("fmapper", "torch", "jax")).items()))
    missed = 0
    for name in options.families:
        begun = time.perf_counter()
        case = Case(name)
        missed += compare(case, eager=options.eager)
        count(case)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    print(f"{missed} differ by more than {BAR}")


if __name__ == "__main__":
    main()
