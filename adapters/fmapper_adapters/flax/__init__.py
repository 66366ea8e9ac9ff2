"""Flax: NNX modules and their variables, Linen modules bound to variables, frozen dicts."""

from importlib import import_module
from typing import TYPE_CHECKING

from fmapper_adapters.flax.adapter import FlaxAdapter

if TYPE_CHECKING:
    from fmapper_adapters.flax.flax_model import FlaxModel
    from fmapper_adapters.flax.linen_model import LinenModel

__all__ = ["FlaxAdapter", "FlaxModel", "LinenModel", "adapter"]

adapter = FlaxAdapter()

_MODELS = {
    "FlaxModel": "flax_model",
    "LinenModel": "linen_model",
}


def __getattr__(name: str) -> object:
    """Imports the classes of converted models on first access."""
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODELS[name]}"), name)
