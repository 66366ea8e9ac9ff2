"""The table of functions: JAX's functions and methods of arrays, and what stands for a call."""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fmapper.translation import expr, literal
from fmapper_translate.walk.errors import NotTranscribed


@dataclass(frozen=True)
class Given:
    """An argument of a call.

    Attributes:
        node: Its code.
        value: Its value.
        named: Whether it is given by keyword.
        parts: The arguments that it consists of, where it is written as a tuple or list.
    """

    node: ast.expr
    value: Any
    named: bool = False
    parts: Sequence[Given] | None = None

    @property
    def is_array(self) -> bool:
        """Whether it is an array, and not one of Python's numbers, or that in the file."""
        return hasattr(self.value, "at") and not _gives_number(self.node)

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return int(np.ndim(self.value))


def _gives_number(node: ast.AST) -> bool:
    """Returns whether code gives one of Python's numbers where JAX has an array."""
    match node:
        case ast.Constant(int() | float()) | ast.Call(ast.Attribute(ast.Name("math"))):
            return True
        case ast.BinOp(left, _, right):
            return _gives_number(left) and _gives_number(right)
        case ast.UnaryOp(_, operand):
            return _gives_number(operand)
    return False


@dataclass(frozen=True)
class Call:
    """A call that is printed.

    Attributes:
        value: The result.
        device: The code for where new arrays are made; None for the default.
    """

    value: Any
    device: ast.expr | None

    def make(self, function: str, *args: Any, dtype: Given | None = None) -> ast.expr:
        """Returns the call of a function that makes an array."""
        keywords = {} if dtype is None or dtype.value is None else {"dtype": dtype_of(dtype)}
        if self.device is not None:
            keywords["device"] = self.device
        return invoke(function, *args, **keywords)


Printer = Callable[..., ast.expr]
FUNCTIONS: dict[Any, Printer] = {}
METHODS: dict[str, Printer] = {}


def printer_of(*functions: Any) -> Callable[[Printer], Printer]:
    """Registers a printer for functions, and for the method of the same name."""

    def add(printer: Printer) -> Printer:
        FUNCTIONS.update(dict.fromkeys(functions, printer))
        return printer

    return add


def method(*names: str) -> Callable[[Printer], Printer]:
    """Registers a printer for methods of arrays."""

    def add(printer: Printer) -> Printer:
        METHODS.update(dict.fromkeys(names, printer))
        return printer

    return add


def code(given: Any) -> Any:
    """Returns the code for an argument."""
    return given.node if isinstance(given, Given) else given


def invoke(function: str, *args: Any, **keywords: Any) -> ast.expr:
    """Returns the call of a function, without keywords that are None."""
    named = [
        ast.keyword(name, literal(code(value)))
        for name, value in keywords.items()
        if value is not None
    ]
    return ast.Call(expr(function), [literal(code(arg)) for arg in args], named)


def call_method(x: Given, name: str, *args: Any, **keywords: Any) -> ast.expr:
    """Returns the call of a method."""
    made = invoke("x", *args, **keywords)
    assert isinstance(made, ast.Call)
    made.func = ast.Attribute(literal(x.node), name, ast.Load())
    return made


def dtype_of(dtype: Given) -> ast.expr:
    """Returns the code for a dtype, which JAX canonicalizes."""
    is_text = isinstance(dtype.node, ast.Constant)
    if is_text or (isinstance(dtype.node, ast.Name) and dtype.value in (bool, int, float)):
        return expr(f"torch.{jax.dtypes.canonicalize_dtype(dtype.value).name}")
    return expr("getattr(torch, {0})", dtype.node) if isinstance(dtype.value, str) else dtype.node


def turn(given: Given | None) -> Any:
    """Returns an axis as it is given; None where it is left out or None."""
    return None if given is None or given.value is None else given


