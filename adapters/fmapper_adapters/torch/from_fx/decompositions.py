"""Chooses which ATen operations are decomposed, and which the target lowers whole.

Torch runs its decompositions on its own graph, with fake tensors, because they need more
information than a program has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch

from fmapper_adapters.torch import _private

_OVERLOAD = type(torch.ops.aten.add.Tensor)  # torch has no public name for it
_COMPOSITE = _private.COMPOSITE
Table = dict[Any, Callable[..., Any]]


class Decompositions:
    """Torch's own decompositions, without those of operations that the target lowers whole.

    Args:
        table: All decompositions.
        whole: The operations to keep, such as `aten::gelu`; `aten::std.correction` for an overload.

    Attributes:
        table: The remaining decompositions, for `run_decompositions`.
    """

    def __init__(self, table: Table, whole: Collection[str]) -> None:
        self._whole = frozenset(whole)
        self._left: dict[Any, bool] = {}  # a cache, since schemas are slow to read
        self._kept = {op for op in table if self._is_whole(op)}
        self.table = {op: function for op, function in table.items() if op not in self._kept}
        self.table[torch.ops.aten.as_strided.default] = _as_strided_of_contiguous
        self.table.update(_UNCHECKED)
        if not _has_slope_at_bounds():
            self.table.update(_CLAMPS)

    def leave(self, target: Any) -> bool:
        """Returns whether the decompositions leave an operation whole.

        torch always decomposes composite operations that change or return their arguments.
        """
        if target not in self._left:
            self._left[target] = self._leaves(target)
        return self._left[target]

    def _leaves(self, target: Any) -> bool:
        if not isinstance(target, _OVERLOAD) or target.namespace != "aten" or target in self.table:
            return False
        if _private.schema_of(target).is_mutable:
            return False
        if target.has_kernel_for_dispatch_key(_COMPOSITE):
            return target in self._kept
        if target.__name__.startswith(("_assert", "_print")):  # these have effects and get tokens
            return False
        return self._is_whole(target) or torch.Tag.core in target.tags

    def _is_whole(self, target: Any) -> bool:
        """Returns whether the target lowers an operation whole, or all overloads of its name."""
        name = _private.schema_of(target).name
        overload = _private.schema_of(target).overload_name or "default"
        return name in self._whole or f"{name}.{overload}" in self._whole


class _Cache:
    """Torch's last table, and the operations outside of ATen that existed when it was made."""

    table: Table | None = None
    custom: frozenset[Any] = frozenset()
    chosen: ClassVar[dict[frozenset[str], Decompositions]] = {}


def choose(exported: torch.export.ExportedProgram, whole: Collection[str] = ()) -> Decompositions:
    """Returns the decompositions for a program and a target.

    torch enumerates all existing operations for its table. So the table is made again only for a
    program with custom operations that may have been registered since the last time.

    Args:
        exported: The program.
        whole: The operations that the target lowers whole.
    """
    custom = {
        node.target
        for owner in exported.graph_module.modules()
        if isinstance(owner, torch.fx.GraphModule)
        for node in owner.graph.nodes
        if isinstance(node.target, _OVERLOAD) and node.target.namespace != "aten"
    }
    if _Cache.table is None or not custom <= _Cache.custom:
        _Cache.custom = _Cache.custom | custom
        torchs: Any = torch.export.default_decompositions()
        _Cache.table = dict(torchs.items())
        _Cache.chosen.clear()
    key = frozenset(whole)
    if key not in _Cache.chosen:
        _Cache.chosen[key] = Decompositions(_Cache.table, key)
    return _Cache.chosen[key]


# Without checks that factorisations succeed, which would be effects in the program. A failed
# factorisation gives NaN or infinity: compiled programs cannot raise.
_aten: Any = torch.ops.aten
_UNCHECKED = {
    _aten.linalg_inv.default: lambda a: _aten.linalg_inv_ex(a)[0],
    _aten.linalg_cholesky.default: lambda a, **kwargs: _aten.linalg_cholesky_ex(a, **kwargs)[0],
    _aten.linalg_lu_factor.default: lambda a, **kwargs: _aten.linalg_lu_factor_ex(a, **kwargs)[:2],
    _aten.linalg_solve.default: lambda a, b, **kwargs: _aten._linalg_solve_ex(a, b, **kwargs)[0],
    _aten.linalg_solve_ex.default: (
        lambda a, b, *, left=True, check_errors=False: _aten._linalg_solve_ex(a, b, left=left)[::3]
    ),
}


@functools.cache
def _has_slope_at_bounds() -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        (slope,) = torch.autograd.grad(x.clamp(min=0), x)
    return bool(slope)


def _is_nan(bound: Any) -> bool:
    return isinstance(bound, float) and math.isnan(bound)


def _clamp_to_constants(x: Any, min: Any = None, max: Any = None) -> Any:
    if not x.is_floating_point() or any(map(_is_nan, (min, max))):
        return NotImplemented
    if min is not None:
        x = torch.where(x <= min, min, x)
    return x if max is None else torch.where(x >= max, max, x)


def _clamp_to_tensors(x: Any, min: Any = None, max: Any = None) -> Any:
    if not x.is_floating_point():
        return NotImplemented
    x = x if min is None else torch.maximum(x, min)
    return x if max is None else torch.minimum(x, max)


# Up to torch 2.13 the gradient of clamp at a bound is 1, as for the operation in a program. Since
# then it is 0, or 1/2 if the bound is a tensor.
_CLAMPS = {
    _aten.clamp.default: _clamp_to_constants,
    _aten.clamp_min.default: _clamp_to_constants,
    _aten.clamp_max.default: lambda x, max: _clamp_to_constants(x, None, max),
    _aten.clamp.Tensor: _clamp_to_tensors,
    _aten.clamp_min.Tensor: _clamp_to_tensors,
    _aten.clamp_max.Tensor: lambda x, max: _clamp_to_tensors(x, None, max),
}


def _as_strided_of_contiguous(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Decomposes `as_strided` into views of a contiguous array, because there is no storage.

    Raises:
        ValueError: The view contains elements that x does not have.
    """
    start = 0 if storage_offset is None else storage_offset - x.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if all(size) and not (start >= 0 and last < x.numel()):
        raise ValueError(
            f"as_strided({list(size)}, {list(stride)}, {storage_offset}) shows elements of the "
            f"storage that are not in the tensor of shape {list(x.shape)} that it is called on; "
            "call it on the tensor that owns them"
        )
    if x.is_contiguous():
        if start == (storage_offset or 0):
            return NotImplemented
        return x.reshape(-1).clone().as_strided(size, stride, start)
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), -x.size(d)))
    dense = x.permute(order)
    if not dense.is_contiguous():
        raise ValueError(
            f"as_strided on a tensor of shape {list(x.shape)} and stride {list(x.stride())}, "
            "whose elements are not all of its storage; call contiguous() first"
        )
    return dense.reshape(-1).clone().as_strided(size, stride, start)
