"""The public names of torch's functions."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# In the order in which a person would look for them.
_PLACES = {
    "torch": torch,
    "F": F,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "math": math,
    "operator": operator,
}


def public_name(function: Callable[..., Any]) -> str:
    """Returns what a function is called in a file; empty if it is none of torch's or Python's."""
    if isinstance(function, type(torch.ops.aten.add.Tensor)):
        return f"torch.ops.{function!s}"
    found = _known_names().get(_key(function), "")
    return found


def _key(function: Any) -> Any:
    try:
        hash(function)
    except TypeError:
        return id(function)
    return function


@functools.cache
def _known_names() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for place, module in _PLACES.items():
        for name in dir(module):
            value = getattr(module, name, None)
            if name.startswith("_") or not callable(value) or isinstance(value, type):
                continue
            found.setdefault(_key(value), f"{place}.{name}")
    for name in ("linear", "gelu", "scaled_dot_product_attention", "embedding", "pad"):
        found[_key(getattr(F, name))] = f"F.{name}"
    found[_key(torch.threshold)] = "F.threshold"
    found[_key(vars(F)["_threshold"])] = "F.threshold"
    return found
