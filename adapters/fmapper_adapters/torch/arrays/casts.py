"""Casts tensors, and checks that every value survives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from fmapper import BatchError
from fmapper_adapters.torch.arrays import parameters, wrappers
from fmapper_adapters.torch.arrays.tensors import are_whole, check_filled, has_memory

_PART = 1 << 18  # elements that are checked at a time, which limits memory
# The smallest magnitudes that do not round to a finite number, by dtype.
_LIMITS = {
    torch.float8_e4m3fn: 464.0 * (1 + 2.0**-23),  # 464 itself is a tie, and rounds to even
    torch.float8_e5m2: 61440.0,
    torch.float8_e4m3fnuz: 248.0,
    torch.float8_e5m2fnuz: 61440.0,
    torch.float8_e8m0fnu: 1.5 * 2.0**127,
}


def casts(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Casts tensors and checks that values survive, many small ones at once.

    Raises:
        BatchError: A tensor cannot be cast.
    """
    trusted = are_whole(tensors)
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = 0
    for at, tensor in enumerate(tensors):
        try:
            new = cast(tensor, dtype, check=not trusted)
        except Exception as error:
            raise BatchError(at) from error
        if size + new.numel() > _PART:  # so that a large tensor is checked alone
            yield from _judge(waiting, trusted)
            waiting, size = [], 0
        waiting.append((tensor, new))
        size += new.numel()
    yield from _judge(waiting, trusted)


def _judge(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], trusted: bool
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yields the new tensors of (old, new) pairs, each with whether all values survived.

    Args:
        pairs: Tensors of any kind; the new ones are of one dtype.
        trusted: Whether the tensors are whole, so that they may be checked all at once.
    """
    have_survived = trusted and len(pairs) > 1 and _have_survived(pairs)
    for old, new in pairs:
        yield new, have_survived or has_survived(old.detach(), new.detach())


def _have_survived(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Returns whether all values of some small dense tensors survived a cast; False if in doubt."""
    (new,) = {new.dtype for _, new in pairs}
    dtypes = {old.dtype for old, _ in pairs}
    if all(_holds_all_of(new, old) for old in dtypes):
        return True
    if new.itemsize == 1 or not all(dtype.is_floating_point for dtype in (new, *dtypes)):
        return False  # torch saturates to float8 instead of making infinities
    try:
        with torch.no_grad():
            values = torch.cat([tensor.view(-1) for _, tensor in pairs])
            return math.isfinite(values.sum(dtype=torch.float64).item())
    except RuntimeError:  # no values: meta, or inside a transform
        return False


def cast(tensor: torch.Tensor, dtype: torch.dtype, *, check: bool = True) -> torch.Tensor:
    """Casts a tensor, which stays a leaf of autograd and a parameter if it was one."""
    if check:
        check_filled(tensor)

    def change(values: torch.Tensor) -> torch.Tensor:
        real = values.real if values.is_complex() and not dtype.is_complex else values
        new = real.to(dtype)
        wrappers.check_class(real, new)
        if dtype is torch.float8_e4m3fn and has_memory(values):
            # The dtype has no infinity: torch would use the largest number, here it becomes NaN.
            wide = real.detach().float()
            new.detach().view(torch.uint8).masked_fill_(wide.isinf(), 0x7F)
        return new

    if not parameters.is_replaceable(tensor):
        return change(tensor)
    grad = None if tensor.grad is None else change(tensor.grad)
    return parameters.replace(
        tensor, change(tensor.detach() if tensor.requires_grad else tensor), grad
    )


def has_survived(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Returns whether a cast has kept every integer and made no finite value infinite."""
    if _holds_all_of(new.dtype, old.dtype):
        return True
    if old.layout is torch.sparse_coo:
        return has_survived(old._values(), new._values())
    if old.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return has_survived(old.values(), new.values())
    if wrappers.is_wrapper(old):
        return all(has_survived(a, b) for a, b in wrappers.inner_pairs(old, new))
    if not has_memory(old):
        return True
    if old.numel() > _PART and old.is_contiguous() and new.is_contiguous():
        olds, news = old.view(-1), new.view(-1)
        return all(
            has_survived(olds[start : start + _PART], news[start : start + _PART])
            for start in range(0, old.numel(), _PART)
        )
    if not (new.is_floating_point() or new.is_complex()):
        return bool((new.to(old.dtype) == old).all())
    if not (old.is_floating_point() or old.is_complex() or old.dtype is torch.bool):
        info, wide = torch.iinfo(old.dtype), (new.real if new.is_complex() else new).double()
        return bool(((wide < float(info.max + 1)) & (wide.to(old.dtype) == old)).all())
    if old.is_complex() and not new.is_complex():
        return not bool(old.imag.any()) and has_survived(old.real, new)
    if new.is_complex():
        source = old if old.is_complex() else torch.complex(old, torch.zeros_like(old))
        return has_survived(source.real, new.real) and has_survived(source.imag, new.imag)
    if new.element_size() == 1:  # torch saturates to float8 instead of making infinities
        wide = old.float() if old.element_size() <= 2 else old
        if torch.finfo(new.dtype).min > 0 and bool((wide <= 0).any()):
            return False
        limit = _LIMITS.get(new.dtype)
        if limit is None:
            return True
        return not bool((torch.isfinite(wide) & (wide.abs() >= limit)).any())
    if math.isfinite(new.sum(dtype=torch.float64).item()):  # then each value is
        return True
    return not bool((~torch.isfinite(new) & torch.isfinite(old)).any())


@cache
def _holds_all_of(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Returns whether a floating or complex dtype surely holds every value of another."""
    inexact = narrow.is_floating_point or narrow.is_complex
    if not inexact or narrow.itemsize == 1 or wide.itemsize < narrow.itemsize:
        return False
    return torch.promote_types(wide, narrow) == wide
