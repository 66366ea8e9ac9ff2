"""Expressions of the source as code: text where they are Python's, operations where not."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from fmapper.translation import expr, literal
from fmapper_translate import arrays, calls, fallback
from fmapper_translate.constructors import initial_values, numbers
from fmapper_translate.functions import Function, is_of_model, is_standard
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.libraries import requests
from fmapper_translate.operations import Operations, dtype_name
from fmapper_translate.printing import choices, memos, rows
from fmapper_translate.printing.folding import is_constant
from fmapper_translate.printing.operands import arguments_of, size_of, tensors_of
from fmapper_translate.recording import Event
from fmapper_translate.sources.derivatives import class_applied
from fmapper_translate.targets import layers
from fmapper_translate.targets.constructions import make_activation, make_layer
from fmapper_translate.walk import expressions as walk
from fmapper_translate.walk.errors import NotTranscribed, Unnamed, Varied

if TYPE_CHECKING:
    from fmapper_translate.files import File

# Attributes of tensors that give Python's values.
_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "real", "imag", "itemsize", "nbytes"})
_TABLES = frozenset({"_modules", "_parameters", "_buffers"})  # of modules
NEW_NAMES = {"forward": "__call__"}


class Expressions(walk.Expressions):
    """Prints the expressions of one function.

    Args:
        file: The file.
        function: The function.
    """

    new_names = NEW_NAMES
    file: File

    def __init__(self, file: File, function: Function) -> None:
        super().__init__(file, function)
        self._varied: set[ast.AST] = set()  # whose dimensions are other ones another time
        constructs = file.constructs(function)
        self._of_numbers = numbers.tensors_of_numbers(function, constructs=constructs)
        self.memos = {} if constructs else memos.memos_of(function, file.recording)

    # --- one expression ---------------------------------------------------------------------------

    def _code(self, node: ast.expr) -> ast.expr:
        try:
            made = super()._code(node)
        except Varied:
            if node in self._varied:
                raise
            self._varied.add(node)
            made = super()._code(node)
        return numbers.in_numpy(made) if node in self._of_numbers else made

    def _constant(self, node: ast.expr, events: list[Event]) -> ast.expr | None:
        return self.file.omissions.constant(self.function, node, events)

    def _print(self, node: ast.expr, event: Event) -> ast.expr:
        value = event.value
        match node:
            case ast.Compare(left, [ast.Is() | ast.IsNot() as op], [ast.Constant(None) as none]):
                is_name = isinstance(left, ast.Name)
                if not is_name and any(isinstance(x, nn.Parameter) for x in self.values(left)):
                    return ast.Compare(arrays.variable(self, left), [op], [none])
            case ast.ListComp() if self.file.constructs(self.function) and choices.are_numbers(
                value
            ):
                return numbers.in_numpy(self._copy(node))
            case ast.BinOp(left, ast.Add(), right) if is_constant(self.code(right), 0):
                return self.code(left)
            case ast.BinOp() | ast.UnaryOp() | ast.Compare() if event.operations:
                return self._operations(node, event)
            case ast.Call(ast.Name("getattr"), [_, key]) if choices.is_by_name(self, value):
                return choices.by_name(self, node, key)
        return super()._print(node, event)

    def _subscript(self, node: ast.Subscript, event: Event) -> Any:
        if self.memos and (memo := self.memos.get(ast.unparse(node))):
            return expr(memo.name)
        if isinstance(node.value, ast.Attribute) and node.value.attr in _TABLES:
            return expr("getattr({0}, {1})", *map(self.code, (node.value.value, node.slice)))
        is_global = isinstance(node.value, ast.Name) and self.static(node.value)[0]
        is_module = isinstance(event.value, nn.Module)
        if is_global and (is_module or isinstance(event.value, type | types.FunctionType)):
            registry = event.parts.get(node.value)
            items = registry.value if registry is not None else None
            if isinstance(items, dict) and any(x is event.value for x in items.values()):
                kinds = set(self.values(node))
                if is_module or len(kinds) > 1:
                    return calls.entry(self, node, items, kinds, self.reference)
                return self.reference(node, event.value)
        if isinstance(event.value, nn.Parameter):
            element = arrays.read_one(self, node, event)
            if element is not None:
                return element
        made: ast.Subscript = self._rebuild(node)
        if isinstance(event.value, torch.Tensor):
            made.slice = arrays.index_of(made.slice)
            if not self.file.constructs(self.function):
                return rows.pick(self, node, made, event)
        return made

    # --- names ------------------------------------------------------------------------------------

    def reference(self, node: ast.expr, value: Any) -> ast.expr:
        """Returns the code for something that a module defines."""
        if isinstance(value, torch.dtype):
            return self.file.dialect.dtype(dtype_name(value))
        if value is None:  # as `np.newaxis`
            return literal(None)
        if value is torch.Tensor:
            return expr("jax.Array")
        counterpart = self.file.counterpart(value)
        if counterpart is not None:
            return expr(counterpart)
        if value in (float("inf"),) and isinstance(value, float):
            return expr("jnp.inf")
        if isinstance(value, type) and value in calls.DISTRIBUTIONS:
            return expr(self.file.helper_name(calls.DISTRIBUTIONS[value].__name__))
        if isinstance(value, type) and (layer := self.file.layers.layer_of(value)) is not None:
            return expr(self.file.helper_name(layer.name))
        if isinstance(value, type) and value in self.file.layers.activations:
            return expr(self.file.activation_class(value))
        if isinstance(value, type) and value is nn.Module:
            return expr(self.file.target.module)
        if (
            isinstance(value, types.FunctionType | types.BuiltinFunctionType)
            and value in self.file.layers.functions
        ):
            return expr(self.file.layers.functions[value])
        applied = class_applied(value)
        if applied is not None:  # of which the source has another name
            calls.add_functions_of(self.file, applied)
            return expr("{0}.apply", self.reference(node, applied))
        if self.file.add(value):
            if layers.is_library_module(value):
                return expr(str(self.file.class_name(value)))
            function = self.file.recording.function_of(value)
            return expr(self.file.marks.mark(value if function is None else function))
        if isinstance(node, ast.Name) and calls.add_global(self, node.id, value):
            return node
        if isinstance(node, ast.Attribute):
            known, base = self.static(node.value)
            if known and isinstance(base, types.ModuleType) and is_standard(base.__name__):
                return ast.Attribute(self.reference(node.value, base), node.attr, ast.Load())
            if known and isinstance(base, type):
                return ast.Attribute(self.reference(node.value, base), node.attr, ast.Load())
        if self._never_ran(node, value):
            return expr("not_written")
        raise Unnamed(f"{ast.unparse(node)} has no counterpart")

    def _never_ran(self, node: ast.expr, value: Any) -> bool:
        """Returns whether an expression is a function of the source that no example calls."""
        target = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        is_own = isinstance(target, types.FunctionType) and is_of_model(target.__code__.co_filename)
        is_called = any(isinstance(x, ast.Call) and x.func is node for x in self.function.nodes)
        return is_own and not is_called and self.file.recording.function_of(value) is None

    def _attribute(self, node: ast.Attribute, event: Event) -> ast.expr:
        part = event.parts.get(node.value)
        owner, value = part.value if part is not None else None, event.value
        if isinstance(owner, torch.Tensor):
            if node.attr == "data":
                return self.code(node.value)
            if node.attr in _ATTRIBUTES and not event.operations:
                return ast.Attribute(self.code(node.value), node.attr, ast.Load())
            if event.operations:
                return self._operations(node, event)
            raise Unnamed(f"{node.attr} of a tensor")
        if isinstance(owner, nn.Module):
            return self._of_module(node, owner, value)
        if isinstance(owner, tuple) and type(owner).__module__ == "torch.return_types":
            names: Any = type(owner)  # as of `x.max(-1)`
            at, results = names.__match_args__.index(node.attr), self.code(node.value)
            picked = results.elts[at] if isinstance(results, ast.Tuple) else None
            return picked or expr(f"{{0}}[{at}]", results)
        self.file.add_property(type(owner), node.attr)
        if value is None and library.is_record(type(owner)):
            return literal(None)  # it was not filled
        if library.is_config(owner):
            return requests.print_field(self, node, owner, value)
        is_known = isinstance(owner, types.ModuleType) or layers.is_library_module(owner)
        is_known &= node.attr != "__name__"  # layers are called much the same
        if isinstance(owner, torch.Tensor) and owner.is_floating_point() and node.attr == "dtype":
            return ast.Attribute(self.code(node.value), "dtype", ast.Load())
        if is_known or isinstance(value, torch.dtype):
            return self.reference(node, value)
        if isinstance(owner, torch.finfo):
            return expr("float({0})", ast.Attribute(self.code(node.value), node.attr, ast.Load()))
        if isinstance(value, torch.device):
            raise Unnamed("a device")
        name = node.attr
        if isinstance(owner, super) and isinstance(value, types.MethodType):
            self.file.add_method(value)
            name = NEW_NAMES.get(name, name)
        return ast.Attribute(self.code(node.value), name, ast.Load())

    def _of_module(self, node: ast.Attribute, owner: nn.Module, value: Any) -> ast.expr:
        base, layer = self.code(node.value), self.file.layers.base_of(type(owner))
        if isinstance(value, torch.device):
            raise Unnamed("a device")
        kept = inspect.getattr_static(type(owner), node.attr, None)
        if self.file.add_property(type(owner), node.attr):
            return ast.Attribute(base, node.attr, ast.Load())
        if isinstance(kept, property) and isinstance(value, torch.dtype):
            return self.reference(node, value)
        if isinstance(kept, property) and library.is_of_library(kept.fget.__module__):
            return self.file.value(value)
        if node.attr == "training":
            is_self = isinstance(owner, self.function.owner or ())
            cls = self.function.owner if is_self and self.function.owner else type(owner)
            self.file.has_mode.add(self.file.maker_of(cls))
            return expr(f"not {{0}}.{self.file.target.mode}", base)
        if self.file.slots.has(owner, node.attr):
            return expr(f"{{0}}.{node.attr}.value", base)
        if isinstance(value, arrays.COLLECTIONS) and not self.file.constructs(self.function):
            return arrays.read_all(self, expr(f"{{0}}.{node.attr}", base), value)
        if isinstance(value, torch.Tensor):
            if (type(owner), node.attr) in self.file.optional:
                return expr(f"{{0}}.{node.attr}", base)
            return arrays.read(self, base, owner, node.attr)
        if isinstance(value, np.ndarray):
            return expr(f"np.array({{0}}.{node.attr})", base)
        is_plain = layer is None and isinstance(value, bool | int | float | str | list | tuple)
        if is_plain and not self.file.omissions.is_assigned(type(owner), node.attr):
            return self.file.value(value)  # which a library has set
        name = node.attr
        if layer is not None:
            name = layer.attributes.get(name, layer.variable(name)[0])
        if self._never_ran(node, value):
            return expr("not_written")
        if isinstance(value, types.MethodType | types.FunctionType):
            name = NEW_NAMES.get(name, name)
            self.file.add_method(value)
        return ast.Attribute(base, name, ast.Load())

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, callee: Any, event: Event | None) -> ast.expr:
        value = event.value if event is not None else None
        if event is not None and not self.file.constructs(self.function):
            fallback.refuse_python_draw(self.file.recording, self.function, event)
        if isinstance(node.func, ast.Attribute) and event is not None:
            of = event.parts.get(node.func)
            base = of.parts.get(node.func.value) if of is not None else None
            if base is not None and isinstance(base.value, torch.Tensor):
                return self._tensor_method(node, node.func, base.value, event)
        special = calls.special(self, node, callee)
        if special is not None:
            return special
        if isinstance(callee, nn.Module):
            fallback.refuse_wrapper(self.file.recording, callee, event)
            function = fallback.dispatch_of(self.file.recording, callee, event)
            if function is not None:
                return self._call_with(node, function, node.func)
            return self._call_module(node, callee)
        if calls.may_be_module(self, node, callee):
            return calls.call_parts(self, node)
        applied = class_applied(callee)
        if applied is not None:
            calls.add_functions_of(self.file, applied)
            return self.plain_call(node, self.code(node.func))
        of_library = requests.print_call(self, node, callee, event)
        if of_library is not None:
            return of_library
        if isinstance(callee, functools.partial):
            inner = callee.func
            if isinstance(inner, type) and issubclass(inner, nn.Module):
                return self._make(node, inner, bound=True)
            function = self.file.recording.function_of(inner)
            if function is not None and function.makes_modules:
                return self.plain_call(node, self.code(node.func), [self.file.target.source()])
        if isinstance(callee, type) and issubclass(callee, nn.Module | nn.Parameter):
            return self._make(node, callee)
        if callee is nn.Buffer:
            return choices.buffer(self, node)
        if isinstance(callee, type) and issubclass(callee, functools.partial):
            made = calls.partial(self, node, event)
            if made is not None:
                return made
        function = self.file.recording.function_of(callee)
        if function is None and not isinstance(callee, type):  # an object that is called
            function = self.file.recording.function_of(
                inspect.getattr_static(callee, "__call__", None)
            )
        if function is not None:
            fallback.refuse_wrapper(self.file.recording, callee, event)
            if function.owner is None and isinstance(callee, types.MethodType):
                assert isinstance(node.func, ast.Attribute)
                return self._call_with(node, function, node.func.value)
            self.file.add_function(function)
            self.function.makes_modules |= function.makes_modules and self.file.constructs(function)
            more = [self.file.target.source()] if function.makes_modules else []
            more = self.file.target.extras(self.file, self.function, function) or more
            func = self.code(node.func)
            if isinstance(func, ast.Attribute) and func.attr in NEW_NAMES.values():
                is_object = isinstance(func.value, ast.Name | ast.Attribute)
                func = func.value if is_object else func  # but `super().__call__(x)`
            changes = self.file.constructs(function)
            code = functools.partial(arrays.argument, self) if changes else self.code
            plain = self.plain_call(node, func, more, code)
            if not changes and fallback.runs_on_host(self.file.recording, function):
                return ast.Call(expr("on_host"), [plain.func, *plain.args], plain.keywords)
            return plain
        if callee is inspect.signature and self.file.target.is_tree:
            raise Unnamed("a signature, which keys for random numbers change")
        if callee is isinstance and event is not None:
            return calls.isinstance_(self, node)
        if isinstance(node.func, ast.Attribute) and self.file.layers.is_forward(callee):
            return self.plain_call(node, expr("{0}.__call__", self.code(node.func.value)), [])
        if (getattr(callee, "__module__", None) or "").startswith("einops."):
            return self.plain_call(
                node, self.code(node.func), [], functools.partial(arrays.value_of, self)
            )
        if callee in calls.WITH_COUNTERPARTS or calls.is_composed(self, node, callee):
            return self.plain_call(node, self.code(node.func))
        if callee is nn.functional.interpolate:
            kept = [key for key in node.keywords if key.arg not in calls.UNUSED]
            return self.plain_call(ast.Call(node.func, node.args, kept), expr("interpolate"))
        if callee is torch.meshgrid:
            return calls.meshgrid(self, node)
        if callee in calls.TRANSFORMS:
            return calls.transform(self, node, callee)
        if callee in calls.DROPOUTS:
            return calls.dropout(self, node)
        count = calls.count_of_tuple(callee)
        if count:
            return expr("ntuple({0}, {1})", self.code(node.args[0]), count)
        if callee is copy.deepcopy and isinstance(value, nn.Module):
            self.function.makes_modules = True
            return expr(self.file.target.copy, self.code(node.args[0]))
        if callee is nn.functional.scaled_dot_product_attention:
            made = calls.attention(self, node)
            if made is not None:
                return made
        if isinstance(value, torch.Tensor) and calls.makes_array(self, node, callee):
            dtype = self.file.dialect.dtype(dtype_name(value.dtype))
            return expr("jnp.array({0}, {1})", self.code(node.args[0]), dtype)
        if event is not None and event.operations and callee not in _OVER_ELEMENTS:
            return self._operations(node, event)
        if callee in calls.TEMPLATES:
            return expr(calls.TEMPLATES[callee], *map(self.code, node.args))
        if isinstance(value, torch.dtype):  # as of `torch.get_default_dtype`
            return self.reference(node, value)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return node
        return self.plain_call(node, self.code(node.func), [])

    def _call_with(self, node: ast.Call, function: Function, first: ast.expr) -> ast.Call:
        """Returns the call of a function with a module in front of the arguments."""
        self.file.add_function(function)
        more = self.file.target.extras(self.file, self.function, function)
        made = self.plain_call(node, expr(self.file.marks.mark(function)), more)
        return ast.Call(made.func, [self.code(first), *made.args], made.keywords)

    def _left_out(self, node: ast.Call) -> set[ast.AST]:
        callee = self.callee(node)
        left = self.file.omissions.left_out(self.function, node, callee)
        if isinstance(callee, type) and library.is_record(callee):
            left |= {key for key in node.keywords if is_constant(self.code(key.value), None)}
            names = [key.arg for key in node.keywords if key not in left]
            self.file.configs.fill(callee, names, len(node.args))
        return left | super()._left_out(node)

    def is_left_out(self, node: ast.expr | None) -> bool:
        """Returns whether an expression is a device, or what PyTorch's layers make arrays with."""
        if not self.function.module.startswith("torch."):
            return super().is_left_out(node)
        match node:
            case ast.Name("device" | "dtype" | "factory_kwargs") | ast.Dict(
                [ast.Constant("device"), *_]
            ):
                return True
        return super().is_left_out(node)

    def has_no_counterpart(self, value: Any) -> bool:
        """Returns whether something is a device, or the version of a library."""
        return isinstance(value, torch.device) or type(value).__module__ == "packaging.version"

    def _call_module(self, node: ast.Call, module: nn.Module) -> ast.expr:
        kind, table = type(module), self.file.layers
        is_known = table.layer_of(kind) is not None or kind in table.activations
        is_known |= table.base_of(kind) is not None and parametrize.is_parametrized(module)
        if layers.is_library_module(kind) and not is_known and not self.file.add(kind):
            raise NotTranscribed(f"{kind.__name__} is not in the table of layers")
        tied = self.file.tied_table(module, self.function)
        if tied:
            return expr(f"{tied}.attend({{0}})", self.code(node.args[0]))
        return calls.call_parts(self, calls.with_new_keywords(node, table.base_of(kind)))

    def _make(self, node: ast.Call, kind: type, *, bound: bool = False) -> ast.expr:
        table = self.file.layers
        if kind is nn.Parameter:
            return arrays.parameter(self, node)
        layer, given = table.layer_of(kind), self.file.target.source()
        node = calls.without_ignored(self, node, is_layer=layer is not None)
        if layer is not None:
            if not layer.draws and not self.file.constructs(self.function):
                given = ast.keyword(given.arg, expr(self.file.target.no_random_numbers))
            return make_layer(self.code, node, kind, layer, given, bound=bound)
        if kind in table.activations:
            is_named, value = self.static(node.func)
            if is_named and value is kind:
                return make_activation(self.code, node, kind, table.activations[kind])
            return ast.Call(self.code(node.func), [], [])
        if kind is nn.Module:
            return expr(self.file.target.no_part)
        if not self.file.add(kind):
            raise NotTranscribed(f"{kind.__name__} is not in the table of layers")
        kinds = {kind, *map(type, self.values(node))}
        takes = any(map(self.file.takes_rngs, kinds))
        if takes and self.file.constructs(self.function):
            self.function.makes_modules = True
            self.file.takers |= kinds if len(kinds) > 1 else set()
        more = [given] if takes else []
        return self.plain_call(node, self.code(node.func), more)

    def _unseen(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.Call(ast.Attribute(ast.Name(name)) as func):
                loads = (x for x in self.function.nodes if isinstance(x, ast.Name) and x.id == name)
                values = [value for load in loads for value in self.values(load)]
                if values and all(isinstance(value, torch.Tensor) for value in values):
                    size = size_of(self.code, node, func)
                    if size is not None:
                        return size
                if values and all(isinstance(value, list | dict | set) for value in values):
                    return self.plain_call(node, ast.Attribute(self.code(func.value), func.attr))
        return super()._unseen(node)

    def _tensor_method(
        self, node: ast.Call, func: ast.Attribute, base: torch.Tensor, event: Event
    ) -> ast.expr:
        name = func.attr
        size = size_of(self.code, node, func)
        if size is not None:
            return size
        if name in numbers.METHODS:
            return expr(f"{{0}}.{name}()", self.code(func.value))
        if name in initial_values.METHODS and self.file.constructs(self.function):
            return initial_values.draw_by_method(self, node, func)
        if name == "new_tensor":
            return expr("jnp.array({1}, {0}.dtype)", *map(self.code, (func.value, node.args[0])))
        if name == "is_contiguous":  # as all arrays of JAX are
            return literal(True)
        if name == "is_floating_point":
            return expr("jnp.issubdtype({0}.dtype, jnp.floating)", self.code(func.value))
        if event.value is base and not event.operations:
            return self.code(func.value)
        return self._operations(node, event)

    # --- operations -------------------------------------------------------------------------------

    def _operations(self, node: ast.expr, event: Event) -> ast.expr:
        self.file.places.check(self.events(node))
        given = list(arguments_of(node, event, self.code))
        tensors = dict(tensors_of(event, self.code))
        parameters = self.file.recording.arguments_of(self.function)
        varied = node in self._varied or any(
            type(item.value) is int and getattr(item.node, "id", "") in parameters for item in given
        )
        dialect, has_numbers = self.file.dialect, not varied
        parts = [pair for other in self.events(node) for pair in other.parts.items()]
        optional = {part for part, inner in parts if inner.value is None}
        operations = Operations(
            dialect, given, tensors, self._key, has_numbers=has_numbers, optional=optional
        )
        made = operations.print(event.operations, event.value)
        match node, made:  # PyTorch has numbers on the right of what commutes
            case ast.BinOp(op=op), ast.BinOp(left, ast.Add() | ast.Mult(), right) if given:
                is_number = not isinstance(given[0].value, torch.Tensor)
                if is_number and type(op) is type(made.op) and len(event.operations) == 1:
                    return ast.BinOp(right, made.op, left)
        return made

    def _key(self) -> ast.expr:
        """Returns the code for a random key."""
        target, draws = self.file.target, self.function.makes_modules
        return target.draw() if draws else target.key(self.file, self.function)


_OVER_ELEMENTS = (zip, enumerate, list, tuple, reversed, sum, map)  # of arrays, too
