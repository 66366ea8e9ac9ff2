"""Recognises models of Flax, and turns models of NNX into functions of their arrays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import linen, nnx

from fmapper import ConversionError, fmap, state
from fmapper_adapters.flax import _private, linen_model, linen_source, variables
from fmapper_adapters.flax import axes as _axes
from fmapper_adapters.jax.libraries import (
    Lifted,
    Source,
    call_and_restore,
    objects_at,
    parts,
    train_flags,
)

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def is_model(x: Any) -> bool:
    """Returns whether an object stands for a model of Flax.

    That is a module of NNX, or the graph and state from `nnx.split`; a bound module of Linen, a
    module with its variables, or its `apply` with them. A module without variables counts too, so
    that it is refused with a reason.
    """
    if isinstance(x, tuple) and len(x) == 2:
        if isinstance(x[0], nnx.GraphDef):
            return isinstance(x[1], nnx.State)
        return linen_source.module_of(x[0]) is not None and hasattr(x[1], "keys")
    return isinstance(x, nnx.Module | linen.Module) or linen_source.is_bound(x)


def _whole(model: Any) -> Any:
    return nnx.merge(*model) if isinstance(model, tuple) else model


def _is_nnx(model: Any) -> bool:
    return isinstance(model[0] if isinstance(model, tuple) else model, nnx.Module | nnx.GraphDef)


def has_training(model: Any, args: Args, kwargs: Kwargs) -> bool:
    """Returns whether a submodule or an argument of a model has a training mode."""
    if _is_converted(model):
        programs = model._programs
        return programs.training is not None and programs.evaluation is not None
    return bool(_modes_of_model(model) or _flags_of(model, args, kwargs))


def modes(model: Any, args: Args, kwargs: Kwargs) -> dict[str, bool]:
    """Returns the value of each mode attribute and mode argument: True for training."""
    if _is_converted(model):
        return {"deterministic": not model.deterministic}
    of_call = train_flags.modes_of_call(_flags_of(model, args, kwargs), args, kwargs)
    return {**_modes_of_model(model), **of_call}


def _modes_of_model(model: Any) -> dict[str, bool]:
    """Returns the value of each mode attribute of a module: True for training."""
    if _is_nnx(model):
        return _modes_of_parts(_whole(model))
    return linen_source.modes_of_fields(model)


def options(model: Any) -> tuple[str, ...]:
    """Returns keywords of `apply`, for a module of Linen."""
    return () if _is_nnx(model) else linen_source.OPTIONS


def _flags_of(model: Any, args: Args, kwargs: Kwargs) -> Mapping[str, train_flags.Flag]:
    if _is_nnx(model):
        whole = _whole(model)
        return train_flags.find_flags(type(whole).__call__, 1, args, whole)
    function, module = linen_source.function_of(model, kwargs.get("method"))
    return train_flags.find_flags(function, 1, args, module)


def _modes_of_parts(model: Any) -> dict[str, bool]:
    """Returns the mode attributes of submodules, with their values -> whether these train."""
    with _graph_mode():
        parts = [
            (path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)
        ]
    flags = {}
    for path, part in parts:
        for name in ("deterministic", "use_running_average"):
            value = getattr(part, name, None)
            if isinstance(value, bool):
                flags[f"{'.'.join(map(str, (*path, name)))}={value}"] = not value
    return flags


def _graph_mode() -> AbstractContextManager[object]:
    """Switches Flax to graph mode, in which variables may be shared."""
    switch: Any = getattr(nnx, "set_graph_mode", None)  # since Flax 0.12
    return contextlib.nullcontext() if switch is None else switch(True)


def _is_converted(model: Any) -> bool:
    return isinstance(model, nnx.Module) and hasattr(model, "_programs")


def make_source(
    model: Any, args: Args, kwargs: Kwargs, *, train: bool | None
) -> tuple[Source, Args, Kwargs]:
    """Returns the source of a model in a mode, and the arguments that the source takes.

    None leaves the mode to the call.
    """
    if _is_nnx(model):
        whole = _whole(model)
        source = of_nnx(_in_mode(whole, train=train))
        if _is_converted(whole):
            return source, args, kwargs
    else:
        flags = _flags_of(model, args, kwargs)
        is_training = any(modes(model, args, kwargs).values()) if train is None else train
        source, kwargs = linen_source.make_source(
            model, args, kwargs, train=train, mutable=is_training
        )
        return train_flags.set_mode(source, flags, args, kwargs, train=train)
    flags = _flags_of(model, args, kwargs)
    return train_flags.set_mode(source, flags, args, kwargs, train=train)


def _in_mode(model: Any, *, train: bool | None) -> Any:
    """Returns a copy in a mode, None for its own, which shares the arrays of the model."""
    copy = fmap(lambda leaf: leaf, model)
    if _is_converted(model):
        copy.deterministic = not model._programs.trains(model, train=train)
        return copy
    _separate(copy)
    flags = _modes_of_parts(copy).values()
    if flags and train is not None and not (train and any(flags)):
        try:
            with _graph_mode():
                copy.train() if train else copy.eval()
        except Exception as error:  # from a class without such a mode
            mode = "training" if train else "evaluation"
            name = type(model).__name__
            raise ConversionError(f"{name} cannot be put into {mode}: {error}") from error
    return copy


def _separate(model: Any) -> None:
    """Copies the arrays of variables other than parameters, in place.

    A target network or average that starts from a parameter's array is not tied to it: training
    replaces the array of only one variable. Generators are left as they are.
    """
    with _graph_mode():
        by_id = {id(node): node for _, node in nnx.iter_graph(model) if variables.is_variable(node)}
    ordered = sorted(by_id.values(), key=lambda x: not issubclass(type(x), nnx.Param))
    seen: set[int] = set()
    for variable in ordered:
        slot = _private.value_slot(type(variable))
        array = getattr(variable, slot)
        is_own = issubclass(type(variable), nnx.Param | nnx.RngState)
        if id(array) in seen and not is_own and isinstance(array, jax.Array):
            object.__setattr__(variable, slot, array.copy())
        seen.add(id(array))


def evaluate(model: Any, args: Args, kwargs: Kwargs, *, train: bool | None) -> Any:
    """Calls a model without changing it, in a mode; None leaves the mode to the call."""
    source, args, kwargs = make_source(model, args, kwargs, train=train)
    return source.call(source.parameters, source.buffers, *args, **kwargs)[0]


def of_nnx(model: Any) -> Source:
    """Splits an NNX module into its function and its arrays; `nnx.Param`s are trained."""
    held = Lifted(model)
    kinds = _kinds(model)

    changed: dict[str, None] = {}

    def call(parameters: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        arrays = {**parameters, **buffers}
        filled = held.fill(arrays)

        def run() -> tuple[Any, dict[str, Any]]:
            with parts.watch(lambda: objects_at(filled[0])):
                output = filled[0](*args, **kwargs)
            try:
                return output, held.changes(filled, arrays)
            except ConversionError as error:
                raise ConversionError(f"{type(model).__name__}: {error}") from None

        return call_and_restore(filled, run, {*held.arrays, *held.aliases}, changed)

    frozen = [n for n in held.arrays if kinds.get(n) == "FrozenParam"]
    trained = held.trained | set(frozen)
    source = Source(
        call,
        {n: x for n, x in held.arrays.items() if n in trained},
        {n: x for n, x in held.arrays.items() if n not in trained},
        held.aliases,
        tuple(frozen),
        tuple(n for n, kind in kinds.items() if kind == "transient" and n in held.arrays),
        function=type(model).__call__,
        skipped=1,
        name=type(model).__name__,
        suspects=held.suspects,
        refusal=held.refusal,
        variable_types=variables.names_of_types(model, held.arrays),
        axes=_axes.by_name(model, held.arrays),
        changed=changed,
    )
    if _is_converted(model):
        program = model._programs.any.program
        source = dataclasses.replace(source, signature=program.signature, skipped=0,
                                    name=program.name)  # fmt: skip
    return source


def _kinds(model: Any) -> dict[str, str]:
    """Finds the variables of a converted model that are frozen, or in no state dict."""
    if not _is_converted(model):
        return {}
    programs = model._programs
    kinds = {n: "FrozenParam" for n, kind in programs.kinds.items() if kind == "frozen"}
    return {**kinds, **dict.fromkeys(programs.transient, "transient")}


def weights_of_pair(model: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Returns the arrays of a pair by name, and a function that replaces them.

    Args:
        model: A module, or its `apply`, and its variables; or the graph and state of `nnx.split`.
    """
    first, held = model
    module = linen_source.module_of(first)
    if isinstance(module, linen_model.LinenModel):
        arrays = linen_model.weights(module, held)
    else:
        arrays = state(held)

    def back(filled: Mapping[str, Any]) -> Any:
        new = {id(array): filled[name] for name, array in arrays.items()}
        return first, fmap(lambda leaf: new.get(id(leaf), leaf), held)

    return arrays, back
