"""Node types of Flax NNX: modules and other pytrees, variables, states.

Releases of NNX differ in layout: the base class of modules is `Pytree` or `Object`, its bookkeeping
is in `_pytree__*` or `_object__*`, and the value of a variable in `_raw_value` or `raw_value`. The
layout of the installed release is read from a module and a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx
from flax.nnx import tracers, variablelib

from fmapper.backends import BoxKey, NodeType
from fmapper_adapters.flax import _private
from fmapper_adapters.flax.children import ChildTest, box_type, carried_attributes
from fmapper_adapters.flax.packed import PACKED, of_blocks, to_blocks
from fmapper_adapters.jax.libraries import PackedArray

Variable: Any = nnx.Variable
Node: Any = getattr(nnx, "Pytree", None) or nnx.Object
State: Any = nnx.State
TraceState: Any = tracers.TraceState
_Hijax: Any = vars(variablelib).get("HijaxVariable")
_Box: Any = vars(nnx).get("VariableState")  # held by a State before Flax 0.12

_new: Callable[[type], Any] = object.__new__
_set = object.__setattr__

_BOOKKEEPING: dict[str, Any] = vars(nnx.Module())
_STATE = next(name for name, value in _BOOKKEEPING.items() if hasattr(value, "trace_state"))
_FLAGS = next((name for name, value in _BOOKKEEPING.items() if isinstance(value, Mapping)), "")
_STATE_TYPE: Any = type(_BOOKKEEPING[_STATE])
_STATE_SLOTS = [name for name in _STATE_TYPE.__slots__ if name != _private.TRACE_STATE]

VALUE = BoxKey("value")
_VALUE_SLOT = _private.value_slot(Variable)
_OWN_SLOTS = (_private.TRACE_STATE, _private.VARIABLE_METADATA, _VALUE_SLOT)


def node_type(cls: type) -> NodeType | None:
    """Returns the node type of a class of NNX; None for every other class."""
    mro = cls.__mro__  # no issubclass: the metaclass of Variable overrides it
    if Variable in mro:
        return _variable_type(cls)
    if Node in mro:
        return _module_type(cls)
    if State in mro:
        return _state_type(cls)
    if cls is _Hijax:
        return NodeType(
            lambda variable: {VALUE: variable.get_raw_value()},
            lambda variable, new: variable.copy(new[VALUE]),
        )
    if cls is _Box:
        return box_type(cls, "value", VALUE)
    return None


def _own(cls: type) -> bool | None:
    if cls is _STATE_TYPE:
        return False
    return True if Variable in cls.__mro__ or Node in cls.__mro__ or cls is _Hijax else None


def _is_ref(value: Any) -> bool:
    """Returns whether a value is a mutable reference, as in a `ref=True` variable."""
    return bool(variablelib.is_array_ref(value))


# --- variables ------------------------------------------------------------------------------------


def _variable_type(cls: type) -> NodeType:
    """Makes the type of a variable: a box around its value, whose metadata is carried over.

    The path of a parameter's array is `layers[0].kernel.value`, as in Python and `jax.tree_util`,
    and `layers[0].kernel` is the variable; two modules that share a variable still share it
    afterwards. Since `value` is a `BoxKey`, `state` calls the array `layers.0.kernel`, as
    `nnx.state`, checkpoints and the state dicts of torch do.

    The value may be of any backend. Flax computes with NumPy arrays in variables, and copies them
    to a device in every call; it can only store torch tensors. A packed array is stored block by
    block.
    """
    get_value, set_value = _slot(cls, _VALUE_SLOT)
    get_metadata, set_metadata = _slot(cls, _private.VARIABLE_METADATA)
    _, set_trace = _slot(cls, _private.TRACE_STATE)
    in_dict = cls.__dictoffset__ != 0  # variables forward attributes to their array
    others = [
        name
        for base in cls.__mro__
        for name in getattr(base, "__slots__", ())
        if name not in (*_OWN_SLOTS, "__weakref__", "__dict__")
    ]

    def items(variable: Any) -> tuple[tuple[Any, Any], ...]:
        value, metadata = get_value(variable), get_metadata(variable)
        if metadata.get("ref") and _is_ref(value):
            value = value[...]
        if PACKED in metadata:
            value = of_blocks(value, metadata)
        return ((VALUE, value),)

    def open(variable: Any, keep: Callable[[Any], None]) -> Any:
        value = get_value(variable)
        metadata = get_metadata(variable).copy()
        new = _new(cls)
        set_trace(new, TraceState())
        set_metadata(new, metadata)
        if others or in_dict:
            _carry(variable, new, others)
        fill = store
        if metadata.get("ref"):  # the reference belongs to the variable; its content does not
            value = value[...] if _is_ref(value) else value
            fill = _set_ref
        if PACKED in metadata:
            value = of_blocks(value, metadata)
        keep(value)
        return new, iter(((VALUE, value),)), {}, partial(_fill, new, fill)

    def store(variable: Any, array: Any) -> None:
        metadata = get_metadata(variable)
        if type(array) is PackedArray or PACKED in metadata:
            array = to_blocks(array, metadata)
        set_value(variable, array)

    def _set_ref(variable: Any, array: Any) -> None:
        store(variable, array)
        value = get_value(variable)
        set_value(variable, jax.new_ref(value) if isinstance(value, jax.Array) else value)

    def put(variable: Any, new: Mapping[Any, Any]) -> None:
        value = new[VALUE]
        if value is not items(variable)[0][1]:
            (_set_ref if get_metadata(variable).get("ref") else store)(variable, value)

    return NodeType.from_opener(
        open, items, put=put, static=lambda variable: dict(get_metadata(variable)), box=items
    )


def _slot(cls: Any, name: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """Returns functions that read and set a variable's slot past its `__setattr__`."""
    slot = getattr(cls, name, None)
    if slot is None or not hasattr(type(slot), "__set__"):  # an ordinary attribute
        return lambda variable: _get(variable, name), lambda variable, x: _set(variable, name, x)
    return slot.__get__, slot.__set__


