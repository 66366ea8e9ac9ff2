"""Arrays of a tree that checkpoints leave out."""

from __future__ import annotations

from typing import Any

from fmapper.backends.discovery import adapters
from fmapper.backends.nodes import Nodes
from fmapper.tree.walk import visit


def transient_in(tree: Any) -> set[int]:
    """Returns the identities of arrays that checkpoints of the frameworks leave out."""
    return {
        id(array)
        for _, node, kind in visit(tree, once=True)
        if kind is not None
        for adapter in adapters(Nodes)
        for array in adapter.transient(node)
    }
