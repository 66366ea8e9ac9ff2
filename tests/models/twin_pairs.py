"""Pairs of models that were written by different people, for `transfer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import transformers

import fmapper
from models import twin_decoders as decoders
from models import twin_encoders as encoders
from models import twin_images as images
from models import twin_layouts as layouts
from models import twin_traps as traps
from support.hub_folders import saved


class Twins(NamedTuple):
    """Two models of one architecture.

    Attributes:
        source: One with weights.
        target: One that may have no memory.
        inputs: What both take, as NumPy arrays; None if only arrays are there.
        is_right: Tells of a target that was filled whether it has the right weights.
    """

    source: Any
    target: Any
    inputs: tuple[Any, ...] | None
    is_right: Callable[[Any], bool]


Make = Callable[[], Twins]
IDS = np.array([[5, 9, 2, 31, 7, 0]], np.int32)
_RANDOM = np.random.default_rng(0)
IMAGES = _RANDOM.normal(size=(2, 3, 8, 8)).astype("f4")
STEPS = _RANDOM.normal(size=(2, 5, 6)).astype("f4")
VECTORS = _RANDOM.normal(size=(2, 8)).astype("f4")
SEQUENCE = _RANDOM.normal(size=(2, 5, 8)).astype("f4")
LONGER = _RANDOM.normal(size=(2, 6, 8)).astype("f4")
MEL = _RANDOM.normal(size=(1, 8, 20)).astype("f4")


def with_values(model: Any) -> Any:
    """Returns a model with random weights that all have an effect."""
    random = np.random.default_rng(1)
    values: dict[int, Any] = {}  # by identity: tied arrays have the same
    weights = {}
    is_torch = isinstance(model, torch.nn.Module)
    saved = set(model.state_dict()) if is_torch else set(fmapper.state(model))
    for name, array in fmapper.state(model).items():
        if "float" in str(array.dtype) and name in saved:  # not tables of angles
            if id(array) not in values:
                values[id(array)] = _values(name, array, random)
            weights[name] = values[id(array)]
    if is_torch:
        return fmapper.load_state(model.eval(), weights, strict=False)
    return fmapper.materialize(model, weights)


def _values(name: str, array: Any, random: Any) -> Any:
    values = random.normal(size=tuple(array.shape)) * 0.3
    if "var" in name:
        values = 0.5 + np.abs(values)
    elif len(array.shape) == 1 and name.endswith(("weight", "scale", "gamma")):
        values = 1 + values
    return values.astype("f4")


def run(model: Any, inputs: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Returns the output of a model of any framework."""
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            out = model(*for_source(model, inputs))
        out = getattr(out, "logits", getattr(out, "last_hidden_state", out))
        return out.numpy()
    arrays = for_source(model, inputs)
    if isinstance(model, tuple):
        call = getattr(model[0], "apply", model[0])  # of Linen, or a function of parameters
        return np.asarray(call(model[1], *arrays))
    return np.asarray(model(*arrays))


