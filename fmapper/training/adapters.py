"""Low-rank adapters (LoRA) of any framework, in the files of PEFT."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fmapper.backends.compute import Optimizers
from fmapper.backends.discovery import adapter_of
from fmapper.backends.namespace import array_namespace
from fmapper.checkpoints.extras.settings import read_settings
from fmapper.errors import CheckpointError, StructureMismatchError
from fmapper.files.untrusted import show
from fmapper.files.whole import new_file
from fmapper.moves.mover import mover_to, to_numpy
from fmapper.states.state import load_state, state
from fmapper.tracebacks import short_traceback
from fmapper.tree.functor import functor

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<part>[AB])\.weight|lora_embedding_(?P<of_embedding>[AB])"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?)"
)
_LONGEST = 1_000  # characters of a pattern
_REPEATS = re.compile(r"\)[*+{]|\\[1-9]|\(\?P=")
_BASE = ".base_layer."  # PEFT's name of a layer within the one that it has put around it
_SAVED = re.compile(r"\.modules_to_save(\.[^.]+)?(?=\.[^.]+$)")
# Settings that change what an adapter computes, and that are not read here.
_OTHER_KINDS = (
    "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "velora_config", "monteclora_config",
    "arrow_config", "kasa_config", "megatron_config",
)  # fmt: skip


@functor(children=("a", "b", "magnitude"))
class LowRank:
    """The update of one weight: `scale * b @ a`, laid out like the weight.

    Attributes:
        a: Of shape (rank, in), (rank, in, height, width) of a convolution, or (rank, rows) of an
            embedding.
        b: Of shape (out, rank), (out, rank, 1, 1), or (columns, rank).
        magnitude: Of DoRA: the norms that the rows of the merged weight have; else None.
        scale: A number: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
        is_transposed: Whether the weight is of shape (in, out), as an embedding's is.
        is_embedding: Whether it is one, which PEFT names otherwise.
    """

    def __init__(
        self,
        a: Any,
        b: Any,
        magnitude: Any = None,
        *,
        scale: float,
        is_transposed: bool = False,
        is_embedding: bool = False,
    ) -> None:
        self.a, self.b, self.magnitude, self.scale = a, b, magnitude, scale
        self.is_transposed, self.is_embedding = is_transposed, is_embedding

    def update(self, shape: tuple[int, ...]) -> Any:
        """Returns what is added to a weight of a shape.

        Raises:
            StructureMismatchError: The shapes do not fit.
        """
        xp = array_namespace(self.a)
        rank, *rest = self.a.shape
        made = xp.reshape(self.b, (-1, rank)) @ xp.reshape(self.a, (rank, -1))
        made = self.scale * (made.T if self.is_transposed else made)
        expected = (self.b.shape[0], *rest)
        expected = expected[::-1] if self.is_transposed else expected
        if tuple(shape) != expected:
            raise StructureMismatchError(f"a weight of shape {tuple(shape)}, not {expected}")
        return xp.reshape(made, shape)

    def merge(self, weight: Any) -> Any:
        """Returns a weight with the update in it, of the dtype of the weight."""
        xp = array_namespace(weight)
        made = xp.astype(weight, self.a.dtype) + self.update(weight.shape)
        if self.magnitude is not None:
            axis = 0 if self.is_transposed else 1
            axes = (axis,) if made.ndim == 2 else tuple(range(1, made.ndim))
            norm = xp.sqrt(xp.sum(made * made, axis=axes, keepdims=True))
            # As in the paper of DoRA (Liu et al. 2024, 4.3) the norm has no gradient.
            made = made * xp.reshape(self.magnitude, norm.shape) / _constant(norm)
        return xp.astype(made, weight.dtype)


def _constant(array: Any) -> Any:
    owner = adapter_of(array)
    return owner.without_gradient(array) if isinstance(owner, Optimizers) else array


@functor(children=("updates", "replaced"))
class LoraAdapter:
    """A low-rank adapter: a functor, trained by itself while the weights stay.

    `adapter(params)` gives the parameters with the updates in them, in torch, JAX and NumPy, under
    `jit` and in gradients with respect to the adapter.

    Attributes:
        updates: Names of weights -> their `LowRank`.
        replaced: Names of arrays that are not those of the model: biases, and modules that were
            trained as a whole.
        settings: The rest of PEFT's configuration, as text.

    Examples:
        >>> import fmapper, numpy as np
        >>> update = fmapper.training.LowRank(np.ones((1, 3)), np.ones((2, 1)), scale=0.5)
        >>> adapter = fmapper.training.LoraAdapter({"fc.weight": update})
        >>> float(adapter({"fc.weight": np.zeros((2, 3))})["fc.weight"][0, 0])
        0.5
    """

    def __init__(
        self,
        updates: Mapping[str, LowRank],
        replaced: Mapping[str, Any] | None = None,
        settings: str = "{}",
    ) -> None:
        self.updates, self.replaced = dict(updates), dict(replaced or {})
        self.settings = settings

    def __call__(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arrays with the adapter merged into them; those that it does not name stay.

        Args:
            params: Arrays by name, of the adapter's framework; such as the `params` of a `JaxModel`
                or `dict(module.named_parameters())`.

        Raises:
            StructureMismatchError: The adapter names arrays that are not there, or of another
                shape; lists all of them. An adapter is never left out.
        """
        merged, problems = dict(params), []
        for name, update in self.updates.items():
            if name not in params:
                problems.append(f"{name}: the model has no such weight")
                continue
            try:
                merged[name] = update.merge(params[name])
            except StructureMismatchError as error:
                problems.append(f"{name}: the adapter is for {error}")
        for name, array in self.replaced.items():
            if name not in params:
                problems.append(f"{name}: the model has no such array")
            elif tuple(params[name].shape) != tuple(array.shape):
                problems.append(f"{name}: has the shape {tuple(params[name].shape)} in the model")
            else:
                merged[name] = array
        if problems:
            raise StructureMismatchError(
                "the adapter does not fit:\n" + "\n".join(f"  {line}" for line in problems)
            )
        return merged

    def unmerge(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays as they were before, to rounding.

        Raises:
            StructureMismatchError: What was there before is not known: the adapter replaces arrays,
                or is a DoRA, which rescales rows by norms that are gone.
        """
        gone = [*self.replaced, *(n for n, u in self.updates.items() if u.magnitude is not None)]
        if gone:
            raise StructureMismatchError(
                f"{', '.join(gone[:3])}: cannot be unmerged, as the adapter does not say what was "
                "there before. Keep the parameters of the base."
            )
        missing = self.updates.keys() - params.keys()
        if missing:
            raise StructureMismatchError(f"the model has no {', '.join(sorted(missing)[:3])}")
        before = dict(params)
        for name, update in self.updates.items():
            xp, weight = array_namespace(params[name]), params[name]
            plain = xp.astype(weight, update.a.dtype) - update.update(weight.shape)
            before[name] = xp.astype(plain, weight.dtype)
        return before

    def merge(self, model: Any, *, source: bool = False) -> Any:
        """Returns a copy of a model with the adapter merged into its weights.

        Args:
            model: A model of any framework.
            source: Whether the adapter has the names of the model that `convert` made this one of,
                as for one with `structure=True`.

        Raises:
            StructureMismatchError: The adapter names arrays that the model does not have.
        """
        weights = state(model, source=source)
        named = {name: weights[name] for name in weights if name in self}
        return load_state(model, {**weights, **self(_like(self, named))}, source=source)

    def __contains__(self, name: object) -> bool:
        return name in self.updates or name in self.replaced


def _like(adapter: LoraAdapter, arrays: dict[str, Any]) -> dict[str, Any]:
    """Brings arrays to the framework of an adapter."""
    first = next((update.a for update in adapter.updates.values()), None)
    owner = None if first is None else adapter_of(first)
    if owner is None or all(adapter_of(array) is owner for array in arrays.values()):
        return arrays
    moved: dict[str, Any] = mover_to(owner)(arrays)
    return moved


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
    from fmapper.checkpoints.load import load

    folder = Path(folder)
    settings = read_settings(folder / _CONFIG)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder}: is an adapter of kind {show(str(kind))}, not LORA")
    _check_settings(folder, settings)
    others = [name for name in _OTHER_KINDS if settings.get(name)]
    if others:
        raise CheckpointError(f"{folder}: adapters with {', '.join(others)} are not read")
    arrays = to_numpy(dict(load(folder / _WEIGHTS, format="safetensors")))
    parts: dict[str, dict[str, Any]] = {}
    replaced = {}
    for key, array in arrays.items():
        name = key.removeprefix(_PREFIX)
        found = _PART.fullmatch(name)
        if found is None:
            if "lora_" in name:
                raise CheckpointError(f"{folder}: {show(key)} is not part of a LoRA that is read")
            replaced[_SAVED.sub("", name).replace(_BASE, ".")] = array
            continue
        part = found["part"] or found["of_embedding"] or "magnitude"
        held = parts.setdefault(found["module"], {})
        held[part] = array
        held["is_embedding"] = held.get("is_embedding", False) or bool(found["of_embedding"])
    updates = {}
    for module, held in parts.items():
        if "A" not in held or "B" not in held:
            half = "lora_A" if "A" in held else "lora_B"
            raise CheckpointError(f"{folder}: {module} has only {half}, or neither half of a pair")
        updates[f"{module}.weight"] = _low_rank(folder, module, held, settings)
    _check_targets(folder, settings.get("target_modules"), parts)
    return LoraAdapter(updates, replaced, json.dumps(settings, sort_keys=True))


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises for ranks, alphas and targets of a configuration that are not of their kind."""
    patterns = [settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    numbers = [settings.get("r", 1), settings.get("lora_alpha")]
    numbers += [x for table in patterns if isinstance(table, dict) for x in table.values()]
    targets = settings.get("target_modules") or []
    if (
        not all(isinstance(table, dict) for table in patterns)
        or not all(type(x) in (int, float) and math.isfinite(x) and x > 0 for x in numbers)
        or not (isinstance(targets, str) or all(isinstance(target, str) for target in targets))
    ):
        raise CheckpointError(
            f"{folder / _CONFIG}: r, lora_alpha, rank_pattern and alpha_pattern must be positive "
            "numbers and tables of those, and target_modules texts"
        )


def _check_targets(folder: Path, targets: Any, modules: Iterable[str]) -> None:
    """Raises for modules that the configuration names and the file does not have."""
    names = [*modules]
    if isinstance(targets, str):
        found = targets == "all-linear" or any(map(_compile(targets).fullmatch, names))
        lost = [] if found else [targets]
    else:
        ends = [f".{name}" for name in names]
        lost = [t for t in targets or () if not any(end.endswith(f".{t}") for end in ends)]
    if lost:
        raise CheckpointError(
            f"{folder}: the configuration has the target_modules {', '.join(map(show, lost))}, of "
            "which there are no weights in the file"
        )


def _low_rank(
    folder: Path, module: str, held: Mapping[str, Any], settings: Mapping[str, Any]
) -> LowRank:
    a, b, is_embedding = held["A"], held["B"], held["is_embedding"]
    if a.ndim < 2 or b.ndim != a.ndim or a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"{folder}: {module}: lora_A of {tuple(a.shape)} and lora_B of {tuple(b.shape)} do not "
            "fit together"
        )
    rank = int(_by_pattern(settings.get("rank_pattern"), module, settings.get("r", a.shape[0])))
    if rank != a.shape[0]:
        raise CheckpointError(
            f"{folder}: {module} has rank {a.shape[0]}, and the configuration says {rank}"
        )
    alpha = float(_by_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"]))
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    magnitude = held.get("magnitude")
    if (magnitude is not None) != bool(settings.get("use_dora")):
        raise CheckpointError(
            f"{folder}: {module} has {'no' if magnitude is None else 'a'} magnitude, and the "
            f"configuration says use_dora={bool(settings.get('use_dora'))}"
        )
    is_transposed = is_embedding or bool(settings.get("fan_in_fan_out"))
    flags = {"is_transposed": is_transposed, "is_embedding": is_embedding}
    return LowRank(a, b, magnitude, scale=scale, **flags)


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Returns the value of the first pattern that the end of a path matches, as PEFT does."""
    steps = module.split(".")
    ends = [".".join(steps[at:]) for at in range(len(steps))]
    for pattern, value in (patterns or {}).items():
        if any(map(_compile(pattern).fullmatch, ends)):
            return value
    return default


def _compile(pattern: str) -> re.Pattern[str]:
    """Returns a regular expression of a configuration, whose search takes no long time.

    Raises:
        CheckpointError: It is not one, or repeats groups or more than three things.
    """
    if len(pattern) > _LONGEST or _REPEATS.search(pattern) or len(re.findall("[*+{]", pattern)) > 3:
        raise CheckpointError(f"{show(pattern)} is a pattern that may take long to match")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{show(pattern)} is not a regular expression: {error}") from None


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
        is_around = f"{module}.weight" in adapter.updates
        arrays[f"{_PREFIX}{module}{_BASE if is_around else '.'}{last}"] = array
    for name, update in adapter.updates.items():
        module = f"{_PREFIX}{name.removesuffix('.weight')}"
        parts = ("lora_embedding_A", "lora_embedding_B")
        parts = parts if update.is_embedding else ("lora_A.weight", "lora_B.weight")
        arrays |= dict(
            zip((f"{module}.{part}" for part in parts), (update.a, update.b), strict=True)
        )
        if update.magnitude is not None:
            arrays[f"{module}.lora_magnitude_vector"] = update.magnitude
    folder.mkdir(parents=True, exist_ok=True)
    settings = _settings_of(adapter)
    save(arrays, folder / _WEIGHTS, metadata={"format": "pt"})
    with new_file(folder / _CONFIG) as file:
        file.write(json.dumps(settings, indent=2, sort_keys=True).encode() + b"\n")


def _settings_of(adapter: LoraAdapter) -> dict[str, Any]:
    """Returns PEFT's configuration of an adapter."""
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "bias": "none",
        **json.loads(adapter.settings),
    }
    updates = {name.removesuffix(".weight"): u for name, u in adapter.updates.items()}
    plain = [update for update in updates.values() if not update.is_embedding]
    is_dora = _one(u.magnitude is not None for u in updates.values())
    uses_roots = bool(settings.get("use_rslora"))
    ranks = {name: int(update.a.shape[0]) for name, update in updates.items()}
    alphas = {
        name: update.scale * (math.sqrt(ranks[name]) if uses_roots else ranks[name])
        for name, update in updates.items()
    }
    rank, alpha = (_commonest(values.values(), 8) for values in (ranks, alphas))
    return settings | {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {re.escape(n): v for n, v in ranks.items() if v != rank},
        "alpha_pattern": {re.escape(n): v for n, v in alphas.items() if v != alpha},
        "use_dora": is_dora,
        "fan_in_fan_out": _one(update.is_transposed for update in plain),
        "target_modules": settings.get("target_modules") or sorted(updates),
        "inference_mode": settings.get("inference_mode", True),
    }


def _one(flags: Iterable[bool]) -> bool:
    found = {*flags}
    if len(found) > 1:
        raise CheckpointError(
            "PEFT has one use_dora and one fan_in_fan_out for an adapter, and its updates differ"
        )
    return found.pop() if found else False


def _commonest(values: Iterable[Any], default: Any) -> Any:
    held = [*values]
    return max(held, key=held.count) if held else default
