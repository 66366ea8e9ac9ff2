"""Arrays of which only shape and dtype are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.checkpoints.lazy import LazyArray


class Abstract(LazyArray):
    """An array without values, of which only shape and dtype are known."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def has_values(self) -> bool:
        """Returns False."""
        return False


class Unwritten(Abstract):
    """An array as `np.empty` makes it: no element has a value yet."""


class Named(Abstract):
    """An array without data.

    Attributes:
        name: Its name.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        super().__init__(shape, dtype)
        self.name = name


class Later(Abstract):
    """An array without data whose operations are seen later.

    Attributes:
        value: What it is, once that is seen.
    """

    value: LazyArray
