"""Node types of optimizers, learning rate schedulers and gradient scalers."""

from __future__ import annotations

import functools
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fmapper import RebuildError
from fmapper.backends import Aside, NodeType, holds_arrays, is_dynamic
from fmapper_adapters.torch import _private

_new: Callable[[type], Any] = object.__new__
_PLAIN = (dict, list, set, Counter, defaultdict)
_OWN = frozenset({"state", "param_groups", "defaults"})
_PER_OPTIMIZER = "_per_optimizer_states"
_HOSTED = "step"  # the only entry of a state that need not be on the parameter's device


def node_type(cls: type) -> NodeType | None:
    """Returns the node type of an optimizer, scheduler or gradient scaler class, or None."""
    if issubclass(cls, Optimizer) and not isinstance(getattr(cls, "param_groups", None), property):
        return NodeType(
            _children,
            shell=_shell,
            fill=_fill,
            carried=_carried_attributes,
            borrowed=("params",),
            aside=_steps,
            follows=_moments,
            put=_put,
        )
    if issubclass(cls, Optimizer):  # a wrapper shares the tables of its optimizer
        return NodeType(
            _attributes, shell=_shell, fill=_fill_attributes, carried=_rest, put=_put_attributes
        )
    if issubclass(cls, LRScheduler):
        return NodeType(
            _attributes, shell=_shell, fill=_fill_attributes, carried=_rest, put=_put_attributes
        )
    if issubclass(cls, torch.amp.GradScaler):
        return NodeType(
            _attributes,
            shell=_shell,
            fill=_fill_scaler,
            carried=_rest,
            aside=_scales,
            put=_put_attributes,
        )
    return None


# --- optimizers ---------------------------------------------------------------------------------


def _children(optimizer: Any) -> dict[str, Any]:
    """Returns the parameters by group, and the state by parameter number as in `state_dict()`.

    Other entries of the groups are settings, unless they are tensors.
    """
    groups = optimizer.param_groups
    children: dict[str, Any] = {"params": [list(group["params"]) for group in groups]}
    options = [{key: v for key, v in group.items() if _is_option(key, v)} for group in groups]
    if any(options):
        children["param_groups"] = options
    numbers = _numbers(optimizer)
    state: dict[Any, Any] = {}
    strangers = []
    for key, entries in optimizer.state.items():
        if isinstance(key, torch.Tensor) and id(key) not in numbers:
            numbers[id(key)] = len(numbers)
            strangers.append(key)
        held = entries
        if isinstance(entries, dict):
            held = {name: value for name, value in entries.items() if _is_held(value)}
        elif not _is_held(entries):
            continue
        state[numbers.get(id(key), key)] = held
    if state:
        children["state"] = state
    if strangers:  # they have a state, but are no longer in a group
        children["strangers"] = strangers
    return children | dict(_extra(optimizer))


def _numbers(optimizer: Any) -> dict[int, int]:
    numbers: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    return numbers


def _is_option(key: Any, value: Any) -> bool:
    return key != "params" and _is_held(value)


def _is_held(value: Any) -> bool:
    """Returns whether a value is an array, or a container or another node that holds one."""
    if isinstance(value, torch.Tensor):
        return True
    if value is None or isinstance(value, int | float | str):
        return False
    if isinstance(value, Optimizer | LRScheduler):
        return True
    return is_dynamic(value) and holds_arrays(value)


