"""The arguments of the constructors of models of Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fmapper_translate.constructors.arguments import Modules, settings_of
from fmapper_translate.targets.layers import signature_of
from fmapper_translate.torch.tables import MODES, is_library_module, is_random


def same_settings(one: Any, other: Any, modes: frozenset[str]) -> bool:
    """Returns whether two modules have the same class, and numbers and texts but for their mode."""
    kept = [
        {name: value for name, value in settings_of(module).items() if name not in modes}
        for module in (one, other)
    ]
    return type(one) is type(other) and kept[0] == kept[1]


def _make(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    takes_rngs = "rngs" in signature_of(cls).parameters
    return cls(*args, **kwargs, **({"rngs": nnx.Rngs(0)} if takes_rngs else {}))


def _is_alike(twin: Any, model: Any) -> bool:
    ours, theirs = (dict(nnx.iter_graph(x)) for x in (twin, model))
    modules = [{path: x for path, x in found.items() if isinstance(x, nnx.Module)}
               for found in (ours, theirs)]  # fmt: skip
    shapes = [
        {path: (jnp.shape(x.get_raw_value()), type(x)) for path, x in found.items()
         if isinstance(x, nnx.Variable) and not is_random(x)}
        for found in (ours, theirs)
    ]  # fmt: skip
    if shapes[0] != shapes[1] or modules[0].keys() != modules[1].keys():
        return False
    return all(same_settings(x, modules[1][path], MODES) for path, x in modules[0].items())


NNX = Modules(
    lambda value: isinstance(value, nnx.Module), is_library_module, _make, _is_alike,
    frozenset({"rngs"}),
)  # fmt: skip
