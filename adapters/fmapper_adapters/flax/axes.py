"""Axes of a mesh in the metadata of NNX variables and Linen boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import fmapper

Axes = tuple[Any, ...]
_KEYS = ("out_sharding", "sharding_names", "sharding")  # where versions of NNX keep them


def of_node(node: Any) -> Sequence[tuple[str, Any, Axes]]:
    """Returns name, array and axes of each array in a variable, box or converted model."""
    programs = getattr(node, "__dict__", {}).get("_programs")  # nnx.Rngs answers for any attribute
    if programs is not None:
        arrays = fmapper.state(node)
        return [(n, arrays[n], axes) for n, axes in programs.axes.items() if n in arrays]
    if hasattr(type(node), "unbox") and getattr(node, "names", None) is not None:
        return [("", node.value, tuple(node.names))]  # linen.Partitioned, LogicallyPartitioned
    if hasattr(type(node), "get_metadata") and hasattr(type(node), "get_value"):
        metadata = node.get_metadata()
        names = next(filter(None, map(metadata.get, _KEYS)), None)
        if names is not None:
            return [("", node.get_value(), tuple(names))]
    return ()


def by_name(model: Any, arrays: Mapping[str, Any]) -> dict[str, Axes]:
    """Returns the axes that the nodes of a model name for its arrays, by name."""
    by_id = {
        id(array): axes for node in fmapper.fcollect(model) for _, array, axes in of_node(node)
    }
    return {name: by_id[id(array)] for name, array in arrays.items() if id(array) in by_id}
