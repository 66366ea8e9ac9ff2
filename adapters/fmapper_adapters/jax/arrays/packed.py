"""Arrays that pack several arrays side by side, each divided among devices by itself.

A `NamedSharding` gives a device one contiguous part of each dimension. Where the gate and up
weights of an MLP are packed in one array, half of the devices would hold only gates. A
`PackedArray` stores them block by block: a part of gate and the same part of up, then the next of
each.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding

from fmapper.backends import Box

_typeof: Any = getattr(jax, "typeof", None)  # since JAX 0.6
_Spec: Any = jax.sharding.PartitionSpec  # untyped in JAX
_shape_only: Any = jax.ShapeDtypeStruct


class PackedArray:
    """An array in blocks, each with an equal part of every array that is packed in it.

    It is a pytree with one leaf. NumPy and `jax.numpy` read it as the array in its original order;
    the latter may send parts between devices for that.

    Attributes:
        blocks: The array block by block, with an extra dimension for the blocks before `dim`, so
            that code that mistakes it for the array itself fails.
        dim: The dimension along which the arrays are packed, counted from the end.
        sizes: Their sizes along it.
    """

    def __init__(self, blocks: Any, dim: int, sizes: tuple[int, ...]) -> None:
        self.blocks, self.dim, self.sizes = blocks, dim, sizes

    def with_blocks(self, blocks: Any) -> PackedArray:
        """Returns an array that is packed like this one."""
        return PackedArray(blocks, self.dim, self.sizes)

    def in_order(self) -> Any:
        """Returns the array in its original order, whether traced or not."""
        if isinstance(self.blocks, jax.ShapeDtypeStruct):
            return _shape_only(self.shape, self.dtype)

        def join(blocks: Any) -> Any:
            flat = self.with_blocks(blocks).flat()
            return jnp.concatenate(separate(flat, self.dim, self.sizes, self.count), self.dim)

        return _by_xla(join, self.blocks, lambda axes: (*axes[: self._at], *axes[self._at + 1 :]))

    def flat(self) -> Any:
        """Returns the blocks one after the other, as an array of the same shape."""
        return self.blocks.reshape(self.shape)

    @property
    def _at(self) -> int:
        """The dimension that `blocks` has in addition to the array."""
        return len(self.blocks.shape) + self.dim

    @property
    def count(self) -> int:
        """The number of blocks."""
        return int(self.blocks.shape[self._at - 1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        dims = tuple(self.blocks.shape)
        return (*dims[: self._at - 1], sum(self.sizes), *dims[self._at + 1 :])

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.blocks.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.blocks.shape) - 1

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.blocks.size)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return int(self.blocks.size * self.blocks.dtype.itemsize)

    @property
    def sharding(self) -> Any:
        """The sharding of the blocks."""
        return self.blocks.sharding

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has all shards."""
        return bool(self.blocks.is_fully_addressable)

    def devices(self) -> Any:
        """Returns the devices that have shards of it."""
        return self.blocks.devices()

    def is_deleted(self) -> bool:
        """Returns whether the array was deleted, probably because it was donated."""
        return not isinstance(self.blocks, jax.ShapeDtypeStruct) and self.blocks.is_deleted()

    def astype(self, dtype: Any) -> PackedArray:
        """Returns the array in another dtype."""
        return self.with_blocks(self.blocks.astype(dtype))

    def __jax_array__(self) -> Any:
        return self.in_order()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        flat = np.asarray(self.blocks).reshape(self.shape)
        parts = separate(flat, self.dim, self.sizes, self.count)
        return np.concatenate(parts, self.dim, dtype=dtype)

    def __copy__(self) -> PackedArray:
        return self.with_blocks(self.blocks)

    def __deepcopy__(self, memo: Any) -> PackedArray:
        return self.with_blocks(copy.deepcopy(self.blocks, memo))

    def __reduce__(self) -> Any:
        """Pickles the array in its own order, as JAX pickles arrays without their mesh."""
        return jnp.asarray, (np.asarray(self),)

    def __repr__(self) -> str:
        return f"PackedArray({self.blocks!r}, {self.dim}, {self.sizes})"


tree_util.register_pytree_with_keys(
    PackedArray,
    lambda x: (((tree_util.GetAttrKey("blocks"), x.blocks),), (x.dim, x.sizes)),
    lambda how, children: PackedArray(next(iter(children)), *how),
)


