"""PyTorch: tensors, parameters and modules."""

from importlib import import_module
from typing import TYPE_CHECKING

from fmapper_adapters.torch.adapter import TorchAdapter

if TYPE_CHECKING:
    from fmapper_adapters.torch.model.torch_model import TorchModel

__all__ = ["TorchAdapter", "TorchModel", "adapter"]

adapter = TorchAdapter()

_MODELS = {
    "TorchModel": "model.torch_model",
}


def __getattr__(name: str) -> object:
    """Imports the classes of converted models on first access."""
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODELS[name]}"), name)
