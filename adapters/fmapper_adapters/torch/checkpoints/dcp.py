"""Folders of `torch.distributed.checkpoint`: arrays in pieces, and a pickle that lists them.

torch unpickles that file as usual. Here none of its code is run: plain objects stand in for its
classes. The pieces are concatenated files of `torch.save`, whose headers are read.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fmapper import CheckpointError
from fmapper.checkpoints import (
    STORED_DTYPES,
    ByteRun,
    Contents,
    Format,
    LazyArray,
    Misfit,
    SourceFile,
    StoredArray,
    UnreadableArray,
    Writer,
    check_count,
    check_name,
    file_in,
    show,
    within,
)
from fmapper_adapters.torch.checkpoints.archive import Archive, Part, torch_dtype
from fmapper_adapters.torch.checkpoints.pickled import (
    Dtype,
    NotAllowed,
    Record,
    StoredTensor,
    dtype_of,
    unpickle,
)

_METADATA = ".metadata"
_MOST_METADATA = 64 << 20  # bytes
_LONGEST = 1 << 20  # bytes of a string
_MOST_VALUE = _LONGEST + (1 << 14)  # bytes of the file of a string
_MOST_DIMENSIONS = 64
_MOST_MEMBERS = 20  # members of a piece; torch writes up to ten
_MOST_CELLS = 16_000_000  # cells of the grids spanned by the edges of pieces
_VALUES = (bool, int, float, str)
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
_NOTHING = {  # classes that are ignored here
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
}


class Dcp(Format):
    """A folder of `torch.distributed.checkpoint.save`."""

    name: ClassVar[str] = "dcp"
    endings: ClassVar[tuple[str, ...]] = (".dcp",)
    is_folder: ClassVar[bool] = True

    def is_at(self, path: Path) -> bool:
        """Returns whether a folder has the metadata file of this format."""
        return path.is_dir() and (path / _METADATA).exists()

    def read(self, path: Path) -> Contents:
        """Reads the metadata, and the numbers and strings."""
        try:
            return _read(path)
        except (CheckpointError, FileNotFoundError):
            raise
        except Misfit as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # the unpickler, and missing attributes
            reason = str(error).partition("\n")[0][:300]
            raise CheckpointError(f"{path}: is damaged: {reason}") from None

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes the folder by torch, which reads each part of an array in turn."""
        from torch.distributed import checkpoint as _checkpoint
        from torch.distributed.checkpoint import metadata as _metadata
        from torch.distributed.checkpoint import planner as _planner

        checkpoint: Any = _checkpoint  # its exports are not typed
        about: Any = _metadata
        plans: Any = _planner

        arrays = contents.arrays
        others: dict[str, list[str]] = {}
        for name, first in contents.ties.items():
            others.setdefault(first, []).append(name)
        tree: dict[str, Any] = dict(contents.values)
        for name, value in contents.values.items():
            if isinstance(value, str) and len(value.encode()) > _LONGEST:
                raise CheckpointError(f"{name}: is a text of more than {_LONGEST:,} bytes")
        for name, array in arrays.items():
            dtype = torch_dtype(name, array)
            tree[name] = torch.empty(array.shape, dtype=dtype, device="meta")

        class Planner(checkpoint.DefaultSavePlanner):  # type: ignore[misc]
            """Plans arrays in pieces, as if several processes held them; each is read alone."""

            def create_local_plan(self) -> Any:
                items = []
                for item in super().create_local_plan().items:
                    array = arrays.get(item.index.fqn)
                    pieces = [] if array is None else out.boxes(array)
                    items += [item] if len(pieces) < 2 else [piece(item, box) for box in pieces]
                self.plan = plans.SavePlan(items, planner_data=self.mappings)
                return self.plan

            def lookup_object(self, index: Any) -> Any:
                array = arrays.get(index.fqn)
                if array is None:
                    return super().lookup_object(index)
                box = boxes.get((index.fqn, tuple(index.offset or ())))
                return _tensor(array if box is None else array.part(box))

        class FileWriter(checkpoint.FileSystemWriter):  # type: ignore[misc]
            """Lists tied arrays under each name, at the same place."""

            def finish(self, metadata: Any, results: Any) -> None:
                for name, first in contents.ties.items():
                    metadata.state_dict_metadata[name] = metadata.state_dict_metadata[first]
                    if metadata.planner_data is not None:
                        metadata.planner_data[name] = (name,)
                aliased = [
                    replace(result, index=replace(result.index, fqn=name))
                    for row in results
                    for result in row
                    for name in others.get(result.index.fqn, ())
                ]
                super().finish(metadata, [*results, aliased])

        boxes: dict[tuple[str, tuple[int, ...]], Any] = {}

        def piece(item: Any, box: Any) -> Any:
            offsets = torch.Size(start for start, _ in box)
            sizes = torch.Size(stop - start for start, stop in box)
            boxes[item.index.fqn, tuple(offsets)] = box
            return plans.WriteItem(
                index=about.MetadataIndex(item.index.fqn, offsets),
                type=plans.WriteItemType.SHARD,
                tensor_data=plans.TensorWriteData(
                    chunk=about.ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                    properties=item.tensor_data.properties,
                    size=item.tensor_data.size,
                ),
            )

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that there is no process group
            try:
                checkpoint.save(
                    tree,
                    storage_writer=FileWriter(out.path, thread_count=1),
                    planner=Planner(),
                    no_dist=True,
                )
            except checkpoint.CheckpointException as error:  # not an `Exception`
                raise _reason(error) from None


