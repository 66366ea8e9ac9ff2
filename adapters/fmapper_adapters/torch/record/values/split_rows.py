"""Records experts that split rows by counts, without sizes that depend on values.

    counts = chosen.sum(0).tolist()
    parts = rows.split(counts, dim=0)
    out = torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights)], dim=0)

Here each part stands for all rows: functions that treat rows independently are applied to all of
    them, as are reshapes that split a row into several, and concatenation takes each row from its
    own part. If anything else is done with parts or counts, the recording is abandoned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fmapper_adapters.torch import _private
from fmapper_adapters.torch.record.values import loop_proof
from fmapper_adapters.torch.record.values.loop_proof import NotProved

_Tensor = torch.Tensor
_Views = dict[Any, tuple[_Tensor, _Tensor]]
_SPLITS: set[Any] = {_Tensor.split, torch.split, _Tensor.split_with_sizes, torch.split_with_sizes}
_CATS: set[Any] = {torch.cat, torch.concat, torch.concatenate}
# Functions that treat rows independently if only their first argument has rows.
_BY_ROW: set[Any] = {
    F.linear,
    F.relu,
    F.gelu,
    F.silu,
    F.softplus,
    F.leaky_relu,
    torch.relu,
    torch.sigmoid,
    torch.tanh,
}


class _Count:
    """A number of rows in place of an integer, without a value for branches or arithmetic.

    Attributes:
        counts: The tensor of all counts.
        at: Its index in that tensor.
        times: The number of rows per counted row.
    """

    __hash__ = object.__hash__

    def __init__(self, counts: _Tensor, at: int, times: int = 1) -> None:
        self.counts, self.at, self.times = counts, at, times

    def __bool__(self) -> bool:
        raise NotProved("the code decides by a count")

    def __eq__(self, other: object) -> bool:
        raise NotProved("the code compares a count")

    def __format__(self, form: str) -> str:
        raise NotProved("the code writes a count")


class _Part:
    """The rows of one count.

    Attributes:
        rows: The rows of all parts.
        count: The number of rows in this part.
        views: Rows and their reshaped versions, shared by the parts of one split.
    """

    def __init__(self, rows: _Tensor, count: _Count, views: _Views) -> None:
        self.rows, self.count, self.views = rows, count, views

    @property
    def shape(self) -> tuple[Any, ...]:
        """The count, and the sizes of a row."""
        return (self.count, *self.rows.shape[1:])

    def reshape(self, *shape: Any) -> _Part:
        """Returns the parts of each row as rows: `part.reshape(-1, part.shape[-1])`."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        row_shape = (*self.rows.shape[1:],)
        cut = len(row_shape) - len(sizes) + 1
        if cut < 0 or not all(type(size) is int for size in (*sizes, *row_shape)):
            _refuse("reshape")
        if sizes[:1] != (-1,) or sizes[1:] != row_shape[cut:]:
            _refuse("reshape")
        key = id(self.rows), sizes
        if key not in self.views:  # keeps the rows alive, so that their id is not reused
            self.views[key] = self.rows, self.rows.reshape(sizes)
        count = self.count
        times = count.times * math.prod(row_shape[:cut])
        return _Part(self.views[key][1], _Count(count.counts, count.at, times), self.views)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _refuse(func)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        _refuse("==")

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(name)


def has_splits(module: torch.nn.Module) -> bool:
    """Returns whether the code of a module may split rows by counts."""
    sources = loop_proof.sources_of(module)
    return all(any(word in text for text in sources) for word in (".tolist()", ".split("))


def keep_rows_together(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a forward function in which each part of rows stands for all rows.

    Raises:
        NotProved: During a call: parts or counts are used in another way, or there are none.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        splits = _Splits()
        with splits:
            result = forward(*args, **kwargs)
        if not splits.met:
            raise NotProved("there are no rows that are split by counts")
        if any(isinstance(x, _Part | _Count) for x in _private.pytree.tree_leaves(result)):
            raise NotProved("a part of the rows is a result")
        return result

    return run


class _Splits(TorchFunctionMode):
    """Observes the operations of a call.

    Attributes:
        met: Whether rows were split.
        elements: Id -> an element of a tensor of integers, and its count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = False
        self.elements: dict[int, tuple[_Tensor, _Count]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _Tensor.unbind and _may_count(args[0]):  # torch records tolist as unbind
            elements = func(*args, **kwargs)
            for at, element in enumerate(elements):
                self.elements[id(element)] = element, _Count(args[0], at)
            return elements
        if func is _Tensor.item and id(args[0]) in self.elements:
            return self.elements[id(args[0])][1]
        if func in _SPLITS and (counts := _counts_of(*args[1:], **kwargs)) is not None:
            self.met = True
            views: _Views = {}
            return tuple(_Part(args[0], count, views) for count in counts)
        if func in _CATS and args and any(isinstance(x, _Part) for x in args[0]):
            return _put_together(*args, **kwargs)
        if args and isinstance(args[0], _Part):
            given = [*args[1:], *kwargs.values()]
            if func not in _BY_ROW or any(isinstance(x, _Part) for x in given):
                _refuse(func)
            return _Part(func(args[0].rows, *args[1:], **kwargs), args[0].count, args[0].views)
        return func(*args, **kwargs)


def _may_count(x: Any) -> bool:
    whole = not x.dtype.is_floating_point and not x.dtype.is_complex and x.dtype != torch.bool
    return whole and x.ndim == 1 and isinstance(x.shape[0], int)


def _counts_of(
    split_size_or_sections: Any = None, dim: int = 0, *, split_sizes: Any = None
) -> list[_Count] | None:
    """Returns the counts by which rows are split; None for other sizes."""
    sizes = split_size_or_sections if split_sizes is None else split_sizes
    if not isinstance(sizes, list | tuple) or not any(isinstance(x, _Count) for x in sizes):
        return None
    if dim != 0 or not _are_all(sizes):
        raise NotProved("rows are split by some of the counts, or along another dimension")
    return list(sizes)


def _put_together(tensors: Any, dim: int = 0) -> Any:
    """Returns the rows of all parts, each row from its own part."""
    if dim != 0 or not all(isinstance(x, _Part) for x in tensors):
        raise NotProved("parts of rows are joined with something else")
    if not _are_all([part.count for part in tensors]):
        raise NotProved("parts of rows are joined in another order, or not all of them")
    counts = tensors[0].count.counts * tensors[0].count.times
    many = tensors[0].rows.shape[0]
    ends = counts.cumsum(0)
    fits = (counts >= 0).all() & (ends[-1] == many)
    _private.assert_async(fits, "the counts by which rows are split are not those of the rows")
    if all(part.rows is tensors[0].rows for part in tensors):
        return tensors[0].rows
    owners = torch.searchsorted(ends, torch.arange(many, device=ends.device), right=True)
    rows = tensors[0].rows
    for at, part in enumerate(tensors[1:], 1):
        here = (owners == at).reshape(-1, *(1,) * (rows.ndim - 1))
        rows = torch.where(here, part.rows, rows)
    return rows


def _are_all(counts: Any) -> bool:
    """Returns whether these are the counts of one tensor, in order."""
    if not all(isinstance(count, _Count) for count in counts):
        return False
    first = counts[0]
    same = all(
        count.counts is first.counts and count.at == at and count.times == first.times
        for at, count in enumerate(counts)
    )
    return same and len(counts) == first.counts.shape[0]


def _refuse(operation: Any) -> NoReturn:
    raise NotProved(f"{getattr(operation, '__name__', operation)} is applied to a part of the rows")