def for_source(model: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns inputs as arrays of the framework of a model."""
    if isinstance(model, torch.nn.Module):
        tensors = map(torch.from_numpy, inputs)
        return tuple(x.long() if x.dtype == torch.int32 else x for x in tensors)
    return tuple(map(jnp.asarray, inputs))


def _gives(model: Any, inputs: tuple[Any, ...]) -> Callable[[Any], bool]:
    """Returns whether a twin gives what a model gives, on inputs that `transfer` has not seen."""
    random = np.random.default_rng(7)
    others = tuple(
        random.integers(0, x.max() + 1, x.shape).astype(x.dtype)
        if x.dtype.kind == "i"
        else random.normal(size=x.shape).astype(x.dtype)
        for x in inputs
    )

    def is_right(filled: Any) -> bool:
        if isinstance(filled, torch.nn.Module):
            filled.eval()
        wanted = run(model, others)
        return bool(np.abs(run(filled, others) - wanted).max() < 1e-3 * np.abs(wanted).max())

    return is_right


def _pair(source: Callable[[], Any], target: Callable[[], Any], *inputs: Any) -> Make:
    def make() -> Twins:
        model = with_values(source())
        return Twins(model, target(), inputs, _gives(model, inputs))

    return make


def _arrays(source: Callable[[], Any], target: Callable[[], Any], *inputs: Any) -> Make:
    """Only the arrays of the source, as a checkpoint has them."""

    def make() -> Twins:
        model = with_values(source())
        saved = model.state_dict() if isinstance(model, torch.nn.Module) else fmapper.state(model)
        return Twins(fmapper.to_numpy(dict(saved)), target(), None, _gives(model, inputs))

    return make


def _folder(name: str) -> Make:
    """The names in a folder of the Hub, and those of the class."""

    def make() -> Twins:
        cls, more = FOLDERS[name]
        config = getattr(transformers, f"{name}Config")(**{**_SMALL, **more})
        model = with_values(getattr(transformers, cls)(config))
        wanted = fmapper.state(model)
        target = getattr(transformers, cls)(config)

        def is_right(filled: Any) -> bool:
            return all(torch.equal(x, wanted[name]) for name, x in fmapper.state(filled).items())

        return Twins(saved(model), target, None, is_right)

    return make


_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
FOLDERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {**_MOE, "head_dim": 8}),
    "Qwen2Moe": ("Qwen2MoeForCausalLM", {**_MOE, "shared_expert_intermediate_size": 24}),
    "Olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Phimoe": ("PhimoeForCausalLM", {"num_local_experts": 4}),
    "Jamba": ("JambaForCausalLM", {"num_experts": 4, "use_mamba_kernels": False}),
    "Bert": ("BertForMaskedLM", {}),
    "Llama": ("LlamaForCausalLM", {}),
}

_D, _E, _I, _L, _T = decoders, encoders, images, layouts, traps
_of = images.shapes_of
PAIRS: dict[str, Make] = {
    # Hugging Face to one's own classes
    "llama -> nnx": _pair(_D.llama, _D.decoder, IDS),
    "llama -> nnx, heads folded": _pair(_D.llama, lambda: _D.decoder(_D.HeadsAttention), IDS),
    "llama -> nnx, qkv fused": _pair(_D.llama, lambda: _D.decoder(_D.FusedAttention), IDS),
    "llama -> nnx, gate and up fused": _pair(
        _D.llama, lambda: _D.decoder(_D.Attention, _D.FusedMlp), IDS
    ),
    "llama -> nnx, square": _pair(
        lambda: _D.llama(intermediate_size=32), lambda: _D.decoder(wide=32), IDS
    ),
    "llama, tied -> nnx": _pair(lambda: _D.llama(tie_word_embeddings=True), _D.tied_decoder, IDS),
    "llama, 5 layers -> nnx": _pair(
        lambda: _D.llama(num_hidden_layers=5), lambda: _D.decoder(layers=5), IDS
    ),
    "llama -> linen": _pair(_D.llama, lambda: _D.linen_decoder(scanned=False), IDS),
    "llama -> linen, scanned": _pair(_D.llama, _D.linen_decoder, IDS),
    "llama -> equinox": _pair(_D.llama, _D.eqx_decoder, IDS),
    "llama -> original": _pair(_D.llama, _D.Original, IDS),
    "mixtral -> nnx": _pair(_D.mixtral, _D.moe_decoder, IDS),
    "gpt2 -> nanogpt": _pair(_D.gpt2, _D.NanoGpt, IDS),
    "gpt2 -> nnx": _pair(_D.gpt2, _D.gpt, IDS),
    "bert -> nnx": _pair(_E.bert, _E.nnx_bert, IDS),
    "bert -> linen": _pair(_E.bert, _E.linen_bert, IDS),
    "t5 -> nnx": _pair(_E.t5, _E.nnx_t5, IDS),
    "whisper -> nnx": _pair(_E.WhisperEncoder, _E.audio_encoder, MEL),
    "vit -> nnx": _pair(_E.Vit, _E.nnx_vit, IMAGES),
    "vit -> nnx, qkv fused": _pair(_E.Vit, lambda: _E.nnx_vit(fused=True), IMAGES),
    "vit -> equinox": _pair(_E.Vit, _E.eqx_vit, IMAGES),
    # other directions
    "original -> nnx": _pair(_D.Original, _D.decoder, IDS),
    "original -> linen, scanned": _pair(_D.Original, _D.linen_decoder, IDS),
    "nanogpt -> nnx": _pair(_D.NanoGpt, _D.gpt, IDS),
    "nnx -> llama": _pair(_D.decoder, _D.llama, IDS),
    "linen, scanned -> nnx": _pair(_D.linen_decoder, _D.decoder, IDS),
    "equinox -> llama": _pair(_D.eqx_decoder, _D.llama, IDS),
    "nnx, heads folded -> linen": _pair(
        lambda: _D.decoder(_D.HeadsAttention), lambda: _D.linen_decoder(scanned=False), IDS
    ),
    "nnx -> bert": _pair(_E.nnx_bert, _E.bert, IDS),
    "linen -> gpt2": _pair(_D.gpt, _D.gpt2, IDS),
    # images
    "resnet -> nnx": _pair(_I.ResNet, lambda: _of(_I.NnxResNet), IMAGES),
    "resnet -> linen": _pair(_I.ResNet, _I.linen_resnet, IMAGES),
    "nnx -> resnet": _pair(lambda: _of(_I.NnxResNet), _I.ResNet, IMAGES),
    "convnext -> nnx": _pair(_I.ConvNeXt, lambda: _of(_I.NnxConvNeXt), IMAGES),
    "mixer -> linen": _pair(_I.Mixer, _I.linen_mixer, IMAGES),
    "efficientnet -> nnx": _pair(_I.EfficientNet, lambda: _of(_I.NnxEfficientNet), IMAGES),
    "unet -> nnx": _pair(_I.UNet, lambda: _of(_I.NnxUNet), IMAGES),
    # recurrent cells
    "lstm -> equinox": _pair(_I.Lstm, lambda: _of(_I.EqxLstm), STEPS),
    "lstm -> nnx": _pair(_I.Lstm, lambda: _of(_I.NnxLstm), STEPS),
    "gru -> equinox": _pair(_I.Gru, lambda: _of(_I.EqxGru), STEPS),
    "equinox -> nnx, lstm": _pair(lambda: _of(_I.EqxLstm), lambda: _of(_I.NnxLstm), STEPS),
    "nnx -> lstm": _pair(lambda: _of(_I.NnxLstm), _I.Lstm, STEPS),
    "equinox -> lstm": _pair(lambda: _of(_I.EqxLstm), _I.Lstm, STEPS),
    "equinox -> gru": _pair(lambda: _of(_I.EqxGru), _I.Gru, STEPS),
    # layouts of their own
    "experts -> stacked": _pair(_L.Experts, lambda: _of(_L.NnxExperts), SEQUENCE),
    "stacked -> experts": _pair(lambda: _of(_L.NnxExperts), _L.Experts, SEQUENCE),
    "neox -> nnx": _pair(_L.NeoX, lambda: _of(_L.NnxHeads), SEQUENCE),
    "nnx -> neox": _pair(lambda: _of(_L.NnxHeads), _L.NeoX, SEQUENCE),
    "deconvolution -> linen": _pair(_L.Upsample, _L.linen_upsample, IMAGES),
    "linen -> deconvolution": _pair(_L.linen_upsample, _L.Upsample, IMAGES),
    "grouped -> equinox": _pair(_L.Grouped, lambda: _of(_L.EqxGrouped), IMAGES),
    "grouped -> nnx": _pair(_L.Grouped, lambda: _of(_L.NnxGrouped), IMAGES),
    "gates in another order": _pair(_L.Gates, _L.OtherGates, STEPS),
    "gate and up -> named for the gate": _pair(_L.Gated, lambda: _of(_L.NnxGated), SEQUENCE),
    "neighbours -> halves": _pair(_L.Neighbours, lambda: _of(_L.Halves), SEQUENCE),
    # policies
    "policy -> nnx": _pair(_I.Policy, lambda: _of(_I.NnxPolicy), VECTORS),
    "policy -> linen": _pair(_I.Policy, _I.linen_policy, VECTORS),
    "policy -> equinox": _pair(_I.Policy, lambda: _of(_I.EqxPolicy), VECTORS),
    "linen -> policy": _pair(_I.linen_policy, _I.Policy, VECTORS),
    # names and shapes that mislead
    "trap: norms, gate, projections": _pair(_T.Trap, lambda: _of(_T.NnxTrap), SEQUENCE),
    "trap: equal layers": _pair(_T.Chain, lambda: _of(_T.Reversed), VECTORS),
    "trap: two towers": _pair(_T.Towers, lambda: _of(_T.NnxTowers), SEQUENCE, LONGER),
    "trap: gate and up": _pair(_T.Gated, lambda: _of(_T.NnxGated), VECTORS),
    # arrays alone
    "arrays of llama -> nnx": _arrays(_D.llama, _D.decoder, IDS),
    "arrays of original -> llama": _arrays(_D.Original, _D.llama, IDS),
    "arrays of nnx -> linen": _arrays(_D.decoder, lambda: _D.linen_decoder(scanned=False), IDS),
    "arrays of resnet -> nnx": _arrays(_I.ResNet, lambda: _of(_I.NnxResNet), IMAGES),
    # the tables of transformers
    **{f"folder of {name} -> class": _folder(name) for name in FOLDERS},
}
