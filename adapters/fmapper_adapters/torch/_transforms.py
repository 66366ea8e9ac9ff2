"""Gradients, batches and compiled programs of functions of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

Calls = Callable[[Sequence[Any]], "tuple[Any, list[Any]]"]
_here = threading.local()


# --- gradients ------------------------------------------------------------------------------------


def value_and_grad(run: Calls, arrays: Sequence[Any]) -> tuple[Any, list[Any], Sequence[Any]]:
    """Autograd; `torch.func` where that is at work already."""
    if _in_functorch():
        return _functional(run, arrays)
    depth = getattr(_here, "depth", 0)
    if depth:
        # Another gradient is being taken through this one, and goes on through views of the arrays.
        leaves = [x.view_as(x) if x.requires_grad else _fresh(x) for x in arrays]
    else:
        leaves = [
            array if array.requires_grad and array.is_leaf else _fresh(array) for array in arrays
        ]
    _here.depth = depth + 1
    try:
        with _recording():
            value, further = run(leaves)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                gradients = torch.autograd.grad(
                    value, leaves, create_graph=depth > 0, materialize_grads=True
                )
            else:
                gradients = tuple(map(torch.zeros_like, arrays))
    finally:
        _here.depth = depth
    if depth:
        return value, further, gradients
    if isinstance(value, torch.Tensor):
        value = value.detach()
    return value, [x.detach() if x.requires_grad else x for x in further], gradients


def _fresh(array: torch.Tensor) -> torch.Tensor:
    return array.detach().requires_grad_()


def _recording() -> AbstractContextManager[object]:
    """Whatever the caller has switched off, a gradient needs a graph."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext() if torch.is_grad_enabled() else torch.enable_grad()


def _in_functorch() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _functional(run: Calls, arrays: Sequence[Any]) -> tuple[Any, list[Any], Sequence[Any]]:
    """`torch.func.grad_and_value`: within another function of torch.func."""
    constant: list[Any] = []

    def value_first(leaves: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        value, further = run(leaves)
        if not isinstance(value, torch.Tensor):
            constant.append(value)
            value = leaves[0].sum() * 0
        return value, further

    gradients, (value, further) = torch.func.grad_and_value(value_first, has_aux=True)(
        tuple(arrays)
    )
    return (constant[0] if constant else value), further, gradients


# --- batches --------------------------------------------------------------------------------------


def vectorized(
    run: Callable[[Sequence[Any]], list[Any]], arrays: Sequence[Any], axes: Sequence[int | None]
) -> list[Any]:
    """`torch.func.vmap`; random numbers differ from index to index."""
    mapped = torch.func.vmap(
        lambda *given: tuple(run(given)), in_dims=tuple(axes), randomness="different"
    )
    return list(mapped(*arrays))


# --- programs -------------------------------------------------------------------------------------

_AT_MOST = 64  # programs of one function


def compiled(
    run: Callable[[Sequence[Any], Any], tuple[list[Any], Any]], give_up: Callable[[str], None]
) -> Callable[[list[Any], Any], tuple[Sequence[Any], Any] | None]:
    """What `run` does to tensors is recorded with fake ones and compiled by `torch.compile`."""
    programs: dict[Hashable, Any] = {}

    def call(arrays: list[Any], key: Any) -> tuple[Sequence[Any], Any] | None:
        if _is_recorded():
            return None  # a part of what is being recorded already
        tensors = [array for array in arrays if isinstance(array, torch.Tensor)]
        numbers = tuple((type(x), x) for x in arrays if not isinstance(x, torch.Tensor))
        signature = (key, numbers, _modes(), *map(_looks, tensors))
        if signature not in programs:
            if len(programs) >= _AT_MOST:
                give_up(
                    f"there are {_AT_MOST} programs of it already. Give what changes with every "
                    "call as a tensor, not as a number."
                )
                return None
            programs[signature] = _recorded(run, arrays, key, give_up)
        program = programs[signature]
        if program is None:
            return None
        compiled, rest = program
        return compiled(tensors), rest

    return call


def _recorded(
    run: Callable[[Sequence[Any], Any], tuple[list[Any], Any]],
    arrays: list[Any],
    key: Any,
    give_up: Callable[[str], None],
) -> Any:
    """A compiled program and the rest of its results; None if there can be none."""
    rests: list[Any] = []

    def traced(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        pending = iter(tensors)
        given = [next(pending) if isinstance(x, torch.Tensor) else x for x in arrays]
        results, rest = run(given, key)
        rests.append(rest)
        return results

    tensors = [array for array in arrays if isinstance(array, torch.Tensor)]
    try:
        graph = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(tensors)
    except Exception as reason:  # if it is an error of the function, running that will raise it
        give_up(f"it could not be recorded ({_first_line(reason)})")
        return None
    program = torch.compile(graph, fullgraph=True, dynamic=False)

    def compiled(tensors: list[torch.Tensor]) -> Any:
        return program(tensors)

    return compiled, rests[-1]


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _is_recorded() -> bool:
    return get_proxy_mode() is not None or _in_functorch()


def _modes() -> tuple[Hashable, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def _looks(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return (
        type(tensor),
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
    )
