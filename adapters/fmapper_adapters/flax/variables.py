"""The types of variables of NNX as names in a program, and back.

The types of Flax have their bare names. Others are found only in the process that converted a model
with such variables; no name is ever imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx

from fmapper_adapters.jax.libraries import classes_at

_Types = weakref.WeakValueDictionary[str, type]
_met: _Types = weakref.WeakValueDictionary()  # types outside of Flax, by module and name


def names_of_types(model: Any, arrays: Iterable[str]) -> dict[str, str]:
    """Returns the type name of the variable of each array of a model, by the array's name.

    A variable may hold a tree of arrays. Arrays outside of variables are left out.
    """
    classes = classes_at(model, is_variable)
    types = {}
    for name in arrays:
        at = name
        while at and at not in classes:
            at = at.rpartition(".")[0]
        kind = _name(classes[at]) if at else ""
        if kind:
            types[name] = kind
    return types


def types_of(names: Mapping[str, str]) -> dict[str, Any]:
    """Resolves the type names of arrays; unknown ones are left out."""
    types = {name: _type(kind) for name, kind in names.items()}
    return {name: cls for name, cls in types.items() if cls is not None}


def is_variable(node: Any) -> bool:
    """Returns whether an object is a variable of NNX."""
    return nnx.Variable in type(node).__mro__  # no isinstance: variables forward to their values


def _name(cls: Any) -> str:
    """Returns the name of a type; empty for the defaults of a converted model."""
    name: str = cls.__name__
    if _of_flax(name) is cls:
        return name
    if cls is nnx.Variable or cls.__module__.startswith(__package__ or ""):
        return ""
    name = f"{cls.__module__}.{cls.__qualname__}"
    _met[name] = cls
    return name


def _type(name: str) -> Any:
    cls: Any = _of_flax(name) or _met.get(name)
    return cls if cls is not None and cls.__init__ is nnx.Variable.__init__ else None


def _of_flax(name: str) -> Any:
    cls = vars(nnx).get(name)
    return cls if isinstance(cls, type) and nnx.Variable in cls.__mro__ else None
