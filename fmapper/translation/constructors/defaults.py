"""The arguments of constructors that are what they usually are, and are not written."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fmapper.translation.code import literal, text

if TYPE_CHECKING:
    from fmapper.translation.classes import Class

Defaults = Mapping[str, Mapping[str, object]]
_USUAL: dict[str, object] = {
    "stride": 1,
    "strides": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "use_bias": True,
    "bias": True,
}


def omit_defaults(
    classes: Sequence[Class], layers: Defaults | None = None
) -> dict[str, dict[str, object]]:
    """Removes arguments that are the defaults of what they are given to.

    Arguments of the file's own classes have the defaults of the source where a call gives those.
    Other flags have what most of their calls give them.

    Args:
        classes: The classes of the file; the code of their constructors is changed.
        layers: Further classes -> what their keywords are where they are not given.

    Returns:
        The defaults that the constructors of these classes have.
    """
    calls = [one for cls in classes for _, node in cls.sketch.made for one in _calls(node)]
    found: dict[str, dict[str, object]] = {}
    for cls in classes:
        own = [call for call in calls if text(call.func) == cls.name]
        by_name = [{str(k.arg): text(k.value) for k in call.keywords} for call in own]
        told = [{**dict(zip(cls.parameters, map(text, call.args), strict=False)), **keys}
                for call, keys in zip(own, by_name, strict=True)]  # fmt: skip
        for name in cls.parameters if own else ():
            default = cls.sketch.defaults.get(name)
            rows = by_name if default is None else told
            given = [row[name] for row in rows if name in row]
            usual = _usual(name, given) if default is None else default
            if len(given) == len(own) and text(literal(usual)) in given:
                found.setdefault(cls.name, {})[name] = usual
        for call in own if cls.name in found else ():
            _give_by_name(call, cls.parameters, found[cls.name])
    for call in calls:
        kind = text(call.func)
        known = {
            key: text(literal(value))
            for key, value in ((layers or {}).get(kind) or found.get(kind, {})).items()
        }
        call.keywords = [one for one in call.keywords if known.get(str(one.arg)) != text(one.value)]
    return found


def _give_by_name(call: ast.Call, parameters: Sequence[str], usual: Mapping[str, object]) -> None:
    """Gives by name the arguments that have defaults, and what is given after these."""
    first = next((at for at, name in enumerate(parameters) if name in usual), len(parameters))
    late = zip(parameters[first:], call.args[first:], strict=False)
    call.keywords = [*(ast.keyword(name, node) for name, node in late), *call.keywords]
    call.args = call.args[:first]


def _usual(name: str, given: Sequence[str]) -> object:
    """Returns the default of a parameter that is given these values."""
    known = _USUAL.get(re.sub(r"_\d+$", "", name))
    flags = Counter(one for one in given if one in ("True", "False"))
    return flags["True"] > flags["False"] if known is None else known


def print_parameters(cls: Class, defaults: Mapping[str, object]) -> list[str]:
    """Returns the parameters of a constructor, those with defaults last."""
    own = [name for name in cls.parameters if name not in defaults]
    return own + [f"{name}={value!r}" for name, value in defaults.items()]


def _calls(node: ast.expr) -> Iterator[ast.Call]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))
