"""Records the custom gradients of a module: those of `torch.autograd.Function`.

torch.export records the `forward` of such a function, and forgets its `backward`. Here `backward`
is recorded too, with stand-ins for the gradients of the outputs; the operations that depend on them
become an inner graph, for the target framework.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_aggregate

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import FakeTensor, FunctionalTensor

TRACED = (FunctionalTensor, FakeTensor)
_calls = itertools.count()
met: set[str] = set()  # functions whose recording was tried


@torch.library.custom_op("fmapper::cotangent", mutates_args=())
def cotangent(y: torch.Tensor, call: int) -> torch.Tensor:
    """Represents the gradient of an output."""
    return torch.zeros_like(y)


@cotangent.register_fake
def _(y: torch.Tensor, call: int) -> torch.Tensor:
    return torch.empty_like(y)


@torch.library.custom_op("fmapper::with_gradient", mutates_args=())
def with_gradient(
    ys: list[torch.Tensor],
    xs: list[torch.Tensor],
    cotangents: list[torch.Tensor],
    gradients: list[torch.Tensor],
    places: list[int],
    name: str,
    once: bool,
    parameters: str,
) -> list[torch.Tensor]:
    """Returns the ys, with the given gradients with respect to the xs; -1 for unknown ones.

    The gradients can be differentiated again unless `once` is set. `parameters` has the names of
    the xs in `forward`, separated by commas.
    """
    return [y.clone() for y in ys]


@with_gradient.register_fake
def _(
    ys: list[torch.Tensor],
    xs: list[torch.Tensor],
    cotangents: list[torch.Tensor],
    gradients: list[torch.Tensor],
    places: list[int],
    name: str,
    once: bool,
    parameters: str,
) -> list[torch.Tensor]:
    return [torch.empty_like(y) for y in ys]


@contextlib.contextmanager
def record_functions() -> Iterator[None]:
    """Records custom autograd functions with their gradients, within the block.

    `Function.apply` may already be bound to a name, and since torch 2.15 it calls no Python code
    but the function's own `forward`. So the `forward` of every such class is patched.
    """
    if _originals:  # inside another recording
        yield
        return
    enter = _META.__init__
    changed: list[tuple[type, Any]] = []

    def enter_new(cls: Any, *args: Any) -> None:
        enter(cls, *args)
        _change([cls], changed)

    try:
        _originals[None] = None
        _META.__init__ = enter_new
        _change(_below(torch.autograd.Function), changed)
        yield
    finally:
        _META.__init__ = enter
        for cls, forward in changed:
            if forward is None:
                del cls.forward  # type: ignore[attr-defined]
            else:
                cls.forward = forward  # type: ignore[attr-defined]
        _originals.clear()


_META: Any = type(torch.autograd.Function)
_originals: dict[Any, Any] = {}
_within_forward = threading.local()


def _below(cls: type) -> list[type]:
    classes: list[type] = cls.__subclasses__()
    return [*classes, *(inner for subclass in classes for inner in _below(subclass))]


def _change(classes: list[type], changed: list[tuple[type, Any]]) -> None:
    """Patches the `forward` of classes to be recorded with its gradient."""
    forwards = [(cls, getattr(cls, "forward", None)) for cls in dict.fromkeys(classes)]
    for cls, forward in forwards:
        if forward is None or cls.__module__.startswith("torch."):
            continue
        changed.append((cls, vars(cls).get("forward")))
        _set_forward(cls, _originals.get(forward, forward))


def _set_forward(cls: Any, original: Callable[..., Any]) -> None:
    gets_context = cls.setup_context is torch.autograd.Function.setup_context

    @functools.wraps(original)
    def forward(*args: Any) -> Any:
        inputs = args[1:] if gets_context else args
        is_traced = any(isinstance(x, TRACED) for x in inputs)
        if not is_traced or getattr(_within_forward, "flag", False):
            return original(*args)
        with _traced_grad_mode() as has_gradient:
            if not has_gradient:
                return original(*args)
            return _forward(cls, original, inputs, gets_context=gets_context)

    _originals[forward] = original
    cls.forward = staticmethod(forward)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Inlines nested functions into the function being recorded."""
    _within_forward.flag = True
    try:
        yield
    finally:
        _within_forward.flag = False


@contextlib.contextmanager
def _traced_grad_mode() -> Iterator[bool]:
    """Restores, within the block, the grad mode of the caller.

    `apply` has switched gradients off without the recorder's knowledge, so the end of a `no_grad`
    inside it would be recorded as switching off gradients after the function.
    """
    mode = get_proxy_mode()
    nodes = () if mode is None else reversed(mode.tracer.graph.nodes)
    flags = (node.args[0] for node in nodes if _private.is_set_grad_enabled(node.target))
    before = torch.is_grad_enabled()
    enabled = bool(next(flags, True))
    _private.set_grad_enabled(enabled)
    try:
        yield enabled
    finally:
        _private.set_grad_enabled(before)


