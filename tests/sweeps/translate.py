"""Model classes of libraries, made small, written as files for the other framework, and compared.

`nox -s translate` runs one class of each architecture of transformers that is named below;
`--library torchvision` and `--library timm` those of these, where they are installed, and
`--library jax` the models of Linen, NNX, Equinox and plain functions of `models/`, which become
torch's. Each file is run in a process without the framework of its source: outputs, gradients and
five steps.

    PYTHONPATH=tests python -m sweeps.translate --out translate.json llama bert
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps import flaxzoo, translated

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
# Models of torchvision -> the height and width of the images that they take here.
TORCHVISION = {
    "resnet18": 64, "resnet50": 64, "wide_resnet50_2": 64, "resnext50_32x4d": 64, "vgg11": 64,
    "vgg11_bn": 64, "alexnet": 64, "densenet121": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64,
    "mobilenet_v3_large": 64, "efficientnet_b0": 64, "efficientnet_v2_s": 64, "regnet_x_400mf": 64,
    "regnet_y_400mf": 64, "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64, "googlenet": 64,
    "inception_v3": 96, "mnasnet0_5": 64, "convnext_tiny": 64, "swin_t": 64, "swin_v2_t": 64,
    "vit_b_32": 64, "maxvit_t": 224,
}  # fmt: skip
# Models of timm -> their arguments.
TIMM: dict[str, dict[str, Any]] = {
    "mixer_s32_224": {"img_size": 64}, "deit_tiny_patch16_224": {"img_size": 64},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2},
    "cait_xxs24_224": {"img_size": 64, "depth": 2}, "coat_lite_tiny": {"img_size": 64},
    "edgenext_xx_small": {}, "convmixer_768_32": {}, "resmlp_12_224": {"img_size": 64},
    "gmlp_ti16_224": {"img_size": 64}, "poolformer_s12": {}, "repvgg_a0": {},
    "levit_128s": {"img_size": 64}, "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
    "convnextv2_atto": {}, "ghostnet_050": {}, "resnet18d": {},
    "vit_tiny_patch16_224": {"img_size": 64}, "visformer_tiny": {"img_size": 64},
    "hrnet_w18_small": {}, "res2net50_26w_4s": {}, "dpn48b": {}, "nfnet_l0": {},
}  # fmt: skip
# Models of transformers -> what makes them smaller than rules do, for proofs in 8 GB.
SMALLER: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 32}, "jamba": {"intermediate_size": 32},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    "yolos": {"image_size": [64, 96]},
}  # fmt: skip
LIBRARIES = ("transformers", "torchvision", "timm", "jax")


class CannotBuild(Exception):
    """A library has no such model."""


def build(name: str, kind: str, library: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns a small model and what it is called with.

    Raises:
        CannotBuild: It cannot be made small, or there is none.
    """
    if library == "jax":
        found: tuple[Any, tuple[Any, ...], dict[str, Any]] = flaxzoo.models()[name]()
        return found
    import torch

    torch.manual_seed(0)
    if library == "transformers":
        from models import tiny_models

        try:
            tiny = tiny_models.build(_class_of(name, kind), name)
        except tiny_models.CannotBuild as error:
            raise CannotBuild(str(error)) from error
        if name not in SMALLER:
            return tiny.model, (), tiny.inputs
        config, sides = tiny.model.config, SMALLER[name].get("image_size", [10**9, 10**9])
        for key, value in SMALLER[name].items():
            setattr(config, key, value)
        inputs = {
            key: x[..., : sides[0], : sides[1]] if key == "pixel_values" else x
            for key, x in tiny.inputs.items()
        }
        return type(tiny.model)(config).eval(), (), inputs
    if library == "torchvision":
        import torchvision

        size = TORCHVISION.get(name, 64)
        options = {"image_size": size} if name.startswith("vit") else {}
        options |= {"input_size": (size, size)} if name.startswith("maxvit") else {}
        if name in ("googlenet", "inception_v3"):
            options |= {"aux_logits": False, "init_weights": False}
        model = torchvision.models.get_model(name, weights=None, num_classes=7, **options)
    else:
        import timm

        model = timm.create_model(name, num_classes=7, **TIMM.get(name, {"img_size": 64}))
        size = 64
    return model, (torch.randn(2, 3, size, size),), {}


