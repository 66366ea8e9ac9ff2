"""Imports public names on first access, so that importing fmapper stays fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

from fmapper.suggest import did_you_mean


def surface(
    package: str, places: Iterable[tuple[str, str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package of public names.

    Args:
        package: The package's own name.
        places: Pairs of a module and the names that it defines, separated by spaces.
        modules: Names of public modules in the package.
    """
    place_of = {name: place for place, names in places for name in names.split()}

    def find(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in place_of:
            hint = (
                "" if name.startswith("_") else did_you_mean(name, {*place_of, *modules, *public()})
            )
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        value = show_as_public(getattr(import_module(place_of[name]), name), package)
        setattr(sys.modules[package], name, value)
        return value

    def public() -> Iterable[str]:
        names: Iterable[str] = vars(sys.modules[package]).get("__all__", ())
        return names

    def names() -> list[str]:
        namespace = vars(sys.modules[package])
        return sorted({*public(), *modules, *(name for name in namespace if name.startswith("__"))})

    return find, names


def show_as_public(value: object, package: str) -> object:
    """Sets `__module__` of public names to the module they are imported from.

    A name that two packages export belongs to the outer one, whichever is accessed first.
    """
    if hasattr(value, "__qualname__"):  # movers are instances
        shown = getattr(sys.modules.get(package.partition(".")[0]), "__all__", ())
        is_inner = "." in package and value.__qualname__ in shown
        value.__module__ = package.partition(".")[0] if is_inner else package
    return value
