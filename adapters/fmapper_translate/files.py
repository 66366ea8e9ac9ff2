"""A file for Flax NNX: the model's classes and functions, what they need, and `load_weights`."""

from __future__ import annotations

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
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fmapper.translation import Helper, expr, helpers_of, literal, names_in, print_imports, text
from fmapper_adapters.flax.translation.dialect import FlaxDialect
from fmapper_translate import layers
from fmapper_translate.flax import layers as flax_layers
from fmapper_translate.flax import transformers as flax_transformers
from fmapper_translate.flax import weights as flax_weights
from fmapper_translate.functions import Function, is_standard
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.libraries.configs import Configs
from fmapper_translate.libraries.omissions import Omissions
from fmapper_translate.operations import NotTranscribed
from fmapper_translate.printing.comments import quote
from fmapper_translate.recording import Recording
from fmapper_translate.statements import Statements

_IMPORTS = {
    "jax": "import jax", "jnp": "import jax.numpy as jnp", "np": "import numpy as np",
    "nnx": "from flax import nnx", "partial": "from functools import partial",
    "math": "import math", "operator": "import operator",
    "SimpleNamespace": "from types import SimpleNamespace",
    "Any": "from typing import Any", "dataclass": "from dataclasses import dataclass",
    "field": "from dataclasses import field",
}  # fmt: skip
_LACKING = "Parameters begin with the values of Flax's layers, not with those of the source in"


