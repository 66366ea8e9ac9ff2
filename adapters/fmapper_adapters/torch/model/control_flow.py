"""Loops and branches of JAX at run time: Python's own, or torch's operators in graphs.

Python's are as fast as torch, and autograd supports them. In a graph of torch.compile or
torch.export, a short loop of known length is unrolled; all others become torch's `scan`,
`while_loop` and `cond`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fmapper_adapters.torch import _private
from fmapper_adapters.torch.model import bits, fast_attention

Tensor = torch.Tensor
Body = Callable[..., tuple[Tensor, ...]]
F = TypeVar("F", bound=Callable[..., Any])


def _control_flow(function: F) -> F:
    """Marks control flow, whose shapes come from JAX instead of a trial run."""
    function.is_control_flow = True  # type: ignore[attr-defined]
    return function


@_control_flow
def with_sizes(body: Body, *sizes: int) -> Body:
    """Binds sizes of the surrounding graph to a body, which takes them before its operands."""
    return functools.partial(body, *sizes)


@_control_flow
def scan(
    body: Body,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    *,
    length: int,
    reverse: bool,
    outputs: Sequence[torch.dtype],
    unroll: bool,
) -> tuple[Tensor, ...]:
    """Runs a `lax.scan` of at least one step.

    Args:
        body: Maps constants, carry and a row of each of `xs` to the next carry and a row of each
            output.
        constants: Arrays that are the same in each step.
        carry: The initial carry.
        xs: Arrays of `length` rows.
        length: The number of steps.
        reverse: Whether to begin with the last row.
        outputs: The dtype of each output.
        unroll: Whether to unroll the loop in a graph, whatever its length.

    Returns:
        The last carry, and the outputs stacked.
    """
    if torch.compiler.is_compiling() and not unroll:
        return _scan_in_graph(body, constants, carry, xs, length, reverse, outputs)
    rows = list(zip(*(x.unbind(0) for x in xs), strict=True)) if xs else [()] * length
    if reverse:
        rows.reverse()
    count = len(carry)
    state: Any = tuple(carry)
    produced = []
    for row in rows:
        results = body(*constants, *state, *row)
        state = results[:count]
        produced.append(results[count:])
    if reverse:
        produced.reverse()
    return (*state, *(torch.stack(column) for column in zip(*produced, strict=True)))


@_control_flow
def loop_begin(
    carry: Sequence[Tensor], xs: Sequence[Tensor], *, length: int, reverse: bool
) -> tuple[Tensor, ...]:
    """Marks the beginning of a loop whose iterations are written inline. It cannot be run."""
    raise NotImplementedError("the steps of a loop are written to files only")


@_control_flow
def loop_end(
    given: Sequence[Tensor],
    carry: Sequence[Tensor],
    ys: Sequence[Tensor],
    *,
    length: int,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Marks the end of a loop; see `loop_begin`."""
    raise NotImplementedError("the steps of a loop are written to files only")


@_control_flow
def lstm(
    body: Body,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    *,
    weights: Sequence[Tensor],
    cell: int,
    length: int,
    reverse: bool,
    outputs: Sequence[torch.dtype],
    unroll: bool,
) -> tuple[Tensor, ...]:
    """Runs a `scan` of LSTM steps, by torch's own LSTM if the results agree.

    Args:
        body: As for `scan`.
        constants: As for `scan`.
        carry: The cell state and the hidden state, in any order.
        xs: The inputs of the steps.
        weights: The weights of inputs and hidden state, and the sum of the biases, in torch's
            layout.
        cell: The position of the cell state in the carry.
        length: The number of steps.
        reverse: Whether to begin with the last row.
        outputs: The dtype of each output, all of them the hidden state.
        unroll: As in `scan`.
    """
    (x,) = xs
    given = (x, *carry, *weights)
    if torch.compiler.is_compiling() or not fast_attention.is_quick_on_cpu(*given):
        return scan(body, constants, carry, xs, length=length, reverse=reverse, outputs=outputs,
                    unroll=unroll)  # fmt: skip
    is_one = x.ndim == 2
    x = x.flip(0) if reverse else x
    c, h = (y[None, None] if is_one else y[None] for y in (carry[cell], carry[1 - cell]))
    all_weights = [weights[0], weights[1], weights[2], torch.zeros_like(weights[2])]
    states, last_h, last_c = torch.lstm(
        x[:, None] if is_one else x, (h, c), all_weights, True, 1, 0.0, torch.is_grad_enabled(),
        False, False,
    )  # fmt: skip
    states = states[:, 0] if is_one else states
    last = [y[0, 0] if is_one else y[0] for y in (last_c, last_h)]
    shown = states.flip(0) if reverse else states
    return (*(last if cell == 0 else last[::-1]), *(shown for _ in outputs))


