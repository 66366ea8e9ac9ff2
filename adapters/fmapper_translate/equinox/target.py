"""Equinox as a target: modules are trees that calls do not change, and are given random keys."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import torch
from torch import nn

from fmapper.translation import expr, text
from fmapper_adapters.equinox.translation.build import open_file
from fmapper_adapters.equinox.translation.dialect import EquinoxDialect
from fmapper_translate._private import has_computed_weights
from fmapper_translate.equinox import layers as equinox_layers
from fmapper_translate.equinox import library, norms, recurrent, scans, weights
from fmapper_translate.equinox.fields import fields_of
from fmapper_translate.equinox.table import LAYERS
from fmapper_translate.functions import Function
from fmapper_translate.operations import negate
from fmapper_translate.printing.folding import fold
from fmapper_translate.targets import Target, derivatives, distributions, functions, pools, rows
from fmapper_translate.targets import transformers as target_transformers
from fmapper_translate.targets.layers import second_names
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.files import File

_UNCHANGED = "a module of Equinox does not change when it is called"
_KEYS = "keys()"
_FOLDED = "jax.random.fold_in(key, "
_STATISTICS = "statistics"


class EquinoxTarget(Target):
    """Equinox."""

    name = "equinox"
    title = "Equinox"
    module = "eqx.Module"
    mode = "inference"
    random = "key"
    initializers = "jax.nn.initializers"
    walk = "iter_modules"
    layers = LAYERS
    helpers: ClassVar[Sequence[types.ModuleType]] = (
        equinox_layers, pools, recurrent, norms, weights, derivatives, rows, functions,
        distributions,
    )  # fmt: skip
    scans: ClassVar[types.ModuleType] = scans
    library: ClassVar[Sequence[types.ModuleType]] = (library, target_transformers)
    imports: ClassVar[Mapping[str, str]] = {
        "eqx": "import equinox as eqx", "Callable": "from collections.abc import Callable",
        "OrderedDict": "from collections import OrderedDict", "inspect": "import inspect",
        "copy": "import copy",
    }  # fmt: skip
    dataclass = "@dataclass(eq=False)"  # which can be hashed
    dialect = EquinoxDialect
    loading = (weights.load_weights, weights.source_state, weights.name_in_source)
    updating = (weights.Statistics,)
    with_dtype = staticmethod(weights.with_dtype)
    arrays: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("parameter", "buffer", "constant", "choice"), "{0}"
    )
    is_tree = True
    counts_batches = True
    place = "Place({0}, {1!r})"
    part = "set_part({0}, {1!r}, {2})"

    def refuse(self, file: File) -> None:
        """Refuses a model with an array at two places, or a layer with one that is not trained.

        Modules at two places may have such arrays.

        Raises:
            NotTranscribed: It has such an array.
        """
        model = file.model
        first: dict[int, str] = {}
        for name, array in model.named_parameters(remove_duplicate=False):
            other = first.setdefault(id(array), name)
            if other != name and not file.is_tied(name) and not _is_shared(model, name):
                raise NotTranscribed(
                    f"{name} is {other}, and a tree of Equinox has both, which training would "
                    "change apart; write it for Flax"
                )
            owner = model.get_submodule(name.rpartition(".")[0])
            if not array.requires_grad and file.layers.base_of(type(owner)) is not None:
                raise NotTranscribed(
                    f"{name} is not trained, which a tree of Equinox does not say; write it for "
                    "Flax"
                )

    def source(self) -> ast.keyword:
        """Returns `key=keys()`."""
        return ast.keyword("key", expr(_KEYS))

    def parameter(self, function: Function, *, constructs: bool) -> tuple[ast.arg, Any]:
        """Returns `key`, which calls need not give."""
        default = None if function.makes_modules or constructs else ast.Constant(None)
        return ast.arg(_name_of_key(function)), default

    def give_keys(self, call: ast.expr) -> ast.expr:
        """Returns the call that makes a model, with a key for each module that it is given."""
        inner = [
            node for arg in ast.walk(call) if isinstance(arg, ast.Call) and arg is not call
            for node in arg.keywords
            if text(node.value) in ("key", _KEYS) or text(node.value).startswith(_FOLDED)
        ]  # fmt: skip
        for number, keyword in enumerate(inner, 1):
            keyword.value = expr(f"{_FOLDED}{number})")
        return call

    def more_parameters(self, file: File, function: Function) -> list[tuple[ast.arg, Any]]:
        """Returns `statistics`, which calls in evaluation need not give."""
        collects = function in file.collects
        return [(ast.arg(_STATISTICS), ast.Constant(None))] if collects else []

    def frame(self, file: File, function: Function, body: list[str]) -> list[str]:
        """Returns the lines with the keys that are split off the one that is given."""
        at = document_end(function, body)
        if _shares(file):
            if file.is_entry(function):
                body = [*body[:at], "self = show_shared(self)", *body[at:]]
            is_top = function.owner is file.maker_of(type(file.model))
            if is_top and function.name == "__init__":
                body = [*body, "self.shared_parts = hide_shared(self)"]
        keys = _keys_of(function)
        if sum(line.count(keys) for line in body) == 0:
            return body
        keys = keys.removesuffix("()")
        return [*body[:at], f"{keys} = Keys({_name_of_key(function)})", *body[at:]]

    def key(self, file: File, function: Function) -> ast.expr:
        """Returns the next key that was split off."""
        file.draws.add(function)
        return expr(_keys_of(function))

    def extras(self, file: File, function: Function, *callees: Any) -> list[ast.keyword]:
        """Returns a key for what draws, and statistics for what collects, as its caller then does.

        Raises:
            NotTranscribed: A function has another variable of that name.
        """
        targets = [
            item if isinstance(item, Function) else file.recording.function_of(
                type(item).forward if isinstance(item, nn.Module) else item
            )
            for item in callees
        ]  # fmt: skip
        callers = {*filter(None, targets), *([] if file.constructs(function) else [function])}
        given = []
        if any(_reaches(file, item, file.draws, _draws) for item in callees):
            file.draws |= callers
            names = {_name_of_key(target) for target in targets if target is not None}
            given += [ast.keyword(name, expr(_keys_of(function))) for name in names or {"key"}]
        collects = (_reaches(file, item, file.collects, _collects) for item in callees)
        if not file.only_evaluation and any(collects):
            for item in callers:
                if _STATISTICS in _variables(item):
                    raise NotTranscribed(f"{item.label} has a variable `{_STATISTICS}` of its own")
            file.collects |= callers
            if not file.constructs(function):
                given += [ast.keyword(_STATISTICS, expr(_STATISTICS))]
        return given

    def is_taken(self, file: File, module: Any, given: list[ast.keyword]) -> bool:
        """Returns whether calls of a module take keywords, which those of its class always do."""
        layer, names = file.layers.base_of(type(module)), {str(item.arg) for item in given}
        if not isinstance(module, nn.Module):  # a function
            return not names or file.recording.function_of(module) is not None
        if type(module) in file.layers.activations:
            return names <= ({"key"} if type(module) is nn.Identity else set())
        if layer is None or file.recording.function_of(type(module).forward) is not None:
            return True
        space = {**vars(eqx.nn), **{k: x for item in self.helpers for k, x in vars(item).items()}}
        call = space[layer.name.removeprefix("eqx.nn.")].__call__
        taken = inspect.signature(call).parameters.keys()
        return names <= taken | ({_STATISTICS} if _collects(module) else set())

    def dropout(
        self, file: File, function: Function, *given: ast.expr, dims: tuple[int, ...] = ()
    ) -> ast.expr:
        """Returns a layer of dropout, and its call."""
        if dims:
            raise NotTranscribed("dropout of channels has no counterpart")
        array, rate, training = given
        return expr("eqx.nn.Dropout({1})({0}, key={2}, inference={3})",
                    array, rate, self.key(file, function), fold(negate(training)))  # fmt: skip

    def keys_of_scan(self, function: Function, lines: list[str]) -> tuple[str, list[str], str]:
        """Returns a key for each block, of which its body splits off those that it needs."""
        key, given = _name_of_key(function), f"{_STATISTICS}={_STATISTICS}"
        keys = _keys_of(function)
        draws, collects = (any(x in line for line in lines) for x in (keys, given))
        parameters = f", {key}" + f", {_STATISTICS}=None" * collects
        arguments = f", {keys}" * draws + f", {given}" * collects
        return parameters, [f"{keys.removesuffix('()')} = Keys({key})"] * draws, arguments

    def read(self, array: ast.expr, value: Any, *, constructs: bool) -> ast.expr:
        """Returns an array, without a gradient if it is not trained."""
        is_fixed = isinstance(value, torch.Tensor) and value.is_floating_point()
        is_fixed = is_fixed and not value.requires_grad
        return expr("jax.lax.stop_gradient({0})", array) if is_fixed and not constructs else array

    def write(
        self, file: File, function: Function, array: ast.expr, value: ast.expr, sign: str = ""
    ) -> str:
        """Returns the statement that sets an array of a part while a model is made."""
        if not file.constructs(function):
            raise NotTranscribed(_UNCHANGED)
        new = f"{text(array)} {sign} {text(value)}" if sign else text(value)
        match array:
            case ast.Attribute(ast.Name("self"), name) if function.name == "__init__":
                return f"self.{name} = {new}"
            case ast.Attribute(owner, name):
                return f"set_part({text(owner)}, {name!r}, {new})"
            case ast.Name(place):  # of `named_parameters`
                return f"set_part(*{place}, {new})"
        raise NotTranscribed("an array of JAX does not change")

    def initialize(self, array: ast.expr, initializer: ast.expr) -> str:
        """Returns the statement that draws the values of an array."""
        match array:
            case ast.Attribute(owner, name):
                return f"initialize({text(owner)}, {name!r}, {text(initializer)}, {_KEYS})"
            case ast.Name(place):
                return f"initialize(*{place}, {text(initializer)}, {_KEYS})"
        raise NotTranscribed("an array of JAX does not change")

    def fields(self, file: File, cls: type) -> list[str]:
        """Returns the fields of a class."""
        is_top = cls is file.maker_of(type(file.model))
        shared = ["shared_parts: tuple = eqx.field(static=True)"] * (is_top and _shares(file))
        return [*fields_of(file, cls), *shared]

    def open(self, net: types.ModuleType, name: str, weights: Mapping[str, Any]) -> Any:
        """Returns the arrays of a model, and the function that makes the model of them."""
        model, options = open_file(net, name, weights, train=False)
        arrays, rest = eqx.partition(model, eqx.is_array)
        return arrays, lambda arrays: functools.partial(eqx.combine(arrays, rest), **options)


def document_end(function: Function, body: list[str]) -> int:
    """Returns how many lines the docstring of a function has."""
    if not ast.get_docstring(function.tree) or not body or not body[0].startswith('"""'):
        return 0
    ends = (
        at for at, line in enumerate(body, 1) if line.endswith('"""') and (at > 1 or line != '"""')
    )
    return next(ends, 0)


