"""Views: the same elements in another shape, order or dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import along, dimensions, lowering, pointwise, regroups
from fmapper_adapters.jax.aten.types import is_complex, promote


@lowering(
    "aten::view",
    "aten::view_copy",
    "aten::reshape",
    "aten::_reshape_copy",
    int64="moves",
    dims=regroups,
)
@lowering("aten::_unsafe_view", whole=False, int64="moves", dims=regroups)
def view(x: Any, size: Any) -> jax.Array:
    """Returns the elements row by row in another shape with at most one -1, or bits as a dtype."""
    if not isinstance(size, tuple):
        return view_bits(x, size)
    return x.reshape(_known_sizes(x, size))


def view_bits(x: Any, dtype: Any) -> jax.Array:
    """Views the bits as another dtype; the last dimension grows or shrinks with the item size."""
    if x.dtype == dtype:
        return x
    if x.dtype == bool:
        x = x.astype("uint8")
    if is_complex(x):
        x = view_as_real(x).reshape(*x.shape[:-1], -1) if x.ndim else view_as_real(x)
    if is_complex(dtype):
        part = np.dtype(dtype).type(0).real.dtype
        pairs = view_bits(x, part)
        return view_as_complex(pairs.reshape(*pairs.shape[:-1], pairs.shape[-1] // 2, 2))
    if dtype.kind == "b":
        return view_bits(x, np.dtype("uint8")) != 0
    had, wanted = x.dtype.itemsize, np.dtype(dtype).itemsize
    if wanted > had:
        x = x.reshape(*x.shape[:-1], x.shape[-1] // (wanted // had), wanted // had)
    y = jax.lax.bitcast_convert_type(x, dtype)
    return y.reshape(*y.shape[:-2], -1) if wanted < had and y.ndim > 1 else y


def _known_sizes(x: Any, size: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the sizes with -1 resolved, also if another size is zero, where JAX cannot."""
    sizes = [s for s in size if not (isinstance(s, int) and s == -1)]
    if len(sizes) == len(size):
        return tuple(size)
    count = math.prod(sizes)
    missing = math.prod(x.shape) // count if not (isinstance(count, int) and count == 0) else 0
    return tuple(missing if isinstance(s, int) and s == -1 else s for s in size)


@lowering("aten::permute", "aten::permute_copy", int64="moves", dims=dimensions.permute)
def permute(x: Any, dims: Sequence[int]) -> jax.Array:
    """Returns the dimensions in another order."""
    return jnp.transpose(x, dims)


@lowering("aten::swapaxes", "aten::swapdims")
@lowering("aten::transpose", whole=False, int64="moves", dims=dimensions.transpose)
def transpose(x: Any, dim0: int, dim1: int) -> jax.Array:
    """Returns two dimensions swapped."""
    return x if x.ndim == 0 else jnp.swapaxes(x, dim0, dim1)


@lowering("aten::t", whole=False, int64="moves", dims=dimensions.t)
def t(x: Any) -> jax.Array:
    """Returns a matrix transposed."""
    return x.T


@lowering("aten::unsqueeze", int64="moves", dims=regroups)
def unsqueeze(x: Any, dim: int) -> jax.Array:
    """Inserts a dimension of size one."""
    return jnp.expand_dims(x, dim)


@lowering("aten::squeeze", whole=False, int64="moves", dims=regroups)
def squeeze(x: Any, dim: Any = None) -> jax.Array:
    """Removes dimensions of size one: all of them, or those among `dim`."""
    if dim is None:
        dims = list(range(x.ndim))
    else:
        dims = [d % max(x.ndim, 1) for d in (dim if isinstance(dim, tuple) else (dim,))]
    gone = tuple(d for d in dims if d < x.ndim and isinstance(x.shape[d], int) and x.shape[d] == 1)
    return jnp.squeeze(x, gone)


@lowering("aten::expand", int64="moves", dims=pointwise)
def expand(x: Any, size: Sequence[Any], *, implicit: bool = False) -> jax.Array:
    """Broadcasts to a size, where -1 keeps a dimension's size."""
    front = len(size) - x.ndim
    shape = tuple(
        x.shape[i - front] if isinstance(s, int) and s == -1 else s for i, s in enumerate(size)
    )
    return jnp.broadcast_to(x, shape)


@lowering("aten::cat", int64="moves", dims=along("dim", 1, 0))
def cat(arrays: Sequence[Any], dim: int = 0) -> jax.Array:
    """Concatenates arrays; those of shape (0,) are left out, as in torch."""
    arrays = promote(*arrays)
    kept = [a for a in arrays if a.shape != (0,)] or arrays[:1]
    return jnp.concatenate(kept, dim)


@lowering("aten::stack", whole=False, int64="moves")
def stack(arrays: Sequence[Any], dim: int = 0) -> jax.Array:
    """Returns arrays of one shape along a new dimension."""
    return jnp.stack(promote(*arrays), dim)


@lowering("aten::repeat", int64="moves")
@lowering("aten::tile", whole=False)
def repeat(x: Any, repeats: Sequence[Any]) -> jax.Array:
    """Tiles the array along each dimension; new dimensions come first."""
    return jnp.tile(x, tuple(repeats))


