"""Checkpoints: arrays in files, read when they are asked for, renamed and reshaped by rules.

A stored array is an array of a backend of its own: it moves like any other, and reads only what
is needed. For users beside `fmapper.save` and `fmapper.load`, and for authors of formats.

    load, save        a checkpoint into a tree, and back
    checkpoint        what `load` gives where no tree is given: arrays by name, not yet read
    conversion        from format to format, a panel at a time
    inspection        what is in a checkpoint, what differs between two
    formats/          what a format is, which there are, what they write through
    stored            arrays in files
    backend           what moves ask of them
    lazy              arrays that are described and not read
    lazy_operations   what can be done with them before they are read
    boxes             ranges of the dimensions of an array
    dense             copies between arrays of different order
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.checkpoints.checkpoint import Checkpoint
    from fmapper.checkpoints.conversion import Converted, convert_checkpoint
    from fmapper.checkpoints.formats.format import Contents, Format, nest
    from fmapper.checkpoints.formats.writer import Writer
    from fmapper.checkpoints.inspection import (
        ArrayDifference,
        ArrayRow,
        Difference,
        Inspection,
        diff,
        inspect,
    )
    from fmapper.checkpoints.lazy import ByteRun, LazyArray, concatenate, stack
    from fmapper.checkpoints.stored import SourceFile, StoredArray
    from fmapper.files.safetensors import DTYPES

__all__ = [
    "DTYPES",
    "ArrayDifference",
    "ArrayRow",
    "ByteRun",
    "Checkpoint",
    "Contents",
    "Converted",
    "Difference",
    "Format",
    "Inspection",
    "LazyArray",
    "SourceFile",
    "StoredArray",
    "Writer",
    "concatenate",
    "convert_checkpoint",
    "diff",
    "inspect",
    "nest",
    "stack",
]

_PLACES = {
    "fmapper.checkpoints.checkpoint": "Checkpoint",
    "fmapper.checkpoints.conversion": "Converted convert_checkpoint",
    "fmapper.checkpoints.formats.format": "Contents Format nest",
    "fmapper.checkpoints.inspection": (
        "ArrayDifference ArrayRow Difference Inspection diff inspect"
    ),
    "fmapper.checkpoints.lazy": "ByteRun LazyArray concatenate stack",
    "fmapper.checkpoints.stored": "SourceFile StoredArray",
    "fmapper.checkpoints.formats.writer": "Writer",
    "fmapper.files.safetensors": "DTYPES",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
