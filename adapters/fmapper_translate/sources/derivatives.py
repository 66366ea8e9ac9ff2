"""`torch.autograd.Function` while a model is recorded: its derivative runs, too."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fmapper_translate.walk.errors import NotTranscribed


class Context:
    """Tensors and settings that a forward pass keeps for its derivative.

    Args:
        needs_input_grad: Which arguments have a gradient.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keeps tensors."""
        self.saved_tensors = tensors

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.autograd.function.FunctionCtx, name):
            raise AttributeError(name)
        raise NotTranscribed(f"{name} of the context of a torch.autograd.Function")


def is_derivable(value: Any) -> bool:
    """Returns whether something is a class of a model with a derivative of its own."""
    is_class = isinstance(value, type) and issubclass(value, torch.autograd.Function)
    return is_class and not value.__module__.startswith("torch.")


def class_applied(callee: Any) -> type | None:
    """Returns the class whose `apply` is called, if it is such a class."""
    owner = getattr(callee, "__self__", None)
    return owner if is_derivable(owner) and callee.__name__ == "apply" else None


@contextmanager
def derivatives_run() -> Iterator[None]:
    """Has functions with derivatives of their own compute these when they are applied."""
    before = torch.autograd.Function.__dict__["apply"]

    @functools.wraps(before.__func__)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_derivable(cls):
            return before.__func__(cls, *args, **kwargs)
        if cls.setup_context is not torch.autograd.Function.setup_context:
            raise NotTranscribed(f"{cls.__name__}.setup_context has no counterpart")
        context = Context(tuple(isinstance(arg, torch.Tensor) for arg in args))
        result = cls.forward(context, *args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        ones = [torch.ones_like(x) if isinstance(x, torch.Tensor) else None for x in results]
        try:
            cls.backward(context, *ones)
        except AssertionError as error:
            raise NotTranscribed(f"{cls.__name__}.backward refuses: {error}") from error
        return result

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    named: list[tuple[dict[str, Any], str, Any]] = [
        (space, name, value)
        for space in [vars(x) for x in [*sys.modules.values()] if hasattr(x, "__dict__")]
        for name, value in [*space.items()]
        if type(value) is types.MethodType and class_applied(value) is not None
    ]
    for space, name, value in named:
        space[name] = value.__self__.apply
    try:
        yield
    finally:
        for space, name, value in named:
            space[name] = value
        torch.autograd.Function.apply = before  # type: ignore[method-assign]