def _along(
    x: Given, name: str, axis: Given | None, keepdims: Given | None, **more: Any
) -> ast.expr:
    """Returns the call of a method that reduces dimensions."""
    axis = turn(axis)
    keeps = keepdims if keepdims is not None and keepdims.value else None
    if axis is None and keeps is not None:
        axis = Given(literal(tuple(range(x.ndim))), None, named=True)
    if axis is not None and not axis.named and not more:
        return call_method(x, name, axis, keepdim=keeps)
    return call_method(x, name, dim=axis, keepdim=keeps, **more)


def row(template: str, *functions: Any, methods: Sequence[str] = ()) -> None:
    """Adds functions whose calls are printed by a template.

    Args:
        template: A lambda with the parameters of the function, under their names. What a call does
            not give, or gives as None, is left out where it is an argument.
        functions: The functions.
        methods: Methods of arrays that are printed so, too.
    """
    made = ast.parse(f"lambda {template}", mode="eval").body
    assert isinstance(made, ast.Lambda)
    parameters, body = inspect.signature(eval(f"lambda {template}", {})), made.body

    def show(call: Call, /, *args: Given, **keywords: Given) -> ast.expr:
        given = parameters.bind(*args, **keywords).arguments
        codes: dict[str, Any] = {}
        for name, value in given.items():
            codes[name] = value if isinstance(value, tuple) else turn(value)
        whole: ast.expr = _Template(codes, {*parameters.parameters}).visit(literal(body))
        return whole

    printer_of(*functions)(show)
    method(*methods)(show)


class _Template(ast.NodeTransformer):
    """Puts arguments in the place of parameters."""

    def __init__(self, given: Mapping[str, Any], names: Collection[str]) -> None:
        self._given = given
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Leaves out arguments that are not given."""
        node.args = [arg for arg in node.args if not self._lacks(arg)]
        node.keywords = [key for key in node.keywords if not self._lacks(key.value)]
        starred = [arg for arg in node.args if isinstance(arg, ast.Starred)]
        if starred and isinstance(starred[0].value, ast.Name):
            rest = [item.node for item in self._given[starred[0].value.id]]
            node.args = [*(arg for arg in node.args if arg not in starred), *rest]
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Puts the code of an argument in the place of its name."""
        value = self._given.get(node.id)
        return literal(value.node) if isinstance(value, Given) else node

    def _lacks(self, node: ast.expr) -> bool:
        is_name = isinstance(node, ast.Name) and node.id in self._names
        return is_name and self._given.get(node.id) is None  # type: ignore[attr-defined]


# --- numbers, one by one --------------------------------------------------------------------------

_SAME = (
    "tanh", "exp", "log", "sin", "cos", "tan", "floor", "ceil", "sign", "log1p", "expm1", "log2",
    "exp2", "sinh", "cosh", "square", "isnan", "isinf", "isfinite", "logical_not",
)  # fmt: skip
_BOTH = ("logical_and", "logical_or", "outer", "matmul", "hypot")
_SIGNS = {
    "+": "add", "-": "subtract", "*": "multiply", "/": "divide", "**": "power", ">": "greater",
    ">=": "greater_equal", "<": "less", "<=": "less_equal", "==": "equal", "!=": "not_equal",
}  # fmt: skip


def _number(name: str, call: Call, /, x: Given) -> ast.expr:
    is_number = isinstance(x.value, int | float) or _gives_number(x.node)
    return invoke(f"{'math' if is_number and hasattr(math, name) else 'torch'}.{name}", x)


for _name in (*_SAME, "sqrt"):
    printer_of(getattr(jnp, _name))(functools.partial(_number, _name))
for _name in _BOTH:
    row(f"x, y: torch.{_name}(x, y)", getattr(jnp, _name))
for _sign, _name in _SIGNS.items():
    row(f"x, y: x {_sign} y", getattr(jnp, _name))
for _name in ("relu", "relu6", "silu", "softplus", "selu", "mish", "hardtanh", "hardsigmoid",
              "hardswish", "logsigmoid", "softsign"):  # fmt: skip
    _theirs = {"hardtanh": "hard_tanh", "hardsigmoid": "hard_sigmoid", "hardswish": "hard_silu",
               "logsigmoid": "log_sigmoid", "softsign": "soft_sign"}.get(_name, _name)  # fmt: skip
    row(f"x: F.{_name}(x)", getattr(jax.nn, _theirs))