@_control_flow
def gru(
    body: Body,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    *,
    weights: Sequence[Tensor],
    length: int,
    reverse: bool,
    outputs: Sequence[torch.dtype],
    unroll: bool,
) -> tuple[Tensor, ...]:
    """Runs a `scan` of GRU steps, by torch's own GRU if the results agree.

    Args:
        body: As for `scan`.
        constants: As for `scan`.
        carry: The hidden state.
        xs: The inputs of the steps.
        weights: The weights of inputs and hidden state, and their biases, in torch's layout.
        length: The number of steps.
        reverse: Whether to begin with the last row.
        outputs: The dtype of each output, all of them the hidden state.
        unroll: As in `scan`.
    """
    (x,) = xs
    if torch.compiler.is_compiling() or not fast_attention.is_quick_on_cpu(x, *carry, *weights):
        return scan(body, constants, carry, xs, length=length, reverse=reverse, outputs=outputs,
                    unroll=unroll)  # fmt: skip
    is_one = x.ndim == 2
    x = x.flip(0) if reverse else x
    h = carry[0][None, None] if is_one else carry[0][None]
    states, last = torch.gru(
        x[:, None] if is_one else x, h, list(weights), True, 1, 0.0, torch.is_grad_enabled(),
        False, False,
    )  # fmt: skip
    states = states[:, 0] if is_one else states
    shown = states.flip(0) if reverse else states
    return (last[0, 0] if is_one else last[0], *(shown for _ in outputs))


def _scan_in_graph(
    body: Body,
    constants: Sequence[Tensor],
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    length: int,
    reverse: bool,
    outputs: Sequence[torch.dtype],
) -> tuple[Tensor, ...]:
    count = len(carry)
    kinds = [x.dtype for x in carry]
    given: Any = (*carry, *xs, *constants)
    device = given[0].device if given else None
    # its derivative supports only floats in carry and outputs
    wide = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    # torch needs a carry and rows even if JAX has none
    first = [_as_floats(x, wide) for x in carry] or [torch.zeros((), device=device)]
    rows = list(xs) or [torch.arange(length, dtype=torch.int32, device=device)]

    def step(before: Any, row: Any) -> Any:
        state = [_as_they_were(x, kind) for x, kind in zip(before, kinds, strict=False)]
        results = body(*constants, *state, *(row if xs else ()))
        after = [_as_floats(x, wide) for x in results[:count]] or [before[0].clone()]
        return after, [_as_floats(y, wide) for y in results[count:]]

    last, ys = _private.scan(step, first, rows, dim=0, reverse=reverse)
    return tuple(
        _as_they_were(x, kind)
        for x, kind in zip((*last[:count], *ys), (*kinds, *outputs), strict=True)
    )


def _as_floats(x: Tensor, wide: bool) -> Tensor:
    """Returns a tensor with its own memory, with its bits viewed as floats on request."""
    if not wide or x.is_floating_point() or x.is_complex():
        return _own(x)
    return x.view(torch.float64).clone() if x.dtype is torch.int64 else x.to(torch.float64)


