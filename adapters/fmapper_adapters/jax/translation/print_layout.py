"""Views, shapes, parts of arrays, and new arrays."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Sequence
from typing import Any

from fmapper.translation import DType, Printing, Value, expr, literal, text
from fmapper_adapters.jax.translation.promotion import (
    call_of,
    is_float,
    is_number,
    method,
    narrow,
    number,
    number_in,
    promote,
)
from fmapper_adapters.jax.translation.subscripts import insert, pick, replace, slice_of, swap
from fmapper_adapters.jax.translation.table import dtype_code, prints


def sizes_of(p: Printing, shape: Sequence[int | str]) -> tuple[Any, ...]:
    """Returns sizes as code."""
    return tuple(size if isinstance(size, int) else p.size(size) for size in shape)


def in_dims(dim: int, ndim: int) -> int:
    """Returns a dimension counted from the front."""
    return dim % ndim if ndim else 0


def axes_of(dims: Any) -> Any:
    """Returns dimensions as code has them: a single one as a number."""
    return dims[0] if isinstance(dims, tuple) and len(dims) == 1 else dims


# --- shapes ---------------------------------------------------------------------------------


@prints("aten::view", "aten::view_copy", "aten::reshape", "aten::_reshape_copy",
        "aten::_unsafe_view")  # fmt: skip
def view(p: Printing, x: Value, size: Any) -> Any:
    """Prints `x.reshape(...)`."""
    if isinstance(size, DType):
        if narrow(size.name) == narrow(x.dtype):
            return x
        same = _bits(size.name) == _bits(x.dtype)
        if not same:
            return None
        return expr("jax.lax.bitcast_convert_type({0}, {1})", x, dtype_code(size.name))
    if p.shape == x.shape:
        return x
    if 0 in p.shape:
        size = sizes_of(p, p.shape)
    return method(x, "reshape", *(_with_rest(p, size) or ((),)))


def _with_rest(p: Printing, sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Returns sizes with -1 for one that is worked out, as people write it."""
    computed = [i for i, size in enumerate(sizes) if isinstance(size, ast.BinOp)]
    if len(computed) != 1 or 0 in p.shape or any(size in (0, -1) for size in sizes):
        return tuple(sizes)
    return (*sizes[: computed[0]], -1, *sizes[computed[0] + 1 :])


def _bits(dtype: str) -> int:
    digits = "".join(c for c in narrow(dtype) if c.isdigit())
    return int(digits) if digits and not dtype.startswith("complex") else 0


