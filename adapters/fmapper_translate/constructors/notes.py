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

    A profile function reads it from their frames when they begin, before they change any of it.
    """

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__init__":
            made = frame.f_locals.get(frame.f_code.co_varnames[0])
            kind: Any = type(made)
            makes = inspect.unwrap(kind.__init__)  # of a decorator
            if isinstance(made, nn.Module) and getattr(makes, "__code__", None) is frame.f_code:
                _noted[made] = _arguments_in(frame)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


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
