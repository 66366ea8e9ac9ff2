"""Hides from models that they are being recorded.

Libraries ask torch whether a call is being recorded, and if so avoid operations that depend on
values, such as dropping a mask that masks nothing. If that changes the results, the recording is
hidden.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fmapper_adapters.torch import _private

_TORCH = os.path.dirname(torch.__file__) + os.sep
_QUESTIONS = ("is_compiling", "is_exporting", "is_dynamo_compiling")


class _Never:
    """A class without instances, in place of that of fake tensors."""


@contextlib.contextmanager
def tell_nothing() -> Iterator[None]:
    """Hides the recording from all code but torch's own."""
    functions = {name: getattr(torch.compiler, name) for name in _QUESTIONS}
    # Libraries look for the class of fake tensors there.
    fakes: Any = _private.get_fakes()
    kind = type(fakes)
    try:
        for name, function in functions.items():
            setattr(torch.compiler, name, _answer_only_torch(function))
        fakes.__class__ = _Module
        yield
    finally:
        fakes.__class__ = kind
        for name, function in functions.items():
            setattr(torch.compiler, name, function)


def _answer_only_torch(function: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        return function() if asks_torch(sys._getframe(1)) else False

    return answer


def asks_torch(frame: types.FrameType) -> bool:
    """Returns whether a frame runs torch's own code."""
    name = frame.f_code.co_filename
    return name.startswith((_TORCH, "<frozen importlib"))


class _Module(types.ModuleType):
    @property
    def FakeTensor(self) -> type:
        """The class of fake tensors for torch; a class without instances for other code."""
        cls: type = vars(self)["FakeTensor"] if asks_torch(sys._getframe(1)) else _Never
        return cls
