"""A file for Flax NNX: the model's classes and functions, what they need, and `load_weights`."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import types
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fmapper.translation import Helper, expr, helpers_of, names_in, print_imports, text
from fmapper_translate.constructors.given_modules import Construction
from fmapper_translate.functions import Function, definition_of
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.printing.rows import Places
from fmapper_translate.recording import Recording
from fmapper_translate.scans.lists import Lists
from fmapper_translate.scans.loops import print_scan
from fmapper_translate.slots import Slots
from fmapper_translate.sources.derivatives import is_derivable
from fmapper_translate.statements import Statements
from fmapper_translate.targets import Target, layers, scans
from fmapper_translate.targets.constructions import make_activation, make_layer
from fmapper_translate.walk import files as walk
from fmapper_translate.walk.errors import NotTranscribed
from fmapper_translate.walk.files import name_of

_IMPORTS = {
    "jax": "import jax", "jnp": "import jax.numpy as jnp", "np": "import numpy as np",
    "partial": "from functools import partial",
    "einops": "import einops", "functools": "import functools",
    "io_callback": "from jax.experimental import io_callback",
    "math": "import math", "operator": "import operator",
    "SimpleNamespace": "from types import SimpleNamespace",
    "Namespace": "from argparse import Namespace",
    "Any": "from typing import Any", "dataclass": "from dataclasses import dataclass",
    "field": "from dataclasses import field", "ClassVar": "from typing import ClassVar",
}  # fmt: skip
_LACKING = "Parameters begin with the values of layers, not with those of the source in"


class File(walk.File):
    """A file for JAX while it is written.

    Args:
        recording: What the source did.
        model: The model that was recorded.
        target: The framework that it is for.
        only_evaluation: See there.
        gives_initial_values: Whether models of a library give their arrays first values.

    Attributes:
        dialect: The printers of operations, with the functions that they call.
        places: The tensors that are indices of a mask's elements.
        has_mode: Classes that ask whether they are in training.
        takers: Classes that take `rngs` since others that are made in their place do.
        draws: Classes, and functions without a module, that draw random numbers when called.
        collects: Functions that are given what collects statistics in training.
        tables: Names of tables of classes -> their code.
        attributes: Classes -> the attributes that their constructors set.
        naming: Classes whose constructors compute the names of attributes.
        fallen: Functions that are written by their operations -> the reason.
        scans: The lists that are stacked, and called by scans.
        without_initial_values: Classes whose constructors give parameters values that the file
            does not.
        absent: Classes of layers that the model has nowhere, or without a counterpart in the file.
        slots: The attributes that are there within a call alone.
        optional: Attributes of classes that are arrays or None; they stay variables.
        initializers: Functions that give parts of a library's models their first values; None for
            the library's own.
        only_evaluation: Why the model is for evaluation alone; empty if it is for both.
    """

    module = nn.Module
    called = "forward"
    prefix = "Torch"

    def __init__(
        self,
        recording: Recording,
        model: nn.Module,
        target: Target,
        *,
        only_evaluation: str = "", gives_initial_values: bool = True,
    ) -> None:  # fmt: skip
        self.target, self.layers, self.helpers = target, target.layers, target.helpers
        super().__init__(recording, model)
        self.configs.header = target.dataclass
        self.only_evaluation = only_evaluation
        self.gives_initial_values = gives_initial_values
        self.initializers: set[Function | None] = set()
        self.dialect = target.dialect()
        if any(item.owner is None and item.name == "attention" for item in recording.functions):
            self._renamed[f"{self.prefix}attention"] = "attention"
        self.places = Places(recording)
        self.has_mode: set[type | None] = set()
        self.draws: set[type | Function | None] = set()
        self.collects: set[type | Function | None] = set()
        self.takers: set[type | None] = set()
        self.attributes: dict[type, dict[str, None]] = defaultdict(dict)
        self.naming: set[type | None] = set()
        self.fallen: dict[str, str] = {}
        self.scans: list[Lists] = []
        self.tables: dict[str, ast.expr] = {}
        self.without_initial_values: set[type | None] = set()
        arrays = [
            (type(part), name, array)
            for part in model.modules()
            for name, array in [*part._parameters.items(), *part._buffers.items()]
        ]
        absent = {(cls, name) for cls, name, array in arrays if array is None}
        self.optional = {
            (cls, name)
            for cls, name, _ in arrays
            if (cls, name) in absent or self._may_be_none(cls, name)
        }
        self._layers = {*filter(layers.is_library_module, recording.source.classes(model))}
        kinds = {base for part in model.modules() for base in type(part).__mro__}
        known = self.layers.rows.keys() | self._layers
        self.absent = {
            value
            for function in recording.functions
            for node in function.nodes
            for event in recording.events.get(node, ())
            if isinstance(value := event.value, type)
            and issubclass(value, nn.Module)
            and value is not nn.Module
            and (value not in kinds or (layers.is_library_module(value) and value not in known))
        }
        self._orders = {
            id(array): layer.variable(name)[1] if layer is not None else None
            for part in model.modules()
            for layer in [self.layers.base_of(type(part))]
            for name, array in [*part._parameters.items(), *part._buffers.items()]
        }
        self.slots = Slots(recording, model, self.constructs)
        self._activations: dict[str, str] = {}
        self._tied: dict[int, tuple[type | None, str]] = {}

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

    def _is_own(self, cls: type) -> bool:
        return cls in self._layers or super()._is_own(cls)

    def has_methods(self, cls: type) -> bool:
        """Returns whether a file has the methods of a class that ran; else it has all its text."""
        return super().has_methods(cls) or is_derivable(cls) or self._computes(cls)

    def _computes(self, cls: type) -> bool:
        """Returns whether a class of the source that is not a module computes with tensors."""
        return not library.is_foreign(cls.__module__) and any(
            event.operations
            for function in self.recording.functions if function.owner is cls
            for node in function.nodes
            for event in self.recording.events.get(node, ())
        )  # fmt: skip

    def class_name(self, cls: type) -> str | None:
        """Returns the name of what stands for a layer's class."""
        if cls in self._layers:
            others = (item for item in self.recording.functions if item.owner is not cls)
            is_taken = cls.__name__ in {getattr(x.owner, "__name__", x.name) for x in others}
            return f"{self.prefix}{cls.__name__}" if is_taken else cls.__name__
        layer = self.layers.layer_of(cls)
        return None if layer is None else self.helper_name(layer.name)

    def activation_class(self, kind: type) -> str:
        """Returns the name of a function that gives an activation, where a class is passed on."""
        code, _, options = self.layers.activations[kind]
        extra = ", ".join(f"{k}={v}" for k, v in options.items())
        made = f"partial({code}, {extra})" if extra else code
        name = kind.__name__
        self._activations[name] = f"def {name}():\n    return {made}"
        return name

    def takes_rngs(self, cls: type | None) -> bool:
        """Returns whether the constructor of a class takes random numbers."""
        bases = cls.__mro__ if cls is not None else ()
        makers = {item.owner for item in self.recording.functions
                  if item.name == "__init__" and item.makes_modules}  # fmt: skip
        layer = self.layers.base_of(cls) if cls is not None else None
        is_made_with = layer is not None and layer.takes_rngs
        return is_made_with or any(item in makers | self.draws | self.takers for item in bases)

    def is_entry(self, function: Function) -> bool:
        """Returns whether a function is what a call of the model runs."""
        return self.recording.function_of(type(self.model).forward) is function

    def add_initial_values(self, model: nn.Module) -> None:
        """Adds what a library's model gives its arrays first values by, and what that reads."""
        for cls in type(model).__mro__:
            function = self.recording.function_of(vars(cls).get("_init_weights"))
            if function is not None:
                function.makes_modules = True  # it takes `rngs`
                self.initializers.add(function)
                self.add_function(function)
        self.initializers.add(None)
        config = vars(model)["config"]
        name = next((item for item in library.RANGES if hasattr(config, item)), None)
        if name is not None:
            self.configs.field(config, name)
        elif getattr(config.get_text_config(), library.RANGES[0], 0.02) != 0.02:
            self.without_initial_values.add(type(model))

    def maker_of(self, cls: type | None) -> type | None:
        """Returns the class whose constructor makes objects of a class."""
        owners = {item.owner for item in self.recording.functions if item.name == "__init__"}
        return next((base for base in getattr(cls, "__mro__", ()) if base in owners), cls)

    def order_of(self, array: torch.Tensor) -> layers.Order:
        """Returns the order of the dimensions of a model's array in its variable.

        Raises:
            NotTranscribed: The model does not have it.
        """
        if id(array) not in self._orders:
            raise NotTranscribed("it is an array of no module")
        return self._orders[id(array)]

    def tie(self, linear: nn.Module, function: Function | None = None, table: str = "") -> None:
        """Notes that a linear layer has the matrix of an embedding.

        Args:
            linear: The layer.
            function: The constructor of what calls the embedding instead, if the layer is left out.
            table: The code for the embedding there.

        Raises:
            NotTranscribed: A layer that is not left out cannot have it.
        """
        if function is None:
            if self.layers.tied is None:
                raise NotTranscribed("both have other layouts")
            self._orders[id(linear.weight)] = None
        self._tied[id(linear)] = (None if function is None else function.owner, table)

    def layer_of(self, module: nn.Module) -> layers.Layer | None:
        """Returns what stands for a module, or for a base of its class."""
        is_tied = self._tied.get(id(module), (None, "-")) == (None, "")
        return self.layers.tied if is_tied else self.layers.base_of(type(module))

    def tied_table(self, module: nn.Module, function: Function) -> str:
        """Returns the code for the embedding whose matrix a layer has; empty without one."""
        owner, table = self._tied.get(id(module), (None, ""))
        return table if owner is not None and owner is function.owner else ""

    # --- the file ---------------------------------------------------------------------------------

    def _statements(self, function: Function) -> Statements:
        return Statements(self, function)

    def value(self, value: Any) -> ast.expr:
        """Returns the code for an argument of a constructor, of which modules are made there."""
        if isinstance(value, OrderedDict):
            return super().value(dict(value))  # in whose order files make parts, too
        if isinstance(value, type) and value in self.layers.activations:
            return expr(self.activation_class(value))
        if isinstance(value, functools.partial) and self.layers.layer_of(value.func) is not None:
            named = {key: x for key, x in value.keywords.items() if key not in layers.IGNORED}
            return super().value(functools.partial(value.func, *value.args, **named))
        if isinstance(value, float) and math.isinf(value):
            return expr("jnp.inf" if value > 0 else "-jnp.inf")
        if not isinstance(value, Construction):
            return super().value(value)
        if value.attributes:
            if self.target.is_tree:
                raise NotTranscribed(f"{value.cls.__name__} has got {[*value.attributes]} later")
            made = self.value(replace(value, attributes={}))
            more = [ast.keyword(name, self.value(x)) for name, x in value.attributes.items()]
            return ast.Call(expr("with_attributes"), [made], more)
        table, cls = self.target.layers, value.cls
        layer, is_activation = table.layer_of(cls), cls in table.activations
        if layer is None and not is_activation:
            if not self.add(cls):
                raise NotTranscribed(f"{cls.__name__} is not in the table of layers")
            return self.call(cls, value.args, value.kwargs)
        name = expr(cls.__name__ if layer is None else self.helper_name(layer.name))
        keywords = [ast.keyword(key, self.value(item)) for key, item in value.kwargs.items()]
        made = ast.Call(name, [*map(self.value, value.args)], keywords)
        if layer is None:
            return make_activation(_itself, made, cls, table.activations[cls])
        return make_layer(_itself, made, cls, layer, self.target.source())

    def call(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ast.expr:
        """Returns the call of the constructor of a class of the model, without devices."""
        given = [value for value in args if not isinstance(value, torch.device)]
        named = {key: x for key, x in kwargs.items() if not isinstance(x, torch.device)}
        made = super().call(cls, given, named)
        return self.target.give_keys(made) if cls is type(self.model) else made

    def _more_arguments(self, cls: type) -> list[ast.keyword]:
        name = self.target.random
        return [ast.keyword(name, expr(name))] if self.takes_rngs(cls) else []

    def _size(self) -> int:
        makers = sum(item.makes_modules for item in self.recording.functions)
        known = len(self.has_mode) + len(self.draws) + len(self.collects) + len(self.takers)
        known += sum(map(len, self.attributes.values()))
        return super()._size() + known + makers

    def _print_class(self, cls: type) -> str:
        if library.is_config_class(cls):
            return self.configs.print(cls)
        if library.is_record(cls):
            return self.configs.print_record(cls)
        self.attributes.pop(cls, None)
        made = super()._print_class(cls)
        return made.replace(cls.__name__, self.class_name(cls) or cls.__name__, 1)

    def _print_plain_class(self, cls: type, tree: ast.ClassDef) -> str:
        code = super()._print_plain_class(cls, tree)
        return code.replace("@dataclass\n", f"{self.target.dataclass}\n", 1)

    def scan_of(self, statements: Any, function: Function, loop: ast.For) -> list[str]:
        """Returns a loop as a scan; nothing if it stays a loop."""
        is_scan = any(loop in item.loops for item in self.scans)
        return list(print_scan(statements, self, function, loop)) if is_scan else []

    def frame(self, function: Function, body: list[str]) -> list[str]:
        """Returns the lines of a function with what the source's does not do."""
        is_top = function.owner is self.maker_of(type(self.model))
        if self.scans and is_top and function.name == "__init__":
            body = [*body, "stack_blocks(self)"]
        return self.target.frame(self, function, body)

    def stacks_in(self, cls: type) -> list[str]:
        """Returns the attributes of a class that are stacks."""
        return [item.name for item in self.scans if item.owner is cls]

    def _more_constants(self, cls: type) -> list[str]:
        names = self.stacks_in(cls)
        return [f"scanned_lists = {tuple(names)!r}"] if names else []

    def _fields(self, cls: type) -> list[str]:
        return self.target.fields(self, cls)

    def _is_read(self, cls: type, name: str) -> bool:
        return not library.is_foreign(cls.__module__) or self.omissions.is_read(name)

    def print(self, title: str) -> str:
        """Returns the file.

        Raises:
            NotTranscribed: A function of the source has no counterpart.
        """
        for path, part in self.model.named_modules():
            reason = layers.gap_of(part)
            if reason:
                raise NotTranscribed(f"{path}: {reason} has no counterpart in files")
        self.add(type(self.model))
        self._find_ties()
        if not self.only_evaluation:
            self.target.refuse(self)
        return super().print(title)

    def _find_ties(self) -> None:
        for function in self.recording.functions:
            if function.name == "__init__" and self.is_module(function.owner):
                try:
                    Statements(self, function).lines()
                except NotTranscribed:
                    continue

    def _base(self, base: type) -> str:
        if base is nn.Module:
            return self.target.module
        if base is torch.autograd.Function:
            return self.helper_name("Function")
        name = self.class_name(base)
        if name is not None:
            return name
        if library.is_of_library(base.__module__):
            return self.counterpart(base) or ""
        if self._is_hollow(base):
            return ", ".join(filter(None, map(self._base, base.__bases__)))
        return "" if base is object else self.marks.mark(base)

    def _is_hollow(self, cls: type) -> bool:
        """Returns whether a file needs nothing of a class of a library's model but its bases."""
        if (
            not library.is_library(cls.__module__)
            or not self.is_module(cls)
            or cls is type(self.model)
        ):
            return False
        has_functions = any(
            item.owner is cls and self._is_wanted(item) for item in self.recording.functions
        )
        tree = definition_of(cls)
        return not has_functions and not any(map(self.omissions.is_read, map(name_of, tree.body)))

    def _assemble(self, title: str, constants: list[str], blocks: list[str]) -> str:
        tables = [f"{name} = {text(code)}" for name, code in self.tables.items()]
        body = "\n\n\n".join([*(["\n".join(constants)] if constants else []), *blocks, *tables])
        tied = f"TIED = {self.tied_names()!r}  # names in the source's state -> those here"
        loading = [inspect.getsource(item) for item in self.target.loading]
        loading[-1:-1] = [inspect.getsource(item) for item in self.target.updating if self.collects]
        self.helpers = self.target.helpers
        if self.scans:
            self.helpers = (self.target.scans, scans, *self.helpers)
            new = {"load_weights": "load_stacked", "source_state": "stacked_state"}
            for at, (name, other) in enumerate(new.items()):
                loading[at] = loading[at].replace(f"def {name}(", f"def {other}(")
                loading.insert(-1, inspect.getsource(vars(self.target.scans)[name]))
        helpers = helpers_of("\n\n\n".join([body, *loading, self._example]), self._helper)
        everything = "\n\n\n".join([body, tied, *map(str.rstrip, loading[:-1])])
        whole = "\n\n\n".join([*helpers, everything])
        used = names_in(f"{whole}\n\n\n{self._example}")
        embedded = self.dialect._embedded.imports
        known = {**_IMPORTS, **self.target.imports, **self._imports, **embedded}
        future = "from __future__ import annotations\n\n" * self.target.is_tree  # of fields
        imports = future + print_imports(line for name, line in known.items() if name in used)
        names = sorted(cls.__name__ for cls in self.without_initial_values if cls is not None)
        lacking = f"\n\n{_LACKING} {', '.join(names)}.\n" if names else ""
        return f'"""{title}{"." if lacking else ""}{lacking}"""\n\n{imports}\n\n\n{whole}\n'

    def _helper(self, name: str) -> Helper | None:
        if name in self._activations:
            return Helper(self._activations[name])
        if name in {cls.__name__ for cls in self._classes}:
            return None
        is_stand_in = name in ("max_pool", "avg_pool", "adaptive_avg_pool")
        known = None if is_stand_in else super()._helper(name)
        if known is not None:
            return Helper(known.source.replace("(Module):", f"({self.target.module}):"))
        if name in self._renamed.values():
            return None
        for module in self.target.library:
            if definition := _definition(module, name):
                return Helper(definition)
        own = self._renamed.get(name, name)
        helper = self.dialect.helper(own)
        if helper is None or own == name:
            return helper
        return Helper(self._rename(helper.source), helper.needs)

    @property
    def known_classes(self) -> Collection[type]:
        """The classes of the model that the file has."""
        return self._classes.keys()

    def counterpart(self, value: Any) -> str | None:
        """Returns what the file has for an object of a library, if it has something for it."""
        name = library.counterpart_of(value)
        return self.target.module if name == library.MODULE else name

    def is_tied(self, name: str) -> bool:
        """Returns whether an array is that of a layer in whose place an embedding stands."""
        part = self.model.get_submodule(name.rpartition(".")[0])
        return bool(self._tied.get(id(part), (None, ""))[1])

    def tied_names(self) -> dict[str, str]:
        """Returns the names of arrays that the file's model has only under another name."""
        arrays = self.model.state_dict(keep_vars=True)
        tied = {f"{name}.weight" for name, part in self.model.named_modules()
                if self._tied.get(id(part), (None, ""))[1]}  # fmt: skip
        if self.target.is_tree:
            tied |= layers.second_names(self.model, counts=self.target.counts_batches)
        return {
            name: next(n for n, x in arrays.items() if x is arrays[name] and n not in tied)
            for name in sorted(tied)
        }


def _itself(code: ast.expr) -> ast.expr:
    return code


@functools.cache
def _definition(module: types.ModuleType, name: str) -> str:
    """Returns the text of what a module defines under a name; empty if it imports that."""
    code = inspect.getsource(module)
    for node in ast.parse(code).body:
        if name == (name_of(node) or getattr(node, "name", "")):
            return (ast.get_source_segment(code, node) or "").replace("  # fmt: skip", "")
    return ""
