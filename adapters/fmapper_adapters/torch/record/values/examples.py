"""Records a module for the values of its examples, if its behaviour depends on values.

The module runs once to find the values that it reads from tensors, and the sizes that depend on
values. During the recording it gets the same values, and the program asserts each of them: inputs
with other values raise an error.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.record.patches import unaware
from fmapper_adapters.torch.record.patches.restore import restore_after
from fmapper_adapters.torch.record.values import asserts

_Place = tuple[str, str, int]
_Seen = dict[_Place, collections.deque[asserts.Call]]  # in order

_Tensor = torch.Tensor
_TORCH = os.path.dirname(torch.__file__) + os.sep


def record_values(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    *,
    aware: bool = True,
) -> torch.export.ExportedProgram:
    """Records the program of a module for the values of the examples.

    Unless it is `aware`, the recording is hidden from the module.

    Raises:
        Exception: torch's error if it cannot record the module this way either.
    """
    seen = _observe_values(module, args, kwargs)
    forward = module.forward

    @functools.wraps(forward)
    def inform(*args: Any, **kwargs: Any) -> Any:
        # Inside torch.export's handling of calls, which decomposes some of them.
        kept = contextlib.nullcontext() if aware else unaware.tell_nothing()
        with kept, _Informer({place: calls.copy() for place, calls in seen.items()}):
            return forward(*args, **kwargs)

    with replace_forward(module, inform):
        return torch.export.export(
            module, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )


@contextlib.contextmanager
def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's forward within the block."""
    before, overridden = module.forward, "forward" in vars(module)
    try:
        module.forward = forward
        yield
    finally:
        if overridden:
            module.forward = before
        else:
            vars(module).pop("forward", None)


def _observe_values(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Seen:
    """Returns the values that a call of the module reads, without changing the module."""
    args, kwargs = copy.deepcopy((args, dict(kwargs)))
    observer = _Observer()
    with torch.no_grad(), restore_after(module), torch.random.fork_rng(devices=[]), observer:
        module(*args, **kwargs)
    return observer.seen


class _Observer(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: _Seen = collections.defaultdict(collections.deque)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Counted before the call, which may assign to the mask.
        counts = asserts.counts_of(args[1]) if func in asserts.MASKED else []
        numbers: list[int] = []
        asserts.with_numbers(func, args, kwargs, lambda x: numbers.append(int(x)))
        result = func(*args, **kwargs)
        facts = [int(args[0])] if asserts.is_written(func, args) else _facts(result)
        self.seen[_place(func)].append(asserts.Call(facts, numbers, counts))
        if func is _Tensor.tolist:  # in a recording, torch calls item for each element
            for fact in facts:
                self.seen[_place(_Tensor.item)].append(asserts.Call([fact], [], []))
        return result


class _Informer(TorchFunctionMode):
    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        calls = self._seen.get(_place(func))
        call = calls.popleft() if calls else None
        kwargs = kwargs or {}
        if call is None:
            return func(*args, **kwargs)
        if func in asserts.QUESTIONS:
            # As an integer: torch 2.11 cannot read its own recording of a bool.
            answer = asserts.QUESTIONS[func](*args, **kwargs).to(torch.int64).item()
            return bool(asserts.agree(answer, int(call.results[0])))
        if func in asserts.INTEGERS and not args[0].is_floating_point():
            return asserts.agree(args[0].item(), call.results[0])
        if asserts.is_written(func, args):
            return format(asserts.agree(args[0].item(), call.results[0]), *args[1:])
        if call.numbers:
            values = iter(call.numbers)
            args, kwargs = asserts.with_numbers(
                func, args, kwargs, lambda x: asserts.agree(x.item(), next(values))
            )
        if func in asserts.SIZED:
            func, args = asserts.SIZED[func], (call, *args)
        result = func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(result)
        if len(leaves) != len(call.results):
            return result
        leaves = [_tell(leaf, fact) for leaf, fact in zip(leaves, call.results, strict=True)]
        informed = pytree.tree_unflatten(leaves, spec)
        return torch.Size(informed) if isinstance(result, torch.Size) else informed


def _place(func: Any) -> _Place:
    """Returns a function and the line that calls it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return getattr(func, "__name__", str(func)), frame.f_code.co_filename, frame.f_lineno


def _facts(result: Any) -> list[Any]:
    return [
        tuple(x.shape) if isinstance(x, _Tensor) else x if isinstance(x, bool | int) else None
        for x in pytree.tree_leaves(result)
    ]


def _tell(result: Any, fact: Any) -> Any:
    """Makes a value known to torch, and asserts it."""
    if isinstance(result, _Tensor):
        if not free_unbacked_symbols(result) or len(fact or ()) != result.ndim:
            return result
        for size, value in zip(result.shape, fact, strict=True):
            if free_unbacked_symbols(size):
                asserts.check(size == value)
        # A size of 1 stays a symbol nevertheless.
        return result.reshape(fact) if free_unbacked_symbols(result) else result
    is_read = isinstance(result, torch.SymInt | torch.SymBool) and free_unbacked_symbols(result)
    if is_read and fact is not None:
        return asserts.agree(result, fact)
    return result  # floats may differ in the last bit in other frameworks