_get = object.__getattribute__


def _carry(variable: Any, new: Any, slots: list[str]) -> None:
    for name in slots:
        try:
            _set(new, name, _get(variable, name))
        except AttributeError:  # not set
            continue
    if type(variable).__dictoffset__:
        attributes = _get(variable, "__dict__")
        _get(new, "__dict__").update((k, v) for k, v in attributes.items() if k not in _OWN_SLOTS)


def _fill(new: Any, fill: Callable[[Any, Any], None], slots: dict[Any, Any]) -> Any:
    fill(new, slots[VALUE])
    return new


# --- modules --------------------------------------------------------------------------------------


def _module_type(cls: Any) -> NodeType:
    """Makes the type of modules.

    Children are variables, nodes, arrays, containers of those, and attributes marked as `nnx.data`.
    All other attributes are settings and are carried over. The new module belongs to the trace in
    which it is created, so that attributes can be set there.
    """
    numbered = _private.has_int_keys(cls)
    flagged = bool(_FLAGS) and _private.is_pytree(cls)
    test = ChildTest(_own)
    known_types = test.known

    def find(state: dict[str, Any]) -> tuple[list[tuple[Any, Any]], list[str]]:
        """Returns the children, and those among them that Flax considers static."""
        flags: Any = state[_FLAGS] if flagged else {}
        flags = getattr(flags, _private.FLAGS_MAPPING, flags)
        pairs: list[tuple[Any, Any]] = []
        unmarked: list[str] = []
        for name, value in state.items():
            is_child = known_types.get(type(value))
            if is_child is None:
                is_child = name not in _BOOKKEEPING and test(value)
            marked = flags.get(name)
            if is_child:
                pairs.append((name, value))
                if flagged and not marked:
                    unmarked.append(name)
            elif marked and name not in _BOOKKEEPING:
                pairs.append((name, value))
        return pairs, unmarked

    def items(module: Any) -> list[tuple[Any, Any]]:
        pairs, _ = find(module.__dict__)
        return _list_items(pairs) if numbered else pairs

    def open(module: Any, keep: Callable[[Any], None]) -> Any:
        state = module.__dict__.copy()
        pairs, unmarked = find(state)
        state[_STATE] = _fresh(state[_STATE])
        new = _new(cls)
        _set(new, "__dict__", state)
        keep(pairs)
        if numbered:
            pairs = _list_items(pairs)
            keep(pairs)
            return new, iter(pairs), {}, partial(_fill_list, new, state, unmarked)
        if unmarked:
            return new, iter(pairs), state, partial(_mark, new, state, unmarked)
        return new, iter(pairs), state, None

    def beside(module: Any) -> list[tuple[str, Any]]:
        state = module.__dict__
        children = dict.fromkeys(name for name, _ in find(state)[0])
        rest = (pair for pair in state.items() if pair[0] not in children)
        return carried_attributes(pair for pair in rest if pair[0] not in _BOOKKEEPING)

    def put(module: Any, new: Mapping[Any, Any]) -> None:
        state = module.__dict__
        state.update((str(name), child) for name, child in new.items())
        _, unmarked = find(state)
        _mark(module, state, unmarked, None)

    def settings(module: Any) -> dict[str, Any]:
        state = module.__dict__
        children = dict.fromkeys(name for name, _ in find(state)[0])
        beside = children.keys() | _BOOKKEEPING.keys()
        return {name: value for name, value in state.items() if name not in beside}

    return NodeType.from_opener(open, items, carried=beside, put=put, static=settings)


