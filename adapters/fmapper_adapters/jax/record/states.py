"""Models of Equinox whose calls take and return a state, such as running statistics."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.record import closure


def is_state(x: Any) -> bool:
    """Returns whether an object is a state of Equinox."""
    cls = getattr(sys.modules.get("equinox.nn"), "State", None)
    return cls is not None and isinstance(x, cls)


def is_stateful(model: Any) -> bool:
    """Returns whether a model is a pair of a model and its state, as from `make_with_state`."""
    return isinstance(model, tuple) and len(model) == 2 and is_state(model[1])


class HeldState:
    """The state of a model as arrays, named by the paths of their `StateIndex` in the model.

    Args:
        model: The model that takes the state.
        state: The state.

    Attributes:
        arrays: Copies of the arrays of the state, by name.
    """

    def __init__(self, model: Any, state: Any) -> None:
        leaves, self._structure = jax.tree.flatten(state)
        self._names = _names(model, jax.tree.unflatten(self._structure, range(len(leaves))))
        self.arrays = {
            name: jnp.array(leaf, copy=True) for name, leaf in zip(self._names, leaves, strict=True)
        }

    def state(self, arrays: Mapping[str, Any]) -> Any:
        """Returns a state with these arrays."""
        return jax.tree.unflatten(self._structure, [arrays[name] for name in self._names])

    def by_name(self, state: Any) -> dict[str, Any]:
        """Returns the arrays of a state by name."""
        return dict(zip(self._names, jax.tree.leaves(state), strict=True))


def _names(model: Any, numbers: Any) -> list[str]:
    """Returns the names of the arrays of a state.

    Args:
        model: The model with the indices.
        numbers: The state, with the number of each array in its place.
    """
    names: dict[int, str] = {}
    index = sys.modules["equinox.nn"].StateIndex
    for path, node in closure.objects_at(model):
        for attr, value in getattr(node, "__dict__", {}).items():
            if isinstance(value, index):
                entry = jax.tree_util.tree_flatten_with_path(numbers.get(value))[0]
                for keys, number in entry:
                    inner = jax.tree_util.keystr(keys, simple=True, separator=".")
                    name = ".".join(filter(None, (path, attr, inner)))
                    names.setdefault(number, name)
    count = len(jax.tree.leaves(numbers))
    return [names.get(i, f"state.{i}") for i in range(count)]


class Statistics:
    """Collects the layers that a call of a transcribed model of Equinox gives other statistics.

    Attributes:
        layers: The ids of layers -> the same with new statistics.
    """

    name = "statistics"  # the keyword of calls

    def __init__(self) -> None:
        self.layers: dict[int, Any] = {}

    def __getitem__(self, layer: Any) -> Any:
        return self.layers.get(id(layer), layer)

    def __setitem__(self, layer: Any, new: Any) -> None:
        self.layers[id(layer)] = new

    def update(self, model: Any) -> Any:
        """Returns a model with the new statistics."""
        return jax.tree.map(self.__getitem__, model, is_leaf=lambda x: id(x) in self.layers)


def collects_statistics(model: Any) -> bool:
    """Returns whether calls of a model take a collector of statistics by keyword."""
    if closure.is_function(model) or not callable(model):
        return False
    parameter = inspect.signature(type(model).__call__).parameters.get(Statistics.name)
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def statistics_of(model: Any) -> set[str]:
    """Returns the names of the arrays that such calls change: buffers of what takes it."""
    return {
        f"{path}.{name}"
        for path, node in closure.objects_at(model)
        if collects_statistics(node)
        for name, field in getattr(type(node), "__dataclass_fields__", {}).items()
        if field.metadata.get("trained") is False
    }


def parameter_at(function: Callable[..., Any] | None, skipped: int) -> tuple[int, str]:
    """Returns position and name of the parameter for the state, counted after the skipped ones.

    It is the parameter called `state` or annotated as a state, else the second one.
    """
    if function is None:
        return 1, "state"
    parameters = list(inspect.signature(function).parameters.values())[skipped:]
    for i, parameter in enumerate(parameters):
        annotation = str(getattr(parameter.annotation, "__name__", parameter.annotation))
        if parameter.name == "state" or annotation.rpartition(".")[2] == "State":
            return i, parameter.name
    return 1, parameters[1].name if len(parameters) > 1 else "state"


def without(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function whose signature lacks a parameter."""
    signature = inspect.signature(function)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != name]

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return run


def split_output(output: Any) -> tuple[Any, Any]:
    """Returns an output without its state, and the state; None if it has no state."""
    if is_state(output):
        return (), output
    if not isinstance(output, tuple | list):
        return output, None
    states = [item for item in output if is_state(item)]
    if len(states) != 1:
        return output, None
    rest = tuple(item for item in output if not is_state(item))
    return (rest[0] if len(rest) == 1 else rest), states[0]


def call_with_state(
    model: Callable[..., Any], place: tuple[int, str], state: Any,
    args: tuple[Any, ...], kwargs: Mapping[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Calls a model with its state among its arguments; returns the output, and the new state."""
    at, name = place
    if at <= len(args):  # by position, as functions from `vmap` require
        return split_output(model(*args[:at], state, *args[at:], **kwargs))
    return split_output(model(*args, **{**kwargs, name: state}))


def statement_without(statement: str) -> str:
    """Returns a statement that assigns the output of a call and its state, without the state.

    Examples:
        >>> statement_without("x, state = self.norm(x, state)")
        'x = self.norm(x, state)'
    """
    tree = ast.parse(statement).body[0]
    target = tree.targets[0] if isinstance(tree, ast.Assign) and len(tree.targets) == 1 else None
    if not isinstance(target, ast.Tuple):
        return statement
    assert isinstance(tree, ast.Assign)
    kept = [element for element in target.elts if not ast.unparse(element).endswith("state")]
    if len(kept) not in (len(target.elts) - 1, len(target.elts)):
        return statement
    kept = kept if len(kept) < len(target.elts) else target.elts[:-1]
    tree.targets = [kept[0] if len(kept) == 1 else ast.Tuple(kept, ast.Store())]
    return ast.unparse(tree)
