"""Arguments that set the mode of a model, such as `train=True`, and are set for a recording."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

# Whether the argument is true in training.
_NAMES = {
    "train": True,
    "training": True,
    "is_training": True,
    "is_train": True,
    "deterministic": False,
    "use_running_average": False,
}


def find_flags(
    function: Callable[..., Any] | None, skipped: int, args: tuple[Any, ...], own: Any = None
) -> dict[str, tuple[bool, int | None]]:
    """Returns the parameters of a function that set its mode.

    Args:
        function: The function.
        skipped: The number of its first parameters that are not arguments of the model.
        args: The positional arguments.
        own: An object whose attributes may set the mode too: then a parameter with the default None
            does not count.

    Returns:
        Name -> its value in training, and its position in `args`, or None.
    """
    if function is None:
        return {}
    try:
        parameters = list(inspect.signature(function).parameters.values())[skipped:]
    except (TypeError, ValueError):  # of a builtin
        return {}
    found: dict[str, tuple[bool, int | None]] = {}
    for i, p in enumerate(parameters):
        if p.name not in _NAMES or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        says_none = p.default is None and (own is None or getattr(own, p.name, None) is not None)
        is_mode = p.default is p.empty or isinstance(p.default, bool) or p.default is None
        if is_mode and not says_none:
            positional = p.kind is not p.KEYWORD_ONLY and i < len(args)
            found[p.name] = _NAMES[p.name], i if positional else None
    return found


def mode_of(
    modes: Mapping[str, tuple[bool, int | None]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool | None:
    """Returns whether the examples ask for training; None if they leave it open."""
    for name, (in_training, position) in modes.items():
        value = kwargs.get(name) if position is None else args[position]
        if isinstance(value, bool):
            return value is in_training
    return None


def set_mode(
    source: Any,
    modes: Mapping[str, tuple[bool, int | None]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool,
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Returns a model and its arguments with the mode set.

    An argument that the examples lack is added. It may be passed to the converted model too, with
    the value that it had in the recording.
    """
    if not modes:
        return source, args, kwargs
    values = {name: train is in_training for name, (in_training, _) in modes.items()}
    new_args, new_kwargs, added = list(args), dict(kwargs), {}
    for name, (_, position) in modes.items():
        if position is not None:
            if isinstance(args[position], bool):
                new_args[position] = values[name]
        elif name in kwargs:
            if isinstance(kwargs[name], bool):
                new_kwargs[name] = values[name]
        else:
            added[name] = values[name]
    call = source.call

    def with_mode(params: Any, buffers: Any, *inner: Any, **named: Any) -> Any:
        return call(params, buffers, *inner, **{**added, **named})

    found = dataclasses.replace(source, call=with_mode, defaults={**source.defaults, **values})
    return found, tuple(new_args), new_kwargs
