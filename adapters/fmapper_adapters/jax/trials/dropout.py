"""Calls of dropout functions, with the interface of a library's dropout layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Dropout:
    """A call of a function `dropout(x, rate, broadcast_dims, key)`."""

    function: Callable[..., Any]
    rate: Any
    broadcast_dims: Any
    key: Any

    def __call__(self, x: Any) -> Any:
        """Returns an array with some elements dropped."""
        return self.function(x, self.rate, self.broadcast_dims, self.key)
