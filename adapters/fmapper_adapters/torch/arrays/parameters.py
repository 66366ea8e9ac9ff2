"""Replaces autograd leaves: parameters keep their class, gradients and attributes."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fmapper_adapters.torch import _private
from fmapper_adapters.torch.arrays import tensors, wrappers
from fmapper_adapters.torch.compute import parameter_standin

Step = Callable[[], object]
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_EXTRAS = [operator.attrgetter(name) for name in ("__dict__", *_HOOKS)]
_is_leaf = operator.attrgetter("is_leaf")


def is_replaceable(tensor: torch.Tensor) -> bool:
    """Returns whether a new autograd leaf may replace a tensor.

    It may not if the tensor has a history, or while a gradient with respect to it is taken: a new
        leaf would cut the graph.
    """
    if tensors.is_transformed(tensor) or not tensor.is_leaf:
        return False
    return not (parameter_standin.here.depth and tensor.requires_grad)


def are_ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether all tensors may be replaced and have neither attributes nor hooks.

    Args:
        tensors: Tensors of no subclass but `Parameter`.
    """
    if parameter_standin.here.depth or not all(map(_is_leaf, tensors)):
        return False
    return not any(any(map(extra, tensors)) for extra in _EXTRAS)


def replace_all(
    olds: Sequence[torch.Tensor], values: Sequence[torch.Tensor], grads: Sequence[Any]
) -> None:
    """Makes new tensors replacements of ordinary ones: parameters of parameters.

    Args:
        olds: Ordinary tensors.
        values: A new plain tensor for each, which is changed in place.
        grads: The new gradient of each, or None.
    """
    for old, new, grad in zip(olds, values, grads, strict=True):
        if type(old) is torch.nn.Parameter:
            new.__class__ = torch.nn.Parameter  # half the time of another tensor on this memory
        if old.requires_grad:
            new.requires_grad = True
        if grad is not None:
            new.grad = grad


def replace(
    old: torch.Tensor, values: torch.Tensor, grad: torch.Tensor | None = None
) -> torch.Tensor:
    """Replaces an autograd leaf: new values, with gradient and attributes of the old one."""
    if isinstance(old, torch.nn.Parameter):
        return as_parameter(values, old, grad)
    if old.requires_grad:
        values.requires_grad_()
    _carry(old, values, grad)
    return values


def swap(old: torch.Tensor, new: Any) -> tuple[Step, Step] | None:
    """Prepares to give a parameter the values of another, by the rules of `Module.to`.

    Returns:
        Functions that do and undo it; None if `Module.to` would replace the parameter, too.
    """
    is_tied = isinstance(old, torch.nn.Parameter) or (old.is_leaf and old.requires_grad)
    if not (is_tied and isinstance(new, torch.Tensor)):
        return None
    if torch.__future__.get_swap_module_params_on_conversion():
        return _exchange(old, new)
    if wrappers.is_wrapper(old) or wrappers.is_wrapper(new):
        referred = weakref.getweakrefs(old) or weakref.getweakrefs(new)  # torch cannot swap them
        return None if referred else _exchange(old, new)
    if torch.__future__.get_overwrite_module_params_on_conversion():
        return None
    pairs = [(old, new)]
    if old.grad is not None and new.grad is not None:
        pairs.append((old.grad, new.grad))
    if not all(_private.may_take_values_of(a, b) for a, b in pairs):
        return None
    before = [(a, a.data) for a, _ in pairs]

    def set_values(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, values in pairs:
            tensor.data = values

    return partial(set_values, [(a, b.data) for a, b in pairs]), partial(set_values, before)


def _exchange(old: torch.Tensor, new: torch.Tensor) -> tuple[Step, Step]:
    """Exchanges two tensors, and exchanges them back if that was done."""
    content: Any = old
    is_before = partial(operator.eq, _private.identity_of(content))

    def swap() -> None:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]

    def undo() -> None:
        if not is_before(_private.identity_of(content)):
            swap()

    return swap, undo


def as_parameter(
    values: torch.Tensor, old: torch.nn.Parameter, grad: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns a parameter with new values, and all properties of the old one but the gradient."""
    stood = None if type(old) is torch.nn.Parameter else parameter_standin.stands_for(old)
    cls, trained = stood or (type(old), old.requires_grad)
    grows = trained and (values.is_floating_point() or values.is_complex())
    new: torch.Tensor
    if type(values) is torch.Tensor:  # as Parameter() does, but faster
        made = torch.nn.Parameter if wrappers.dispatches(cls) else cls
        new = _private.make_parameter(made, values, grows)
    else:
        new = torch.nn.Parameter(values.detach(), requires_grad=grows)
        if not wrappers.dispatches(type(values)):
            new.__class__ = cls
    _carry(old, new, grad)
    if cls is not type(old):
        parameter_standin.forget(new)
    return new


def _carry(old: torch.Tensor, new: torch.Tensor, grad: torch.Tensor | None) -> None:
    if old.__dict__ and (type(old) is type(new) or not wrappers.dispatches(type(old))):
        made = new.__dict__  # attributes set by classes with dispatch are kept
        made.update((name, value) for name, value in old.__dict__.items() if name not in made)
    for hooks in _HOOKS:
        registered = getattr(old, hooks)
        if registered and new.requires_grad:
            setattr(new, hooks, registered.copy())
    if grad is not None:
        new.grad = grad
