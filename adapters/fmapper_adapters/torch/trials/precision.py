"""Computes in double precision whatever dtypes a module asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmapper_adapters.torch._private import TorchDispatchMode, pytree

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


def wider(x: Any) -> Any:
    """Returns double precision for a floating dtype; anything else unchanged."""
    return _WIDER.get(x, x) if isinstance(x, torch.dtype) else x


@contextlib.contextmanager
def precision(*, double: bool) -> Iterator[None]:
    """Makes torch create tensors in double precision within the block, if wanted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class WideCasts(TorchFunctionMode):
    """Widens the dtypes in arguments of functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func in _CASTS else func
        named = {key: wider(value) for key, value in (kwargs or {}).items()}
        return func(*map(wider, args), **named)


class Dtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the floating dtypes of results.

    Attributes:
        dtypes: The names of the dtypes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
                self.dtypes.add(str(x.dtype).removeprefix("torch."))
        return result
