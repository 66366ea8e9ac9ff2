"""Checkpoints: arrays in files, read on demand, renamed and reshaped by rules.

Stored arrays have a backend of their own: they move like any others, and only the needed parts are
read. For users, besides `fmapper.save` and `fmapper.load`, and for authors of formats.

    load, save        reads a checkpoint into a tree, and writes one
    checkpoint        the result of `load` without a tree: arrays by name, not yet read
    conversion        from format to format, a panel at a time
    inspection        the contents of a checkpoint, the differences of two
    formats/          the interface of formats, their list, their writer
    pretrained        folders of the Hub: a model with its weights
    stored            arrays in files
    transient         arrays that checkpoints leave out
    extras/           numbers, texts and the configuration
    backend           the adapter of stored arrays
    lazy              arrays that are described and not read
    recording/        turns a conversion function into rules: `Rules.record`
    rules/            changes of names and layouts: `Rules`
    quantized/        quantised arrays, dequantised or as one node
    lazy_operations   operations on arrays before they are read
    boxes             ranges of the dimensions of an array
    dense             copies between arrays of different order
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.checkpoints.checkpoint import Checkpoint
    from fmapper.checkpoints.conversion import Converted, convert_checkpoint
    from fmapper.checkpoints.extras.settings import read_settings, split_quantization
    from fmapper.checkpoints.formats.format import (
        Contents,
        Format,
        file_in,
        nest,
        tied_to_text,
        unite_tied,
    )
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
    from fmapper.checkpoints.pretrained import Pretrained
    from fmapper.checkpoints.quantized.array import QuantizedArray, QuantizedLayout
    from fmapper.checkpoints.quantized.finding import dequantize, find_quantized
    from fmapper.checkpoints.recording.abstract import Later, Named, Unwritten
    from fmapper.checkpoints.recording.record import Recording, derive_rules
    from fmapper.checkpoints.recording.recorder import Recorder
    from fmapper.checkpoints.recording.storage import Storage, StorageView, put, take
    from fmapper.checkpoints.rules.arithmetic import Offset, Scale, Sum
    from fmapper.checkpoints.rules.joining import Concatenate, Split, Stack, Unstack
    from fmapper.checkpoints.rules.layout import Cast, Interleave, Reshape, Transpose
    from fmapper.checkpoints.rules.naming import AddConstant, Drop, Lack, Rename, Tie
    from fmapper.checkpoints.rules.rule import Rule
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.checkpoints.stored import SourceFile, StoredArray
    from fmapper.checkpoints.unusual import (
        ConjugateArray,
        StridedArray,
        SwappedArray,
        UnreadableArray,
    )
    from fmapper.files.bounded_json import read_json, read_json_file, read_json_table
    from fmapper.files.bounds import WAY_OUT, check_count, check_depth, check_name
    from fmapper.files.dtypes import DTYPES, STORED_DTYPES, numpy_dtype
    from fmapper.files.untrusted import Misfit, check_folder, reason_of, show, within
    from fmapper.files.zips import ZipMember, ZipMembers
    from fmapper.tree.pattern import Pattern

__all__ = [
    "DTYPES",
    "STORED_DTYPES",
    "WAY_OUT",
    "AddConstant",
    "ArrayDifference",
    "ArrayRow",
    "ByteRun",
    "Cast",
    "Checkpoint",
    "Concatenate",
    "ConjugateArray",
    "Contents",
    "Converted",
    "Difference",
    "Drop",
    "Format",
    "Inspection",
    "Interleave",
    "Lack",
    "Later",
    "LazyArray",
    "Misfit",
    "Named",
    "Offset",
    "Pattern",
    "Pretrained",
    "QuantizedArray",
    "QuantizedLayout",
    "Recorder",
    "Recording",
    "Rename",
    "Reshape",
    "Rule",
    "Rules",
    "Scale",
    "SourceFile",
    "Split",
    "Stack",
    "Storage",
    "StorageView",
    "StoredArray",
    "StridedArray",
    "Sum",
    "SwappedArray",
    "Tie",
    "Transpose",
    "UnreadableArray",
    "Unstack",
    "Unwritten",
    "Writer",
    "ZipMember",
    "ZipMembers",
    "check_count",
    "check_depth",
    "check_folder",
    "check_name",
    "concatenate",
    "convert_checkpoint",
    "dequantize",
    "derive_rules",
    "diff",
    "file_in",
    "find_quantized",
    "inspect",
    "nest",
    "numpy_dtype",
    "put",
    "read_json",
    "read_json_file",
    "read_json_table",
    "read_settings",
    "reason_of",
    "show",
    "split_quantization",
    "stack",
    "take",
    "tied_to_text",
    "unite_tied",
    "within",
]

_PLACES = {
    "fmapper.checkpoints.checkpoint": "Checkpoint",
    "fmapper.checkpoints.conversion": "Converted convert_checkpoint",
    "fmapper.checkpoints.formats.format": "Contents Format file_in nest tied_to_text unite_tied",
    "fmapper.checkpoints.inspection": (
        "ArrayDifference ArrayRow Difference Inspection diff inspect"
    ),
    "fmapper.checkpoints.lazy": "ByteRun LazyArray concatenate stack",
    "fmapper.checkpoints.pretrained": "Pretrained",
    "fmapper.checkpoints.extras.settings": "read_settings split_quantization",
    "fmapper.checkpoints.quantized.array": "QuantizedArray QuantizedLayout",
    "fmapper.checkpoints.quantized.finding": "dequantize find_quantized",
    "fmapper.checkpoints.recording.abstract": "Later Named Unwritten",
    "fmapper.checkpoints.recording.record": "Recording derive_rules",
    "fmapper.checkpoints.recording.recorder": "Recorder",
    "fmapper.checkpoints.recording.storage": "Storage StorageView put take",
    "fmapper.checkpoints.rules.arithmetic": "Offset Scale Sum",
    "fmapper.checkpoints.rules.joining": "Concatenate Split Stack Unstack",
    "fmapper.checkpoints.rules.layout": "Cast Interleave Reshape Transpose",
    "fmapper.checkpoints.rules.naming": "AddConstant Drop Lack Rename Tie",
    "fmapper.tree.pattern": "Pattern",
    "fmapper.checkpoints.rules.rule": "Rule",
    "fmapper.checkpoints.rules.rules": "Rules",
    "fmapper.checkpoints.stored": "SourceFile StoredArray",
    "fmapper.checkpoints.unusual": "ConjugateArray StridedArray SwappedArray UnreadableArray",
    "fmapper.checkpoints.formats.writer": "Writer",
    "fmapper.files.bounded_json": "read_json read_json_file read_json_table",
    "fmapper.files.bounds": "WAY_OUT check_count check_depth check_name",
    "fmapper.files.dtypes": "DTYPES STORED_DTYPES numpy_dtype",
    "fmapper.files.untrusted": "Misfit check_folder reason_of show within",
    "fmapper.files.zips": "ZipMember ZipMembers",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
