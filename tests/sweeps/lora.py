"""Adapters of PEFT for a spread of classes of transformers, in torch and JAX.

Of each class a small model gets an adapter of PEFT. Outputs and gradients of the adapter, merged
and unmerged weights, and what PEFT reads of the folder that is written are compared.
`nox -s training_state` runs all; `python -m sweeps.lora '^bert/'` those whose names have that.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweeps import sweeping, zoo
from sweeps.uses import SAMPLE, checked
from sweeps.using import (
    TOLERANCE,
    Arrays,
    Found,
    arrays,
    distance,
    in_torch,
    largest,
    paired,
    split,
)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True},
    "patterns": {"use_rslora": True},
}
MOST = 8  # modules that get an adapter
EXACT = 1e-5  # of the largest element, in the same framework


def adapter_case(model: Any, inputs: Arrays, kind: str) -> Found:
    """An adapter of PEFT, taken to JAX and back."""
    import jax
    import peft
    import torch

    import fmapper

    model.eval()
    plain = copy.deepcopy(model)
    names, is_transposed = targets_of(model, inputs)
    if not names:
        return {"class": "torch", "reason": "no module that PEFT adapts"}
    how: dict[str, Any] = dict(KINDS[kind])
    if kind == "patterns":
        how |= {"rank_pattern": {names[0]: 3}, "alpha_pattern": {names[-1]: 5}}
    how["fan_in_fan_out"] = is_transposed
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=names, **how)
    theirs = peft.get_peft_model(model, config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    outputs = theirs.base_model.model(**copy.deepcopy(inputs))
    loss_of(outputs, outputs).backward()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(f"{folder}/theirs", save_embedding_layers=False)
        adapter = fmapper.load_adapter(f"{folder}/theirs")
        fmapper.save_adapter(fmapper.to_jax(adapter), f"{folder}/ours")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(plain), f"{folder}/ours").eval()
    worst: dict[str, float] = {}
    with torch.no_grad():
        back = again.base_model.model(**copy.deepcopy(inputs))
        worst["written"] = off(back, outputs) / EXACT
        merged = fmapper.to_torch(adapter).merge(plain)
        worst["merged"] = off(merged(**copy.deepcopy(inputs)), outputs) / TOLERANCE
    if kind != "dora":
        before = fmapper.to_torch(adapter).unmerge(dict(merged.named_parameters()))
        worst["unmerged"] = max(
            distance(array, parameter) / largest(parameter)
            for (_, parameter), array in zip(plain.named_parameters(), before.values(), strict=True)
        )
        worst["unmerged"] /= EXACT
    there = fmapper.to_torch(adapter)
    trained = [array.requires_grad_() for array in fmapper.fleaves(there)]
    named = there(dict(plain.named_parameters()))
    got = torch.func.functional_call(plain, named, (), copy.deepcopy(inputs))
    slopes = iter(torch.autograd.grad(loss_of(got, outputs), trained, allow_unused=True))
    slopes = fmapper.fmap(
        lambda x: torch.zeros_like(x) if (g := next(slopes)) is None else g, there
    )
    worst["gradients in torch"] = off_gradients(slopes, theirs) / TOLERANCE
    converted = fmapper.convert(plain, "jax", (), inputs)
    numbers, joined = split(arrays(inputs))

    def tuned(params: Any, numbers: Any) -> Any:
        return converted.replace(params=params).call((), joined(numbers))[0]

    def loss(adapter: Any, params: Any, numbers: Any) -> tuple[Any, Any]:
        is_merged = kind == "patterns" or converted._code.concrete
        given = adapter(params) if is_merged else params
        got = tuned(given, numbers) if is_merged else adapter.apply(tuned, given, numbers)
        return loss_of(got, outputs), got

    run = jax.value_and_grad(loss, has_aux=True)
    run = run if converted._code.concrete else jax.jit(run)
    (_, got), gradients = run(fmapper.to_jax(adapter), converted.params, numbers)
    worst["outputs"] = off(got, outputs) / TOLERANCE
    worst["gradients"] = off_gradients(gradients, theirs) / TOLERANCE
    bad = {name: value for name, value in worst.items() if not value <= 1}
    found: Found = {"worst": worst, "modules": len(names), "kind": kind}
    if bad:
        return found | {"class": sweeping.MISMATCH, "reason": f"off by {bad} of what is allowed"}
    return found | {"class": sweeping.OK}


def targets_of(model: Any, inputs: Arrays) -> tuple[list[str], bool]:
    """Modules of a model to adapt, spread over it; and whether their weights are transposed.

    Those that are called: where a model reads the weight of a layer, PEFT adapts nothing.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    called: set[int] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(id(module)))
        for module in model.modules()
    ]
    in_torch(model, inputs)
    for hook in hooks:
        hook.remove()
    for kinds in ((torch.nn.Linear,), (Conv1D,), (torch.nn.Conv2d,)):
        names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, kinds)
            and id(module) in called
            and getattr(module, "groups", 1) == 1
            and not (name.endswith("out_proj") and "amba" in type(model).__name__)  # PEFT refuses
        ]
        names = [name for name in names if not is_read_elsewhere(model, name)]
        if names:
            step = -(-len(names) // MOST)
            return names[::step], kinds == (Conv1D,)
    return [], False


def is_read_elsewhere(model: Any, name: str) -> bool:
    """Whether a weight is tied: PEFT adapts one of its places, and a merged weight has both."""
    weight = model.get_submodule(name).weight
    return (
        sum(w is weight for w in dict(model.named_parameters(remove_duplicate=False)).values()) > 1
    )


def loss_of(got: Any, like: Any) -> Any:
    """The mean square of the floating outputs."""
    return sum((one**2).mean() for one, _ in paired(got, like))


def off(got: Any, want: Any) -> float:
    """The largest difference of outputs, of the largest element of each."""
    return max(distance(a, b) / max(largest(b), 1e-30) for a, b in paired(got, want))


def off_gradients(gradients: Any, theirs: Any) -> float:
    """The largest difference of gradients of an adapter, of the largest of all of them."""
    held = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    most = max(largest(gradient) for gradient in held.values() if gradient is not None)
    worst, seen = 0.0, 0
    for name, update in gradients.updates.items():
        module = name.removesuffix(".weight")
        for part, key in (("a", "lora_A"), ("b", "lora_B"), ("magnitude", "lora_magnitude_vector")):
            array = getattr(update, part)
            if array is None:
                continue
            want = held[f"{module}.{key}.default.weight"]
            seen += 1
            size = largest(array) if want is None else distance(array.reshape(want.shape), want)
            worst = max(worst, size / most)
    return worst if seen == len(held) else float("inf")


def lora_case(name: str, kind: str) -> Found:
    """One class with one kind of adapter."""
    import torch

    from models import tiny_models

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        tiny = tiny_models.build(name.rpartition("/")[2], tiny_models.classes()[name])
    except tiny_models.CannotBuild as error:
        return {"class": "not built", "reason": str(error)}
    return checked(functools.partial(adapter_case, kind=kind), tiny.model, tiny.inputs)


def cases() -> dict[str, Callable[[], Found]]:
    """`architecture/Class`, with the kinds of adapters in turn."""
    names = [name for names in SAMPLE.values() for name in names]
    kinds = [*KINDS]
    return {
        name: functools.partial(lora_case, name, kinds[at % len(kinds)])
        for at, name in enumerate(names)
    }


def main() -> None:
    parser = sweeping.arguments(__doc__ or "", "lora")
    parser.set_defaults(seconds=300.0)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    zoo.prepare()
    import peft  # noqa: F401

    from models import tiny_models

    tiny_models.build("LlamaForCausalLM", "llama")  # what transformers imports when used
    gc.freeze()  # or each process would copy all of it
    known = sweeping.sweep(cases(), options, "Adapters of PEFT for models of transformers")
    lost = [name for name, found in known.items() if found["class"] == sweeping.MISMATCH]
    if lost:
        raise SystemExit(f"{len(lost)} of {len(known)} differ: {Path(options.out) / 'report.md'}")


if __name__ == "__main__":
    main()
