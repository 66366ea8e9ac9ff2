"""Functions of the source as code: their statements in order, with the source's comments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fmapper.translation import text
from fmapper_translate.functions import Function
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.printing.comments import comments_beside, is_of_tools, quote
from fmapper_translate.printing.conditions import INDENT, UNSEEN, print_if
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.walk.expressions import Expressions

_WIDTH = 88  # of a line with a comment beside it


class Statements:
    """Prints a function.

    Args:
        file: The file.
        function: The function.
        expressions: The printer of its expressions.
    """

    def __init__(self, file: Any, function: Function, expressions: Expressions) -> None:
        self._file = file
        self._function = function
        self.expressions: Any = expressions
        self.code = expressions.code
        self.is_left_out = expressions.is_left_out
        self._recording = file.recording
        self.is_array = file.recording.source.is_array
        self.nodes = function.nodes
        self._comments = dict(comments_beside(function.lines))
        self._is_constructor = function.name == "__init__" and file.is_module(function.owner)

    def lines(self) -> list[str]:
        """Returns the lines of the function.

        Raises:
            NotTranscribed: A part of it has no counterpart.
        """
        tree = self._function.tree
        body = self._body()
        decorators = [
            f"@{ast.unparse(item)}" for item in tree.decorator_list if self._is_kept(item)
        ]
        new_names = self.expressions.new_names if self._function.is_method else {}
        name = new_names.get(tree.name, tree.name)
        returns = self._annotation(tree.returns)
        arrow = "" if returns is None else f" -> {text(returns)}"
        header = f"def {name}({ast.unparse(self._parameters(tree.args))}){arrow}:"
        return [*decorators, header, *(INDENT + line for line in body or ["pass"])]

    def _body(self) -> list[str]:
        """Returns the lines of the body.

        Raises:
            NotTranscribed: A part of it has no counterpart, or gave something else.
        """
        if self._function in self._file.distrusted:
            reason = self._file.distrusted[self._function]
            raise NotTranscribed(f"{self._function.label}: {reason}")
        return list(self.block(self._function.tree.body))

    def _is_kept(self, decorator: ast.expr) -> bool:
        return isinstance(decorator, ast.Name) and decorator.id in (
            "staticmethod", "classmethod", "property",
        )  # fmt: skip

    def _parameters(self, args: ast.arguments) -> ast.arguments:
        def plain(one: ast.arg | None) -> ast.arg | None:
            return None if one is None else ast.arg(one.arg, self._annotation(one.annotation))

        given = [arg for arg in args.args if not self._is_dropped(arg)]
        defaults = [
            self.code(default)
            for arg, default in zip(args.args[-len(args.defaults) :], args.defaults, strict=False)
            if arg in given
        ]
        pairs = [
            (arg, default)
            for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
            if not self._is_dropped(arg)
        ]
        more = self._more_parameters()
        kw_defaults = [
            *(default and self.code(default) for _, default in pairs),
            *(default for _, default in more),
        ]
        keywords = [*(plain(arg) for arg, _ in pairs), *(arg for arg, _ in more)]
        kwarg = (
            None if args.kwarg is not None and self._is_dropped(args.kwarg) else plain(args.kwarg)
        )
        return ast.arguments(
            [plain(arg) for arg in args.posonlyargs], [plain(arg) for arg in given],  # type: ignore[misc]
            plain(args.vararg), keywords, kw_defaults, kwarg, defaults,  # type: ignore[arg-type]
        )  # fmt: skip

    def _is_dropped(self, parameter: ast.arg) -> bool:
        """Returns whether a file does without a parameter."""
        uses = [item for item in self._function.nodes
                if isinstance(item, ast.Name) and item.id == parameter.arg]  # fmt: skip
        return any(map(self.is_left_out, uses))

    def _more_parameters(self) -> list[tuple[ast.arg, ast.expr | None]]:
        """Returns keywords that the source does not have, and their defaults."""
        return []

    def _annotation(self, node: ast.expr | None) -> ast.expr | None:
        if node is None or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            return None
        if self.expressions.binds(node):  # which stands outside of the function
            return None
        try:
            return self.code(node)
        except NotTranscribed:
            return None

    # --- statements -------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt], *, strict: bool = False) -> Iterator[str]:
        """Prints statements with their comments.

        What never ran and has no counterpart raises an error in the file.

        Raises:
            NotTranscribed: A statement that ran has none; or, if it is strict, any.
        """
        before: ast.stmt | None = None
        for statement in body:
            try:
                made = list(self._statement(statement))
            except NotTranscribed:
                has_run = any(node in self._recording.events for node in ast.walk(statement))
                if has_run and self._leaves_out():
                    return
                if strict or has_run:
                    raise
                yield f"raise NotImplementedError({UNSEEN!r})"
                return
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
            head = getattr(statement, "test", getattr(statement, "iter", None))
            above_body = self._comments.get(getattr(head, "end_lineno", 0), "")
            if above_body and not is_simple and not is_of_tools(above_body):
                made[0] += f"  {above_body}" * made[0].startswith(("if ", "for ", "while "))
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
            case ast.Assign(value=value) | ast.AnnAssign(value=value) if self.is_left_out(value):
                return
            case ast.Assign(targets=[target], value=value):
                yield from self._assign(target, value)
            case ast.Assign(targets=targets, value=value):
                names = [bare(self._target(target)) for target in targets]
                yield " = ".join([*names, bare(self.code(value))])
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from self._assign(target, value)
            case ast.AugAssign():
                yield from self._augment(node)
            case ast.Expr(ast.Constant(str(words))):
                if self._function.module.startswith("torch."):
                    return
                if library.is_library(self._function.module):
                    words = library.shorten(words)
                yield from quote(words).splitlines()
            case ast.Expr(ast.Call() as call):
                yield from self._call(call)
            case ast.Return(value):
                yield "return" if value is None else f"return {bare(self.code(value))}"
            case ast.If():
                yield from print_if(self, node)
            case ast.For():
                yield from self._for(node)
            case ast.While():
                yield f"while {text(self.code(node.test))}:"
                yield from self._inner(node.body)
            case ast.Assert():
                yield from self._assert(node)
            case ast.FunctionDef():
                arguments = ast.unparse(self._parameters_of_inner(node.args))
                yield f"def {node.name}({arguments}):"
                yield from self._inner(node.body)
            case ast.Try(body, handlers, [], []) if self._file.constructs(self._function) or all(
                isinstance(handler.body[-1], ast.Raise) for handler in handlers
            ):  # arrays of JAX do not raise where tensors do
                yield from ["try:", *self._inner(body)]
                for handler in handlers:
                    kind = "" if handler.type is None else f" {text(self.code(handler.type))}"
                    yield f"except{kind}{f' as {handler.name}' if handler.name else ''}:"
                    yield from self._inner(handler.body)
            case ast.Raise(ast.expr() as error):
                cause = f" from {node.cause.id}" if isinstance(node.cause, ast.Name) else ""
                yield f"raise {text(self._error(error))}{cause}"
            case ast.AnnAssign(value=None):
                return
            case ast.Raise() | ast.Pass() | ast.Break() | ast.Continue() | ast.Nonlocal():
                yield ast.unparse(node)
            case ast.Global() if self._file.constructs(self._function):
                yield ast.unparse(node)
            case ast.Delete(targets) if all(isinstance(item, ast.Name) for item in targets):
                return
            case ast.Import() | ast.ImportFrom():
                yield ast.unparse(node)
            case _:
                raise NotTranscribed(f"{type(node).__name__.lower()} has no counterpart")

    def _error(self, error: ast.expr) -> ast.expr:
        """Returns the code for an error; its class alone if its message has no counterpart."""
        try:
            return self.code(error)
        except NotTranscribed:
            if not isinstance(error, ast.Call):
                raise
            return self._error(error.func)

    def _parameters_of_inner(self, args: ast.arguments) -> ast.arguments:
        return ast.arguments(
            [], [ast.arg(item.arg) for item in args.args], args.vararg,
            [ast.arg(item.arg) for item in args.kwonlyargs],
            [None if item is None else self.code(item) for item in args.kw_defaults], args.kwarg,
            [self.code(item) for item in args.defaults],
        )  # fmt: skip

    def _leaves_out(self) -> bool:
        """Returns whether a file may do without what has no counterpart, and notes that it does."""
        return False

    def select(self, node: ast.If) -> Iterator[str]:
        """Prints an `if` on an array."""
        raise NotTranscribed("the condition is an array")

    def _inner(self, body: list[ast.stmt]) -> Iterator[str]:
        lines = list(self.block(body))
        yield from (INDENT + line for line in lines or ["pass"])

    # --- assignments ------------------------------------------------------------------------------

    def _assign(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [(t, v) for t, v in zip(target.elts, value.elts, strict=False)
                     if not self.is_left_out(v)]  # fmt: skip
            if len(pairs) < len(value.elts) and len(target.elts) == len(value.elts):
                for pair in pairs:
                    yield from self._assign(*pair)
                return
            nothing = ast.Constant(None)
            kept = [nothing if self.is_left_out(item) else item for item in value.elts]
            value = ast.Tuple(kept, ast.Load())
        yield from self._assign_value(target, value)

    def _assign_value(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        yield f"{bare(self._target(target))} = {bare(self.code(value))}"

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

    def _augment(self, node: ast.AugAssign) -> Iterator[str]:
        sign = SIGNS.get(type(node.op), "")
        yield f"{text(self._target(node.target))} {sign}= {bare(self.code(node.value))}"

    # --- calls and loops --------------------------------------------------------------------------

    def _call(self, call: ast.Call) -> Iterator[str]:
        yield text(self.code(call))

    def _for(self, node: ast.For) -> Iterator[str]:
        scan = self._file.scan_of(self, self._function, node)
        if scan:
            yield from scan
            return
        yield f"for {bare(self._target(node.target))} in {bare(self.code(node.iter))}:"
        yield from self._inner(node.body)
        if node.orelse:
            yield "else:"
            yield from self._inner(node.orelse)

    def _assert(self, node: ast.Assert) -> Iterator[str]:
        try:
            test = self.code(node.test)
        except NotTranscribed:
            return
        if isinstance(test, ast.Constant):
            return
        message = "" if node.msg is None else f", {ast.unparse(node.msg)}"
        yield f"assert {text(test)}" + ("" if ".size(" in message else message)


SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip


def bare(node: ast.expr) -> str:
    """Returns the text of an expression, a tuple without parentheses around it."""
    made = text(node)
    if isinstance(node, ast.Tuple) and len(node.elts) > 1:
        return made if any(isinstance(item, ast.Starred) for item in node.elts) else made[1:-1]
    return made
