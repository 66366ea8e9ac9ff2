"""Expressions of a model of Flax NNX as code for PyTorch."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.linen.spmd import with_logical_constraint
from jax.ad_checkpoint import checkpoint_name

from fmapper.translation import expr, literal
from fmapper_translate.functions import is_standard
from fmapper_translate.recording import Event
from fmapper_translate.torch import fallback, tables
from fmapper_translate.torch.creation import FUNCTIONS
from fmapper_translate.torch.functions import METHODS, OF_TWO, VALUES, Call, Given
from fmapper_translate.walk import expressions as walk
from fmapper_translate.walk.errors import NotTranscribed, Unnamed

if TYPE_CHECKING:
    from fmapper_translate.torch.files import File

MODULES, VARIABLES = nnx.Module | linen.Module, nnx.Variable | linen.Variable
NEW_NAMES = {"__call__": "forward"}
_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "T", "mT", "real", "imag"})
_WRITES = {"set": "set_at", "add": "add_at"}
_HELPERS = {nnx.max_pool: "max_pool", nnx.avg_pool: "avg_pool", jax.image.resize: "resize",
            nnx.make_causal_mask: "make_causal_mask", linen.make_causal_mask: "make_causal_mask",
            nnx.make_attention_mask: "make_attention_mask", nnx.combine_masks: "combine_masks",
            linen.make_attention_mask: "make_attention_mask", linen.combine_masks: "combine_masks",
            jax.lax.scan: "scan", jax.lax.cond: "cond", jax.lax.fori_loop: "fori_loop",
            jax.vmap: "vmap", nnx.cond: "cond", linen.cond: "cond", jax.lax.switch: "switch",
            jax.lax.while_loop: "while_loop", jax.lax.associative_scan: "associative_scan",
            jax.lax.map: "map_over", jax.lax.dynamic_slice: "dynamic_slice",
            jax.lax.dynamic_update_slice: "dynamic_update_slice",
            jax.lax.conv_general_dilated: "conv_general_dilated"}  # fmt: skip
# Functions that give their first argument, or what computes the same.
_SAME_AS_FIRST = (
    jax.jit, nnx.jit, jax.checkpoint, nnx.remat, linen.remat, linen.checkpoint, linen.jit,
    nnx.data, nnx.static, nnx.with_partitioning, nnx.with_metadata,
    linen.with_partitioning, linen.with_logical_partitioning, with_logical_constraint,
    jax.lax.with_sharding_constraint, checkpoint_name,
)  # fmt: skip


class Expressions(walk.Expressions):
    """Prints the expressions of one function."""

    new_names = NEW_NAMES
    file: File

    def has_no_counterpart(self, value: Any) -> bool:
        """Returns whether something is for random numbers."""
        return tables.is_random(value)

    def _print(self, node: ast.expr, event: Event) -> ast.expr:
        match node:
            case ast.Call(ast.Name("getattr"), [owner, key]) if isinstance(
                self.static(owner)[1], types.ModuleType
            ):
                named = {item.parts[key].value: item.value for item in self.events(node)}
                codes = [self.reference(node, value) for value in named.values()]
                table = ast.Dict([*map(literal, named)], codes)
                return ast.Subscript(table, self.code(key), ast.Load())
            case ast.IfExp(test, then, other) if any(
                self.is_left_out(item) for item in ast.walk(test) if isinstance(item, ast.expr)
            ):  # whether there are random numbers, as there always are
                sides = {bool(value) for value in self.values(test)}
                if len(sides) == 1:
                    return self.code(then if sides.pop() else other)
            case ast.BinOp(left, ast.Sub(), right):
                masks = [any(map(_is_mask, self.values(item))) for item in (left, right)]
                if any(masks):  # which PyTorch does not subtract
                    codes = [
                        expr("torch.as_tensor({0}).float()", self.code(item)) if is_mask
                        else self.code(item)
                        for item, is_mask in zip((left, right), masks, strict=True)
                    ]  # fmt: skip
                    return ast.BinOp(codes[0], node.op, codes[1])
        return super()._print(node, event)

    def _is_array(self, value: Any) -> bool:
        return self.file.recording.source.is_array(value)

    # --- names ------------------------------------------------------------------------------------

    def reference(self, node: ast.expr, value: Any) -> ast.expr:
        """Returns the code for something that a module defines."""
        known = self._counterpart(value)
        if known is not None:
            return known
        function = self.file.recording.function_of(value) if callable(value) else None
        if function is not None:
            self.file.add_function(function)
            return node if isinstance(node, ast.Name) else expr(self.file.marks.mark(function))
        if self.file.add(value):
            return node if isinstance(node, ast.Name) else expr(self.file.marks.mark(value))
        if isinstance(node, ast.Name) and isinstance(value, dict | list | tuple):
            self.file.add_constant(node.id, self._container(value))
            return node
        if isinstance(node, ast.Name) and self.file.add_global(self.function, node.id, value):
            return node
        if isinstance(node, ast.Name) and tables.is_initializer(value):
            made = _assignment_of(self.function.module, node.id)
            if made is not None:
                self.file.add_constant(node.id, self.code(made))
                return node
        if isinstance(node, ast.Attribute):
            is_static, base = self.static(node.value)
            is_place = isinstance(base, type) or (
                isinstance(base, types.ModuleType) and is_standard(base.__name__)
            )
            if is_static and is_place:
                return ast.Attribute(self.reference(node.value, base), node.attr, ast.Load())
            if isinstance(value, float) and value == np.pi:
                return expr("math.pi")
            if value is None or isinstance(value, bool | int | float):
                return literal(value)
        raise Unnamed(f"{ast.unparse(node)} has no counterpart")

    def _container(self, value: Any) -> ast.expr:
        """Returns the code for a container of numbers, text, and functions of JAX."""
        if isinstance(value, dict):
            elements = [self._container(item) for item in value.values()]
            return ast.Dict([literal(key) for key in value], elements)
        if isinstance(value, list | tuple):
            kind = ast.List if isinstance(value, list) else ast.Tuple
            return kind([self._container(item) for item in value], ast.Load())
        try:
            return self._counterpart(value) or literal(value)
        except TypeError:
            raise Unnamed(f"{value!r} has no counterpart") from None

    def _counterpart(self, value: Any) -> ast.expr | None:
        """Returns the code for something of JAX or Flax that a file names; None for others."""
        if isinstance(value, type):
            if value in (nnx.Module, linen.Module):
                return expr("nn.Module")
            if value is jax.Array or value is jnp.ndarray:
                return expr("torch.Tensor")
            name = self.file.class_name(value)
            if name is not None:
                return expr(name)
        if isinstance(value, float) and value == jnp.inf:
            return expr("torch.inf")
        if not callable(value):
            return None
        if _is_dtype(value):
            return expr(f"torch.{jax.dtypes.canonicalize_dtype(value).name}")
        if not _is_hashable(value):
            return None
        if value in _HELPERS:
            return expr(self.file.helper_name(_HELPERS[value]))
        if value in VALUES:
            return expr(VALUES[value])
        if value in tables.DRAWN:
            return expr(tables.DRAWN[value])
        if value in tables.INITIALIZERS:
            return expr(self.file.helper_name(tables.INITIALIZERS[value]))
        return self._function(value) if value in FUNCTIONS else None

    def _function(self, function: Any, **keywords: Given) -> ast.expr:
        """Returns the code for a function of JAX that is passed on."""
        x, y = (Given(expr(name), jnp.zeros(1)) for name in "xy")
        names = ["x"]
        try:
            made = FUNCTIONS[function](Call(x.value, None), x, **keywords)
        except TypeError:  # a function of two
            names, made = ["x", "y"], FUNCTIONS[function](Call(x.value, None), x, y, **keywords)
        match made:
            case ast.Call(func, [ast.Name("x")], []) | ast.Call(
                func, [ast.Name("x"), ast.Name("y")], []
            ):
                return func
            case ast.Call(func, [ast.Name("x")], more):
                return ast.Call(expr("partial"), [func], more)
        nothing = ast.arguments([], [*map(ast.arg, names)], None, [], [], None, [])
        return ast.Lambda(nothing, made)

    # --- attributes and elements ------------------------------------------------------------------

    def _attribute(self, node: ast.Attribute, event: Event) -> ast.expr:
        part = event.parts.get(node.value)
        owner, value = part.value if part is not None else None, event.value
        if isinstance(owner, VARIABLES) and node.attr in ("value", "raw_value"):
            return self.code(node.value)
        if self._is_array(owner):
            if node.attr == "size":
                return expr("{0}.numel()", self.code(node.value))
            if node.attr == "T" and np.ndim(_plain(owner)) != 2:
                x = Given(self.code(node.value), _plain(owner))
                return FUNCTIONS[jnp.transpose](Call(value, None), x)
            if node.attr in _ATTRIBUTES:
                return ast.Attribute(self.code(node.value), node.attr, ast.Load())
            raise Unnamed(f"{node.attr} of an array")
        if self.file.is_module(type(owner)):
            return self._of_module(node, owner, value)
        if isinstance(owner, types.ModuleType):
            return self.reference(node, value)
        if isinstance(owner, type) and self._counterpart(owner) is None and self._is_array(value):
            raise Unnamed(f"{ast.unparse(node)} is an array of a class")
        self.file.add_property(type(owner), node.attr)
        name = node.attr
        if isinstance(owner, super) and isinstance(value, types.MethodType):
            self.file.add_method(value)
            name = NEW_NAMES.get(name, name)
        return ast.Attribute(self.code(node.value), name, ast.Load())

    def _of_module(self, node: ast.Attribute, owner: Any, value: Any) -> ast.expr:
        base, layer = self.code(node.value), tables.base_of(type(owner))
        kept = inspect.getattr_static(type(owner), node.attr, None)
        function = self.file.recording.function_of(getattr(kept, "fget", None))
        if function is not None:
            self.file.add_function(function)
            return ast.Attribute(base, node.attr, ast.Load())
        name = node.attr
        if name in tables.MODES:
            return expr("not {0}.training", base)
        if layer is not None:
            if isinstance(value, VARIABLES):
                return self.array(base, layer, name)
            name = layer.attributes.get(name, name)
            if name == "layers":
                return base
        if isinstance(value, types.MethodType):
            name = NEW_NAMES.get(name, name)
            self.file.add_method(value)
        return ast.Attribute(base, name, ast.Load())

    def array(self, base: ast.expr, layer: tables.Layer, name: str) -> ast.expr:
        """Returns the code for an array of a layer, in Flax's layout."""
        return expr(layer.read(name), base)

    def _subscript(self, node: ast.Subscript, event: Event) -> ast.expr:
        owner = event.parts.get(node.value)
        is_whole = isinstance(node.slice, ast.Constant) and node.slice.value is ...
        if is_whole and owner is not None and isinstance(owner.value, VARIABLES):
            return self.code(node.value)
        if owner is not None and self._is_array(owner.value):
            _refuse_steps(node.slice)
        return self._copy(node)

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, callee: Any, event: Event | None) -> ast.expr:
        try:
            return self._known_call(node, callee, event)
        except NotTranscribed as error:
            is_own = (
                isinstance(callee, type)
                or self.file.is_module(type(callee))
                or self.file.constructs(self.function)
            )
            if is_own or self.file.recording.function_of(callee) is not None:
                raise
            return fallback.call_of(self, node, callee, event, str(error))

    def _known_call(self, node: ast.Call, callee: Any, event: Event | None) -> ast.expr:
        match node:
            case ast.Call(
                ast.Attribute(ast.Subscript(ast.Attribute(base, "at"), index), name), [value]
            ) if self._is_array(self.values(base)[0]) and event is not None:
                if name not in _WRITES:
                    raise NotTranscribed(f".at[].{name} has no counterpart")
                return expr(f"{_WRITES[name]}({{0}}, {{1}}, {{2}})", self.code(base),
                            _index(self.code(index)), self.code(value))  # fmt: skip
            case ast.Call(ast.Attribute(base, name)) if event is not None:
                owner = self._owner(node, event)
                if isinstance(owner, VARIABLES):
                    if name in ("get_value", "get_raw_value"):
                        return self.code(base)
                elif self._is_array(owner):
                    return self._method(node, base, owner, name, event)
        if self.file.is_module(type(callee)):
            return self._call_module(node, callee)
        if isinstance(callee, type) and issubclass(callee, (nnx.Variable, self.file.module)):
            return self._make(node, callee)
        if _in(callee, _SAME_AS_FIRST):
            return self.code(node.args[0])
        function = self.file.recording.function_of(callee) if callable(callee) else None
        if function is not None:
            self.file.add_function(function)
            func = self.code(node.func)
            if isinstance(func, ast.Attribute) and func.attr in NEW_NAMES.values():
                is_object = isinstance(func.value, ast.Name | ast.Attribute)
                func = func.value if is_object else func
            return self.plain_call(node, func)
        if callee is functools.partial:
            return self._partial(node)
        if _in(callee, tables.INITIALIZERS):
            return self.plain_call(node, self.code(node.func))
        if tables.is_initializer(callee):
            return self._draw(node)
        if _in(callee, _HELPERS):
            left = [key for key in node.keywords if key.arg == "dtype"]  # of numbers that are masks
            kept = [key for key in node.keywords if key not in left]
            return self.plain_call(ast.Call(node.func, node.args, kept), self.code(node.func))
        if _in(callee, FUNCTIONS):
            is_named, value = self.static(node.func)
            if any(isinstance(arg, ast.Starred) for arg in node.args) and callee in OF_TWO:
                return self.plain_call(node, self._function(callee))
            if is_named and value is callee:
                return self._print_call(FUNCTIONS[callee], [], node, event)
            if len(node.args) == 1 and not node.keywords:
                return self.plain_call(node, self.code(node.func))
            raise NotTranscribed("it is called with more than one argument")
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return node
        is_numpy = (getattr(callee, "__module__", None) or "").startswith("numpy")
        code = self._code_for_numpy if is_numpy else None
        return self.plain_call(node, self.code(node.func), code=code)

    def _code_for_numpy(self, node: ast.expr) -> ast.expr:
        """Returns the code for an argument of a function of NumPy's."""
        values = self.values(node)
        if values and _is_hashable(values[0]) and _is_dtype(values[0]):
            return expr(f"np.{np.dtype(values[0]).name}")
        return self.code(node)

    def _owner(self, node: ast.Call, event: Event) -> Any:
        of = event.parts.get(node.func)
        base = (
            of.parts.get(node.func.value) if of and isinstance(node.func, ast.Attribute) else None
        )
        return None if base is None else base.value

    def _left_out(self, node: ast.Call) -> set[ast.AST]:
        callee = self.callee(node)
        is_layer = tables.layer_of(callee) or tables.layer_of(type(callee))
        left: set[ast.AST] = set()
        for key in node.keywords:
            values = self.values(key.value)
            if isinstance(key.value, ast.Constant):
                values = [key.value.value]
            is_nothing = key.arg == "rngs" and all(item is None for item in values)
            if is_nothing or (is_layer is not None and tables.is_setting(key.arg, values)):
                left.add(key)
            elif is_layer is not None and key.arg in tables.SETTINGS:
                raise NotTranscribed(f"a layer with {ast.unparse(key)} has no counterpart")
        return left | super()._left_out(node)

    def _method(
        self, node: ast.Call, base: ast.expr, owner: Any, name: str, event: Event
    ) -> ast.expr:
        if name not in METHODS:
            raise NotTranscribed(f"{name} of an array has no counterpart")
        return self._print_call(METHODS[name], [Given(self.code(base), _plain(owner))], node, event)

    def _print_call(
        self, printer: Any, first: list[Given], node: ast.Call, event: Event | None
    ) -> ast.expr:
        args = [*first, *(self._argument(arg, event) for arg in node.args)]
        keywords = {str(key.arg): self._argument(key.value, event, named=True)
                    for key in node.keywords}  # fmt: skip
        value = event.value if event is not None else None
        try:
            made: ast.expr = printer(Call(value, self._device()), *args, **keywords)
        except (TypeError, AttributeError, ArithmeticError) as error:
            raise NotTranscribed(f"it is called otherwise than the table has it: {error}") from None
        return made

    def _device(self) -> ast.expr | None:
        """Returns the code for where new arrays are."""
        return self.file.device(self.function)

    def _argument(self, node: ast.expr, event: Event | None, *, named: bool = False) -> Given:
        if isinstance(node, ast.Starred):
            return Given(self.code(node), None)
        if event is not None and node in event.parts:
            value = _plain(event.parts[node].value)
        else:
            value = (
                node.value
                if isinstance(node, ast.Constant)
                else next(iter(self.values(node)), None)
            )
        if tables.is_random(value):
            return Given(literal(None), None)
        inner = event.parts.get(node) if event is not None else None
        parts = [self._argument(item, inner) for item in node.elts] if isinstance(
            node, ast.Tuple | ast.List
        ) else None  # fmt: skip
        made = self._dtype(node, value) or self.code(node)
        return Given(made, value, named, parts)

    def _dtype(self, node: ast.expr, value: Any) -> ast.expr | None:
        """Returns the code for one of Python's types, which may be a dtype; None for others."""
        return node if isinstance(value, type) and value in (bool, int, float) else None

    def _draw(self, node: ast.Call) -> ast.expr:
        """Returns the call of an initializer, which is given a shape alone."""
        if any(isinstance(arg, ast.Starred) for arg in node.args):
            return self.plain_call(node, self.code(node.func))
        shape = next((key.value for key in node.keywords if key.arg == "shape"), None)
        if shape is None:
            shape = node.args[1]
        return ast.Call(self.code(node.func), [self.code(shape)], [])

    def _partial(self, node: ast.Call) -> ast.expr:
        function = self.values(node.args[0])[0] if self.values(node.args[0]) else None
        if _in(function, FUNCTIONS) and len(node.args) == 1:
            keywords = {
                str(key.arg): self._argument(key.value, None, named=True) for key in node.keywords
            }
            return self._function(function, **keywords)
        left = {key for key in node.keywords
                if tables.is_setting(key.arg, self.values(key.value))}  # fmt: skip
        kept = [key for key in node.keywords if key not in left]
        return self.plain_call(ast.Call(node.func, node.args, kept), expr("partial"))

    def _call_module(self, node: ast.Call, module: nnx.Module) -> ast.expr:
        kind = type(module)
        if tables.is_library_module(kind) and tables.layer_of(kind) is None:
            raise NotTranscribed(f"{kind.__name__} is not in the table of layers")
        return self.plain_call(node, self.code(node.func))

    def _make(self, node: ast.Call, kind: type) -> ast.expr:
        if issubclass(kind, nnx.Variable):
            made = self.code(node.args[0])
            return expr(
                "nn.Parameter({0})" if issubclass(kind, nnx.Param) else "nn.Buffer({0})", made
            )
        if tables.is_library_module(kind) and tables.layer_of(kind) is None:
            raise NotTranscribed(f"{kind.__name__} is not in the table of layers")
        func = self.code(node.func)
        if kind is nnx.List:
            elements = [item for value in self.values(node) for item in value]
            if elements and all(isinstance(item, nnx.Param) for item in elements):
                func = expr("nn.ParameterList")
            elif not all(isinstance(item, nnx.Module) for item in elements):
                raise NotTranscribed("it lists something else than modules")
        self.file.add(kind)
        return self.plain_call(node, func)


