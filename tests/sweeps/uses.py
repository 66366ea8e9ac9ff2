"""What is done with a converted model, for a spread of 40 classes of transformers.

Gradients, bfloat16, sizes that vary, training and greedy decoding, each against eager PyTorch.
`nox -s uses` runs all; `nox -s uses -- ':gradients$' '^bert/'` runs cases whose names have one of
these. A sweep that was stopped goes on with what has no result yet.
"""

from __future__ import annotations

import functools
import gc
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweeps import sweeping, zoo
from sweeps.uses_bfloat16 import bfloat16, bfloat16_module
from sweeps.uses_dynamic import dynamic
from sweeps.uses_greedy import greedy
from sweeps.uses_training import gradients, training
from sweeps.using import Arrays, CannotError, Found

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

USES: dict[str, Callable[[Any, Arrays], Found]] = {
    "gradients": gradients,
    "bfloat16": bfloat16,
    "bfloat16_module": bfloat16_module,
    "dynamic": dynamic,
    "train": training,
    "greedy": greedy,
}


def use_case(name: str, use: str) -> Found:
    """One use of one class: built, converted, used and compared."""
    import torch

    from models import tiny_models

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
    from models import tiny_models

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
