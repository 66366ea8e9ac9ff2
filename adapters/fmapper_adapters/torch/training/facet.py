"""The part of the adapter that knows optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fmapper.backends import Optimizers

if TYPE_CHECKING:
    from fmapper.training import OptimizerState


class TorchOptimizers(Optimizers):
    """Optimizers of `torch.optim`."""

    def is_optimizer(self, x: Any) -> bool:
        """Returns whether it is a `torch.optim.Optimizer`, or an average of the weights."""
        return isinstance(x, torch.optim.Optimizer | torch.optim.swa_utils.AveragedModel)

    def trainable(self, model: Any) -> list[Any]:
        """Returns the parameters of a module."""
        return [*model.parameters()]

    def read_optimizer(
        self, model: Any, optimizer: Any, scheduler: Any, every: int | None = None
    ) -> OptimizerState:
        """Returns an optimizer as plain data."""
        from fmapper_adapters.torch.training import optimizers

        return optimizers.read(model, optimizer, scheduler, every)

    def without_gradient(self, array: Any) -> Any:
        """Returns a detached tensor."""
        return array.detach()

    def write_optimizer(self, model: Any, state: OptimizerState) -> tuple[Any, Any]:
        """Returns an optimizer of torch, and a scheduler if the rate changes."""
        from fmapper_adapters.torch.training import optimizers

        return optimizers.write(model, state)
