"""Variables with arrays that hold several side by side, each divided among devices by itself.

NNX takes a pytree within a variable apart, so such a variable has the blocks alone, and what else a
`PackedArray` knows in its metadata. Optimizers of Flax copy both.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any
from weakref import WeakValueDictionary

from fmapper_adapters.jax.libraries import PackedArray

# In the metadata: the dimension, and the sizes of what lies side by side there.
PACKED = "fmapper_packed"

_made: WeakValueDictionary[Any, PackedArray] = WeakValueDictionary()  # one for the same blocks


def of_blocks(value: Any, metadata: Mapping[str, Any]) -> Any:
    """Returns the array in a variable with this value and metadata."""
    how = metadata.get(PACKED)
    if how is None or isinstance(value, PackedArray):
        return value
    key = id(value), how
    found = _made.get(key)
    if found is None:
        found = _made[key] = PackedArray(value, *how)
    return found


def to_blocks(array: Any, metadata: MutableMapping[str, Any]) -> Any:
    """Returns the value of a variable for an array, and changes its metadata accordingly."""
    metadata.pop(PACKED, None)
    if not isinstance(array, PackedArray):
        return array
    metadata[PACKED] = array.dim, array.sizes
    return array.blocks
