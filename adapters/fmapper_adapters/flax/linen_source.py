"""Models of Linen as functions of their arrays: a module with its variables."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen
from flax.core import unfreeze

from fmapper import ConversionError
from fmapper_adapters.flax import axes as _axes
from fmapper_adapters.jax.libraries import Source, call_and_restore, parts, train_flags

OPTIONS = ("method", "mutable", "capture_intermediates")


def is_bound(x: Any) -> bool:
    """Returns whether an object is a bound module, or a method of one."""
    if isinstance(x, types.MethodType):
        x = x.__self__
    return isinstance(x, linen.Module) and x.scope is not None


def module_of(x: Any) -> Any | None:
    """Returns the module for a module or its `apply`; None for anything else."""
    if isinstance(x, types.MethodType) and x.__func__ is linen.Module.apply:
        x = x.__self__
    return x if isinstance(x, linen.Module) else None


def _parts(model: Any) -> tuple[Any, Any, Any]:
    """Returns the module, its variables, and the method to call; None for `__call__`."""
    if isinstance(model, tuple):
        return module_of(model[0]), model[1], None
    method = None
    if isinstance(model, types.MethodType):
        method, model = model.__func__, model.__self__
    if model.scope is None:
        raise ConversionError(
            f"{type(model).__name__} is a Linen module without its variables: pass the pair "
            f"(module, variables)"
        )
    return (*model.unbind(), method)


def function_of(model: Any, method: Any) -> tuple[Callable[..., Any], Any]:
    """Returns the method of a module that is called, and the module."""
    module, _, default = _parts(model)
    method = default if method is None else method
    if method is None:
        return type(module).__call__, module
    if isinstance(method, str):
        return getattr(type(module), method), module
    return getattr(method, "__func__", method), module


def modes_of_fields(model: Any) -> dict[str, bool]:
    """Returns fields of a module that set its mode, with their values -> whether it trains."""
    module = _parts(model)[0]
    values = {name: (getattr(module, name), in_training)
              for name, in_training in _fields_in_mode(module, train=True).items()}  # fmt: skip
    return {f"{name}={value}": value is trains for name, (value, trains) in values.items()}


def _fields_in_mode(module: Any, *, train: bool) -> dict[str, bool]:
    """Returns the fields of a module that set its mode, with their values in a mode."""
    return {
        name: in_training is train
        for name, in_training in train_flags.NAMES.items()
        if name in module.__dataclass_fields__ and isinstance(getattr(module, name), bool)
    }


def make_source(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool | None,
    mutable: bool,
) -> tuple[Source, Mapping[str, Any]]:
    """Returns the source of a module with its variables, and the keywords without `apply`'s own.

    Fields of the module that set its mode are set; the mode None leaves them as they are.

    Of the keywords, `method`, `mutable` and `capture_intermediates` are fixed, and `rngs` is an
    input. Mutable collections become buffers that a call changes: with `mutable`, as in training,
    these are all collections but the parameters, unless the keyword says otherwise. Variables that
    a call creates in them, such as intermediates, are returned with the output, as by `apply`.
    """
    module, variables, default = _parts(model)
    fields = {} if train is None else _fields_in_mode(module, train=train)
    if fields:
        module = module.clone(**fields)
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    rest = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    if default is not None:
        options.setdefault("method", default)
    function, _ = function_of(model, options.get("method"))
    tree = linen.meta.unbox(unfreeze(variables))
    flat = _flat(tree)
    names = {path: ".".join(path) for path in flat}
    arrays = {names[path]: leaf for path, leaf in flat.items()}
    first: dict[int, str] = {}
    aliases = {}
    for path, leaf in flat.items():
        name = names[path]
        if first.setdefault(id(leaf), name) == name:
            continue
        if path[0] == "params":
            aliases[name] = first[id(leaf)]
        else:  # variables that share an initial array but change independently
            arrays[name] = leaf.copy()
    structure = jax.tree.structure(tree)
    in_order = [names[_path(keys)] for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    params = {names[path] for path in flat if path[0] == "params"}
    if "mutable" not in options and mutable:
        options["mutable"] = [name for name in variables if name != "params"]

    changed: dict[str, None] = {}

    def call(parameters: Any, buffers: Any, *inner: Any, **named: Any) -> Any:
        merged = {**parameters, **buffers}
        values = [merged[aliases.get(name, name)] for name in in_order]
        filled = jax.tree.unflatten(structure, values)

        def run() -> tuple[Any, dict[str, Any]]:
            with _record_parts():
                output = module.apply(filled, *inner, **options, **named)
            if options.get("mutable", False) is False and not options.get("capture_intermediates"):
                return output, {}
            output, updates = output
            new = linen.meta.unbox(unfreeze(updates))
            return _apply_with_state(output, new, merged, names, aliases)

        return call_and_restore([module], run, (), changed)

    arrays = {name: leaf for name, leaf in arrays.items() if name not in aliases}
    source = Source(
        call,
        {n: x for n, x in arrays.items() if n in params},
        {n: x for n, x in arrays.items() if n not in params},
        aliases,
        function=function,
        skipped=1,
        name=type(module).__name__,
        axes=_axes.by_name(variables, arrays),
        changed=changed,
        short_names={names[path]: short for path, short in _short_names(flat).items()},
    )
    if "rngs" in rest:
        source.defaults = {"rngs": None}
    return source, rest


def _record_parts() -> Any:
    """Records the calls of submodules, if the recording asks for them."""
    if not parts.is_noting():
        return contextlib.nullcontext()

    def note(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        path = ".".join(module.path)
        is_own = not type(module).__module__.startswith("flax.")
        is_call = name == "__call__" or (is_own and name != "setup" and not name.startswith("_"))
        method = getattr(type(module), name, None)
        if not path or not is_call or method is None:  # the root, or a transform
            return run(*args, **kwargs)
        params = {".".join(at): x for at, x in _flat(module.variables.get("params", {})).items()}
        return parts.note_call(path, module, method, args, kwargs, run, params)

    return linen.intercept_methods(note)


def _apply_with_state(
    output: Any,
    updates: Mapping[str, Any],
    before: Mapping[str, Any],
    names: Mapping[Any, str],
    aliases: Mapping[str, str],
) -> tuple[Any, dict[str, Any]]:
    """Returns the output with new collections, and the changed arrays by name."""
    changed = {}
    new = {}
    for collection, tree in updates.items():
        flat = {(collection, *path): value for path, value in _flat(tree).items()}
        named = {path: value for path, value in flat.items() if path in names}
        for path, value in named.items():
            name = aliases.get(names[path], names[path])
            if value is not before[name]:
                changed[name] = value
        if len(named) < len(flat):
            new[collection] = tree
    return ((output, new) if new else output), changed


def _flat(tree: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Returns the arrays by their paths, in the order in which they were made."""
    flat: dict[tuple[str, ...], Any] = {}

    def walk(part: Any, path: tuple[str, ...]) -> None:
        if isinstance(part, Mapping):
            for key, inner in part.items():
                walk(inner, (*path, str(key)))
            return
        for keys, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
            flat[*path, *_path(keys)] = leaf

    walk(tree, ())
    return flat


def _path(keys: Any) -> tuple[str, ...]:
    return tuple(map(_text, keys))


def _text(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _short_names(flat: Mapping[tuple[str, ...], Any]) -> dict[tuple[str, ...], str]:
    """Drops the collection from names, unless two collections share one."""
    short: dict[str, list[tuple[str, ...]]] = {}
    for path in flat:
        short.setdefault(".".join(path[1:]), []).append(path)
    return {
        path: name if path[0] == "params" or len(paths) == 1 else ".".join(path)
        for name, paths in short.items()
        for path in paths
    }
