"""Calls of torch's own operations in a graph, for programs that were recorded from torch.

Devices, layouts and memory formats are not part of a program. So tensors are created on the device
of the inputs, and a view of a tensor whose layout is unknown is a reshape.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fmapper.programs import DType, Graph, Lowering, LoweringTable
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.aten.names import NAMES
from fmapper_adapters.torch.from_fx import silent_writes
from fmapper_adapters.torch.model import control_flow, derivatives
from fmapper_adapters.torch.model.emit import Value, VaryingSize, current

aten = torch.ops.aten
TABLE = LoweringTable("torch", __package__, "tensors")
lowering = TABLE.lowering

_ARGUMENTS = {"Tensor", "int", "SymInt", "float", "bool", "number", "Scalar", "str"}
_ARGUMENTS |= {"ScalarType", "Layout", "Device", "MemoryFormat", "Generator"}
_WRAPPED = re.compile(r"(?:Optional|List)\[(.*)\]")
_MOST_POWER = 64
_MOST_SIZE = 1 << 63


def native_lowerings(ops: Mapping[str, Any], added: Mapping[str, Lowering]) -> dict[str, Lowering]:
    """Returns the lowerings of torch's own operations in a program.

    Args:
        ops: The operations.
        added: The user's lowerings, which take precedence.
    """
    lowerings = {}
    for op in ops:
        if op in added or op.rpartition(".")[0] in added:
            continue
        lowering = TABLE.find(op, {}) or _direct_lowering(op)
        if lowering is not None:
            lowerings[op] = lowering
    return lowerings


def _direct_lowering(op: str) -> Lowering | None:
    """Returns the lowering that calls an operation directly; None if it may not be called."""
    overload = overload_of(op)
    if overload is None:
        return None
    return Lowering(lambda *args, **kwargs: emit_call(overload, *args, **kwargs))


def overload_of(op: str) -> Any:
    """Resolves a name such as `aten::add.Tensor`; None if it may not be called."""
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    if namespace != "aten" or name not in NAMES:
        return None
    packet = getattr(aten, name, None)
    if packet is None or overload not in packet.overloads():
        return None
    function = getattr(packet, overload)
    return function if _computes(_private.schema_of(function)) else None


def _computes(schema: Any) -> bool:
    """Returns whether an operation is pure, and returns only tensors or numbers."""
    parts = (*schema.arguments, *schema.returns)
    if schema.is_mutable or any(p.alias_info is not None and p.alias_info.is_write for p in parts):
        return False
    kinds = [_kind(part) for part in parts]
    return "Tensor" in kinds and _ARGUMENTS.issuperset(kinds)


def _kind(argument: Any) -> str:
    text = str(argument.real_type)
    while match := _WRAPPED.fullmatch(text):
        text = match[1]
    return text


def emit_call(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Emits a call of an operation into the graph."""
    emitter = current()
    args, kwargs = _native(args), _native(kwargs)
    names = [argument.name for argument in _private.schema_of(overload).arguments]
    has_tensors = any(
        _kind(argument) == "Tensor" for argument in _private.schema_of(overload).arguments
    )
    if "device" in names and not has_tensors and emitter.device is not None:
        args = args[: names.index("device")]
        kwargs["device"] = emitter.device
    return emitter.call(overload, *args, **kwargs)


