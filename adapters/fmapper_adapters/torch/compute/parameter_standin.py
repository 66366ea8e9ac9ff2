"""Tensors that stand in for parameters while a function is being transformed.

A `torch.nn.Parameter` is a leaf of autograd, so making one from an intermediate result would cut
the gradient off. While a gradient is taken, the replacement of a parameter therefore stays a
tensor, and remembers the parameter: it is trained if the parameter was, and becomes a parameter
    again when it leaves the transformation.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from fmapper_adapters.torch import _private

_MARK = "_fmapper_stands_for"  # (class of the parameter, whether it is trained)


class _Here(threading.local):
    depth = 0  # number of nested gradients in this thread


here = _Here()


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Returns whether a parameter made of this tensor would break a gradient."""
    if _private.is_wrapped(tensor):
        return True
    return here.depth > 0 and tensor.requires_grad and not tensor.is_leaf


def stands_for(tensor: Any) -> tuple[type, bool] | None:
    """Returns the class of the parameter that a tensor stands for, and whether it is trained."""
    cls = type(tensor)
    if cls is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter):  # the check is slow
        return cls, tensor.requires_grad
    mark: tuple[type, bool] | None = getattr(tensor, _MARK, None)
    return mark


def stand_in(new: Any, old: Any) -> Any:
    """Makes `new` stand for the parameter that `old` is or stands for."""
    mark = stands_for(old)
    if mark is not None and new is not old:
        new.__dict__.update(old.__dict__)
        setattr(new, _MARK, mark)
    return new


def is_trained(tensor: Any) -> bool | None:
    """Returns whether a parameter, or its stand-in, is trained; None for other tensors."""
    mark = stands_for(tensor)
    return None if mark is None else mark[1]


def forget(tensor: torch.Tensor) -> None:
    """Removes the mark of a stand-in from a parameter."""
    tensor.__dict__.pop(_MARK, None)
