"""optree: its pytree registry, in the namespace `fmapper` and in the global one."""

from fmapper_adapters.optree.adapter import OptreeAdapter

__all__ = ["OptreeAdapter", "adapter"]

adapter = OptreeAdapter()
