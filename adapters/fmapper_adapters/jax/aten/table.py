"""The table of lowerings of ATen operations to JAX; the files beside this one fill it."""

from __future__ import annotations

from fmapper.meshes import along, fresh, permutes, pointwise, reduces, regroups
from fmapper.programs import LoweringTable
from fmapper_adapters.jax.aten import dimensions

__all__ = [
    "LOWERINGS", "TABLE", "along", "dimensions", "dims", "find", "find_all", "fresh",
    "load", "lowering", "lowers_whole", "permutes", "pointwise", "reduces", "regroups",
]  # fmt: skip

TABLE = LoweringTable("jax", __package__, "JAX arrays", title="JAX")
LOWERINGS = TABLE.entries
lowering = TABLE.lowering
load = TABLE.load
find = TABLE.find
find_all = TABLE.find_all
dims = TABLE.dims
lowers_whole = TABLE.lowers_whole
