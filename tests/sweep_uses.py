"""What is done with a converted model, for a spread of 40 classes of transformers.

Gradients, bfloat16, sizes that vary, training and greedy decoding, each against eager PyTorch.
`nox -s uses` runs all; `nox -s uses -- ':gradients$' '^bert/'` runs cases whose names have one of
these. A sweep that was stopped goes on with what has no result yet.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sweep_zoo as zoo
import sweeping

Found = dict[str, Any]
Arrays = dict[str, Any]

TOLERANCE = 1e-4  # of the largest element of an output
GRADIENT = 1e-3  # of the largest element of a gradient
LEAST = 1e-4  # of the largest gradient of the model: what is smaller is measured by that
TIMES = 4  # how much more than torch's own rounding ours may be
HALF = 2.0**-8  # the last bit of bfloat16
NEW_TOKENS = 5

# Chosen by kind before any of them was tried.
SAMPLE = {
    "decoder": [
        "gpt2/GPT2LMHeadModel",
        "llama/LlamaForCausalLM",
        "qwen3/Qwen3ForCausalLM",
        "gemma3_text/Gemma3ForCausalLM",
        "phi3/Phi3ForCausalLM",
        "falcon/FalconForCausalLM",
        "bloom/BloomForCausalLM",
        "gpt_neox/GPTNeoXForCausalLM",
    ],
    "mixture of experts": [
        "mixtral/MixtralForCausalLM",
        "qwen2_moe/Qwen2MoeForCausalLM",
        "gpt_oss/GptOssForCausalLM",
    ],
    "state space": [
        "mamba/MambaForCausalLM",
        "recurrent_gemma/RecurrentGemmaForCausalLM",
        "jamba/JambaForCausalLM",
    ],
    "encoder": [
        "bert/BertForMaskedLM",
        "deberta-v2/DebertaV2ForSequenceClassification",
        "modernbert/ModernBertForMaskedLM",
        "electra/ElectraForTokenClassification",
        "albert/AlbertForSequenceClassification",
        "xlnet/XLNetLMHeadModel",
    ],
    "encoder and decoder": [
        "t5/T5ForConditionalGeneration",
        "bart/BartForConditionalGeneration",
        "marian/MarianMTModel",
    ],
    "vision": [
        "vit/ViTForImageClassification",
        "resnet/ResNetForImageClassification",
        "convnext/ConvNextForImageClassification",
        "swin/SwinForImageClassification",
        "segformer/SegformerForSemanticSegmentation",
        "efficientnet/EfficientNetForImageClassification",
    ],
    "detection": [
        "detr/DetrForObjectDetection",
        "rt_detr/RTDetrForObjectDetection",
        "yolos/YolosForObjectDetection",
    ],
    "audio": [
        "wav2vec2/Wav2Vec2ForCTC",
        "whisper/WhisperForConditionalGeneration",
        "audio-spectrogram-transformer/ASTForAudioClassification",
    ],
    "multimodal": [
        "clip/CLIPModel",
        "llava/LlavaForConditionalGeneration",
        "paligemma/PaliGemmaForConditionalGeneration",
        "blip/BlipForConditionalGeneration",
        "qwen2_5_vl/Qwen2_5_VLForConditionalGeneration",
    ],
}
GENERATIVE = {
    *SAMPLE["decoder"],
    *SAMPLE["mixture of experts"],
    *SAMPLE["state space"],
    *SAMPLE["encoder and decoder"],
    *SAMPLE["multimodal"][1:],
    "xlnet/XLNetLMHeadModel",
    "whisper/WhisperForConditionalGeneration",
}


class CannotError(Exception):
    """What is asked cannot be done by torch either."""


def use_case(name: str, use: str) -> Found:
    """One use of one class: built, converted, used and compared."""
    import torch

    import tiny_models

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind = tiny_models.classes()[name]
    try:
        tiny = tiny_models.build(name.rpartition("/")[2], kind)
    except tiny_models.CannotBuild as error:
        return {"class": "not built", "reason": str(error)}
    about = {key: zoo.describe(value) for key, value in tiny.inputs.items()}
    return checked(USES[use], tiny.model, tiny.inputs) | {"inputs": about}


def checked(use: Callable[[Any, Arrays], Found], model: Any, inputs: Arrays) -> Found:
    """What a use finds; its class says where it did not get so far."""
    import fmapper

    began = time.monotonic()
    try:
        found = use(model, inputs)
    except fmapper.UnsupportedOpsError as error:
        found = {"class": "unsupported", "ops": sorted(error.ops), "reason": str(error)}
    except fmapper.ConversionError as error:
        export = "torch.export could not record it" in str(error)
        kind = "torch.export" if export else "refused"
        found = {"class": kind, "reason": sweeping.reason(error), "trace": sweeping.trace(error)}
    except CannotError as error:
        found = {"class": "torch", "reason": str(error)}
    return found | {"times": {"all": round(time.monotonic() - began, 1)}}


def arrays(tree: Any) -> Any:
    """Inputs as JAX arrays."""
    import torch

    import fmapper

    return fmapper.fmap(
        lambda x: fmapper.to_jax(x.detach().clone()) if torch.is_tensor(x) else x, tree
    )


def floating(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Inputs with other floating tensors."""
    import torch

    import fmapper

    return fmapper.fmap(
        lambda x: change(x) if torch.is_tensor(x) and x.is_floating_point() else x, tree
    )


