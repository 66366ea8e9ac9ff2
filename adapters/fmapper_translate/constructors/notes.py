"""The arguments of constructors, read while they make models."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

_noted: weakref.WeakKeyDictionary[nn.Module, tuple[Sequence[Any], Mapping[str, Any]]] = (
    weakref.WeakKeyDictionary()
)


def arguments_of(model: nn.Module) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Returns what the constructor of a model was given; None if it was not noted."""
    return _noted.get(model)


@contextlib.contextmanager
def note_arguments() -> Iterator[None]:
    """Notes what constructors of modules are given within the block.

    `nn.Module.__init__`, which they call first, reads it from their frames.
    """
    original = nn.Module.__init__

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made_by = getattr(type(self).__init__, "__code__", None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == "__init__":
            if frame.f_code is made_by:
                _noted[self] = _arguments_in(frame)
            frame = frame.f_back

    nn.Module.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]


def _arguments_in(frame: FrameType) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns the arguments of a constructor in its frame: what it was given, and its defaults."""
    names, more, keywords, values = inspect.getargvalues(frame)
    code = frame.f_code
    only_named = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    by_place = [name for name in names[1:] if name not in only_named]
    given = {name: values[name] for name in only_named} | (values[keywords] if keywords else {})
    if more and values[more]:
        return [*(values[name] for name in by_place), *values[more]], given
    return (), {name: values[name] for name in by_place} | given
