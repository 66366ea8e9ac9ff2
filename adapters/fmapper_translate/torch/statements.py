"""Functions of a model of Flax NNX as code for PyTorch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fmapper.translation import expr, text
from fmapper_translate.functions import Function
from fmapper_translate.printing.folding import fold, is_constant
from fmapper_translate.torch import fallback, tables
from fmapper_translate.torch.expressions import VARIABLES, Expressions
from fmapper_translate.walk import statements as walk
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.torch.files import File

_SUPER = "super().__init__()"


class Statements(walk.Statements):
    """Prints a function.

    Args:
        file: The file.
        function: The function.
    """

    _file: File

    def __init__(self, file: File, function: Function) -> None:
        super().__init__(file, function, Expressions(file, function))

    def _body(self) -> list[str]:
        try:
            body = super()._body()
        except NotTranscribed as error:
            if self._file.constructs(self._function):
                raise
            return fallback.body_of(self.expressions, str(error))
        if self._is_constructor and not any(line.startswith("super().__init__(") for line in body):
            is_document = bool(ast.get_docstring(self._function.tree))
            body.insert(self._document_lines(body) if is_document else 0, _SUPER)
        return body

    def _document_lines(self, body: list[str]) -> int:
        ends = [at for at, line in enumerate(body) if line.endswith('"""')]
        return 1 + (ends[0] if body[0].count('"""') == 2 else ends[1 if body[0] == '"""' else 0])

    def _is_dropped(self, parameter: ast.arg) -> bool:
        values = self._recording.arguments_of(self._function).get(parameter.arg, [])
        is_random = [tables.is_random(value) for value in values]
        if values and all(value is None or x for value, x in zip(values, is_random, strict=True)):
            return any(is_random) or parameter.arg == "rngs"
        return super()._is_dropped(parameter)

    # --- statements -------------------------------------------------------------------------------

    def _print(self, node: ast.stmt) -> Iterator[str]:
        if isinstance(node, ast.If) and self._asks_for_random_numbers(node.test):
            if any([*self.block(node.body), *self.block(node.orelse)]):
                raise NotTranscribed("it depends on whether there are random numbers")
            return
        if isinstance(node, ast.With):
            raise NotTranscribed("with has no counterpart")
        yield from super()._print(node)

    def _asks_for_random_numbers(self, test: ast.expr) -> bool:
        parts = (item for item in ast.walk(test) if isinstance(item, ast.expr))
        return any(map(self.is_left_out, parts))

    def _assign_value(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        variable = self._variable(target)
        if variable is not None:
            yield _write(variable, self.code(value))
            return
        if isinstance(target, ast.Attribute) and target.attr in tables.MODES:
            yield from self._set_mode(target, value)
            return
        if isinstance(target, ast.Attribute):
            values, owners = (self.expressions.values(item) for item in (value, target.value))
            if any(tables.layer_of(type(owner)) for owner in owners):
                raise NotTranscribed("it changes an array of a layer")
            if self._is_constructor and any(map(_is_bare_array, values)):
                code = self.code(value)
                if not text(code).startswith("nn.Buffer("):
                    code = expr("nn.Buffer({0}, persistent=False)", code)
                yield f"{text(self._target(target))} = {text(code)}"
                return
        yield from super()._assign_value(target, value)

    def _set_mode(self, target: ast.Attribute, value: ast.expr) -> Iterator[str]:
        mode = fold(ast.UnaryOp(ast.Not(), self.code(value)))
        if not is_constant(mode, True):  # which it begins with
            yield f"{text(self.code(target.value))}.training = {text(mode)}"

    def _augment(self, node: ast.AugAssign) -> Iterator[str]:
        variable = self._variable(node.target)
        target = variable or self._target(node.target)
        made = ast.BinOp(target, node.op, self.code(node.value))
        if variable is not None:
            yield _write(variable, made)
        elif self._is_array(node):  # which PyTorch would write into
            yield f"{text(target)} = {text(made)}"
        else:
            yield from super()._augment(node)

    def _is_array(self, node: ast.AugAssign) -> bool:
        """Returns whether what an assignment changes is an array."""
        name = ast.unparse(node.target)
        every = (item for item in self._function.nodes if isinstance(item, ast.expr))
        reads = [item for item in every if ast.unparse(item) == name]
        values = [value for item in (node.value, *reads) for value in self.expressions.values(item)]
        return any(map(self._recording.source.is_array, values))

    def _variable(self, target: ast.expr) -> ast.expr | None:
        """Returns the code for the variable that an assignment gives a value; None for others."""
        match target:
            case ast.Attribute(base, "value") | ast.Subscript(base):
                owners = self.expressions.values(base)
                if owners and all(isinstance(item, VARIABLES) for item in owners):
                    return self.code(base)
        return None


def _write(variable: ast.expr, value: ast.expr) -> str:
    return text(expr("{0}.copy_(({1}).detach())", variable, value))


def _is_bare_array(value: Any) -> bool:
    return hasattr(value, "at") and hasattr(value, "dtype") and not isinstance(value, VARIABLES)
