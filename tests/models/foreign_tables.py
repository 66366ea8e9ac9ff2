"""The weight tables of tunix and MaxText, as functions from a folder's arrays to theirs.

Both come from the package index without what they depend on: the folder `TWINS_PACKAGES` has them.
tunix imports a logger of metrax, a profiler and a tokenizer that its tables do not use; these are
replaced by empty modules.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import transformers

from support.hub_folders import saved

STUBS = {"metrax", "perfetto", "pandas", "sentencepiece", "wandb", "tensorboardX"}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


class Table(NamedTuple):
    """A table as a function.

    Attributes:
        name: Whose it is, of which family.
        function: Takes the arrays of a folder by name, and returns those of the model.
        state: The arrays of a small folder.
    """

    name: str
    function: Callable[[dict[str, Any]], dict[str, Any]]
    state: dict[str, Any]


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


@functools.cache
def find_packages() -> bool:
    """Makes both importable; returns False where they are not there."""
    folder = os.environ.get("TWINS_PACKAGES", "")
    if not os.path.isdir(os.path.join(folder, "tunix")):
        return False
    sys.path.append(folder)
    sys.meta_path.append(_Stubs())
    return True


@functools.cache
def folder_of(cls: str, config: str, **more: Any) -> dict[str, Any]:
    """Returns the arrays that a small model is saved as, with values that sums keep exactly."""
    model = getattr(transformers, cls)(getattr(transformers, config)(**{**SMALL, **more}))
    random = np.random.default_rng(0)
    return {
        name: (random.integers(-512, 512, x.shape) / 1024).astype(x.dtype)
        for name, x in saved(model).items()
    }


def tunix() -> Iterator[Table]:
    """Yields the tables of tunix, with what its loader does with them."""
    import jax.numpy as jnp

    utils = importlib.import_module("tunix.utils.torch_utils")
    sizes = {
        "embed_dim": 64,
        "hidden_dim": 48,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "num_embed": 64,
        "vision_config": None,
    }
    qwen = {"Qwen3ForCausalLM": "Qwen3Config"}
    families: dict[str, tuple[str, str, str, dict[str, Any]]] = {
        "qwen3": ("qwen3.params", *next(iter(qwen.items())), {}),
        "qwen3 moe": ("qwen3.params", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE),
        "qwen2": ("qwen2.params", "Qwen2ForCausalLM", "Qwen2Config", {}),
        "llama3": ("llama3.params", "LlamaForCausalLM", "LlamaConfig", {}),
        "gemma2": ("gemma.params_safetensors", "Gemma2ForCausalLM", "Gemma2Config", {}),
        "gemma3": ("gemma3.params_safetensors", "Gemma3ForCausalLM", "Gemma3TextConfig", {}),
    }
    for family, (place, cls, config, more) in families.items():
        module = importlib.import_module(f"tunix.models.{place}")
        mapping = module._get_key_and_transform_mapping(SimpleNamespace(**sizes))

        def load(
            state: dict[str, Any], module: Any = module, mapping: Any = mapping
        ) -> dict[str, Any]:
            loaded = {}
            for name, value in state.items():
                array = value
                try:
                    key, transform = utils.torch_key_to_jax_key(mapping, name)
                except ValueError:
                    continue
                if transform is not None:
                    permute, reshape = transform
                    array = array.transpose(permute) if permute else array
                    array = array.reshape(reshape) if reshape else array
                loaded[key] = jnp.array(array)
            if hasattr(module, "_stack_experts"):
                return dict(module._stack_experts(loaded))
            if hasattr(module, "_make_preprocess_fn"):
                return dict(module._make_preprocess_fn(SimpleNamespace(**sizes))(loaded))
            return loaded

        yield Table(f"tunix {family}", load, folder_of(cls, config, **more))


def maxtext() -> Iterator[Table]:
    """Yields the tables of MaxText, layer by layer and stacked for a scan."""
    families = {
        "llama3.1-8b": ("LlamaForCausalLM", "LlamaConfig", {}),
        "mixtral-8x7b": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
        "gemma2-2b": ("Gemma2ForCausalLM", "Gemma2Config", {}),
        "qwen2.5-1.5b": ("Qwen2ForCausalLM", "Qwen2Config", {}),
        "qwen3-0.6b": ("Qwen3ForCausalLM", "Qwen3Config", {}),
        "qwen3-30b-a3b": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE),
        "olmo3-7b": ("Olmo3ForCausalLM", "Olmo3Config", {}),
    }
    place = "maxtext.checkpoint_conversion.utils"
    tables = importlib.import_module(f"{place}.param_mapping")
    handling = importlib.import_module(f"{place}.tensor_handling")
    for family, (cls, config, more) in families.items():
        for scanned in (False, True):
            settings = SimpleNamespace(
                num_experts=4 if "Moe" in cls or "Mixtral" in cls else 1,
                scan_layers=scanned,
                param_scan_axis=1,
                head_dim=16,
                base_num_decoder_layers=4,
                inhomogeneous_layer_cycle_interval=1,
                emb_dim=64,
                moe_hidden=24 if "Moe" in cls else 48,
                norm_of_all_heads="Olmo" in cls,
            )
            sizes = {**SMALL, **more, "layer_types": ["full_attention"] * 4}
            mapping = tables.PARAM_MAPPING[family](sizes, settings, scanned)
            hooks = tables.HOOK_FNS[family](sizes, settings, scanned, saving_to_hf=False)
            state = folder_of(cls, config, **more)

            def load(
                state: dict[str, Any],
                mapping: Any = mapping,
                hooks: Any = hooks,
                settings: Any = settings,
            ) -> dict[str, Any]:
                loaded = {}
                for key, names in mapping.items():
                    depth = handling.nesting_depth(names)
                    shape = _shape(key, settings, depth)
                    first = names
                    while isinstance(first, list):
                        first = first[0]
                    if first not in state:  # a head that is tied to the embedding
                        continue
                    loader = handling.get_hf_loading_function(
                        names, state.__getitem__, hooks.get(key), shape, settings, key
                    )
                    loaded[key] = loader()
                return loaded

            kind = "stacked" if scanned else "by layer"
            yield Table(f"maxtext {family} {kind}", load, state)


def _shape(key: str, settings: Any, depth: int) -> tuple[int, ...]:
    """Returns the shape that an array of MaxText has."""
    name = "-".join(key.split("-")[-2:])
    width, heads, groups, dim = 64, 4, 2, 16
    hidden = settings.moe_hidden if "MoeBlock" in key or "moe_block" in key else 48
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedder-embedding": (64, width),
        "logits_dense-kernel": (width, 64),
        "query-kernel": (width, heads, dim),
        "key-kernel": (width, groups, dim),
        "value-kernel": (width, groups, dim),
        "query-bias": (heads, dim),
        "key-bias": (groups, dim),
        "value-bias": (groups, dim),
        "out-kernel": (heads, dim, width),
        "wi_0-kernel": (width, hidden),
        "wi_1-kernel": (width, hidden),
        "wo-kernel": (hidden, width),
        "gate-kernel": (width, settings.num_experts),
        "query_norm-scale": (dim,),
        "key_norm-scale": (dim,),
    }
    shape = shapes.get(name, (width,))
    if settings.norm_of_all_heads and "y_norm" in name:
        shape = (heads if "query" in name else groups, dim)
    if key.endswith(("-wi_0", "-wi_1", "-wo")):
        shape = (hidden, width) if key.endswith("-wo") else (width, hidden)
        layers = (4,) if depth == 2 else ()
        return (settings.num_experts, *layers, *shape)
    if depth and settings.scan_layers:
        return (shape[0], 4, *shape[1:])
    return shape