row("x: torch.asin(x)", jnp.arcsin)
row("x: torch.acos(x)", jnp.arccos)
row("x: torch.atan(x)", jnp.arctan)
row("x, y: torch.atan2(x, y)", jnp.arctan2)
row("x: torch.erf(x)", jax.scipy.special.erf, lax.erf)
row("x: torch.rsqrt(x)", lax.rsqrt)
for _name in ("exp", "log", "sin", "cos", "tanh", "sqrt", "square", "floor", "ceil", "sign"):
    row(f"x: torch.{_name}(x)", getattr(lax, _name))
row("x: torch.sigmoid(x)", jax.nn.sigmoid)
row("x: x.detach()", lax.stop_gradient)
row("x: -x", jnp.negative)
row("x, negative_slope=None: F.leaky_relu(x, negative_slope=negative_slope)", jax.nn.leaky_relu)
row("x, alpha=None: F.elu(x, alpha=alpha)", jax.nn.elu)
row("condition, x, y: torch.where(condition, x, y)", lax.select)
row("arr, min=None, max=None: arr.clamp(min=min, max=max)", jnp.clip, methods=["clip"])
row("a, decimals=None: a.round(decimals=decimals)", jnp.round, methods=["round"])
row("a: a.clone()", jnp.copy, methods=["copy"])
row("a: a.item()", methods=["item"])

for _sign, _name in {"+": "add", "-": "sub", "*": "mul", "/": "div"}.items():
    row(f"x, y: x {_sign} y", getattr(lax, _name))
row("x1, x2: x1 % x2", jnp.mod, jnp.remainder)
row("x1, x2: x1 // x2", jnp.floor_divide)
row("x, alpha=None: F.celu(x, alpha=alpha)", jax.nn.celu)
row("x: 0.5 * (x + torch.sqrt(x * x + 4))", jax.nn.squareplus)
row("x, nan=None: torch.nan_to_num(x, nan=nan)", jnp.nan_to_num)
row("x: x.conj()", jnp.conj, jnp.conjugate, methods=["conj"])
row("val: val.real", jnp.real)
row("val: val.imag", jnp.imag)
row("z: z.angle()", jnp.angle)

# --- numbers along dimensions ---------------------------------------------------------------------

row("a, axis: a.cumsum(dim=axis)", jnp.cumsum, methods=["cumsum"])
row("a, axis=None: a.argsort(dim=axis)", jnp.argsort, methods=["argsort"])
row("a, axis=None: a.sort(dim=axis).values", jnp.sort)
row("a, axis: a.cumprod(dim=axis)", jnp.cumprod, methods=["cumprod"])
row("a, n=None, axis=None: torch.diff(a, n=n, dim=axis)", jnp.diff)
row("operand, k: operand.topk(k)", lax.top_k)
row("subscripts, *operands, precision=None: torch.einsum(subscripts, *operands)", jnp.einsum)
row("a, b, axes=None: torch.tensordot(a, b, dims=axes)", jnp.tensordot)

# --- shapes ---------------------------------------------------------------------------------------

row("a: a.flatten()", jnp.ravel, methods=["ravel", "flatten"])
row("x: x.mT", jnp.matrix_transpose)
row("a: a.shape", jnp.shape)
row("a: a.ndim", jnp.ndim)
row("tup: torch.vstack(tup)", jnp.vstack)
row("tup: torch.hstack(tup)", jnp.hstack)
row("operands, dimension: torch.cat(operands, dimension)", lax.concatenate)
row("operand, start_index, slice_size, axis=0: operand.narrow(axis, start_index, slice_size)",
    lax.dynamic_slice_in_dim)  # fmt: skip
