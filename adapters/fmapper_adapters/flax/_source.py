"""Models of Flax as functions of their arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen, nnx

from fmapper_adapters.jax._record import Source


def is_model(x: Any) -> bool:
    """A module of NNX, a bound module of Linen, or one with its variables."""
    if isinstance(x, tuple) and len(x) == 2:
        return isinstance(x[0], linen.Module) and hasattr(x[1], "keys")
    return isinstance(x, nnx.Module) or (isinstance(x, linen.Module) and x.scope is not None)


def has_training(model: Any) -> bool:
    """Whether a model has modes of its own; one of Linen is told its mode in each call."""
    return isinstance(model, nnx.Module) and any(True for _ in _modes(model))


def is_in_training(model: Any) -> bool:
    """Whether a part of a module of NNX is in training mode."""
    return isinstance(model, nnx.Module) and not all(_modes(model))


def _modes(model: Any) -> Iterator[bool]:
    """What the parts of a module say of their modes: true for evaluation."""
    for _, part in nnx.iter_graph(model):
        if isinstance(part, nnx.Module):
            for name in ("deterministic", "use_running_average"):
                if isinstance(getattr(part, name, None), bool):
                    yield getattr(part, name)


def of(model: Any, kwargs: Mapping[str, Any], *, train: bool) -> tuple[Source, Mapping[str, Any]]:
    """The function of a model and its arrays, and the keywords that it is called with."""
    if isinstance(model, nnx.Module):
        return of_nnx(_in_mode(model, train=train)), kwargs
    return of_linen(model), kwargs


def _in_mode(model: Any, *, train: bool) -> Any:
    if not has_training(model):
        return model
    own = nnx.merge(*nnx.split(model))
    own.train() if train else own.eval()
    return own


def evaluated(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a model gives in evaluation mode; it is not changed."""
    source, kwargs = of(model, kwargs, train=False)
    return source.call(source.parameters, source.buffers, *args, **kwargs)[0]


def of_nnx(model: Any) -> Source:
    """A module of NNX: its variables are the arrays, `nnx.Param`s those that are trained."""
    graphdef, state = nnx.split(model)
    flat = state.flat_state()
    names = {path: ".".join(map(str, path)) for path, _ in flat}
    arrays = {names[path]: variable[...] if hasattr(variable, "__getitem__") else variable
              for path, variable in flat}  # fmt: skip
    params = {names[path] for path, variable in flat if isinstance(variable, nnx.Param)}

    def call(parameters: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        known = {**parameters, **buffers}
        filled = nnx.State.from_flat_path(
            [(path, variable.replace(known[names[path]])) for path, variable in flat]
        )
        live = nnx.merge(graphdef, filled)
        output = live(*args, **kwargs)
        _, after = nnx.split(live)
        changed = {}
        for path, variable in after.flat_state():
            value = variable.get_raw_value()
            if value is not known[names[path]]:
                changed[names[path]] = value
        return output, changed

    return Source(
        call,
        {n: x for n, x in arrays.items() if n in params},
        {n: x for n, x in arrays.items() if n not in params},
        function=type(model).__call__,
        skipped=1,
        name=type(model).__name__,
    )


def of_linen(model: Any) -> Source:
    """A module of Linen with its variables."""
    if isinstance(model, linen.Module):
        model, variables = model.unbind()
    else:
        model, variables = model
    flat = jax.tree_util.tree_flatten_with_path(dict(variables))[0]
    names = {path: ".".join(str(key.key) for key in path[1:]) for path, _ in flat}
    tree = jax.tree.structure(dict(variables))
    arrays = {names[path]: leaf for path, leaf in flat}
    params = {names[path] for path, _ in flat if path[0].key == "params"}
    order = [names[path] for path, _ in flat]

    def call(parameters: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        known = {**parameters, **buffers}
        filled = jax.tree.unflatten(tree, [known[name] for name in order])
        return model.apply(filled, *args, **kwargs), {}

    return Source(
        call,
        {n: x for n, x in arrays.items() if n in params},
        {n: x for n, x in arrays.items() if n not in params},
        function=type(model).__call__,
        skipped=1,
        name=type(model).__name__,
    )
