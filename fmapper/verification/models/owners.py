"""Finds the framework of a model, and moves inputs to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fmapper.backends.device import get_device
from fmapper.backends.discovery import adapter_of, adapters, get_adapter, installed_backends
from fmapper.backends.models import Models
from fmapper.errors import BackendUnavailableError, NotAFunctorError
from fmapper.tree.fmap import fmap


def family_of(adapter: Models) -> str:
    """Returns the framework with which a target computes."""
    return adapter.lowers_like or adapter.name


def source_of(model: Any) -> Models | None:
    """Returns the framework of a model."""
    return next((adapter for adapter in adapters(Models) if adapter.is_model(model)), None)


def adapter_of_model(model: Any) -> Models | None:
    """Returns the framework of a model, or of the arrays of a callable; None if it has neither."""
    framework = next((adapter for adapter in adapters(Models) if adapter.is_model(model)), None)
    if framework is not None or isinstance(model, tuple):
        return framework
    try:
        device = get_device(model)
    except NotAFunctorError:  # a function with arrays in its closure
        return None
    return None if device is None else _of_backend(device.backend)


def adapter_of_arrays(arrays: Iterable[Any]) -> Models | None:
    """Returns the framework of arrays; None if they do not belong to one framework."""
    names = {owner.name for owner in map(adapter_of, arrays) if owner is not None}
    return _of_backend(names.pop()) if len(names) == 1 else None


def _of_backend(name: str) -> Models | None:
    return next((adapter for adapter in adapters(Models) if adapter.name == name), None)


def source_of_callable(model: Any, target: Models | None) -> Models | None:
    """Returns the framework, other than a target, that can record a function or a callable tree.

    The framework need not be imported yet: the function may import it when it is called.
    """
    for adapter in _recorders():
        is_other = target is None or family_of(adapter) != family_of(target)
        if is_other and adapter.is_callable_model(model):
            return adapter
    return None


def _recorders() -> Iterator[Models]:
    """Yields the loaded adapters, then those of other installed frameworks."""
    loaded = adapters(Models)
    yield from loaded
    for name in installed_backends():
        if all(adapter.name != name for adapter in loaded):
            try:
                yield get_adapter(name, Models)
            except BackendUnavailableError:  # the framework does not work, or has no models
                continue


def inputs_for(
    adapter: Models,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    copy: bool | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves inputs to the framework of a model."""
    from fmapper.moves.mover import mover_to

    def plain(x: Any) -> Any:
        owner = adapter_of(x)
        if owner is None or owner.name == (adapter.lowers_like or adapter.name):
            return x
        return owner.portable(x)

    given: tuple[tuple[Any, ...], dict[str, Any]] = fmap(plain, (args, dict(kwargs)))
    moved: tuple[tuple[Any, ...], dict[str, Any]] = mover_to(adapter)(
        given, strict=False, copy=copy
    )
    return moved