def split(inputs: Arrays) -> tuple[list[Any], Callable[[list[Any]], Arrays]]:
    """The arrays among inputs, and what puts others in their places: `jax.jit` takes no strings."""
    import jax

    leaves, tree = jax.tree.flatten(inputs)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def joined(numbers: list[Any]) -> Arrays:
        given = [*leaves]
        for place, number in zip(places, numbers, strict=True):
            given[place] = number
        found: Arrays = jax.tree.unflatten(tree, given)
        return found

    return [leaves[i] for i in places], joined


def jitted(model: Any, inputs: Arrays, **options: Any) -> Any:
    """What a model gives under `jax.jit`, where it and its inputs are arguments."""
    numbers, joined = split(inputs)

    def run(model: Any, numbers: Any, options: Any) -> Any:
        return tuple(model.call((), joined(numbers), **options)[:2])

    return compiled(run, model)(model, numbers, options)


def compiled(function: Any, model: Any) -> Any:
    """A function of a converted model under `jax.jit`, unless sizes in it depend on values."""
    import jax

    return function if model._code.concrete else jax.jit(function)


def paired(got: Any, want: Any) -> Iterator[tuple[Any, Any]]:
    """Floating arrays beside the tensors that they should be; caches are left out."""
    import torch

    if torch.is_tensor(want):
        if want.is_floating_point():
            yield got, want
    elif isinstance(want, dict):
        for key, value in want.items():
            yield from paired(got[key], value)
    elif isinstance(want, list | tuple):
        for one, value in zip(got, want, strict=True):
            yield from paired(one, value)


def wide(array: Any) -> Any:
    """A tensor or an array in NumPy's float64."""
    import numpy as np
    import torch

    if torch.is_tensor(array):
        return array.detach().double().numpy()
    return np.asarray(array).astype(np.float64)


def distance(a: Any, b: Any) -> float:
    """The largest difference of finite elements; infinite where others are not finite."""
    import numpy as np

    a, b = wide(a), wide(b)
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    plain = np.isfinite(b) & (np.abs(b) < 1e30)  # the fill of masks would hide everything else
    return float(np.abs(a[plain] - b[plain]).max(initial=0))


def largest(array: Any) -> float:
    import numpy as np

    array = wide(array)
    plain = np.isfinite(array) & (np.abs(array) < 1e30)
    return float(np.abs(array[plain]).max(initial=0))


# --- gradients ----------------------------------------------------------------------------------


def gradients(model: Any, inputs: Arrays) -> Found:
    """The gradients of all parameters of a model in evaluation mode."""
    import fmapper

    model.eval()
    converted = fmapper.convert(model, "jax", (), inputs)
    return compared_gradients(model, converted, inputs)


