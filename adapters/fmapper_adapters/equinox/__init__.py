"""Equinox: models as source code in its layers; as trees of arrays its modules are JAX's."""

from fmapper_adapters.equinox.adapter import EquinoxAdapter

__all__ = ["EquinoxAdapter", "adapter"]

adapter = EquinoxAdapter()
