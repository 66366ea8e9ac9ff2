"""Flags for what the attributes of submodules of one class differ in, where none is a flag.

Those say what the constructor was given: `window=None` or 8, `shift=0` or 4, `kind="local"`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmapper.translation.classes import Sketch

_MOST = 4  # words between which an attribute chooses
_LONGEST = 24  # characters of a word in a name
_NONE = "None"


def find_differences(sketches: Sequence[Sketch]) -> list[dict[str, bool]]:
    """Returns flags for each sketch of one class.

    Examples:
        >>> from fmapper.translation.classes import Sketch
        >>> local = Sketch("0", "Attention", numbers={"window": 8}, words={"kind": "near"})
        >>> whole = Sketch("1", "Attention", words={"kind": "far", "window": "None"})
        >>> find_differences([local, whole])[1]
        {'is_far': True, 'is_near': False, 'has_window': False}
    """
    settings: list[Mapping[str, Any]] = [{**one.words, **one.numbers} for one in sketches]
    found: list[dict[str, bool]] = [{} for _ in sketches]
    for key in sorted({key for one in settings for key in one}):
        values = [one.get(key, _NONE) for one in settings]
        for flag, row in _flags_for(key, values):
            if len({*row}) > 1:
                for flags, value in zip(found, row, strict=True):
                    flags.setdefault(flag, value)
    return found


def flags_of_parts(sketch: Sketch) -> dict[str, bool]:
    """Returns the flags that the constructor gives to parts of classes of the file."""
    found: dict[str, set[bool]] = {}
    for _, node in sketch.made:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                for one in call.keywords:
                    if isinstance(one.value, ast.Constant) and type(one.value.value) is bool:
                        found.setdefault(str(one.arg), set()).add(one.value.value)
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def _flags_for(key: str, values: Sequence[Any]) -> list[tuple[str, list[bool]]]:
    """Returns flags, each with its values, for the values of an attribute."""
    if {*values} <= {"True", "False"}:
        return [(key, [one == "True" for one in values])]
    found = [(f"has_{key}", [one not in (_NONE, 0) for one in values])]
    plain = (_NONE, "True", "False")
    words = sorted({one for one in values if isinstance(one, str) and one not in plain})
    if len(words) <= _MOST:
        for word in words:
            name = f"is_{word}".replace("-", "_")
            if name.isidentifier() and len(name) <= _LONGEST:
                found.append((name, [one == word for one in values]))
    return found