row("a, axis1, axis2: a.transpose(axis1, axis2)", jnp.swapaxes, methods=["swapaxes"])
row("a, source, destination: a.movedim(source, destination)", jnp.moveaxis)
row("a, axis=None: a.squeeze(axis)", jnp.squeeze, methods=["squeeze"])
row("array, shape: array.broadcast_to(shape)", jnp.broadcast_to)
row("A, reps: A.tile(reps)", jnp.tile)
row("a, repeats, axis=None: a.repeat_interleave(repeats, dim=axis)", jnp.repeat, methods=["repeat"])
row("a, shift, axis=None: torch.roll(a, shift, dims=axis)", jnp.roll)
row("arr, indices, axis: torch.take_along_dim(arr, indices.long(), dim=axis)",
    jnp.take_along_axis)  # fmt: skip

# --- what depends on the arguments ----------------------------------------------------------------


@printer_of(jnp.abs, jnp.absolute)
def _abs(call: Call, /, x: Given) -> ast.expr:
    return call_method(x, "abs") if x.is_array else invoke("abs", x)


@printer_of(jnp.maximum)
def _maximum(call: Call, /, x: Given, y: Given) -> ast.expr:
    return _limit("maximum", "min", x, y)


@printer_of(jnp.minimum)
def _minimum(call: Call, /, x: Given, y: Given) -> ast.expr:
    return _limit("minimum", "max", x, y)


OF_TWO = (jnp.maximum, jnp.minimum)  # which may be given a list that is taken apart


def _limit(name: str, end: str, x: Given, y: Given) -> ast.expr:
    if x.is_array and y.is_array:
        return invoke(f"torch.{name}", x, y)
    array, number = (x, y) if x.is_array else (y, x)
    if not array.is_array:
        return invoke(name[:3], x, y)
    return call_method(array, "clamp", **{end: number})


@printer_of(jnp.where)
def _where(call: Call, /, condition: Given, x: Given, y: Given) -> ast.expr:
    is_mask = str(getattr(condition.value, "dtype", "bool")) == "bool"
    return invoke("torch.where", condition if is_mask else expr("{0} != 0", condition.node), x, y)


@printer_of(jax.nn.gelu)
def _gelu(call: Call, /, x: Given, approximate: Given | None = None) -> ast.expr:
    is_exact = approximate is not None and not approximate.value
    return invoke("F.gelu", x, approximate=None if is_exact else ast.Constant("tanh"))


@printer_of(jax.nn.one_hot)
def _one_hot(
    call: Call, /, x: Given, num_classes: Given, *, dtype: Given | None = None
) -> ast.expr:  # fmt: skip
    kind = expr("torch.float32") if dtype is None else dtype_of(dtype)
    return expr("F.one_hot({0}.long(), {1}).to({2})", x.node, num_classes.node, kind)


def _softmax(name: str, call: Call, /, x: Given, axis: Given | None = None) -> ast.expr:
    return invoke(f"F.{name}", x, dim=ast.Constant(-1) if axis is None else axis)


printer_of(jax.nn.softmax)(functools.partial(_softmax, "softmax"))
printer_of(jax.nn.log_softmax)(functools.partial(_softmax, "log_softmax"))
printer_of(jax.nn.glu)(functools.partial(_softmax, "glu"))


@printer_of(jax.nn.logsumexp, jax.scipy.special.logsumexp)
def _logsumexp(
    call: Call, /, a: Given, axis: Given | None = None, *, keepdims: Any = None
) -> ast.expr:
    return _along(a, "logsumexp", axis or Given(literal(tuple(range(a.ndim))), ()), keepdims)


def _reduction(
    name: str, call: Call, /, a: Given, axis: Given | None = None, *,
    keepdims: Given | None = None,
) -> ast.expr:  # fmt: skip
    is_whole = jnp.issubdtype(a.value.dtype, jnp.integer) or a.value.dtype == bool
    if name == "mean" and is_whole:
        a = Given(call_method(a, "float"), a.value)
    if name in ("max", "min") and (turn(axis) is not None or keepdims is not None):
        name = f"a{name}"
    more = {"correction": ast.Constant(0)} if name in ("var", "std") else {}
    return _along(a, name, axis, keepdims, **more)


for _name in ("sum", "mean", "prod", "max", "min", "any", "all", "var", "std", "argmax", "argmin"):
    _printer = functools.partial(_reduction, _name)
    printer_of(getattr(jnp, _name))(_printer)
    method(_name)(_printer)


