"""Checkpoints that `torch.save` writes: a zip file with a pickle, and the arrays beside it.

The pickle is read by torch's `weights_only`, under which nothing of it is run, on tensors without
memory. They say where their values lie, which are then read like those of any file.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from fmapper import CheckpointError
from fmapper.checkpoints import (
    Contents,
    Format,
    LazyArray,
    SourceFile,
    StoredArray,
    Writer,
    file_in,
    read_settings,
)
from fmapper_adapters.torch._private import FakeTensorMode, storage_place

_FILE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_PART = re.compile(r"[\w.=+-]{1,200}\.bin")  # one of the files of a folder
_MOST_PICKLE = 256 << 20  # bytes; the arrays are not in it
_MOST_MEMBERS = 2_000_000
_DEEPEST = 256
_VALUES = (bool, int, float, str)
_LEGACY = "is not a zip file, as torch.save has written since torch 1.6"


class PtFile(Format):
    """One file of `torch.save`, with a state dict or nested dicts and lists of arrays."""

    name: ClassVar[str] = "pt"
    endings: ClassVar[tuple[str, ...]] = (".pt", ".pth", ".bin")

    def for_path(self, path: Path) -> Format:
        """Returns this format for a file name, else that of a folder."""
        return self if path.suffix in self.endings else PtFolder()

    def is_at(self, path: Path) -> bool:
        """Returns whether a file is a zip file with a `data.pkl` in it."""
        if not path.is_file():
            return False
        return path.suffix in self.endings or _has_pickle(path)

    def read(self, path: Path) -> Contents:
        """Reads the pickle with tensors that have no memory."""
        file = SourceFile(path)
        _check_archive(path)
        try:
            with FakeTensorMode():
                tree = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # of torch's reader and its unpickler: they raise anything
            reason = str(error).partition("\n")[0][:300]
            raise CheckpointError(
                f"{path}: torch cannot read it with weights_only=True. It is not read in any other "
                f"way, because its pickle could run code: {reason}"
            ) from None
        contents = Contents({}, files=(path,))
        first: dict[Any, str] = {}
        for name, leaf in _leaves(tree, path):
            if isinstance(leaf, torch.Tensor):
                _check_layout(file, name, leaf)
                place = *storage_place(leaf), tuple(leaf.shape), leaf.stride(), leaf.dtype
                if first.setdefault(place, name) != name:
                    contents.ties[name] = first[place]
                else:
                    contents.arrays[name] = stored_array(file, name, leaf)
            else:
                contents.values[name] = leaf
        return contents

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes the file by torch with room for the values, then writes those."""
        tensors: dict[str, Any] = {}
        with FakeTensorMode():
            for name, array in contents.arrays.items():
                dtype = getattr(torch, array.dtype.name, None)
                if not isinstance(dtype, torch.dtype):
                    raise CheckpointError(f"{name}: torch has no {array.dtype.name}")
                tensors[name] = torch.empty(array.shape, dtype=dtype)
        tied = {name: tensors[first] for name, first in contents.ties.items()}
        layout = out.path.with_name(f"{out.path.name}.layout")
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save({**tensors, **tied, **contents.values}, layout)
        with FakeTensorMode():
            there = torch.load(layout, weights_only=True)
        places = sorted((storage_place(there[name])[0], name) for name in tensors)
        with out.open() as file, layout.open("rb") as source:
            for offset, name in places:
                source.seek(file.tell())
                file.write(source.read(offset - file.tell()))
                out.put(file, name, contents.arrays[name])
            source.seek(file.tell())
            file.write(source.read())
        layout.unlink()


