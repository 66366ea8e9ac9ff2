"""The arguments of a call by parameter name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Arguments:
    """The arguments of a call.

    Attributes:
        values: Values by name, in the order of the signature; those of `**kwargs` last.
        prefix: How many can be passed by position: those before the first omitted one.
        positional: How many were passed by position.
    """

    values: dict[str, Any] = field(default_factory=dict)
    prefix: int = 0
    positional: int = 0


def arguments_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Arguments:
    """Returns the arguments of a call by name; those of `*args` are numbered.

    Examples:
        >>> def attend(x, mask=None, scale=1.0, *, causal=False): ...
        >>> arguments_of(attend, (1,), {"causal": True, "scale": 2.0})
        Arguments(values={'x': 1, 'scale': 2.0, 'causal': True}, prefix=1, positional=1)
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    arguments = Arguments()
    left, named = list(args), dict(kwargs)
    is_gapless = True
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            _take(arguments, parameter.name, left)
            left, is_gapless = [], False
        elif left and parameter.kind is not parameter.KEYWORD_ONLY:
            arguments.values[parameter.name] = left.pop(0)
            arguments.prefix += 1
            arguments.positional += 1
        elif parameter.name in named and parameter.kind is not parameter.VAR_KEYWORD:
            arguments.values[parameter.name] = named.pop(parameter.name)
            arguments.prefix += is_gapless and parameter.kind is not parameter.KEYWORD_ONLY
        else:
            is_gapless = False
    _take(arguments, "input", left)
    arguments.values |= named
    return arguments


def _take(arguments: Arguments, name: str, left: Sequence[Any]) -> None:
    """Adds further positional arguments."""
    arguments.values |= {f"{name}_{i}": value for i, value in enumerate(left)}
    arguments.prefix += len(left)
    arguments.positional += len(left)
