"""Ranges and decisions that depend on the length of a text: `torch.arange(length, length + n)`.

The length is a tensor while a step is recorded. torch would read both ends as numbers, without
knowing that there are `n` elements; nor would it know the value of `max(0, 1 - length)`.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

_TENSOR = torch.Tensor
_ADDS: set[Any] = {torch.add, _TENSOR.add, _TENSOR.__add__, _TENSOR.__radd__}
_SUBTRACTS: set[Any] = {torch.sub, _TENSOR.sub, _TENSOR.__sub__}
_SUBTRACTS_FROM: set[Any] = {torch.rsub, _TENSOR.__rsub__}
_COMPARES: dict[Any, Any] = {
    _TENSOR.gt: operator.gt,
    _TENSOR.ge: operator.ge,
    _TENSOR.lt: operator.lt,
    _TENSOR.le: operator.le,
}


class _Form(NamedTuple):
    """A tensor `sign * length + offset`, which is kept alive so that its id is not reused."""

    tensor: torch.Tensor
    sign: int
    offset: Any


class FromLength(TorchFunctionMode):
    """Replaces ranges that begin at a length by `length + torch.arange(n)` within the block.

    Comparisons with the same result for every length become bools.

    Args:
        length: A tensor without dimensions.
        slots: The number of slots, which exceeds any length.
    """

    def __init__(self, length: torch.Tensor, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.forms = {id(length): _Form(length, 1, 0)}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        form = self.forms.get(id(args[0])) if args else None
        if form is not None and func is torch.clamp and len(args) == len(kwargs) == 1:
            return self._clamp(form, **kwargs)
        if form is None or len(args) != 2:
            return func(*args, **kwargs)
        other = args[1]
        end = self.forms.get(id(other))
        if func is torch.arange and end is not None and form.sign == end.sign == 1:
            return form.tensor + torch.arange(end.offset - form.offset, **kwargs)
        if kwargs or isinstance(other, bool) or not isinstance(other, int | torch.SymInt):
            return func(*args, **kwargs)
        if func in _COMPARES and isinstance(other, int) and isinstance(form.offset, int):
            answers = {_COMPARES[func](end, other) for end in self._ends(form)}
            if len(answers) == 1:
                return answers.pop()
        result = func(*args)
        if func in _ADDS:
            self.forms[id(result)] = _Form(result, form.sign, form.offset + other)
        elif func in _SUBTRACTS:
            self.forms[id(result)] = _Form(result, form.sign, form.offset - other)
        elif func in _SUBTRACTS_FROM:
            self.forms[id(result)] = _Form(result, -form.sign, other - form.offset)
        return result

    def _ends(self, form: _Form) -> tuple[Any, Any]:
        """Returns the values of a form for the shortest and the longest text."""
        return form.offset, form.sign * (self.slots - 1) + form.offset

    def _clamp(self, form: _Form, **limit: Any) -> Any:
        """Computes the `clamp` into which torch.export turns `max(number, form)` and `min`."""
        ((name, bound),) = limit.items()
        if isinstance(bound, int) and isinstance(form.offset, int):
            above = {end >= bound for end in self._ends(form)}
            below = {end <= bound for end in self._ends(form)}
            if False not in (above if name == "min" else below):
                return form.tensor
            if False not in (below if name == "min" else above):
                return bound
        return torch.clamp(form.tensor, **limit)