def _fresh(state: Any) -> Any:
    """Returns the bookkeeping of a new module in the current trace."""
    new = _new(_STATE_TYPE)
    setattr(new, _private.TRACE_STATE, TraceState())
    for name in _STATE_SLOTS:
        setattr(new, name, getattr(state, name))
    return new


def _list_items(children: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Lists the items of an `nnx.List`, numbers first and sorted, since attributes are not."""
    pairs = [(int(name) if name.isdecimal() else name, value) for name, value in children]
    return sorted(pairs, key=lambda pair: pair[0] if isinstance(pair[0], int) else len(pairs))


def _fill_list(new: Any, state: dict[str, Any], unmarked: list[str], slots: dict[Any, Any]) -> Any:
    for key, child in slots.items():
        state[str(key)] = child
    return _mark(new, state, unmarked, slots) if unmarked else new


def _mark(new: Any, state: dict[str, Any], unmarked: list[str], _: Any) -> Any:
    """Marks children as data that Flax does not recognise, such as torch tensors."""
    data = {name: True for name in unmarked if _has_data(state[name])}
    if data:
        state[_FLAGS] = state[_FLAGS].update(data)
    return new


def _has_data(value: Any) -> bool:
    return any(map(nnx.is_data, jax.tree.leaves(value, is_leaf=nnx.is_data)))


# --- states ---------------------------------------------------------------------------------------


def _state_type(cls: type) -> NodeType:
    """Makes the type of a mapping, in its own order rather than sorted."""

    def items(state: Any) -> Any:
        return state.__dict__["_mapping"].items()

    def open(state: Any, keep: Callable[[Any], None]) -> Any:
        attributes = state.__dict__.copy()
        source = attributes["_mapping"].copy()
        keep(source)
        slots = attributes["_mapping"] = source.copy()
        new = _new(cls)
        _set(new, "__dict__", attributes)
        return new, iter(source.items()), slots, None

    def put(state: Any, new: Mapping[Any, Any]) -> None:
        state.__dict__["_mapping"].update(new)

    return NodeType.from_opener(open, items, put=put, static=lambda state: None)
