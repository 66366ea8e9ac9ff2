"""Records `part.forward(x)` as a call of the part, like `part(x)`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

# Takes a module, its forward, positional and keyword arguments; returns the result.
Call = Callable[[torch.nn.Module, Callable[..., Any], Any, Any], Any]


@contextlib.contextmanager
def watch(module: torch.nn.Module, call: Call) -> Iterator[None]:
    """Routes calls of `forward` of a module and its submodules through `call` within the block.

    `super().forward(x)` stays part of the call that it is in.
    """
    classes: set[Any] = {cls for inner in module.modules() for cls in type(inner).__mro__}
    changed: list[tuple[Any, FunctionType]] = []
    try:
        for cls in classes - {torch.nn.Module}:
            forward = vars(cls).get("forward")
            if isinstance(forward, FunctionType):
                changed.append((cls, forward))
                cls.forward = _wrap(cls, forward, call)
        yield
    finally:
        for cls, forward in changed:
            cls.forward = forward


def call_as_part(module: torch.nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function in a recording as torch calls a module, so that it is traced as a module."""
    from torch.fx.experimental import proxy_tensor

    mode: Any = proxy_tensor.get_proxy_mode()
    return mode.tracer.call_module(module, run, args, kwargs)


def _wrap(cls: type, forward: FunctionType, call: Call) -> Any:
    @functools.wraps(forward)
    def forward_or_part(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(forward, self)
        if next(base for base in type(self).__mro__ if "forward" in vars(base)) is not cls:
            return run(*args, **kwargs)
        return call(self, run, args, kwargs)

    return forward_or_part