@lowering("aten::flip", int64="moves", dims=along("dims", 1))
def flip(x: Any, dims: Sequence[int]) -> jax.Array:
    """Reverses dimensions."""
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@lowering("aten::roll", int64="moves", dims=along("dims", 2, None))
def roll(x: Any, shifts: Any, dims: Any = ()) -> jax.Array:
    """Rolls along dimensions; without dimensions, over the flattened array."""
    if x.size == 0 or x.ndim == 0:
        return x
    shifts = shifts if isinstance(shifts, tuple) else (shifts,)
    dims = dims if isinstance(dims, tuple) else (dims,)
    if not dims:
        return jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)
    return jnp.roll(x, shifts, dims)


@lowering("aten::rot90", int64="moves")
def rot90(x: Any, k: int = 1, dims: tuple[int, int] = (0, 1)) -> jax.Array:
    """Rotates by k quarter turns in the plane of two dimensions."""
    return jnp.rot90(x, k, dims)


@lowering("aten::diagonal", "aten::linalg_diagonal", int64="moves")
@lowering("aten::diagonal_copy", whole=False, int64="moves")
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """Returns the diagonals of the matrices that two dimensions span, as the last dimension."""
    return jnp.diagonal(x, offset, dim1, dim2)


@lowering("aten::diag_embed")
def diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    """Returns matrices in two new dimensions with x on their diagonals."""
    size = x.shape[-1] + abs(offset)
    rows = jnp.arange(x.shape[-1]) + max(-offset, 0)
    columns = jnp.arange(x.shape[-1]) + max(offset, 0)
    y = jnp.zeros((*x.shape[:-1], size, size), x.dtype).at[..., rows, columns].set(x)
    return jnp.moveaxis(y, (-2, -1), (dim1, dim2))


@lowering("aten::unfold", int64="moves", dims=dimensions.windows)
@lowering("aten::unfold_copy", whole=False, int64="moves")
def unfold(x: Any, dimension: int, size: int, step: int) -> jax.Array:
    """Returns windows of a size, a step apart, along a dimension, with elements in the last one."""
    if x.ndim == 0:
        return x.reshape(1)[:size]
    dim = dimension % x.ndim
    count = (x.shape[dim] - size) // step + 1
    starts = jnp.arange(count) * step
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=dim, mode="clip")
    return jnp.moveaxis(windows, dim + 1, -1)


@lowering("aten::view_as_complex", "aten::view_as_complex_copy")
def view_as_complex(x: Any) -> jax.Array:
    """Joins pairs of real numbers, along the last dimension, to complex ones."""
    return jax.lax.complex(x[..., 0], x[..., 1])


@lowering("aten::view_as_real", "aten::view_as_real_copy")
def view_as_real(x: Any) -> jax.Array:
    """Splits complex numbers into pairs of real ones, along a new last dimension."""
    return jnp.stack([x.real, x.imag], -1)


@lowering("aten::as_strided", "aten::as_strided_copy", int64="moves")
def as_strided(
    x: Any, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> jax.Array:
    """Returns elements of a contiguous array at `offset + sum(index * stride)`.

    The recorder of torch ensures that the array is contiguous.
    """
    at = strided_positions(size, stride, storage_offset)
    return jnp.take(x.reshape(-1), at, mode="clip")


@lowering("aten::as_strided_scatter")
def as_strided_scatter(
    x: Any, source: Any, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> jax.Array:
    """Returns a contiguous array with the elements at strided positions replaced."""
    at = strided_positions(size, stride, storage_offset)
    return x.reshape(-1).at[at].set(source.astype(x.dtype)).reshape(x.shape)


def strided_positions(size: Sequence[Any], stride: Sequence[Any], offset: Any) -> Any:
    """Returns where in storage each element of a strided view is, of the view's shape."""
    at = jnp.full((), 0 if offset is None else offset, "int32")
    for n, step in zip(size, stride, strict=True):
        at = at[..., None] + jnp.arange(n, dtype="int32") * step
    return at


@lowering("aten::pixel_shuffle")
def pixel_shuffle(x: Any, upscale_factor: int) -> jax.Array:
    """Returns blocks of channels as pixels: (..., c r r, h, w) to (..., c, h r, w r)."""
    r = upscale_factor
    *batch, c, h, w = x.shape
    y = x.reshape(*batch, c // (r * r), r, r, h, w)
    n = len(batch)
    y = jnp.transpose(y, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return y.reshape(*batch, c // (r * r), h * r, w * r)


@lowering("aten::pixel_unshuffle")
def pixel_unshuffle(x: Any, downscale_factor: int) -> jax.Array:
    """Returns pixels as blocks of channels: (..., c, h r, w r) to (..., c r r, h, w)."""
    r = downscale_factor
    *batch, c, h, w = x.shape
    y = x.reshape(*batch, c, h // r, r, w // r, r)
    n = len(batch)
    y = jnp.transpose(y, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return y.reshape(*batch, c * r * r, h // r, w // r)


@lowering("aten::channel_shuffle")
@lowering("aten::native_channel_shuffle", whole=False)
def channel_shuffle(x: Any, groups: int) -> jax.Array:
    """Returns channels of all groups in turn."""
    n, c, *space = x.shape
    return jnp.swapaxes(x.reshape(n, groups, c // groups, *space), 1, 2).reshape(x.shape)
