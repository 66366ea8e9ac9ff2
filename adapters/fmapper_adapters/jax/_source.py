"""Models of JAX as functions of their arrays: functions, and trees that are called."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fmapper import fmap, fmap_with_path
from fmapper_adapters.jax._record import Source


def of(model: Any) -> Source:
    """A function, a pair of a function and its parameters, or a tree that is called."""
    if isinstance(model, tuple):
        function, parameters = model
        return of_tree(parameters, lambda tree: functools.partial(function, tree), function, 1)
    own = getattr(model, "as_program", None)
    if own is not None:
        return _of_converted(model)
    if isinstance(model, types.FunctionType | functools.partial) or not hasattr(model, "__dict__"):
        return of_function(model)
    return of_tree(model, lambda tree: tree, type(model).__call__, 1)


def of_tree(
    tree: Any, called: Callable[[Any], Callable[..., Any]], function: Any, skipped: int
) -> Source:
    """A tree of arrays, and what is called with it.

    Args:
        tree: Whose arrays are parameters where they are trained, and buffers where not.
        called: Gives the function for a tree with other arrays.
        function: Whose signature the model has.
        skipped: How many of its first parameters are no arguments of the model.
    """
    names: dict[int, str] = {}
    arrays: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    parameters: list[str] = []

    def see(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        name = ".".join(map(str, path))
        if id(leaf) in names:
            aliases[name] = names[id(leaf)]
            return leaf
        names[id(leaf)] = name
        arrays[name] = leaf
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            parameters.append(name)
        return leaf

    fmap_with_path(see, tree, cache=None)

    def call(params: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        known = {**params, **buffers}
        filled = fmap(lambda leaf: known[names[id(leaf)]] if id(leaf) in names else leaf, tree)
        return called(filled)(*args, **kwargs), {}

    return Source(
        call,
        {n: arrays[n] for n in parameters},
        {n: x for n, x in arrays.items() if n not in parameters},
        aliases,
        function=function,
        skipped=skipped,
        name=getattr(function, "__qualname__", type(tree).__name__),
    )


def of_function(function: Any) -> Source:
    """A function that takes all of its arrays as arguments, or holds them in `partial`."""
    if isinstance(function, functools.partial):
        held = {"args": function.args, "keywords": function.keywords}
        return of_tree(
            held,
            lambda tree: functools.partial(function.func, *tree["args"], **tree["keywords"]),
            function,
            0,
        )
    return Source(
        lambda params, buffers, *args, **kwargs: (function(*args, **kwargs), {}),
        {},
        function=function,
        name=getattr(function, "__name__", type(function).__name__),
    )


def _of_converted(model: Any) -> Source:
    def call(params: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = model.replace(params=params, buffers=buffers).call(args, kwargs)
        after = outcome.model.buffers
        changed = {name: after[name] for name in buffers if after[name] is not buffers[name]}
        return outcome.output, changed

    found = Source(call, dict(model.params), dict(model.buffers), name=model.program.name)
    found.aliases = dict(model.aliases)
    found.frozen = model.program.frozen
    found.signature = model.program.signature
    return found
