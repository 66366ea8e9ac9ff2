"""Turns models of JAX, functions and callable trees, into functions of their arrays."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax

from fmapper import is_leaf
from fmapper.programs import Parameter, PlainState
from fmapper_adapters.jax.record import closure, parts, states, train_flags
from fmapper_adapters.jax.record.closure import Lifted
from fmapper_adapters.jax.record.trace import Source

_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "numpy")
_BASES = ("Module", "Pytree")  # their instances have attributes of the user
_HIDDEN = ("_object__", "_pytree__")  # prefixes of attributes in which NNX keeps its own state


def make_source(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool | None
) -> tuple[Source, tuple[Any, ...], Mapping[str, Any]]:
    """Returns the source of a model in a mode, and the arguments that the source takes.

    Args:
        model: A function, a pair of a function and its parameters, a callable tree, a pair of an
            Equinox model and its state, or a model that was converted to JAX.
        args: The examples by position.
        kwargs: The examples by keyword.
        train: The mode; None leaves it to the call.
    """
    if getattr(type(model), "is_converted_model", False) is True:
        return _source_of_model(model), args, kwargs
    source = of_callable(model, train=train)
    flags = train_flags.find_flags(source.function, source.skipped, args)
    return train_flags.set_mode(source, flags, args, kwargs, train=train)


def has_training(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a model has a training mode, in its layers or as an argument."""
    if getattr(type(model), "is_converted_model", False) is True:
        return False
    return bool(Lifted(*_roots(model)).modes or _flags_of(model, args))