class PtFolder(Format):
    """A folder with `pytorch_model.bin`, or several of such files and their index."""

    name: ClassVar[str] = "pt"
    is_folder: ClassVar[bool] = True

    def for_path(self, path: Path) -> Format:
        """Returns the form for one file where the name ends so."""
        return PtFile().for_path(path)

    def is_at(self, path: Path) -> bool:
        """Returns whether such a file or an index exists."""
        return path.is_dir() and ((path / _FILE).is_file() or (path / _INDEX).is_file())

    def read(self, path: Path) -> Contents:
        """Reads all files in the index."""
        names = [_FILE]
        if (path / _INDEX).is_file():
            places = read_settings(file_in(path, _INDEX)).get("weight_map")
            found = [*places.values()] if isinstance(places, dict) else []
            if not found or not all(isinstance(n, str) and _PART.fullmatch(n) for n in found):
                raise CheckpointError(f"{path / _INDEX}: names a file that is not in the folder")
            names = sorted({*found})
        whole = Contents({}, files=tuple(path / name for name in names))
        for name in names:
            part = PtFile().read(file_in(path, name))
            twice = sorted({*whole.arrays, *whole.ties} & {*part.arrays, *part.ties})
            if twice:
                raise CheckpointError(f"{path / name}: {twice[0]!a} is in another file as well")
            whole.arrays |= part.arrays
            whole.ties |= part.ties
            whole.values |= part.values
        return whole

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes one file in the folder."""
        PtFile().write(out.inside(_FILE), contents)


def _has_pickle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\3\4":
                return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def _check_archive(path: Path) -> None:
    """Raises for compressed members, before torch reads them."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        raise CheckpointError(f"{path}: {_LEGACY}, or is damaged: {error}") from None
    if len(members) > _MOST_MEMBERS:
        raise CheckpointError(f"{path}: holds more arrays than any model has")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{path}: {ascii(member.filename)[:60]} is compressed")
        if member.filename.endswith("/data.pkl") and member.file_size > _MOST_PICKLE:
            raise CheckpointError(f"{path}: its pickle is too long")


def _leaves(tree: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts and lists by dotted name."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    count = 0
    while todo:
        keys, node = todo.pop()
        count += 1
        if len(keys) > _DEEPEST or count > _MOST_MEMBERS:
            raise CheckpointError(f"{path}: is nested too deeply, or contains too much")
        if isinstance(node, Mapping):
            todo += [((*keys, str(key)), node[key]) for key in reversed([*node])]
        elif isinstance(node, list | tuple) and not isinstance(node, torch.Size):
            todo += [((*keys, str(at)), node[at]) for at in reversed(range(len(node)))]
        elif isinstance(node, (torch.Tensor, *_VALUES)):
            yield ".".join(keys), node


def stored_array(file: SourceFile, name: str, tensor: torch.Tensor, base: int = 0) -> LazyArray:
    """Returns the stored array of a tensor without memory.

    Args:
        file: The file.
        name: What to call the array in errors.
        tensor: The tensor, as torch has loaded it.
        base: Where what torch has loaded begins in the file.
    """
    _check_layout(file, name, tensor)
    offset, size = storage_place(tensor)
    item = tensor.element_size()
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if n)
    begin = base + offset + int(tensor.storage_offset()) * item
    if tensor.numel() and (tensor.storage_offset() + last + 1) * item > size:
        raise CheckpointError(
            f"{file.path}: {name}: is damaged: it does not lie within its storage"
        )
    if begin + tensor.numel() * item > file.size:
        raise CheckpointError(
            f"{file.path}: {name}: would take {tensor.numel() * item:,} bytes, more than the file "
            "has: it was expanded before it was saved, or the file is damaged"
        )
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    dense = [shape[axis] for axis in order]
    if not _is_dense(dense, [strides[axis] for axis in order]):
        raise CheckpointError(
            f"{file.path}: {name}: a view with holes in it; save tensor.contiguous()"
        )
    array = StoredArray(file, begin, dense, str(tensor.dtype).removeprefix("torch."))
    back = [order.index(axis) for axis in range(len(shape))]
    return array if back == [*range(len(shape))] else array.transpose(back)


def _check_layout(file: SourceFile, name: str, tensor: torch.Tensor) -> None:
    """Raises for a tensor without a storage of its values: a sparse, nested or quantised one."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise CheckpointError(
            f"{file.path}: {name}: is not a dense tensor but {tensor.layout}; save "
            "tensor.to_dense()"
        )


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether elements are contiguous."""
    return not math.prod(shape) or all(
        step == math.prod(shape[axis + 1 :])
        for axis, (n, step) in enumerate(zip(shape, strides, strict=True))
        if n > 1
    )