@prints("aten::flatten")
def flatten(p: Printing, x: Value, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Prints `x.reshape(...)`."""
    sizes = _with_rest(p, sizes_of(p, p.shape))
    return x if p.shape == x.shape else method(x, "reshape", *sizes)


@prints("aten::permute", "aten::permute_copy")
def permute(p: Printing, x: Value, dims: Sequence[int]) -> Any:
    """Prints `x.T`, `x.swapaxes(...)` or `x.transpose(...)`, whichever says the most."""
    order = [in_dims(d, x.ndim) for d in dims]
    moved = [i for i, d in enumerate(order) if i != d]
    if not moved:
        return x
    if x.ndim == 2:
        return swap(x)
    if len(moved) == 2:
        return _swap(x, *moved)
    return method(x, "transpose", *order)


def _swap(x: Value, a: int, b: int) -> ast.expr:
    if (a, b) == (x.ndim - 2, x.ndim - 1):
        a, b = -2, -1
    return expr("{0}.swapaxes({1}, {2})", x, a, b)


@prints("aten::transpose", "aten::swapaxes", "aten::swapdims")
def transpose(p: Printing, x: Value, dim0: int, dim1: int) -> Any:
    """Prints `x.swapaxes(dim0, dim1)`."""
    if not x.ndim or in_dims(dim0, x.ndim) == in_dims(dim1, x.ndim):
        return x
    if x.ndim == 2:
        return swap(x)
    return _swap(x, *sorted((in_dims(dim0, x.ndim), in_dims(dim1, x.ndim))))


@prints("aten::t")
def t(p: Printing, x: Value) -> Any:
    """Prints `x.T`."""
    return x if x.ndim < 2 else swap(x)


@prints("aten::movedim.int", "aten::moveaxis.int")
def movedim(p: Printing, x: Value, source: int, destination: int) -> Any:
    """Prints `jnp.moveaxis(x, source, destination)`."""
    return expr("jnp.moveaxis({0}, {1}, {2})", x, source, destination)


@prints("aten::unsqueeze")
def unsqueeze(p: Printing, x: Value, dim: int) -> Any:
    """Prints `x[:, None]`."""
    return insert(x, in_dims(dim, x.ndim + 1))


@prints("aten::squeeze")
def squeeze(p: Printing, x: Value, dim: Any = None) -> Any:
    """Prints `x.squeeze(dim)`, or the array itself where no size is one."""
    dims = range(x.ndim) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    gone = sorted({in_dims(d, x.ndim) for d in dims if x.ndim})
    gone = [d for d in gone if x.shape[d] == 1]
    if not gone:
        return x
    if len(gone) == 1 and (picked := pick(x, gone[0])) is not None:
        return picked
    if dim is None and all(isinstance(size, int) for size in x.shape):
        return expr("{0}.squeeze()", x)
    return expr("{0}.squeeze({1})", x, gone[0] if len(gone) == 1 else tuple(gone))


@prints("aten::expand", "aten::expand_copy")
def expand(p: Printing, x: Value, size: Sequence[Any], *, implicit: bool = False) -> Any:
    """Prints `jnp.broadcast_to(x, shape)`, or the array itself."""
    if p.shape == x.shape:
        return x
    shape = tuple(
        given if isinstance(given, ast.AST) else found
        for given, found in zip(size, sizes_of(p, p.shape), strict=True)
    )
    return expr("jnp.broadcast_to({0}, {1})", x, shape)


@prints("aten::cat", "aten::concat", "aten::concatenate")
def cat(p: Printing, arrays: Sequence[Value], dim: int = 0) -> Any:
    """Prints `jnp.concatenate([...], axis=dim)`."""
    kept = promote([a for a in arrays if a.shape != (0,)] or arrays[:1])
    if kept is None:
        return None
    if len(kept) == 1 and not (len(arrays) == 1 and isinstance(arrays[0].node, ast.Subscript)):
        return kept[0]  # else it may be all of a tuple, which the writer sees
    if in_dims(dim, len(p.shape)) == 0:
        return expr("jnp.concatenate({0})", kept)
    return expr("jnp.concatenate({0}, axis={1})", kept, dim)


@prints("aten::stack")
def stack(p: Printing, arrays: Sequence[Value], dim: int = 0) -> Any:
    """Prints `jnp.stack([...], axis=dim)`."""
    kept = promote(arrays)
    if kept is None:
        return None
    if in_dims(dim, len(p.shape)) == 0:
        return expr("jnp.stack({0})", kept)
    return expr("jnp.stack({0}, axis={1})", kept, dim)


@prints("aten::repeat", "aten::tile")
def repeat(p: Printing, x: Value, repeats: Sequence[Any]) -> Any:
    """Prints `jnp.tile(x, repeats)`."""
    if all(is_number(r, 1) for r in repeats) and p.shape == x.shape:
        return x
    return expr("jnp.tile({0}, {1})", x, tuple(repeats))


@prints("aten::repeat_interleave.self_int")
def repeat_interleave(
    p: Printing, x: Value, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> Any:
    """Prints `jnp.repeat(x, repeats, axis=dim)`."""
    return call_of("jnp.repeat", x, repeats, axis=dim) if x.ndim else None


@prints("aten::flip")
def flip(p: Printing, x: Value, dims: Sequence[int]) -> Any:
    """Prints `jnp.flip(x, axis=dims)`."""
    if not x.ndim or not dims:
        return x
    return expr("jnp.flip({0}, axis={1})", x, axes_of(tuple(dims)))


@prints("aten::roll")
def roll(p: Printing, x: Value, shifts: Any, dims: Any = ()) -> Any:
    """Prints `jnp.roll(x, shifts, axis=dims)`."""
    if not x.ndim or 0 in x.shape:
        return x
    shifts, dims = axes_of(shifts), axes_of(dims)
    if dims == ():
        return expr("jnp.roll({0}, {1})", x, shifts) if not isinstance(shifts, tuple) else None
    return expr("jnp.roll({0}, {1}, axis={2})", x, shifts, dims)


@prints("aten::diagonal", "aten::linalg_diagonal", "aten::diagonal_copy")
def diagonal(p: Printing, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Prints `jnp.diagonal(x, ...)`."""
    return expr("jnp.diagonal({0}, {1}, {2}, {3})", x, offset, dim1, dim2)


@prints("aten::as_strided", "aten::as_strided_copy")
def as_strided(
    p: Printing, x: Value, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Any:
    """Prints `as_strided(x, shape, strides)`, a function in the file."""
    offset = None if storage_offset is None or is_number(storage_offset, 0) else storage_offset
    return call_of("as_strided", x, tuple(size), tuple(stride), offset=offset)


# --- parts ----------------------------------------------------------------------------------


@prints("aten::slice", "aten::slice_copy")
def slice_(
    p: Printing, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """Prints `x[:, start:end]`, or the array itself."""
    if p.shape == x.shape and (is_number(step, 1) or 0 in x.shape):
        return x
    if isinstance(start, Value) or isinstance(end, Value):
        return None
    size = x.shape[dim]
    start = None if start is None or is_number(start, 0) else start
    if isinstance(end, int) and (end >= sys.maxsize or (isinstance(size, int) and end >= size)):
        end = None
    if isinstance(start, int) and isinstance(size, int) and start <= -size:
        start = None
    return replace(x, in_dims(dim, x.ndim), slice_of(start, end, None if step == 1 else step))


@prints("aten::select", "aten::select_copy")
def select(p: Printing, x: Value, dim: int, index: Any) -> Any:
    """Prints `x[:, index]`."""
    if isinstance(index, Value) and index.ndim:
        return None
    pairs = x.node
    if (
        isinstance(pairs, ast.Call)
        and text(pairs.func) == "as_pairs"
        and in_dims(dim, x.ndim) == (x.ndim - 1)
    ):
        return expr("{0}.imag" if is_number(index, 1) else "{0}.real", pairs.args[0])
    return replace(x, in_dims(dim, x.ndim), literal(index))


@prints("aten::narrow", "aten::narrow_copy")
def narrow_(p: Printing, x: Value, dim: int, start: Any, length: Any) -> Any:
    """Prints `x[:, start:start + length]`."""
    if not isinstance(start, int) or start < 0:
        return None
    stop = start + length if isinstance(length, int) else expr("{0} + {1}", start, length)
    return replace(x, in_dims(dim, x.ndim), slice_of(start or None, stop))


@prints("aten::split_with_sizes", "aten::split.sizes", "aten::split.default",
        "aten::split_with_sizes_copy", "aten::unsafe_split_with_sizes", "aten::split",
        "aten::split_copy", "aten::unsafe_split", "aten::chunk", "aten::unsafe_chunk",
        "aten::tensor_split.sections")  # fmt: skip
def split(p: Printing, x: Value, sizes: Any, dim: int = 0) -> Any:
    """Prints `jnp.split(x, places, axis=dim)`."""
    results = p.call.result
    if len(results) == 1:
        return expr("({0},)", x)
    parts = [shape[dim] for _, shape in results]
    if not parts:
        return None
    more = {} if in_dims(dim, x.ndim) == 0 else {"axis": dim}
    if len(set(parts)) == 1 and (isinstance(parts[0], int) or isinstance(sizes, int)):
        return call_of("jnp.split", x, len(parts), **more)
    if not all(isinstance(part, int) for part in parts[:-1]):
        return None
    places = [sum(int(part) for part in parts[:i]) for i in range(1, len(parts))]
    return call_of("jnp.split", x, places, **more)


@prints("aten::unbind", "aten::unbind_copy")
def unbind(p: Printing, x: Value, dim: int = 0) -> Any:
    """Prints `jnp.unstack(x, axis=dim)`."""
    return call_of("jnp.unstack", x, axis=dim or None)


@prints("sym::getitem")
def getitem(p: Printing, x: Any, index: Any) -> Any:
    """Prints `x[index]`, of a tuple in the code its element."""
    node = x.node if isinstance(x, Value) else x
    if isinstance(node, ast.Tuple | ast.List) and len(node.elts) > index:
        return literal(node.elts[index])
    return expr("{0}[{1}]", x, index)


# --- new arrays -----------------------------------------------------------------------------


@prints("aten::full")
def full(p: Printing, size: Sequence[Any], fill_value: Any, *, dtype: Any = None) -> Any:
    """Prints `jnp.full(shape, value, dtype)`, zeros and ones as such."""
    value = number_in(fill_value)
    if isinstance(value, complex):
        return None
    if isinstance(value, Value):
        return expr("jnp.full({0}, {1}, {2})", tuple(size), value, dtype_code(p.dtype))
    if isinstance(value, float) and not is_float(p.dtype):
        if not math.isfinite(value) or p.dtype == "bool":
            return None
        value = int(value)
    if p.dtype == "bool" and not isinstance(value, ast.AST):
        value = bool(value)
    if promote([value], p.dtype) is None and isinstance(value, int):
        return None
    code = dtype_code(p.dtype)
    if not isinstance(value, ast.AST) and value in (0, 1):
        made = "zeros" if value == 0 else "ones"
        if p.dtype == "float32":
            return expr(f"jnp.{made}({{0}})", tuple(size))
        return expr(f"jnp.{made}({{0}}, {{1}})", tuple(size), code)
    return expr("jnp.full({0}, {1}, {2})", tuple(size), number(value), code)


@prints("aten::zeros", "aten::empty")
def zeros(p: Printing, size: Sequence[Any], *, dtype: Any = None) -> Any:
    """Prints `jnp.zeros(shape, dtype)`."""
    return full(p, size, 0, dtype=dtype)


@prints("aten::ones")
def ones(p: Printing, size: Sequence[Any], *, dtype: Any = None) -> Any:
    """Prints `jnp.ones(shape, dtype)`."""
    return full(p, size, 1, dtype=dtype)


@prints("aten::new_zeros", "aten::new_empty")
def new_zeros(p: Printing, x: Value, size: Sequence[Any], *, dtype: Any = None) -> Any:
    """Prints `jnp.zeros(shape, dtype)`."""
    return full(p, size, 0)


@prints("aten::new_ones")
def new_ones(p: Printing, x: Value, size: Sequence[Any], *, dtype: Any = None) -> Any:
    """Prints `jnp.ones(shape, dtype)`."""
    return full(p, size, 1)


@prints("aten::new_full")
def new_full(p: Printing, x: Value, size: Sequence[Any], value: Any, *, dtype: Any = None) -> Any:
    """Prints `jnp.full(shape, value, dtype)`."""
    return full(p, size, value)


@prints("aten::full_like", "aten::zeros_like", "aten::empty_like", "aten::ones_like")
def full_like(p: Printing, x: Value, value: Any = None, *, dtype: Any = None) -> Any:
    """Prints `jnp.zeros_like(x)`, `jnp.ones_like(x)` or `jnp.full_like(x, value)`."""
    value = number_in(value)
    if isinstance(value, Value | complex):
        return None
    fraction = isinstance(value, float) and not value.is_integer()
    if fraction and not is_float(p.dtype):
        return None
    if promote([value], p.dtype) is None and isinstance(value, int):
        return None
    kept = narrow(p.dtype) == narrow(x.dtype)
    code = None if kept else dtype_code(p.dtype)
    name = p.call.op.partition("::")[2].partition("_")[0]
    if name == "full":
        return call_of("jnp.full_like", x, number(value), dtype=code)
    return call_of("jnp.ones_like" if name == "ones" else "jnp.zeros_like", x, dtype=code)


@prints("aten::arange.start_step", "aten::arange.start")
def arange(p: Printing, start: Any, end: Any, step: Any = 1, *, dtype: Any = None) -> Any:
    """Prints `jnp.arange(start, end, step, dtype=dtype)`."""
    given = (start, end, step)
    if any(isinstance(value, Value) for value in given):
        return None
    floats = any(isinstance(value, float) for value in given)
    if floats and not is_float(p.dtype):
        return None
    wanted = narrow(p.dtype)
    natural = "float32" if floats else "int32"
    args: tuple[Any, ...] = (end,) if is_number(start, 0) and is_number(step, 1) else given
    args = (start, end) if len(args) == 3 and is_number(step, 1) else args
    code = None if natural == wanted else dtype_code(wanted)
    return call_of("jnp.arange", *args, dtype=code)


@prints("aten::arange.default")
def arange_to(p: Printing, end: Any, *, dtype: Any = None) -> Any:
    """Prints `jnp.arange(end)`."""
    return arange(p, 0, end, dtype=dtype)


@prints("aten::linspace")
def linspace(p: Printing, start: Any, end: Any, steps: int, *, dtype: Any = None) -> Any:
    """Prints `jnp.linspace(start, end, steps)`."""
    if p.dtype != "float32" or isinstance(start, Value) or isinstance(end, Value):
        return None
    return expr("jnp.linspace({0}, {1}, {2})", start, end, steps)


@prints("aten::eye")
def eye(p: Printing, rows: Any, columns: Any = None, *, dtype: Any = None) -> Any:
    """Prints `jnp.eye(rows, columns, dtype=dtype)`."""
    same = columns is None or (text(literal(columns)) == text(literal(rows)))
    args = (rows,) if same else (rows, columns)
    code = None if p.dtype == "float32" else dtype_code(p.dtype)
    return call_of("jnp.eye", *args, dtype=code)


@prints("aten::tril", "aten::triu")
def triangle(p: Printing, x: Value, diagonal: Any = 0) -> Any:
    """Prints `jnp.tril(x, diagonal)`."""
    name = f"jnp.{p.call.op[6:10]}"
    return call_of(name, x, k=None if is_number(diagonal, 0) else diagonal)


@prints("aten::one_hot")
def one_hot(p: Printing, x: Value, num_classes: Any = -1) -> Any:
    """Prints `jax.nn.one_hot(x, count, dtype=jnp.int32)`."""
    if isinstance(num_classes, int) and num_classes < 0:
        return None
    return expr("jax.nn.one_hot({0}, {1}, dtype={2})", x, num_classes, dtype_code(p.dtype))


# --- edges ----------------------------------------------------------------------------------


@prints("aten::constant_pad_nd")
def constant_pad(p: Printing, x: Value, pad: Sequence[Any], value: Any = 0) -> Any:
    """Prints `jnp.pad(x, widths)`."""
    widths = _widths(x, pad)
    if widths is None:
        return None
    if all(width == (0, 0) for width in widths):
        return x
    if is_number(value, 0) or value is None:
        return expr("jnp.pad({0}, {1})", x, widths)
    if isinstance(value, float) and not is_float(x.dtype) and value.is_integer():
        value = int(value)
    if isinstance(value, Value) or (isinstance(value, float) and not is_float(x.dtype)):
        return None
    return expr("jnp.pad({0}, {1}, constant_values={2})", x, widths, number(value))


def _widths(x: Value, pad: Sequence[Any]) -> tuple[Any, ...] | None:
    if any(isinstance(width, int) and width < 0 for width in pad):
        return None
    ends = [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    return (*((0, 0),) * (x.ndim - len(ends)), *ends)


_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@prints("aten::pad")
def pad(
    p: Printing, x: Value, pad: Sequence[Any], mode: str = "constant", value: Any = None
) -> Any:
    """Prints `jnp.pad(x, widths, mode=mode)`."""
    if mode == "constant":
        return constant_pad(p, x, pad, value)
    widths = _widths(x, pad)
    return None if widths is None else expr("jnp.pad({0}, {1}, mode={2})", x, widths, _MODES[mode])


def _enter_padding(name: str, mode: str) -> None:
    @prints(name)
    def printer(p: Printing, x: Value, padding: Sequence[Any]) -> Any:
        widths = _widths(x, padding)
        return None if widths is None else expr("jnp.pad({0}, {1}, mode={2})", x, widths, mode)


for _dims in (1, 2, 3):
    _enter_padding(f"aten::reflection_pad{_dims}d", "reflect")
    _enter_padding(f"aten::replication_pad{_dims}d", "edge")
_enter_padding("aten::_pad_circular", "wrap")
