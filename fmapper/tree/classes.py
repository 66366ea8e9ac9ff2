"""Attributes of classes, read without calling metaclasses and without an instance."""

from __future__ import annotations

import dataclasses
from typing import Any


def class_attribute(cls: type, name: str) -> Any:
    """Returns a class attribute without calling descriptors or the metaclass, or None.

    The metaclass is not asked, because its `__getattr__` may raise anything.
    """
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)


def has_class_attribute(cls: type, name: str) -> bool:
    """Returns whether a class or a base of it defines a name; the metaclass is not asked."""
    return any(name in base.__dict__ for base in cls.__mro__)


def attribute_names(cls: type) -> tuple[str, ...] | None:
    """Returns the fields of a dataclass, attrs class or named tuple, or None.

    Instances of a plain subclass of a dataclass may have attributes that are not fields.
    """
    if "__dataclass_fields__" in cls.__dict__:
        return tuple(field.name for field in dataclasses.fields(cls))
    if "__attrs_attrs__" in cls.__dict__:
        return tuple(field.name for field in cls.__attrs_attrs__)  # type: ignore[attr-defined]
    if issubclass(cls, tuple) and has_class_attribute(cls, "_fields"):
        return tuple(cls._fields)  # type: ignore[attr-defined]
    return None


def slot_names(cls: type) -> tuple[str, ...]:
    """Returns the `__slots__` of a class and its bases, base first, names mangled by Python."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            private = name.startswith("__") and not name.endswith("__")
            names[f"_{base.__name__.lstrip('_')}{name}" if private else name] = None
    return tuple(names)
