"""Opens translated files of functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.trials.dropout import Dropout


def open_file(
    net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
) -> tuple[Any, dict[str, Any]]:
    """Returns a function with its parameters, and what a call takes by keyword.

    Buffers are inputs, which nothing trains. Its dropout is one of layers, which a trial can leave
    out.
    """
    function = getattr(net, name)
    drop = getattr(net, "dropout", None)
    if drop is not None and not isinstance(drop, _Dropping):
        vars(net)["dropout"] = _Dropping(drop)
    options = key_for(function) if train else {}
    if not hasattr(net, "load_weights"):
        return (lambda _, *args, **kwargs: function(*args, **kwargs), {}), options
    trees = _initial(getattr(net, f"init_{name}"))
    trees = net.load_weights(trees, jax.tree.map(jnp.asarray, dict(weights)))
    if not hasattr(net, "BUFFERS"):
        return (function, trees), options

    def call(params: Any, *args: Any, held: Any, **kwargs: Any) -> Any:
        return function(params, *held, *args, **kwargs)

    return (call, trees[0]), {**options, "held": trees[1:]}


@functools.cache
def _initial(init: Callable[[Any], Any]) -> Any:
    """Returns the first arrays, which take long to draw."""
    return init(jax.random.key(0))


class _Dropping:
    """The function `dropout` of a file."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, x: Any, rate: Any, broadcast_dims: Any = (), key: Any = None) -> Any:
        return Dropout(self._function, rate, broadcast_dims, key)(x)


def key_for(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns a random key for a function that takes one by keyword."""
    key = inspect.signature(function).parameters.get("key")  # or an argument of the model
    takes_key = key is not None and key.kind is inspect.Parameter.KEYWORD_ONLY
    return {"key": jax.random.key(0)} if takes_key else {}
