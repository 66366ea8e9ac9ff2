"""JAX: arrays on any of its devices, and its pytree registry."""

from fmapper_adapters.jax.adapter import JaxAdapter

__all__ = ["JaxAdapter", "adapter"]

adapter = JaxAdapter()
