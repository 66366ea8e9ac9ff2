"""Sizes that may vary as arrays."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model.emit import current


@lax("dim_as_value", takes_avals=True)
def dim_as_value(*, dim: Any, avals: Avals) -> Any:
    name, _ = avals.results[0]
    return current().make(torch.full, (), dim, dtype=current().dtype(name))
