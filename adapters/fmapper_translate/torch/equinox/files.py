"""Expressions, statements and files of a model of Equinox as code for PyTorch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from fmapper.translation import expr, text
from fmapper_translate.functions import Function
from fmapper_translate.recording import Event
from fmapper_translate.torch import expressions as torch_expressions
from fmapper_translate.torch import files as torch_files
from fmapper_translate.torch import statements as torch_statements
from fmapper_translate.torch import tables as torch_tables
from fmapper_translate.torch.equinox import layers as equinox_layers
from fmapper_translate.torch.equinox import tables
from fmapper_translate.walk.errors import NotTranscribed


class Expressions(torch_expressions.Expressions):
    """Prints the expressions of one function."""

    def __init__(self, file: File, function: Function) -> None:
        super().__init__(file, function)
        items = [getattr(node, "iter", None) for node in function.nodes]
        items += [arg for node in items if isinstance(node, ast.Call) for arg in node.args]
        items = [x.value if isinstance(x, ast.Subscript) else x for x in items]  # or over a part
        self._looped = {node.id for node in items if isinstance(node, ast.Name)}
        self._kept = {
            node.value for node in function.nodes if isinstance(node, ast.Assign)
            and self._looped & {x.id for x in ast.walk(node.targets[0]) if isinstance(x, ast.Name)}
        }  # fmt: skip

    def is_left_out(self, node: ast.expr | None) -> bool:
        """Returns whether an expression is for random numbers, and is not what a loop is over."""
        is_name = isinstance(node, ast.Name) and node.id in self._looped
        return not is_name and node not in self._kept and super().is_left_out(node)

    def _known_call(self, node: ast.Call, callee: Any, event: Event | None) -> ast.expr:
        if any(callee is item for item in (eqx.filter_checkpoint, eqx.filter_jit)):
            return self.code(node.args[0])
        match node.func:
            case ast.Call(func, [inner], []) if self.static(func)[1] in (
                jax.vmap, eqx.filter_vmap,
            ):  # fmt: skip
                if all(map(tables.acts_on_last, self.values(inner))) and self.values(inner):
                    return self.plain_call(node, self.code(inner))
        return super()._known_call(node, callee, event)

    def _make(self, node: ast.Call, kind: type) -> ast.expr:
        if kind not in tables.KEYWORDS:
            if torch_tables.is_library_module(kind):
                raise NotTranscribed(f"{kind.__name__} is not in the table of layers")
            self.file.add(kind)
            return self.plain_call(node, self.code(node.func))
        made = self.plain_call(node, self.code(node.func), tables.defaults_of(kind, node))
        made.keywords = [tables.keyword_of(kind, key) for key in made.keywords]
        made.args = [*tables.first_of(kind), *made.args]
        return made

    def _of_module(self, node: ast.Attribute, owner: Any, value: Any) -> ast.expr:
        if node.attr == "inference" and isinstance(owner, eqx.nn.Dropout):
            return expr("not {0}.training", self.code(node.value))
        return super()._of_module(node, owner, value)

    def _left_out(self, node: ast.Call) -> set[ast.AST]:
        keys = {
            key for key in node.keywords
            if key.arg == "key" and all(
                value is None or torch_tables.is_random(value) for value in
                ([key.value.value] if isinstance(key.value, ast.Constant) else
                 self.values(key.value))
            )
        }  # fmt: skip
        return super()._left_out(node) | keys

    def _counterpart(self, value: Any) -> ast.expr | None:
        return expr("nn.Module") if value is eqx.Module else super()._counterpart(value)


class Statements(torch_statements.Statements):
    """Prints a function."""

    def __init__(self, file: File, function: Function) -> None:
        super(torch_statements.Statements, self).__init__(
            file, function, Expressions(file, function)
        )

    def _assign_value(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        values = self.expressions.values(value)
        if self._is_constructor and isinstance(target, ast.Attribute) and values:
            code, first = text(self.code(value)), values[0]
            if isinstance(first, list) and not first:  # it may have grown
                first = self._find_made(target.attr) or first
            if isinstance(first, list | tuple | dict) and torch_tables.is_module(first):
                maker = "as_part" if isinstance(first, dict) else "Parts"
                yield f"{text(self._target(target))} = {maker}({code})"
                return
            if self._recording.source.is_array(first):
                is_trained = jnp.issubdtype(first.dtype, jnp.inexact)
                kind = "nn.Parameter" if is_trained else "nn.Buffer"
                yield f"{text(self._target(target))} = {kind}({code})"
                return
        is_array = self._recording.source.is_array
        if self._is_constructor and isinstance(target, ast.Tuple) and values:
            elements = [*values[0]]
            if all(is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in elements) and all(
                isinstance(item, ast.Attribute) for item in target.elts
            ):
                names = text(self._target(target))[1:-1]
                yield f"{names} = map(nn.Parameter, {text(self.code(value))})"
                return
        yield from super()._assign_value(target, value)

    def _find_made(self, name: str) -> Any:
        """Returns what an attribute is when its module has been made."""
        runs = (x for x in self._recording.activations if x.function is self._function)
        made = (getattr(run.arguments.get("self"), name, None) for run in runs)
        return next(filter(None, made), None)


class File(torch_files.File):
    """A file for PyTorch while it is written."""

    module: ClassVar[type] = eqx.Module
    prefix = "Equinox"
    helpers: Sequence[ModuleType] = (equinox_layers, *torch_tables.FILES)

    def _statements(self, function: Function) -> Statements:
        return Statements(self, function)

    def _base(self, base: type) -> str:
        return "nn.Module" if base is eqx.Module else super()._base(base)

    def _is_read(self, cls: type, name: str) -> bool:
        return "__init__" in vars(cls) and super()._is_read(cls, name)

    def _print_class(self, cls: type) -> str:
        code = super()._print_class(cls)
        ran = {item.name for item in self.recording.functions if item.owner is cls}
        if not self.is_module(cls) or "__init__" in ran or not dataclasses.fields(cls):
            return code
        names = inspect.signature(cls).parameters
        if any(isinstance(x.default, jax.Array) for x in names.values()):
            raise NotTranscribed(f"{cls.__name__} has a default that is an array")
        given = [
            name if x.default is inspect.Parameter.empty
            else f"{name}={text(self.value(x.default))}" for name, x in names.items()
        ]  # fmt: skip
        lines = [f"    def __init__({', '.join(['self', *given])}):",
                 "        super().__init__()",
                 *(f"        self.{name} = {name}" for name in names)]  # fmt: skip
        head, _, rest = code.partition("\n")
        return "\n".join([head, *lines, "", rest])
