"""Functions of the source as code: their statements in order, with the source's comments."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fmapper.translation import expr, text
from fmapper_translate import arrays, calls, contexts
from fmapper_translate.constructors import buffers, initial_values
from fmapper_translate.expressions import Expressions
from fmapper_translate.fallback import operations_of
from fmapper_translate.functions import Function
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.libraries.ties import tie_arrays
from fmapper_translate.printing import memos
from fmapper_translate.printing.folding import is_constant
from fmapper_translate.printing.selections import (
    Selection,
    is_on_array,
    print_check,
    print_selection,
)
from fmapper_translate.targets import layers
from fmapper_translate.targets.constructions import make_layer
from fmapper_translate.walk import statements as walk
from fmapper_translate.walk.errors import NotTranscribed
from fmapper_translate.walk.statements import SIGNS, bare

if TYPE_CHECKING:
    from fmapper_translate.files import File

_SETTERS = frozenset({"add_module", "register_module", "register_parameter"})


class Statements(walk.Statements):
    """Prints a function.

    Args:
        file: The file.
        function: The function.
    """

    _file: File

    def __init__(self, file: File, function: Function) -> None:
        super().__init__(file, function, Expressions(file, function))
        self._selection: Selection | None = None
        self._keys = {*memos.keys_of(function, self.expressions.memos)}
        self._is_constant = any(
            contexts.stops_gradients(self.expressions, item)
            for item in function.tree.decorator_list
        )

    def _body(self) -> list[str]:
        try:
            body = super()._body()
        except NotTranscribed as error:
            if self._file.constructs(self._function):
                raise
            self._file.fallen[self._function.label] = str(error)
            body = operations_of(self._file, self._function, str(error))
        if self._file.only_evaluation and self._file.is_entry(self._function):
            self._file.has_mode.add(self._file.maker_of(type(self._file.model)))
            reason = f"this file is for evaluation alone: {self._file.only_evaluation}"
            refusal = [
                f"if not self.{self._file.target.mode}:",
                f"    raise NotImplementedError({reason!r})",
            ]
            start = self._document()
            body[start:start] = refusal
        if self._file.slots.are_kept and self._file.is_entry(self._function):
            body.insert(self._document(), "forget(self)")
        if self._is_constructor and self._function.owner in self._file.has_mode:
            body.append(f"self.{self._file.target.mode} = False")
            if self._function.owner is not None:
                self._file.attributes[self._function.owner].setdefault(self._file.target.mode)
        if self._is_constructor:
            slots = self._file.slots.names(self._function.owner, self._file.maker_of)
            start = self._document()
            body[start:start] = [f"self.{name} = Slot()" for name in slots]
        return self._file.frame(self._function, body)

    def _document(self) -> int:
        """Returns how many lines a function's docstring has in the file."""
        tree = self._function.tree
        return len([*self._statement(tree.body[0])]) if ast.get_docstring(tree) else 0

    def _is_dropped(self, parameter: ast.arg) -> bool:
        left = self._file.omissions.parameters(self._function)
        given = self._recording.arguments_of(self._function)[parameter.arg]
        is_nothing = bool(given) and all(map(self.expressions.has_no_counterpart, given))
        return parameter.arg in left or is_nothing or super()._is_dropped(parameter)

    def _annotation(self, node: ast.expr | None) -> ast.expr | None:
        is_torch = self._function.module.startswith("torch.")
        return None if is_torch else super()._annotation(node)

    def _more_parameters(self) -> list[tuple[ast.arg, ast.expr | None]]:
        takes = self._is_constructor and self._file.takes_rngs(self._function.owner)
        is_drawing = self._function in self._file.draws
        made = self._file.target.more_parameters(self._file, self._function)
        if not self._function.makes_modules and not takes and not is_drawing:
            return made
        constructs = self._is_constructor
        return [self._file.target.parameter(self._function, constructs=constructs), *made]

    # --- statements -------------------------------------------------------------------------------

    def _print(self, node: ast.stmt) -> Iterator[str]:
        if self._selection is not None and not isinstance(node, ast.If):
            yield from self._selection.print(self, node)
            return
        made = memos.entry_given(node) if self.expressions.memos else None
        if made is not None and (memo := self.expressions.memos.get(ast.unparse(made[1]))):
            yield f"{memo.name} = {bare(self.code(memo.value))}"
            return
        match node:
            case ast.Assign([ast.Name(name)]) if name in self._keys:
                return
            case ast.Assign(targets=[target], value=ast.expr() as value) if self._is_nothing(
                target, value
            ):
                return
            case ast.Return(ast.Call() as call) if initial_values.is_initialization(
                self.expressions.callee(call)
            ):
                yield from self._call(call)
            case ast.Return(ast.expr() as value) if self._is_constant:
                yield f"return {text(expr('jax.lax.stop_gradient({0})', self.code(value)))}"
            case ast.With():
                yield from self._with(node)
            case ast.Expr(ast.ListComp(ast.Call() as call, [loop])) if not loop.ifs:
                body = [*self._call(call)]
                if body:
                    yield f"for {bare(loop.target)} in {bare(self.code(loop.iter))}:"
                    yield from (f"    {line}" for line in body)
            case _:
                yield from super()._print(node)

    def _is_nothing(self, target: ast.expr, value: ast.expr) -> bool:
        events = self._recording.events.get(value, [])
        return self._file.omissions.is_nothing(self._function, target, events)

    # --- assignments ------------------------------------------------------------------------------

    def _assign_value(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        yield from self._assign_one(target, value)
        match target:
            case ast.Attribute(base, "bias"):  # of a layer that was made without one, or with one
                owners = self.expressions.values(base)
                if owners and all(map(layers.says_bias, owners)):
                    owner = text(self.code(base))
                    if not self._file.target.is_tree:
                        yield f"{owner}.use_bias = {owner}.bias is not None"

    def _assign_one(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        if not self._file.constructs(self._function) and arrays.stays(
            self.expressions, target, value
        ):
            return
        if isinstance(target, ast.Subscript):
            owners = self.expressions.values(target.value)
            if owners and isinstance(owners[0], torch.Tensor):
                yield arrays.write_part(self.expressions, target, value)
                return
            if isinstance(target.value, ast.Attribute) and target.value.attr == "_modules":
                buffers.note_names(self.expressions, target.value.value)
                codes = map(self.code, (target.value.value, target.slice, value))
                yield f"setattr({', '.join(map(text, codes))})"
                return
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
            yield from self._freeze(target.value, value)
            return
        match target:
            case ast.Attribute(array, "data") if arrays.is_array(self.expressions, array):
                yield arrays.write(self.expressions, array, self.code(value))
                return
        if isinstance(target, ast.Attribute) and target.attr not in ("data", "grad"):
            owners = self.expressions.values(target.value)
            is_tensor = [isinstance(item, torch.Tensor) for item in owners]
            if any(is_tensor) and not any(isinstance(item, nn.Parameter) for item in owners):
                return  # which says nothing about the values of a tensor
            if any(is_tensor):  # an option of a parameter
                array, name = arrays.argument(self.expressions, target.value), target.attr
                yield self._option(array, ast.Constant(name), self.code(value))
                return
        if isinstance(target, ast.Attribute) and arrays.is_array(self.expressions, value):
            tied = arrays.tie(self.expressions, target, value)
            if tied is not None:
                yield from tied
            elif self._file.target.is_tree:
                yield self.set_value(target, self.code(value))
            else:
                yield arrays.share(self.expressions, target, value)
            return
        values = self.expressions.values(value)
        if isinstance(target, ast.Attribute) and any(isinstance(x, nn.Parameter) for x in values):
            made = arrays.replace(self.expressions, target, self.code(value))
            if made is not None:
                yield made
                return
        if values and all(self._file.tied_table(item, self._function) for item in values):
            return  # the embedding stands for it
        if values and all(map(calls.is_operation, values)):
            return  # its calls are operations
        code = self.code(value)
        if isinstance(target, ast.Attribute):
            code = self._attribute(target, value, code)
        yield self.set_value(target, code)

    def set_value(self, target: ast.expr, code: ast.expr) -> str:
        """Returns the statement that gives a variable or an attribute a value."""
        arrays.refuse_change(self.expressions, target)
        match target:
            case ast.Attribute(base, name) if not self._is_self(base):
                owners = self.expressions.values(base)
                if owners and all(isinstance(item, nn.Module) for item in owners):
                    return self._file.target.part.format(text(self.code(base)), name, bare(code))
        return f"{bare(self._target(target))} = {bare(code)}"

    def _is_self(self, base: ast.expr) -> bool:
        return self._function.is_method and isinstance(base, ast.Name) and base.id == "self"

    def _target(self, target: ast.expr) -> ast.expr:
        match target:
            case ast.Attribute(base, name) if self._is_self(base) and self._function.owner:
                self._file.attributes[self._function.owner].setdefault(name)
        made = super()._target(target)
        if isinstance(target, ast.Attribute) and isinstance(made, ast.Attribute):
            owners = self.expressions.values(target.value)
            for layer in filter(None, map(self._file.layers.base_of, map(type, owners))):
                made.attr = layer.attributes.get(target.attr, target.attr)
            if any(self._file.slots.has(owner, target.attr) for owner in owners):
                return ast.Attribute(made, "value", ast.Store())
        return made

    def _attribute(self, target: ast.Attribute, value: ast.expr, code: ast.expr) -> ast.expr:
        """Returns the code for what becomes an attribute of an object."""
        values = self.expressions.values(value)
        is_tensor = [
            isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) for item in values
        ]
        is_buffer = isinstance(code, ast.Call) and text(code.func) in ("Buffer", "Constant")
        if any(is_tensor) and self._is_constructor and not is_buffer:
            made = self._file.target.array("constant", code)
            is_later = buffers.is_setting_before(self.expressions, target)
            return expr(self._file.target.new_part, made) if is_later else made
        if any(isinstance(item, np.ndarray) for item in values):
            return expr("nested_tuple({0})", code)
        modules = [x for x in values if isinstance(x, nn.Module)]
        activations = self._file.layers.activations  # functions, in a file
        modules = [x for x in modules if type(x) not in activations]
        arrays_given = [x for x in values if isinstance(x, nn.Parameter)]
        if (modules or arrays_given) and buffers.is_setting_before(self.expressions, target):
            return expr(self._file.target.new_part, code)
        owners = [vars(x) for x in self.expressions.values(target.value) if hasattr(x, "__dict__")]
        lists = [*values, *(owner.get(target.attr) for owner in owners)]  # which grow later
        parts = [part for item in lists if type(item) is list for part in item]
        if any(isinstance(part, nn.Module) for part in parts):
            return expr(self._file.target.plain_list, code)
        return code

    def _augment(self, node: ast.AugAssign) -> Iterator[str]:
        sign = SIGNS.get(type(node.op), "")
        if isinstance(node.target, ast.Subscript):
            owners = self.expressions.values(node.target.value)
            if owners and isinstance(owners[0], torch.Tensor):
                yield arrays.write_part(self.expressions, node.target, node.value, node.op)
                return
        match node.target:
            case ast.Attribute(array, "data") if arrays.is_array(self.expressions, array):
                yield arrays.change(self.expressions, array, sign, node.value)
                return
            case ast.Attribute(base, name) if buffers.is_buffer(self.expressions, base, name):
                array, new = ast.Attribute(self.code(base), name), self.code(node.value)
                yield self._file.target.write(self._file, self._function, array, new, sign)
                return
        arrays.refuse_change(self.expressions, node.target)
        yield from super()._augment(node)

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, call: ast.Call) -> Iterator[str]:
        func, callee = call.func, self.expressions.callee(call)
        name = func.attr if isinstance(func, ast.Attribute) else ""
        owner = getattr(callee, "__self__", None)
        if name == "__init__" and text(func).startswith("super("):
            yield from self._super(call)
        elif name == "__init__" and self.expressions.static(func)[0]:  # of a base that it names
            yield from self._super(ast.Call(func, call.args[1:], call.keywords))
        elif name == "register_buffer":
            yield from buffers.register_buffer(self, call)
        elif name in _SETTERS and isinstance(func, ast.Attribute):
            owner, *codes = [text(self.code(item)) for item in (func.value, *call.args)]
            kinds = {*map(type, self.expressions.values(func.value))}
            is_named = nn.Sequential in kinds
            match call.args:
                case [ast.Constant(str(name)), value] if not is_named and name.isidentifier():
                    part = ast.Attribute(func.value, name, ast.Store())
                    yield self.set_value(part, self._attribute(part, value, self.code(value)))
                    return
            named = f"{owner}.add_module(" if is_named else f"setattr({owner}, "
            is_list = kinds == {nn.ModuleList}  # whose next place is the name
            if not is_named and not is_list:
                buffers.note_names(self.expressions, func.value)
            yield f"{owner}.append({codes[1]})" if is_list else f"{named}{', '.join(codes)})"
        elif (
            callee is print
            or library.is_message(callee)
            or calls.has_no_effect(self.expressions, call, callee)
        ):
            return
        elif callee is setattr and any(
            isinstance(x, torch.Tensor) for x in self.expressions.values(call.args[0])
        ):
            array = arrays.argument(self.expressions, call.args[0])
            yield self._option(array, *map(self.code, call.args[1:]))
        elif callee is setattr:
            buffers.note_names(self.expressions, call.args[0])
            yield text(self.code(call))
        elif library.is_config(owner):
            return  # its fields are what they are then
        elif initial_values.is_initialization(callee):
            if initial_values.has_no_effect(self.expressions, call.args[0]):
                return
            if arrays.is_local(self.expressions, call.args[0]):
                made = initial_values.draw(self.expressions, call)
                yield f"{text(call.args[0])} = {text(made)}"
                return
            if self._function in self._file.initializers and call not in self._recording.events:
                yield initial_values.initialize(self.expressions, call)
                return
            yield from self._initialize(lambda: initial_values.initialize(self.expressions, call))
        elif getattr(callee, "__func__", None) is nn.Module.apply:
            yield from initial_values.apply(self.expressions, call)
        elif name == "reset_parameters" and self._file.layers.layer_of(type(owner)) is not None:
            if not self._file.constructs(self._function):
                raise NotTranscribed("a layer is given its first values again")
            return  # the layer has them
        elif name == "requires_grad_" and isinstance(func, ast.Attribute):
            given = [*call.args, *(key.value for key in call.keywords)]
            yield from self._freeze(func.value, given[0] if given else ast.Constant(True))
        elif library.is_of_library(getattr(callee, "__module__", None) or ""):
            if name in ("post_init", "_init_weights") and self._file.gives_initial_values:
                yield from self._post_init(call)
                return
            if name == "post_init":
                yield from tie_arrays(self.expressions, call)
            if any(event.operations for event in self.expressions.events(call)):
                self._file.without_initial_values.add(self._function.owner)
        elif isinstance(func, ast.Attribute) and (
            (isinstance(owner, torch.Tensor) and name[-1] == "_")
            or (callee is None and name in initial_values.METHODS)
        ):
            yield from self._change(call, func)
        else:
            yield text(self.code(call))

    def _option(self, array: ast.expr, name: ast.expr, value: ast.expr) -> str:
        """Returns the statement that gives a parameter an option."""
        return text(expr(self._file.target.option, array, name, value))

    def _post_init(self, call: ast.Call) -> Iterator[str]:
        """Prints what gives a library's model its first values, and what it does for a part."""
        func, given = text(self.code(call.func)), self._file.target.source()
        if func.endswith("_init_weights"):
            yield f"{func}({text(self.code(call.args[0]))}, {given.arg}={text(given.value)})"
            return
        for model in self.expressions.values(call.func.value):  # type: ignore[attr-defined]
            self._file.add_initial_values(model)
        yield f"{func}({text(given.value)})"
        yield from tie_arrays(self.expressions, call)

    def _freeze(self, part: ast.expr, trained: ast.expr) -> Iterator[str]:
        """Prints what has a module or a parameter be trained, or not: `w.requires_grad = False`."""
        if self._file.target.is_tree:
            return  # in a model for evaluation alone
        if is_constant(trained, True) and arrays.is_computed(self.expressions, part):
            return  # it has a gradient in JAX
        code, test = arrays.argument(self.expressions, part), self.code(trained)
        if not isinstance(test, ast.Constant):
            yield f"if not {text(test)}:"
            yield f"    freeze({text(code)})"
        elif test.value:
            raise NotTranscribed("what has parameters trained again has no counterpart")
        else:
            yield f"freeze({text(code)})"

    def _initialize(self, make: Callable[[], str]) -> Iterator[str]:
        try:
            yield make()
        except NotTranscribed:
            if not self._file.constructs(self._function):
                raise
            self._file.without_initial_values.add(self._function.owner)

    def _change(self, call: ast.Call, func: ast.Attribute) -> Iterator[str]:
        """Prints a method that changes its tensor."""
        if self._file.constructs(self._function) and not arrays.is_local(
            self.expressions, func.value
        ):
            made = functools.partial(
                initial_values.initialize_by_method, self.expressions, call, func
            )
            yield from self._initialize(made)
            return
        changed, later = func.value, [*call.args, *call.keywords]
        while isinstance(changed, ast.Call) and isinstance(changed.func, ast.Attribute):
            if changed.func.attr[-1] != "_":  # the method gives its tensor
                break
            if any(text(changed.func.value) in ast.unparse(node) for node in later):
                raise NotTranscribed(f"{text(changed.func.value)} is read while it changes")
            later += [*changed.args, *changed.keywords]
            changed = changed.func.value
        if arrays.is_array(self.expressions, changed):
            yield arrays.write(self.expressions, changed, self.code(call))
        else:
            yield f"{text(self._target(changed))} = {bare(self.code(call))}"

    def _super(self, call: ast.Call) -> Iterator[str]:
        owner = self._function.owner
        assert owner is not None
        made = (item for item in owner.__mro__[1:] if "__init__" in vars(item))
        base = next((item for item in made if not library.lacks(item)), object)
        given = self._file.target.source()
        if base is nn.Module or base is object:
            return
        left = self._file.omissions.left_out(self._function, call, base)
        call = ast.Call(call.func, call.args, [key for key in call.keywords if key not in left])
        func, layer = expr("super().__init__"), self._file.layers.layer_of(base)
        if layer is not None:
            yield text(make_layer(self.code, call, base, layer, given, func=func))
            return
        more = [given] * self._file.takes_rngs(base)
        yield text(self.expressions.plain_call(call, func, more))

    # --- flow -------------------------------------------------------------------------------------

    def _leaves_out(self) -> bool:
        is_left_out = self._function in self._file.initializers
        if is_left_out:
            self._file.without_initial_values.add(self._function.owner)
        return is_left_out

    def select(self, node: ast.If) -> Iterator[str]:
        """Prints an `if` on a tensor."""
        if self._selection is not None:
            raise NotTranscribed("the condition is an array, below another one")
        yield from print_selection(self, node)

    def select_within(self, side: Selection, body: list[ast.stmt]) -> Iterator[str]:
        """Prints the statements of a side of an `if` on a tensor."""
        self._selection = side
        try:
            yield from self.block(body)
        finally:
            self._selection = None

    def _for(self, node: ast.For) -> Iterator[str]:
        head = initial_values.loop_head(self.expressions, node)
        if head is not None:
            try:
                yield from [head, *self._inner(node.body)]
            except NotTranscribed:
                if not self._file.constructs(self._function):
                    raise
                self._file.without_initial_values.add(self._function.owner)
            return
        yield from super()._for(node)

    def _assert(self, node: ast.Assert) -> Iterator[str]:
        if is_on_array(self.expressions, node.test):
            yield print_check(self, node.test, node.msg or node.test)
            return
        yield from super()._assert(node)

    def _with(self, node: ast.With) -> Iterator[str]:
        managers = [item.context_expr for item in node.items]
        if all(contexts.stops_gradients(self.expressions, item) for item in managers):
            before, self._is_constant = self._is_constant, not self._file.constructs(self._function)
            yield from self.block(node.body)
            for name in contexts.tensors_in(self.expressions, node.body):
                if self._is_constant:
                    yield f"{name} = jax.lax.stop_gradient({name})"
            self._is_constant = before
        elif all(map(contexts.is_precision, managers)):
            yield from self.block(node.body)
        else:
            raise NotTranscribed("with has no counterpart")