def case(
    name: str, kind: str, library: str = "transformers", *, train: bool = True, to: str = "flax"
) -> dict[str, Any]:
    """One class: built, translated, and proved; models of JAX to torch."""
    from fmapper import FixedSizeWarning
    from fmapper.translation.source import translate, translate_proved

    warnings.simplefilter("ignore")
    began = time.monotonic()
    target = "torch" if library == "jax" else to
    try:
        model, args, kwargs = build(name, kind, library)
    except CannotBuild as error:
        return {"class": "not built", "reason": str(error)}
    told: list[str] = []  # what a user hears of sizes that do not vary
    try:
        for shapes in ("auto", None):
            try:
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always", FixedSizeWarning)
                    reason = ""
                    given = (model, target, args, kwargs, shapes)
                    if train:
                        source, proof, reason = translate_proved(*given)
                    else:
                        source, _, proof = translate(*given, proved=True)
                told += [str(one.message) for one in heard]
                break
            except Exception as error:
                if shapes is None:
                    raise
                told.append(f"all sizes: {type(error).__name__}: {error}")
    except Exception as error:  # whatever it is, it is what a user would see
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {"class": "refused", "reason": reason, "model": type(model).__name__}
    measures = {} if library == "jax" else _measure(source.code, target, model, args, kwargs)
    return {
        "class": "equal" if proof else "MISMATCH",
        "model": type(model).__name__,
        "errors": str(proof),
        "lines": len(source.code.splitlines()),
        "layers": source.layers[0] / max(source.layers[1], 1),
        **measures,
        "dissolved": source.dissolved,
        "dynamic": shapes is not None,
        "fixed": [one[:300] for one in dict.fromkeys([*told, *source.fixed])],
        "evaluation only": reason[:300],
        "seconds": round(time.monotonic() - began, 1),
    }


def _measure(code: str, to: str, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns lines, repeats and the share of parameters that are bare in the source."""
    import torch

    from fmapper.translation.source import format_code

    modules = (f"fmapper_adapters.{one}.translation.helpers" for one in ("jax", to))
    helpers = {name for one in modules for name in importlib.import_module(one).HELPERS}

    def run() -> None:
        with torch.no_grad():
            model(*args, **kwargs)
        if hasattr(model, "config"):
            with torch.device("meta"):
                type(model)(model.config)

    code = format_code(code)
    every, used = translated.source_lines(model, run)
    bare, total = translated.bare_parameters(model)
    return {
        "bare": bare / max(total, 1),
        "class lines": translated.file_lines(code, frozenset(helpers)),
        "source lines": every,
        "source lines that ran": used,
        "repeats": translated.repeats(code),
    }


class TooSlow(BaseException):
    """A class took longer than its limit."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises `TooSlow` after a number of seconds; 0 for no limit."""

    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _class_of(name: str, kind: str) -> str:
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "base": auto.MODEL_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    # What a table does not have is in one of those for a task.
    tables_of_tasks = [
        one
        for key, one in vars(auto).items()
        if key.endswith("_MAPPING_NAMES") and not key.startswith("CONFIG")
    ]
    found = next((one[name] for one in (tables[kind], *tables_of_tasks) if name in one), "")
    return found[0] if isinstance(found, tuple) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="Architectures; those of the list unless given.")
    parser.add_argument("--kind", default="base", choices=KINDS)
    parser.add_argument("--library", default="transformers", choices=LIBRARIES)
    parser.add_argument("--out", type=Path, default=Path("translate.json"))
    parser.add_argument("--limit", type=int, default=0, help="Seconds for a class; 0 for any.")
    parser.add_argument("--to", default="flax", choices=("flax", "equinox", "jax"))
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    others = {"torchvision": TORCHVISION, "timm": TIMM, "jax": flaxzoo.models()}
    usual = others.get(given.library, ARCHITECTURES.split())
    kind = given.kind if given.library == "transformers" else given.library
    for name in given.names or usual:
        key = f"{name}:{kind}"
        if key in found:
            continue
        try:
            with at_most(given.limit):
                found[key] = case(name, given.kind, given.library, to=given.to)
        except TooSlow:
            found[key] = {"class": "too slow", "reason": f"more than {given.limit} s"}
        print(key, json.dumps(found[key])[:400], flush=True)
        given.out.write_text(json.dumps(found, indent=1))
    classes = [one["class"] for one in found.values()]
    built = [one for one in classes if one != "not built"]
    print({kind: classes.count(kind) for kind in sorted(set(classes))}, f"of {len(built)} built")


if __name__ == "__main__":
    main()
