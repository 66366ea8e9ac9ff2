"""What does a model on a mesh give, and what does it send?

    python benchmarks/mesh.py [llama mixtral vit t5 resnet] [--eager] [--double] [--torch]

Eight devices that XLA makes of this CPU, as a mesh of 4 by 2: Auto, Explicit, and one axis of each;
set by `jax.set_mesh` or not. Outputs, gradients and a step of gradient descent under `jax.jit` (and
without, `--eager`) are compared with those of one device, array by array, relative to the largest
element; then what a forward pass sends is counted in the compiled program, for the model's own
rules and for those that are derived from it. `--double` does it in float64, where a step of AdamW
can be compared, too: in float32 Adam divides gradients that are rounding by themselves, such as
those of the biases of keys. `--torch` compares the same of torch's own modules on a mesh of 2 by 2,
by four processes of gloo; there, what a step adds is compared with what it adds in float64.
What many processes do is checked and timed by `python tests/support/many_devices.py`: `gloo loading
4`, `jaxes loading 4` and `jaxes bridge 4`.

JAX itself cannot differentiate outside of jit on an Explicit mesh that is not set; that is left
out.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
import torch
import transformers as hub
from _report import machine
from flax import nnx
from jax.sharding import AxisType
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fmapper
from fmapper.meshes import Sharding, derive

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
IMAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "image_size": 16, "patch_size": 8}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
IDS = torch.arange(64).reshape(8, 8)
RANDOM = torch.Generator().manual_seed(0)
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "llama": (lambda: hub.LlamaForCausalLM(hub.LlamaConfig(**TEXT)),
              {"input_ids": IDS, "use_cache": False}, "logits"),
    "mixtral": (lambda: hub.MixtralForCausalLM(hub.MixtralConfig(**TEXT, num_local_experts=4)),
                {"input_ids": IDS, "use_cache": False}, "logits"),
    "vit": (lambda: hub.ViTModel(hub.ViTConfig(**IMAGE)),
            {"pixel_values": torch.randn(8, 3, 16, 16, generator=RANDOM)}, "last_hidden_state"),
    "t5": (lambda: hub.T5ForConditionalGeneration(hub.T5Config(**T5)),
           {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}, "logits"),
    "resnet": (lambda: hub.ResNetModel(hub.ResNetConfig(**RESNET)),
               {"pixel_values": torch.randn(8, 3, 32, 32, generator=RANDOM)}, "last_hidden_state"),
}  # fmt: skip
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SENT = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
BAR = 1e-5
SMALL = 1e-3  # of the largest element of a tree; what is less in all of an array may be rounding
RATE = 0.1
EPS = 1e-3
RANKS = 4


def halves(name: str, array: Any) -> tuple[Any, ...]:
    """Divide the first dimension that is even, whatever is sent then."""
    at = next((at for at, size in enumerate(array.shape) if size % 2 == 0), None)
    return () if at is None else (*[None] * at, "model")


def difference(given: Any, wanted: Any) -> float:
    """Largest difference of the arrays of two trees, each relative to its largest element."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in
             zip(fmapper.fleaves(given), fmapper.fleaves(wanted), strict=True)]  # fmt: skip
    least = SMALL * max(abs(b).max() for _, b in pairs)
    return float(max(abs(a - b).max() / max(abs(b).max(), least) for a, b in pairs))


def target_of(output: Any) -> Any:
    """What a loss compares an output with: random numbers, so that all parameters matter.

    The mean square of an output behind a layer norm has no gradient in what is before.
    """
    dtype = str(output.dtype).removeprefix("torch.")
    return np.random.default_rng(0).standard_normal(output.shape).astype(dtype)


