"""The caches of transformers as nodes: keys and values, states, and the layers that hold them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from fmapper.backends import NodeType

_CACHES = "transformers.cache_utils"
_OF_MODELS = re.compile(r"Cache(Layer)?$")  # caches of single models


@functools.lru_cache(maxsize=1024)
def is_cache(cls: Any) -> bool:
    """Returns whether a class is a cache of transformers, or a layer of one."""
    if issubclass(cls, torch.nn.Module | Mapping):
        return False
    if any(base.__module__ == _CACHES for base in cls.__mro__):
        return True
    of_model = cls.__module__.startswith("transformers.models.")
    return of_model and bool(_OF_MODELS.search(cls.__name__)) and not hasattr(cls, "_fields")


def node_type(cls: type) -> NodeType | None:
    """Returns the node type of a cache; None for every other class."""
    if not is_cache(cls):
        return None

    def shell(_: Any) -> Any:
        return object.__new__(cls)

    return NodeType(_children, shell=shell, fill=_fill, pytree=True)


def _children(cache: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(cache).items() if _is_child(value)}


def _is_child(value: Any) -> bool:
    """Returns whether a value is an array, a container or a cache."""
    if isinstance(value, list | tuple | dict):
        return True
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    kind: Any = type(value)
    return not isinstance(value, type) and (is_array or is_cache(kind))


def _fill(new: Any, old: Any, children: Mapping[str, Any]) -> None:
    """Fills a cache with arrays, and updates its device and dtype."""
    state = {**vars(old), **children}
    tensors = {n: x for n, x in children.items() if isinstance(x, torch.Tensor)}
    for name, value in vars(old).items():  # `device` and `dtype`, `indexer_device`, ...
        kind = next((end for end in ("device", "dtype") if name.endswith(end)), "")
        if not kind or not isinstance(value, torch.device | torch.dtype):
            continue
        sources = [x for n, x in tensors.items() if n.startswith(name.removesuffix(kind))]
        if kind == "dtype":
            sources = [x for x in sources if x.is_floating_point()]
        if sources:
            state[name] = getattr(sources[0], kind)
    vars(new).update(state)
