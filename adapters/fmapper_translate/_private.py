"""The private API of PyTorch that the translator uses, in 2.11 to 2.13."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

FUNCTIONS_OF_TREES = {
    _pytree.tree_flatten: "jax.tree.flatten({0})",
    _pytree.tree_unflatten: "jax.tree.unflatten({1}, {0})",
    _pytree.tree_map: "jax.tree.map({0}, {1})",
}


class _Watch(SchemaCheckMode):  # type: ignore[no-untyped-call]  # one of the few classes that are let in front of the decompositions
    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        base: Any = TorchDispatchMode
        base.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._tell = tell

    def __enter__(self) -> Any:
        base: Any = TorchDispatchMode
        return base.__enter__(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tell(func, args, dict(kwargs or {}), result)
        return result


@contextmanager
def watch_operations(
    tell: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
) -> Iterator[None]:
    """Tells which ATen operations a program calls, before any of them is decomposed.

    Args:
        tell: Is given the operation, its arguments by position and by keyword, and its result.
    """
    with enable_python_dispatcher(), _Watch(tell):
        yield


def is_view(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a part or another form of one, whose memory it shares."""
    return bool(tensor._is_view())


def name_of_operation(overload: Any) -> str:
    """Returns the name of an operation with its overload: `aten::add.Tensor`."""
    name = str(overload.name())
    return name if "." in name else f"{name}.default"


@functools.cache
def parameters_of(overload: Any) -> dict[str, tuple[str, Any]]:
    """Returns the parameters of an operation: their types, where sizes are `SymInt`, and defaults.

    Arguments that are the defaults are not given to an operation by PyTorch.
    """
    from torchgen.model import FunctionSchema  # type: ignore[import-untyped]

    defaults = [item.default_value for item in overload._schema.arguments]
    written = str(overload._schema).partition("::")[2]
    for default in defaults:
        if isinstance(default, list):  # which the parser takes without spaces alone
            written = written.replace(str(default), str(default).replace(" ", ""))
    schema = FunctionSchema.parse(written)
    pairs = zip(schema.arguments.flat_all, defaults, strict=True)
    return {item.name: (str(item.type), default) for item, default in pairs}


def operations_within(
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[Any, ...]], Any]:
    """Runs an operation as PyTorch composes it of others; returns those and its result."""
    composed = overload.decompose
    if not overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        composed = _decompositions().get(overload, composed)
    within: list[tuple[Any, ...]] = []
    with torch.no_grad(), watch_operations(lambda *what: within.append(what)):
        result = composed(*args, **kwargs)
    return within, result


@functools.cache
def _decompositions() -> dict[Any, Any]:
    table: Any = torch.export.default_decompositions()
    return dict(table.items())


NORMS = torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm


def has_computed_weights(module: torch.nn.Module, *norms: Any) -> bool:
    """Returns whether a hook of such norms, by default of all, computes weights of a module."""
    kinds = {norm.__module__ for norm in norms or NORMS}
    return any(type(hook).__module__ in kinds for hook in module._forward_pre_hooks.values())
