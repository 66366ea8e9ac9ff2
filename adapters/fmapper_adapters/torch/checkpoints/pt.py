"""Checkpoints that `torch.save` writes: a zip file with a pickle and the arrays.

No code of the pickle is run. It describes where the values of tensors are in the file, which are
then read like those of any format.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import torch

from fmapper import CheckpointError
from fmapper.checkpoints import (
    Contents,
    Format,
    LazyArray,
    Misfit,
    SourceFile,
    StoredArray,
    Writer,
    ZipMembers,
    check_count,
    file_in,
    read_settings,
)
from fmapper_adapters.torch._private import FakeTensorMode
from fmapper_adapters.torch.checkpoints.archive import Archive, Part, read_tensors, torch_dtype
from fmapper_adapters.torch.checkpoints.legacy import MAGIC, LegacyFile

_FILE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_PART = re.compile(r"[\w.=+-]{1,200}\.bin")  # a name of one of several files in a folder


class PtFile(Format):
    """One file of `torch.save`, with a state dict or nested dicts and lists of arrays."""

    name: ClassVar[str] = "pt"
    other_names: ClassVar[tuple[str, ...]] = ("torch",)
    endings: ClassVar[tuple[str, ...]] = (".pt", ".pth", ".bin")

    def for_path(self, path: Path) -> Format:
        """Returns this format for a name of a file, else the format of a folder."""
        return self if path.suffix in self.endings else PtFolder()

    def is_at(self, path: Path) -> bool:
        """Returns whether a file is a zip file with a `data.pkl`, or of torch before 1.6."""
        if not path.is_file():
            return False
        return path.suffix in self.endings or _is_legacy(path) or _has_pickle(path)

    def read(self, path: Path) -> Contents:
        """Reads the pickle with tensors that have no memory."""
        file = SourceFile(path)
        part = Part(file, 0, file.size)
        kind: type[LegacyFile | Archive] = LegacyFile if _is_legacy(path) else Archive
        with file.handle() as handle:
            return read_tensors(path, lambda: kind(part, handle))

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes the file by torch with room for the values, then writes the values."""
        tensors: dict[str, Any] = {}
        with FakeTensorMode():
            for name, array in contents.arrays.items():
                dtype = torch_dtype(name, array)
                tensors[name] = torch.empty(array.shape, dtype=dtype, device="cpu")
        tied = {name: tensors[first] for name, first in contents.ties.items()}
        layout = out.path.with_name(f"{out.path.name}.layout")
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            try:
                torch.save({**tensors, **tied, **contents.values}, layout)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise CheckpointError(f"{layout}: torch cannot write it: {reason}") from None
        stored = self.read(layout).arrays if tensors else {}
        places = sorted((_place(stored[name]), name) for name in tensors)
        with out.open() as file, layout.open("rb") as source:
            for offset, name in places:
                source.seek(file.tell())
                file.write(source.read(offset - file.tell()))
                out.put(file, name, contents.arrays[name])
            source.seek(file.tell())
            file.write(source.read())
        layout.unlink()


class PtFolder(Format):
    """A folder with `pytorch_model.bin`, or with several such files and their index."""

    name: ClassVar[str] = "pt"
    is_folder: ClassVar[bool] = True

    def for_path(self, path: Path) -> Format:
        """Returns the format of a file for a name of a file, else this one."""
        return PtFile().for_path(path)

    def is_at(self, path: Path) -> bool:
        """Returns whether such a file or an index exists."""
        return path.is_dir() and ((path / _FILE).is_file() or (path / _INDEX).is_file())

    def read(self, path: Path) -> Contents:
        """Reads all files in the index."""
        names = [_FILE]
        if (path / _INDEX).is_file():
            places = read_settings(file_in(path, _INDEX)).get("weight_map")
            files = [*places.values()] if isinstance(places, dict) else []
            if not files or not all(isinstance(n, str) and _PART.fullmatch(n) for n in files):
                raise CheckpointError(
                    f"{path / _INDEX}: refers to a file that is not in the folder"
                )
            names = sorted({*files})
        whole = Contents({}, files=tuple(path / name for name in names))
        for name in names:
            part = PtFile().read(file_in(path, name))
            twice = sorted({*whole.arrays, *whole.ties} & {*part.arrays, *part.ties})
            if twice:
                raise CheckpointError(f"{path / name}: {twice[0]!a} is also in another file")
            whole.arrays |= part.arrays
            whole.ties |= part.ties
            whole.values |= part.values
            try:
                check_count(len(whole.arrays) + len(whole.ties), "arrays in all files")
            except Misfit as error:
                raise CheckpointError(f"{path}: {error}") from None
        return whole

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes one file in the folder."""
        PtFile().write(out.inside(_FILE), contents)


def _place(array: LazyArray) -> int:
    """Returns the offset of an array in its file."""
    assert isinstance(array, StoredArray)  # it was saved contiguous
    return array.offset


def _is_legacy(path: Path) -> bool:
    with path.open("rb") as start:
        return start.read(len(MAGIC)) == MAGIC


def _has_pickle(path: Path) -> bool:
    with path.open("rb") as start:
        if start.read(4) != b"PK\3\4":
            return False
    file = SourceFile(path)
    try:
        with file.handle() as handle:
            return any(name.endswith("/data.pkl") for name in ZipMembers(file, handle))
    except Misfit:
        return False
