"""Primitives that return their operands: hints to compilers, marks for transformations."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax.pointwise.numbers import flip_sign_bit
from fmapper_adapters.torch.lax.table import Avals, lax, pointwise
from fmapper_adapters.torch.model.emit import current


@lax("stop_gradient", dims=pointwise)
def stop_gradient(x: Any) -> Any:
    return x.detach()


@lax(
    "copy",
    "copy_p",
    "name",
    "pvary",
    "sharding_constraint",
    "layout_constraint",
    "stage",
    dims=pointwise,
)
@lax("nonbatchable", "nontraceable", "nondifferentiable_backward", "reduced_vary_cast_p")
@lax("pbroadcast", "reshard", "pin", "unpin")
def same(x: Any, **avals: Any) -> Any:
    return x


@lax("optimization_barrier", "device_put")
def all_the_same(*xs: Any, **avals: Any) -> Any:
    return xs


@lax("tie")
def tie(x: Any, y: Any) -> Any:
    """Returns the second operand; the first only orders effects."""
    return y


@lax("platform_index")
def platform_index(*, platforms: tuple[Any, ...]) -> Any:
    """Returns the index of the implementation that JAX selects on a CPU."""
    index = next((i for i, names in enumerate(platforms) if names is None or "cpu" in names), None)
    if index is None:
        raise TypeError(f"none of {platforms} is for CPUs")
    return current().make(torch.full, (), index, dtype=torch.int32)


@lax("unvmap_any")
def unvmap_any(x: Any) -> Any:
    return torch.any(x)


@lax("unvmap_all")
def unvmap_all(x: Any) -> Any:
    return torch.all(x)


@lax("unvmap_max", takes_avals=True)
def unvmap_max(x: Any, *, avals: Avals) -> Any:
    if avals.is_unsigned:
        return flip_sign_bit(torch.amax(flip_sign_bit(x, x.dtype)), x.dtype)
    return torch.amax(x)


@lax("select_if_vmap")
def select_if_vmap(which: Any, x: Any, y: Any) -> Any:
    """Returns `x` outside of vmap, as Equinox does; else `select_n`."""
    return x
