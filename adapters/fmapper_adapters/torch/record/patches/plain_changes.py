"""Finds the plain attributes that calls of a module change, which programs cannot do."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

from fmapper.programs import warn_of_changes
from fmapper_adapters.torch.record.patches.restore import plain_state


@contextlib.contextmanager
def note_changes(module: torch.nn.Module) -> Iterator[dict[str, None]]:
    """Compares the attributes before and after each call of a module within the block.

    Yields:
        The names of the attributes that calls have changed so far, in order.
    """
    names: dict[str, None] = {}
    begun: list[Any] = []

    def begin(module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            state = plain_state(module)
            begun.append((state, {name: _version(x) for name, x in state.arrays.items()}))

    def end(module: torch.nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            state, versions = begun.pop()
            written = [n for n, x in state.arrays.items() if _version(x) != versions[n]]
            names.update(dict.fromkeys((*state.changes(_flat_weights(module)), *written)))

    handles = [
        module.register_forward_pre_hook(begin, prepend=True),
        module.register_forward_hook(end),
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _flat_weights(module: torch.nn.Module) -> set[str]:
    """Returns the names of the lists in which recurrent layers keep their own parameters."""
    recurrent = [n for n, part in module.named_modules() if isinstance(part, torch.nn.RNNBase)]
    lists = ("_flat_weights", "_flat_weight_refs")
    return {f"{name}.{attribute}".strip(".") for name in recurrent for attribute in lists}


def _version(x: Any) -> int:
    """Returns how often a tensor was written to; 0 if torch does not count it."""
    is_counted = isinstance(x, torch.Tensor) and not x.is_inference()
    return x._version if is_counted else 0


def warn(module: torch.nn.Module, names: Collection[str]) -> None:
    """Warns about the attributes that calls of a module change."""
    warn_of_changes(
        type(module).__name__,
        names,
        "keep tensors in buffers (register_buffer), and return what is read after a call",
    )
