"""PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmapper_translate._private import parameters_of, watch_operations
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.sources import Source, Tell
from fmapper_translate.sources.derivatives import derivatives_run
from fmapper_translate.targets.layers import Layers

if TYPE_CHECKING:
    from fmapper_translate.recording import Operation

_SWITCHES = ("train", "training")  # arguments of operations that draw
_RATES = ("p", "dropout_p", "dropout")


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

    def draws_values(self, value: Any) -> bool:
        """Returns whether the first values of such a layer are drawn."""
        layer = self._layers.base_of(type(value))
        return layer is not None and layer.draws

    def draws(self, operation: Operation) -> bool:
        """Returns whether an operation drew random numbers: not at a rate of 0 or in evaluation."""
        overload = operation.overload
        if torch.Tag.nondeterministic_seeded not in overload.tags:
            return False
        names = [*parameters_of(overload)]
        given = dict(zip(names, operation.args, strict=False)) | operation.kwargs
        is_on = not any(name in names and not given.get(name, False) for name in _SWITCHES)
        rates = [given.get(name, 0.0) for name in _RATES if name in names]
        return is_on and ("generator" in names or all(rates))

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
