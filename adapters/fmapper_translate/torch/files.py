"""A file for PyTorch: the model's classes and functions, what they need, and `load_weights`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

from flax import nnx

from fmapper.translation import Helper, expr, helpers_of, names_in, print_imports, text
from fmapper_translate.functions import Function, source_of_class
from fmapper_translate.printing.comments import quote
from fmapper_translate.recording import Recording
from fmapper_translate.torch import tables
from fmapper_translate.torch import weights as torch_weights
from fmapper_translate.torch.statements import Statements
from fmapper_translate.walk import files as walk
from fmapper_translate.walk.errors import NotTranscribed

_IMPORTS = {
    "torch": "import torch", "np": "import numpy as np", "nn": "from torch import nn",
    "F": "import torch.nn.functional as F", "partial": "from functools import partial",
    "math": "import math", "count": "from itertools import count",
    "functools": "import functools",
    "SimpleNamespace": "from types import SimpleNamespace",
}  # fmt: skip
_LOADING = (torch_weights.load_weights, torch_weights.source_state)


class File(walk.File):
    """A file for PyTorch while it is written."""

    module: ClassVar[type] = nnx.Module
    called = "__call__"
    prefix = "Flax"
    helpers: Sequence[ModuleType] = tables.FILES
    more_names: ClassVar[Sequence[str]] = ("named_arrays",)

    def __init__(self, recording: Recording, model: Any) -> None:
        super().__init__(recording, model)
        self._written: dict[str, str] = {}
        self.written_for: dict[Any, tuple[str, list[int]]] = {}

    def device(self, function: Function) -> ast.expr | None:
        """Returns the code for where a function's new arrays are: where its first array is."""
        if self.constructs(function):
            return None
        is_array = self.recording.source.is_array
        for name, values in self.recording.arguments_of(function).items():
            if values and all(map(is_array, values)):
                return expr(f"{name}.device")
        return None

    def add_constant(self, name: str, code: ast.expr) -> None:
        """Adds what a name of a module is."""
        self._constants[name] = text(code)

    def add_written(self, name: str, functions: Mapping[str, str]) -> str:
        """Adds a function, whose own key is empty, with those that it calls; returns its name."""

        def definition() -> str:
            return functions[""].replace("def forward(", f"def {name}(", 1)

        taken = {item.name for item in self.recording.functions} | {*self._renamed.values()}
        while name in taken or self._written.get(name, definition()) != definition():
            name += "_"
        self._written |= {**functions, name: definition()}
        self._written.pop("")
        return name

    def _helper(self, name: str) -> Helper | None:
        return Helper(self._written[name]) if name in self._written else super()._helper(name)

    def class_name(self, cls: type) -> str | None:
        """Returns the name of what stands for a class of Flax."""
        layer = tables.layer_of(cls)
        if layer is not None:
            return self.helper_name(layer.name)
        if cls is nnx.Param:
            return "nn.Parameter"
        return (
            "nn.Buffer"
            if cls.__module__.startswith("flax") and issubclass(cls, nnx.Variable)
            else None
        )

    def _statements(self, function: Function) -> Statements:
        return Statements(self, function)

    def _base(self, base: type) -> str:
        if base is nnx.Module:
            return "nn.Module"
        name = self.class_name(base)
        if name is None and tables.is_library_module(base):
            raise NotTranscribed(f"{base.__name__} is not in the table of layers")
        return name or ("" if base is object else self.marks.mark(base))

    def _is_own(self, cls: type) -> bool:
        return super()._is_own(cls) and not issubclass(cls, nnx.Variable)

    def _print_plain_class(self, cls: type, tree: ast.ClassDef) -> str:
        """Returns a dataclass with its fields, and of its methods those that ran."""
        if not dataclasses.is_dataclass(cls):
            return super()._print_plain_class(cls, tree)
        self._imports["dataclass"] = "from dataclasses import dataclass"
        space = types.FunctionType((lambda: None).__code__, vars(sys.modules[cls.__module__]))
        nodes = [*ast.walk(tree)]
        header = ast.FunctionDef(
            cls.__name__, ast.arguments([], [], None, [], [], None, []), [], []
        )
        printer = self._statements(Function(space, cls, header, [], nodes=nodes))
        document = ast.get_docstring(tree, clean=False)
        lines = [textwrap.indent(quote(document), "    ")] if document else []
        rows = source_of_class(cls)[0].splitlines()
        for before, node in zip([None, *tree.body], tree.body, strict=False):
            if isinstance(node, ast.AnnAssign):
                note = printer._annotation(node.annotation)
                kind = "Any" if note is None else text(note)
                code = f"{ast.unparse(node.target)}: {kind}"
                if node.value is not None:
                    code += f" = {text(self._default(printer, node))}"
                whole = rows[node.lineno - 1 : node.end_lineno]
                start = node.lineno - 1 if before is None else before.end_lineno or 0
                lines += [row for row in rows[start : node.lineno - 1] if row.strip()[:1] == "#"]
                lines += whole if code == ast.unparse(node) else [f"    {code}"]
        functions = [item for item in self.recording.functions if item.owner is cls]
        for item in filter(self._is_wanted, functions):
            lines += ["", *(f"    {row}" for row in self._statements(item).lines())]
        is_frozen = cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        decorator = f"@dataclass{'(frozen=True)' if is_frozen else ''}"
        return "\n".join([decorator, f"class {cls.__name__}:", *(lines or ["    pass"])])

    def _default(self, printer: Statements, node: ast.AnnAssign) -> ast.expr:
        """Returns the code for the default of a field of a dataclass."""
        match node.value:
            case ast.Call(keywords=keys) if (
                any(key.arg in ("default", "default_factory") for key in keys)
                and not node.value.args
            ):
                key = next(key for key in keys if key.arg in ("default", "default_factory"))
                if key.arg == "default":
                    return printer.code(key.value)
                self._imports["field"] = "from dataclasses import field"
                return expr("field(default_factory={0})", printer.code(key.value))
        assert node.value is not None
        return printer.code(node.value)

    def _settings(self, value: Any) -> dict[str, Any] | None:
        """Returns the keywords that make an object, without the defaults of a dataclass."""
        found = super()._settings(value)
        if found is None or not dataclasses.is_dataclass(value):
            return found
        fields = {item.name: item.default for item in dataclasses.fields(value)}
        return {
            name: x for name, x in found.items() if x is not fields.get(name, dataclasses.MISSING)
        }

    def _assemble(self, title: str, constants: list[str], blocks: list[str]) -> str:
        body = "\n\n\n".join([*(["\n".join(constants)] if constants else []), *blocks])
        loading = [inspect.getsource(item).rstrip() for item in _LOADING]
        helpers = helpers_of("\n\n\n".join([body, *loading, *self.more_names]), self._helper)
        whole = "\n\n\n".join([*helpers, body, *loading])
        used = names_in(whole) | names_in(self._example)
        known = {**_IMPORTS, **self._imports}
        imports = print_imports(line for name, line in known.items() if name in used)
        return f'"""{title}"""\n\n{imports}\n\n\n{whole}\n'
