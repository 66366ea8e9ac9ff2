"""Flax: NNX modules and their variables, Linen modules bound to variables, frozen dicts."""

from fmapper_adapters.flax.adapter import FlaxAdapter

__all__ = ["FlaxAdapter", "adapter"]

adapter = FlaxAdapter()
