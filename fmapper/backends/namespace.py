"""The array API namespace of a tree, so that a forward pass is written once."""

from __future__ import annotations

from typing import Any

from fmapper.backends.discovery import adapter_of
from fmapper.errors import MixedDevicesError
from fmapper.tree.keypath import format_link
from fmapper.tree.nodes import sync
from fmapper.tree.walk import visit


def array_namespace(tree: Any) -> Any:
    """Returns the array API namespace of the arrays in a tree.

    Args:
        tree: An array, or a tree with arrays of one backend.

    Returns:
        The namespace that array-api-compat has for that backend: `xp.exp`, `xp.concat`,
        `xp.linalg` ... as https://data-apis.org/array-api specifies them.

    Raises:
        MixedDevicesError: The arrays belong to several backends; the message lists the paths.
        TypeError: There are no arrays.

    Examples:
        >>> import fmapper, numpy as np
        >>> xp = fmapper.array_namespace({"w": np.ones(2)})
        >>> xp.concat([np.ones(1), np.zeros(1)])
        array([1., 0.])
    """
    from array_api_compat import array_namespace as of_arrays

    if adapter_of(tree) is not None:
        return of_arrays(tree)
    sync()
    first: dict[str, tuple[str, Any]] = {}
    for link, leaf, kind in visit(tree, once=True):
        adapter = adapter_of(leaf) if kind is None else None
        if adapter is not None and adapter.name not in first:
            first[adapter.name] = (format_link(link), leaf)
    if len(first) > 1:
        places = ", ".join(f"{name} at {path}" for name, (path, _) in first.items())
        raise MixedDevicesError(
            f"the arrays of this tree belong to several backends: {places}. "
            "Move them to one first: to_torch, to_jax or to_numpy."
        )
    if not first:
        raise TypeError(
            f"array_namespace: this {type(tree).__name__} holds no arrays. "
            "Pass an array, or a functor that holds arrays."
        )
    return of_arrays(next(iter(first.values()))[1])
