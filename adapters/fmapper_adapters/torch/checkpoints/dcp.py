"""Folders of `torch.distributed.checkpoint`: arrays in pieces, and a pickle that says where.

torch reads that pickle as it is. Here nothing but the classes of which it consists is made of it;
the pieces are files of `torch.save` one behind the other, of which the headers are read.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch

from fmapper import CheckpointError
from fmapper.checkpoints import (
    Contents,
    Format,
    LazyArray,
    SourceFile,
    Writer,
    file_in,
)
from fmapper_adapters.torch._private import FakeTensorMode
from fmapper_adapters.torch.checkpoints.pt import stored_array

_METADATA = ".metadata"
_MOST_METADATA = 256 << 20  # bytes
_MOST_VALUE = 1 << 20  # bytes of a number or string
_VALUES = (bool, int, float, str)
_CODES_LEFT_OUT = {  # arrays of a size that is only said, and what refers to other data
    "BYTEARRAY8",
    "NEXT_BUFFER",
    "READONLY_BUFFER",
    "PERSID",
    "BINPERSID",
    "EXT1",
    "EXT2",
    "EXT4",
}
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}


class Dcp(Format):
    """A folder as `torch.distributed.checkpoint.save` has it."""

    name: ClassVar[str] = "dcp"
    endings: ClassVar[tuple[str, ...]] = (".dcp",)
    is_folder: ClassVar[bool] = True

    def is_at(self, path: Path) -> bool:
        """Returns whether a folder has the metadata file of this format."""
        return path.is_dir() and (path / _METADATA).exists()

    def read(self, path: Path) -> Contents:
        """Reads the metadata, and the header of each piece."""
        try:
            return _read(path)
        except (CheckpointError, FileNotFoundError):
            raise
        except Exception as error:  # of the unpickler and of torch's reader: they raise anything
            reason = str(error).partition("\n")[0][:300]
            raise CheckpointError(f"{path}: is damaged: {reason}") from None

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes the folder by torch, which reads each part of an array in turn."""
        from torch.distributed import checkpoint as _checkpoint
        from torch.distributed.checkpoint import metadata as _metadata
        from torch.distributed.checkpoint import planner as _planner

        checkpoint: Any = _checkpoint  # it names its exports for nobody's type checker
        about: Any = _metadata
        plans: Any = _planner

        arrays = contents.arrays
        tied = {name: arrays[first] for name, first in contents.ties.items()}
        tree: dict[str, Any] = dict(contents.values)
        for name, array in {**arrays, **tied}.items():
            dtype = getattr(torch, array.dtype.name, None)
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(f"{name}: torch has no {array.dtype.name}")
            tree[name] = torch.empty(array.shape, dtype=dtype, device="meta")

        class Planner(checkpoint.DefaultSavePlanner):  # type: ignore[misc]
            """Has arrays in pieces, as if several processes had them, each read for itself."""

            def create_local_plan(self) -> Any:
                items = []
                for item in super().create_local_plan().items:
                    array = arrays.get(item.index.fqn, tied.get(item.index.fqn))
                    found = [] if array is None else out.boxes(array)
                    items += [item] if len(found) < 2 else [piece(item, box) for box in found]
                self.plan = plans.SavePlan(items, planner_data=self.mappings)
                return self.plan

            def lookup_object(self, index: Any) -> Any:
                array = arrays.get(index.fqn, tied.get(index.fqn))
                if array is None:
                    return super().lookup_object(index)
                box = boxes.get((index.fqn, tuple(index.offset or ())))
                return _tensor(array if box is None else array.part(box))

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
            warnings.simplefilter("ignore")  # that there is no process group
            checkpoint.save(
                tree,
                storage_writer=checkpoint.FileSystemWriter(out.path, thread_count=1),
                planner=Planner(),
                no_dist=True,
            )


def _tensor(array: LazyArray) -> torch.Tensor:
    from fmapper import to_torch

    found: Any = to_torch(array)
    return found  # type: ignore[no-any-return]


