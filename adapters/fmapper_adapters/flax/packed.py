"""Variables with arrays that pack several arrays side by side, each sharded by itself.

NNX flattens a pytree in a variable, so such a variable holds only the blocks; the other attributes
of the `PackedArray` are in its metadata. Optimizers of Flax copy both.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any
from weakref import WeakValueDictionary

from fmapper_adapters.jax.libraries import PackedArray

# In the metadata: the dimension, and the sizes of the packed arrays along it.
PACKED = "fmapper_packed"

_made: WeakValueDictionary[Any, PackedArray] = WeakValueDictionary()  # one for the same blocks


def of_blocks(value: Any, metadata: Mapping[str, Any]) -> Any:
    """Returns the array in a variable with this value and metadata."""
    packing = metadata.get(PACKED)
    if packing is None or isinstance(value, PackedArray):
        return value
    key = id(value), packing
    packed = _made.get(key)
    if packed is None:
        packed = _made[key] = PackedArray(value, *packing)
    return packed


def to_blocks(array: Any, metadata: MutableMapping[str, Any]) -> Any:
    """Returns the value of a variable for an array, and changes its metadata accordingly."""
    metadata.pop(PACKED, None)
    if not isinstance(array, PackedArray):
        return array
    metadata[PACKED] = array.dim, array.sizes
    return array.blocks
