"""The arguments of a model's constructor, read from the model and the constructor's source."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fmapper_translate.targets import layers
from fmapper_translate.walk.errors import NotTranscribed

_LISTS = (Sequence, nn.ModuleList, nn.Sequential)
SAY_ARGUMENTS = (
    "Say it by source(..., arguments={'name': value}), or have its constructor keep them as "
    "attributes of these names"
)
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def find_arguments(model: nn.Module) -> Arguments:
    """Returns what the constructor of a model was given, by keyword.

    An attribute of a parameter's name is its value. Otherwise the constructor says where it went:
    to another attribute, to a layer or another class of the model, or into a number of parts.

    Raises:
        NotTranscribed: Some argument left no trace, or a model made with these is another one.
    """
    cls = type(model)
    found = _read(model)
    names = inspect.signature(cls).parameters
    arguments = {name: found[name] for name in names if name in found}
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    lacking = [
        parameter.name for parameter in names.values()
        if parameter.name not in arguments and parameter.default is inspect.Parameter.empty
        and parameter.kind not in kinds
    ]  # fmt: skip
    if not lacking:
        switches = {
            name: not parameter.default for name, parameter in names.items()
            if name not in arguments and isinstance(parameter.default, bool)
        }  # fmt: skip
        for other in ({}, *({name: value} for name, value in switches.items())):
            given = {**arguments, **other}
            if _makes(cls, given, model):
                return (), {name: given[name] for name in names if name in given}
        lacking = [name for name in names if name not in arguments]
    if lacking:
        raise NotTranscribed(
            f"{cls.__name__}: the model does not say what {', '.join(lacking)} was. {SAY_ARGUMENTS}"
        )
    return (), arguments


def _makes(cls: type, arguments: Mapping[str, Any], model: nn.Module) -> bool:
    """Returns whether a class makes a model like another one of these arguments."""
    try:
        return _is_alike(cls(**arguments), model)
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
    is_same = all(_settings(one) == _settings(other) for one, other in pairs)
    return is_same and _distinct_names(twin) == _distinct_names(model)


def _distinct_names(model: nn.Module) -> set[str]:
    """Returns the names of parameters, those of tied ones once."""
    return {name for name, _ in model.named_parameters()}


def _settings(module: nn.Module) -> dict[str, Any]:
    """Returns the numbers and texts that a module has, and that no call changes."""
    kind: Any = type(module)
    changed = _attributes_that_change(kind)
    kept = {name: value for name, value in vars(module).items() if name not in changed}
    return {name: value for name, value in kept.items() if isinstance(value, str | int | float)}


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


def _read(module: nn.Module) -> dict[str, Any]:
    """Returns the arguments of a module's constructor that it tells."""
    cls = type(module)
    names = inspect.signature(cls).parameters
    arguments = {
        name: getattr(module, name)
        for name in names
        if hasattr(module, name) and not isinstance(getattr(module, name), nn.Module)
        and not inspect.isroutine(getattr(module, name))
    }  # fmt: skip
    if any(base is not nn.Module and layers.is_library_module(base) for base in cls.__mro__):
        return arguments
    source = textwrap.dedent(inspect.getsource(cls.__init__))
    definition = ast.parse(source).body[0]
    space = getattr(cls.__init__, "__globals__", {})
    stored = {
        node.id for node in ast.walk(definition)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }  # fmt: skip
    for statement in ast.walk(definition):
        match statement:
            case ast.Assign([ast.Attribute(ast.Name("self"), attr)], value) if hasattr(
                module, attr
            ):
                for name, read in _unify(value, getattr(module, attr), space):
                    if name in names and name not in stored:
                        arguments.setdefault(name, read)
    return arguments


def _unify(node: ast.expr, value: Any, space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields names in an expression and what they are, where its value says that."""
    match node:
        case ast.Name(name):
            yield name, value
        case ast.BinOp(ast.Constant(int(factor)), ast.Mult(), other) | ast.BinOp(
            other, ast.Mult(), ast.Constant(int(factor))
        ) if isinstance(value, int) and factor and value % factor == 0:
            yield from _unify(other, value // factor, space)
        case ast.List(elts) | ast.Tuple(elts) if isinstance(value, _LISTS):
            for element, item in zip(elts, value, strict=False):
                yield from _unify(element, item, space)
        case ast.ListComp(element, [loop]) | ast.GeneratorExp(element, [loop]) if isinstance(
            value, _LISTS
        ):
            match loop.iter:
                case ast.Call(ast.Name("range"), [count]):
                    yield from _unify(count, len(value), space)
            bound = {item.id for item in ast.walk(loop.target) if isinstance(item, ast.Name)}
            if len(value) and not loop.ifs:
                pairs = _unify(element, value[0], space)
                yield from ((name, read) for name, read in pairs if name not in bound)
        case ast.Call(args=[ast.Starred(inner)]) if isinstance(value, nn.Sequential):
            yield from _unify(inner, value, space)
        case ast.Call(func, args, keywords) if isinstance(value, nn.Module):
            yield from _unify_call(func, args, keywords, value, space)


def _unify_call(
    func: ast.expr,
    args: list[ast.expr],
    keywords: list[ast.keyword],
    module: nn.Module,
    space: Mapping[str, Any],
) -> Iterator[tuple[str, Any]]:
    cls = type(module)
    if ast.unparse(func).rpartition(".")[2] != cls.__name__:
        return
    if isinstance(module, nn.Sequential | nn.ModuleList):
        parts = args[0] if isinstance(module, nn.ModuleList) and args else ast.List(args)
        yield from _unify(parts, module, space)
        return
    values = _read(module)
    by_name = {str(key.arg): key.value for key in keywords if key.arg}
    try:
        given = layers.signature_of(cls).bind_partial(None, *args, **by_name).arguments
    except TypeError:
        return
    for name, node in given.items():
        if name in values and isinstance(node, ast.expr):
            value = values[name]
            is_even = isinstance(value, tuple) and len(set(value)) == 1
            yield from _unify(node, value[0] if is_even else value, space)