def _check_pickle(place: Path, data: bytes) -> None:
    """Raises for a pickle that reserves memory before it is read."""
    for count, (code, value, _) in enumerate(pickletools.genops(data), 1):
        if code.name in _CODES_LEFT_OUT or ("PUT" in code.name and int(value or 0) > count):
            raise CheckpointError(f"{place}: has {code.name}, which such files do not contain")


class _Unpickler(pickle.Unpickler):
    """Makes what such a file consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module[:60]!a}.{name[:60]!a} is not part of a checkpoint")


def _read(path: Path) -> Contents:
    place = file_in(path, _METADATA)
    if SourceFile(place).size > _MOST_METADATA:
        raise CheckpointError(f"{place}: is too long")
    data = place.read_bytes()
    _check_pickle(place, data)
    metadata = _Unpickler(io.BytesIO(data)).load()
    files: dict[str, SourceFile] = {}
    pieces: dict[str, dict[tuple[int, ...] | None, Any]] = {}
    for index, info in metadata.storage_data.items():
        offset = None if index.offset is None else tuple(map(int, index.offset))
        pieces.setdefault(str(index.fqn), {})[offset] = info
        name = info.relative_path
        if name not in files:
            files[name] = SourceFile(file_in(path, str(name)))
    contents = Contents({}, files=tuple(one.path for one in files.values()))
    for name, about in metadata.state_dict_metadata.items():
        own = pieces.get(name, {})
        if hasattr(about, "chunks"):
            contents.arrays[name] = _array(path, name, about, own, files)
        else:
            value = _value(files, own[None]) if None in own else None
            if isinstance(value, _VALUES):
                contents.values[name] = value
    return contents


def _array(
    path: Path, name: str, about: Any, pieces: dict[Any, Any], files: dict[str, SourceFile]
) -> LazyArray:
    shape = tuple(map(int, about.size))
    dtype = str(about.properties.dtype).removeprefix("torch.")
    parts = []
    for chunk in about.chunks:
        offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        if offsets not in pieces or not _is_inside(offsets, sizes, shape):
            raise CheckpointError(f"{path}: {name}: a piece at {list(offsets)} does not fit")
        info = pieces[offsets]
        file = files[info.relative_path]
        with file.path.open("rb") as raw, FakeTensorMode():
            part: Any = _Part(raw, info.offset, info.length)
            found = torch.load(part, weights_only=True)
        if str(found.dtype) != f"torch.{dtype}" or tuple(found.shape) != sizes:
            raise CheckpointError(f"{path}: {name}: a piece does not match the metadata")
        parts.append((offsets, stored_array(file, name, found, int(info.offset))))
    if sum(part.size for _, part in parts) != math.prod(shape):
        raise CheckpointError(f"{path}: {name}: its pieces do not cover the array")
    return parts[0][1] if len(parts) == 1 and parts[0][1].shape == shape else _Pieces(shape, parts)


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        start >= 0 and size >= 0 and start + size <= whole
        for start, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def _value(files: dict[str, SourceFile], info: Any) -> Any:
    """Returns a number or string; other values are left out."""
    if int(info.length) > _MOST_VALUE:
        return None
    file = files[info.relative_path]
    with file.path.open("rb") as raw:
        part: Any = _Part(raw, info.offset, info.length)
        try:
            return torch.load(part, weights_only=True)
        except pickle.UnpicklingError:  # an object of a class that torch does not know as harmless
            return None


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        size = file.seek(0, io.SEEK_END)
        if not 0 <= int(start) <= int(start) + int(length) <= size:
            raise CheckpointError(f"{file.name}: a piece ends past the end of the file")
        self._file, self._start, self._length, self._at = file, int(start), int(length), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


class _Pieces(LazyArray):
    """An array whose parts lie in several places."""

    def __init__(self, shape: tuple[int, ...], parts: list[tuple[tuple[int, ...], Any]]) -> None:
        self.shape, self.dtype = shape, parts[0][1].dtype
        self._parts = parts

    def _read(self, box: Any) -> Any:
        import numpy as np

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
