"""What configurations leave open and their models need: by the names of fields, or by an error.

Defaults of transformers are not all models: fields are None, layers are all of one kind, parts
that belong together come from different models. Nothing here is needed where the defaults run.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

Fields = dict[str, Any]

IMAGE, AUDIO, VIDEO, START = 99, 98, 97, 96  # tokens below all vocabularies

_HEAD_BIASES = ("long", "mid", "short")


def _labels(fields: Fields) -> int:
    return len(fields.get("id2label") or ()) or 2


def _stripes(_: Fields) -> Fields:
    """Kernels of 7, 5 and 3, tall, wide and square, as arguments of convolutions."""
    found: Fields = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
    for ratio, size in zip(_HEAD_BIASES, (7, 5, 3), strict=True):
        tall, wide = ([size, 1], 1, [size // 2, 0]), ([1, size], 1, [0, size // 2])
        found[f"vertical_long_to_small_conv_{ratio}ratio"] = tall
        found[f"horizontal_small_to_long_conv_{ratio}ratio"] = wide
        found[f"symmetric_conv_long_{ratio}ratio"] = ([size, size], 1, size // 2)
    return found


# What a field is given that is None, or an empty list; the first that matches.
_OPEN: tuple[tuple[str, Callable[[Fields], Any]], ...] = (
    (r"^head_dim$", lambda f: f["hidden_size"] // f["num_attention_heads"]),
    (r"^num_key_value_heads$", lambda f: f["num_attention_heads"]),
    (r"^vocab_size$", lambda _: 128),
    (r"^(n_routed|num|num_local)_experts$", lambda _: 8),
    (r"^(num_experts_per_tok|top_k_experts)$", lambda _: 2),
    (r"^(n_group|topk_group|n_shared_experts)$", lambda _: 1),
    (r"^moe_intermediate_size$", lambda _: 512),
    (r"_kv_heads$", lambda _: 1),
    (r"^decoder_num_heads$|._n_heads$", lambda _: 4),
    (r"._head_dim$", lambda _: 32),
    (r"_budget$", lambda _: 8),
    (r"_compress_ratio$", lambda _: 2),
    (r"^decoder_hidden_size$", lambda _: 512),
    (r"^decoder_depth$", lambda _: 2),
    (r"^attn_layer_indices$", lambda _: [1]),
    (r"^image_token_(id|index)$", lambda _: IMAGE),
    (r"^audio_token_(id|index)$", lambda _: AUDIO),
    (r"^video_token_(id|index)$", lambda _: VIDEO),
    (r"^clip_qkv$", lambda _: 8.0),
    (r"^class_thresholds$", lambda f: [0.5] * _labels(f)),
    (r"^class_order$", lambda f: list(range(_labels(f)))),
    (r"^downsample_rate$", lambda _: "1/2"),
    (r"^deepstack_layer_map$", lambda _: [[-2, 0], [-1, 1]]),
    (r"^projector_scale_factors$", lambda _: [1.0]),
    (r"^scale_factor_list$", lambda _: [1, 2, 4, 8]),
    (r"^num_feature_levels$", lambda _: 1),
    (r"^kernel_list$", lambda _: [3, 2, 2]),
    (r"^intraclass_block_config$", _stripes),
    (r"^(upsample|conv)_out_channels$", lambda _: [128, 128]),
    (r"^vocabulary_map$", lambda _: _codes(64)),
)


def _codes(count: int) -> dict[str, int]:
    """Tokens for the codes of pictures, whose names spell their numbers with letters."""
    names = ["".join(chr(ord("A") + int(digit)) for digit in str(n)) for n in range(count)]
    return {"<image>": IMAGE} | {f"IMGIMG{name}Z": 20 + n for n, name in enumerate(names)}


# How models of several kinds of positions read the parts of their rotary embeddings.
_SECTIONS = re.compile(r'get\("mrope_section"(?:, \[([\d, ]+)\])?\)')


def completed(fields: Fields, cls: Any) -> Fields:
    """A configuration as a dict with what its defaults leave open, for a class of models."""
    source = inspect.getsource(sys.modules[cls.__module__])
    return _completed(fields, source)


def _completed(fields: Fields, source: str) -> Fields:
    new = {k: _completed(v, source) if isinstance(v, dict) else v for k, v in fields.items()}
    for key, value in fields.items():
        if not isinstance(key, str):
            continue
        if re.search(r"(layer_types|block_type)$", key):
            new[key] = _kinds(key, value, fields, source)
        elif value is None or value == [] or (key == "num_feature_levels" and value == 0):
            made = next((make for pattern, make in _OPEN if re.search(pattern, key)), None)
            new[key] = made(new) if made else value
        elif re.search(r"^\w+_layer_period$", key):  # every second one, so that two show both
            new[key] = min(value, 2)
        elif re.search(r"^\w+_layer_offset$", key):
            new[key] = min(value, 1)
        elif key == "latent_query_num":
            new[key] = min(value, 4)
    if "out_features" in new and "out_indices" in new:
        new["out_indices"] = None  # they say the same, and names are changed below
    rope, sections = new.get("rope_parameters"), _SECTIONS.search(source)
    if rope == {} and new.get("layer_types"):  # these are asked for by the kinds of layers
        usual_rope = {"rope_type": "default", "rope_theta": 10000.0}
        new["rope_parameters"] = {kind: dict(usual_rope) for kind in set(new["layer_types"])}
    elif (
        sections and isinstance(rope, dict) and not any(isinstance(v, dict) for v in rope.values())
    ):
        usual = [int(n) for n in (sections[1] or "1, 1, 1").split(",")]
        new["rope_parameters"] = {"mrope_section": usual} | rope
    if "vocabulary_map" in new and isinstance(new.get("vq_config"), dict):
        new["vq_config"]["num_embeddings"] = len(new["vocabulary_map"]) - 1
    return new


def _kinds(key: str, value: Any, fields: Fields, source: str) -> Any:
    """Layers of two kinds in turn, where they are all of one, or of none."""
    count = fields.get("num_hidden_layers")
    if not isinstance(count, int) or (value and len(set(value)) > 1):
        return value
    if value and value[0] == "full_attention":
        return value
    compared = re.findall(rf'{key}\[[^\]]*\]\s*[=!]=\s*"(\w+)"', source)
    if not value and not compared:
        return value
    own = value[0] if value else compared[0]
    other = "full_attention" if key != "mlp_layer_types" else "dense"
    return [own if layer % 2 == 0 else other for layer in range(count)]


def fitted(fields: Fields) -> Fields:
    """The same with parts of rotary embeddings that add up, after all sizes have changed."""
    new = {k: fitted(v) if isinstance(v, dict) else v for k, v in fields.items()}
    rope = new.get("rope_parameters")
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    if sections and new.get("hidden_size") and new.get("num_attention_heads"):
        size = new.get("head_dim") or new["hidden_size"] // new["num_attention_heads"]
        half = int(size * (rope.get("partial_rotary_factor") or 1)) // 2
        rope["mrope_section"] = sections_of(half, sections)
    return new


def sections_of(half: int, sections: list[int]) -> list[int]:
    """Sections in about the same proportions with another sum; two that are equal remain so."""
    new = [part * half // sum(sections) for part in sections]
    odd = next((n for n, part in enumerate(sections) if sections.count(part) == 1), 0)
    new[odd] += half - sum(new)
    return new


# What a configuration is given that lacks a field which its model reads.
_LACKING: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    (r"^pad_token_id$", lambda _: 1),
    (r"_token_(id|index)$", lambda _: START),
    (r"^num_key_value_heads$", lambda c: c.num_attention_heads),
    (r"dropout|_rate$", lambda _: 0.0),
    (r"^rope_theta$", lambda _: 10000.0),
    (r"intermediate_size$", lambda c: c.intermediate_size),
    (r"^sliding_window$", lambda _: 8),
    (r"^spatial_merge_size$", lambda _: 2),
)


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


def mended(config: Any, error: Exception) -> bool:
    """Whether a configuration could be given what an error asks for."""
    text = str(error)
    lacking = re.search(r"'(\w+)' object has no attribute '(\w+)'", text)
    if lacking:
        owners = [part for part in parts(config) if type(part).__name__ == lacking[1]]
        return sum(_give(part, lacking[2]) for part in owners) > 0
    window = re.search(r"find a `(\w+)` argument in the config", text)
    if window:
        owners = [part for part in parts(config) if hasattr(part, "layer_types")]
        return sum(_give(part, window[1]) for part in owners) > 0
    wanted = re.search(r"`(is_decoder)=True`", text)
    if wanted and not getattr(config, wanted[1]):
        setattr(config, wanted[1], True)
        return True
    if isinstance(error, KeyError):
        return sum(_by_kind(part, error.args[0]) for part in parts(config)) > 0
    if re.search(r"\b(ne|eq)\(\) received .* \(NoneType\)", text):
        return sum(_give(part, "pad_token_id") for part in parts(config)) > 0
    split = re.search(r"sum exactly to (\d+) .*split_sizes=\[(\d+), (\d+), (\d+)\]", text)
    if split:
        sections = sections_of(int(split[1]), [int(n) for n in split.groups()[1:]])
        return sum(_cut(part, sections) for part in parts(config)) > 0
    return False


def _give(config: Any, name: str) -> bool:
    make = next((make for pattern, make in _LACKING if re.search(pattern, name)), None)
    if make is None or getattr(config, name, None) is not None:
        return False
    setattr(config, name, make(config))
    return True


def _by_kind(config: Any, kind: Any) -> bool:
    """Rotary embeddings by the kinds of layers."""
    kinds = getattr(config, "layer_types", None) or []
    rope = getattr(config, "rope_parameters", None)
    if kind not in kinds or not rope or any(isinstance(value, dict) for value in rope.values()):
        return False
    config.rope_parameters = {name: dict(rope) for name in dict.fromkeys(kinds)}
    return True


def _cut(config: Any, sections: list[int]) -> bool:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("mrope_section") == sections:
        return False
    rope["mrope_section"] = sections
    return True
