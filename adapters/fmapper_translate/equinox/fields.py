"""The fields of classes in files for Equinox: what a constructor sets, by what it was."""

from __future__ import annotations

import ast
import dataclasses
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from fmapper_translate.files import File

_PLAIN = (bool, int, float, str)


def fields_of(file: File, cls: type) -> Iterator[str]:
    """Returns the fields that the constructor of a class sets, and that its bases do not."""
    modules: Iterable[nn.Module] = file.model.modules()
    parts = [part for part in modules if cls in type(part).__mro__]
    always, slots = set(_set_always(file, cls)), file.slots.names(cls, file.maker_of)
    yield from (f"{name}: Slot = eqx.field(static=True)" for name in slots)
    for name in (*file.attributes.get(cls, ()), *_names_computed(file, cls, parts)):
        if name in slots:
            continue
        if name == file.target.mode:
            yield f"{name}: bool  # set by eqx.nn.inference_mode"
            continue
        if name in file.stacks_in(cls):
            yield f"{name}: Stack"
            continue
        values = [getattr(part, name) for part in parts if hasattr(part, name)]
        kind, function, options = _kind(file, parts, name, values)
        if name not in always:  # a field that is not set has to have a value
            options = [*options, "default=None"]
        if options == ["default=None"] and not function:
            yield f"{name}: {kind} = None"
        elif function or options:
            yield f"{name}: {kind} = {function or 'eqx.field'}({', '.join(options)})"
        else:
            yield f"{name}: {kind}"


def _names_computed(file: File, cls: type, parts: list[nn.Module]) -> Iterator[str]:
    """Returns the attributes that a class's constructor sets by names that it computes."""
    declared = {name for base in cls.__mro__ for name in file.attributes.get(base, ())}
    groups = [
        group
        for part in parts if cls in file.naming
        for group in (part._parameters, part._buffers, part._modules, vars(part))
    ]  # fmt: skip
    for name in dict.fromkeys(name for group in groups for name in group):
        if not name.startswith("_") and name not in (*declared, "training"):
            yield name


def _set_always(file: File, cls: type) -> Iterator[str]:
    """Returns the attributes that a class's constructor sets whatever it is given."""
    for function in file.recording.functions:
        if function.owner is cls and function.name == "__init__":
            for statement in function.tree.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
                    for node in ast.walk(statement):
                        match node:
                            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                                yield name
                            case ast.Call(
                                ast.Attribute(ast.Name("self")), [ast.Constant(name), *_]
                            ):
                                yield str(name)


def _kind(
    file: File, parts: list[nn.Module], name: str, values: list[Any]
) -> tuple[str, str, list[str]]:
    """Returns the annotation of a field, the function that declares it, and its options."""
    is_array = [isinstance(value, torch.Tensor) for value in values]
    if any(is_array):
        kind = " | ".join(["jax.Array", *(["None"] * (not all(is_array)))])
        if any(isinstance(value, nn.Parameter) for value in values):
            return kind, "", []
        is_saved = any(name in part.state_dict() for part in parts)
        return kind, "buffer", [] if is_saved else ["saved=False"]
    others = [value for value in values if value is not None]
    if not others:
        return "Any", "", []
    named = dict.fromkeys(_name(file, value) for value in others)
    if len(others) < len(values):
        named["None"] = None
    kind = " | ".join(named) if "Any" not in named else "Any"
    return kind, "", ["static=True"] if all(map(_is_setting, others)) else []


def _is_setting(value: Any) -> bool:
    """Returns whether something has no arrays and can be hashed."""
    if isinstance(value, nn.Module):
        return False
    if dataclasses.is_dataclass(value):
        return True  # which files make such
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _name(file: File, value: Any) -> str:
    if isinstance(value, nn.ModuleList | nn.ParameterList | list):
        named = {_name(file, item) for item in value}
        return f"list[{named.pop()}]" if len(named) == 1 else "list"
    if isinstance(value, dict):
        return "dict"
    if isinstance(value, torch.Tensor):
        return "jax.Array"
    cls = type(value)
    if cls in file.layers.activations or isinstance(value, types.FunctionType):
        return "Callable"
    if isinstance(value, nn.Module):
        return file.class_name(cls) or cls.__name__
    if dataclasses.is_dataclass(value) and cls in file.known_classes:
        return cls.__name__
    return cls.__name__ if cls in _PLAIN else "tuple" if isinstance(value, tuple) else "Any"
