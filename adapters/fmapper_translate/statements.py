"""Functions of the source as code: their statements in order, with the source's comments."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import tokenize
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fmapper.translation import expr, text
from fmapper_translate import arrays, layers
from fmapper_translate.constructors import initial_values
from fmapper_translate.expressions import NEW_NAMES, Expressions, Unnamed
from fmapper_translate.fallback import operations_of
from fmapper_translate.functions import Function
from fmapper_translate.operations import NotTranscribed, negate

if TYPE_CHECKING:
    from fmapper_translate.files import File

_SETTERS = frozenset({"add_module", "register_module", "register_parameter"})
_INDENT = "    "
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
        self._expressions = Expressions(file, function)
        self.code = self._expressions.code
        self._recording = file.recording
        self._comments = dict(_comments(function.lines))
        self._is_constructor = function.name == "__init__" and file.is_module(function.owner)

    def lines(self) -> list[str]:
        """Returns the lines of the function.

        Raises:
            NotTranscribed: A part of it has no counterpart.
        """
        tree = self._function.tree
        try:
            if self._function in self._file.distrusted:
                raise NotTranscribed(f"{self._function.label}: its statements give something else")
            body = list(self._block(tree.body))
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
        return [*decorators, header, *(_INDENT + line for line in body or ["pass"])]

    def _is_kept(self, decorator: ast.expr) -> bool:
        return isinstance(decorator, ast.Name) and decorator.id in (
            "staticmethod", "classmethod", "property",
        )  # fmt: skip

    def _parameters(self, args: ast.arguments) -> ast.arguments:
        def plain(one: ast.arg | None) -> ast.arg | None:
            return None if one is None else ast.arg(one.arg, self._annotation(one.annotation))

        given = [arg for arg in args.args if not self._is_of_device(arg)]
        defaults = [
            self.code(default)
            for arg, default in zip(args.args[-len(args.defaults) :], args.defaults, strict=False)
            if arg in given
        ]
        kw_defaults = [None if arg is None else self.code(arg) for arg in args.kw_defaults]
        keywords = [plain(arg) for arg in args.kwonlyargs]
        kwarg = plain(args.kwarg)
        if self._function.makes_modules:
            keywords.append(ast.arg("rngs", expr("nnx.Rngs") if self._is_constructor else None))
            kw_defaults.append(None)
        return ast.arguments(
            [plain(arg) for arg in args.posonlyargs], [plain(arg) for arg in given],  # type: ignore[misc]
            plain(args.vararg), keywords, kw_defaults, kwarg, defaults,  # type: ignore[arg-type]
        )  # fmt: skip

    def _is_of_device(self, parameter: ast.arg) -> bool:
        uses = [item for item in self._function.nodes
                if isinstance(item, ast.Name) and item.id == parameter.arg]  # fmt: skip
        return any(map(self._is_device, uses))

    def _annotation(self, node: ast.expr | None) -> ast.expr | None:
        if node is None or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            return None
        try:
            return self.code(node)
        except NotTranscribed:
            return None

    # --- statements -------------------------------------------------------------------------------

    def _block(self, body: list[ast.stmt]) -> Iterator[str]:
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
            if beside and is_simple and not _is_of_tools(beside):
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
            case ast.Assign(value=value) | ast.AnnAssign(value=value) if self._is_device(value):
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
                yield from quote(inspect.cleandoc(words)).splitlines()
            case ast.Expr(ast.Call() as call):
                yield from self._call(call)
            case ast.Return(value):
                yield "return" if value is None else f"return {_bare(self.code(value))}"
            case ast.If():
                yield from self._if(node)
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
            case ast.Raise() | ast.Pass() | ast.Break() | ast.Continue():
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
        lines = list(self._block(body))
        yield from (_INDENT + line for line in lines or ["pass"])

    def _is_device(self, node: ast.expr | None) -> bool:
        values = self._expressions.values(node) if node is not None else []
        return bool(values) and all(isinstance(value, torch.device) for value in values)

    # --- assignments ------------------------------------------------------------------------------

    def _assign(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [(t, v) for t, v in zip(target.elts, value.elts, strict=False)
                     if not self._is_device(v)]  # fmt: skip
            if len(pairs) < len(value.elts) and len(target.elts) == len(value.elts):
                for pair in pairs:
                    yield from self._assign(*pair)
                return
        if isinstance(target, ast.Subscript):
            owners = self._expressions.values(target.value)
            if owners and isinstance(owners[0], torch.Tensor):
                yield self._write(target, "set", self.code(value))
                return
        if isinstance(target, ast.Attribute) and arrays.is_array(self._expressions, value):
            if not arrays.tie(self._expressions, target, value):
                yield arrays.share(self._expressions, target, value)
            return
        values = self._expressions.values(value)
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
        values = self._expressions.values(value)
        is_tensor = [
            isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) for item in values
        ]
        if any(is_tensor) and self._is_constructor:
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
        if arrays.is_array(self._expressions, target.value):
            return arrays.write(self._expressions, target.value, made)
        return f"{text(owner)} = {text(made)}"

    def _augment(self, node: ast.AugAssign) -> Iterator[str]:
        sign = _SIGNS.get(type(node.op), "")
        if isinstance(node.target, ast.Subscript):
            owners = self._expressions.values(node.target.value)
            if owners and isinstance(owners[0], torch.Tensor):
                methods = {"+": "add", "*": "multiply", "/": "divide"}
                if sign not in methods:
                    raise NotTranscribed(f"{sign}= into a part of a tensor")
                yield self._write(node.target, methods[sign], self.code(node.value))
                return
        yield f"{text(self._target(node.target))} {sign}= {_bare(self.code(node.value))}"

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, call: ast.Call) -> Iterator[str]:
        func, callee = call.func, self._expressions.callee(call)
        name = func.attr if isinstance(func, ast.Attribute) else ""
        owner = getattr(callee, "__self__", None)
        if name == "__init__" and isinstance(func, ast.Attribute) and _is_super(func.value):
            yield from self._super(call)
        elif name == "register_buffer":
            yield from self._buffer(call)
        elif name in _SETTERS and isinstance(func, ast.Attribute):
            codes = [self.code(item) for item in (func.value, *call.args)]
            yield f"setattr({', '.join(map(text, codes))})"
        elif callee is print:
            return
        elif initial_values.is_initialization(callee):
            yield from self._initialize(lambda: initial_values.initialize(self._expressions, call))
        elif getattr(callee, "__func__", None) is nn.Module.apply:
            yield from initial_values.apply(self._expressions, call)
        elif name == "reset_parameters" and layers.layer_of(type(owner)) is not None:
            return  # the layer has them
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
                initial_values.initialize_by_method, self._expressions, call, func
            )
            yield from self._initialize(made)
        elif arrays.is_array(self._expressions, func.value):
            yield arrays.write(self._expressions, func.value, self.code(call))
        else:
            yield f"{text(self._target(func.value))} = {_bare(self.code(call))}"

    def _super(self, call: ast.Call) -> Iterator[str]:
        owner = self._function.owner
        assert owner is not None
        base = next((item for item in owner.__mro__[1:] if "__init__" in vars(item)), object)
        if base is nn.Module or base is object:
            return
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
        values = self._expressions.values(persistent) if persistent is not None else []
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

    def _if(self, node: ast.If) -> Iterator[str]:
        if self._asks_for_device(node.test):
            return
        tests = [bool(value) for value in self._expressions.values(node.test)]
        if any(isinstance(item, torch.Tensor) for item in self._expressions.values(node.test)):
            raise NotTranscribed("the condition is a tensor")
        sides = {}
        for side, body in ((True, node.body), (False, node.orelse)):
            try:
                sides[side] = list(self._block(body)) if body else []
            except NotTranscribed:
                if side in tests or not tests:
                    raise
        try:
            test = self.code(node.test)
        except Unnamed:
            if len(set(tests)) != 1:
                raise
            yield from sides[tests[0]]
            return
        if isinstance(test, ast.Constant) and len(set(tests)) == 1:  # a question about PyTorch
            yield from sides[tests[0]]
            return
        if len(sides) == 2:
            if not any(sides.values()):
                return
            if not sides[True]:
                sides = {True: sides[False], False: []}
                test = negate(test)
            yield f"if {text(test)}:"
            yield from (_INDENT + line for line in sides[True])
            is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
            if is_elif and sides[False] and sides[False][0].startswith("if "):
                yield f"el{sides[False][0]}"
                yield from sides[False][1:]
            elif sides[False]:
                yield "else:"
                yield from (_INDENT + line for line in sides[False])
            return
        side = next(iter(sides))
        condition = test if side else negate(test)
        yield f'assert {text(condition)}, "the other side is not written"'
        yield from sides[side]

    def _asks_for_device(self, test: ast.expr) -> bool:
        """Returns whether a condition is on a device, or on the argument for one."""
        return any(isinstance(item, ast.expr) and self._is_device(item) for item in ast.walk(test))

    def _for(self, node: ast.For) -> Iterator[str]:
        head = initial_values.loop_head(self._expressions, node)
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
        contexts = [ast.unparse(item.context_expr) for item in node.items]
        if all("autocast" in context for context in contexts):
            yield from self._block(node.body)
            return
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


def _is_of_tools(comment: str) -> bool:
    """Returns whether a comment is of tools, as `# type: ignore`."""
    return comment.startswith(("# type:", "# noqa", "# fmt:", "# pylint:"))


def quote(document: str) -> str:
    """Returns a docstring as code."""
    lines = document.splitlines()
    return '"""' + "\n".join(lines) + ('\n"""' if len(lines) > 1 else '"""')


def _bare(node: ast.expr) -> str:
    """Returns the text of an expression, a tuple without parentheses around it."""
    made = text(node)
    if isinstance(node, ast.Tuple) and len(node.elts) > 1:
        return made if any(isinstance(item, ast.Starred) for item in node.elts) else made[1:-1]
    return made


def _comments(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Returns the comments beside statements, by line."""
    code = "\n".join(lines)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and not token.line.strip().startswith("#"):
            yield token.start[0], token.string