class File:
    """A file while it is written: its classes, functions, constants and imports.

    Args:
        recording: What the source did.
        model: The model that was recorded.

    Attributes:
        dialect: The printers of operations, with the functions that they call.
        has_mode: Classes that ask whether they are in training.
        draws: Classes that draw random numbers when they are called.
        distrusted: Functions whose statements gave something else than the source's -> the reason.
        fallen: Functions that are written by their operations -> the reason.
        without_initial_values: Classes whose constructors give parameters values that the file
            does not.
        absent: Classes of layers that the model has nowhere, or without a counterpart in the file.
        optional: Attributes of classes that are arrays or None; they stay variables.
    """

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self.recording = recording
        called = {item.function for item in recording.activations[recording.made :]}
        self._makers = {item for item in recording.functions if item not in called}
        self.dialect = FlaxDialect()
        self.has_mode: set[type | None] = set()
        self.draws: set[type | None] = set()
        self.distrusted: dict[Function, str] = {}
        self.fallen: dict[str, str] = {}
        self.without_initial_values: set[type | None] = set()
        self.optional = {
            (type(part), name)
            for part in model.modules()
            for name in part._parameters.keys() | part._buffers.keys()
            if self._may_be_none(type(part), name)
        }
        self._model = model
        kinds = {base for part in model.modules() for base in type(part).__mro__}
        self.absent = {
            value
            for function in recording.functions
            for node in function.nodes
            for event in recording.events.get(node, ())
            if layers.is_library_module(value := event.value)
            and value is not nn.Module
            and (value not in layers.LAYERS or value not in kinds)
        }
        self._orders = {
            id(array): layer.variable(name)[1] if layer is not None else None
            for part in model.modules()
            for layer in [layers.base_of(type(part))]
            for name, array in [*part._parameters.items(), *part._buffers.items()]
        }
        self._classes: dict[type, None] = {}
        self._functions: dict[Function, None] = {}
        self._constants: dict[str, str] = {}
        self._imports: dict[str, str] = {}
        self._activations: dict[str, str] = {}
        self._tied: dict[int, tuple[type | None, str]] = {}
        self.omissions = Omissions(recording)
        self.configs = Configs(self.value)
        names = {item.owner.__name__ if item.owner else item.name for item in recording.functions}
        self._renamed = {
            f"Torch{name}": name
            for name in sorted(names)
            if hasattr(flax_layers, name) or hasattr(flax_weights, name)
        }

    def _may_be_none(self, cls: type, name: str) -> bool:
        """Returns whether constructors of a class have an attribute that is an array or None."""
        for function in self.recording.functions:
            if function.owner in cls.__mro__ and self.constructs(function):
                for node in function.nodes:
                    match node:
                        case ast.Assign([ast.Attribute(attr=attr)], ast.Constant(None)):
                            is_none = True
                        case ast.Assign([ast.Attribute(attr=attr)], ast.IfExp() as choice):
                            sides = [choice.body, choice.orelse]
                            is_none = any(isinstance(item, ast.Constant) for item in sides)
                        case _:
                            continue
                    if attr == name and is_none:
                        return True
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

    def add_method(self, method: types.MethodType) -> None:
        """Adds the class of a method."""
        function = self.recording.function_of(method)
        if function is not None:
            self.add_function(function)

    def add_global(self, function: Function, name: str, value: Any) -> bool:
        """Adds what a name of a module is; returns whether a file can have it."""
        if isinstance(value, types.ModuleType):
            if is_standard(value.__name__):
                alias = "" if value.__name__ == name else f" as {name}"
                self._imports[name] = f"import {value.__name__}{alias}"
            return name in self._imports
        if getattr(builtins, name, self) is value:
            return True
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and is_standard(module):
            self._imports[name] = f"from {module} import {getattr(value, '__name__', name)}"
            return True
        try:
            self._constants[name] = text(literal(value))
        except TypeError:
            return False
        return True

    def layer_name(self, layer: layers.Layer) -> str:
        """Returns the name of a layer's class, another one where the source has that name."""
        new = f"Torch{layer.name}"
        return new if new in self._renamed else layer.name

    def activation_class(self, kind: type) -> str:
        """Returns the name of a function that gives an activation, where a class is passed on."""
        code = layers.ACTIVATIONS[kind][0]
        extra = ", ".join(f"{k}={v}" for k, v in layers.ACTIVATIONS[kind][2].items())
        made = f"partial({code}, {extra})" if extra else code
        name = kind.__name__
        self._activations[name] = f"def {name}():\n    return {made}"
        return name

    def is_module(self, cls: type | None) -> bool:
        """Returns whether a class is one of modules."""
        return cls is not None and issubclass(cls, nn.Module)

    def takes_rngs(self, cls: type | None) -> bool:
        """Returns whether the constructor of a class takes `rngs`: for layers, or to draw."""
        bases = cls.__mro__ if cls is not None else ()
        makers = {item.owner for item in self.recording.functions
                  if item.name == "__init__" and item.makes_modules}  # fmt: skip
        layer = layers.base_of(cls) if cls is not None else None
        is_made_with = layer is not None and layer.takes_rngs
        return is_made_with or any(item in makers | self.draws for item in bases)

    def maker_of(self, cls: type) -> type:
        """Returns the class whose constructor makes objects of a class."""
        owners = {item.owner for item in self.recording.functions if item.name == "__init__"}
        return next((base for base in cls.__mro__ if base in owners), cls)

    def constructs(self, function: Function) -> bool:
        """Returns whether a function runs when a model is made, and only then."""
        return function in self._makers

    def order_of(self, array: torch.Tensor) -> layers.Order:
        """Returns the order of the dimensions of a model's array in its variable.

        Raises:
            NotTranscribed: The model does not have it.
        """
        if id(array) not in self._orders:
            raise NotTranscribed("it is an array of no module")
        return self._orders[id(array)]

    def tie(self, linear: nn.Module, function: Function, table: str) -> None:
        """Notes that a linear layer has the matrix of an embedding."""
        self._tied[id(linear)] = (function.owner, table)

    def tied_table(self, module: nn.Module, function: Function) -> str:
        """Returns the code for the embedding whose matrix a layer has; empty without one."""
        owner, table = self._tied.get(id(module), (None, ""))
        return table if owner is not None and owner is function.owner else ""

    def value(self, value: Any) -> ast.expr:
        """Returns the code for an argument of a model's constructor, whose class the file then has.

        Raises:
            NotTranscribed: It is not a number, text, container, class, or record of such.
        """
        if isinstance(value, list):
            return ast.List([self.value(item) for item in value], ast.Load())
        if isinstance(value, tuple):
            return ast.Tuple([self.value(item) for item in value], ast.Load())
        if isinstance(value, dict):
            return ast.Dict(
                [self.value(key) for key in value], [self.value(item) for item in value.values()]
            )
        if library.is_config(value):
            self.add(type(value))
            return self.configs.call(value)
        names = inspect.signature(type(value)).parameters if self._is_own(type(value)) else {}
        if names and not isinstance(value, type) and all(hasattr(value, name) for name in names):
            self.add(type(value))
            keywords = [ast.keyword(name, self.value(getattr(value, name))) for name in names]
            return ast.Call(expr(type(value).__name__), [], keywords)
        if isinstance(value, types.SimpleNamespace):
            keywords = [ast.keyword(name, self.value(item)) for name, item in vars(value).items()]
            return ast.Call(expr("SimpleNamespace"), [], keywords)
        if isinstance(value, functools.partial):
            keywords = [
                ast.keyword(name, self.value(item)) for name, item in value.keywords.items()
            ]
            return ast.Call(expr("partial"), [self.value(value.func)], keywords)
        if isinstance(value, type):
            layer = layers.layer_of(value)
            if layer is None and not self.add(value):
                raise NotTranscribed(f"{value.__name__} has no counterpart")
            return expr(self.layer_name(layer) if layer is not None else value.__name__)
        try:
            return literal(value)
        except TypeError as error:
            raise NotTranscribed(f"{value!r} cannot be written to a file") from error

    # --- the file ---------------------------------------------------------------------------------

    def print(self, title: str) -> str:
        """Returns the file.

        Raises:
            NotTranscribed: A function of the source has no counterpart.
        """
        self.add(type(self._model))
        self._find_ties()
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
                function: "\n".join(Statements(self, function).lines()) for function in functions
            }
        constants = [f"{name} = {code}" for name, code in self._constants.items()]
        return self._assemble(title, constants, self._in_order(done))

    def _size(self) -> int:
        """Returns how much is known of what the file has to have."""
        size = len(self._classes) + len(self._functions)
        size += len(self.configs)
        return size + len(self.has_mode) + len(self.draws)

    def _find_ties(self) -> None:
        for function in self.recording.functions:
            if function.name == "__init__" and self.is_module(function.owner):
                try:
                    Statements(self, function).lines()
                except NotTranscribed:
                    continue

    def _in_order(self, printed: Mapping[Any, str]) -> list[str]:
        """Puts classes behind their bases, and what is left in the order of the source."""
        ordered: dict[Any, str] = {}

        def visit(item: type | Function) -> None:
            if item in printed and item not in ordered:
                for base in item.__bases__ if isinstance(item, type) else ():
                    visit(base)
                ordered[item] = printed[item]

        for item in sorted(printed, key=_place):
            visit(item)
        return list(ordered.values())

    def _print_class(self, cls: type) -> str:
        if library.is_config_class(cls):
            return self.configs.print(cls)
        if library.is_record(cls):
            return self.configs.print_record(cls)
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(tree, ast.ClassDef)
        if not self.is_module(cls):
            return self._print_plain_class(cls, tree)
        functions = {item.tree.name: item for item in self.recording.functions if item.owner is cls}
        blocks = []
        document = ast.get_docstring(tree)
        if document and library.is_library(cls.__module__):
            document = library.shorten(document)
        if document:
            blocks.append(textwrap.indent(quote(document), "    "))
        constants = []
        for node in tree.body:
            name = _name_of(node)
            if library.is_library(cls.__module__) and not self.omissions.is_read(name):
                continue
            if isinstance(getattr(cls, name, None), _PLAIN):
                constants.append(f"    {name} = {ast.unparse(node.value)}")  # type: ignore[attr-defined]
        if constants:
            blocks.append("\n".join(constants))
        for node in tree.body:
            function = functions.get(node.name) if isinstance(node, ast.FunctionDef) else None
            if function is not None and self._is_wanted(function):
                lines = Statements(self, function).lines()
                blocks.append("\n".join("    " + line for line in lines))
        bases = ", ".join(filter(None, (self._base(base) for base in cls.__bases__)))
        return f"class {cls.__name__}({bases}):\n" + ("\n\n".join(blocks) or "    pass")

    def _is_wanted(self, function: Function) -> bool:
        """Returns whether a method is called in the file."""
        if function.name in ("__init__", "forward"):
            return True
        return function in self._functions

    def _base(self, base: type) -> str:
        if base is nn.Module:
            return "nnx.Module"
        layer = layers.layer_of(base)
        if layer is not None:
            return self.layer_name(layer)
        if library.is_of_library(base.__module__):
            return library.counterpart_of(base) or ""
        if self._is_hollow(base):
            return ", ".join(filter(None, map(self._base, base.__bases__)))
        return "" if base is object else base.__name__

    def _is_hollow(self, cls: type) -> bool:
        """Returns whether a file needs nothing of a class of a library's model but its bases."""
        if (
            not library.is_library(cls.__module__)
            or not self.is_module(cls)
            or cls is type(self._model)
        ):
            return False
        has_functions = any(
            item.owner is cls and self._is_wanted(item) for item in self.recording.functions
        )
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(tree, ast.ClassDef)
        return not has_functions and not any(map(self.omissions.is_read, map(_name_of, tree.body)))

    def _print_plain_class(self, cls: type, tree: ast.ClassDef) -> str:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                value = vars(sys.modules[cls.__module__]).get(node.id)
                module = getattr(value, "__module__", None)
                if isinstance(module, str) and is_standard(module):
                    self._imports[node.id] = f"from {module} import {node.id}"
        return textwrap.dedent(inspect.getsource(cls)).rstrip()

    def _assemble(self, title: str, constants: list[str], blocks: list[str]) -> str:
        body = "\n\n\n".join([*(["\n".join(constants)] if constants else []), *blocks])
        tied = f"TIED = {self.tied_names()!r}  # names in the source's state -> those here"
        loading = [inspect.getsource(item) for item in (*_LOADING, flax_weights.named_arrays)]
        helpers = helpers_of("\n\n\n".join([body, *loading]), self._helper)
        everything = "\n\n\n".join([body, tied, *map(str.rstrip, loading[:-1])])
        whole = "\n\n\n".join([*helpers, everything])
        used = names_in(whole)
        known = {**_IMPORTS, **self._imports, **self.dialect._embedded.imports}
        imports = print_imports(line for name, line in known.items() if name in used)
        names = sorted(cls.__name__ for cls in self.without_initial_values if cls is not None)
        lacking = f"\n\n{_LACKING} {', '.join(names)}.\n" if names else ""
        return f'"""{title}{"." if lacking else ""}{lacking}"""\n\n{imports}\n\n\n{whole}\n'

    def _helper(self, name: str) -> Helper | None:
        if name in self._activations:
            return Helper(self._activations[name])
        own = self._renamed.get(name, name)
        if name in self._renamed.values():
            return None
        places = (flax_layers, flax_weights)
        made: Any = next((vars(item)[own] for item in places if own in vars(item)), None)
        is_stand_in = name in ("max_pool", "avg_pool", "adaptive_avg_pool")
        if getattr(made, "__module__", "") in _HELPERS and not is_stand_in:
            rows = inspect.getsource(made).replace("  # fmt: skip", "").splitlines()
            code = "\n".join(row.partition("  # type: ignore")[0] for row in rows)
            return Helper(self._rename(code) if self._renamed else code)
        definition = _definition(flax_transformers, name)
        if definition:
            return Helper(definition)
        return self.dialect.helper(name)

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

    def tied_names(self) -> dict[str, str]:
        """Returns the names of arrays that the file's model has only under another name."""
        arrays = dict(self._model.named_parameters(remove_duplicate=False))
        tied = {f"{name}.weight" for name, part in self._model.named_modules()
                if id(part) in self._tied}  # fmt: skip
        return {
            name: next(n for n, x in arrays.items() if x is arrays[name] and n not in tied)
            for name in sorted(tied)
        }


_HELPERS = (flax_layers.__name__, flax_weights.__name__)
_LOADING = (flax_weights.load_weights, flax_weights.source_state)
_PLAIN = (bool, int, float, str, tuple)
_LIBRARIES = ("torch", "numpy", "jax", "flax", "fmapper", "builtins", "typing")


def _name_of(node: ast.stmt) -> str:
    """Returns the name that a statement gives a value; empty for others."""
    match node:
        case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name), value=ast.expr()):
            return name
    return ""


def _definition(module: types.ModuleType, name: str) -> str:
    """Returns the text of what a module defines under a name; empty if it imports that."""
    code = inspect.getsource(module)
    for node in ast.parse(code).body:
        if name == (_name_of(node) or getattr(node, "name", "")):
            return (ast.get_source_segment(code, node) or "").replace("  # fmt: skip", "")
    return ""


def _place(one: type | Function) -> tuple[str, int]:
    """Returns where something is in the source."""
    if isinstance(one, Function):
        return one.target.__module__, one.target.__code__.co_firstlineno
    return one.__module__, inspect.getsourcelines(one)[1]
