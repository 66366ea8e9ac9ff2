"""Writing to tensors from outside of torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fmapper.backends import Arrays
from fmapper_adapters.torch.arrays import tensors
from fmapper_adapters.torch.arrays.wrappers import is_dtensor

if TYPE_CHECKING:
    import numpy as np


class Writes(Arrays):
    """A part of the adapter: values from host memory."""

    def overwrite(self, array: Any, data: np.ndarray[Any, Any]) -> None:
        """Copies host memory into a tensor on any device."""
        with torch.no_grad():
            array.detach().copy_(tensors.from_numpy(data))

    def place(self, array: Any) -> Hashable:
        """Returns address and layout of a tensor on the CPU; `tensor.data = ...` changes them."""
        if is_dtensor(array) or array.device.type != "cpu":
            return None
        return array.data_ptr(), array.shape, array.stride(), array.dtype

    def note_writes(self, arrays: Sequence[Any]) -> None:
        """Counts a change of each tensor, so that a backward pass that needs the old one fails."""
        changed = [tensor for tensor in arrays if not tensor.is_inference()]
        if changed:
            torch.autograd.graph.increment_version(changed)
