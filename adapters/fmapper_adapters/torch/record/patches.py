"""What is patched while a module is recorded, so that the recording is what the module does.

* Libraries ask torch whether a call is being recorded and then do without what depends on values,
  such as leaving out a mask that masks nothing. Where that changes the numbers, they are told no.
* What forward takes in `**kwargs` becomes parameters of its own: torch.export loses it otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fmapper_adapters.torch import _private

_TORCH = os.path.dirname(torch.__file__) + os.sep
_QUESTIONS = ("is_compiling", "is_exporting", "is_dynamo_compiling")


class _Never:
    """A class without instances."""


@contextlib.contextmanager
def unaware() -> Iterator[None]:
    """Tells all but torch itself that nothing is recorded and no tensor is fake."""
    asked = {name: getattr(torch.compiler, name) for name in _QUESTIONS}
    fakes: Any = (
        _private.get_fakes()
    )  # where libraries find the class of the tensors of a recording
    kind = type(fakes)
    try:
        for name, function in asked.items():
            setattr(torch.compiler, name, _answer_only_torch(function))
        fakes.__class__ = _Module
        yield
    finally:
        fakes.__class__ = kind
        for name, function in asked.items():
            setattr(torch.compiler, name, function)


def _answer_only_torch(function: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        return function() if asks_torch(sys._getframe(1)) else False

    return answer


def asks_torch(frame: types.FrameType) -> bool:
    """Tells whether a frame is one of torch's own code."""
    name = frame.f_code.co_filename
    return name.startswith((_TORCH, "<frozen importlib"))


class _Module(types.ModuleType):
    @property
    def FakeTensor(self) -> type:
        """The class, or for others than torch one that no tensor is of."""
        found: type = vars(self)["FakeTensor"] if asks_torch(sys._getframe(1)) else _Never
        return found


@contextlib.contextmanager
def name_keywords(
    module: torch.nn.Module, kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> Iterator[Any]:
    """Gives the signature of forward every keyword that is given by name.

    Where sizes may vary, torch.export looks for keywords both by their names and in what `**` is
    called, and finds that the two differ.

    Args:
        module: The module; its forward is afterwards what it was.
        kwargs: The example inputs by keyword.
        dynamic_shapes: The sizes that may vary, with keywords by name or in what `**` is called.

    Yields:
        The sizes that may vary, with all keywords by name.
    """
    forward = module.forward
    signature = inspect.signature(forward)
    parameters = [*signature.parameters.values()]
    rest = parameters[-1].name if parameters and parameters[-1].kind == _REST else None
    extra = [name for name in kwargs if name == rest or name not in signature.parameters]
    if rest is None or not extra or dynamic_shapes is None:
        yield dynamic_shapes
        return
    if isinstance(dynamic_shapes, dict) and rest not in extra:
        inner = dynamic_shapes.get(rest) or {}
        dynamic_shapes = {n: s for n, s in dynamic_shapes.items() if n != rest} | inner

    @functools.wraps(forward)
    def spelled_out(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
    spelled_out.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters[:-1], *added]
    )
    before = vars(module).get("forward")
    try:
        module.forward = spelled_out
        yield dynamic_shapes
    finally:
        if before is None:
            vars(module).pop("forward", None)
        else:
            module.forward = before


_REST = inspect.Parameter.VAR_KEYWORD
