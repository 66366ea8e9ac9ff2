"""Writing to tensors from outside of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch

from fmapper.backends import Compute
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.arrays import tensors
from fmapper_adapters.torch.arrays.wrappers import is_dtensor

_place = attrgetter("shape", "dtype", "device")


class Writes(Compute):
    """The part of the adapter that writes values from host memory."""

    def places(self, arrays: Sequence[Any]) -> Iterator[Any]:
        """Yields attributes of plain tensors."""
        return map(_place, arrays) if tensors.are_plain(arrays) else super().places(arrays)

    def overwrite(self, arrays: Sequence[Any], values: Sequence[Any]) -> None:
        """Copies values into tensors on any device, one call per dtype."""
        by_dtype: dict[torch.dtype, tuple[list[Any], list[Any]]] = {}
        with torch.no_grad():
            for tensor, value in zip(arrays, values, strict=True):
                new = value if isinstance(value, torch.Tensor) else tensors.from_numpy(value)
                if tensor.is_conj() or tensor.is_neg():  # not in lists
                    tensor.detach().copy_(new)
                    continue
                pair = by_dtype.setdefault(tensor.dtype, ([], []))
                pair[0].append(tensor.detach())
                pair[1].append(new)
            for to, froms in by_dtype.values():
                _private.copy_each(to, froms)

    def addresses(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns addresses and strides of plain tensors."""
        if tensors.are_plain(arrays):
            with suppress(RuntimeError):  # no strided memory
                starts = map(torch.Tensor.data_ptr, arrays)
                return [*starts, *map(torch.Tensor.stride, arrays)]
        return super().addresses(arrays)

    def domain(self, array: Any) -> str:
        """Returns the domain of a tensor, which is empty for a `DTensor`."""
        return "" if is_dtensor(array) else super().domain(array)

    def compile_for(
        self, run: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]], like: Sequence[Any]
    ) -> Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]:
        """Returns the function without gradients; `overwrite` copies its results."""
        return torch.no_grad()(run)

    def note_writes(self, arrays: Sequence[Any]) -> None:
        """Counts a change of each tensor, so that a backward pass that needs the old one fails."""
        changed = [tensor for tensor in arrays if not tensor.is_inference()]
        if changed:
            torch.autograd.graph.increment_version(changed)
