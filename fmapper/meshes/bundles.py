"""Names of arrays in bundles, such as a model with its optimizer state, for rules to match."""

from __future__ import annotations

from typing import Any

from fmapper.backends.discovery import adapter_of
from fmapper.tree.keypath import BoxKey, KeyPath
from fmapper.tree.walk import visit

Keys = tuple[object, ...]


def names_in_bundle(tree: Any) -> dict[str, str]:
    """Returns the names that change when indices outside the model are removed.

    A moment of an optimizer has the name and the shape of its parameter, below a path in another
    item of the bundle. The indices in that path number transformations, not layers; nor does the
    index of the model in a tuple.

    Examples:
        >>> import numpy as np
        >>> layers = [{"w": np.ones(2)}, {"w": np.ones(2)}]
        >>> names_in_bundle((layers, ({"mu": layers},)))["1.0.mu.1.w"]
        'mu.1.w'
    """
    places: list[tuple[Keys, tuple[str, ...], Any]] = []
    items_with: dict[tuple[tuple[str, ...], Any], set[object]] = {}
    for link, array, kind in visit(tree):
        adapter = adapter_of(array) if kind is None else None
        if adapter is None:
            continue
        keys = tuple(key for key in KeyPath.from_link(link).keys if type(key) is not BoxKey)
        if len(keys) < 2:
            continue
        text, shape = tuple(map(str, keys)), adapter.shape(array)
        places.append((keys, text, shape))
        items_with.setdefault((text[1:], shape), set()).add(keys[0])
    outer: list[int | None] = []
    models: set[object] = set()
    for keys, text, shape in places:
        split = None
        for at in range(2, len(keys)):
            leads = items_with.get((text[at:], shape), set()) - {keys[0]}
            if leads:
                models |= leads
                split = at
                break
        outer.append(split)
    if not models:
        return {}
    named = {}
    for (keys, text, _), split in zip(places, outer, strict=True):
        inner = 1 if keys[0] in models else _leading_indices(keys)  # the model's, or a count
        end = inner if split is None else split
        kept = [name for i, name in enumerate(text) if i >= end or not _is_index(keys[i])]
        if len(kept) < len(text):
            named[".".join(text)] = ".".join(kept)
    return named


def _leading_indices(keys: Keys) -> int:
    """Returns the number of keys up to the end of the indices that follow the first key."""
    return next((i for i, key in enumerate(keys) if i and not _is_index(key)), len(keys) - 1)


def _is_index(key: object) -> bool:
    return isinstance(key, int)
