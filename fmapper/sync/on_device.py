"""Arrays that are computed where they and their sources lie: on an accelerator, or on one mesh.

Nothing of them goes through the host. JAX compiles one function for all of them, whose collectives
bring the parts from device to device, also between processes of `jax.distributed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fmapper.backends.arrays import Arrays
from fmapper.backends.compute import Compute
from fmapper.backends.discovery import owner_of
from fmapper.backends.namespace import array_namespace
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.lazy_operations import COMPUTED, Cast, compute
from fmapper.errors import LossyCastError
from fmapper.sync.ends import End, Held
from fmapper.sync.inputs import Leaf, leaves_of, nodes_of

_CASTS = {"bfloat16", "float16", "float32", "float64"}  # in which all frameworks round alike


def lies_together(
    array: LazyArray, target: Held, source: Mapping[str, Held], *, share: bool
) -> bool:
    """Returns whether an array and its sources are on the same devices, and it is not shared."""
    if share and isinstance(array, Leaf):
        return False
    domains = {source[leaf.name].domain for leaf in leaves_of(array)}
    return domains == {target.domain} != {""} and all(map(_is_known, nodes_of(array)))


def _is_known(array: LazyArray) -> bool:
    if isinstance(array, Cast):
        return {array.dtype.name, array.operands[0].dtype.name} <= _CASTS
    return isinstance(array, Leaf) or type(array) in COMPUTED


class OnDevice:
    """The arrays of a target that one function computes of `leaves`."""

    def __init__(self, source: End, target: End, made: Mapping[str, LazyArray]) -> None:
        self.names, self._arrays = [*made], [*made.values()]
        self.leaves = [*dict.fromkeys(x.name for a in self._arrays for x in leaves_of(a))]
        self._from = [source.numbers[name] for name in self.leaves]
        self.nbytes = sum(array.nbytes for array in self._arrays)
        self.numbers = [target.numbers[name] for name in self.names]
        old = [target.arrays[number] for number in self.numbers]
        adapter = owner_of(old[0])
        assert isinstance(adapter, Compute)
        self._adapter, self._device = adapter, adapter.device(old[0])
        self._cast: list[str] = []
        self._run = adapter.compile_for(self._compute, old)

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the values of the arrays, given all arrays of the source."""
        taken = [arrays[number] for number in self._from]
        groups: dict[Any, list[int]] = {}
        for at, array in enumerate(taken):
            groups.setdefault(owner_of(array), []).append(at)
        for owner, places in groups.items():
            if owner is not self._adapter:
                given = [taken[at] for at in places]
                for at, array in zip(places, self._take(owner, given), strict=True):
                    taken[at] = array
        values, flags = self._run(taken)
        self._adapter.wait(self._device, values)
        for name, survived in zip(self._cast, flags[0].tolist() if flags else (), strict=True):
            if not survived:
                raise LossyCastError(
                    f"{name}: finite values become infinite in the target's dtype. Scale the "
                    "values, or keep a wider dtype"
                )
        return values

    def _take(self, owner: Arrays, arrays: Sequence[Any]) -> Iterable[Any]:
        """Shares arrays of another framework, or copies them if they cannot be shared."""
        with suppress(BufferError):
            exchange = owner.export(arrays, self._device)
            return [*self._adapter.take(exchange, self._device, share=True)]
        return self._adapter.take(owner.export(arrays, self._device), self._device, share=False)

    def _compute(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the new arrays, and one array of flags: whether the values of each cast fit."""
        by_name = dict(zip(self.leaves, leaves, strict=True))
        values: list[Any] = []
        flags: list[Any] = []
        self._cast = []
        for name, array in zip(self.names, self._arrays, strict=True):
            values.append(compute(array, lambda x: by_name[x.name], partial(_cast, flags)))
            self._cast += [name] * (len(flags) - len(self._cast))
        return values, [array_namespace(flags[0]).stack(flags)] if flags else []


def _cast(flags: list[Any], array: LazyArray, operands: Sequence[Any]) -> Any:
    (x,) = operands
    xp = array_namespace(x)
    new = xp.astype(x, getattr(xp, array.dtype.name))
    flags.append(xp.all(xp.isfinite(new) | ~xp.isfinite(x)))
    return new
