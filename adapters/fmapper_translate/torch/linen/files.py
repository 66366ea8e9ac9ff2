"""A file for PyTorch of a model of Linen: its classes, whose constructors make their parts."""

from __future__ import annotations

import ast
import dataclasses
import functools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from flax import linen

from fmapper.translation import expr, text
from fmapper_translate.functions import Function, definition_of
from fmapper_translate.printing.comments import quote
from fmapper_translate.printing.conditions import INDENT
from fmapper_translate.torch import files as torch_files
from fmapper_translate.torch import statements as torch_statements
from fmapper_translate.torch import tables
from fmapper_translate.torch.linen import layers as linen_layers
from fmapper_translate.torch.linen.compact import TRAINING, Compact, is_method
from fmapper_translate.torch.linen.expressions import Expressions
from fmapper_translate.walk.errors import NotTranscribed
from fmapper_translate.walk.statements import bare

_PLAIN = (linen.remat, linen.checkpoint, linen.jit)  # transforms that compute the same


class Statements(torch_statements.Statements):
    """Prints a function."""

    _file: File

    def __init__(self, file: File, function: Function, *, constructs: bool = False) -> None:
        super(torch_statements.Statements, self).__init__(
            file, function, Expressions(file, function, constructs=constructs)
        )
        self.compact: Compact = self.expressions.compact

    def _body(self) -> list[str]:
        return [*self._numbers(), *super()._body()]

    def lines(self) -> list[str]:
        """Returns the lines of the function, below what a transform of it becomes."""
        rows = super().lines()
        transforms = [row for item in self._function.tree.decorator_list
                      if (row := self._transform(item))]  # fmt: skip
        return [*transforms, *rows]

    def _transform(self, node: ast.expr) -> str:
        """Returns the decorator for a lifted transform; empty for what a file does without."""
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        kind = self.expressions.static(call.func)[1]
        if kind is functools.partial:
            kind = self.expressions.static(call.args[0])[1]
        if kind is not linen.scan:
            if getattr(kind, "__module__", "") == "flax.linen.transforms" and kind not in _PLAIN:
                raise NotTranscribed(f"{kind.__name__} of a method has no counterpart")
            return ""
        known = {"variable_broadcast", "split_rngs", "in_axes", "out_axes", "reverse", "unroll"}
        given = {str(key.arg): key.value for key in call.keywords}
        strange = sorted(given.keys() - known - {"length", "variable_carry"})
        if strange:
            raise NotTranscribed(f"`nn.scan` with {', '.join(strange)} has no counterpart")
        kept = [f"{name}={text(self.code(x))}" for name, x in given.items()
                if name in ("in_axes", "out_axes", "reverse")]  # fmt: skip
        return f"@{self._file.helper_name('scan_method')}({', '.join(kept)})"

    def _numbers(self) -> Iterator[str]:
        for prefix in self.compact.counters():
            yield f"{prefix.lower()}_numbers = count()"

    def _print(self, node: ast.stmt) -> Iterator[str]:
        if self.compact.is_unread(node):
            return
        match node:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), "sow"))):
                return
            case ast.Assign([ast.Attribute(ast.Name("self"), name)], value) if (
                self._function.name == "setup"
            ):
                yield from self._make(name, value)
                return
        yield from super()._print(node)

    def _make(self, name: str, value: ast.expr) -> Iterator[str]:
        """Returns the statement of a constructor that makes parts."""
        code = text(self.code(value))
        for made in self.expressions.values(value):
            if isinstance(made, list | tuple | dict) and tables.is_module(made):
                kind = "Dict" if isinstance(made, dict) else "List"
                code = f"nn.Module{kind}({code})"
                break
        if isinstance(value, ast.Call) and is_method(self.expressions.callee(value), "param"):
            self._file.note_array(self._function.owner, name, value)
        yield f"self.{name} = {code}"

    def parts(self) -> Iterator[str]:
        """Returns the statements that make the parts of a method that is compact."""
        lines = list(self._parts(self._function.tree.body))
        yield from self._numbers() if lines else ()
        yield from lines

    def _parts(self, body: list[ast.stmt]) -> Iterator[str]:
        for statement in body:
            match statement:
                case ast.If(test, then, other):
                    sides = [[*self._parts(then)], [*self._parts(other)]]
                    if any(sides):
                        yield f"if {text(self.code(test))}:"
                        yield from (INDENT + line for line in sides[0] or ["pass"])
                        yield from ["else:"] if sides[1] else []
                        yield from (INDENT + line for line in sides[1])
                case ast.For(target, items, inner):
                    lines = [*self._parts(inner)]
                    if lines:
                        yield f"for {bare(target)} in {text(self.code(items))}:"
                        yield from (INDENT + line for line in lines)
                case _:
                    yield from self._makers(statement)
                    has_run = any(x in self._recording.events for x in ast.walk(statement))
                    if statement in self.compact.kept and has_run:
                        yield from torch_statements.Statements._print(self, statement)

    def _makers(self, node: ast.AST) -> Iterator[str]:
        """Returns the statements that make the parts of an expression or a statement."""
        loops = getattr(node, "generators", []) if self.compact.makers_in(node) else []
        rows = [row for child in ast.iter_child_nodes(node) for row in self._makers(child)]
        for loop in reversed(loops):
            if loop.ifs:
                raise NotTranscribed("parts are made in a comprehension with a condition")
            head = f"for {bare(loop.target)} in {text(self.code(loop.iter))}:"
            rows = [head, *(INDENT + row for row in rows)]
        yield from rows
        if isinstance(node, ast.Call) and node in {*self.compact.names} - self.compact.late:
            name, made = self.expressions.name(node), self.expressions.make(node)
            self._file.note_array(self._function.owner, name, node)
            if isinstance(name, ast.Constant) and str(name.value).isidentifier():
                yield f"self.{name.value!s} = {text(made)}"
            else:
                yield text(expr("self.add_module({0}, {1})", name, made))


