"""Functions of the source as code: their statements in order, with the source's comments."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fmapper.translation import expr, text
from fmapper_translate import arrays, contexts, layers
from fmapper_translate.constructors import initial_values
from fmapper_translate.expressions import NEW_NAMES, Expressions
from fmapper_translate.fallback import operations_of
from fmapper_translate.functions import Function
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.libraries.ties import tie_arrays
from fmapper_translate.operations import NotTranscribed
from fmapper_translate.printing.comments import comments_beside, is_of_tools, quote
from fmapper_translate.printing.conditions import INDENT, print_if

if TYPE_CHECKING:
    from fmapper_translate.files import File

_HOOKS = frozenset({  # of state dicts
    "_register_load_state_dict_pre_hook", "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook", "register_state_dict_pre_hook",
})  # fmt: skip
_SETTERS = frozenset({"add_module", "register_module", "register_parameter"})
_WIDTH = 88  # of a line with a comment beside it


class Statements:
    """Prints a function.

    Args:
        file: The file.
        function: The function.
    """

    def __init__(self, file: File, function: Function) -> None:
        self._file = file
        self._function = function
        self.expressions = Expressions(file, function)
        self.code = self.expressions.code
        self._recording = file.recording
        self._comments = dict(comments_beside(function.lines))
        self._is_constant = any(
            contexts.stops_gradients(self.expressions, item)
            for item in function.tree.decorator_list
        )
        self._is_constructor = function.name == "__init__" and file.is_module(function.owner)

    def lines(self) -> list[str]:
        """Returns the lines of the function.

        Raises:
            NotTranscribed: A part of it has no counterpart.
        """
        tree = self._function.tree
        try:
            if self._function in self._file.distrusted:
                reason = self._file.distrusted[self._function]
                raise NotTranscribed(f"{self._function.label}: {reason}")
            body = list(self.block(tree.body))
        except NotTranscribed as error:
            if self._file.constructs(self._function):
                raise
            self._file.fallen[self._function.label] = str(error)
            body = operations_of(self._file, self._function, str(error))
        if self._is_constructor and self._function.owner in self._file.has_mode:
            body.append("self.deterministic = False")
        if self._is_constructor and self._function.owner in self._file.draws:
            body.append("self.rngs = rngs")
        decorators = [
            f"@{ast.unparse(item)}" for item in tree.decorator_list if self._is_kept(item)
        ]
        name = NEW_NAMES.get(tree.name, tree.name) if self._function.owner else tree.name
        header = f"def {name}({ast.unparse(self._parameters(tree.args))}):"
        return [*decorators, header, *(INDENT + line for line in body or ["pass"])]

    def _is_kept(self, decorator: ast.expr) -> bool:
        return isinstance(decorator, ast.Name) and decorator.id in (
            "staticmethod", "classmethod", "property",
        )  # fmt: skip

    def _parameters(self, args: ast.arguments) -> ast.arguments:
        def plain(one: ast.arg | None) -> ast.arg | None:
            return None if one is None else ast.arg(one.arg, self._annotation(one.annotation))

        left = self._file.omissions.parameters(self._function)
        given = [arg for arg in args.args if arg.arg not in left and not self._is_of_device(arg)]
        defaults = [
            self.code(default)
            for arg, default in zip(args.args[-len(args.defaults) :], args.defaults, strict=False)
            if arg in given
        ]
        pairs = [
            (arg, default)
            for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
            if arg.arg not in left
        ]
        kw_defaults = [default and self.code(default) for _, default in pairs]
        keywords = [plain(arg) for arg, _ in pairs]
        kwarg = None if args.kwarg is not None and args.kwarg.arg in left else plain(args.kwarg)
        takes = self._is_constructor and self._file.takes_rngs(self._function.owner)
        if self._function.makes_modules or takes:
            keywords.append(ast.arg("rngs", expr("nnx.Rngs") if self._is_constructor else None))
            kw_defaults.append(None)
        return ast.arguments(
            [plain(arg) for arg in args.posonlyargs], [plain(arg) for arg in given],  # type: ignore[misc]
            plain(args.vararg), keywords, kw_defaults, kwarg, defaults,  # type: ignore[arg-type]
        )  # fmt: skip

    def _is_of_device(self, parameter: ast.arg) -> bool:
        uses = [item for item in self._function.nodes
                if isinstance(item, ast.Name) and item.id == parameter.arg]  # fmt: skip
        return any(map(self.is_device, uses))

    def _annotation(self, node: ast.expr | None) -> ast.expr | None:
        if node is None or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            return None
        try:
            return self.code(node)
        except NotTranscribed:
            return None

    # --- statements -------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> Iterator[str]:
        """Prints statements with their comments."""
        before: ast.stmt | None = None
        for statement in body:
            made = list(self._statement(statement))
            if not made:
                continue
            start = before.end_lineno + 1 if before is not None and before.end_lineno else None
            above = self._above(start, statement.lineno)
            yield from above
            beside = self._comments.get(statement.end_lineno or 0, "")
            is_simple = not isinstance(statement, ast.If | ast.For | ast.While | ast.With)
            if beside and is_simple and not is_of_tools(beside):
                if len(made[-1]) + len(beside) > _WIDTH or len(made) > 1:
                    made.insert(0, beside)
                else:
                    made[-1] += f"  {beside}"
            yield from made
            before = statement

    def _above(self, start: int | None, stop: int) -> list[str]:
        """Returns the comments and blank lines between two statements."""
        comments: list[str] = []
        at = stop - 1
        while at >= 1 and (start is None or at >= start):
            line = self._function.lines[at - 1].strip()
            if line.startswith("#") or (not line and start is not None):
                comments.insert(0, line)
            else:
                break
            at -= 1
        return comments

    def _statement(self, node: ast.stmt) -> Iterator[str]:
        try:
            yield from self._print(node)
        except NotTranscribed as error:
            if str(error).startswith(self._function.label):
                raise
            first = ast.unparse(node).splitlines()[0]
            raise NotTranscribed(f"{self._function.label}: `{first}`: {error}") from None

    def _print(self, node: ast.stmt) -> Iterator[str]:
        match node:
            case ast.Assign(value=value) | ast.AnnAssign(value=value) if self.is_device(value):
                return
            case ast.Assign(targets=[target], value=ast.expr() as value) if self._is_nothing(
                target, value
            ):
                return
            case ast.Assign(targets=[target], value=value):
                yield from self._assign(target, value)
            case ast.Assign(targets=targets, value=value):
                names = [_bare(self._target(target)) for target in targets]
                yield " = ".join([*names, _bare(self.code(value))])
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from self._assign(target, value)
            case ast.AugAssign():
                yield from self._augment(node)
            case ast.Expr(ast.Constant(str(words))):
                if library.is_library(self._function.target.__module__):
                    words = library.shorten(words)
                yield from quote(inspect.cleandoc(words)).splitlines()
            case ast.Expr(ast.Call() as call):
                yield from self._call(call)
            case ast.Return(ast.Call() as call) if initial_values.is_initialization(
                self.expressions.callee(call)
            ):
                yield from self._call(call)
            case ast.Return(value):
                made = None if value is None else self.code(value)
                if made is not None and self._is_constant:
                    made = expr("jax.lax.stop_gradient({0})", made)
                yield "return" if made is None else f"return {_bare(made)}"
            case ast.If():
                yield from print_if(self, node)
            case ast.For():
                yield from self._for(node)
            case ast.While():
                yield f"while {text(self.code(node.test))}:"
                yield from self._inner(node.body)
            case ast.With():
                yield from self._with(node)
            case ast.Assert():
                yield from self._assert(node)
            case ast.FunctionDef():
                arguments = ast.unparse(self._parameters_of_inner(node.args))
                yield f"def {node.name}({arguments}):"
                yield from self._inner(node.body)
            case ast.Raise() | ast.Pass() | ast.Break() | ast.Continue() | ast.Nonlocal():
                yield ast.unparse(node)
            case ast.Import() | ast.ImportFrom():
                yield ast.unparse(node)
            case _:
                raise NotTranscribed(f"{type(node).__name__.lower()} has no counterpart")

    def _parameters_of_inner(self, args: ast.arguments) -> ast.arguments:
        return ast.arguments(
            [], [ast.arg(item.arg) for item in args.args], args.vararg,
            [ast.arg(item.arg) for item in args.kwonlyargs],
            [None if item is None else self.code(item) for item in args.kw_defaults], args.kwarg,
            [self.code(item) for item in args.defaults],
        )  # fmt: skip

    def _inner(self, body: list[ast.stmt]) -> Iterator[str]:
        lines = list(self.block(body))
        yield from (INDENT + line for line in lines or ["pass"])

    def is_device(self, node: ast.expr | None) -> bool:
        """Returns whether an expression always is a device."""
        values = self.expressions.values(node) if node is not None else []
        return bool(values) and all(isinstance(value, torch.device) for value in values)

    def _is_nothing(self, target: ast.expr, value: ast.expr) -> bool:
        events = self._recording.events.get(value, [])
        return self._file.omissions.is_nothing(self._function, target, events)

    # --- assignments ------------------------------------------------------------------------------

    def _assign(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [(t, v) for t, v in zip(target.elts, value.elts, strict=False)
                     if not self.is_device(v)]  # fmt: skip
            if len(pairs) < len(value.elts) and len(target.elts) == len(value.elts):
                for pair in pairs:
                    yield from self._assign(*pair)
                return
            nothing = ast.Constant(None)
            kept = [nothing if self.is_device(item) else item for item in value.elts]
            value = ast.Tuple(kept, ast.Load())
        if isinstance(target, ast.Subscript):
            owners = self.expressions.values(target.value)
            if owners and isinstance(owners[0], torch.Tensor):
                yield self._write(target, "set", self.code(value))
                return
        if isinstance(target, ast.Attribute) and arrays.is_array(self.expressions, value):
            if not arrays.tie(self.expressions, target, value):
                yield arrays.share(self.expressions, target, value)
            return
        values = self.expressions.values(value)
        if values and all(self._file.tied_table(item, self._function) for item in values):
            return  # the embedding stands for it
        code = self.code(value)
        if isinstance(target, ast.Attribute):
            code = self._attribute(target, value, code)
        yield f"{_bare(self._target(target))} = {_bare(code)}"

    def _target(self, target: ast.expr) -> ast.expr:
        match target:
            case ast.Tuple(elts) | ast.List(elts):
                return ast.Tuple([self._target(item) for item in elts], ast.Store())
            case ast.Starred(value):
                return ast.Starred(self._target(value), ast.Store())
            case ast.Attribute(value, attr):
                return ast.Attribute(self.code(value), attr, ast.Store())
            case ast.Subscript(value, index):
                return ast.Subscript(self.code(value), self.code(index), ast.Store())
        return target

    def _attribute(self, target: ast.Attribute, value: ast.expr, code: ast.expr) -> ast.expr:
        """Returns the code for what becomes an attribute of an object."""
        values = self.expressions.values(value)
        is_tensor = [
            isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) for item in values
        ]
        is_buffer = isinstance(code, ast.Call) and text(code.func) in ("Buffer", "Constant")
        if any(is_tensor) and self._is_constructor and not is_buffer:
            return expr("Constant({0})", code)
        if any(isinstance(item, np.ndarray) for item in values):
            return expr("nested_tuple({0})", code)
        return code

    def _write(self, target: ast.Subscript, method: str, value: ast.expr) -> str:
        owner = self.code(target.value)
        if isinstance(target.value, ast.Subscript | ast.Call):
            raise NotTranscribed("it writes into a part of a part")
        index = self.code(target.slice)
        made = expr(f"{{0}}.at[{{1}}].{method}({{2}})", owner, index, value)
        if arrays.is_array(self.expressions, target.value):
            return arrays.write(self.expressions, target.value, made)
        return f"{text(owner)} = {text(made)}"

    def _augment(self, node: ast.AugAssign) -> Iterator[str]:
        sign = _SIGNS.get(type(node.op), "")
        if isinstance(node.target, ast.Subscript):
            owners = self.expressions.values(node.target.value)
            if owners and isinstance(owners[0], torch.Tensor):
                methods = {"+": "add", "*": "multiply", "/": "divide"}
                if sign not in methods:
                    raise NotTranscribed(f"{sign}= into a part of a tensor")
                yield self._write(node.target, methods[sign], self.code(node.value))
                return
        yield f"{text(self._target(node.target))} {sign}= {_bare(self.code(node.value))}"

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, call: ast.Call) -> Iterator[str]:
        func, callee = call.func, self.expressions.callee(call)
        name = func.attr if isinstance(func, ast.Attribute) else ""
        owner = getattr(callee, "__self__", None)
        if name == "__init__" and isinstance(func, ast.Attribute) and _is_super(func.value):
            yield from self._super(call)
        elif name == "register_buffer":
            yield from self._buffer(call)
        elif name in _SETTERS and isinstance(func, ast.Attribute):
            codes = [self.code(item) for item in (func.value, *call.args)]
            yield f"setattr({', '.join(map(text, codes))})"
        elif callee is print or library.is_message(callee) or name in _HOOKS:
            return
        elif initial_values.is_initialization(callee):
            yield from self._initialize(lambda: initial_values.initialize(self.expressions, call))
        elif getattr(callee, "__func__", None) is nn.Module.apply:
            yield from initial_values.apply(self.expressions, call)
        elif name == "reset_parameters" and layers.layer_of(type(owner)) is not None:
            return  # the layer has them
        elif (
            name == "requires_grad_"
            and isinstance(owner, nn.Module)
            and isinstance(func, ast.Attribute)
        ):
            yield f"freeze({text(self.code(func.value))})"
        elif library.is_of_library(getattr(callee, "__module__", None) or ""):
            if name == "post_init":
                yield from tie_arrays(self.expressions, call)
            if self._file.constructs(self._function):
                self._file.without_initial_values.add(self._function.owner)
        elif isinstance(func, ast.Attribute) and (
            (isinstance(owner, torch.Tensor) and name[-1] == "_")
            or (callee is None and name in initial_values.METHODS)
        ):
            yield from self._change(call, func)
        else:
            yield text(self.code(call))

    def _initialize(self, make: Callable[[], str]) -> Iterator[str]:
        try:
            yield make()
        except NotTranscribed:
            if not self._file.constructs(self._function):
                raise
            self._file.without_initial_values.add(self._function.owner)

    def _change(self, call: ast.Call, func: ast.Attribute) -> Iterator[str]:
        """Prints a method that changes its tensor."""
        if self._file.constructs(self._function):
            made = functools.partial(
                initial_values.initialize_by_method, self.expressions, call, func
            )
            yield from self._initialize(made)
        elif arrays.is_array(self.expressions, func.value):
            yield arrays.write(self.expressions, func.value, self.code(call))
        else:
            yield f"{text(self._target(func.value))} = {_bare(self.code(call))}"

    def _super(self, call: ast.Call) -> Iterator[str]:
        owner = self._function.owner
        assert owner is not None
        base = next((item for item in owner.__mro__[1:] if "__init__" in vars(item)), object)
        if base is nn.Module or base is object:
            return
        if library.is_of_library(base.__module__) and library.counterpart_of(base) is None:
            return
        left = self._file.omissions.left_out(self._function, call, base)
        call = ast.Call(call.func, call.args, [key for key in call.keywords if key not in left])
        args = [self.code(item) for item in call.args]
        keywords = [ast.keyword(key.arg, self.code(key.value)) for key in call.keywords]
        layer = layers.layer_of(base)
        if layer.takes_rngs if layer is not None else self._file.takes_rngs(base):
            keywords.append(ast.keyword("rngs", expr("rngs")))
        yield text(ast.Call(expr("super().__init__"), args, keywords))

    def _buffer(self, call: ast.Call) -> Iterator[str]:
        keywords = {key.arg: key.value for key in call.keywords}
        given = [*call.args, *keywords.values()]
        name, value = given[0], given[1]
        persistent = keywords.get("persistent", call.args[2] if len(call.args) > 2 else None)
        values = self.expressions.values(persistent) if persistent is not None else []
        is_saved = persistent is None or (
            persistent.value if isinstance(persistent, ast.Constant) else all(values)
        )
        made = expr("{0}({1})", ast.Name("Buffer" if is_saved else "Constant"), self.code(value))
        if isinstance(value, ast.Constant) and value.value is None:
            made = expr("None")
        if isinstance(name, ast.Constant):
            yield f"self.{name.value!s} = {text(made)}"
        else:
            yield f"setattr(self, {text(self.code(name))}, {text(made)})"

    # --- flow -------------------------------------------------------------------------------------

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
        yield f"for {_bare(self._target(node.target))} in {_bare(self.code(node.iter))}:"
        yield from self._inner(node.body)
        if node.orelse:
            yield "else:"
            yield from self._inner(node.orelse)

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

    def _assert(self, node: ast.Assert) -> Iterator[str]:
        try:
            test = self.code(node.test)
        except NotTranscribed:
            return
        if isinstance(test, ast.Constant):
            return
        message = "" if node.msg is None else f", {ast.unparse(node.msg)}"
        yield f"assert {text(test)}" + ("" if ".size(" in message else message)


_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _bare(node: ast.expr) -> str:
    """Returns the text of an expression, a tuple without parentheses around it."""
    made = text(node)
    if isinstance(node, ast.Tuple) and len(node.elts) > 1:
        return made if any(isinstance(item, ast.Starred) for item in node.elts) else made[1:-1]
    return made
