"""Arrays of a tree that checkpoints leave out."""

from __future__ import annotations

from typing import Any

from fmapper.backends.discovery import adapters
from fmapper.backends.nodes import Nodes
from fmapper.tree.fmap import fcollect


def transient_in(tree: Any) -> set[int]:
    """Returns the identities of arrays that checkpoints of the frameworks leave out."""
    return {
        id(array)
        for node in fcollect(tree)
        for adapter in adapters(Nodes)
        for array in adapter.transient(node)
    }
