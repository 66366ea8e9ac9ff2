"""Checkpoints: arrays in files, read when they are asked for, renamed and reshaped by rules.

A stored array is an array of a backend of its own: it moves like any other, and reads only what
is needed.

    lazy             arrays that are described and not read
    lazy_operations  what can be done with them before they are read
    boxes            ranges of the dimensions of an array
    dense            copies between arrays of different order
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.checkpoints.lazy import ByteRun, LazyArray, concatenate, stack

__all__ = ["ByteRun", "LazyArray", "concatenate", "stack"]

_PLACES = {"fmapper.checkpoints.lazy": "ByteRun LazyArray concatenate stack"}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
