"""Classes for what functions of a model make: several sequences of the same layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from fmapper.translation.constructors.reading import Settings, settings_of

_LEAST = 3  # sequences by one function, which are of one class then
_LAYERS = 2  # of each
_WORDS = ("make_", "build_", "create_", "get_")


def titles_of_sequences(
    modules: Iterable[tuple[str, Any]],
    layers: Mapping[str, tuple[Hashable, ...]],
    known: dict[int, Settings],
) -> dict[str, str]:
    """Maps the paths of sequences that one function has made to what their class is called.

    Args:
        modules: The modules of a model by path, each of which may have made some.
        layers: The paths of sequences of layers alone -> the classes of these.
        known: The settings that are known; they are added to.
    """
    makers: dict[str, str] = {}
    for path, module in modules:
        for part, function in settings_of(module, known).makers.items():
            place = f"{path}.{part}" if path else part
            if len(layers.get(place, ())) >= _LAYERS:
                makers.setdefault(place, function)
    kinds: dict[str, set[Hashable]] = {}
    for place, function in makers.items():
        kinds.setdefault(function, set()).add(layers[place])
    counts = Counter(makers.values())
    return {
        place: title_of_function(function)
        for place, function in makers.items()
        if counts[function] >= _LEAST and len(kinds[function]) == 1
    }


def title_of_function(function: str) -> str:
    """Returns what a class for the results of a function is called.

    Examples:
        >>> title_of_function("_make_conv_bn"), title_of_function("_3x3")
        ('ConvBn', 'Sequence3x3')
    """
    name = function.strip("_")
    for word in _WORDS:
        name = name.removeprefix(word) or name
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    return title if title.isidentifier() else f"Sequence{title}"