def compared_gradients(model: Any, converted: Any, inputs: Arrays) -> Found:
    """The gradients of a converted model against those of the model in its present mode."""
    outputs, want = torch_gradients(model, inputs)
    got = jax_gradients(converted, inputs, outputs)
    missing = sorted(want.keys() ^ (got.keys() - converted.program.frozen))
    if missing:
        return {"class": "parameters", "reason": f"only one side has {missing}"}
    most = max(map(largest, want.values()))
    worst: dict[str, float] = {}
    for name, gradient in want.items():
        size = max(largest(gradient), LEAST * most, 1e-30)
        worst[name] = distance(got[name], gradient) / size
    name = max(worst, key=lambda name: worst[name])
    found: Found = {"worst": worst[name], "parameters": len(want)}
    found |= {"eager": True} if converted._code.concrete else {}
    if worst[name] <= GRADIENT:
        return found | {"class": "ok"}
    reason = f"{name}: off by {worst[name]:.2e} of the largest element"
    others = torch_gradients_otherwise(model, inputs)
    for key in [key for key in worst if not worst[key] <= GRADIENT]:
        own = max((distance(want[key], other[key]) for other in others), default=0.0)
        ours = distance(got[key], want[key])
        if ours > TIMES * own:
            size = max(largest(want[key]), 1e-30)
            reason = (
                f"{key}: off by {worst[key]:.2e} ({ours:.2e} of {size:.2e}); torch is {own:.2e} "
                "from itself, rounded otherwise"
            )
            return found | {"class": "gradient", "reason": reason}
    return found | {"class": "rounding", "reason": f"{reason}; torch's own rounding is as large"}


def weight(tensor: Any, index: int) -> Any:
    """Numbers that make a loss of an output: one for every element, 0 for the fill of masks."""
    import torch

    generator = torch.Generator().manual_seed(index)
    numbers = torch.rand(tensor.shape, generator=generator) + 0.5
    plain = tensor.detach().isfinite() & (tensor.detach().abs() < 1e30)
    return torch.where(plain, numbers, 0) / max(tensor.numel(), 1)


def torch_gradients(model: Any, inputs: Arrays, like: Any = None) -> tuple[Any, Arrays]:
    """The outputs of a model and the gradients of a weighted sum of them, by parameter."""
    import torch

    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    outputs = model(**copy.deepcopy(inputs))
    weights = [weight(w, i) for i, (_, w) in enumerate(paired(like or outputs, like or outputs))]
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for (y, _), w in zip(paired(outputs, outputs), weights, strict=True):
        if y.requires_grad:
            loss = loss + (torch.where(w != 0, y, 0) * w).sum()
    loss.backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return outputs, found


def jax_gradients(converted: Any, inputs: Arrays, outputs: Any, **options: Any) -> Arrays:
    """The gradients of the same sum in JAX, compiled."""
    import jax
    import jax.numpy as jnp

    numbers, joined = split(arrays(inputs))
    weights = [
        jnp.asarray(weight(w, i).numpy()) for i, (w, _) in enumerate(paired(outputs, outputs))
    ]

    def loss(params: Any, numbers: Any, options: Any) -> Any:
        found = converted.replace(params=params).call((), joined(numbers), **options).output
        pairs = zip(paired(found, outputs), weights, strict=True)
        return sum((jnp.where(w != 0, y, 0) * w).sum() for (y, _), w in pairs)

    gradient = compiled(jax.grad(loss), converted)
    found: Arrays = gradient(converted.params, numbers, options)
    return found


def torch_gradients_otherwise(model: Any, inputs: Arrays) -> list[Arrays]:
    """torch's gradients in float64, and with parameters that are off by a last bit."""
    import torch

    like, _ = torch_gradients(model, inputs)
    found = []
    try:
        double = copy.deepcopy(model).double()
        found.append(torch_gradients(double, floating(inputs, lambda x: x.double()), like)[1])
    except (RuntimeError, TypeError, ValueError):  # it is made for float32
        pass
    for seed in range(2):
        other = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                signs = torch.rand(parameter.shape, generator=generator) - 0.5
                if parameter.is_floating_point():
                    parameter.mul_(1 + signs.sign() * torch.finfo(parameter.dtype).eps)
        found.append(torch_gradients(other, inputs, like)[1])
    return found


# --- bfloat16 -----------------------------------------------------------------------------------


def bfloat16(model: Any, inputs: Arrays) -> Found:
    """A converted model that is cast, against torch's own model in bfloat16."""
    import fmapper

    converted = fmapper.convert(model, "jax", (), inputs)
    given = floating(inputs, lambda x: x.bfloat16())
    half = copy.deepcopy(model).bfloat16()
    return compared_halves(half, fmapper.cast(converted, "bfloat16"), given)