def _native(value: Any) -> Any:
    """Converts dtypes in arguments to torch's."""
    if isinstance(value, DType):
        return current().dtype(value.name)
    if isinstance(value, tuple | list):
        return [_native(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _native(inner) for key, inner in value.items()}
    return value


# --- tensors --------------------------------------------------------------------------------------


@lowering("aten::view.default", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_copy")
def view(x: Any, size: Sequence[Any]) -> Any:
    """Reshapes: a program does not record the order in memory."""
    return emit_call(aten.reshape.default, x, size)


@lowering("aten::view.dtype")
def view_dtype(x: Any, dtype: DType) -> Any:
    return emit_call(aten.view.dtype, contiguous(x), dtype)


@lowering("aten::contiguous")
def contiguous(x: Any) -> Any:
    return x.contiguous()


@lowering("aten::as_strided", "aten::as_strided_copy")
def as_strided(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Returns a strided window into the contiguous elements."""
    whole = emit_call(aten.clone.default, x, memory_format=torch.contiguous_format)
    return emit_call(aten.as_strided.default, whole, size, stride, storage_offset or 0)


@lowering("aten::empty.memory_format", "aten::empty_permuted")
def empty(size: Any, order: Any = None, dtype: Any = None) -> Any:
    """Returns zeros rather than uninitialised memory."""
    return emit_call(aten.zeros.default, size, dtype=dtype)


@lowering("aten::empty_strided")
def empty_strided(size: Any, stride: Any, dtype: Any = None) -> Any:
    return emit_call(aten.zeros.default, size, dtype=dtype)


@lowering("aten::empty_like")
def empty_like(x: Any, dtype: Any = None) -> Any:
    return emit_call(aten.zeros_like.default, x, dtype=dtype)


@lowering("aten::new_empty")
def new_empty(x: Any, size: Any, dtype: Any = None) -> Any:
    return emit_call(aten.new_zeros.default, x, size, dtype=dtype)


@lowering("aten::new_empty_strided")
def new_empty_strided(x: Any, size: Any, stride: Any, dtype: Any = None) -> Any:
    return emit_call(aten.new_zeros.default, x, size, dtype=dtype)


@lowering("aten::_unsafe_index")
def index(x: Any, indices: Any) -> Any:
    """Returns elements at indices, which are bounds-checked."""
    return emit_call(aten.index.Tensor, x, indices)


@lowering("aten::_unsafe_index_put")
def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    return emit_call(aten.index_put.default, x, indices, values, accumulate)


def _with_dropout(overload: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: emit_call(overload, *args, **kwargs)


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    for _overload in ("data", "input"):
        lowering(f"fmapper::{_name}_with_dropout.{_overload}")(
            _with_dropout(getattr(getattr(aten, _name), _overload))
        )
lowering("fmapper::scaled_dot_product_attention_with_dropout")(
    _with_dropout(aten.scaled_dot_product_attention.default)
)
lowering("fmapper::rrelu_with_noise_functional_with_dropout")(
    _with_dropout(aten.rrelu_with_noise_functional.default)
)


# --- sizes and other numbers ----------------------------------------------------------------------


def _number(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an operation on sizes to bound its results."""

    def lower(*args: Any) -> Any:
        numbers = [_value(x) for x in args]
        if function in (operator.pow, operator.lshift) and not _is_small(numbers[-1]):
            raise ValueError(f"{function.__name__} by {numbers[-1]}: the size is too large")
        result = current().call(function, *args)
        value = _value(result)
        if isinstance(value, int) and not -_MOST_SIZE <= value < _MOST_SIZE:
            raise ValueError("the size is too large")
        return result

    return lower


def _value(x: Any) -> Any:
    """Returns a number, or the example's value of a varying size."""
    value = x.node.meta.get("val") if isinstance(x, fx.Proxy) else x
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _is_small(number: Any) -> bool:
    return number is None or (isinstance(number, int | float) and abs(number) <= _MOST_POWER)


_NUMBERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "pow", "floordiv",
        "mod", "and_", "or_", "lshift", "rshift", "abs", "truediv", "not_")},
    **{name: getattr(torch, name) for name in (
        "sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum")},
    **{name: getattr(math, name) for name in ("ceil", "floor", "trunc")},
    "round": round,
}  # fmt: skip
for _name, _function in _NUMBERS.items():
    lowering(f"sym::{_name}")(_number(_function))


@lowering("aten::sym_size.int")
def sym_size(x: Any, dim: int) -> Any:
    return x.size(dim)


@lowering("aten::sym_numel")
def sym_numel(x: Any) -> Any:
    return x.numel()


@lowering("aten::_assert_async.msg")
def assert_async(condition: Any, message: str) -> Any:
    return current().call(aten._assert_async.msg, condition, message)


