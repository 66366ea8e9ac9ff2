"""Parses `fsdp=`: the modules whose parameters are gathered together, and their mesh axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from fmapper.errors import PlacementError
from fmapper.meshes.rules import key_pattern

AskedUnits: TypeAlias = "Mapping[Any, str | tuple[str, ...]] | str | tuple[str, ...]"


def read_units(
    asked: AskedUnits | None, mesh: Mapping[str, int]
) -> dict[Any, tuple[str, ...]] | None:
    """Returns the mesh axes for each class or `Pattern`; those of axes alone under None.

    Raises:
        PlacementError: `asked` is invalid, or the mesh lacks an axis.
    """
    if asked is None:
        return None
    units: dict[Any, tuple[str, ...]] = {}
    for key, axes in (asked if isinstance(asked, Mapping) else {None: asked}).items():
        if not isinstance(key, str | type | None):
            raise PlacementError(
                f"fsdp= selects modules by a class or a path pattern, not by {key!r}."
            )
        chosen = (axes,) if isinstance(axes, str) else tuple(axes)
        if not 1 <= len(chosen) <= 2 or [axis for axis in mesh if axis in chosen] != [*chosen]:
            raise PlacementError(
                f"fsdp= has {axes!r}: write an axis of the mesh ({', '.join(mesh)}), or two in its "
                "order, the one with copies before the one that shards."
            )
        if isinstance(key, str) and not key.strip("*."):
            raise PlacementError(
                f"fsdp={{{key!r}: ...}} would gather all parameters together. Name the modules "
                'whose parameters are, by a class or a pattern such as "layers.*"; modules of '
                "transformers say it themselves if you pass the axis alone."
            )
        units[key_pattern(key) if isinstance(key, str) else key] = chosen
    if not units:
        raise PlacementError('fsdp={} names no module: write fsdp={Block: "data"}.')
    return units
