"""Ranges that begin at the length of a text: `torch.arange(length, length + n)`.

The length is a tensor while a step is recorded. torch would read both ends as numbers, and not know
that there are `n` elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ADDS: set[Any] = {
    torch.add,
    torch.Tensor.add,
    torch.Tensor.__add__,
    torch.Tensor.__radd__,
}


class FromLength(TorchFunctionMode):
    """Lets ranges that begin at a length be `length + torch.arange(n)` inside.

    Args:
        length: A tensor without dimensions.
    """

    def __init__(self, length: torch.Tensor) -> None:
        super().__init__()
        self.length = length
        self.ends: dict[int, tuple[torch.Tensor, Any]] = {}  # which are kept, or ids come again

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and len(args) == 2 and args[0] is self.length:
            found = self.ends.get(id(args[1]))
            if found is not None:
                return self.length + torch.arange(found[1], **kwargs)
        result = func(*args, **kwargs)
        if func in _ADDS and len(args) == 2 and args[0] is self.length and not kwargs:
            count = args[1]
            if isinstance(count, int | torch.SymInt) and not isinstance(count, bool):
                self.ends[id(result)] = (result, count)
        return result
