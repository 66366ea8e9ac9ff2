"""JAX: arrays on any of its devices, and its pytree registry."""

from importlib import import_module
from typing import TYPE_CHECKING

from fmapper_adapters.jax.adapter import JaxAdapter

if TYPE_CHECKING:
    from fmapper_adapters.jax.model.jax_model import JaxModel

__all__ = ["JaxAdapter", "JaxModel", "adapter"]

adapter = JaxAdapter()

_MODELS = {
    "JaxModel": "model.jax_model",
}


def __getattr__(name: str) -> object:
    """Imports the classes of converted models on first access."""
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODELS[name]}"), name)
