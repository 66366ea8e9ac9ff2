"""The arguments of a model's constructor, read from the model and the constructor's source."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fmapper_translate.targets import layers
from fmapper_translate.walk.errors import NotTranscribed

SAY_ARGUMENTS = (
    "Say it by source(..., arguments={'name': value}), or have its constructor keep them as "
    "attributes of these names"
)
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Modules:
    """The facts about a framework's modules that tell how they were made.

    Attributes:
        is_module: Whether something is one.
        is_library: Whether a class is the framework's own.
        make: Makes one, of its class and the arguments of its constructor.
        is_alike: Whether two have the same parts, shapes, ties and settings.
        hidden: The parameters of constructors for random numbers.
    """

    is_module: Callable[[Any], bool]
    is_library: Callable[[type], bool]
    make: Callable[[type, Sequence[Any], Mapping[str, Any]], Any]
    is_alike: Callable[[Any, Any], bool]
    hidden: frozenset[str] = frozenset()


def find_arguments(model: Any, modules: Modules | None = None) -> Arguments:
    """Returns what the constructor of a model was given, by keyword.

    An attribute of a parameter's name is its value. Otherwise the constructor says where it went:
    to another attribute, to a layer or another class of the model, or into a number of parts.

    Raises:
        NotTranscribed: Some argument left no trace, or a model made with these is another one.
    """
    modules = modules or TORCH
    cls = type(model)
    found = _read(model, modules)
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    names = {
        name: parameter for name, parameter in _parameters(cls).items()
        if name not in modules.hidden and parameter.kind not in kinds
    }  # fmt: skip
    arguments = {name: found[name] for name in names if name in found}
    lacking = [
        name for name, parameter in names.items()
        if name not in arguments and parameter.default is inspect.Parameter.empty
    ]  # fmt: skip
    if not lacking:
        switches = {
            name: not parameter.default for name, parameter in names.items()
            if name not in arguments and isinstance(parameter.default, bool)
        }  # fmt: skip
        for other in ({}, *({name: value} for name, value in switches.items())):
            given = {**arguments, **other}
            if _makes(cls, given, model, modules):
                return (), {name: given[name] for name in names if name in given}
        lacking = [name for name in names if name not in arguments]
    if lacking:
        raise NotTranscribed(
            f"{cls.__name__}: the model does not say what {', '.join(lacking)} was. {SAY_ARGUMENTS}"
        )
    raise NotTranscribed(
        f"{cls.__name__}: its constructor does not make this model of the arguments that it keeps. "
        f"{SAY_ARGUMENTS}"
    )


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a constructor, without the object."""
    _, *rest = layers.signature_of(cls).parameters.items()
    return dict(rest)


def _makes(cls: type, arguments: Mapping[str, Any], model: Any, modules: Modules) -> bool:
    """Returns whether a class makes a model like another one of these arguments."""
    try:
        return modules.is_alike(modules.make(cls, (), arguments), model)
    except Exception:  # constructors raise anything
        return False


def _is_alike(twin: nn.Module, model: nn.Module) -> bool:
    """Returns whether two models have the same parts, shapes, ties and settings."""
    if repr(twin) != repr(model):
        return False
    ours, theirs = twin.state_dict(), model.state_dict()
    if {name: x.shape for name, x in ours.items()} != {n: x.shape for n, x in theirs.items()}:
        return False
    pairs = zip(twin.modules(), model.modules(), strict=True)
    is_same = all(settings_of(one) == settings_of(other) for one, other in pairs)
    return is_same and _distinct_names(twin) == _distinct_names(model)


def _distinct_names(model: nn.Module) -> set[str]:
    """Returns the names of parameters, those of tied ones once."""
    return {name for name, _ in model.named_parameters()}


def settings_of(module: Any) -> dict[str, Any]:
    """Returns the numbers and texts that a module has, and that no call changes."""
    kind: Any = type(module)
    changed = _attributes_that_change(kind)
    kept = {name: value for name, value in vars(module).items() if name not in changed}
    return {name: value for name, value in kept.items() if _is_setting(value)}


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    return isinstance(value, str | int | float)


@functools.cache
def _attributes_that_change(cls: type) -> frozenset[str]:
    """Returns the attributes that methods give values after an object was made."""
    methods = (
        inspect.unwrap(value)
        for base in cls.__mro__
        for name, value in vars(base).items()
        if name != "__init__" and inspect.isfunction(value)
    )
    steps = (step for method in methods for step in dis.get_instructions(method))
    return frozenset(str(step.argval) for step in steps if step.opname == "STORE_ATTR")


