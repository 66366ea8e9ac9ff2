"""Products of matrices, over any dimensions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmapper import ConversionError
from fmapper.programs import DType
from fmapper_adapters.torch.lax import dimensions, types
from fmapper_adapters.torch.lax.layout import indices
from fmapper_adapters.torch.lax.layout.dims import flatten, permute, product, unflatten
from fmapper_adapters.torch.lax.matrices import wide_products
from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model.emit import current

Product = Callable[[Any, Any], Any]

# torch computes with full precision unless the process sets another.
_FULL = {"default", "high", "highest", "fastest", "float32", "bfloat16", "tensorfloat32"}
_FULL |= {"f32_f32_f32", "f64_f64_f64", "tf32_tf32_f32", "tf32_tf32_f32_x3"}
_FULL |= {"bf16_bf16_f32_x3", "bf16_bf16_f32_x6", "bf16_bf16_f32_x9"}
_ROUNDED = {
    "bf16_bf16_f32": torch.bfloat16,
    "bf16_bf16_bf16": torch.bfloat16,
    "f16_f16_f32": torch.float16,
    "f16_f16_f16": torch.float16,
}
_EXACT = 53  # bits of integers that float64 holds exactly


@lax("dot_general", takes_avals=True, dims=dimensions.dot_general)
def dot_general(
    x: Any,
    y: Any,
    *,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    avals: Avals,
) -> Any:
    (left, right), (batch_left, batch_right) = dimension_numbers

    def multiply(a: Any, b: Any) -> Any:
        return contract(a, b, left, right, batch_left, batch_right)

    depth = product([x.shape[d] for d in left])
    x, y = round_operand(x, precision), round_operand(y, precision)
    dtype = current().dtype(avals.results[0][0])
    if {x.dtype, y.dtype} <= {*wide_products.HALVES} and left:
        if dtype is torch.float32 and not batch_left:
            return contract(x, y, left, right, (), (), _wide)
        if x.dtype is y.dtype is dtype:
            return contract(x, y, left, right, batch_left, batch_right, _of_halves)
    return cast_result(multiply, x, y, depth, avals, x.dtype is torch.bool)


def _wide(x: Any, y: Any) -> Any:
    return current().call(wide_products.matmul, x, y)


def _of_halves(x: Any, y: Any) -> Any:
    return current().call(wide_products.matmul_of_halves, x, y)


def round_operand(x: Any, precision: Any) -> Any:
    """Rounds an operand as an algorithm requires.

    Raises:
        ConversionError: torch lacks the precision.
    """
    names = set(precision) if isinstance(precision, tuple | list) else {precision or "default"}
    for name in names:
        if name in _ROUNDED:
            return x.to(_ROUNDED[name]).to(x.dtype)
        if name not in _FULL:
            raise ConversionError(f"the precision {name}: torch has no such product; omit it")
    return x


def cast_result(multiply: Product, x: Any, y: Any, depth: Any, avals: Avals, logical: bool) -> Any:
    """Casts a product to the dtype of JAX.

    Args:
        multiply: Sums of products of numbers of one dtype.
        x: An operand.
        y: The other operand.
        depth: The number of products that are added for one element.
        avals: The abstract values of the call.
        logical: Whether the operands are bools.
    """
    name = avals.results[0][0]
    dtype = current().dtype(name)
    if dtype is torch.bool:
        return multiply(x.to(torch.float32), y.to(torch.float32)) != 0
    if not (dtype.is_floating_point or dtype.is_complex):
        return _integers(multiply, x, y, depth, dtype, avals)
    if dtype.is_floating_point and x.dtype.is_complex is not y.dtype.is_complex:
        x, y = (torch.real(z) if z.dtype.is_complex else z for z in (x, y))
    common = dtype
    for operand in (x, y):
        kind = operand.dtype
        if kind.is_complex or (kind.is_floating_point and kind.itemsize > 1):
            common = torch.promote_types(common, kind)
    if common.is_floating_point and common.itemsize == 1:
        common = torch.float32
    names = [name for name, _ in avals.operands]
    return _as(multiply(_float(x, names[0], common), _float(y, names[1], common)), dtype)


def _float(x: Any, name: str, dtype: torch.dtype) -> Any:
    """Casts an operand of any dtype to floats or complex numbers."""
    if name != "uint64":
        return _as(widen(x, name), dtype)
    signed = x.to(dtype)  # as signed: too small by 2**64
    return torch.where(x < 0, signed + float(1 << 64), signed)


def _as(x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype is dtype else x.to(dtype)


def _integers(
    multiply: Product, x: Any, y: Any, depth: Any, dtype: torch.dtype, avals: Avals
) -> Any:
    """Multiplies integers in float64 if that is fast and holds every sum exactly."""
    bits = [_bits(operand.dtype) for operand in (x, y)]
    x, y = (
        widen(operand, name) for operand, (name, _) in zip((x, y), avals.operands, strict=False)
    )
    if isinstance(depth, int) and sum(bits) + depth.bit_length() <= _EXACT:
        exact = multiply(x.to(torch.float64), y.to(torch.float64))
        return _as(exact.to(torch.int64), dtype)
    return multiply(_as(x, dtype), _as(y, dtype))


def _bits(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.bool else types.bits_of(dtype)


def widen(x: Any, name: str) -> Any:
    """Widens carried unsigned integers to their value; 64-bit ones are unchanged."""
    return x if name == "uint64" or not types.is_carried(name) else indices.index(x, name)


def contract(
    x: Any,
    y: Any,
    left: Sequence[int],
    right: Sequence[int],
    batch_left: Sequence[int],
    batch_right: Sequence[int],
    matmul: Product = torch.matmul,
) -> Any:
    """Contracts dimensions; batch dimensions come first, then the remaining ones of x and of y."""
    pairs = sorted(zip(left, right, strict=True))
    left, right = [a for a, _ in pairs], [b for _, b in pairs]
    free_left = [d for d in range(x.ndim) if d not in (*left, *batch_left)]
    free_right = [d for d in range(y.ndim) if d not in (*right, *batch_right)]
    rows, columns = [x.shape[d] for d in free_left], [y.shape[d] for d in free_right]
    batch = len(batch_left)
    if not left:
        x = permute(x, [*batch_left, *free_left])
        y = permute(y, [*batch_right, *free_right])
        if columns and x.ndim:
            x = x[(..., *[None] * len(columns))]
        if batch and rows:
            y = y[(*[slice(None)] * batch, *[None] * len(rows))]
        return x * y
    x = permute(x, [*batch_left, *free_left, *left])
    y = permute(y, [*batch_right, *right, *free_right])
    x = flatten(x, batch + len(rows), len(left))
    y = flatten(y, batch, len(left))
    if not batch:
        y = flatten(y, 1, len(columns)) if len(columns) > 1 else y
        result = matmul(x, y)
        return unflatten(result, -1, columns) if len(columns) > 1 else result
    x = flatten(x, batch, len(rows))
    y = flatten(y, batch + 1, len(columns))
    result = unflatten(matmul(x, y), -1, columns)
    return unflatten(result, batch, rows)


@lax("ragged_dot_general", takes_avals=True)
def ragged_dot_general(
    x: Any,
    y: Any,
    group_sizes: Any,
    *,
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    group_offset: Any = None,
    avals: Avals,
) -> Any:
    """Multiplies groups of rows, each group by its own matrix.

    Raises:
        ConversionError: A group offset is given.
    """
    if group_offset is not None:
        raise ConversionError(
            "ragged_dot_general with group_offset: torch does not support it; omit it"
        )
    numbers = ragged_dot_dimension_numbers
    (left, right), (batch_left, batch_right) = numbers["dot_dimension_numbers"]
    (ragged,) = numbers["lhs_ragged_dimensions"]
    groups = tuple(numbers["rhs_group_dimensions"])
    x, y = round_operand(x, precision), round_operand(y, precision)
    if ragged in batch_left:

        def within(a: Any, b: Any) -> Any:
            return contract(a, b, left, right, batch_left, batch_right)

        return cast_result(within, x, y, product([x.shape[d] for d in left]), avals, False)
    if group_sizes.ndim != 1:
        raise ConversionError(
            "ragged_dot_general with sizes of groups that differ over a batch; use jax.lax.map, "
            "or one-hot products"
        )
    sizes = indices.index(group_sizes, avals.operands[2][0])
    ends = torch.cumsum(sizes, 0)
    at = indices.steps(x.shape[ragged])
    mask = (at < ends.unsqueeze(1)) & (at >= (ends - sizes).unsqueeze(1))
    view = [1] * x.ndim
    view[ragged] = x.shape[ragged]
    mask = mask.reshape((mask.shape[0], *view))
    x = torch.where(mask, x, 0)  # one copy for each group, before the other dimensions
    left, batch_left = [d + 1 for d in left], [d + 1 for d in batch_left]
    if groups:
        left, right = [0, *left], [groups[0], *right]

    def multiply(a: Any, b: Any) -> Any:
        return contract(a, b, left, right, batch_left, batch_right)

    depth = product([x.shape[d] for d in left])
    result = cast_result(multiply, x, y, depth, avals, False)
    if not groups and batch_left:  # groups are first, before the batch
        result = result.movedim(len(batch_left), 0)
    return result
