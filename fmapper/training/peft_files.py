"""LoRA adapters in the folders of PEFT."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mode
from typing import Any

from fmapper.checkpoints.extras.settings import read_settings
from fmapper.errors import CheckpointError
from fmapper.files.untrusted import Misfit, show
from fmapper.files.whole import new_file
from fmapper.moves.mover import to_numpy
from fmapper.tracebacks import short_traceback
from fmapper.training.adapters import LoraAdapter, LowRank

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Ends of names -> fields of `LowRank`.
_FIELDS = {
    "lora_A.weight": "a", "lora_B.weight": "b", "lora_embedding_A": "a", "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
}  # fmt: skip
_PART = re.compile(rf"(.+)\.({'|'.join(_FIELDS)})(?:(?<=vector)\.weight)?")
_LONGEST = 1_000  # characters of a pattern
_REPEATS = re.compile(r"\)[*+{]|\\[1-9]|\(\?P=")
_BASE = ".base_layer."  # PEFT's name of a layer within the one that it has put around it
_SAVED = re.compile(r"\.modules_to_save(\.[^.]+)?(?=\.[^.]+$)")
_PLAIN_BEGINS = ("gaussian", "eva", "orthogonal")  # which leave the base as it is
_NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
# Settings that change what an adapter computes, and that are not read here.
_OTHER_KINDS = (
    "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "velora_config", "monteclora_config",
    "arrow_config", "kasa_config", "megatron_config",
)  # fmt: skip


@short_traceback
def load_adapter(folder: str | os.PathLike[str]) -> LoraAdapter:
    """Reads a LoRA adapter from a folder of PEFT.

    Ranks and alphas by pattern, rsLoRA, DoRA, embeddings, convolutions, biases and
    `modules_to_save` are read. Names are those of the weights of the model that was adapted.

    Args:
        folder: The folder, with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The adapter, with arrays of NumPy: `to_jax` and `to_torch` take it to others.

    Raises:
        CheckpointError: It is not the folder of a LoRA, is damaged, has half of a pair, or settings
            of a kind that is not read; says which.
    """
    folder = Path(folder)
    try:
        return _read(folder / _WEIGHTS, read_settings(folder / _CONFIG))
    except Misfit as problem:
        raise CheckpointError(f"{folder}: {problem}") from None


def _require(holds: Any, problem: str) -> None:
    if not holds:
        raise Misfit(problem)


def _read(weights: Path, settings: Mapping[str, Any]) -> LoraAdapter:
    from fmapper.checkpoints.load import load

    kind, begin = settings.get("peft_type"), settings.get("init_lora_weights", True)
    _require(kind == "LORA", f"is an adapter of kind {show(str(kind))}, not LORA")
    _require(
        isinstance(begin, bool | None) or begin in _PLAIN_BEGINS,
        f"was begun with init_lora_weights={show(str(begin))}, for which PEFT changes the weights "
        "of the base when it reads the folder. Save it as a plain LoRA: save_pretrained has "
        "path_initial_model_for_weight_conversion for that.",
    )
    others = [name for name in _OTHER_KINDS if settings.get(name)]
    _require(not others, f"adapters with {', '.join(others)} are not read")
    bad = [name for name, is_kind in _KINDS.items() if not is_kind({"r": 1, **settings}.get(name))]
    _require(
        not bad,
        f"{', '.join(bad)} of {_CONFIG}: ranks and alphas must be positive numbers, patterns "
        "tables of those, and modules texts",
    )
    parts: dict[str, Any] = defaultdict(dict)
    replaced, embeddings = {}, set[str]()
    for key, array in to_numpy(dict(load(weights, format="safetensors"))).items():
        name = key.removeprefix(_PREFIX)
        if match := _PART.fullmatch(name):
            module, end = match.groups()
            parts[module][_FIELDS[end]] = array
            embeddings |= {module} if "embedding" in end else set()
            continue
        _require("lora_" not in name, f"{show(key)} is not part of a LoRA that is read")
        plain = _SAVED.sub("", name).replace(_BASE, ".")
        _require(plain not in replaced, f"has {show(plain)} twice")
        replaced[plain] = array
    targets, excluded = (_patterns(settings.get(f"{key}_modules")) for key in ("target", "exclude"))
    lost = [
        name
        for name, pattern in targets.items()
        if not any(map(pattern.fullmatch, parts))
        and not _match(excluded, name)  # which PEFT writes among the targets
    ]
    saved = settings.get("modules_to_save") or ()
    lost += [x for x in saved if not any(f".{x}." in f".{name}" for name in replaced)]
    _require(
        not lost,
        f"the configuration has the modules {', '.join(map(show, lost))}, of which there are no "
        "weights in the file",
    )
    strange = [module for module in parts if targets and not _match(targets, module)]
    _require(
        not strange,
        f"the file has weights for {', '.join(map(show, strange[:3]))}, which the target_modules "
        "of the configuration do not name",
    )
    updates, divisor = {}, math.sqrt if settings.get("use_rslora") else float
    for module, part in parts.items():
        a, b, magnitude = map(part.get, ("a", "b", "magnitude"))
        half = "lora_B" if a is None else "lora_A"
        is_pair = a is not None and b is not None
        _require(is_pair, f"{module} has only {half}, or neither half of a pair")
        _require(
            a.ndim > 1 and b.ndim == a.ndim and a.shape[0] == b.shape[1],
            f"{module}: lora_A of {a.shape} and lora_B of {b.shape} do not fit together",
        )
        rank = _by_pattern(settings.get("rank_pattern"), module, settings.get("r", a.shape[0]))
        alpha = _by_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
        said = f"{module} has rank {a.shape[0]}, and the configuration says {rank}"
        _require(int(rank) == a.shape[0], said)
        has, wants = magnitude is not None, bool(settings.get("use_dora"))
        said = f"{'a' if has else 'no'} magnitude, and the configuration says use_dora={wants}"
        _require(has == wants, f"{module} has {said}")
        scale, is_embedding = float(alpha) / divisor(a.shape[0]), module in embeddings
        is_transposed = is_embedding or bool(settings.get("fan_in_fan_out"))
        kind = {"is_transposed": is_transposed, "is_embedding": is_embedding}
        updates[f"{module}.weight"] = LowRank(a, b, magnitude, scale=scale, **kind)
    return LoraAdapter(updates, replaced, json.dumps(settings, sort_keys=True))


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x) and x > 0


def _is_table(x: Any) -> bool:
    return x is None or (isinstance(x, dict) and all(map(_is_number, x.values())))


def _are_names(x: Any) -> bool:
    is_list = isinstance(x, list) and all(isinstance(name, str) for name in x)
    return x is None or isinstance(x, str) or is_list


_KINDS: dict[str, Callable[[Any], bool]] = {
    "r": _is_number, "lora_alpha": _is_number, "rank_pattern": _is_table,
    "alpha_pattern": _is_table, "target_modules": _are_names, "exclude_modules": _are_names,
    "modules_to_save": lambda x: _are_names(x) and not isinstance(x, str),
}  # fmt: skip


def _patterns(targets: str | Iterable[str] | None) -> dict[str, re.Pattern[str]]:
    """Returns what PEFT matches paths with: an expression, or the ends of paths."""
    if isinstance(targets, str):
        return {targets: _compile(".*" if targets == "all-linear" else targets)}
    return {name: re.compile(rf"(.*\.)?{re.escape(name)}") for name in targets or ()}


def _match(patterns: Mapping[str, re.Pattern[str]], module: str) -> bool:
    return any(pattern.fullmatch(module) for pattern in patterns.values())


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Returns the value of the first pattern that the end of a path matches, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        _compile(pattern)
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _compile(pattern: str) -> re.Pattern[str]:
    """Returns a regular expression of a configuration, if its search takes no long time."""
    is_slow = _REPEATS.search(pattern) or len(re.findall("[*+{]", pattern)) > 3
    said = f"{show(pattern)} is a pattern that may take long to match"
    _require(len(pattern) <= _LONGEST and not is_slow, said)
    try:
        return re.compile(pattern)
    except re.error as error:
        raise Misfit(f"{show(pattern)} is not a regular expression: {error}") from None


@short_traceback
def save_adapter(adapter: LoraAdapter, folder: str | os.PathLike[str]) -> None:
    """Writes an adapter as PEFT reads it.

    Args:
        adapter: The adapter. What it was loaded with, as the name of the base model, goes along;
            ranks and alphas are those that it has.
        folder: The folder; files of an adapter in it are replaced.

    Raises:
        CheckpointError: Updates differ in what PEFT says once for an adapter: whether weights are
            transposed, or have magnitudes.
    """
    from fmapper.checkpoints.save import save

    folder = Path(folder)
    arrays = {}
    for name, array in adapter.replaced.items():
        module, _, last = name.rpartition(".")
        between = _BASE if f"{module}.weight" in adapter.updates else "." * bool(module)
        arrays[f"{_PREFIX}{module}{between}{last}"] = array
    for name, update in adapter.updates.items():
        for end, field in _FIELDS.items():
            is_other = field != "magnitude" and ("embedding" in end) != update.is_embedding
            if not is_other and getattr(update, field) is not None:
                arrays[f"{_PREFIX}{name.removesuffix('weight')}{end}"] = getattr(update, field)
    settings: dict[str, Any] = {"peft_type": "LORA", "task_type": None, "bias": "none"}
    settings |= {"inference_mode": True, **json.loads(adapter.settings)}
    updates = {name.removesuffix(".weight"): u for name, u in adapter.updates.items()}
    shared = {
        "use_dora": {u.magnitude is not None for u in updates.values()},
        "fan_in_fan_out": {u.is_transposed for u in updates.values() if not u.is_embedding},
    }
    for name, own in shared.items():
        if len(own) > 1:
            raise CheckpointError(f"PEFT has one {name} for an adapter, and its updates differ")
    ranks = {name: int(update.a.shape[0]) for name, update in updates.items()}
    divisor = math.sqrt if settings.get("use_rslora") else int
    alphas = {name: u.scale * divisor(ranks[name]) for name, u in updates.items()}
    targets = settings.get("target_modules") or []
    patterns = _patterns(targets)
    is_complete = bool(targets) and all(_match(patterns, name) for name in updates)
    if any(settings.get(name) for name in _NARROWING):  # which would leave out what was added
        is_complete, settings = False, settings | dict.fromkeys(_NARROWING)
    for name, pattern, values in (("r", "rank", ranks), ("lora_alpha", "alpha", alphas)):
        settings[name] = usual = mode([*values.values()] or [8])
        settings[f"{pattern}_pattern"] = {
            re.escape(module): value for module, value in values.items() if value != usual
        }
    settings["target_modules"] = targets if is_complete else sorted(updates)
    settings |= {name: any(own) for name, own in shared.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save(arrays, folder / _WEIGHTS, metadata={"format": "pt"})
    with new_file(folder / _CONFIG) as file:
        file.write(json.dumps(settings, indent=2, sort_keys=True).encode() + b"\n")
