"""Equinox: models as source code with its layers. Its modules are trees of JAX."""

from fmapper_adapters.equinox.adapter import EquinoxAdapter

__all__ = ["EquinoxAdapter", "adapter"]

adapter = EquinoxAdapter()
