"""JAX: arrays on any of its devices, and its pytree registry."""

from fmapper_adapters.jax._adapter import JaxAdapter

__all__ = ["JaxAdapter", "adapter"]

adapter = JaxAdapter()