TORCH = Modules(
    lambda value: isinstance(value, nn.Module),
    layers.is_library_module,
    lambda cls, args, kwargs: cls(*args, **kwargs),
    _is_alike,
)


def _read(module: Any, modules: Modules) -> dict[str, Any]:
    """Returns the arguments of a module's constructor that it tells."""
    cls = type(module)
    names = _parameters(cls)
    arguments = {
        name: getattr(module, name)
        for name in names
        if hasattr(module, name) and not _holds_modules(getattr(module, name), modules)
        and not inspect.isroutine(getattr(module, name))
    }  # fmt: skip
    if any(modules.is_library(base) and base.__name__ != "Module" for base in cls.__mro__):
        return arguments
    try:
        source = textwrap.dedent(inspect.getsource(cls.__init__))
    except (OSError, TypeError):  # a class whose constructor was made for it
        return arguments
    definition = ast.parse(source).body[0]
    stored = {
        node.id for node in ast.walk(definition)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }  # fmt: skip
    for statement in ast.walk(definition):
        match statement:
            case ast.Assign([ast.Attribute(ast.Name("self"), attr)], value) if hasattr(
                module, attr
            ):
                for name, read in _unify(value, getattr(module, attr), modules):
                    if name in names and name not in stored:
                        arguments.setdefault(name, read)
    return arguments


def _holds_modules(value: Any, modules: Modules) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_modules(item, modules) for item in value)
    return modules.is_module(value)


def _items(value: Any) -> list[Any] | None:
    """Returns the elements of a list, or of a module that is one; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [*value]
    if type(value).__name__ not in ("ModuleList", "Sequential", "List"):
        return None
    return [*getattr(value, "layers", value)]


def _unify(node: ast.expr, value: Any, modules: Modules) -> Iterator[tuple[str, Any]]:
    """Yields names in an expression and what they are, where its value says that."""
    items = _items(value)
    match node:
        case ast.Name(name):
            yield name, value
        case ast.BinOp(ast.Constant(int(factor)), ast.Mult(), other) | ast.BinOp(
            other, ast.Mult(), ast.Constant(int(factor))
        ) if isinstance(value, int) and factor and value % factor == 0:
            yield from _unify(other, value // factor, modules)
        case ast.List(elts) | ast.Tuple(elts) if items is not None:
            for element, item in zip(elts, items, strict=False):
                yield from _unify(element, item, modules)
        case ast.ListComp(element, [loop]) | ast.GeneratorExp(element, [loop]) if items is not None:
            match loop.iter:
                case ast.Call(ast.Name("range"), [count]):
                    yield from _unify(count, len(items), modules)
            bound = {item.id for item in ast.walk(loop.target) if isinstance(item, ast.Name)}
            if items and not loop.ifs:
                pairs = _unify(element, items[0], modules)
                yield from ((name, read) for name, read in pairs if name not in bound)
        case ast.Call(args=[ast.Starred(inner)]) if items is not None:
            yield from _unify(inner, value, modules)
        case ast.Call(func, args, keywords) if modules.is_module(value):
            yield from _unify_call(func, args, keywords, value, modules)


def _unify_call(
    func: ast.expr, args: list[ast.expr], keywords: list[ast.keyword], module: Any, modules: Modules
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    cls = type(module)
    if ast.unparse(func).rpartition(".")[2] != cls.__name__:
        return
    if _items(module) is not None:
        parts = args[0] if _takes_list(cls) and len(args) == 1 else ast.List(args)
        yield from _unify(parts, module, modules)
        return
    values = _read(module, modules)
    by_name = {str(key.arg): key.value for key in keywords if key.arg}
    try:
        given = layers.signature_of(cls).bind_partial(None, *args, **by_name).arguments
    except TypeError:
        return
    for name, node in given.items():
        if name in values and isinstance(node, ast.expr):
            value = values[name]
            is_even = isinstance(value, tuple) and len(set(value)) == 1
            yield from _unify(node, value[0] if is_even else value, modules)


def _takes_list(cls: type) -> bool:
    """Returns whether a list of modules is given its elements as one argument."""
    parameters = [*_parameters(cls).values()]
    return parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
