"""Gradients, batches and compiled programs of functions of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import FakeTensor
from fmapper_adapters.torch.arrays.parameters import as_parameter
from fmapper_adapters.torch.compute.parameter_standin import here, stand_in
from fmapper_adapters.torch.compute.record_lock import turns

Calls = Callable[[Sequence[Any]], "tuple[Any, list[Any]]"]


# --- gradients ------------------------------------------------------------------------------------


def value_and_grad(
    run: Calls, arrays: Sequence[Any], elsewhere: Callable[[], bool]
) -> tuple[Any, list[Any], Sequence[Any]]:
    """Differentiates by autograd, or by `torch.func` inside another transformation."""
    if _in_functorch():
        return _functional(run, arrays)
    depth = here.depth
    if depth:
        # An outer gradient is taken through views of the arrays.
        leaves = [stand_in(x.view_as(x), x) if x.requires_grad else _fresh(x) for x in arrays]
    else:
        # Parameters are passed unchanged, which avoids rebuilding modules.
        serve = [x.requires_grad and x.is_leaf and not x.is_inference() for x in arrays]
        if any(serve) and elsewhere():
            serve = [False] * len(arrays)
        leaves = [x if serves else _fresh(x) for x, serves in zip(arrays, serve, strict=True)]
    here.depth = depth + 1
    try:
        with _enable_autograd():
            value, further = run(leaves)
            if value.requires_grad:
                gradients = torch.autograd.grad(
                    value, leaves, create_graph=depth > 0, materialize_grads=True
                )
            else:
                gradients = tuple(map(torch.zeros_like, arrays))
    finally:
        here.depth = depth
    if depth:
        return value, further, gradients
    return value.detach(), [x.detach() if x.requires_grad else x for x in further], gradients


def _fresh(array: torch.Tensor) -> torch.Tensor:
    if array.is_inference():  # autograd ignores inference tensors
        with torch.inference_mode(mode=False):
            return _fresh_like(array.clone(), array)
    return _fresh_like(array, array)


def _fresh_like(values: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    if isinstance(array, torch.nn.Parameter):
        return as_parameter(values.detach(), array)
    fresh: torch.Tensor = stand_in(values.detach().requires_grad_(), array)
    return fresh


def _enable_autograd() -> AbstractContextManager[object]:
    """Enables autograd within the block, even if the caller has switched it off."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext() if torch.is_grad_enabled() else torch.enable_grad()


def _in_functorch() -> bool:
    return _private.is_in_transformation()


