"""Node types of Flax Linen: bound modules and frozen dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import linen
from flax.core import FrozenDict, meta, scope

from fmapper.backends import BoxKey, NodeType
from fmapper_adapters.flax import _private
from fmapper_adapters.flax.children import ChildTest, box_type, carried_attributes

Module: Any = linen.Module

VARIABLES = BoxKey("variables")
_RNGS = "rngs"
_PLACE = frozenset({"parent", "name"})  # the position of a module in its parent
_new: Callable[[type], Any] = object.__new__
_set = object.__setattr__


def node_type(cls: type) -> NodeType | None:
    """Returns the node type of a class of Linen or of Flax's core; None for every other class."""
    if issubclass(cls, Module):
        return _module_type()
    if issubclass(cls, FrozenDict):
        return _frozen_dict_type(cls)
    if issubclass(cls, meta.AxisMetadata):
        return box_type(cls, "value", BoxKey("value"))
    return None


# --- modules --------------------------------------------------------------------------------------


def _module_type() -> NodeType:
    """Makes the type of a bound module, which is rebuilt as a bound module.

    Variables and random keys are children. The variables are in a box: in a bound module they are
    at `variables['params']['Dense_0']`, and `state` calls them `params.Dense_0.kernel`. Fields that
    hold arrays are children too. A module without any of these is immutable, and is its own copy.
    """

    def decide(cls: type) -> Callable[[Any], bool] | None:
        return has_children if issubclass(cls, Module) else None

    def has_children(module: Any) -> bool:
        bound = module.scope is not None and not isinstance(module.parent, Module)
        return bound or any(test(value) for _, value in fields(module))

    def children(module: Any) -> dict[Any, Any]:
        contents: dict[Any, Any] = {}
        if module.scope is not None:
            contents[VARIABLES] = dict(module.variables)
            if module.scope.rngs:
                contents[_RNGS] = dict(module.scope.rngs)
        contents.update((name, value) for name, value in fields(module) if test(value))
        return contents

    def beside(module: Any) -> list[tuple[str, Any]]:
        return carried_attributes(
            (name, value) for name, value in fields(module) if not test(value)
        )

    def static(module: Any) -> dict[str, Any]:
        values = {name: value for name, value in fields(module) if not test(value)}
        if module.scope is not None:
            values |= {"mutable": module.scope.mutable, "flags": module.scope.flags}
        return values

    test = ChildTest(decide)
    return NodeType(children, _rebuild, carried=beside, static=static)


def fields(module: Any) -> list[tuple[str, Any]]:
    """Returns the fields of a module that its constructor accepts, in order."""
    names = (field.name for field in dataclasses.fields(module) if field.init)
    return [(name, getattr(module, name)) for name in names if name not in _PLACE]


def _rebuild(module: Any, new: Mapping[Any, Any]) -> Any:
    if not new:
        return module
    changed = dict(new)
    if module.scope is None:
        return module.clone(**changed)
    old = module.scope
    place = scope.bind(
        changed.pop(VARIABLES),
        rngs=changed.pop(_RNGS, None),
        mutable=old.mutable,
        flags=old.flags,
    )
    place.rng_counters = dict(old.rng_counters)
    return module.clone(parent=place, _deep_clone=True, **changed)


# --- frozen dicts ---------------------------------------------------------------------------------


def _frozen_dict_type(cls: type) -> NodeType:
    """Makes the type of a mapping, in its own order rather than sorted."""

    def items(frozen: Any) -> Any:
        return _private.frozen_slots(frozen).items()

    def open(frozen: Any, keep: Callable[[Any], None]) -> Any:
        slots = _private.frozen_slots(frozen).copy()
        new = _new(cls)
        _set(new, _private.FROZEN_SLOTS, slots)
        _set(new, _private.FROZEN_HASH, None)
        return new, iter(_private.frozen_slots(frozen).items()), slots, None

    return NodeType.from_opener(open, items, static=lambda frozen: None)