def modes(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the value of each mode field and mode argument: True for training."""
    if getattr(type(model), "is_converted_model", False) is True:
        return {}
    flags = train_flags.modes_of_call(_flags_of(model, args), args, kwargs)
    return {**Lifted(*_roots(model)).modes, **flags}


def evaluate(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool | None
) -> Any:
    """Calls a model in a mode; None leaves the mode to the call."""
    if getattr(type(model), "is_converted_model", False) is True:
        return model(*args, **kwargs)
    source, args, kwargs = make_source(model, args, kwargs, train=train)
    return source.call(source.parameters, source.buffers, *args, **kwargs)[0]


def _roots(model: Any) -> tuple[Any, ...]:
    """Returns the trees and functions of a model that hold its arrays."""
    if states.is_stateful(model):
        return (closure.callee_of(model[0]),)
    return model if isinstance(model, tuple) else (closure.callee_of(model),)


def _flags_of(model: Any, args: tuple[Any, ...]) -> Mapping[str, train_flags.Flag]:
    function, skipped = _function(model)
    return train_flags.find_flags(function, skipped, args)


def _function(model: Any) -> tuple[Callable[..., Any] | None, int]:
    """Returns the function with a model's signature, and how many parameters to skip."""
    if states.is_stateful(model):
        function, skipped = _function(model[0])
        if function is not None:
            _, name = states.parameter_at(function, skipped)
            function = states.without(function, name)
        return function, skipped
    if isinstance(model, tuple):
        return _with_signature(model[0]), 1
    if closure.is_function(model) or not hasattr(type(model), "__call__"):  # noqa: B004
        return _with_signature(model), 0
    inner = getattr(model, "__wrapped__", None)
    if inner is not None and inner is not model:
        return _function(inner)
    function = _with_signature(type(model).__call__)
    if function is not None and states.collects_statistics(model):
        function = states.without(function, states.Statistics.name)
    return function, 1


def _with_signature(function: Any) -> Callable[..., Any] | None:
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        return None
    result: Callable[..., Any] = function
    return result


def of_callable(model: Any, *, train: bool | None) -> Source:
    """Returns the source of a function, with or without parameters, or of a callable tree.

    Raises:
        NotAFunctorError: An object that holds arrays was not declared.
    """
    function, skipped = _function(model)
    roots = _roots(model)
    state_arrays: dict[str, Any] = {}
    if states.is_stateful(model):
        held_state = states.HeldState(*model)
        place = states.parameter_at(*_function(model[0]))
        state_arrays = held_state.arrays
        roots = (*roots, state_arrays)
    held = Lifted(*roots)
    if train and any(held.modes.values()):
        train = None  # in a model that trains already, submodules keep their modes
    changed: dict[str, None] = {}
    collects = not state_arrays and len(roots) == 1 and states.collects_statistics(roots[0])
    trains = any(held.modes.values()) if train is None else train
    written = states.statistics_of(roots[0]) if collects and trains else set()

    def call(params: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        values = {**params, **buffers}
        filled = held.fill(values, train=train)

        def run() -> tuple[Any, dict[str, Any]]:
            after = filled
            functions = parts.watch_functions(filled[0], values.values())
            with parts.watch(lambda: closure.objects_at(*filled)), functions:
                if state_arrays:
                    state = held_state.state(filled[1])
                    output, state = states.call_with_state(filled[0], place, state, args, kwargs)
                    if state is not None:
                        after = (filled[0], held_state.by_name(state))
                elif len(filled) > 1:
                    output = filled[0](filled[1], *args, **kwargs)
                elif collects:
                    statistics = states.Statistics()
                    output = filled[0](*args, **kwargs, statistics=statistics)
                    after = (statistics.update(filled[0]),)
                else:
                    output = filled[0](*args, **kwargs)
            return output, held.changes(after, values)

        return call_and_restore(filled, run, {*held.arrays, *held.aliases}, changed)

    arrays, trained = held.arrays, held.trained - state_arrays.keys() - written
    return Source(
        call,
        {n: x for n, x in arrays.items() if n in trained},
        {n: x for n, x in arrays.items() if n not in trained},
        held.aliases,
        function=function,
        skipped=skipped,
        name=_name(model),
        suspects=held.suspects,
        refusal=held.refusal,
        changed=changed,
    )


def call_and_restore(
    roots: Iterable[Any],
    call: Callable[[], tuple[Any, dict[str, Any]]],
    arrays: Collection[str],
    changed: dict[str, None],
) -> tuple[Any, dict[str, Any]]:
    """Calls a model, and restores everything that the call changes in it.

    Args:
        roots: The model, or the function and the trees that it consists of.
        call: Makes the call; returns the output, and the changed arrays by name.
        arrays: The names of the arrays that may change.
        changed: Collects the names of other changed attributes.

    Returns:
        The output in new containers, and the changed arrays.
    """
    states = [
        PlainState(root, libraries=_LIBRARIES, opens=_is_module, hides=_is_hidden) for root in roots
    ]
    try:
        output, new = call()
        names = [name for state in states for name in state.changes(arrays)]
        changed.update(dict.fromkeys(names))
        return (jax.tree.map(lambda x: x, output) if names else output), new
    finally:
        for state in states:
            state.restore()


def _is_module(cls: type) -> bool:
    return any(
        base.__name__ in _BASES and base.__module__.partition(".")[0] in _LIBRARIES
        for base in cls.__mro__
    )


def _is_hidden(name: str) -> bool:
    return name.startswith(_HIDDEN)


def weights(model: Any) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
    """Returns the arrays of a model by name, and a function that replaces them.

    The model is one of Equinox and its state, or a function with arrays in its closure, such as
    `jax.vmap(model)`; None for others.
    """
    if states.is_stateful(model):
        held_state = states.HeldState(*model)
        roots = (*_roots(model), held_state.arrays)
    elif is_leaf(model) and closure.is_function(model):
        roots = _roots(model)
    else:
        return None
    held = Lifted(*roots)
    if not held.arrays or held.refusal is not None:
        return None
    tied = {name: held.arrays[first] for name, first in held.aliases.items()}

    def back(filled: Mapping[str, Any]) -> Any:
        new = held.fill({name: filled[name] for name in held.arrays})
        return new[0] if len(new) == 1 else (new[0], held_state.state(new[1]))

    return {**held.arrays, **tied}, back


def _name(model: Any) -> str:
    first = model[0] if isinstance(model, tuple) else model
    wrapped = getattr(first, "__wrapped__", None)
    if isinstance(first, types.FunctionType) and not hasattr(wrapped or first, "__qualname__"):
        return _name(wrapped)  # such as `jax.vmap(model)`
    if isinstance(first, types.FunctionType | types.MethodType):
        return first.__qualname__.rpartition("<locals>.")[2]
    inner = first.func if isinstance(first, functools.partial) else closure.unwrap(first)
    return _name(inner) if inner is not None else type(first).__name__


# --- models that were converted to JAX before -----------------------------------------------------


def _source_of_model(model: Any) -> Source:
    takes_key = not (model.program.signature and "key" in {p.name for p in model.program.signature})

    def call(params: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        key = kwargs.pop("key", None) if takes_key else None
        outcome = model.replace(params=params, buffers=buffers).call(args, kwargs, key=key)
        after = {**outcome.model.params, **outcome.model.buffers}
        before = {**params, **buffers}
        changed = {name: after[name] for name in before if after[name] is not before[name]}
        return outcome.output, changed

    source = Source(call, dict(model.params), dict(model.buffers), name=model.program.name)
    source.aliases = dict(model.aliases)
    source.frozen = model.program.frozen
    source.transient = model.program.transient
    source.variable_types = dict(model.program.variable_types)
    source.signature = model.program.signature
    if takes_key and model.is_random and source.signature:
        source.signature = (*source.signature, Parameter("key", "keyword"))
    return source
