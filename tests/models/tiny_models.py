"""Every model class of transformers, small: configurations shrunk by rule, random weights, inputs.

No list of sizes is kept here. The defaults of a configuration are shrunk by one factor, so that
what has to be equal, or to add up, or to divide something, still does. Where a model does not take
the result, a milder rule is tried, until it computes something in eager PyTorch.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from models import tiny_configs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
modeling_auto = transformers.models.auto.modeling_auto
CONFIG_MAPPING = transformers.models.auto.configuration_auto.CONFIG_MAPPING

LARGEST = 80_000_000  # parameters


@dataclass(frozen=True)
class Rule:
    """How much a configuration is shrunk."""

    divide: int
    layers: int | None
    images: int | None
    vocabulary: bool = True
    heads: bool = False  # fewer heads instead of smaller ones
    least: int = 64  # no smaller size is divided
    complete: bool = False  # with what the defaults leave open, and inputs as errors ask for them


RULES = (
    Rule(8, 2, 4),
    Rule(8, 2, 11),  # sides of 110 patches; others stay
    Rule(4, 2, 4),
    Rule(8, 4, None),
    Rule(8, 2, 4, heads=True),
    Rule(16, 2, None),
    Rule(32, 2, 4, heads=True),
    Rule(2, 2, 2),
    Rule(1, 2, 4),
    Rule(8, None, None),
    Rule(1, 2, None, vocabulary=False),
    Rule(32, 2, 4),
)
# For those that none of these makes.
MORE_RULES = tuple(
    replace(rule, complete=True)
    for rule in (
        *RULES,
        Rule(8, 2, 4, least=8),
        Rule(4, 2, 4, least=4),
        Rule(8, 10, 4),
        Rule(8, 4, 4),
        Rule(1, None, None),
        Rule(1, None, 2),
        Rule(32, 2, 4, heads=True, vocabulary=False),
    )
)


# --- which classes there are --------------------------------------------------------------------


def classes() -> dict[str, str]:
    """`architecture/Class` for every class in the automatic mappings -> its configuration's name.

    One class of each architecture first, then a second one of each: a sweep that is stopped early
    has seen all architectures rather than all classes of some.
    """
    found: dict[str, list[str]] = {}
    owners: dict[str, list[str]] = {}
    mappings = [
        mapping
        for name, mapping in vars(modeling_auto).items()
        if name.endswith("_MAPPING_NAMES") and not name.startswith("CONFIG")
    ]
    # The plain model comes last: the others contain it.
    mappings.sort(key=lambda mapping: mapping is modeling_auto.MODEL_MAPPING_NAMES)
    for mapping in mappings:
        for kind, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                owners.setdefault(name, []).append(kind)
    for name, kinds_of in owners.items():
        found.setdefault(max(kinds_of, key=lambda kind: _fit(kind, name)), []).append(name)
    kinds = sorted(found)
    random.Random(0).shuffle(kinds)
    most = max(len(names) for names in found.values())
    return {
        f"{kind}/{found[kind][turn]}": kind
        for turn in range(most)
        for kind in kinds
        if turn < len(found[kind])
    }


def _fit(kind: str, name: str) -> int:
    """How much of an architecture's name a class begins with: some classes serve several."""
    plain = re.sub("[^a-z0-9]", "", kind.lower())
    return len(plain) if name.lower().startswith(plain) else 0


# --- configurations -----------------------------------------------------------------------------

_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|depth|num_(en|de)coder_layers"
    r"|.*num_hidden_layers|num_.*_layers|layers|num_blocks|.*_depth|num_hidden_groups"
    r"|resampler_depth|num_mel_attn_blocks|num_layers_per_stack)$"
)
_STAGES = ("out_features", "out_indices", "stage_names")
_SHARED = "num_kv_shared_layers"  # the last ones, which take the keys of the others
_NO_LAYERS = re.compile(r"num_(upsampling|feat_extract|adapter|lstm|residual|nextn|dense)")
_SIZES = re.compile(
    r"(hidden_size|_dims?|_dimension|_size|^dim|d_model|d_ff|d_kv|d_inner|n_embd|n_inner|channels?|_rank|width"
    r"|_features|embed_dims?|hidden_sizes?|conv_dim|_units|filters|_expand_dim|^emb_dim|embed_dim"
    r"|embedding_size|mrope_section|_feats?|query_pre_attn_scalar|feature_sizes|_channel_list"
    r"|upsample_groups|embed_dim_per_stage|dim_head|d_head|pos_feats|mid_channels)(_global|_per_layer_input)?$"
)
_NO_SIZES = re.compile(
    r"vocab|image|patch|kernel|window|chunk|block_size|pool|stride|crop|tile|group_size|resolution"
    r"|spatial_shape|sample_size|^(num|in)_channels$|roi_size|grid|merge|codebook_size|mel|in_chans"
    r"|max_size|shape_size|coordinate_size|buckets|input_channels|sampling|bin|spec_size|input_feat"
)
_IMAGES = re.compile(
    r"(^|_)(image_size|img_size|image_sizes)$|^image_height$|^image_width$|pinpoints$"
)
_HEADS = re.compile(r"heads$")
_HEAD_SIZES = re.compile(r"head_dim$|mrope_section|query_pre_attn_scalar|^d_kv$|d_head$")
_MORE_SIZES = re.compile(r"^(d_latents|num_filters|n_filters)$")
_MORE_LAYERS = re.compile(r"^num_self_attends_per_block$")
_QUERIES = re.compile(r"^num_(object_)?queries$")
_STEPS = re.compile(r"^max_text_length$|^structure_max_|max_decode")  # each is recorded apart
_EXPERTS = re.compile(
    r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num)$"
)
_TOKENS = re.compile(r"(token_ids?|token_index|token_indices|suppress_tokens|_index|_token)$")
_PLACES = re.compile(
    r"(indexes|indices|hook_ids|_idxs?|feature_layers?|first_k_dense_replace|_layer_ids?)$"
)
_PERIODS = re.compile(r"_layer_(period|offset)$")  # every so manieth layer is of another kind