def _reason(error: Any) -> BaseException:
    """Returns the error of the only process, which writes."""
    first: BaseException = next(iter(error.failures.values()))[0]
    failed: BaseException | None = first
    while failed is not None:  # closing its file, torch fails again
        if isinstance(failed, OSError | CheckpointError):
            return failed
        failed = failed.__context__
    return first


def _tensor(array: LazyArray) -> torch.Tensor:
    from fmapper import to_torch

    tensor: Any = to_torch(array)
    return tensor  # type: ignore[no-any-return]


def _names() -> Any:
    """Returns the stand-ins for the classes in the metadata, for one pickle."""

    class Properties(Record):
        """Stands for the properties of a tensor, which pickle themselves as a tuple."""

        def __setstate__(self, state: Any) -> None:
            self.dtype = state[0]

    def find(module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return Properties if name == "TensorProperties" else type(name, (Record,), {})
        if name in _NOTHING.get(module, ()):
            return lambda *args: None
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if (module, name) == ("collections", "OrderedDict"):
            return type(name, (dict,), {})
        dtype = dtype_of(module, name)
        if dtype is None:
            raise NotAllowed(f"{module[:60]!a}.{name[:60]!a}")
        return dtype

    return find


def _read(path: Path) -> Contents:
    place = SourceFile(file_in(path, _METADATA))
    if place.size > _MOST_METADATA:
        raise CheckpointError(f"{place.path}: is too large")
    data = bytearray(place.size)
    with place.handle() as handle:
        place.read_into(handle, memoryview(data), 0)
    try:
        metadata = unpickle(bytes(data), _names())
    except NotAllowed as error:
        raise CheckpointError(f"{place.path}: {error} is not part of a checkpoint") from None
    with os.scandir(path) as entries:
        nbytes = sum(entry.stat().st_size for entry in entries if entry.is_file())
    check_count(len(metadata.storage_data), "pieces", nbytes)
    files = _Files(path, nbytes)
    pieces: dict[str, dict[tuple[int, ...] | None, Any]] = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)
        offset = None if offset is None else _sizes(offset)
        pieces.setdefault(str(index.fqn), {})[offset] = info
    arrays: dict[str, LazyArray] = {}
    ties: dict[str, str] = {}
    values = {}
    for name, about in metadata.state_dict_metadata.items():
        if type(name) is not str:
            raise Misfit("has a name that is not text")
        with within(ascii(name)[1:-1][:60]):
            check_name(name)
            stored = pieces.get(name, {})
            if hasattr(about, "chunks"):
                array = _array(name, about, stored, files)
                if isinstance(array, str):
                    ties[name] = array
                else:
                    arrays[name] = array
            elif None in stored:
                value = files.value(stored[None])
                if isinstance(value, _VALUES):
                    values[name] = value
    return Contents(arrays, ties, values, files=tuple(file.path for file in files.sources.values()))