# --- shapes ---------------------------------------------------------------------------------------


@printer_of(jnp.reshape)
@method("reshape")
def _reshape(call: Call, /, a: Given, *shape: Given) -> ast.expr:
    if len(shape) == 1 and shape[0].parts is not None:
        shape = tuple(shape[0].parts)
    return call_method(a, "reshape", *shape)


@printer_of(jnp.transpose)
@method("transpose")
def _transpose(call: Call, /, a: Given, *axes: Given) -> ast.expr:
    if len(axes) == 1 and axes[0].parts is not None:
        axes = tuple(axes[0].parts)
    if axes and axes[0].value is not None:
        return call_method(a, "permute", *axes)
    if a.ndim == 2:
        return ast.Attribute(a.node, "T", ast.Load())
    return call_method(a, "permute", *map(ast.Constant, reversed(range(a.ndim))))


@printer_of(jnp.expand_dims)
def _expand_dims(call: Call, /, a: Given, axis: Given) -> ast.expr:
    if not isinstance(axis.value, int):
        raise NotTranscribed("it adds several dimensions")
    return call_method(a, "unsqueeze", axis)


def _join(name: str, call: Call, /, arrays: Given, axis: Given | None = None) -> ast.expr:
    is_array = not isinstance(arrays.value, tuple | list)
    if is_array or (axis is not None and axis.value is None):
        raise NotTranscribed("it joins the rows of an array, or flattens")
    return invoke(f"torch.{name}", arrays, dim=axis)


printer_of(jnp.concatenate, jnp.concat)(functools.partial(_join, "cat"))
printer_of(jnp.stack)(functools.partial(_join, "stack"))


@printer_of(jnp.split)
def _split(
    call: Call, /, ary: Given, indices_or_sections: Given, axis: Given | None = None
) -> ast.expr:
    name = "chunk" if isinstance(indices_or_sections.value, int) else "tensor_split"
    return call_method(ary, name, indices_or_sections, dim=axis)


@printer_of(jnp.flip)
def _flip(call: Call, /, m: Given, axis: Given | None = None) -> ast.expr:
    axes = tuple(range(m.ndim))
    return call_method(m, "flip", literal(axes) if axis is None else axis)


@printer_of(jnp.pad)
def _pad(
    call: Call, /, array: Given, pad_width: Given, mode: Given | None = None, *,
    constant_values: Given | None = None,
) -> ast.expr:  # fmt: skip
    if mode is not None and mode.value != "constant":
        raise NotTranscribed(f"{mode.value} padding")
    pairs = pad_width.parts or ()
    if len(pairs) != array.ndim or any(item.parts is None for item in pairs):
        if constant_values is not None and not int(constant_values.value):
            constant_values = None
        return invoke("pad", array, pad_width, value=constant_values)
    flat = [size.node for pair in reversed(pairs) for size in pair.parts or ()]
    return invoke("F.pad", array, ast.Tuple(flat, ast.Load()), value=constant_values)


@printer_of(jnp.take)
@method("take")
def _take(call: Call, /, a: Given, indices: Given, axis: Given) -> ast.expr:
    before = [ast.Slice()] * (axis.value % a.ndim)
    index = ast.Tuple([*before, indices.node], ast.Load()) if before else indices.node
    return ast.Subscript(a.node, index, ast.Load())


@method("astype")
@printer_of(jnp.astype, lax.convert_element_type)
def _astype(call: Call, /, x: Given, dtype: Given) -> ast.expr:
    if _gives_number(x.node):  # which has the dtype of what it is multiplied by
        return x.node
    return call_method(x, "to", dtype_of(dtype))


VALUES: Mapping[Any, str] = {
    jnp.inf: "torch.inf", math.pi: "math.pi", jnp.finfo: "torch.finfo", jnp.iinfo: "torch.iinfo",
    jnp.integer: "int", jnp.floating: "float", jnp.inexact: "float",  # kinds of dtypes
}  # fmt: skip