class File(torch_files.File):
    """A file for PyTorch while it is written."""

    module: ClassVar[type] = linen.Module
    helpers = (linen_layers, *tables.FILES)
    more_names: ClassVar[Sequence[str]] = ("named_arrays", "initialize")

    def __init__(self, recording: Any, model: Any) -> None:
        super().__init__(recording, model)
        self._compacts: dict[Function, Compact] = {}
        self._arrays: dict[tuple[type | None, str], tuple[Any, ...]] = {}

    def compact_of(self, function: Function) -> Compact:
        """Returns what a method makes in its call."""
        if function not in self._compacts:
            self._compacts[function] = Compact(function, self.recording)
        return self._compacts[function]

    def note_array(self, owner: type | None, name: Any, call: ast.Call) -> None:
        """Notes an attribute whose array has another name or collection than by default."""
        names = [ast.literal_eval(x) for x in call.args[:2] if isinstance(x, ast.Constant)]
        event = self.recording.events[call][0]
        if isinstance(event.value, linen.Module):
            return
        name = name if isinstance(name, str) else ast.literal_eval(name)
        if isinstance(event.value, linen.Variable):
            if len(names) != 2:
                raise NotTranscribed("the name of a variable is computed")
            if names[0] != "batch_stats":
                self._arrays[owner, name] = (names[1], None, names[0])
        elif names[:1] != [name]:
            self._arrays[owner, name] = (*names[:1], None)

    def value(self, value: Any) -> ast.expr:
        """Returns the code for an argument of a model's constructor."""
        if isinstance(value, linen.Module):
            name = self.class_name(type(value))
            if name is None:
                self.add(type(value))
            keywords = [ast.keyword(item, self.value(x)) for item, x in settings_of(value).items()]
            return ast.Call(expr(name or type(value).__name__), [], keywords)
        known = self._counterpart(value)
        return known if known is not None else super().value(value)

    def _counterpart(self, value: Any) -> ast.expr | None:
        """Returns the code for a function or class of JAX; None for others."""
        function = next(iter(self.recording.functions))
        made: ast.expr | None = Expressions(self, function)._counterpart(value)
        return made

    def _statements(self, function: Function) -> Statements:
        return Statements(self, function)

    def _is_read(self, cls: type, name: str) -> bool:
        return name not in cls.__dataclass_fields__  # type: ignore[attr-defined]

    def _is_wanted(self, function: Function) -> bool:
        return function.name != "setup" and super()._is_wanted(function)

    def _base(self, base: type) -> str:
        return "nn.Module" if base is linen.Module else super()._base(base)

    def _print_class(self, cls: type) -> str:
        if not self.is_module(cls):
            return super()._print_class(cls)
        code = super()._print_class(cls)
        head, _, rest = code.partition("\n")
        tree = definition_of(cls)
        document = ast.get_docstring(tree, clean=False)
        before = textwrap.indent(quote(document), INDENT) if document else ""
        methods = rest.removeprefix(before).strip("\n")
        constructor = textwrap.indent("\n".join(self._constructor(cls, tree)), INDENT)
        arrays = {name: place for (owner, name), place in self._arrays.items() if owner is cls}
        table = f"{INDENT}source_arrays = {arrays!r}" if arrays else ""
        methods = "" if methods == f"{INDENT}pass" else methods
        return "\n".join([head, "\n\n".join(filter(None, [before, table, constructor, methods]))])

    def _constructor(self, cls: type, tree: ast.ClassDef) -> Iterator[str]:
        """Returns the constructor of a class, which takes its fields and makes its parts."""
        fields = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
        names = [ast.unparse(node.target) for node in fields]
        inherited = {item.name for item in dataclasses.fields(cls)} - {*names, "parent", "name"}
        if inherited:
            raise NotTranscribed(
                f"{cls.__name__} inherits the fields {', '.join(sorted(inherited))}: "
                "name them in its own class"
            )
        made: dict[str, ast.expr] = {}  # fields that a call makes anew
        for name, node in zip(names, fields, strict=True):
            match node.value:
                case ast.Call(ast.Name("field") | ast.Attribute(attr="field"), [], [key]):
                    is_made = key.arg == "default_factory"
                    made |= {name: ast.Call(key.value, [], [])} if is_made else {}
        functions = [item for item in self.recording.functions if item.owner is cls]
        if not functions:
            return
        arguments = ast.arguments(
            [], [ast.arg("self"), *(ast.arg(name, node.annotation) for name, node in
                                    zip(names, fields, strict=True))],
            None, [], [], None, [
                ast.Constant(None) if name in made else node.value
                for name, node in zip(names, fields, strict=True) if node.value
            ],
        )  # fmt: skip
        header = ast.FunctionDef("__init__", arguments, [], [], None)
        function = Function(
            functions[0].target, cls, header, [], nodes=[arguments, *ast.walk(arguments)]
        )
        statements = Statements(self, function, constructs=True)
        yield statements.lines()[0]
        yield f"{INDENT}super().__init__()"
        for name in names:
            is_mode = name in TRAINING or name in tables.MODES
            value = f"not {name}" if is_mode and name not in TRAINING else name
            if name in made:
                value = text(expr(f"{{0}} if {name} is None else {name}", made[name]))
            yield f"{INDENT}self.{'training' if is_mode else name} = {value}"
        for item in functions:
            printer = Statements(self, item, constructs=True)
            lines = printer._body() if item.name == "setup" else printer.parts()
            yield from (INDENT + line for line in lines)


def settings_of(module: linen.Module) -> dict[str, Any]:
    """Returns the fields of a module that are not what they are by default."""
    found = {}
    for item in dataclasses.fields(module):
        value = getattr(module, item.name)
        default = item.default_factory() if callable(item.default_factory) else item.default
        if item.init and item.name not in ("parent", "name") and value is not default:
            found[item.name] = value
    return found
