"""Arrays with only a shape and a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.checkpoints.lazy import LazyArray


class Abstract(LazyArray):
    """An array without values, with only a shape and a dtype."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def has_values(self) -> bool:
        """Returns False."""
        return False


class Unwritten(Abstract):
    """An uninitialised array, such as from `np.empty`."""


class Named(Abstract):
    """An array without data.

    Attributes:
        name: Its name.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        super().__init__(shape, dtype)
        self.name = name


class Later(Abstract):
    """An array without data that becomes known later in the recording.

    Attributes:
        value: The lazy array that it stands for, once known.
    """

    value: LazyArray