def blocks_of(array: Any) -> Any:
    """Returns the blocks of a packed array, any other array unchanged."""
    return array.blocks if isinstance(array, PackedArray) else array


def in_order(array: Any) -> Any:
    """Returns a packed array in its original order, any other array unchanged."""
    return array.in_order() if isinstance(array, PackedArray) else array


def pack(array: Any, dim: int, sizes: tuple[int, ...], count: int) -> PackedArray:
    """Returns an array block by block, on the same devices.

    Args:
        array: The array, or its shape alone.
        dim: The dimension along which several arrays are packed in it.
        sizes: Their sizes.
        count: The number of blocks to make, each with an equal part of every array.
    """
    at = dim % len(array.shape)
    shape = (*array.shape[:at], count, sum(sizes) // count, *array.shape[at + 1 :])
    if isinstance(array, jax.ShapeDtypeStruct):
        blocks = _shape_only(shape, array.dtype)
    else:
        blocks = _by_xla(
            lambda x: interleave(x, at, sizes, count).reshape(shape),
            array,
            lambda axes: (*axes[: at + 1], None, *axes[at + 1 :]),
        )
    return PackedArray(blocks, at - len(array.shape), sizes)


def interleave(array: Any, dim: int, sizes: Sequence[int], count: int) -> Any:
    """Returns the elements of an array block by block."""
    at = dim % array.ndim
    ends = [*itertools.accumulate(sizes)]
    parts = [
        jax.lax.slice_in_dim(array, end - size, end, 1, at).reshape(
            *array.shape[:at], count, size // count, *array.shape[at + 1 :]
        )
        for end, size in zip(ends, sizes, strict=True)
    ]
    return jnp.concatenate(parts, at + 1).reshape(array.shape)


def separate(blocks: Any, dim: int, sizes: Sequence[int], count: int) -> list[Any]:
    """Splits an array in blocks, as returned by `flat`, into the packed arrays."""
    at, shape = dim % blocks.ndim, blocks.shape
    apart = blocks.reshape(*shape[:at], count, shape[at] // count, *shape[at + 1 :])
    parts, end = [], 0
    for size in sizes:
        start, end = end, end + size // count
        part = apart[(*[slice(None)] * (at + 1), slice(start, end))]
        parts.append(part.reshape(*shape[:at], size, *shape[at + 1 :]))
    return parts


def boxes_in_order(array: PackedArray, box: Box) -> Iterator[tuple[Box, Box]]:
    """Yields the boxes of an array on a device, each with the box of its shard that holds it.

    Args:
        array: The array.
        box: The part of `blocks` on the device, which consists of whole blocks.
    """
    at = array.dim % array.ndim
    start, stop = box[at]
    before, after = box[:at], box[at + 2 :]
    for number in range(start, stop):
        low = offset = 0
        for size in array.sizes:
            part = size // array.count
            span = low + number * part, low + (number + 1) * part
            there = (number - start, number - start + 1), (offset, offset + part)
            yield (*before, span, *after), (*_whole(before), *there, *_whole(after))
            low, offset = low + size, offset + part


def _whole(box: Box) -> Box:
    return tuple((0, stop - start) for start, stop in box)


def _by_xla(
    function: Callable[[Any], Any],
    array: Any,
    lies: Callable[[tuple[Any, ...]], tuple[Any, ...]],
) -> Any:
    """Calls a function that reorders an array; XLA chooses the shardings inside.

    Args:
        function: The function.
        array: The array.
        lies: Maps the mesh axes of each dimension of the array to those of the result.
    """
    sharding: Any = getattr(_typeof(array), "sharding", None) if _typeof is not None else None
    axes = getattr(getattr(sharding, "mesh", None), "explicit_axes", None)
    if not axes or isinstance(array, np.ndarray):
        return function(array)
    entries = (*sharding.spec, *[None] * (array.ndim - len(sharding.spec)))
    wanted = NamedSharding(sharding.mesh, _Spec(*lies(entries)))
    auto_axes: Any = jax.sharding.auto_axes  # type: ignore[attr-defined,unused-ignore]
    return auto_axes(function, axes=axes, out_sharding=wanted)(array)