def _is_mask(value: Any) -> bool:
    return str(getattr(_plain(value), "dtype", "")) == "bool"


def _assignment_of(module: str, name: str) -> ast.expr | None:
    """Returns the expression whose value a module gives a name; None if it does not say so."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return next((item.value for item in tree.body if isinstance(item, ast.Assign)
                 and [ast.unparse(x) for x in item.targets] == [name]), None)  # fmt: skip


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _in(value: Any, table: Any) -> bool:
    return _is_hashable(value) and value in table


def _is_dtype(value: Any) -> bool:
    try:
        return hasattr(value, "dtype") and isinstance(value.dtype, np.dtype) and callable(value)
    except TypeError:
        return False


def _plain(value: Any) -> Any:
    if isinstance(value, linen.Variable):
        return value.value
    return value.get_raw_value() if isinstance(value, nnx.Variable) else value


def _refuse_steps(index: ast.expr) -> None:
    for item in ast.walk(index):
        if isinstance(item, ast.Slice) and isinstance(item.step, ast.UnaryOp):
            raise NotTranscribed("a slice with a negative step has no counterpart")


def _index(node: ast.expr) -> ast.expr:
    """Returns an index as an expression of its own."""
    if isinstance(node, ast.Tuple):
        return ast.Tuple([_index(item) for item in node.elts], ast.Load())
    if isinstance(node, ast.Slice):
        ends = [item or ast.Constant(None) for item in (node.lower, node.upper, node.step)]
        return ast.Call(expr("slice"), ends, [])
    return node
