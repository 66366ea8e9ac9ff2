"""PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from fmapper_translate._private import watch_operations
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.sources import Source, Tell
from fmapper_translate.sources.derivatives import derivatives_run
from fmapper_translate.targets.layers import Layers


class TorchSource(Source):
    """Answers the questions of a recording about PyTorch.

    Args:
        layers: The table of layers of the file's framework.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def is_array(self, value: Any) -> bool:
        """Returns whether something is a tensor."""
        return isinstance(value, torch.Tensor)

    def is_module(self, value: Any) -> bool:
        """Returns whether something is an `nn.Module`."""
        return isinstance(value, nn.Module)

    def is_made_of_layers(self, value: Any) -> bool:
        """Returns whether an object is a layer that is given random numbers in a file."""
        layer = self._layers.base_of(type(value))
        return layer is not None and layer.takes_rngs

    def draws(self, overload: Any) -> bool:
        """Returns whether an operation draws random numbers."""
        return torch.Tag.nondeterministic_seeded in overload.tags

    def classes(self, model: Any) -> list[type]:
        """Returns the classes of a model's parts, and their bases, that a file has to have."""
        kinds = dict.fromkeys(type(part) for part in model.modules())
        return [base for kind in kinds for base in self._layers.classes_of(kind)]

    def watch(self, tell: Tell) -> AbstractContextManager[None]:
        """Returns a context that tells which operations run."""
        return watch_operations(tell)

    @contextmanager
    def compute(self, *, compiles: bool = False) -> Iterator[None]:
        """Computes without gradients, and leaves the random numbers as they were."""
        rngs = torch.random.fork_rng(devices=[])
        with rngs, torch.no_grad(), derivatives_run(), library.masks_traced():
            yield
