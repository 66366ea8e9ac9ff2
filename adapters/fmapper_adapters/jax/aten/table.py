"""The table of lowerings of ATen operations to JAX; the files beside this one fill it."""

from __future__ import annotations

from fmapper.programs import LoweringTable

TABLE = LoweringTable("jax", __package__, "JAX arrays", title="JAX")
LOWERINGS = TABLE.entries
lowering = TABLE.lowering
load = TABLE.load
find = TABLE.find
find_all = TABLE.find_all
dims = TABLE.dims
lowers_whole = TABLE.lowers_whole