def as_float(module: Any, example: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a module and its example in float64, where that is asked for."""
    return (module.double(), doubled(example)) if jax.config.jax_enable_x64 else (module, example)


def doubled(example: dict[str, Any]) -> dict[str, Any]:
    """Returns an example in float64."""
    pairs = ((n, x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x)
             for n, x in example.items())  # fmt: skip
    return dict(pairs)


class Case:
    """A model, its batch, and what it gives on one device."""

    def __init__(self, name: str) -> None:
        make, example, self.output = MODELS[name]
        torch.manual_seed(0)
        self.name = name
        self.module, self.example = as_float(make().eval(), example)
        self.model = self.convert("jax")
        self.fixed = {n: x for n, x in self.example.items() if not isinstance(x, torch.Tensor)}
        self.batch = {n: x.numpy() for n, x in self.example.items() if n not in self.fixed}
        shape = jax.eval_shape(self.forward, self.model, self.batch)
        self.target = target_of(shape)
        self.wanted = {what: jax.jit(call)(self.model, self.batch)
                       for what, call in self.calls().items()}  # fmt: skip

    def convert(self, to: str) -> Any:
        """The model in a framework."""
        return fmapper.convert(self.module, to, example_kwargs=self.example, check=False)

    def forward(self, model: Any, batch: Any) -> Any:
        """The output that is compared."""
        return model(**batch, **self.fixed)[self.output]

    def gradient(self, model: Any, batch: Any) -> Any:
        """Gradients of a loss in all parameters."""

        def loss(params: Any) -> Any:
            output = self.forward(model.replace(params=params), batch)
            return ((output - self.target) ** 2).mean()

        return jax.grad(loss)(model.params)

    def step(self, model: Any, batch: Any) -> Any:
        """What a step of gradient descent with momentum adds to parameters."""
        return self.updates(optax.sgd(RATE, momentum=0.9), model, batch)

    def adamw(self, model: Any, batch: Any) -> Any:
        """What a step of AdamW adds to parameters, with the `eps` of `optimizer_of`."""
        return self.updates(optax.adamw(RATE, eps=EPS), model, batch)

    def updates(self, optimizer: Any, model: Any, batch: Any) -> Any:
        """What a step of an optimizer adds to parameters."""
        gradients = self.gradient(model, batch)
        return optimizer.update(gradients, optimizer.init(model.params), model.params)[0]

    def calls(self) -> dict[str, Callable[[Any, Any], Any]]:
        """What is compared, by name."""
        found = {"outputs": self.forward, "gradients": self.gradient, "step": self.step}
        return found | ({"adamw": self.adamw} if jax.config.jax_enable_x64 else {})


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
                if EXPLICIT in kinds and not is_set and what != "outputs":
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
    """Print what a forward pass sends, by frameworks, kinds of axes and rules."""
    models = {"jax": case.model, "flax": case.convert("flax")}
    for to, kind, rules in itertools.product(models, (AUTO, EXPLICIT), ("model", "derive")):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        batch = fmapper.shard(case.batch, mesh, ("data",))
        row = f"{case.name}, {to}, {kind.name}, {rules}"
        try:
            plan = fmapper.plan(Sharding(mesh, rules), models[to])
        except fmapper.PlacementError:
            print(f"{row}: the model says nothing", flush=True)
            continue
        model = fmapper.shard(models[to], mesh, rules)
        run = jax.jit(case.forward) if to == "jax" else nnx.jit(case.forward)
        text = run.lower(model, batch).compile().as_text()
        sent = ", ".join(f"{n} {what}" for what, n in Counter(re.findall(SENT, text)).items())
        planned = f" (planned {len(plan.sums)} sums)" if plan.sums else ""
        part = f"{plan.nbytes_per_device / plan.nbytes:.0%} of the bytes on each device"
        print(f"{row}: {sent}{planned}, {part}", flush=True)


def in_torch(families: list[str], rank: int, port: int) -> None:
    """Compare in torch, as one of the processes, and print what a forward pass sends."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.nn.attention import SDPBackend, sdpa_kernel

    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=address)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    for name in families:
        make, example, output = MODELS[name]
        torch.manual_seed(0)
        module, example = as_float(make().eval(), example)
        own: Any = "model"
        if name not in ("llama", "mixtral"):
            model = fmapper.convert(module, "jax", example_kwargs=example, check=False)
            own = dict(derive(model, {"data": 2, "model": 2}).axes)
        exact = copy.deepcopy(module).double()
        is_double = jax.config.jax_enable_x64
        if name == "mixtral":  # torch has no grouped products in float64
            exact.config._experts_implementation = "batched_mm"
            if is_double:
                module.config._experts_implementation = "batched_mm"
        optimizer = optimizer_of(module, is_double=is_double)
        new, new_optimizer = fmapper.shard((module, optimizer), mesh, own)
        batch = {n: fmapper.shard(x, mesh, ("data",)) if isinstance(x, torch.Tensor) else x
                 for n, x in example.items()}  # fmt: skip

        def run(module: Any, optimizer: Any, batch: Any, output: str = output) -> list[Any]:
            found = module(**batch)[output]
            target = torch.from_numpy(target_of(found)).to(found.dtype)
            ((found - target) ** 2).mean().backward()
            used = [p for p in module.parameters() if p.grad is not None]
            gradients = [p.grad.detach().clone() for p in used if p.grad is not None]
            before = [whole(p).copy() for p in used]
            optimizer.step()
            return [
                [found],
                gradients,
                [whole(p) - old for p, old in zip(used, before, strict=True)],
            ]

        with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
            with torch.no_grad(), Sent() as sent:
                new(**batch)
            found = run(new, new_optimizer, batch)
        wanted = run(module, optimizer, example)
        outputs, gradients, step = (difference([*map(whole, f)], [*map(whole, w)])
                                    for f, w in zip(found, wanted, strict=True))  # fmt: skip
        # What a step adds in float32 is rounded as parameters are, of which it is a small part: on
        # one process, too. So both are compared with what one process adds in float64.
        exactly = run(exact, optimizer_of(exact, is_double=is_double), doubled(example))[2]
        of_mesh, of_one = difference(found[2], exactly), difference(wanted[2], exactly)
        if rank == 0:
            counts = ", ".join(f"{n} {what}" for what, n in sent.counts.items())
            print(f"{name} in torch: outputs {outputs:.0e}, gradients {gradients:.0e}, step "
                  f"{step:.0e} (from float64 {of_mesh:.0e}, of one process {of_one:.0e}); "
                  f"{counts or 'nothing'} sent", flush=True)  # fmt: skip
        assert max(outputs, gradients) <= BAR
        assert step <= BAR if is_double else of_mesh <= 2 * of_one + BAR
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def optimizer_of(module: Any, *, is_double: bool) -> Any:
    """Returns AdamW in float64, and gradient descent with momentum in float32.

    Norms of transformers compute in float32 always: `eps` is larger than what that leaves of
    gradients that are zero, which AdamW would divide by themselves.
    """
    if is_double:
        return torch.optim.AdamW(module.parameters(), lr=RATE, eps=EPS)
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)


def whole(tensor: Any) -> Any:
    """Return the values of a tensor, brought together."""
    if isinstance(tensor, np.ndarray):
        return tensor
    own = tensor.detach()
    return (own.full_tensor() if isinstance(own, DTensor) else own).numpy()


class Sent(TorchDispatchMode):
    """Counts what processes send each other."""

    def __enter__(self) -> Any:
        self.counts: Counter[str] = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        name = func.name().rpartition("::")[2]
        is_sent = func.namespace == "_c10d_functional" and "wait" not in name
        if (is_sent and "_wrap" not in name) or func.namespace == "c10d":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def start_torch(names: list[str]) -> None:
    """Start the processes of torch, and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *names, "--rank"]
    processes = [subprocess.Popen([*command, f"{rank}:{port}"]) for rank in range(RANKS)]
    codes = [process.wait() for process in processes]
    print(f"processes of torch end with {codes}")


def main() -> None:
    """Compare and count, for each family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(MODELS))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.double)
    if options.rank:
        return in_torch(options.families, *map(int, options.rank.split(":")))
    print(", ".join(f"{n} {v}" for n, v in machine(("fmapper", "torch", "jax")).items()))
    if options.torch:
        return start_torch([*options.families, *["--double"] * options.double])
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