def bfloat16_module(model: Any, inputs: Arrays) -> Found:
    """torch's model in bfloat16, converted, against itself."""
    import fmapper

    given = floating(inputs, lambda x: x.bfloat16())
    half = copy.deepcopy(model).bfloat16()
    in_torch(half, given)
    return compared_halves(half, fmapper.convert(half, "jax", (), given), given)


def in_torch(model: Any, inputs: Arrays) -> Any:
    """What a module gives.

    Raises:
        CannotError: It gives an error.
    """
    import torch

    torch.manual_seed(3)
    try:
        with torch.no_grad():
            return model(**copy.deepcopy(inputs))
    except Exception as error:
        raise CannotError(sweeping.reason(error)) from error


def compared_halves(half: Any, converted: Any, given: Arrays) -> Found:
    """Both against float32 with the same rounded parameters: how much farther ours is."""
    want = in_torch(half, given)
    exact = in_torch(copy.deepcopy(half).float(), floating(given, lambda x: x.float()))
    got = jitted(converted, arrays(given))[0]
    worst, own, reason, dtypes = 0.0, 0.0, "", []
    pairs = zip(paired(got, want), paired(want, exact), strict=True)
    for i, ((ours, theirs), (_, right)) in enumerate(pairs):
        size = max(largest(right), 1e-6)
        error, least = distance(theirs, right) / size, distance(ours, right) / size
        ratio = least / max(error, HALF / TIMES)
        own = max(own, error)
        if ratio > worst:
            worst = ratio
            reason = f"output {i}: {least:.2e} from float32, torch's is {error:.2e}"
        if str(ours.dtype) != str(theirs.dtype).removeprefix("torch."):
            dtypes.append(f"output {i} is {ours.dtype}, torch's {theirs.dtype}")
    found = {"worst": worst, "torch": own, "dtypes": dtypes}
    if worst > TIMES:
        return found | {"class": "MISMATCH", "reason": reason}
    return found | {"class": "ok"}


# --- sizes that vary ----------------------------------------------------------------------------

TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "bbox")
TEXTS = (*TEXT, "decoder_input_ids", "decoder_attention_mask")