@lowering("aten::copy")
def copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies by operations that have gradients in torch."""
    if source.dtype != x.dtype:
        source = emit_call(aten.to.dtype, source, x.dtype)
    return emit_call(aten.expand_as.default, source, x)


@lowering("aten::_assert_scalar")
def assert_scalar(condition: Any, message: str) -> Any:
    return current().call(aten._assert_scalar.default, condition, message)


# --- functions ------------------------------------------------------------------------------------


@lowering("fmapper::stop_gradient")
def stop_gradient(x: Any) -> Any:
    return x.detach()


@lowering("fmapper::overwrite")
def overwrite(x: Any, value: Any) -> Any:
    return emit_call(silent_writes.OVERWRITE, x, value)


@lowering("higher_order::wrap_with_set_grad_enabled")
def wrap_with_set_grad_enabled(enabled: bool, function: Graph, *args: Any) -> Any:
    """Calls the function, without gradients if the program switches them off."""
    outputs = current().inline(function, args)
    return (
        outputs if enabled else tuple(x.detach() if isinstance(x, fx.Proxy) else x for x in outputs)
    )


@lowering("higher_order::wrap_with_autocast")
def wrap_with_autocast(
    device: str, dtype: Any, enabled: bool, cache: Any, function: Graph, *args: Any
) -> Any:
    if enabled:
        raise TypeError(
            "casts of torch.autocast were not recorded: export the model inside the "
            "autocast context"
        )
    return current().inline(function, args)


@lowering("higher_order::invoke_subgraph", "higher_order::wrap")
@lowering("higher_order::tag_activation_checkpoint")
def invoke(function: Graph, *args: Any, **_: Any) -> Any:
    """Calls the function, whose name is dropped."""
    return current().inline(function, [arg for arg in args if not isinstance(arg, str)])


@lowering("higher_order::cond", takes_avals=True)
def cond(
    condition: Any, if_true: Graph, if_false: Graph, operands: Sequence[Any] = (), *, avals: Any
) -> Any:
    """Calls one of two functions."""
    if isinstance(condition, bool):
        return current().inline(if_true if condition else if_false, operands)
    if not isinstance(condition, fx.Proxy) or isinstance(condition, VaryingSize):
        raise TypeError("a branch that depends on a size is not supported here")
    index = condition.reshape(()).to(torch.int32)
    branches = tuple(_module(graph, operands, "branch") for graph in (if_false, if_true))
    outputs = current().call(control_flow.switch, index, branches, tuple(operands))
    return tuple(outputs[i] for i in range(len(avals.results)))


_ONCE = (
    "{} is a torch.autograd.Function whose backward is `once_differentiable`, so its gradient "
    "cannot be differentiated"
)


@lowering("fmapper::with_gradient")
def with_gradient(
    ys: Sequence[Any],
    xs: Sequence[Any],
    backward: Graph,
    kept: Sequence[Any],
    places: Sequence[int],
    name: str,
    once: bool = False,
    parameters: str = "",
) -> Any:
    """Returns the ys, whose gradients with respect to the xs a function computes."""
    if not all(isinstance(x, Value) for x in (*xs, *ys, *kept)):
        raise TypeError(
            f"{name}: a torch.autograd.Function that saves numbers cannot be converted back"
        )
    module: Any = f"{name} is a torch.autograd.Function whose backward cannot be recorded"
    if -1 not in places:
        module = _module(backward, (*ys, *kept), "backward")
    outputs = current().call(
        derivatives.with_gradient,
        module,
        tuple(ys),
        tuple(xs),
        tuple(kept),
        tuple(places),
        **({"once": _ONCE.format(name)} if once else {}),
    )
    return tuple(outputs[i] for i in range(len(ys)))


def _module(graph: Graph, operands: Sequence[Any], kind: str) -> Any:
    """Returns a function as a module for operands like these."""
    kinds = tuple((str(x.dtype).removeprefix("torch."), tuple(x.fake.shape)) for x in operands)
    return current().submodule(dataclasses.replace(graph, kinds=kinds), kind)