def _as_they_were(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is dtype:
        return x
    return x.view(dtype) if dtype is torch.int64 else x.to(dtype)


def _own(x: Tensor) -> Tensor:
    """Copies a tensor: operators of torch must not return their arguments."""
    return x.clone(memory_format=torch.contiguous_format)


@_control_flow
def check(
    fails: Tensor, operands: Sequence[Tensor], *, message: str, inner: bool
) -> tuple[Tensor, ...]:
    """Returns values if a check holds.

    Args:
        fails: Whether the check fails.
        operands: The values.
        message: The message of the error.
        inner: Whether it is part of a loop or a branch, which torch compiles without checks.

    Raises:
        RuntimeError: The check fails.
    """
    if torch.compiler.is_compiling():
        if not inner:
            _private.assert_async(~fails, message)
    elif bool(fails.any()):
        raise RuntimeError(message)
    return tuple(operands)


@_control_flow
def while_loop(
    condition: Body,
    body: Body,
    condition_constants: Sequence[Tensor],
    body_constants: Sequence[Tensor],
    carry: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Runs `lax.while_loop`; a condition with dimensions applies to each element separately."""
    state: Any = tuple(carry)
    if torch.compiler.is_compiling():

        def holds(*now: Tensor) -> Tensor:
            going = condition(*condition_constants, *now)[0]
            return going.any() if going.ndim else going.clone()

        def step(*now: Tensor) -> tuple[Tensor, ...]:
            results = body(*body_constants, *now)
            going = condition(*condition_constants, *now)[0]
            if going.ndim:
                results = _where(going, results, now)
            return tuple(_own(x) for x in results)

        last: tuple[Tensor, ...] = tuple(
            _private.while_loop(holds, step, tuple(_own(x) for x in state))  # type: ignore[no-untyped-call]
        )
        return last
    while True:
        going = condition(*condition_constants, *state)[0]
        if not _any(going):
            return tuple(state)
        results = body(*body_constants, *state)
        state = _where(going, results, state) if going.ndim or bits.is_batched(going) else results


def _where(going: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the new value where a loop continues, else the old; batch dimensions come first."""
    return tuple(
        torch.where(going.reshape(going.shape + (1,) * (x.ndim - going.ndim)), x, y)
        for x, y in zip(new, old, strict=True)
    )


@_control_flow
def switch(
    index: Tensor, branches: Sequence[Body], operands: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Runs `lax.switch`: the branch with an index, which is clamped."""
    last = len(branches) - 1
    if torch.compiler.is_compiling():
        return _switch_in_graph(index, branches, operands)
    if bits.is_batched(index):  # under vmap all branches run, as in JAX
        results = [branch(*operands) for branch in branches]
        chosen = results[0]
        for i, result in enumerate(results[1:], 1):
            chosen = tuple(
                torch.where(index >= i, x, y) for x, y in zip(result, chosen, strict=True)
            )
        return chosen
    return branches[min(max(int(index), 0), last)](*operands)


def _switch_in_graph(
    index: Tensor, branches: Sequence[Body], operands: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    if len(branches) == 1:
        return branches[0](*operands)
    middle = len(branches) // 2
    low, high = branches[:middle], branches[middle:]

    def below(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(_own(x) for x in _part(low, given))

    def above(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(_own(x) for x in _part(high, given, middle))

    def _part(some: Sequence[Body], given: Any, first: int = 0) -> tuple[Tensor, ...]:
        if len(some) == 1:
            return some[0](*given[1:])
        return _switch_in_graph(given[0] - first, some, given[1:])

    results: tuple[Tensor, ...] = torch.cond(index < middle, below, above, (index, *operands))
    return results


# --- torch.func.vmap ---


def _any(x: Tensor) -> bool:
    """Returns whether any element is true, in any mapped dimension."""
    while _private.is_wrapped(x):
        x = _private.unwrap(x)
    return bool(x.any()) if x.ndim else bool(x)