def _functional(run: Calls, arrays: Sequence[Any]) -> tuple[Any, list[Any], Sequence[Any]]:
    """Calls `torch.func.grad_and_value`, within another function of torch.func."""

    def value_first(leaves: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        return run(list(map(stand_in, leaves, arrays)))

    gradients, (value, further) = torch.func.grad_and_value(value_first, has_aux=True)(
        tuple(arrays)
    )
    return value, further, gradients


# --- batches --------------------------------------------------------------------------------------


def vectorize(
    run: Callable[[Sequence[Any]], list[Any]], arrays: Sequence[Any], axes: Sequence[int | None]
) -> list[Any]:
    """Calls `torch.func.vmap`; random numbers differ from index to index."""
    mapped = torch.func.vmap(
        lambda *given: tuple(run(list(map(stand_in, given, arrays)))),
        in_dims=tuple(axes),
        randomness="different",
    )
    return list(mapped(*arrays))


# --- programs -------------------------------------------------------------------------------------

_AT_MOST = 64  # the most programs of one function
_UNKNOWN: Any = object()


def compile(
    run: Callable[[Sequence[Any], Any], tuple[list[Any], Any]], give_up: Callable[[str], None]
) -> Callable[[list[Any], Any], tuple[Sequence[Any], Any] | None]:
    """Records `run` with fake tensors, and compiles the recording with `torch.compile`."""
    programs: dict[Hashable, Any] = {}

    def call(arrays: list[Any], key: Any) -> tuple[Sequence[Any], Any] | None:
        if _is_recorded() or turns.taken:
            return None  # within a recording or replay
        if here.depth > 1:
            return None  # compiled functions can be differentiated only once
        tensors = [array for array in arrays if isinstance(array, torch.Tensor)]
        # By their repr: 0.0 == -0.0, and NaN != NaN.
        numbers = (
            ()
            if len(tensors) == len(arrays)
            else tuple((type(x), repr(x)) for x in arrays if not isinstance(x, torch.Tensor))
        )
        signature = (key, numbers, _modes(), *map(_looks, tensors))
        entry = programs.get(signature, _UNKNOWN)
        if entry is None:
            return None
        if entry is _UNKNOWN:
            if any(x.is_neg() or x.is_conj() for x in tensors):
                give_up(
                    "a tensor is negated or conjugated lazily. Call resolve_neg or resolve_conj"
                )
                return None
            if len(programs) >= _AT_MOST:
                give_up(
                    f"there are already {_AT_MOST} programs for it. Pass values that change with "
                    f"every call as tensors, not as numbers."
                )
                return None
            with turns:
                if signature not in programs:
                    recording = _record(run, arrays, key, give_up)
                    programs[signature] = recording and recording[:2]
                    return recording and (recording[2], recording[1])
            return call(arrays, key)  # another thread has compiled it
        program, rest = entry
        turns.begin_replay()
        try:
            return program(*tensors), rest
        finally:
            turns.end_replay()

    return call


def _record(
    run: Callable[[Sequence[Any], Any], tuple[list[Any], Any]],
    arrays: list[Any],
    key: Any,
    give_up: Callable[[str], None],
) -> Any:
    """Records and compiles a program; returns it with its static and its first results, or None."""
    rests: list[Any] = []

    def trace(*tensors: torch.Tensor) -> list[torch.Tensor]:
        pending = iter(tensors)
        given = [next(pending) if isinstance(x, torch.Tensor) else x for x in arrays]
        with _without_values(tensors):
            results, rest = run(given, key)
        rests.append(rest)
        return results

    tensors = [array for array in arrays if isinstance(array, torch.Tensor)]
    try:
        graph = make_fx(trace, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    except Exception as reason:  # errors of the function itself are raised when it runs
        give_up(f"it could not be recorded ({_first_line(reason)})")
        return None
    program, results = _compile(graph, tensors, give_up)
    return None if program is None else (program, rests[-1], results)


@contextmanager
def _without_values(fakes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Makes reads of values, and of sizes that depend on them, raise errors within the block.

    Otherwise a result could be a symbol, which no program can replace.
    """
    modes = {x.fake_mode: x.fake_mode.shape_env for x in fakes if isinstance(x, FakeTensor)}
    for mode in modes:
        mode.shape_env = None
    try:
        yield
    finally:
        for mode, symbols in modes.items():
            mode.shape_env = symbols


def _compile(
    graph: Any, tensors: list[torch.Tensor], give_up: Callable[[str], None]
) -> tuple[Any, Any]:
    """Returns a compiled program and the results of its first call; two Nones if it fails."""
    with warnings.catch_warnings():
        # The compiler uses deprecated functions of torch.
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        try:
            # The graph's own forward, since torch compiles the same code only a few times. With the
            # option, random numbers are those of the uncompiled function; it costs each call some
            # microseconds.
            options: Any = (
                {"fallback_random": True} if any(map(_draws, graph.graph.nodes)) else None
            )
            program: Any = torch.compile(
                graph.forward, fullgraph=True, dynamic=False, options=options
            )
            return program, program(*tensors)
        except Exception as reason:  # as above
            give_up(f"it could not be compiled ({_first_line(reason)})")
            return None, None


def _draws(node: Any) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _is_recorded() -> bool:
    return get_proxy_mode() is not None or _in_functorch()


def _modes() -> tuple[Hashable, ...]:
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return (
        torch.is_grad_enabled(),
        here.depth > 0,
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        accelerator is not None
        and torch.is_autocast_enabled(accelerator.type)
        and torch.get_autocast_dtype(accelerator.type),
    )


def _looks(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return (
        type(tensor),
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
    )