def _forward(
    cls: Any, original: Callable[..., Any], args: tuple[Any, ...], *, gets_context: bool
) -> Any:
    met.add(cls.__qualname__)
    context: Any = _Context()
    context.needs_input_grad = tuple(_has_gradient(arg) for arg in args)
    before = {id(x): x.clone() for x in args if _has_gradient(x)}
    with _alone():
        if gets_context:
            results = original(context, *args)
        else:
            results = original(*args)
            cls.setup_context(context, args, results)
    outputs = given = list(results) if isinstance(results, tuple | list) else [results]
    fixed = {id(x) for x in getattr(context, "non_differentiable", ())}
    grows = [_has_gradient(y) and id(y) not in fixed for y in outputs]
    ys = [y for y, has_gradient in zip(outputs, grows, strict=True) if has_gradient]
    changed = {id(x) for x in getattr(context, "dirty_tensors", None) or ()}
    xs = [before[id(x)] if id(x) in changed else x for x in args if _has_gradient(x)]
    if ys and xs:
        number = next(_calls)
        stand_ins = [cotangent(y.detach(), number) for y in ys]
        _hold_fixed(context, (*args, *ys))
        places, gradients = _gradients(cls, context, args, outputs, grows, stand_ins)
        once = _is_once_differentiable(_backward_of(cls))
        more = cls.__qualname__, once, _parameters(original, args, gets_context=gets_context)
        attached = iter(with_gradient(ys, xs, stand_ins, gradients, places, *more))
        outputs = [
            next(attached) if has_gradient else y.detach() if isinstance(y, torch.Tensor) else y
            for y, has_gradient in zip(outputs, grows, strict=True)
        ]
        outputs = [
            source.copy_(y) if id(source) in changed else y
            for source, y in zip(given, outputs, strict=True)
        ]
    return tuple(outputs) if isinstance(results, tuple | list) else outputs[0]


class _Context(FunctionCtx):
    """The context that `forward` leaves for `backward`."""

    materialize_grads = True
    to_save: Any = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(self.to_save or ())


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _parameters(original: Callable[..., Any], args: Sequence[Any], *, gets_context: bool) -> str:
    """Returns the parameter names of `forward` for arguments with gradients; empty if unknown."""
    named = list(inspect.signature(original).parameters.values())[1 if gets_context else 0 :]
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in named):
        return ""
    return ",".join(
        parameter.name for parameter, x in zip(named, args, strict=False) if _has_gradient(x)
    )


def _hold_fixed(context: Any, tensors: Iterable[Any]) -> None:
    """Turns values that `forward` computed and saved into constants, since they have no gradient.

    Arguments and results keep theirs, so that second derivatives exist.
    """
    differentiable = {id(x) for x in tensors}

    def hold(x: Any) -> Any:
        return x.detach() if _has_gradient(x) and id(x) not in differentiable else x

    for name, value in vars(context).items():
        setattr(context, name, map_aggregate(value, hold))


def _is_once_differentiable(backward: Any) -> bool:
    """Returns whether the last decorator is torch's `once_differentiable`."""
    name = getattr(backward, "__globals__", {}).get("__name__")
    return name == torch.autograd.function.__name__ and hasattr(backward, "__wrapped__")


def _backward_of(cls: Any) -> Any:
    return cls.vjp if cls.backward is torch.autograd.Function.backward else cls.backward


def _gradients(
    cls: Any, context: Any, args: Any, outputs: Any, grows: Any, stand_ins: Any
) -> tuple[list[int], list[torch.Tensor]]:
    """Returns the gradients of `backward` with the indices of their xs; [-1] on failure."""
    left = iter(stand_ins)
    given = [
        next(left) if has_gradient else torch.zeros_like(y) if isinstance(y, torch.Tensor) else None
        for y, has_gradient in zip(outputs, grows, strict=True)
    ]
    backward = _backward_of(cls)
    if _is_once_differentiable(backward):  # it would detach its operands
        backward = backward.__wrapped__
    try:
        with _without_engine():
            gradients = backward(context, *given)
    except Exception:  # it may raise anything, and is needed only for gradients
        return [-1], []
    gradients = gradients if isinstance(gradients, tuple | list) else (gradients,)
    wanted = [
        gradient for arg, gradient in zip(args, gradients, strict=False) if _has_gradient(arg)
    ]
    pairs = [(i, tensor) for i, tensor in enumerate(wanted) if isinstance(tensor, torch.Tensor)]
    return [i for i, _ in pairs], [tensor for _, tensor in pairs]


@contextlib.contextmanager
def _without_engine() -> Iterator[None]:
    """Makes `torch.autograd.grad` and `backward` raise: their results are not recorded."""
    engine = _private.get_engine()

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("gradients within a backward are not recorded")

    try:
        _private.set_engine(refuse)
        yield
    finally:
        _private.set_engine(engine)
