"""Expressions of a model of Linen as code for PyTorch."""

from __future__ import annotations

import ast
import functools
import inspect
from typing import TYPE_CHECKING, Any

from flax import linen

from fmapper.translation import expr, literal, text
from fmapper_translate.functions import Function
from fmapper_translate.recording import Event
from fmapper_translate.torch import expressions as torch_expressions
from fmapper_translate.torch import tables
from fmapper_translate.torch.linen.compact import STILL, TRAINING, is_method
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.torch.linen.files import File


class Expressions(torch_expressions.Expressions):
    """Prints the expressions of one function."""

    file: File

    def __init__(self, file: File, function: Function, *, constructs: bool = False) -> None:
        super().__init__(file, function)
        self._constructs = constructs
        self.compact = file.compact_of(function)

    def _device(self) -> ast.expr | None:
        return None if self._constructs else super()._device()

    def _known_call(self, node: ast.Call, callee: Any, event: Event | None) -> ast.expr:
        if node in self.compact.names:
            return self._part(node)
        if is_method(callee, "param", "variable"):
            return self.make(node)
        if is_method(callee, "is_initializing", "is_mutable_collection"):
            return literal(callee.__name__ != "is_initializing")
        if isinstance(callee, linen.Module):
            return self._call_part(node, callee)
        if isinstance(callee, type) and issubclass(callee, linen.Module):
            return self.make(node)
        return super()._known_call(node, callee, event)

    def _part(self, node: ast.Call) -> ast.expr:
        """Returns the code for a part, where the call uses it."""
        name = self.name(node)
        if node in self.compact.late:
            return expr(
                "{0}({1}, {2}, lambda: {3})", expr(self.file.helper_name("late")),
                self._owner_of(node), name, self.make(node),
            )  # fmt: skip
        if isinstance(name, ast.Constant) and str(name.value).isidentifier():
            return ast.Attribute(expr("self"), str(name.value), ast.Load())
        return expr("getattr({0}, {1})", expr("self"), name)

    def _owner_of(self, node: ast.Call) -> ast.expr:
        """Returns the code for the module that a part is made for."""
        if self.function.owner is None and isinstance(node.func, ast.Attribute):
            return self.code(node.func.value)
        return expr("self")

    def name(self, node: ast.Call) -> ast.expr:
        """Returns the code for the name of a part."""
        compact = self.compact
        given = compact.name_node(node)
        if compact.has_number(node):
            prefix = compact.prefix(node)
            number = expr(compact.loop_variable(node) or f"next({prefix.lower()}_numbers)")
            return ast.JoinedStr([ast.Constant(f"{prefix}_"), ast.FormattedValue(number, -1)])
        if given is not None and len({*compact.names[node]}) > 1:
            return self.code(given)
        return ast.Constant(compact.names[node][0])

    def make(self, node: ast.Call) -> ast.expr:
        """Returns the code that makes a part."""
        event = self.events(node)[0]
        func = event.parts.get(node.func)
        callee = func.value if func is not None else self.static(node.func)[1]
        if is_method(callee, "param"):
            _, init, *shape = node.args
            return expr("nn.Parameter({0})", self._initial(init, shape))
        if is_method(callee, "variable"):
            _, _, init, *shape = node.args
            return expr("nn.Buffer({0})", self._initial(init, shape, is_keyed=False))
        inner = callee.func if isinstance(callee, functools.partial) else callee
        inner = tables.plain_class(inner)
        if tables.is_library_module(inner) and tables.layer_of(inner) is None:
            raise NotTranscribed(f"{inner.__name__} is not in the table of layers")
        self.file.add(inner)
        more = []
        for name in self.compact.modes(node) if tables.layer_of(inner) is None else ():
            more.append(ast.keyword(name, literal(name in STILL)))  # which `train` changes
        return self.plain_call(node, self.code(node.func), more)

    def _initial(self, init: ast.expr, given: list[ast.expr], *, is_keyed: bool = True) -> ast.expr:
        """Returns the call of an initializer, which is given a shape, but not a dtype."""
        values = self.values(init)
        if values and all(map(_takes_shape, values)):
            return ast.Call(self.code(init), [self.code(given[0])], [])
        function = self.file.recording.function_of(next(iter(values), None))
        if function is None and not isinstance(init, ast.Lambda):
            raise NotTranscribed(f"{ast.unparse(init)} is not in the table of initializers")
        first = [literal(None)] if is_keyed else []
        func = self.code(init)
        if isinstance(init, ast.Lambda) and not given and not is_keyed:
            assert isinstance(func, ast.Lambda)
            return func.body
        return ast.Call(func, [*first, *map(self.code, given)], [])

    def _call_part(self, node: ast.Call, module: linen.Module) -> ast.expr:
        """Returns the call of a part in the mode that it was made in."""
        kind = type(module)
        if tables.is_library_module(kind) and tables.layer_of(kind) is None:
            raise NotTranscribed(f"{kind.__name__} is not in the table of layers")
        func, mode = self.code(node.func), self.compact.mode_of(node.func)
        if mode is None:
            given = [x for arg in (node.func.args if isinstance(node.func, ast.Call) else [])
                     if (x := self.compact.mode_of(arg))]  # fmt: skip
            given += [x for key in (node.func.keywords if isinstance(node.func, ast.Call) else [])
                      if (x := self.compact.mode_of(key.value))]  # fmt: skip
            if len({text(self._mode_code(*x)) for x in given}) > 1:
                raise NotTranscribed("it is given parts in two modes")
            mode = given[0] if given else None
        elif tables.layer_of(kind) is not None:
            more = [] if any(key.arg == mode[0] for key in node.keywords) else [
                ast.keyword(mode[0], self.code(mode[1]))]  # fmt: skip
            return self.plain_call(node, func, more)
        if mode is not None:
            func = expr("{0}.train({1})", func, self._mode_code(*mode))
        return self.plain_call(node, func)

    def _mode_code(self, name: str, value: ast.expr) -> ast.expr:
        """Returns the code for whether a part trains."""
        made = self.code(value)
        if name in TRAINING:
            return made
        is_negation = isinstance(made, ast.UnaryOp) and isinstance(made.op, ast.Not)
        return made.operand if is_negation else ast.UnaryOp(ast.Not(), made)  # type: ignore[attr-defined]

    def _partial(self, node: ast.Call) -> ast.expr:
        first = self.values(node.args[0])
        inner = first[0].func if first and isinstance(first[0], functools.partial) else None
        if not isinstance(inner or (first[0] if first else None), type):
            return super()._partial(node)
        return self.plain_call(node, expr("partial"))

    def _left_out(self, node: ast.Call) -> set[ast.AST]:
        left = super()._left_out(node)
        callee = self.callee(node)
        if callee is functools.partial:
            callee = self.values(node.args[0])[0]
        inner = callee.func if isinstance(callee, functools.partial) else callee
        if isinstance(inner, type) and issubclass(inner, linen.Module):
            modes = [*self.compact.modes(node).values()]
            left |= {arg for arg in node.args if arg in modes}
            left |= {
                key for key in node.keywords
                if key.value in modes or key.arg in ("name", "parent")
                or (tables.layer_of(inner) is not None
                    and tables.is_setting(key.arg, self._values_of(key.value)))
            }  # fmt: skip
        return left

    def _values_of(self, node: ast.expr) -> list[Any]:
        return [node.value] if isinstance(node, ast.Constant) else self.values(node)


def _takes_shape(init: Any) -> bool:
    """Returns whether a file gives an initializer a shape alone, as one that passes all on."""
    if tables.is_initializer(init):
        return True
    code = getattr(init, "__code__", None)
    return code is not None and not code.co_argcount and bool(code.co_flags & inspect.CO_VARARGS)