def _first_stages(key: str, value: Any, count: int) -> Any:
    """What a backbone gives, where it has no more stages than this."""
    if key == "out_indices" or not value:
        return None  # it follows from the features
    if key == "stage_names":
        return value[: count + 1]
    if not all(isinstance(name, str) for name in value):
        return value  # numbers of something else
    numbers = [re.fullmatch(r"stage(\d+)", name) for name in value]
    found = [min(int(n[1]), count) if n else 0 for n in numbers]
    return ["stem" if n == 0 else f"stage{n}" for n in dict.fromkeys(found)]


def shrunk(config: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """A configuration as a dict, made small."""
    tokens: dict[int, int] = {}
    if rule.vocabulary:
        _number_tokens(config, tokens)
    return _Shrinker(rule, tokens).walk(config)


def _number_tokens(config: Any, tokens: dict[int, int]) -> None:
    """New numbers for all special tokens that lie beyond a small vocabulary."""
    for key, value in config.items():
        if isinstance(value, dict):
            _number_tokens(value, tokens)
        elif not isinstance(key, str):
            continue
        elif _TOKENS.search(key):
            for one in value if isinstance(value, list | tuple) else [value]:
                if type(one) is int and one >= 100:
                    tokens.setdefault(one, 100 + len(tokens))


def _is_per_layer(value: Any) -> bool:
    """Whether it has configurations by the number of a layer."""
    return isinstance(value, dict) and any(
        str(key).isdigit() and isinstance(inner, dict) for key, inner in value.items()
    )


class _Shrinker:
    def __init__(self, rule: Rule, tokens: dict[int, int]) -> None:
        self.rule = rule
        self.tokens = tokens

    def walk(self, config: dict[str, Any]) -> dict[str, Any]:
        counts = {k: v for k, v in config.items() if self._counts_layers(str(k), v)}
        count = max(counts.values(), default=0)
        kept = self._kept_layers(config, count)
        new = {}
        for key, value in config.items():
            if not isinstance(key, str):
                new[key] = value
            elif key == _SHARED and kept and value:
                new[key] = sum(layer >= count - value for layer in kept)
            elif kept and _is_per_layer(value):
                inner = {int(k): self.walk(v) for k, v in value.items()}
                new[key] = {n: inner[k] for n, k in enumerate(kept) if k in inner}
            elif isinstance(value, dict):
                new[key] = self.walk(value)
            elif key in _STAGES and len(kept) < count:
                new[key] = _first_stages(key, value, len(kept))
            elif key in counts:
                new[key] = min(value, len(kept) if kept else value)
            elif (
                isinstance(value, list | tuple)
                and len(value) in counts.values()
                and kept
                and not key.endswith("hook_ids")  # numbers of layers, not one for each
            ):
                whole = len(value) == max(counts.values())
                new[key] = [value[i] for i in kept] if whole else list(value)[: len(kept)]
            else:
                new[key] = self.value(key, value, len(kept))
        tokens, vision = new.get("mm_tokens_per_image"), new.get("vision_config")
        if tokens and vision and vision.get("image_size") and vision.get("patch_size"):
            side = vision["image_size"] // vision["patch_size"]  # its patches are averaged
            new["mm_tokens_per_image"] = min(tokens, max(side // 2, 1) ** 2)
        return new

    def _counts_layers(self, key: str, value: Any) -> bool:
        named = _LAYERS.match(key) and not _NO_LAYERS.match(key)
        if self.rule.least < Rule.least:
            named = named or _MORE_LAYERS.match(key)
        return bool(named) and type(value) is int and self.rule.layers is not None and value > 0

    def _kept_layers(self, config: dict[str, Any], count: int) -> list[int]:
        """Layers of every kind that there is."""
        if not self.rule.layers or not count:
            return []
        kinds = config.get("layer_types") or config.get("layers_block_type") or [None] * count
        if len(kinds) != count:
            kinds = [None] * count
        chosen = {kinds.index(kind) for kind in dict.fromkeys(kinds)}
        own = count - min(config.get(_SHARED) or 0, count)
        chosen |= {own + kinds[own:].index(kind) for kind in dict.fromkeys(kinds[own:])}
        for layer in range(count):
            if len(chosen) >= min(self.rule.layers, count):
                break
            chosen.add(layer)
        return sorted(chosen)

    def value(self, key: str, value: Any, layers: int) -> Any:
        if isinstance(value, list | tuple):
            if key == "depths" or key.endswith("_depths"):
                return [min(v, 2) if type(v) is int else v for v in value]
            return [self.value(key, one, layers) for one in value]
        if type(value) is not int:
            return value
        if "vocab_size" in key or key in ("n_vocab", "num_embeddings", "vocab_offset"):
            small = 128 + 2 * len(self.tokens)
            return min(value, small) if self.rule.vocabulary else value
        if _TOKENS.search(key):
            return self.tokens.get(value, value)
        if not layers and re.search("feature_layer|hook_ids", key):
            layers = self.rule.layers or 0  # those of a configuration inside
        if _PLACES.search(key) and layers:
            return min(value, layers - 1) if value > 0 else max(value, -layers)
        if _PERIODS.search(key) and layers:
            return min(value, layers - key.endswith("offset"))
        if _EXPERTS.search(key):
            return min(value, 16)  # two for each of eight groups
        if _QUERIES.search(key) or _STEPS.search(key):
            return min(value, 20)
        if key == "context_length" and value >= 4096:
            return value // 32
        if self.rule.heads and _HEADS.search(key):
            return max(value // self.rule.divide, 1)
        if self.rule.heads and _HEAD_SIZES.search(key):
            return value
        if _IMAGES.search(key) and self.rule.images and value >= 192:
            return self._image(value)
        if _SIZES.search(key) and not _NO_SIZES.search(key):
            if key.endswith("intermediate_size"):  # nothing has to divide it
                return max(value // self.rule.divide // 8, 1) * 8
            return self._size(value, 8 if key == "mrope_section" else self.rule.least)
        if self.rule.least < Rule.least and _MORE_SIZES.search(key):
            return self._size(value, self.rule.least)
        if self.rule.least < Rule.least and "vocab" in key:
            return min(value, 128)
        if self.rule.complete and key == "patch_size" and value >= 192 and self.rule.images:
            return self._image(value)
        return value

    def _size(self, value: int, least: int) -> int:
        divide = self.rule.divide
        return value // divide if value >= least and value % divide == 0 else value

    def _image(self, value: int) -> int:
        assert self.rule.images
        if value % self.rule.images == 0:
            return value // self.rule.images
        return value


# --- models -------------------------------------------------------------------------------------


@dataclass
class Tiny:
    """A small model with inputs that it takes, and what it gives for them."""

    model: torch.nn.Module
    inputs: dict[str, Any]
    outputs: Any
    rule: Rule


class NoneFits(Exception):
    """No inputs fit a model; has the error of each set of them."""

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__(str(errors[0]))
        self.errors = errors


class CannotBuild(Exception):
    """No rule made a model that runs; says what the first one met."""


def build(name: str, kind: str) -> Tiny:
    """The model of a class, its inputs and its outputs.

    Raises:
        CannotBuild: It runs in no size that is small enough.
    """
    cls = getattr(transformers, name, None)
    if cls is None:
        raise CannotBuild("is not there: a dependency is missing")
    if getattr(cls, "is_dummy", False):
        raise CannotBuild("needs a package that is not installed")
    try:
        defaults = _defaults(cls, kind)
    except Exception as error:  # of every configuration its own
        raise CannotBuild(f"its configuration has no valid defaults: {_line(error)}") from error
    if cls.forward is torch.nn.Module.forward:
        raise CannotBuild("has no forward")
    reasons: list[str] = []
    found = _built(cls, kind, defaults, RULES, reasons)
    if found is None and not any("requires the" in reason for reason in reasons):
        complete = tiny_configs.completed(defaults, cls)
        found = _built(cls, kind, complete, MORE_RULES, reasons)
    if found is None:
        raise CannotBuild("\n".join(reasons))
    return found


def _built(
    cls: Any, kind: str, defaults: dict[str, Any], rules: tuple[Rule, ...], reasons: list[str]
) -> Tiny | None:
    """What the first rule makes that makes something."""
    # With pictures or sounds if some size takes them, else without.
    for media in (True, False):
        seen: list[Any] = []
        for rule in rules[:5] if media and not rules[0].complete else rules:
            small = shrunk(copy.deepcopy(defaults), rule)
            if small in seen:
                continue
            seen.append(small)
            model = None
            try:
                model = _model(cls, kind, small, complete=rule.complete)
                if media and not _is_multimodal(model):
                    break
                return Tiny(*_running(model, media=media, complete=rule.complete), rule)
            except Exception as error:
                where = "forward: " if model else ""
                reasons.append(f"{rule}: {where}{_line(error)}")
    return None


def _running(model: torch.nn.Module, *, media: bool, complete: bool) -> tuple[Any, Any, Any]:
    """A model, inputs and outputs; its configuration may get what the model asks of it."""
    for _ in range(4 if complete else 0):
        try:
            return model, *run_somehow(model, media=media, complete=True)
        except NoneFits as found:
            if not any(tiny_configs.mended(model.config, error) for error in found.errors):
                raise found.errors[0] from found
        model = _made(type(model), model.config)
    return model, *run_somehow(model, media=media, complete=complete)


def _line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return " ".join(text.split())[:300]


def _defaults(cls: Any, kind: str) -> dict[str, Any]:
    config: dict[str, Any] = _config_class(cls, kind)().to_dict()
    if config.get("prediction_length", 0) is None:  # the one size without a default
        config["prediction_length"] = 4
    text, vision = config.get("text_config"), config.get("vision_config")
    if isinstance(text, dict) and isinstance(vision, dict):
        # Their defaults can be those of two models that do not go together.
        into = "out_hidden_size" if "out_hidden_size" in vision else "hidden_size"
        if (into != "hidden_size" or "embed_dim" in vision) and into in vision:
            vision[into] = text.get("hidden_size", vision[into])
    for number, key in enumerate(("image_token_id", "audio_token_id", "video_token_id")):
        if config.get(key, 0) is None:
            config[key] = 99 - number
    _replace_timm(config)
    if config.get("languages") and config.get("default_language", 0) is None:
        config["default_language"] = config["languages"][0]
    if config.get("num_experts_per_tok", 0) is None:
        config["num_experts_per_tok"] = 2
    if config.get("head_dim", 0) is None and config.get("num_attention_heads"):
        # Not every configuration works it out where it has none.
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def _replace_timm(config: dict[str, Any]) -> None:
    """A backbone of transformers instead of one of another package: both are ResNet."""
    for key, value in config.items():
        if not isinstance(value, dict):
            continue
        if value.get("model_type") == "timm_backbone":
            config[key] = transformers.ResNetConfig(
                num_channels=value.get("num_channels", 3), out_indices=value.get("out_indices")
            ).to_dict()
        else:
            _replace_timm(value)


def _config_class(cls: Any, kind: str) -> Any:
    return getattr(cls, "config_class", None) or CONFIG_MAPPING[kind]


def _model(cls: Any, kind: str, small: dict[str, Any], *, complete: bool) -> torch.nn.Module:
    config = _config_class(cls, kind).from_dict(tiny_configs.fitted(small) if complete else small)
    for _ in range(6 if complete else 0):
        try:
            return _made(cls, config)
        except Exception as error:
            if not tiny_configs.mended(config, error):
                raise
    return _made(cls, config)


def _made(cls: Any, config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise CannotBuild(f"{count:,} parameters")
    torch.manual_seed(0)
    model = cls(config).eval()
    randomise(model)
    return model


def randomise(model: torch.nn.Module) -> None:
    """Weights that matter: the usual ones leave attention flat and normalisation the identity."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                fan_in = parameter.numel() / parameter.shape[0]
                parameter.copy_(noise / math.sqrt(max(fan_in, 1)))
            else:
                parameter.add_(0.05 * noise.to(parameter.dtype))
        for name, buffer in model.named_buffers():
            noise = torch.rand(buffer.shape, generator=generator)
            if name.endswith("running_mean"):
                buffer.copy_(noise - 0.5)
            elif name.endswith("running_var"):
                buffer.copy_(noise + 0.5)


# --- inputs -------------------------------------------------------------------------------------

SEQUENCE = 12


class Inputs:
    """Inputs for the arguments of a forward, by their names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.text = self._sub("text_config", "llm_config", "language_config", "thinker_config")
        self.vision = self._sub(
            "vision_config", "backbone_config", "vision_encoder_config", "encoder"
        )
        self.audio = self._sub("audio_config", "speech_config", "encoder_config", "audio_encoder")
        self.batch = 1 if "vision" in str(type(self.config)).lower() else 2
        self.pictures = 1 if self.text else 0  # for one text, that has the tokens of one
        self.tokens: dict[str, int] = {}
        self.tried: set[int] = set()
        self.generator = torch.Generator().manual_seed(2)

    def _sub(self, *names: str) -> Any:
        return next((c for n in names if (c := getattr(self.config, n, None)) is not None), None)

    def get(self, *names: str, default: Any = None, of: Any = None) -> Any:
        for config in (of, self.config, self.text, self.vision, self.audio):
            for name in names:
                value = getattr(config, name, None) if config is not None else None
                if value is not None:
                    return value
        return default

    def make(self, name: str) -> Any:
        """A value for an argument.

        Raises:
            KeyError: Nothing is known of this argument.
        """
        maker: Callable[[], Any] | None = getattr(self, f"make_{name}", None)
        if maker is None:
            raise KeyError(name)
        return maker()

    def ints(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    # text

    def make_input_ids(self) -> torch.Tensor:
        vocabulary = self.get("vocab_size", of=self.text, default=100)
        vocabulary = vocabulary if isinstance(vocabulary, int) else 100
        rows = self.batch
        if "Musicgen" in type(self.model).__name__ and not self.text:
            rows *= self.get("num_codebooks", default=1)
        ids = self.ints(min(vocabulary, 90), rows, SEQUENCE, low=min(10, vocabulary // 2))
        at = 1
        for key, count in self.tokens.items():
            special = torch.full((self.batch, count), self.get(key))
            ids = torch.cat([ids[:, :at], special, ids[:, at:]], 1)
        end = self.get("eos_token_id", of=self.text)
        if type(end) is int and 0 <= end < vocabulary:
            ids[:, -1] = end  # some models look for it
        return ids

    def make_attention_mask(self) -> torch.Tensor:
        return torch.ones_like(self.make_input_ids())

    def make_decoder_input_ids(self) -> torch.Tensor:
        return self.make_input_ids()[:, :7]

    def make_labels(self) -> torch.Tensor:
        return self.make_input_ids()

    def make_token_type_ids(self) -> torch.Tensor:
        return torch.zeros_like(self.make_input_ids())

    def make_mm_token_type_ids(self) -> torch.Tensor:
        return (self.make_input_ids() == self.get("image_token_id", default=-1)).long()

    def make_langs(self) -> torch.Tensor:
        return torch.zeros_like(self.make_input_ids())

    def make_bbox(self) -> torch.Tensor:
        corner = self.ints(50, *self.make_input_ids().shape, 2)
        return torch.cat([corner, corner + 20], -1)

    def make_image(self) -> torch.Tensor:
        return self.make_pixel_values()

    def make_boxes(self) -> torch.Tensor:
        return self.make_bbox().float()

    def make_perm_mask(self) -> torch.Tensor:
        return torch.zeros(self.batch, SEQUENCE, SEQUENCE)

    # images

    def _image_size(self) -> tuple[int, int]:
        size = self.get(
            "image_size", "img_size", "input_size", "pretrain_image_size", of=self.vision
        )
        if isinstance(size, list | tuple):
            return (size[0], size[-1])
        if isinstance(size, dict):
            return (size["height"], size["width"])
        return (size, size) if isinstance(size, int) and size >= 8 else (64, 64)

    def _channels(self) -> int:
        found = self.get("num_channels", "in_channels", "in_chans", of=self.vision, default=3)
        return found if isinstance(found, int) and found < 10 else 3

    def make_pixel_values(self) -> torch.Tensor:
        return self.floats(self.pictures or self.batch, self._channels(), *self._image_size())

    def make_pixel_values_videos(self) -> torch.Tensor:
        frames = self.get("num_frames", "frames_per_clip", of=self.vision, default=4)
        return self.floats(1, frames, self._channels(), *self._image_size())

    def make_image_sizes(self) -> torch.Tensor:
        return torch.tensor([self._image_size()])

    def make_pixel_mask(self) -> torch.Tensor:
        return torch.ones(self.batch, *self._image_size(), dtype=torch.long)

    def make_task_inputs(self) -> torch.Tensor:
        return self.ints(90, self.batch, self.get("task_seq_len", default=77))

    def make_prompt_pixel_values(self) -> torch.Tensor:
        return self.make_pixel_values()

    def make_prompt_masks(self) -> torch.Tensor:
        return self.make_pixel_values()

    # sound

    def make_input_values(self) -> torch.Tensor:
        if self.get("sampling_rate") and self.get("audio_channels"):
            return self.floats(self.batch, self.get("audio_channels"), 2400)
        if self.get("max_length") and self.get("num_mel_bins") and self.get("time_stride"):
            return self.floats(self.batch, self.get("max_length"), self.get("num_mel_bins"))
        return self.floats(self.batch, 4000)

    def make_input_features(self) -> torch.Tensor:
        bins = self.get(
            "num_mel_bins", "n_mels", "input_feat_size", "feature_size", "input_dim", of=self.audio
        )
        positions = self.get("max_source_positions", of=self.audio, default=None)
        if self.get("conv_kernel_sizes", "left_max_position_embeddings"):
            return self.floats(self.batch, 64, bins or 80)
        if positions:
            return self.floats(self.batch, bins or 80, positions * 2)
        return self.floats(self.batch, 64, bins or 80)

    def make_audio_codes(self) -> torch.Tensor:
        count = self.get("num_quantizers", "n_codebooks", "num_codebooks", default=8)
        return self.ints(self.get("codebook_size", default=64), self.batch, count, 10)

    def make_spectrogram(self) -> torch.Tensor:
        bins = self.get("model_in_dim", "num_mel_bins", "upsampler_in_dim", default=80)
        return self.floats(self.batch, 20, bins)

    # the rest

    def make_past_values(self) -> torch.Tensor:
        length = self.get("context_length", default=32)
        size = self.get("num_input_channels", "input_size", default=1)
        lags = max(self.get("lags_sequence", default=[0]) or [0])
        if getattr(self.config, "cardinality", None) is not None:
            shape = (self.batch, length + lags)
            return self.floats(*shape) if size == 1 else self.floats(*shape, size)
        return self.floats(self.batch, length, size)

    def make_past_time_features(self) -> torch.Tensor:
        count = self.get("num_time_features", default=0)
        return self.floats(*self.make_past_values().shape[:2], count)

    def make_past_observed_mask(self) -> torch.Tensor:
        return torch.ones_like(self.make_past_values())

    def make_states(self) -> torch.Tensor:
        return self.floats(self.batch, 6, self.get("state_dim", default=17))

    def make_actions(self) -> torch.Tensor:
        return self.floats(self.batch, 6, self.get("act_dim", default=4))

    def make_rewards(self) -> torch.Tensor:
        return self.floats(self.batch, 6, 1)

    def make_returns_to_go(self) -> torch.Tensor:
        return self.floats(self.batch, 6, 1)

    def make_timesteps(self) -> torch.Tensor:
        return torch.arange(6).expand(self.batch, 6).contiguous()

    def make_inputs(self) -> torch.Tensor:
        return self.make_input_ids()

    def make_hidden_states(self) -> torch.Tensor:
        return self.floats(self.batch, SEQUENCE, self.get("hidden_size", "d_model"))

    def make_inputs_embeds(self) -> torch.Tensor:
        size = self.get("hidden_size", "d_model", "n_embd", of=self.text)
        return self.floats(*self.make_input_ids().shape, size)

    def make_encoder_hidden_states(self) -> torch.Tensor:
        size = self.get("encoder_hidden_size", "hidden_size", "d_model", of=self.text)
        return self.floats(self.batch, 5, size)

    def make_query_embeds(self) -> torch.Tensor:
        return self.floats(1, 4, self.get("hidden_size"))

    def make_visual_feats(self) -> torch.Tensor:
        return self.floats(self.batch, 5, self.get("visual_feat_dim"))

    def make_visual_pos(self) -> torch.Tensor:
        return self.floats(self.batch, 5, self.get("visual_pos_dim"))

    def make_input_points(self) -> torch.Tensor:
        return self.floats(self.batch, 1, 2, 2).abs() * 10

    def make_image_grid_thw(self) -> torch.Tensor:
        return torch.tensor([[1, 4, 4]])

    make_grid_thw = make_image_grid_thw

    def make_merge_sizes(self) -> torch.Tensor:
        return torch.tensor([self.get("spatial_merge_size", default=2)])

    def make_qformer_input_ids(self) -> torch.Tensor:
        return self.ints(90, self.batch, 5, low=10)

    def make_latents(self) -> torch.Tensor:
        return self.floats(self.batch, self.get("hidden_size"), 6)

    def make_input_features_mask(self) -> torch.Tensor:
        shape = self.make_input_features().shape
        return torch.ones(self.batch, max(shape[1:]), dtype=torch.long)

    def make_audio_mel(self) -> torch.Tensor:
        return self.floats(self.batch, 64, self.get("input_feat_size", default=80))

    def make_audio_mel_mask(self) -> torch.Tensor:
        return torch.zeros(self.batch, 64, dtype=torch.bool)

    def make_classes_input_ids(self) -> torch.Tensor:
        return self.ints(90, 2 * self.batch, 5, low=10)

    def make_classes_attention_mask(self) -> torch.Tensor:
        return torch.ones_like(self.make_classes_input_ids())

    def make_classes_structure(self) -> torch.Tensor:
        return torch.full((self.batch,), 2)

    def make_tasks_input_ids(self) -> torch.Tensor:
        return self.ints(90, self.batch, 5, low=10)

    def make_tasks_attention_mask(self) -> torch.Tensor:
        return torch.ones_like(self.make_tasks_input_ids())

    def make_state(self) -> torch.Tensor:
        return self.floats(1, self.get("max_state_dim", default=32))

    # Patches of a picture one after the other, which goes with a grid of 4 by 4.
    def patches(self) -> torch.Tensor:
        size = self.get("patch_size", of=self.vision)
        depth = self.get("temporal_patch_size", of=self.vision, default=1)
        return self.floats(16, self._channels() * depth * size * size)


class MoreInputs(Inputs):
    """Inputs by names that few models use."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.parameters = inspect.signature(model.forward).parameters
        self.text = self.text or self._sub("model_config")
        both = getattr(self.config, "vlm_config", None)
        if both is not None:
            self.text, self.vision = both.text_config, both.vision_config

    def make_attention_mask(self) -> torch.Tensor:
        if "states" in self.parameters:
            return torch.ones(self.batch, 6, dtype=torch.long)
        return super().make_attention_mask()

    def make_decoder_input_ids(self) -> torch.Tensor:
        ids = super().make_decoder_input_ids()
        channels = getattr(getattr(self.config, "decoder_config", None), "num_channels", None)
        return ids if channels is None else ids[..., None].expand(-1, -1, channels) % 60

    def make_pixel_values(self) -> torch.Tensor:
        size = self.get("patch_size", of=self.vision)
        if "bool_masked_pos" in self.parameters and self.get("tubelet_size"):
            frames = self.get("num_frames")
            return self.floats(self.batch, frames, self._channels(), *self._image_size())
        if {"pixel_position_ids", "spatial_shapes"} & set(self.parameters):
            return self.floats(self.batch, self._side() ** 2, self._channels() * size**2)
        return super().make_pixel_values()

    def make_input_features(self) -> torch.Tensor:
        if "padding_cache" in self.parameters:  # sound as it comes in, as columns
            return self.floats(self.batch, self.get("num_mel_bins", of=self.audio), 8 * SEQUENCE)
        return super().make_input_features()

    def make_inputs(self) -> torch.Tensor:
        encoder = getattr(self.config, "encoder", None)
        return self.make_input_values() if hasattr(encoder, "conv_dim") else super().make_inputs()

    def _side(self) -> int:
        return 2 * self.get("pooling_kernel_size", default=2)

    def make_pixel_position_ids(self) -> torch.Tensor:
        side = torch.arange(self._side())
        return torch.cartesian_prod(side, side).expand(self.batch, -1, -1).contiguous()

    def make_spatial_shapes(self) -> torch.Tensor:
        return torch.full((self.batch, 2), self._side())

    def make_pixel_attention_mask(self) -> torch.Tensor:
        if "spatial_shapes" in self.parameters:
            return torch.ones(self.batch, self._side() ** 2, dtype=torch.long)
        return torch.ones(self.batch, 4, dtype=torch.bool)  # four pictures for each text

    def make_state(self) -> torch.Tensor:
        return self.floats(self.batch, self.get("max_state_dim", default=32))

    def make_target_sizes(self) -> torch.Tensor:
        size = self.get("patch_size", of=self.vision)
        return torch.tensor([[side // size for side in self._image_size()]] * self.batch)

    def make_bool_masked_pos(self) -> torch.Tensor:
        size = self.get("patch_size", of=self.vision)
        height, width = self._image_size()
        frames = self.get("num_frames", default=1) // self.get("tubelet_size", default=1)
        count = frames * (height // size) * (width // size)
        return (torch.arange(count) % 2 == 0).expand(self.batch, -1).contiguous()

    def make_flattened_patches(self) -> torch.Tensor:
        size = self.get("patch_embed_hidden_size", of=self.vision)
        side = torch.arange(1, 5)
        places = torch.cartesian_prod(side, side).expand(self.batch, -1, -1)
        return torch.cat([places, self.floats(self.batch, 16, size)], -1)

    def make_image_attention_mask(self) -> torch.Tensor:
        frames = self.get("num_frames", "frames_per_clip", of=self.vision, default=4)
        return torch.ones(self.batch, SEQUENCE, frames, dtype=torch.long)

    def make_image_embeds_position_mask(self) -> torch.Tensor:
        mask = torch.zeros_like(self.make_input_ids())
        mask[:, 1 : 1 + self.get("latent_query_num", default=4)] = 1
        return mask

    def make_is_longer(self) -> torch.Tensor:
        return torch.zeros(self.batch, 1, dtype=torch.bool)

    def make_noise_embeds(self) -> torch.Tensor:
        return self.make_hidden_states()

    make_context_hidden_states = make_noise_embeds

    def make_marks(self) -> torch.Tensor:
        return torch.arange(2, 8)[None]

    def make_num_options(self) -> torch.Tensor:
        return torch.full((1, 6), 2)

    def make_question_type_ids(self) -> torch.Tensor:
        return torch.zeros(1, 6, dtype=torch.long)

    def make_noise(self) -> torch.Tensor:
        size = self.get("max_action_dim", default=32)
        return self.floats(self.batch, self.get("chunk_size", default=8), size)

    def make_timestep(self) -> torch.Tensor:
        return self.floats(self.batch).abs()


def _is_multimodal(model: torch.nn.Module) -> bool:
    """Whether it takes text and something else."""
    parameters = inspect.signature(model.forward).parameters
    return "input_ids" in parameters and any(name in parameters for name in _MEDIA)


_MEDIA = ("pixel_values", "input_features", "input_values")


def run_somehow(
    model: torch.nn.Module, *, media: bool, complete: bool = False
) -> tuple[dict[str, Any], Any]:
    """Inputs with which a model runs, and its outputs; the first error where there are none.

    With `media` only text with something else counts.
    """
    errors: list[Exception] = []
    for inputs in candidates(model, MoreInputs if complete else Inputs):
        if media and not ("input_ids" in inputs[0] and any(name in inputs[0] for name in _MEDIA)):
            continue
        try:
            return _repaired(model, inputs)
        except Exception as error:
            errors.append(error)
    if not errors:
        unknown = [name for name in required(model) if not hasattr(MoreInputs, f"make_{name}")]
        raise ValueError(f"nothing is known of its arguments {unknown}")
    if complete:
        raise NoneFits(errors)
    raise errors[0]


def _repaired(model: torch.nn.Module, inputs: Inputs | dict[str, Any]) -> tuple[Any, Any]:
    made, maker = inputs  # type: ignore[misc]
    for _ in range(6):
        try:
            outputs = run(model, made)
        except Exception as error:
            had = made
            made = _more(had, maker, error)
            if made is None and isinstance(maker, MoreInputs):
                made = _reshaped(had, maker, error)
            if made is None:
                raise
            continue
        tensors = [x for x in flat(outputs) if torch.is_tensor(x)]
        if not tensors:
            raise ValueError("no tensor comes out")
        return made, outputs
    raise ValueError("no inputs fit")


def run(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        return model(**copy.deepcopy(inputs))


def _more(made: dict[str, Any], maker: Inputs, error: Exception) -> dict[str, Any] | None:
    """More inputs, as an error asks for them."""
    text = str(error)
    counts = re.search(r"tokens:? *(\d+).*features:? *(\d+)", text, re.DOTALL)
    if counts and "input_ids" in made and len(maker.tried) < 2:
        want = int(counts[2])
        size = maker.get("hidden_size", "d_model", of=maker.text, default=1)
        if not want % size and want // size not in maker.tried:
            want //= size  # it counts numbers
        maker.tried.add(want)
        kind = "video" if "ideo" in text else "audio" if "udio" in text else "image"
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            if maker.get(key) is not None:
                maker.tokens[key] = max(want // made["input_ids"].shape[0], 1)
                return {
                    name: maker.make(name) if "ids" in name or "mask" in name else made[name]
                    for name in made
                }
        return None
    left = [
        name
        for name in inspect.signature(maker.model.forward).parameters
        if name not in made and hasattr(maker, f"make_{name}")
    ]
    asked = [name for name in left if re.search(rf"\b{name}\b", text)]
    if not asked and "NoneType" in text:
        asked = [name for name in left if re.search("mask|sizes|grid|length", name)]
    if not asked:
        return _resized(made, maker, text)
    if "exactly one" in text.lower() and made:
        return None
    return made | {asked[0]: maker.make(asked[0])}


def _resized(made: dict[str, Any], maker: Inputs, text: str) -> dict[str, Any] | None:
    """Numbers with as many features as an error says that are wanted."""
    pairs = [
        *re.findall(r"cannot be multiplied \(\d+x(\d+) and (\d+)x", text),
        *re.findall(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", text),
        *[(had, want) for want, had in re.findall(r"have (\d+) channels, but got (\d+)", text)],
    ]
    for had, want in pairs:
        for name, value in made.items():
            if not torch.is_tensor(value) or not value.is_floating_point():
                continue
            if int(had) in value.shape[1:]:
                sizes = list(value.shape)
                sizes[1 + sizes[1:].index(int(had))] = int(want)
                return made | {name: maker.floats(*sizes)}
    return None


def _reshaped(made: dict[str, Any], maker: Inputs, error: Exception) -> dict[str, Any] | None:
    """Inputs of the shapes, or of the lengths, that an error asks for."""
    text = str(error)
    special = re.search(r"at least one (\w+) token", text)
    if special and f"{special[1]}_token_id" not in maker.tokens:
        maker.tokens[f"{special[1]}_token_id"] = 1
        return {n: maker.make(n) if "ids" in n or "mask" in n else made[n] for n in made}
    if "NoneType" in text:
        known = [n for n in inspect.signature(maker.model.forward).parameters if n not in made]
        known = [n for n in known if hasattr(maker, f"make_{n}")]
        asked = next((n for n in known if re.search("longer|actions|returns|timestep|noise", n)), 0)
        return made | {asked: maker.make(asked)} if asked else None
    for name, value in made.items():
        if torch.is_tensor(value):
            found = _other_shape(value, text)
            if found is not None and list(found) != list(value.shape):
                whole = not value.is_floating_point()
                new = made | {name: maker.ints(60, *found) if whole else maker.floats(*found)}
                for other, had in made.items():
                    if other.startswith(name) and other.endswith("mask"):
                        new[other] = had.new_ones(found[0], max(found[1:]))
                    elif torch.is_tensor(had) and had.shape == value.shape and had.ndim == 4:
                        new[other] = maker.floats(*found)  # pictures beside each other
                return new
    return None


def _other_shape(value: torch.Tensor, text: str) -> list[int] | None:
    """The shape that a tensor is wanted to have, if it is this one."""
    shape = list(value.shape)
    if not value.is_floating_point():
        extra = re.search(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", text)
        return [*shape, int(extra[2])] if extra and int(extra[1]) == shape[-1] < 100 else None
    dims = re.search(r"range of \[-(\d+), \d+\], but got (\d+)", text)
    more = re.search(r"not enough values to unpack \(expected (\d+), got (\d+)\)", text)
    if (dims and dims[1] == dims[2] == str(len(shape))) or "must be mono" in text:
        return [shape[0], 1, *shape[1:]]
    if more and int(more[2]) == len(shape):
        return [shape[0], 1, *shape[1:]]
    if f"expected input[1, {', '.join(map(str, shape))}]" in text:  # of one channel
        return [shape[0], 1, *shape[1:]]
    if "too many values to unpack" in text and shape[-1] == 1:
        return shape[:-1]
    flat_size = re.search(r"input to conv2d, but got input of size: \[(\d+), (\d+)\]", text)
    if flat_size and shape == [int(n) for n in flat_size.groups()]:
        side = math.isqrt(shape[1] // 3)
        return [shape[0], 3, side, side]
    norm = re.search(r"normalized_shape=\[(\d+)\].* input of size\[([\d, ]+)\]", text)
    if norm and shape == [int(n) for n in norm[2].split(",")]:
        return [*shape[:-1], int(norm[1])]
    product = re.search(r"cannot be multiplied \(\d+x(\d+) and (\d+)x", text)
    if product and int(product[1]) % shape[-1] == 0 and len(shape) == 3:
        return [*shape[:-1], int(product[2]) * shape[-1] // int(product[1])]
    if product and int(product[2]) % int(product[1]) == 0 and len(shape) == 3:
        return [shape[0], shape[1] * (int(product[2]) // int(product[1])), shape[2]]
    steps = re.search(r"except in dimension 1. Expected size (\d+) but got size (\d+)", text)
    if steps and len(shape) == 3 and shape[1] == int(steps[1]):
        return [shape[0], int(steps[2]), shape[2]]
    merged = re.search(r"'\[-1, (\d+), (\d+), \1, \2, (\d+)\]' is invalid for input", text)
    if merged and shape[-1] == int(merged[3]):
        count, size = int(merged[1]), int(merged[2])
        side = count * size
        return [shape[0], side, side, shape[-1] // size**2]
    # Audio of whole pieces.
    for had, step in re.findall(r"(\d+) is not a multiple of (\d+)", text) + [
        (had, step) for step, had in re.findall(r"multiple of .*\((\d+)\), but got (\d+)", text)
    ]:
        if int(had) in shape:
            place = shape.index(int(had))
            size = -(-int(had) // int(step)) * int(step)
            return [*shape[:place], size, *shape[place + 1 :]]
    sizes = re.search(r"size \((\d+)\*(\d+)\) doesn't match model \((\d+)\*(\d+)\)", text)
    if sizes and len(shape) == 4:
        height, width, *want = (int(n) for n in sizes.groups())
        return [*shape[:2], shape[2] * want[0] // height, shape[3] * want[1] // width]
    if re.search(r"(too|not) (small|large enough)", text) and len(shape) == 4:
        return [*shape[:2], 2 * shape[2], 2 * shape[3]]
    return None


def required(model: torch.nn.Module) -> list[str]:
    """The arguments of a forward that have no default."""
    return [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


def candidates(model: torch.nn.Module, inputs: type[Inputs] = Inputs) -> Iterator[Any]:
    """Sets of inputs, the richest first."""
    parameters = inspect.signature(model.forward).parameters
    needed = required(model)
    main = getattr(model, "main_input_name", "input_ids")
    has_text = "input_ids" in parameters and inputs(model).get("vocab_size") is not None
    sets: list[list[str]] = []
    mains = [main] if isinstance(main, str) else main
    base = [*needed, *(name for name in mains if name in parameters and name not in needed)]
    text = ["input_ids", "attention_mask"] if has_text else []
    if "decoder_input_ids" in parameters and getattr(model.config, "is_encoder_decoder", False):
        base.append("decoder_input_ids")
    pictures = [n for n in _MEDIA if n in parameters]
    grid = [n for n in ("image_grid_thw", "grid_thw") if n in parameters]
    extra = [n for n in ("bbox",) if n in parameters]
    if pictures and has_text:
        if grid:
            sets.append([*base, *text, "pixel_values", *grid])
        sets.append([*base, *text, *extra, *pictures[:1]])
    sets.append([*base, *text, *extra])
    sets.append([*base, *(["input_ids"] if has_text else []), *extra])
    sets.append(base)
    sets.append([*needed, *pictures[:1]])
    sets.append(needed)
    seen = []
    for wanted in sets:
        names = [n for n in dict.fromkeys(wanted) if n in parameters]
        if names in seen or not names:
            continue
        seen.append(names)
        for batch in (2, 1):
            maker = inputs(model)
            maker.batch = batch
            if grid and grid[0] in names and has_text and maker.get("image_token_id"):
                merged = maker.get("spatial_merge_size", of=maker.vision, default=1) ** 2
                maker.tokens["image_token_id"] = 16 // merged
            try:
                made = {name: maker.make(name) for name in names}
                for name in names:
                    if str(parameters[name].annotation).startswith("collections.abc.Sequence[tor"):
                        made[name] = list(made[name].squeeze(-1))  # series of any lengths
                if grid and grid[0] in names:
                    name = "hidden_states" if "hidden_states" in needed else "pixel_values"
                    made[name] = maker.patches()
            except (KeyError, TypeError, ValueError, RuntimeError):
                continue
            yield made, maker
            if "pixel_values" in made and not grid and made["pixel_values"].ndim == 4:
                video = maker.make_pixel_values_videos()
                yield made | {"pixel_values": video}, maker
                yield made | {"pixel_values": video[:, :2]}, maker  # pictures to be matched
                if "image_sizes" in parameters:  # one, and the two that it is cut into
                    yield made | {"pixel_values": video[:, :3]}, maker


def flat(tree: Any) -> list[Any]:
    """The leaves of outputs: of dicts, tuples, and of caches as far as they are such."""
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in flat(value)]
    if isinstance(tree, list | tuple):
        return [x for value in tree for x in flat(value)]
    return [tree]
