"""Copies between host arrays, and a pool of host memory."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints.dense import copy_into, scratch
from fmapper.checkpoints.lazy_operations import Cast, Offset
from fmapper.errors import LossyCastError
from fmapper.machine import populate
from fmapper.moves.host_copy import ALIGNMENT, copy_all, host_buffers

if TYPE_CHECKING:
    import numpy as np

    from fmapper.sync.strided import View

    Array = np.ndarray[Any, Any]

_WORD = 8  # bytes of the largest whole number
_LARGE = 1 << 20  # bytes from which memory comes from the system in pages of its own


Copy = tuple[Any, Any, Sequence[Any]]  # where to, where from, and what is done to each element


def make_copy(target: Array, source: Array, steps: Sequence[Any] = ()) -> Copy:
    """Returns the copy between two views of one shape."""
    import numpy as np

    if not steps and target.itemsize <= _WORD:
        word = np.dtype(f"u{target.itemsize}")  # NumPy has quick loops for these
        target, source = target.view(word), source.view(word)
    return target, source, steps


def view_of(array: Array, view: View) -> Array:
    """Returns a strided view of an array."""
    import numpy as np

    if view.is_whole and view.shape == array.shape:
        return array
    index: Any = (
        *(slice(at, None) for at in view.start),
        ...,
    )  # gives an array, also of no dimension
    first: Array = array[index]
    strides = tuple(array.strides[axis] * step for axis, step in view.steps)
    if first.shape == view.shape and first.strides == strides:
        return first
    strided: Array = np.lib.stride_tricks.as_strided(first, view.shape, strides)
    return strided


def check(computed: Iterable[tuple[Array, Sequence[Any], str]]) -> None:
    """Raises unless all finite values stay finite.

    Args:
        computed: Arrays, what is done to their elements, and their names.

    Raises:
        LossyCastError: One becomes infinite; names its array.
    """
    for source, steps, name in computed:
        if not _fits(source, steps):
            try:
                _compute(source, steps)
            except LossyCastError as error:
                said = str(error)
                raise LossyCastError(said if name in said else f"{name}: {said}") from None


def _fits(source: Array, steps: Sequence[Any]) -> bool:
    """Returns whether a cast fits by its largest and smallest value; False if that is not known."""
    import ml_dtypes
    import numpy as np

    (step, *more) = steps
    if more or not isinstance(step, Cast):
        return False
    try:
        largest: Any = ml_dtypes.finfo
        largest_before, limit = (float(largest(kind).max) for kind in (source.dtype, step.dtype))
    except ValueError:
        return False
    if largest_before <= limit or not source.size:
        return True
    with np.errstate(all="ignore"):
        high, low = float(np.max(source)), float(np.min(source))
    return -limit <= low and high <= limit


def carry_out(copies: Sequence[Copy]) -> None:
    """Runs the copies, on several threads if they are large."""
    copy_all(copies, _run)


def _run(copies: Sequence[Copy]) -> None:
    import numpy as np

    for target, source, steps in copies:
        if steps:
            _compute_into(target, source, steps)
        elif target.strides == source.strides:
            np.copyto(target, source)
        else:
            copy_into(target, source)


def _compute_into(target: Array, source: Array, steps: Sequence[Any]) -> None:
    import numpy as np

    with np.errstate(all="ignore"):
        is_cast = len(steps) == 1 and isinstance(steps[0], Cast)
        if not is_cast or source.itemsize == target.itemsize == 1:  # NumPy does not go straight
            copy_into(target, _compute(source, steps))
        elif source.flags.c_contiguous:
            np.copyto(target, source, casting="unsafe")
        else:
            with scratch(source.shape, source.dtype) as dense:
                copy_into(dense, source)
                np.copyto(target, dense, casting="unsafe")


def _compute(source: Array, steps: Sequence[Any]) -> Array:
    """Applies the steps to each element, as lazy arrays do."""
    from fmapper.checkpoints.lazy import LazyArray

    result = LazyArray.of(source)
    for step in steps:
        if isinstance(step, Cast):
            result = Cast(result, step.dtype, step.name)
        elif isinstance(step, Offset):
            result = result.plus(step.value)
        else:
            result = result.times(step.factor, divide=step.divide)
    return result.read()


class Slots:
    """Host memory for arrays of frameworks that take it over.

    A slot is used again once nobody holds an array on it: its references are counted.
    """

    def __init__(self) -> None:
        self._slots: dict[Any, list[_Slot]] = {}

    def reserve(self, key: Any, shape: tuple[int, ...], dtype: Any) -> None:
        """Makes the two slots that an array needs: the old values are in use until it is done."""
        for slot in (_Slot(shape, dtype), _Slot(shape, dtype)):
            populate(slot.array)
            self._slots.setdefault(key, []).append(slot)

    def get(self, key: Any) -> Array:
        """Returns uninitialised memory that nobody else holds, aligned for all frameworks."""
        slots = self._slots[key]
        free = next(filter(_Slot.is_free, slots), None)
        if free is None:
            gc.collect(0)  # JAX lets go of memory when garbage is collected
            free = next(filter(_Slot.is_free, slots), None)
        if free is None:  # somebody has kept old arrays; their memory is theirs
            free = _Slot(slots[0].array.shape, slots[0].array.dtype)
            slots[:] = [*slots[1:], free]
        return free.array


class _Slot:
    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._memory, self.array = _allocate(shape, dtype)
        self._references = self._count()

    def _count(self) -> int:
        return sys.getrefcount(self._memory) + sys.getrefcount(self.array)

    def is_free(self) -> bool:
        """Returns whether nobody else holds the memory."""
        return self._count() <= self._references


def _allocate(shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    import numpy as np

    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes >= _LARGE:
        (slot,) = host_buffers([(shape, dtype)])
        assert slot.base is not None
        return slot.base, slot
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory, memory[start : start + nbytes].view(dtype).reshape(shape)