class _Files:
    """The files of a folder that contain pieces, and counts of what was read from them.

    Args:
        folder: The folder.
        nbytes: The bytes of all files in it.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        self._values: dict[Any, Any] = {}  # place in a file -> value
        self.nbytes = nbytes
        self.sources: dict[str, SourceFile] = {}
        self.first: dict[Any, str] = {}  # shape, dtype and places -> the first array there
        self.pieces = self.cells = self._pickled = 0

    def part(self, info: Any) -> Part:
        """Returns the part of a file that a piece occupies."""
        name, start, length = info.relative_path, info.offset, info.length
        if type(name) is not str or type(start) is not int or type(length) is not int:
            raise Misfit("has no place")
        if name not in self.sources:
            self.sources[name] = SourceFile(file_in(self.folder, name))
        return Part(self.sources[name], start, length)

    def value(self, info: Any) -> Any:
        """Returns a number or string; other values are left out."""
        part = self.part(info)
        if part.size > _MOST_VALUE:
            return None
        place = part.file.path, part.start, part.size
        if place not in self._values:
            check_count(len(self._values) + 1, "values in a piece each", self.nbytes)
            with part.file.handle() as handle:
                archive = Archive(part, handle, _MOST_MEMBERS)
                self._pickled += archive.pickled
                check_count(self._pickled, "bytes of pickles", self.nbytes)
                self._values[place] = archive.tree(unknown=None)
        return self._values[place]


def _sizes(numbers: Any) -> tuple[int, ...]:
    if len(numbers) > _MOST_DIMENSIONS:  # all arrays may share one list
        raise Misfit("has an invalid size")
    sizes = tuple(numbers)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise Misfit("has an invalid size")
    return sizes


def _array(name: str, about: Any, pieces: dict[Any, Any], files: _Files) -> LazyArray | str:
    """Returns an array, or the name of another array at the same place.

    There may be many pieces, so each is opened when it is read.
    """
    shape, dtype = _sizes(about.size), about.properties.dtype
    if type(dtype) is Dtype and dtype.name not in STORED_DTYPES:
        return UnreadableArray.of_unknown(files.folder, name, shape, dtype.name)
    files.pieces += len(about.chunks)
    check_count(files.pieces, "pieces", files.nbytes)
    parts = []
    for chunk in about.chunks:
        offsets, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
        if offsets not in pieces or not _is_inside(offsets, sizes, shape):
            raise Misfit(f"a piece at {list(offsets)} exceeds the array")
        piece = _Piece(name, files.part(pieces[offsets]), sizes, dtype)
        parts.append((offsets, piece))
    _check_cover(shape, [(offsets, part.shape) for offsets, part in parts], files)
    places = tuple(
        (offsets, piece.place.file.path, piece.place.start, piece.place.size)
        for offsets, piece in parts
    )
    first = files.first.setdefault((shape, dtype, places), name)
    if first != name:
        return first
    return _Pieces(shape, parts) if len(parts) > 1 else parts[0][1]


class _Piece(LazyArray):
    """A part of an array, in its own zip file."""

    def __init__(self, name: str, part: Part, shape: tuple[int, ...], dtype: Any) -> None:
        if type(dtype) is not Dtype:
            raise Misfit("is of an unknown dtype")
        stored = StoredArray(part.file, part.start, shape, dtype.name)
        self.shape, self.dtype = shape, stored.dtype
        self.place = part
        self._name, self._kind = name, dtype
        self._array: LazyArray | None = None

    def _open(self) -> LazyArray:
        """Returns the stored array in the piece."""
        if self._array is None:
            try:
                with self.place.file.handle() as handle:
                    self._array = self._open_in(Archive(self.place, handle, _MOST_MEMBERS))
            except Misfit as error:
                path = self.place.file.path
                raise CheckpointError(f"{path}: {show(self._name)}: {error}") from None
        return self._array

    def _open_in(self, archive: Archive) -> LazyArray:
        stored = archive.tree()
        if type(stored) is not StoredTensor:
            raise Misfit("a piece is not a dense tensor")
        if stored.dtype != self._kind or stored.shape != self.shape:
            raise Misfit("a piece does not match the metadata")
        return archive.array("", stored)

    def byte_runs(self) -> list[ByteRun] | None:
        """Returns the runs of stored bytes, which are copied from file to file."""
        return self._open().byte_runs()

    def _read(self, box: Any) -> Any:
        return self._open().read(box)

    def _fill(self, box: Any, out: Any) -> None:
        self._open().read(box, out)


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def _check_cover(
    shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]], files: _Files
) -> None:
    """Raises if boxes overlap or leave gaps."""
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape) or not boxes:
        raise Misfit("its pieces do not cover the array")
    if len(boxes) == 1:
        return
    edges = [
        {
            edge: at
            for at, edge in enumerate(sorted({n for o, s in boxes for n in (o[d], o[d] + s[d])}))
        }
        for d in range(len(shape))
    ]
    files.cells += math.prod(map(len, edges))
    if files.cells > _MOST_CELLS:
        raise Misfit("its pieces do not form a grid")
    taken = np.zeros([len(bounds) for bounds in edges], bool)
    for offsets, sizes in boxes:
        place = tuple(slice(e[o], e[o + n]) for e, o, n in zip(edges, offsets, sizes, strict=True))
        if taken[place].any():
            raise Misfit("its pieces overlap")
        taken[place] = True


class _Pieces(LazyArray):
    """An array whose pieces are in several places."""

    def __init__(self, shape: tuple[int, ...], parts: list[tuple[tuple[int, ...], Any]]) -> None:
        self.shape, self.dtype = shape, parts[0][1].dtype
        self._parts = parts

    def _read(self, box: Any) -> Any:
        out = np.zeros([stop - start for start, stop in box], self.dtype)
        for offsets, part in self._parts:
            common = [
                (max(start, offset), min(stop, offset + size))
                for (start, stop), offset, size in zip(box, offsets, part.shape, strict=True)
            ]
            if all(start < stop for start, stop in common):
                inner = [(a - o, b - o) for (a, b), o in zip(common, offsets, strict=True)]
                place = [slice(a - s, b - s) for (a, b), (s, _) in zip(common, box, strict=True)]
                out[tuple(place)] = part.read(inner)
        return out