def _is_shared(model: nn.Module, name: str) -> bool:
    """Returns whether an array is that of a module that has an earlier place, too."""
    steps = name.split(".")
    paths = [".".join(steps[:end]) for end in range(1, len(steps))]
    first: dict[int, str] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        if first.setdefault(id(part), path) != path and path in paths:
            return True
    return False


def _shares(file: File) -> bool:
    """Returns whether a file's model has a module with arrays at two places, and is trained."""
    names = () if file.only_evaluation else second_names(file.model, counts=True)
    return any(_is_shared(file.model, name) for name in names)


def _name_of_key(function: Function) -> str:
    """Returns the parameter for random keys, another one where the source has that name."""
    names = {node.arg for node in function.nodes if isinstance(node, ast.arg)}
    return "random_key" if "key" in names else "key"


def _keys_of(function: Function) -> str:
    """Returns the code for a new key, where calls of a function need one."""
    is_taken = function.name != "__init__" and "keys" in _variables(function)
    return f"random_{_KEYS}" if is_taken else _KEYS


def _variables(function: Function) -> set[str]:
    """Returns the names of the variables of a function, and of those that it reads."""
    names = (getattr(node, "id", getattr(node, "arg", None)) for node in function.nodes)
    return {name for name in names if isinstance(name, str)}


def _reaches(
    file: File, callee: Any, functions: Container[Any], does: Callable[[nn.Module], bool]
) -> bool:
    """Returns whether calls of a module or function run one of some functions, or such a layer."""
    if not isinstance(callee, nn.Module):
        return isinstance(callee, Function) and callee in functions
    if isinstance(callee, nn.Sequential) and type(callee).forward is nn.Sequential.forward:
        return any(_reaches(file, part, functions, does) for part in callee)
    return does(callee) or file.recording.function_of(type(callee).forward) in functions


def _draws(module: nn.Module) -> bool:
    """Returns whether a layer draws random numbers in training."""
    rate = getattr(module, "dropout", 0.0) if type(module) in LAYERS.rows else 0.0
    return isinstance(module, nn.Dropout) or bool(rate)


def _collects(module: nn.Module) -> bool:
    """Returns whether a layer collects statistics of batches in training."""
    is_norm = type(module).forward is nn.BatchNorm2d.forward and bool(module.track_running_stats)
    return is_norm or has_computed_weights(module, nn.utils.spectral_norm)
