"""Names classes for sequences of the same layers that functions of a model create."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from fmapper.programs.reading.settings import Settings, settings_of

_LEAST = 3  # sequences by one function that share a class
_LAYERS = 2  # layers of each
_DIGIT = re.compile(r"\d")
_WORDS = ("make_", "build_", "create_", "get_")


def titles_of_sequences(
    modules: Iterable[tuple[str, Any]],
    layers: Mapping[str, tuple[Hashable, ...]],
    memo: dict[int, Settings],
    named: Mapping[str, Hashable],
) -> dict[str, str]:
    """Maps the paths of sequences that functions created to names for their classes.

    Args:
        modules: The modules of a model by path, whose constructors may have created some.
        layers: The paths of sequences of layers alone -> the classes of these.
        memo: The settings of modules, to which new ones are added.
        named: The paths of sequences whose parts have names -> these names, and their classes.
    """
    makers: dict[str, str] = {}
    for path, module in modules:
        for part, function in settings_of(module, memo).makers.items():
            place = f"{path}.{part}" if path else part
            if len(layers.get(place, ())) >= _LAYERS or place in named:
                makers.setdefault(place, function)
    alike: dict[Hashable, list[str]] = {}
    for place in makers.keys() & named.keys():
        alike.setdefault(named[place], []).append(makers.pop(place))
    every = Counter(named.values())
    titles = {
        form: _common_title(functions, is_all=every[form] == len(functions))
        for form, functions in alike.items()
    }
    kinds: dict[str, set[Hashable]] = {}
    for place, function in makers.items():
        kinds.setdefault(function, set()).add(layers[place])
    counts = Counter(makers.values())
    sequences = {
        place: title_of_function(function)
        for place, function in makers.items()
        if counts[function] >= _LEAST and len(kinds[function]) == 1
    }
    return sequences | {place: titles[form] for place, form in named.items() if titles.get(form)}


def _common_title(functions: Sequence[str], *, is_all: bool) -> str:
    """Returns a title of the words that all functions have: `ConvBn` for `conv_1x1_bn` and others.

    Args:
        functions: The known functions.
        is_all: Whether these are all; further ones may have other sizes in their names.

    Returns:
        The title; empty if they have no words in common.
    """
    rows = [function.split("_") for function in functions]
    common = [
        word
        for word in min(rows, key=len)
        if all(word in row for row in rows) and (is_all or not _DIGIT.search(word))
    ]
    return title_of_function("_".join(common)) if any(common) else ""


def title_of_function(function: str) -> str:
    """Returns the name of a class for the results of a function.

    Examples:
        >>> title_of_function("_make_conv_bn"), title_of_function("_3x3")
        ('ConvBn', 'Sequence3x3')
    """
    name = function.strip("_")
    for word in _WORDS:
        name = name.removeprefix(word) or name
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    return title if title.isidentifier() else f"Sequence{title}"


def class_name(name: str) -> str:
    """Returns the name of a class after a function or a path.

    Examples:
        >>> class_name("layer_norm"), class_name("_mlp"), class_name("ViT")
        ('LayerNorm', 'Mlp', 'ViT')
    """
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))
