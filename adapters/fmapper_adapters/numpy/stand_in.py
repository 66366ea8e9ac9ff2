"""The class of NumPy arrays without data."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class StandIn(NDArrayOperatorsMixin):
    """An array without data, which is a view of memory that does not exist.

    It passes for an `np.ndarray`; `recording.py` implements its operations.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        # JAX would read the memory of an array, but calls `__jax_array__` of other objects.
        return type(self) if caller.partition(".")[0] == "jax" else np.ndarray