def _extra(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of subclasses: a list of all parameters, a wrapped optimizer, ..."""
    numbers = _numbers(optimizer)
    for name, value in vars(optimizer).items():
        if name not in _OWN and not _is_list_of(value, numbers) and _is_held(value):
            yield name, value


def _is_list_of(value: Any, numbers: Mapping[int, int]) -> bool:
    """Returns whether a value is a list of parameters from the groups, which LBFGS keeps."""
    return isinstance(value, list | tuple) and all(id(item) in numbers for item in value)


def _carried_attributes(optimizer: Any) -> list[tuple[str, Any]]:
    held = {name for name, _ in _extra(optimizer)}
    numbers = _numbers(optimizer)
    return [
        (name, value)
        for name, value in vars(optimizer).items()
        if name not in _OWN
        and name not in held
        and name != "step"
        and "_hooks" not in name
        and not _is_list_of(value, numbers)
    ]


def _shell(node: Any) -> Any:
    new = _new(type(node))
    new.__dict__.update(node.__dict__)
    return new


def _steps(optimizer: Any) -> Iterable[tuple[Any, Aside]]:
    """Yields the step counters, each with its rule: never cast, and usually kept on the CPU."""
    rule: dict[int, Aside] = {}
    for group in optimizer.param_groups:
        on_device = group.get("capturable", False) or group.get("fused", False)
        for parameter in group["params"]:
            rule.setdefault(id(parameter), Aside.UNCAST if on_device else Aside.STAYS)
    for key, entries in optimizer.state.items():
        step = entries.get(_HOSTED) if isinstance(entries, dict) else None
        if isinstance(step, torch.Tensor):
            yield step, rule.get(id(key), Aside.STAYS)


def _moments(optimizer: Any) -> Iterable[tuple[Any, Any]]:
    """Yields the state of each parameter, with the parameter."""
    for key, entries in optimizer.state.items():
        if isinstance(key, torch.Tensor) and isinstance(entries, dict):
            for name, value in entries.items():
                if isinstance(value, torch.Tensor) and name != _HOSTED:
                    yield value, key


def _put(optimizer: Any, children: Mapping[str, Any]) -> None:
    """Replaces the children of an optimizer in place; hooks and `step` stay."""
    new = _shell(optimizer)
    _fill(new, optimizer, children)
    made = vars(new)
    for name, value in vars(optimizer).items():
        if name in _OWN or name in children or isinstance(value, list | tuple):
            vars(optimizer)[name] = made[name]


def _put_attributes(node: Any, children: Mapping[str, Any]) -> None:
    vars(node).update(children)


def _fill(new: Any, old: Any, slots: Mapping[str, Any]) -> None:
    """Fills an empty optimizer with its new children."""
    children = dict(slots)
    renewed: dict[int, Any] = {}
    groups = []
    options = children.pop("param_groups", [{}] * len(old.param_groups))
    params = children.pop("params")
    for group, parameters, changed in zip(old.param_groups, params, options, strict=True):
        renewed.update(zip(map(id, group["params"]), parameters, strict=True))
        settings = {
            key: value.copy() if type(value) in _PLAIN else value for key, value in group.items()
        }
        groups.append(settings | {"params": list(parameters)} | changed)
    by_number = children.pop("state", {})
    strangers = iter(children.pop("strangers", ()))
    numbers = _numbers(old)
    state: Any = old.state.copy()
    state.clear()
    for key, entries in old.state.items():
        is_tensor = isinstance(key, torch.Tensor)
        if is_tensor and id(key) not in numbers:
            numbers[id(key)] = len(numbers)
            renewed[id(key)] = next(strangers)
        new_key = renewed[id(key)] if is_tensor else key
        held = by_number.get(numbers[id(key)] if is_tensor else key)
        if isinstance(entries, dict):
            state[new_key] = _entries(entries, held, moved=new_key is not key)
        else:
            state[new_key] = entries if held is None else held
    made = vars(new)
    made.update(children)
    for name, value in vars(old).items():
        if name not in _OWN and name not in children and _is_list_of(value, numbers):
            same = [at for at, group in enumerate(old.param_groups) if group["params"] is value]
            renewed_list = type(value)([renewed[id(item)] for item in value])
            made[name] = groups[same[0]]["params"] if same else renewed_list
    made["defaults"] = dict(old.defaults)
    made["param_groups"], made["state"] = groups, state
    for name, value in vars(old).items():
        if isinstance(value, dict) and name not in children and name not in _OWN:
            made[name] = value.copy()  # hooks
    for name, value in children.items():  # a wrapper shares its tables with the optimizer
        before = getattr(old, name)
        if isinstance(before, Optimizer):
            for table in _OWN:
                if getattr(before, table, None) is getattr(old, table):
                    made[table] = getattr(value, table)
    if "step" in made:
        made["step"] = _own_step(made["step"], old, new)


def _entries(old: dict[Any, Any], held: Any, *, moved: bool) -> dict[Any, Any]:
    """Returns the state of one parameter, with a copy of a counter that did not move."""
    new = old | (held or {})
    step = new.get(_HOSTED)
    if moved and step is old.get(_HOSTED) and isinstance(step, torch.Tensor):
        new[_HOSTED] = step.clone()
    return {
        key: value.copy() if value is old[key] and type(value) in _PLAIN else value
        for key, value in new.items()
    }


def _own_step(step: Any, old: Any, new: Any) -> Any:
    """Moves a `step` that schedulers or users have replaced to another optimizer."""
    if _private.is_scheduled(step):
        # It refers weakly to the old optimizer; a scheduler creates a new reference.
        bare = getattr(step, "__wrapped__", type(old).step)
        reference = weakref.ref(new)

        @functools.wraps(bare)
        def track(*args: Any, **kwargs: Any) -> Any:
            optimizer = reference()
            assert optimizer is not None
            _private.note_step(optimizer)
            return bare.__get__(optimizer, type(optimizer))(*args, **kwargs)

        _private.mark_scheduled(track)
        return track
    if isinstance(step, types.MethodType) and step.__self__ is old:
        return types.MethodType(step.__func__, new)
    return step


# --- schedulers and scalers ---------------------------------------------------------------------


def _attributes(node: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(node).items()
        if name != _PER_OPTIMIZER and _is_held(value)
    }


def _rest(node: Any) -> list[tuple[str, Any]]:
    held = {*_attributes(node), _PER_OPTIMIZER, "step"}
    return [(name, value) for name, value in vars(node).items() if name not in held]


def _fill_attributes(new: Any, old: Any, slots: Mapping[str, Any]) -> None:
    made = vars(new)
    for name, value in vars(old).items():
        if name in slots:
            made[name] = slots[name]
        elif type(value) in _PLAIN:
            made[name] = value.copy()
        elif isinstance(value, types.MethodType) and value.__self__ is old:
            made[name] = types.MethodType(value.__func__, new)


def _scales(scaler: Any) -> Iterable[tuple[Any, Aside]]:
    """Returns the scales, which are always float32."""
    return [(v, Aside.UNCAST) for v in vars(scaler).values() if isinstance(v, torch.Tensor)]


def _fill_scaler(new: Any, old: Any, slots: Mapping[str, Any]) -> None:
    _fill_attributes(new, old, slots)
    scale = slots.get("_scale")
    if isinstance(scale, torch.Tensor):
        new._device = scale.device.type
    if vars(old).get(_PER_OPTIMIZER):  # keyed by the identity of the old optimizer
        error = RebuildError(
            f"{type(old).__name__} is in the middle of a step, because it has unscaled the "
            f"gradients of an optimizer. Move it after scaler.update()."
        )
        error.placed = False
        raise error
