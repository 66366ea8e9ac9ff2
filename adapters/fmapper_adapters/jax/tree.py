"""Classes in JAX's pytree registry as nodes, and functors as pytrees of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import tree_util

from fmapper.backends import (
    BoxKey,
    Constant,
    NodeType,
    PyTreeRules,
    Static,
    flatten,
    is_dynamic,
    unflatten,
)


def is_tree_node(cls: type) -> bool:
    """Returns whether JAX's registry has a class."""
    check: Any = getattr(tree_util, "is_tree_node", None)
    if check is not None:
        return bool(check(cls))
    try:  # before JAX 0.10 only an object can be asked, whose type alone decides
        empty = next(base for base in cls.__mro__ if base.__flags__ & _HEAP_TYPE == 0)
        shell: Any = empty.__new__(cls)  # type: ignore[call-overload]
    except TypeError:
        return cls is type(None)
    return not tree_util.all_leaves([shell])


_HEAP_TYPE = 1 << 9


def keyed_children(node: Any) -> list[tuple[Any, Any]]:
    """Returns the children of a node in JAX's registry, each with its key."""
    pairs, _ = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    return [(path[0], child) for path, child in pairs]


def registered_type(cls: type) -> NodeType | None:
    """Returns the node type of a class that is in JAX's registry: Equinox, flax.struct, chex ...

    Classes whose objects are not pytrees, but have a state that is one, count too.
    """
    if any(_GET_STATE in base.__dict__ for base in cls.__mro__):
        return _variable_type()
    if not is_tree_node(cls) or _is_namedtuple(cls):
        return None

    # wrappers such as Equinox's `filter_vmap` have the name of the module that they wrap
    inner = _WRAPPED if cls.__module__.startswith("equinox.") else None

    def children(node: Any) -> dict[Any, Any]:
        by_key = {_key(key): child for key, child in keyed_children(node)}
        return {inner if key == inner else key: child for key, child in by_key.items()}

    def rebuild(node: Any, new_children: Mapping[Any, Any]) -> Any:
        return _structure(node).unflatten(list(new_children.values()))

    return NodeType(children, rebuild, static=_structure)


_WRAPPED = BoxKey("_fun")

# The protocol of mutable variables in JAX, as in penzai; the last name is that of the state.
_GET_STATE = "__get_state_as_jax_pytree__"
_SET_STATE = "__set_state_from_jax_pytree__"
_FROM_STATE = "__jax_pytree_state_to_new_variable__"


def _variable_type() -> NodeType:
    """Makes the type of a variable, whose children are those of its state.

    Attributes that hold these children are set to the new ones directly, because the methods of the
    protocol may convert their arguments to JAX arrays.
    """

    def children(variable: Any) -> dict[Any, Any]:
        state = getattr(variable, _GET_STATE)()
        if tree_util.all_leaves([state]):
            return {BoxKey("value"): state}
        by_key = {_key(key): child for key, child in keyed_children(state)}
        if len(by_key) > 1:
            return by_key
        return {BoxKey(str(key)): child for key, child in by_key.items()}

    def attributes(variable: Any) -> dict[Any, str] | None:
        """Returns the attribute that holds each child, if one does."""
        names: dict[int, list[str]] = {}
        for name, value in getattr(variable, "__dict__", {}).items():
            names.setdefault(id(value), []).append(name)
        by_key = {key: names.get(id(child), []) for key, child in children(variable).items()}
        if any(len(held) != 1 for held in by_key.values()):
            return None
        return {key: held[0] for key, held in by_key.items()}

    def state_with(variable: Any, new: Mapping[Any, Any]) -> Any:
        state = getattr(variable, _GET_STATE)()
        if tree_util.all_leaves([state]):
            return next(iter(new.values()))
        return _structure(state).unflatten(list(new.values()))

    def rebuild(variable: Any, new: Mapping[Any, Any]) -> Any:
        at = attributes(variable)
        if at is None:
            return getattr(state_with(variable, new), _FROM_STATE)()
        made = object.__new__(type(variable))
        made.__dict__.update(variable.__dict__)
        made.__dict__.update((at[key], child) for key, child in new.items())
        return made

    def put(variable: Any, new: Mapping[Any, Any]) -> None:
        at = attributes(variable)
        if at is None:
            getattr(variable, _SET_STATE)(state_with(variable, new))
        else:
            variable.__dict__.update((at[key], child) for key, child in new.items())

    def carried_attributes(variable: Any) -> list[tuple[str, Any]]:
        held = {id(child) for child in children(variable).values()}
        fields: dict[str, Any] = getattr(variable, "__dict__", {})
        return [(name, value) for name, value in fields.items() if id(value) not in held]

    return NodeType(
        children,
        rebuild,
        put=put,
        carried=carried_attributes,
        static=lambda variable: _structure(getattr(variable, _GET_STATE)()),
        box=lambda variable: list(children(variable).items()),
    )


def _structure(node: Any) -> Any:
    """Returns the structure of a node whose children are leaves."""
    return jax.tree.structure(node, is_leaf=lambda inner: inner is not node)


def _key(key: Any) -> Any:
    for name in ("name", "key", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    return key


def register_functor(cls: type) -> None:
    """Registers a functor class with JAX, unless it is registered already."""
    if is_tree_node(cls):
        return

    def flatten_with_keys(node: Any) -> tuple[list[Any], Static | Constant]:
        values, static = flatten(node, _RULES)
        keys = map(tree_util.GetAttrKey, static.dynamic)
        return list(zip(keys, values, strict=True)), static

    tree_util.register_pytree_with_keys(
        cls,
        flatten_with_keys,
        lambda static, children: unflatten(static, children, _RULES),
        lambda node: flatten(node, _RULES),
    )


def _is_dynamic(child: Any) -> bool:
    """Returns whether a value is an array, node or container, or becomes an array in JAX."""
    return (
        isinstance(child, jax.ShapeDtypeStruct)
        or is_dynamic(child)
        or any("__jax_array__" in base.__dict__ for base in type(child).__mro__)
    )


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and any("_fields" in base.__dict__ for base in cls.__mro__)


def _opens(cls: type) -> bool:
    return is_tree_node(cls) or _is_namedtuple(cls)


_RULES = PyTreeRules(_is_dynamic, _opens, tree_util.tree_leaves, tree_util.tree_flatten)
