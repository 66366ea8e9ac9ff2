"""Arguments that set the mode of a model, such as `train=True`, and are set for a recording."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Argument -> its value in training.
NAMES = {
    "train": True,
    "training": True,
    "is_training": True,
    "is_train": True,
    "deterministic": False,
    "use_running_average": False,
    "inference": False,
}


@dataclass(frozen=True, slots=True)
class Flag:
    """An argument that sets the mode of a model.

    Attributes:
        in_training: Its value in training.
        position: Its position in the positional arguments; None if it is not among them.
        default: The value of a call that leaves it out; None if that is not a bool.
    """

    in_training: bool
    position: int | None
    default: bool | None


def find_flags(
    function: Callable[..., Any] | None, skipped: int, args: tuple[Any, ...], owner: Any = None
) -> dict[str, Flag]:
    """Returns the parameters of a function that set its mode, by name.

    Args:
        function: The function.
        skipped: The number of its first parameters that are not arguments of the model.
        args: The positional arguments.
        owner: An object whose attributes may set the mode too: then a parameter with the default
            None does not count.
    """
    if function is None:
        return {}
    try:
        parameters = list(inspect.signature(function).parameters.values())[skipped:]
    except (TypeError, ValueError):  # of a builtin
        return {}
    flags: dict[str, Flag] = {}
    for i, p in enumerate(parameters):
        if p.name not in NAMES or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        says_none = p.default is None and (
            owner is None or getattr(owner, p.name, None) is not None
        )
        is_mode = p.default is p.empty or isinstance(p.default, bool) or p.default is None
        if is_mode and not says_none:
            positional = p.kind is not p.KEYWORD_ONLY and i < len(args)
            default = p.default if isinstance(p.default, bool) else None
            flags[p.name] = Flag(NAMES[p.name], i if positional else None, default)
    return flags


def modes_of_call(
    flags: Mapping[str, Flag], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, bool]:
    """Returns whether the flags of a call ask for training, by argument and value.

    Arguments that the call leaves out have their defaults.
    """
    modes = {}
    for name, flag in flags.items():
        value = kwargs.get(name) if flag.position is None else args[flag.position]
        if value is None:
            value = flag.default
        if isinstance(value, bool):
            modes[f"{name}={value}"] = value is flag.in_training
    return modes


def set_mode(
    source: Any,
    flags: Mapping[str, Flag],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool | None,
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Returns a model and its arguments with the mode set; None leaves that to the call.

    An argument that the examples lack is added. It may be passed to the converted model too, with
    the value that it had in the recording.
    """
    if not flags or train is None:
        return source, args, kwargs
    values = {name: train is flag.in_training for name, flag in flags.items()}
    new_args, new_kwargs, added = list(args), dict(kwargs), {}
    for name, flag in flags.items():
        if flag.position is not None:
            if isinstance(args[flag.position], bool):
                new_args[flag.position] = values[name]
        elif name in kwargs:
            if isinstance(kwargs[name], bool):
                new_kwargs[name] = values[name]
        else:
            added[name] = values[name]
    call = source.call

    def with_mode(params: Any, buffers: Any, *inner: Any, **named: Any) -> Any:
        return call(params, buffers, *inner, **{**added, **named})

    new_source = dataclasses.replace(source, call=with_mode, defaults={**source.defaults, **values})
    return new_source, tuple(new_args), new_kwargs
