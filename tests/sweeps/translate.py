"""Model classes of transformers, made small, written as files for Flax NNX, run and compared.

`nox -s translate` runs one class of each architecture that is named below; `--all` all
architectures. Each file is run in a process without torch: outputs, gradients and five steps.

    PYTHONPATH=tests python -m sweeps.translate --out translate.json llama bert
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

KINDS = ("causal", "base")
ARCHITECTURES = (
    "llama gemma gemma2 gemma3_text mistral mixtral qwen2 qwen3 phi phi3 "
    "gpt2 gpt_neox gptj opt bloom falcon "
    "mamba bert roberta electra albert distilbert deberta deberta-v2 mpnet xlm-roberta camembert "
    "t5 bart mbart pegasus marian blenderbot whisper speech_to_text wav2vec2 hubert "
    "vit deit beit swin convnext resnet regnet mobilenet_v1 mobilenet_v2 efficientnet segformer "
    "poolformer dinov2 clip siglip blip-2 vilt layoutlm funnel squeezebert mobilebert convbert "
    "big_bird longformer reformer nystromformer yoso fnet canine splinter roformer "
    "olmo olmo2 stablelm starcoder2 cohere granite glm dbrx jamba biogpt codegen xglm "
    "gpt_bigcode gpt_neo persimmon nemotron rwkv bit cvt levit pvt van vit_mae yolos "
    "detr dpt glpn upernet videomae timesformer vivit data2vec-text data2vec-audio unispeech sew"
)


def case(name: str, kind: str, *, train: bool = True) -> dict[str, Any]:
    """One class: built, translated, and proved."""
    from fmapper.translation.source import translate
    from models import tiny_models

    warnings.simplefilter("ignore")
    began = time.monotonic()
    try:
        tiny = tiny_models.build(_class_of(name, kind), name)
    except tiny_models.CannotBuild as error:
        return {"class": "not built", "reason": str(error)}
    try:
        for shapes in ("auto", None):
            try:
                source, _, proof = translate(
                    tiny.model, "flax", (), tiny.inputs, shapes, train, proved=True
                )
                break
            except Exception:
                if shapes is None:
                    raise
    except Exception as error:  # whatever it is, it is what a user would see
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {"class": "refused", "reason": reason, "model": type(tiny.model).__name__}
    return {
        "class": "equal" if proof else "MISMATCH",
        "model": type(tiny.model).__name__,
        "errors": dict(proof.errors) if proof is not None else {},
        "lines": len(source.code.splitlines()),
        "layers": source.layers[0] / max(source.layers[1], 1),
        "dissolved": source.dissolved,
        "dynamic": shapes is not None,
        "seconds": round(time.monotonic() - began, 1),
    }


def _class_of(name: str, kind: str) -> str:
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "base": auto.MODEL_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    found = tables[kind].get(name, "")
    return found[0] if isinstance(found, tuple) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="Architectures; those of the list unless given.")
    parser.add_argument("--kind", default="base", choices=KINDS)
    parser.add_argument("--out", type=Path, default=Path("translate.json"))
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.names or ARCHITECTURES.split():
        key = f"{name}:{given.kind}"
        if key in found:
            continue
        found[key] = case(name, given.kind)
        print(key, json.dumps(found[key])[:400], flush=True)
        given.out.write_text(json.dumps(found, indent=1))
    classes = [one["class"] for one in found.values()]
    built = [one for one in classes if one != "not built"]
    print({kind: classes.count(kind) for kind in sorted(set(classes))}, f"of {len(built)} built")


if __name__ == "__main__":
    main()
