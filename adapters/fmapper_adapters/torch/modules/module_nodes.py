"""The node type of `torch.nn.Module`."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fmapper import RebuildError, UnsupportedLeafError, no_gradient
from fmapper.backends import (
    NodeType,
    at_end,
    holds_arrays,
    is_dynamic,
    is_gradient,
    like,
)
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.arrays.parameters import as_parameter
from fmapper_adapters.torch.compute import parameter_standin
from fmapper_adapters.torch.modules import references

Module = torch.nn.Module

_INTERNAL = frozenset(vars(Module()))
_OWN_STATE = len(_INTERNAL)
_COMPILED = "_compiled_call_impl"
_COMPOSABLE = "__composable_api_state_key"  # where `fully_shard` stores its state
_OWN_NAMES = _INTERNAL | {_COMPILED}
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(
    (name, type(value))
    for name, value in vars(Module()).items()
    if isinstance(value, dict | set) and name not in _REGISTRIES
)
_GRADIENT = "_fmapper_gradient"  # an attribute of a gradient: None there means no_gradient
_SEQUENCES = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ParameterList)
_SETTINGS = frozenset({int, float, str, bool, type(None)})
_new: Callable[[type], Any] = object.__new__
_set = object.__setattr__


def node_type(cls: type) -> NodeType | None:
    """Returns the node type of a module class; None for every other class."""
    if not issubclass(cls, Module):
        return None
    if issubclass(cls, torch.jit.ScriptModule):
        return NodeType.from_opener(_refuse_script, _refuse_script)
    numbered = issubclass(cls, _SEQUENCES)
    wrapper = is_compiled(cls)
    is_fsdp = _is_fsdp(cls)
    lazy = issubclass(cls, torch.nn.modules.lazy.LazyModuleMixin)
    settings_only = _settings_only_of_class()

    def items(module: Any) -> list[tuple[Any, Any]]:
        state = module.__dict__
        children = [*state["_parameters"].items()]
        if state["_buffers"]:
            children += state["_buffers"].items()
        if state["_modules"]:
            children += state["_modules"].items()
        if _GRADIENT in state:
            children = [(name, no_gradient if x is None else x) for name, x in children]
        if numbered:
            names = _numbers(tuple([name for name, _ in children]))
            children = [(name, child) for name, (_, child) in zip(names, children, strict=True)]
        if not settings_only(state):
            children += _extra(state)
        return children

    def carried_attributes(module: Any) -> list[tuple[str, Any]]:
        return [] if settings_only(module.__dict__) else _carried_attributes(module)

    def open(module: Any, keep: Callable[[Any], None]) -> Any:
        attributes = module.__dict__
        if is_fsdp:
            _refuse_fsdp(module)
        if lazy:
            _refuse_lazy(module)
        state = attributes.copy()
        hooked = _own_hooks(state)
        if is_gradient():
            state[_GRADIENT] = True
        new: Any = _new(cls)
        _set(new, "__dict__", state)
        plain = settings_only(attributes)
        if hooked or not plain:
            _refer_anew(module, new, state, keep)
        parameters, modules = attributes["_parameters"], attributes["_modules"]
        if (
            attributes["_buffers"]
            or wrapper
            or _GRADIENT in attributes
            or not (plain or not _extra(attributes))
        ):
            pass
        elif parameters and not modules and not numbered:  # most common: a layer
            source = parameters.copy()
            keep(source)
            finish = partial(_fill_parameters, module, source, new, keep)
            return new, iter(source.items()), source.copy(), finish
        elif modules and not parameters:  # ... and a block of layers
            source = modules.copy()
            keep(source)
            finish = partial(_fill_modules, module, source, new, state)
            keys = _numbers(tuple(source)) if numbered else source
            return new, zip(keys, source.values(), strict=True), {}, finish
        children = items(module)
        keep(children)
        finish = partial(_fill, module, new, state, keep)
        return new, iter(children), {}, finish

    def passengers(module: Any) -> list[tuple[str, Any]]:
        if settings_only(module.__dict__):
            return []
        return [
            (name, value)
            for name, value in module.__dict__.items()
            if isinstance(value, torch.Generator)
        ]

    def static(module: Any) -> dict[str, Any]:
        state = module.__dict__
        beside = {name for name, _ in _extra(state)}.union(_REGISTRIES)
        return {name: value for name, value in state.items() if name not in beside}

    put = partial(_put, numbered)
    return NodeType.from_opener(
        open,
        items,
        carried=carried_attributes,
        put=put,
        passengers=passengers,
        static=static,
        box=lambda module: module.__dict__["_buffers"].items(),
        constants=getattr(cls, "constants_of_programs", None),
    )


def _put(numbered: bool, module: Any, children: Mapping[Any, Any]) -> None:
    """Replaces the children of a module in place."""
    state = module.__dict__
    tables = [state[registry] for registry in _REGISTRIES]
    for key, child in children.items():
        name = str(key) if numbered else key
        next((table for table in tables if name in table), state)[name] = child


def _carried_attributes(module: Any) -> list[tuple[str, Any]]:
    """Returns attributes of a module that are not children, settings or torch's own."""
    state = module.__dict__
    children = {name for name, _ in _extra(state)}
    return [
        (name, value)
        for name, value in state.items()
        if name not in _INTERNAL and name not in children and type(value) not in _SETTINGS
    ]