def resized(inputs: Arrays, batch: int | None, more: int) -> Arrays:
    """Inputs of another batch, and texts that are longer or shorter by some ordinary tokens."""
    import torch

    found = {}
    for name, value in inputs.items():
        x = value
        if torch.is_tensor(x) and batch is not None:
            x = torch.cat([x] * (batch // len(x) + 1))[:batch]
        if torch.is_tensor(x) and name in TEXTS and x.ndim >= 2:
            # The last token stays: some models look for the end. Pictures are at the beginning.
            extra = x[:, -1 - more : -1] if more > 0 else x[:, :0]
            x = torch.cat([x[:, : x.shape[1] - 1 + min(more, 0)], extra, x[:, -1:]], 1)
        found[name] = x
    return found


def dynamic(model: Any, inputs: Arrays) -> Found:
    """One conversion for many batches and lengths of texts."""
    import torch

    import fmapper

    tensors = {name: x for name, x in inputs.items() if torch.is_tensor(x)}
    whole = len({len(x) for x in tensors.values()}) == 1  # or rows are no batch
    has_text = any(name in TEXTS for name in tensors)
    if not whole and not has_text:
        raise CannotError("its inputs have neither a batch nor a text")
    if whole and len(next(iter(tensors.values()))) < 2:
        inputs = resized(inputs, 2, 0)  # sizes of 1 stay as they are
        in_torch(model, inputs)
    auto = torch.export.Dim.AUTO
    shapes = {}
    for name, x in inputs.items():
        dims = {0: auto} if whole else {}
        if name in TEXTS and x.ndim >= 2:
            dims[1] = auto
        shapes[name] = dims if torch.is_tensor(x) else None
    converted = fmapper.convert(model, "jax", (), inputs, dynamic_shapes=shapes)
    sizes = [(3, 5), (5, -3), (1, 2)] if has_text else [(3, 0), (5, 0), (1, 0)]
    worst, done, notes = 0.0, [], []
    for batch, more in sizes:
        one = resized(inputs, batch if whole else None, more)
        try:
            want = in_torch(model, one)
        except CannotError as error:
            notes.append(f"torch at {batch}, {more}: {error}")
            continue
        try:
            got = converted.call((), arrays(one)).output
        except fmapper.ProgramInputError as error:
            fixed = fixed_by_torch(model, inputs, shapes)
            if not fixed:
                raise
            return {"class": "torch.export", "reason": f"it fixes {', '.join(fixed)}: {error}"}
        off, where = zoo.difference(got, want)
        worst = max(worst, off)
        done.append((batch, more))
        if off > TOLERANCE:
            reason = f"batch {batch}, {more} tokens more: {where}: off by {off:.2e}"
            own = zoo.rounding(model, (), one)
            kind = "rounding" if off <= TIMES * own else "MISMATCH"
            return {"class": kind, "reason": f"{reason}; torch is {own:.2e} from itself"}
    if not done:
        raise CannotError("; ".join(notes))
    return {"class": "ok", "worst": worst, "sizes": done, "notes": notes}


def fixed_by_torch(model: Any, inputs: Arrays, shapes: Any) -> list[str]:
    """The sizes that may vary and that torch.export fixes nevertheless."""
    import torch

    from fmapper_adapters.torch import _foreign

    given = copy.deepcopy(inputs)
    with _foreign.known(model, given):
        exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False)
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    return [
        f"dimension {dim} of {name}"
        for name, dims in shapes.items()
        for dim in dims or ()
        if name in nodes and isinstance(nodes[name].meta["val"].shape[dim], int)
    ]


# --- training -----------------------------------------------------------------------------------


def training(model: Any, inputs: Arrays) -> Found:
    """With dropout: the same for the same key. Without: torch's outputs and running statistics."""
    import jax
    import numpy as np

    import fmapper

    noisy = with_dropout(copy.deepcopy(model), 0.1).train()
    converted = fmapper.convert(noisy, "jax", (), inputs, train=True)
    keys = [jax.random.key(i) for i in (0, 0, 1)] if converted.is_random else []
    options = {"key": keys[0]} if keys else {}
    outputs = in_torch(copy.deepcopy(noisy), inputs)
    given = arrays(inputs)
    drawn = [jitted(converted, given, key=key)[0] for key in keys]
    if drawn:
        same, other = (
            all(np.array_equal(a, b, equal_nan=True) for a, b in both_floating(drawn[0], one))
            for one in drawn[1:]
        )
        if not same or other:
            return {"class": "MISMATCH", "reason": f"same key same {same}, other key same {other}"}
    found = jax_gradients(converted, inputs, outputs, **options)
    bad = [name for name, x in found.items() if not np.isfinite(wide(x)).all()]
    if bad:
        return {"class": "gradient", "reason": f"not finite: {bad}"}
    return {"random": bool(keys)} | without_randomness(model, inputs)


def both_floating(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """The floating arrays of two outputs of JAX."""
    for x, y in zip(zoo.parts(a), zoo.parts(b), strict=True):
        if "float" in str(x.dtype):
            yield x, y


def without_randomness(model: Any, inputs: Arrays) -> Found:
    """A step of training with no dropout against torch's: outputs, buffers, gradients."""
    import jax
    import numpy as np

    import fmapper

    plain = with_dropout(copy.deepcopy(model), 0.0).train()
    converted = fmapper.convert(plain, "jax", (), inputs, train=True)
    options = {}
    stepped = copy.deepcopy(plain)
    want = in_torch(stepped, inputs)
    if converted.is_random:  # something else than dropout: it gets torch's numbers
        stepped = copy.deepcopy(plain)
        want, drawn = zoo.with_draws(stepped, (), inputs)
        zoo.replay(converted._code, drawn)
        options["key"] = jax.random.key(0)
    got, after = jitted(converted, arrays(inputs), **options)
    worst, where = zoo.difference(got, want)
    for name, buffer in stepped.named_buffers():
        if name in after.buffers:
            error = zoo.array_difference(np.asarray(after.buffers[name]), buffer, name)
            worst, where = max((worst, where), (error, name))
    if worst > TOLERANCE:
        return {"class": "MISMATCH", "reason": f"{where}: off by {worst:.2e} in training"}
    found: Found = {"class": "ok", "worst": worst}
    names = [type(inner).__name__ for inner in plain.modules()]
    if any("BatchNorm" in name for name in names):
        moved = [n for n, b in plain.named_buffers() if "running" in n and n in after.buffers]
        found["statistics"] = len(moved)
        if not options:
            found |= compared_gradients(plain, converted, inputs)
    return found


def with_dropout(model: Any, rate: float) -> Any:
    """A model that drops out nothing, or, where it would drop out nothing, something.

    For nothing, layers are not left out, and nothing is masked, either.
    """
    for inner in model.modules():
        for name, value in [*vars(inner).items()]:
            set_rate(inner, name, value, rate)
        if type(inner).__name__.startswith("Dropout"):
            set_rate(inner, "dropout.p", inner.p, rate)
    if not rate:
        todo, seen = (
            [model.config, *(m.config for m in model.modules() if hasattr(m, "config"))],
            [],
        )
        while todo:
            config = todo.pop()
            if any(config is one for one in seen):
                continue
            seen.append(config)
            for name, value in [*vars(config).items()]:
                set_rate(config, name, value, rate)
                if hasattr(value, "to_dict"):
                    todo.append(value)
    return model


def set_rate(owner: Any, name: str, value: Any, rate: float) -> None:
    nothing = not rate and ("drop" in name or name in ("mask_time_prob", "mask_feature_prob"))
    some = rate and "dropout" in name and not value
    if type(value) is float and (nothing or some):
        setattr(owner, name.removeprefix("dropout."), rate)


# --- greedy decoding ----------------------------------------------------------------------------

CACHES = ("past_key_values", "cache_params", "mems", "past_buckets_states")


@dataclass
class Recorded:
    """A call of a module: what it got and gave, with caches as they were then."""

    module: Any
    given: Arrays
    gave: Any


def greedy(model: Any, inputs: Arrays) -> Found:
    """Greedy decoding in JAX with the model's own cache, against `generate` of torch.

    `generate` says which modules are called and what they get. Of this the loop in JAX takes what
    does not depend on what is generated (masks, positions); tokens, caches and what an encoder
    gives are its own.
    """
    import jax.numpy as jnp
    import torch

    import fmapper

    calls, tokens = generated(model, inputs)
    decoder = max(
        (call.module for call in calls), key=lambda m: sum(call.module is m for call in calls)
    )
    steps = [call for call in calls if call.module is decoder]
    cache = next((name for name in CACHES if steps[-1].given.get(name) is not None), None)
    if len(steps) < 2 or cache is None:
        raise CannotError("its generate uses no cache")
    if steps[-1].gave.get(cache) is None:
        raise CannotError(f"its outputs have no {cache}: the state is in attributes of modules")
    known: dict[int, Any] = {}
    for call in calls:
        if call.module is not decoder:
            converted = fmapper.convert(call.module, "jax", (), call.given)
            gave = converted.call((), translated(call.given, known)).output
            known |= {id(t): x for x, t in zip(parts(gave), parts(call.gave), strict=True)}
    steps[0].given.pop(cache, None)  # an empty one: it makes that itself
    start, step = (
        fmapper.convert(decoder, "jax", (), call.given, dynamic_shapes=shapes)
        for call, shapes in zip(steps[:2], (None, "auto"), strict=True)
    )
    ids = "decoder_input_ids" if "decoder_input_ids" in steps[1].given else "input_ids"
    token, state, found, worst, programs = None, None, [], 0.0, 2
    for turn, call in enumerate(steps):
        given = translated({n: x for n, x in call.given.items() if turn == 0 or n != cache}, known)
        if turn:
            token = token[:, None].astype(given[ids].dtype)
            if given[ids].shape[1] > 1:  # some tokens again, and a place for the next one
                row = jnp.concatenate([arrays(inputs[ids]), *(x[:, None] for x in found)], 1)
                token = row[:, 1 - given[ids].shape[1] :]
                token = jnp.concatenate([token, given[ids][:, -1:]], 1)
            given |= {cache: as_long_as(call.given[cache], state), ids: token}
        try:
            output = (step if turn else start).call((), given).output
        except fmapper.ProgramInputError as error:
            if turn < 2 or "sizes are fixed" not in str(error):
                raise
            # The cache counts in Python, so torch records it for this length only.
            programs += 1
            output = fmapper.convert(decoder, "jax", (), call.given).call((), given).output
        state = output[cache]
        worst = max(worst, zoo.difference(output["logits"], call.gave["logits"])[0])
        token = output["logits"][:, -1].argmax(-1)
        found.append(token)
        if worst > TOLERANCE:
            return {"class": "MISMATCH", "reason": f"logits of step {turn} are off by {worst:.2e}"}
    got = torch.tensor(jnp.stack(found, 1).tolist())
    want = tokens[:, -got.shape[1] :]
    kind = "ok" if torch.equal(got, want) else "MISMATCH"
    reason = "" if kind == "ok" else f"{got.tolist()} instead of {want.tolist()}"
    return {"class": kind, "reason": reason, "worst": worst, "programs": programs}


def as_long_as(theirs: Any, state: Any) -> Any:
    """Plain arrays of a cache cut to the length of torch's, which `generate` may have cut."""
    if not isinstance(theirs, tuple) or not all(hasattr(x, "shape") for x in theirs):
        return state
    return tuple(x[: len(y)] for x, y in zip(state, theirs, strict=True))


def generated(model: Any, inputs: Arrays) -> tuple[list[Recorded], Any]:
    """The calls of modules that `generate` makes, the outermost ones, and the tokens it gives."""
    import torch
    from transformers import GenerationMixin

    config = getattr(model, "generation_config", None)
    if config is None:
        raise CannotError("it has no generate")
    config.eos_token_id = None
    if config.decoder_start_token_id is None:
        config.decoder_start_token_id = 2
    config.forced_eos_token_id = None
    config.pad_token_id = 0
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        setattr(config, name, None)
    calls: list[Recorded] = []
    depth: list[Any] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        if not depth:
            names = list(inspect.signature(module.forward).parameters)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            frozen = {n: copy.deepcopy(x) if n in CACHES else x for n, x in given.items()}
            calls.append(Recorded(module, frozen, None))
        depth.append(module)

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        depth.pop()
        if not depth:
            calls[-1].gave = output

    hooks = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        )
    ]
    own = type(model).__name__.startswith("Blip")  # its generate is that of its decoder
    call = model.generate if own else functools.partial(GenerationMixin.generate, model)
    given = {n: x for n, x in inputs.items() if n != "decoder_attention_mask"}
    try:
        with torch.no_grad():
            tokens = call(**given, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS)
    except Exception as error:
        raise CannotError(f"generate: {sweeping.reason(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return calls, tokens


def parts(tree: Any) -> list[Any]:
    """The arrays in outputs, caches left out."""
    if isinstance(tree, dict):
        return [x for key, value in tree.items() if key not in CACHES for x in parts(value)]
    if isinstance(tree, list | tuple):
        return [x for value in tree for x in parts(value)]
    return [tree] if hasattr(tree, "shape") else []


def translated(tree: Any, known: dict[int, Any]) -> Any:
    """Inputs as JAX arrays; of those that a converted module has given, its own."""
    import torch

    import fmapper

    def one(x: Any) -> Any:
        if not torch.is_tensor(x):
            return x
        return known[id(x)] if id(x) in known else fmapper.to_jax(x.detach().clone())

    return fmapper.fmap(one, tree)


USES: dict[str, Callable[[Any, Arrays], Found]] = {
    "gradients": gradients,
    "bfloat16": bfloat16,
    "bfloat16_module": bfloat16_module,
    "dynamic": dynamic,
    "train": training,
    "greedy": greedy,
}


def cases() -> dict[str, Callable[[], Found]]:
    """`architecture/Class:use`, all classes of one use before those of the next."""
    names = [name for names in SAMPLE.values() for name in names]
    return {
        f"{name}:{use}": functools.partial(use_case, name, use)
        for use in USES
        for name in names
        if not use.startswith("greedy") or name in GENERATIVE
    }


def main() -> None:
    parser = sweeping.arguments(__doc__ or "", "uses")
    parser.set_defaults(seconds=300.0)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    zoo.prepare()
    import tiny_models

    tiny_models.build("LlamaForCausalLM", "llama")  # what transformers imports when used
    gc.freeze()  # or each process would copy all of it
    known = sweeping.sweep(cases(), options, "Uses of converted models of transformers")
    with (Path(options.out) / "report.md").open("a") as file:
        file.write(table(known))


def table(known: dict[str, Found]) -> str:
    """A row for every class, a column for every use."""
    lines = ["## By class", "", "| | " + " | ".join(USES) + " |", "|---" * (len(USES) + 1) + "|"]
    for kind, names in SAMPLE.items():
        lines.append(f"| **{kind}** |" + " |" * len(USES))
        for name in names:
            found = [known.get(f"{name}:{use}", {}).get("class", "") for use in USES]
            lines.append(f"| {name.rpartition('/')[2]} | " + " | ".join(found) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
