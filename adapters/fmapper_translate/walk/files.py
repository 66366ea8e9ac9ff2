"""A file: the model's classes and functions, and what they need."""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import inspect
import io
import itertools
import sys
import textwrap
import tokenize
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fmapper.translation import Helper, expr, literal, text
from fmapper_translate.functions import Function, definition_of, is_standard, source_of_class
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.libraries.configs import Configs
from fmapper_translate.libraries.omissions import Omissions
from fmapper_translate.printing.comments import quote
from fmapper_translate.recording import Recording
from fmapper_translate.walk.definitions import PLAIN, in_defaults, is_whole, names_in
from fmapper_translate.walk.errors import NotTranscribed
from fmapper_translate.walk.names import Marks, disambiguate, place_of
from fmapper_translate.walk.statements import Statements


class File(ABC):
    """A file while it is written: its classes, functions, constants and imports.

    Args:
        recording: What the source did.
        model: The model that was recorded.

    Attributes:
        module: The class of the source's modules.
        called: The method that a call of a module runs, in the source.
        prefix: What the name of a helper begins with where the source has that name.
        helpers: The modules whose definitions a file takes along.
        distrusted: Functions whose statements gave something else than the source's -> the reason.
    """

    module: ClassVar[type]
    called: ClassVar[str]
    prefix: ClassVar[str]
    helpers: Sequence[types.ModuleType]

    def __init__(self, recording: Recording, model: Any) -> None:
        self.recording = recording
        called = {item.function for item in recording.activations[recording.made :]}
        self._makers = {item for item in recording.functions if item not in called}
        self.distrusted: dict[Function, str] = {}
        self.model = model
        self._classes: dict[type, None] = {}
        self._functions: dict[Function, None] = {}
        self._constants: dict[str, str] = {}
        self._imports: dict[str, str] = {}
        self._example = ""
        self.marks = Marks(recording.functions)
        self.omissions = Omissions(recording)
        self.configs = Configs(self.value)
        names = {item.owner.__name__ if item.owner else item.name for item in recording.functions}
        self._renamed = {
            f"{self.prefix}{name}": name
            for name in sorted(names)
            if any(hasattr(item, name) for item in self.helpers)
        }

    # --- what depends on the framework ------------------------------------------------------------

    @abstractmethod
    def _statements(self, function: Function) -> Statements:
        """Returns the printer of a function."""

    @abstractmethod
    def class_name(self, cls: type) -> str | None:
        """Returns the name of what stands for a class of the source's framework, if it is one."""

    @abstractmethod
    def _base(self, base: type) -> str:
        """Returns the code for a base of a class; empty for none."""

    @abstractmethod
    def _assemble(self, title: str, constants: list[str], blocks: list[str]) -> str:
        """Returns the file, of its constants and definitions."""

    def _is_hollow(self, cls: type) -> bool:
        """Returns whether a file needs nothing of a class but its bases."""
        return False

    # --- what expressions ask ---------------------------------------------------------------------

    def add(self, value: Any) -> bool:
        """Adds a class or function of the model; returns whether it is one."""
        if isinstance(value, types.FunctionType):
            function = self.recording.function_of(value)
            if function is not None:
                self.add_function(function)
            return function is not None
        if not isinstance(value, type) or not self._is_own(value):
            return False
        if library.is_config_class(value):
            self._classes.setdefault(value)
            return True
        if tuple in value.__bases__ and hasattr(value, "_fields"):  # of `namedtuple`
            self._imports["namedtuple"] = "from collections import namedtuple"
            names = ", ".join(map(repr, value._fields))
            defaults = [*map(self.value, vars(value)["_field_defaults"].values())]
            more = f", defaults={text(ast.List(defaults, ast.Load()))}" if defaults else ""
            self._constants[value.__name__] = f"namedtuple({value.__name__!r}, [{names}]{more})"
            return True
        strange = (item for item in value.__mro__ if not self._is_own(item) and item is not object)
        if not self.has_methods(value) and not all(is_standard(x.__module__) for x in strange):
            return library.is_record(value) and self._classes.setdefault(value) is None
        for base in reversed(value.__mro__):
            if self._is_own(base):
                self._classes.setdefault(base)
        return True

    def _is_own(self, cls: type) -> bool:
        top = cls.__module__.partition(".")[0]
        if library.is_of_library(cls.__module__):
            return library.is_config_class(cls)
        return top not in _LIBRARIES and (top == "__main__" or not is_standard(top))

    def add_function(self, function: Function) -> None:
        """Adds a function; of a method its class."""
        self._functions[function] = None
        if function.owner is not None:
            self.add(function.owner)

    def add_property(self, cls: type, name: str) -> bool:
        """Adds the class of a property; returns whether it is one of the model."""
        kept = getattr(inspect.getattr_static(cls, name, None), "fget", None)
        function = self.recording.function_of(kept)
        if function is not None:
            self.add_function(function)
        return function is not None

    def add_method(self, method: types.MethodType | types.FunctionType) -> None:
        """Adds the class of a method, which may be static."""
        function = self.recording.function_of(method)
        if function is not None:
            self.add_function(function)

    def add_global(self, function: Function, name: str, value: Any) -> bool:
        """Adds what a name of a module is; returns whether a file can have it."""
        if isinstance(value, types.ModuleType):
            self._add_module(name, value)
            return name in self._imports
        if getattr(builtins, name, self) is value:
            return True
        if self._import(name, value):
            return True
        try:
            code = text(literal(value))
        except TypeError:
            return False
        return self._constants.setdefault(name, code) == code  # or another module's

    def _import(self, name: str, value: Any) -> bool:
        """Imports a class or function that a file may import; returns whether it is one."""
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and is_standard(module):
            own, top = getattr(value, "__name__", name), module.partition(".")[0]
            alias = "" if own == name else f" as {name}"
            for place in (top, module):
                if getattr(sys.modules[place], own, None) is value:
                    self._imports[name] = f"from {place} import {own}{alias}"
                    return True
        return False

    def _add_module(self, name: str, module: types.ModuleType) -> None:
        if is_standard(module.__name__):
            alias = "" if module.__name__ == name else f" as {name}"
            self._imports[name] = f"import {module.__name__}{alias}"

    def helper_name(self, name: str) -> str:
        """Returns the name of a helper, another one where the source has that name."""
        new = f"{self.prefix}{name}"
        return new if new in self._renamed else name

    def is_module(self, cls: type | None) -> bool:
        """Returns whether a class is one of modules."""
        return cls is not None and issubclass(cls, self.module)

    def has_methods(self, cls: type) -> bool:
        """Returns whether a file has the methods of a class that ran; else it has all its text."""
        return self.is_module(cls)

    def constructs(self, function: Function) -> bool:
        """Returns whether a function runs when a model is made, and only then."""
        return function in self._makers

    def value(self, value: Any) -> ast.expr:
        """Returns the code for an argument of a model's constructor, whose class the file then has.

        Raises:
            NotTranscribed: It is not a number, text, container, class, or record of such.
        """
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = zip(value._fields, value, strict=True)
            keywords = [ast.keyword(name, self.value(item)) for name, item in items]
            return ast.Call(self.value(type(value)), [], keywords)
        if isinstance(value, list):
            return ast.List([self.value(item) for item in value], ast.Load())
        if isinstance(value, tuple):
            return ast.Tuple([self.value(item) for item in value], ast.Load())
        if isinstance(value, dict):
            made = ast.Dict(
                [self.value(key) for key in value], [self.value(item) for item in value.values()]
            )
            is_own = type(value) is not dict and self.add(type(value))
            return ast.Call(expr(type(value).__name__), [made], []) if is_own else made
        if library.is_config(value):
            self.add(type(value))
            return self.configs.call(value)
        settings = None if isinstance(value, type) else self._settings(value)
        if settings is not None:
            self.add(type(value))
            return self._keywords(self.marks.mark(type(value)), settings)
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            return expr(f"np.array({{0}}, np.{value.dtype.name})", self.value(value.tolist()))
        kept = getattr(value, "__dict__", {})
        if self._is_own(type(value)) and kept:  # of what it was made is not known
            can_be_whole = any(hasattr(item, "with_attributes") for item in self.helpers)
            can_be_whole &= is_whole(self.recording, type(value), self._is_own)
            if not can_be_whole or not self.add(type(value)):
                return self._keywords("SimpleNamespace", kept)
            call = self._keywords("with_attributes", kept)
            shell = expr("object.__new__({0})", expr(type(value).__name__))
            return ast.Call(call.func, [shell], call.keywords)
        if isinstance(value, functools.partial):
            keywords = [
                ast.keyword(name, self.value(item)) for name, item in value.keywords.items()
            ]
            given = map(self.value, (value.func, *value.args))
            return ast.Call(expr("partial"), [*given], keywords)
        if isinstance(value, type):
            name = self.class_name(value)
            if name is None and not self.add(value):
                raise NotTranscribed(f"{value.__name__} has no counterpart")
            return expr(name or self.marks.mark(value))
        try:
            return literal(value)
        except TypeError as error:
            raise NotTranscribed(f"{value!r} cannot be written to a file") from error

    def _keywords(self, name: str, given: Mapping[str, Any]) -> ast.Call:
        """Returns the call of a class with keywords."""
        keywords = [ast.keyword(key, self.value(item)) for key, item in given.items()]
        return ast.Call(expr(name), [], keywords)

    def _settings(self, value: Any) -> dict[str, Any] | None:
        """Returns the keywords that make an object like another one; None for what has none."""
        if isinstance(value, types.SimpleNamespace | argparse.Namespace):
            return vars(value)
        cls = type(value)
        if not self._is_own(cls) or isinstance(value, types.FunctionType):
            return None
        parameters = inspect.signature(cls).parameters.values()
        kept = vars(value) if hasattr(value, "__dict__") else {}
        if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters):
            return kept
        names = [item.name for item in parameters]
        is_known = all(hasattr(value, name) for name in names) and (names or not kept)
        return {name: getattr(value, name) for name in names} if is_known else None

    # --- the file ---------------------------------------------------------------------------------

    def write(
        self,
        title: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        differ: Callable[[str, str], Mapping[Function, str]],
    ) -> tuple[str, str]:
        """Returns the file, and the code that makes its model.

        Args:
            title: The first line of its docstring.
            args: What the class of the model is given by position.
            kwargs: What it is given by keyword.
            differ: Runs a file and that code; returns the functions that give something else than
                the source's, with the reason.

        Raises:
            NotTranscribed: A function of the source has no counterpart.
        """
        while True:
            code, example = self.write_once(title, args, kwargs)
            wrong = differ(code, example)
            if not wrong:
                return code, example
            for function in wrong.keys() & self.distrusted.keys():
                reasons = f"{self.distrusted[function]}; by its operations {wrong[function]}"
                raise NotTranscribed(f"{function.label}: {reasons}")
            self.distrusted |= wrong

    def write_once(
        self, title: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Returns the file, and the code that makes its model, without running them."""
        for _ in range(2):  # arguments add classes, and classes fields of these
            self._example = text(self.call(type(self.model), args, kwargs))
            code = self.print(title)
        example = text(self.call(type(self.model), args, kwargs))
        return code, self.marks.resolve(example, self.recording.names)

    def call(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ast.expr:
        """Returns the call of the constructor of a class of the model."""
        given = [self.value(value) for value in args]
        keywords = [ast.keyword(name, self.value(value)) for name, value in kwargs.items()]
        return ast.Call(expr(self.marks.mark(cls)), given, [*keywords, *self._more_arguments(cls)])

    def _more_arguments(self, cls: type) -> list[ast.keyword]:
        """Returns keywords of a class that the source does not have."""
        return []

    def print(self, title: str) -> str:
        """Returns the file.

        Raises:
            NotTranscribed: A function of the source has no counterpart.
        """
        self.add(type(self.model))
        done: dict[Any, str] = {}
        before = -1
        while before < (now := self._size()):
            before = now
            done = {
                cls: self._print_class(cls)
                for cls in list(self._classes)
                if not self._is_hollow(cls)
            }
            functions = [function for function in self._functions if function.owner is None]
            done |= {
                function: "\n".join(self._statements(function).lines()) for function in functions
            }
        constants = [f"{name} = {code}" for name, code in self._constants.items()]
        done, self.recording.names = disambiguate(done, type(self.model), self.marks)
        return self._assemble(title, constants, self._in_order(done))

    def _size(self) -> int:
        """Returns how much is known of what the file has to have."""
        return len(self._classes) + len(self._functions) + len(self.configs)

    def _in_order(self, printed: Mapping[Any, str]) -> list[str]:
        """Puts classes behind their bases and what defaults name, else as in the source."""
        ordered: dict[Any, str] = {}
        seen: set[Any] = set()

        def visit(item: Any) -> None:
            if item in printed and item not in seen:
                seen.add(item)
                for other in (*getattr(item, "__bases__", ()), *in_defaults(self.recording, item)):
                    visit(other)
                ordered[item] = printed[item]

        for item in sorted(printed, key=place_of):
            visit(item)
        return list(dict.fromkeys(ordered.values()))

    def _print_class(self, cls: type) -> str:
        tree = definition_of(cls)
        if not self.has_methods(cls):
            return self._print_plain_class(cls, tree)
        functions = {item.tree.name: item for item in self.recording.functions if item.owner is cls}
        blocks = []
        document = ast.get_docstring(tree, clean=False)
        if document and library.is_foreign(cls.__module__):
            document = library.shorten(document)
        if document:
            blocks.append(textwrap.indent(quote(document), "    "))
        constants = [f"    {row}" for row in self._more_constants(cls)]
        for node in tree.body:
            name = name_of(node)
            if isinstance(getattr(cls, name, None), PLAIN) and self._is_read(cls, name):
                constants.append(f"    {name} = {ast.unparse(node.value)}")  # type: ignore[attr-defined]
        if constants:
            blocks.append("\n".join(constants))
        methods = []
        for node in tree.body:
            function = functions.get(node.name) if isinstance(node, ast.FunctionDef) else None
            if function is not None and self._is_wanted(function):
                lines = self._statements(function).lines()
                methods.append("\n".join("    " + line for line in lines))
        fields = self._fields(cls)
        blocks += ["\n".join(f"    {row}" for row in fields)] if fields else []
        blocks += methods
        bases = ", ".join(filter(None, map(self._base, cls.__bases__)))
        return f"class {cls.__name__}({bases}):\n" + ("\n\n".join(blocks) or "    pass")

    def scan_of(self, statements: Statements, function: Function, loop: ast.For) -> list[str]:
        """Returns a loop as a scan; nothing if it stays a loop."""
        return []

    def _more_constants(self, cls: type) -> list[str]:
        """Returns settings of a class that the source does not have."""
        return []

    def _fields(self, cls: type) -> list[str]:
        """Returns the declarations of the attributes of a class, known when its methods are."""
        return []

    def _is_wanted(self, function: Function) -> bool:
        """Returns whether a method is called in the file."""
        kept = vars(function.owner).get(self.called) if function.owner is not None else None
        is_called = function.name in ("__init__", self.called) or function.target is kept
        return is_called or function in self._functions

    def _is_read(self, cls: type, name: str) -> bool:
        """Returns whether a file has an attribute of a class."""
        return True

    def _print_plain_class(self, cls: type, tree: ast.ClassDef) -> str:
        for name, value in names_in(cls):
            if isinstance(value, types.ModuleType):
                self._add_module(name, value)
            elif self._import(name, value):
                continue
            elif isinstance(value, PLAIN):
                self._constants[name] = text(literal(value))
            else:
                self.add(value)
        lines = source_of_class(cls)[0].rstrip().splitlines()
        notes = [
            note for node in ast.walk(tree) for name in ("annotation", "returns")
            if isinstance(note := getattr(node, name, None), ast.expr)
        ]  # fmt: skip
        for note in sorted(notes, key=lambda note: (note.lineno, note.col_offset), reverse=True):
            names = {x.id for x in ast.walk(note) if isinstance(x, ast.Name)} - {*dir(builtins)}
            module = sys.modules[cls.__module__]
            foreign = [x for x in names if not self._import(x, getattr(module, x, None))]
            if foreign and note.lineno == note.end_lineno and not self._knows(cls, foreign):
                line = lines[note.lineno - 1]
                before, after = line[: note.col_offset], line[note.end_col_offset :]
                lines[note.lineno - 1] = f"{before}Any{after}"
        return "\n".join(lines)

    def _knows(self, cls: type, names: Sequence[str]) -> bool:
        """Returns whether a file has what names of the source of a class are, such as classes."""
        space = vars(sys.modules[cls.__module__])
        return all(space.get(name) in self._classes for name in names)

    def _helper(self, name: str) -> Helper | None:
        """Returns the code for a helper of the modules that files take along."""
        own = self._renamed.get(name, name)
        if name in self._renamed.values():
            return None
        made: Any = next((vars(item)[own] for item in self.helpers if own in vars(item)), None)
        if getattr(made, "__module__", "") not in {item.__name__ for item in self.helpers}:
            return None
        if getattr(made, "__name__", own) != own:  # which a module has under another name
            return None
        rows = inspect.getsource(made).replace("  # fmt: skip", "").splitlines()
        code = "\n".join(row.partition("  # type: ignore")[0] for row in rows)
        return Helper(self._rename(code) if self._renamed else code)

    def _rename(self, code: str) -> str:
        """Returns the code of a helper with the names that helpers have beside the source's."""
        new = {name: item for item, name in self._renamed.items()}
        lines = code.splitlines()
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
        for before, token in reversed(list(itertools.pairwise(tokens))):
            if token.type == tokenize.NAME and before.string != "." and token.string in new:
                (row, start), (_, end) = token.start, token.end
                line = lines[row - 1]
                lines[row - 1] = line[:start] + new[token.string] + line[end:]
        return "\n".join(lines)


_LIBRARIES = (
    "torch",
    "numpy",
    "scipy",
    "jax",
    "flax",
    "equinox",
    "jaxtyping",
    "fmapper",
    "builtins",
    "typing",
)


def name_of(node: ast.stmt) -> str:
    """Returns the name that a statement gives a value; empty for others."""
    match node:
        case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name), value=ast.expr()):
            return name
    return ""