def _write_own_hooks() -> Callable[[dict[str, Any]], bool]:
    """Generates a function that copies the hook tables of a module, unrolled for speed.

    The function returns whether there are any hooks.
    """
    used = " or ".join(f"state[{name!r}]" for name, _ in _HOOKS)
    copies = "".join(f"        state[{name!r}] = state[{name!r}].copy()\n" for name, _ in _HOOKS)
    empty = "".join(f"        state[{name!r}] = {kind.__name__}()\n" for name, kind in _HOOKS)
    kinds = {kind.__name__: kind for _, kind in _HOOKS}
    parameters = ", ".join(f"{name}={name}" for name in kinds)
    scope: dict[str, Any] = dict(kinds)
    source = f"    if {used}:\n{copies}        return True\n{empty.replace('        ', '    ')}"
    exec(f"def own_hooks(state, {parameters}):\n{source}    return False", scope)
    written: Callable[[dict[str, Any]], bool] = scope["own_hooks"]
    return written


_own_hooks = _write_own_hooks()


def _extra(state: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the attributes of a module that hold arrays."""
    children = []
    for name, value in state.items():
        if type(value) not in _SETTINGS and name not in _INTERNAL:
            if issubclass(type(value), torch.ScriptObject):
                error = UnsupportedLeafError(
                    f".{name} is a TorchScript object, such as the packed weights of a quantized "
                    f"module, which cannot be moved. Move the module before you quantize it."
                )
                error.placed = False
                raise error
            if name != _COMPILED and not name.startswith(_COMPOSABLE) and _is_child(value):
                children.append((name, value))
    return children


def _settings_only_of_class() -> Callable[[dict[str, Any]], bool]:
    """Returns a fast check of whether all attributes of an instance are plain settings.

    The check is called often, and nearly always succeeds for the same names as before.
    """
    last: tuple[int, Callable[[dict[str, Any]], tuple[Any, ...]]] = (-1, tuple)
    are_settings = _SETTINGS.issuperset

    def settings_only(state: dict[str, Any]) -> bool:
        nonlocal last
        count, values = last
        if len(state) <= _OWN_STATE:
            return True
        try:
            if len(state) != count:
                raise KeyError
            attributes = values(state)
        except KeyError:  # other attributes than in the last call
            names = [name for name in state if name not in _INTERNAL]
            if not names:
                return True
            # One extra name, so that itemgetter always returns a tuple.
            last = len(state), itemgetter(names[0], *names)
            attributes = last[1](state)
        if are_settings(map(type, attributes)):
            return True
        return all(
            are_settings(map(type, x)) if type(x) is tuple else type(x) in _SETTINGS
            for x in attributes
        )

    return settings_only


def _number(name: str) -> int | str:
    return int(name) if name.isdecimal() and str(int(name)) == name else name


@lru_cache(1024)
def _numbers(names: tuple[str, ...]) -> tuple[int | str, ...]:
    return tuple(map(_number, names))


def _is_child(value: Any) -> bool:
    """Returns whether an attribute is an array or a container of arrays."""
    cls = type(value)  # `isinstance` would ask a value for its class, which configurations slow
    if issubclass(cls, torch.Tensor) or value is no_gradient:
        return True
    parts = value.values() if issubclass(cls, dict) else value
    if issubclass(cls, dict | list | tuple):
        if any(isinstance(part, Module) for part in parts):
            return True
        if all(type(part) in _SETTINGS or references.refers(part) for part in parts):
            return False
    if issubclass(cls, tuple | list) and all(type(item) in _SETTINGS for item in value):
        return False
    return is_dynamic(value) and holds_arrays(value)


Keep = Callable[[Any], None]


def _fill(old: Any, module: Any, state: dict[str, Any], keep: Keep, filled: dict[Any, Any]) -> Any:
    """Fills an opened module with its new children."""
    attributes = old.__dict__
    slots = dict(filled)
    parameters, buffers, modules = (attributes[registry] for registry in _REGISTRIES)
    if isinstance(old, _SEQUENCES):
        slots = {str(key): child for key, child in slots.items()}
    new_parameters = {name: slots.pop(name) for name in parameters}
    new_buffers = {name: slots.pop(name) for name in buffers}
    new_modules = {name: slots.pop(name) for name in modules}
    state.update(slots)
    _check_tensors(old, parameters, new_parameters, keep)
    _check_tensors(old, buffers, new_buffers, keep)
    _check_modules(old, new_modules)
    state["_parameters"] = new_parameters
    state["_buffers"] = new_buffers
    state["_modules"] = new_modules
    if is_compiled(type(module)):
        for name in ("forward", "_forward"):
            state.pop(name, None)
        _private.initialize_compiled(module)
    return module


def is_compiled(cls: type) -> bool:
    """Returns whether a class is that of `torch.compile(module)`, without importing dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and issubclass(cls, dynamo.OptimizedModule)


def _fill_parameters(
    old: Any, parameters: dict[str, Any], module: Any, keep: Keep, slots: dict[str, Any]
) -> Any:
    """Fills a module that has only parameters."""
    new = module.__dict__["_parameters"] = dict(slots)
    _check_tensors(old, parameters, new, keep)
    return module


def _check_tensors(old: Any, tensors: dict[str, Any], slots: dict[str, Any], keep: Keep) -> None:
    """Wraps replacements of parameters as parameters."""
    for name, new in slots.items():
        old_tensor = tensors[name]
        if new is not old_tensor and (
            type(new) is not type(old_tensor)
            or (
                type(new) is not torch.nn.Parameter
                and (
                    type(new) is not torch.Tensor
                    or parameter_standin.stands_for(old_tensor) is not None
                )
            )
        ):
            slots[name] = _tensor(old, name, old_tensor, new, keep)


def _fill_modules(
    old: Any, children: dict[str, Any], module: Any, state: dict[str, Any], slots: dict[Any, Any]
) -> Any:
    """Fills a module that has only submodules."""
    modules = state["_modules"] = dict(zip(children, slots.values(), strict=True))
    _check_modules(old, modules)
    return module


def _check_modules(old: Any, modules: dict[str, Any]) -> None:
    for name, new in modules.items():
        if not isinstance(new, Module) and new is not None:
            raise _unfit(old, name, new, "a module")


def _tensor(module: Any, name: str, old: Any, new: Any, keep: Keep) -> Any:
    """Returns the replacement of a parameter or buffer."""
    if type(new) is not torch.Tensor or type(old) is not torch.nn.Parameter:
        if new is old or new is None:
            return new
        if new is no_gradient:
            return None
        if not isinstance(new, torch.Tensor):
            raise _unfit(module, name, new, "a tensor")
        # Asks the class, since attributes of a tensor may run Python code.
        is_parameter = type(new) is not torch.Tensor and isinstance(new, torch.nn.Parameter)
        if is_parameter or parameter_standin.stands_for(old) is None:
            return new
    if is_gradient():
        return new
    if parameter_standin.is_differentiated(new):
        return parameter_standin.stand_in(new, old)
    return like(keep, new, old, as_parameter)


def _refer_anew(old: Any, new: Any, state: dict[str, Any], keep: Keep) -> None:
    """Redirects references from old modules to new ones, once all exist.

    These are bound methods, closures and weak references in attributes and hooks, and the compiled
    call of `module.compile()`.
    """
    tables = [name for name, _ in _HOOKS if state[name] and isinstance(state[name], dict)]
    names = [
        name
        for name, value in state.items()
        if type(value) not in _SETTINGS and name not in _OWN_NAMES and _may_refer(value)
    ]
    if state.get(_COMPILED) is not None:
        state[_COMPILED] = references.recompile(state[_COMPILED], new)
    if isinstance(new, torch.fx.GraphModule) and "_graph" in state:
        state["_graph"] = copy.deepcopy(state["_graph"])  # the graph refers to its module
        state["_graph"].owning_module = new
    if not names and not tables:
        return

    def rebind(new_of: Callable[[Any], Any]) -> None:
        renew = partial(_new_of, old, new, new_of)
        for table in tables:
            hooks = state[table]
            for key, hook in hooks.items():
                hooks[key] = references.rebind(hook, renew)
        for name in names:
            if isinstance(state[name], RemovableHandle):
                state[name] = _handle(state[name], old, state)
            elif name in state:
                state[name] = _rebind_items(state[name], renew)

    rebind(lambda x: x)
    at_end(keep, rebind)


def _new_of(old: Any, new: Any, new_of: Callable[[Any], Any], x: Any) -> Any:
    return new if x is old else new_of(x)


def _may_refer(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(references.refers, value))
    if type(value) in (dict, OrderedDict):
        return any(map(references.refers, value.values()))
    return isinstance(value, RemovableHandle) or references.refers(value)


def _rebind_items(value: Any, new_of: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)([references.rebind(item, new_of) for item in value])
    if type(value) in (dict, OrderedDict):
        return type(value)((key, references.rebind(item, new_of)) for key, item in value.items())
    return references.rebind(value, new_of)


def _handle(handle: Any, old: Any, state: dict[str, Any]) -> Any:
    """Returns a handle for the hook of the new module."""
    table = handle.hooks_dict_ref()
    for name, _ in _HOOKS:
        if table is not None and old.__dict__[name] is table:
            new = copy.copy(handle)
            new.hooks_dict_ref = weakref.ref(state[name])
            return new
    return handle


def _refuse_script(module: Any, keep: Any = None) -> Any:
    error = UnsupportedLeafError(
        f"{type(module).__name__} is a TorchScript program, which cannot be taken apart. Move the "
        "original module and script or trace the result; or move it in place with its own .to(...) "
        "and declare the class that holds it with @fmapper.functor(children=...)."
    )
    error.placed = False
    raise error


def _is_fsdp(cls: type) -> bool:
    """Returns whether a class was made by `fully_shard`, without importing it."""
    places = ((base.__name__, base.__module__) for base in cls.__mro__)
    return any(n == "FSDPModule" and m.startswith("torch.distributed") for n, m in places)


def _refuse_fsdp(module: Any) -> None:
    error = RebuildError(
        f"{type(module).__name__} is a module after fully_shard, which manages its parameters: "
        "a new module would not be sharded. Move, shard or fill the module first and call "
        "fully_shard on the result: fmapper.load(path, like=module, sharding=Sharding(mesh, rules, "
        'fsdp="data")) does both. If no weights are tied, you can also fill this one, '
        "module.load_state_dict(fmapper.load(path, like=module.state_dict()), assign=True). Both "
        "read only the shards of this process."
    )
    error.placed = False
    raise error


def _refuse_lazy(module: Any) -> None:
    if module.has_uninitialized_params():
        error = RebuildError(
            f"{type(module).__name__} is a lazy module whose parameters have no shapes yet: run "
            "the module once first."
        )
        error.placed = False
        raise error


def _unfit(module: Any, name: str, new: Any, wanted: str) -> RebuildError:
    error = RebuildError(
        f"{type(module).__name__}.{name} must be {wanted}, not "
        f"{type(new).__module__}.{type(new).__name__}: a torch module can hold only torch tensors. "
        "Move its arrays with fmapper.state(module), or convert the whole module to the other "
        "framework with fmapper.convert(module, ...)."
    )
    error.placed = False
    return error
