"""Creation of arrays."""

from __future__ import annotations

from typing import Any

import torch

from fmapper.programs import DType
from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model.emit import current


@lax("iota")
def iota(*sizes: Any, dtype: DType, shape: tuple[Any, ...], dimension: int) -> Any:
    kind = current().dtype(dtype.name)
    # narrow integers wrap, unlike in torch.arange
    plain = kind.itemsize >= 4 and not kind.is_complex
    made = current().make(torch.arange, shape[dimension], dtype=kind if plain else torch.int64)
    made = made if plain else made.to(kind)
    if len(shape) == 1:
        return made
    return made.reshape([-1 if i == dimension else 1 for i in range(len(shape))]).expand(shape)


@lax("empty")
def empty(*, shape: tuple[Any, ...], dtype: DType) -> Any:
    return current().make(torch.zeros, shape, dtype=current().dtype(dtype.name))


@lax("empty2", takes_avals=True)
def empty_scalar(*, dtype: Any, memory_space: Any = None, avals: Avals) -> Any:
    name, shape = avals.results[0]
    return current().make(torch.zeros, shape, dtype=current().dtype(name))


@lax("zeros_like")
def zeros_like(x: Any) -> Any:
    return torch.zeros_like(x)
