"""The arguments of constructors that are what they usually are, and are not written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from fmapper.translation import Class, literal, text

# The file's own layers -> the keywords that they have other defaults for than those of Flax.
_OF_LAYERS: dict[str, dict[str, object]] = {
    "Conv": {"padding": 0},
    "ConvTranspose": {"transpose_kernel": True},
    "BatchNorm": {"momentum": 0.9},
}
_OF_CLASSES: dict[str, object] = {
    "strides": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "use_bias": True,
}


def omit_defaults(classes: Sequence[Class]) -> dict[str, dict[str, object]]:
    """Removes arguments that are the defaults of what they are given to.

    Args:
        classes: The classes of the file; the code of their constructors is changed.

    Returns:
        The defaults that the constructors of these classes have.
    """
    calls = [one for cls in classes for _, node in cls.sketch.made for one in _calls(node)]
    found: dict[str, dict[str, object]] = {}
    for cls in classes:
        own = [call for call in calls if text(call.func) == cls.name]
        for name in cls.parameters:
            given = [key.value for call in own for key in call.keywords if key.arg == name]
            usual = _OF_CLASSES.get(re.sub(r"_\d+$", "", name), False)
            is_told = any(text(one) == text(literal(usual)) for one in given)
            if own and len(given) == len(own) and is_told:
                found.setdefault(cls.name, {})[name] = usual
    for call in calls:
        kind = text(call.func)
        known = {
            key: text(literal(value))
            for key, value in (_OF_LAYERS.get(kind) or found.get(kind, {})).items()
        }
        call.keywords = [one for one in call.keywords if known.get(str(one.arg)) != text(one.value)]
    return found


def _calls(node: ast.expr) -> Iterator[ast.Call]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))
