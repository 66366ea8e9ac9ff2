"""Finds the targets of conversions by their names, and checks the options that they take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from fmapper.backends.discovery import adapters, get_adapter, known_frameworks
from fmapper.backends.models import Models
from fmapper.errors import BackendUnavailableError, ConversionError
from fmapper.suggest import did_you_mean


def find_target(to: Any) -> tuple[Models, dict[str, Any]]:
    """Returns the adapter of a target, and the options that the name of the target stands for.

    Args:
        to: The name of a framework, or a name of `Models.targets`: `"nnx"`, `"linen"`.

    Raises:
        ConversionError: It is not a name.
        BackendUnavailableError: There is no such target, it is not installed, or it has no models.
    """
    if not isinstance(to, str):
        raise ConversionError(
            f"the target is a name such as 'jax', not an object of type {type(to).__name__}: "
            "convert(model, 'jax', example_inputs)"
        )
    for adapter in adapters(Models):
        if to in adapter.targets:
            return adapter, dict(adapter.targets[to])
    builtin: Mapping[str, str] = import_module("fmapper_adapters").TARGETS
    if to in builtin:
        adapter = get_adapter(builtin[to], Models)
        return adapter, dict(adapter.targets[to])
    try:
        return get_adapter(to, Models), {}
    except BackendUnavailableError as error:
        if error.__cause__ is not None:  # it exists, and is not installed
            raise
        raise no_target(to) from None


def no_target(to: str) -> BackendUnavailableError:
    """Returns the error for a name that is not a target; it lists the targets."""
    targets = sorted(_targets())
    return BackendUnavailableError(
        f"{to!r} is not a target.{did_you_mean(to, targets)} Available targets: "
        f"{', '.join(map(repr, targets))}."
    )


def _targets() -> Iterator[str]:
    """Yields the names of the installed targets; imports their frameworks."""
    for name in known_frameworks():
        try:
            adapter = get_adapter(name, Models)
        except BackendUnavailableError:  # it is not installed, does not work, or has no models
            continue
        if is_target(adapter):
            yield adapter.name
            yield from adapter.targets


def is_target(adapter: Models) -> bool:
    """Returns whether programs can be lowered to a framework."""
    return type(adapter).from_program is not Models.from_program


def check_options(
    target: Models, options: Mapping[str, Any], others: Collection[str], variant: Mapping[str, Any]
) -> None:
    """Raises for an option that a target does not have, before anything is recorded.

    Args:
        target: The adapter of the target.
        options: The options for the target, as a user gave them.
        others: The options that every target has.
        variant: The options that the name of the target stands for.

    Raises:
        ConversionError: There is one, or options exclude each other.
    """
    accepted = target.conversion_options
    if accepted is not None:
        names = sorted({*others, *accepted})
        for name in options:
            if name not in names:
                raise ConversionError(
                    f"convert to {target.name} has no option {name!r}.{did_you_mean(name, names)} "
                    f"It takes {', '.join(names)}."
                )
    target.check_options(**options, **variant)
