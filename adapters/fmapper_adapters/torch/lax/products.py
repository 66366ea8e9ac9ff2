"""Products of matrices."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax._table import lax


@lax("dot_general")
def dot_general(
    x: Any,
    y: Any,
    *,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    (left, right), (batch_left, batch_right) = dimension_numbers
    if (
        not batch_left
        and len(left) == 1
        and left[0] == x.ndim - 1
        and right[0] == 0
        and y.ndim == 2
    ):
        return torch.matmul(x, y)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    a = [next(letters) for _ in range(x.ndim)]
    b = [next(letters) for _ in range(y.ndim)]
    for i, j in zip((*left, *batch_left), (*right, *batch_right), strict=True):
        b[j] = a[i]
    batch = [a[i] for i in batch_left]
    free = [c for i, c in enumerate(a) if i not in (*left, *batch_left)]
    free += [c for j, c in enumerate(b) if j not in (*right, *batch_right)]
    return torch.einsum(f"{''.join(a)},{''.join(b)}->{''.join(batch + free)}", x, y)
