"""Operations as a person writes them for JAX, with the sizes of the source instead of numbers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from fmapper.translation import DType, Printing, Value, expr, literal, text
from fmapper_translate.walk.errors import NotTranscribed

IDIOMS: dict[str, Callable[..., Any]] = {}


def _idiom(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        IDIOMS.update(dict.fromkeys((f"aten::{name}" for name in names), function))
        return function

    return add


def _method(x: Any, name: str, *args: Any) -> ast.expr:
    node = ast.Attribute(literal(x), name, ast.Load())
    return ast.Call(node, [literal(arg) for arg in args], [])


def _shape(x: Value, start: int | None, stop: int | None) -> list[ast.expr]:
    return [expr(f"{{0}}.shape[{at}]", x) for at in range(x.ndim)[start:stop]]


@_idiom("view", "reshape", "_unsafe_view")
def _view(p: Printing, x: Value, size: Any) -> Any:
    return None if isinstance(size, DType) else _method(x, "reshape", *size)


@_idiom("transpose")
def _transpose(p: Printing, x: Value, dim0: int, dim1: int) -> Any:
    return _method(x, "swapaxes", dim0, dim1)


@_idiom("unsqueeze")
def _unsqueeze(p: Printing, x: Value, dim: Any) -> Any:
    return None if isinstance(dim, int) else expr("jnp.expand_dims({0}, {1})", x, dim)


def _expand_dims(p: Printing, x: Value, dim: Any) -> Any:
    return expr("jnp.expand_dims({0}, {1})", x, dim)


def _chunk_of_any(p: Printing, x: Value, chunks: Any, dim: Any = 0) -> Any:
    return expr("chunk({0}, {1}, {2})", x, chunks, dim)


def _split_any(p: Printing, x: Value, size: Any, dim: Any = 0) -> Any:
    if isinstance(size, tuple):
        return expr("split({0}, {1}, {2})", x, size, dim)
    start, stop = literal(size), expr("{0}.shape[{1}]", x, dim)
    return expr("jnp.split({0}, [*range({1}, {2}, {1})], axis={3})", x, start, stop, dim)


def _avg_pool_of_any(
    p: Printing, x: Value, window: Any, strides: Any = (), padding: Any = (0,), *rest: Any
) -> Any:
    if rest or set(padding) != {0}:
        return None
    return expr("avg_pool({0}, {1}, {2})", x, tuple(window), tuple(strides or window))


# Operations as one call for arrays of any number of dimensions, or of any sizes.
VARIED: dict[str, Callable[..., Any]] = {
    "aten::permute": lambda p, x, dims: _method(x, "transpose", *dims),
    "aten::unsqueeze": _expand_dims, "aten::chunk": _chunk_of_any, "aten::split": _split_any,
    "aten::split_with_sizes": _split_any, "aten::avg_pool1d": _avg_pool_of_any,
    "aten::avg_pool2d": _avg_pool_of_any,
}  # fmt: skip


@_idiom("chunk")
def _chunk(p: Printing, x: Value, chunks: Any, dim: int = 0) -> Any:
    is_number = isinstance(chunks, int)
    return None if is_number else expr("chunk({0}, {1}, {2})", x, chunks, dim)


@_idiom("flatten")
def _flatten(p: Printing, x: Value, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % x.ndim, end_dim % x.ndim
    if start >= end:
        return x
    if start > 0 and not isinstance(x.node, ast.Name | ast.Attribute):
        return expr("flatten({0}, {1}, {2})", x, start_dim, end_dim)
    return _method(x, "reshape", *_shape(x, 0, start), -1, *_shape(x, end + 1, None))


@_idiom("unflatten")
def _unflatten(p: Printing, x: Value, dim: int, sizes: Any) -> Any:
    dim %= x.ndim
    return _method(x, "reshape", *_shape(x, 0, dim), *sizes, *_shape(x, dim + 1, None))


@_idiom("expand")
def _expand(p: Printing, x: Value, size: Any, *, implicit: bool = False) -> Any:
    new = len(size) - x.ndim
    if -1 in size and not isinstance(x.node, ast.Name | ast.Attribute | ast.Subscript):
        return expr("expand({0}, {1})", x, ast.Tuple([literal(s) for s in size], ast.Load()))
    sizes = [expr(f"{{0}}.shape[{at - new}]", x) if isinstance(s, int) and s == -1 else s
             for at, s in enumerate(size)]  # fmt: skip
    return expr("jnp.broadcast_to({0}, {1})", x, tuple(sizes))


@_idiom("expand_as")
def _expand_as(p: Printing, x: Value, y: Value) -> Any:
    return expr("jnp.broadcast_to({0}, {1}.shape)", x, y)


@_idiom("view_as", "reshape_as")
def _view_as(p: Printing, x: Value, y: Value) -> Any:
    return expr("{0}.reshape({1}.shape)", x, y)


@_idiom("type_as")
def _type_as(p: Printing, x: Value, y: Value) -> Any:
    return expr("{0}.astype({1}.dtype)", x, y)


@_idiom("to")
def _to(p: Printing, x: Value, *rest: Any, dtype: Any = None) -> Any:
    if p.dtype != x.dtype and _jax_dtype(p.dtype) == _jax_dtype(x.dtype):
        return x
    if p.dtype == x.dtype and p.call.op.rpartition(".")[2] in ("device", "dtype_layout"):
        return x
    other = next((item for item in rest if isinstance(item, Value)), None)
    if other is not None:
        return expr("{0}.astype({1}.dtype)", x, other)
    for item in (*rest, dtype):
        if isinstance(item, ast.expr):
            return expr("{0}.astype({1})", x, item)
        if isinstance(item, DType):
            return expr(f"{{0}}.astype(jnp.{_jax_dtype(item.name)})", x)
    return x


def _jax_dtype(name: str) -> str:
    return {"int64": "int32", "float64": "float32", "bool": "bool_"}.get(name, name)


@_idiom("cat", "concat", "concatenate", "stack")
def _cat(p: Printing, arrays: Any, dim: int = 0) -> Any:
    name = "stack" if "stack" in p.call.op else "concatenate"
    listed = arrays.value if isinstance(arrays, ast.Starred) else list(arrays)
    if dim == 0:
        return expr(f"jnp.{name}({{0}})", listed)
    return expr(f"jnp.{name}({{0}}, axis={{1}})", listed, dim)


@_idiom("einsum")
def _einsum(p: Printing, equation: Any, operands: Any, **_: Any) -> Any:
    is_list = isinstance(operands, ast.Starred)  # of which the dtypes are equal, in PyTorch
    return expr("jnp.einsum({0}, *{1})", equation, operands.value) if is_list else None


@_idiom("broadcast_tensors")
def _broadcast(p: Printing, arrays: Any) -> Any:
    listed = list(arrays)
    if len({item.shape for item in listed}) == 1:
        return ast.Tuple([literal(item) for item in listed], ast.Load())
    return ast.Call(expr("jnp.broadcast_arrays"), [literal(item) for item in listed], [])


@_idiom("constant_pad_nd", "pad")
def _pad(p: Printing, x: Value, sizes: Any, *rest: Any) -> Any:
    made = [item.value for item in sizes if isinstance(item, ast.Subscript)]
    is_one = len(made) == len(sizes) and len({*map(text, made)}) == 1
    has_parts = any(isinstance(item, ast.Starred) for item in sizes)  # of any number
    mode = rest[0] if rest and isinstance(rest[0], str) else "constant"
    if not (is_one or has_parts) or mode != "constant":
        return None
    whole = made[0] if is_one else ast.Tuple([*map(literal, sizes)], ast.Load())
    numbers = [item for item in rest if not isinstance(item, str) and item is not None]
    if numbers in ([], [0], [0.0]):
        return expr("pad({0}, {1})", x, whole)
    return expr("pad({0}, {1}, {2})", x, whole, numbers[0])


@_idiom("hstack", "vstack", "dstack", "column_stack")
def _stack_along(p: Printing, arrays: Any) -> Any:
    listed = arrays.value if isinstance(arrays, ast.Starred) else list(arrays)
    name = p.call.op.removeprefix("aten::").partition(".")[0]
    return expr(f"jnp.{name}({{0}})", listed)


@_idiom("zero")
def _zero(p: Printing, x: Value) -> Any:
    return expr("jnp.zeros_like({0})", x)


@_idiom("detach")
def _detach(p: Printing, x: Value) -> Any:
    return expr("jax.lax.stop_gradient({0})", x)


@_idiom("adaptive_avg_pool2d")
def _pool(p: Printing, x: Value, size: Any) -> Any:
    if set(size) != {1}:
        return None
    return expr("{0}.mean(axis=(-2, -1), keepdims=True)", x)


@_idiom("batch_norm")
def _batch_norm(
    p: Printing, x: Value, weight: Any, bias: Any, mean: Any, var: Any, training: bool,
    momentum: Any, eps: Any, cudnn_enabled: bool,
) -> Any:  # fmt: skip
    if training and mean is not None:  # which it changes
        return None
    given = {"weight": weight, "bias": bias} | ({} if training else {"mean": mean, "var": var})
    keywords = [ast.keyword(name, literal(y)) for name, y in given.items() if y is not None]
    return ast.Call(expr("batch_norm"), [literal(x), literal(eps)], keywords)


@_idiom("max_pool2d")
def _max_pool(
    p: Printing, x: Value, window: Any, strides: Any = (), padding: Any = (0,),
    dilation: Any = (1,), ceil_mode: bool = False,
) -> Any:  # fmt: skip
    if set(dilation) != {1}:
        return None
    window, padding = (
        (*item, item[0])[:2] if len(item) == 1 else item for item in (window, padding)
    )
    strides = window if not strides else strides * 2 if len(strides) == 1 else strides
    return expr("max_pool({0}, {1}, {2}, padding={3}, ceil_mode={4})",
                x, window, tuple(strides), padding, ceil_mode)  # fmt: skip


@_idiom("max_pool1d")
def _max_pool_of_sequences(
    p: Printing, x: Value, window: Any, strides: Any = (), padding: Any = (0,),
    dilation: Any = (1,), ceil_mode: bool = False,
) -> Any:  # fmt: skip
    if set(dilation) != {1}:
        return None
    windows, steps = (1, *window), (1, *(strides or window))
    return expr("max_pool({0}[..., None, :], {1}, {2}, padding={3}, ceil_mode={4})[..., 0, :]",
                x, windows, steps, (0, *padding), ceil_mode)  # fmt: skip


def _shape_of(x: Value) -> ast.expr:
    node = literal(x)
    is_new = isinstance(node, ast.Call) and text(node.func) in ("jnp.zeros", "jnp.empty")
    if isinstance(node, ast.Call) and is_new:
        return node.args[0]
    is_like = isinstance(node, ast.Call) and text(node.func) in ("jnp.zeros_like", "jnp.empty_like")
    return expr("{0}.shape", node.args[0] if isinstance(node, ast.Call) and is_like else x)


@_idiom("exponential")
def _exponential(p: Printing, x: Value, rate: Any = 1.0) -> Any:
    drawn = expr("jax.random.exponential({0}, {1})", p.key(), _shape_of(x))
    return drawn if rate == 1.0 else expr("{0} / {1}", drawn, rate)


@_idiom("uniform")
def _uniform(p: Printing, x: Value, low: Any = 0.0, high: Any = 1.0) -> Any:
    drawn = expr("jax.random.uniform({0}, {1})", p.key(), _shape_of(x))
    if (low, high) == (0.0, 1.0):
        return drawn
    return expr("{1} + ({2} - {1}) * {0}", drawn, low, high)


@_idiom("normal")
def _normal(p: Printing, x: Value, mean: Any = 0.0, std: Any = 1.0) -> Any:
    if p.call.op != "aten::normal.default":
        return None
    drawn = expr("jax.random.normal({0}, {1})", p.key(), _shape_of(x))
    drawn = drawn if std == 1.0 else expr("{0} * {1}", std, drawn)
    return drawn if mean == 0.0 else expr("{0} + {1}", mean, drawn)


@_idiom("bernoulli")
def _bernoulli(p: Printing, x: Value, rate: Any = None) -> Any:
    if rate is None:
        return expr("jax.random.bernoulli({0}, {1}).astype({1}.dtype)", p.key(), x)
    drawn = expr("jax.random.bernoulli({0}, {1}, {2})", p.key(), rate, _shape_of(x))
    return expr(f"{{0}}.astype(jnp.{_jax_dtype(p.dtype)})", drawn)


@_idiom("rand")
def _rand(p: Printing, size: Any, *, dtype: Any = None) -> Any:
    if not p.dtype.startswith("complex"):
        return expr("jax.random.uniform({0}, {1})", p.key(), tuple(size))
    parts = (expr("jax.random.uniform({0}, {1})", p.key(), tuple(size)) for _ in range(2))
    return expr("jax.lax.complex({0}, {1})", *parts)


@_idiom("nonzero")
def _nonzero(p: Printing, mask: Value) -> Any:
    return expr("jnp.stack(nonzero({0}), axis=-1)", mask)


@_idiom("nonzero_numpy")
def _nonzero_numpy(p: Printing, mask: Value) -> Any:
    return expr("nonzero({0})", mask)


@_idiom("where")
def _where(p: Printing, mask: Value, *sides: Any, **named: Any) -> Any:
    return None if sides or named else expr("nonzero({0})", mask)


@_idiom("one_hot")
def _one_hot(p: Printing, x: Value, count: Any = -1) -> Any:
    return None if count == -1 else expr("jax.nn.one_hot({0}, {1}, dtype=jnp.int32)", x, count)


@_idiom("scaled_dot_product_attention")
def _attention(
    p: Printing, query: Value, key: Value, value: Value, mask: Any = None, dropout_p: Any = 0.0,
    is_causal: Any = False, **more: Any,
) -> Any:  # fmt: skip
    if not (isinstance(dropout_p, float) and dropout_p == 0):
        raise NotTranscribed("attention with dropout, whose arguments are not in the call")
    return None


@_idiom("_fft_c2r")
def _irfft(p: Printing, x: Value, dim: Any, normalization: int, last_dim_size: Any) -> Any:
    if len(dim) != 1 or normalization != 2:  # which divides by the size
        return None
    return expr("jnp.fft.irfft({0}, {1}, axis={2})", x, last_dim_size, dim[0])
