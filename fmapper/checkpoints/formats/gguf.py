"""Checkpoints in the GGUF format of llama.cpp; quantised arrays are dequantised when read."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from fmapper.checkpoints.formats.format import Contents, Format
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.quantized.ggml import Ggml, row_bytes
from fmapper.checkpoints.stored import SourceFile, StoredArray
from fmapper.checkpoints.unusual import UnreadableArray
from fmapper.errors import CheckpointError
from fmapper.files.gguf import MAGIC, GgufEntry, read_gguf_header
from fmapper.files.untrusted import Misfit, open_regular, show

_PLAIN = {  # types of arrays without blocks
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}


class Gguf(Format):
    """The format of a single file, which cannot be written. Names and layouts are llama.cpp's.

    Arrays of blocks such as Q4_K are float32; `find_quantized` returns them quantised. Numbers and
    texts of the file, such as `general.architecture`, are metadata; lists, such as a vocabulary,
    and texts of more than a mebibyte are left out.
    """

    name: ClassVar[str] = "gguf"
    endings: ClassVar[tuple[str, ...]] = (".gguf",)

    def is_at(self, path: Path) -> bool:
        """Returns whether a file has the magic number or the ending of this format."""
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return path.suffix in self.endings or file.read(len(MAGIC)) == MAGIC

    def read(self, path: Path) -> Contents:
        """Reads the header."""
        file = SourceFile(path)
        try:
            with open_regular(path) as handle:
                header = read_gguf_header(handle, file.size)
        except Misfit as error:
            raise CheckpointError(f"{path}: {error}") from None
        arrays = {}
        end = 0
        for name, entry in sorted(header.arrays.items(), key=lambda item: item[1].start):
            try:
                stored, arrays[name] = _array(file, name, entry)
                if stored.nbytes and entry.start < end:
                    raise CheckpointError("overlaps the array before it")
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {show(name)}: {error}") from None
            end = max(end, entry.start + stored.nbytes)
        arrays = {name: arrays[name] for name in header.arrays}
        metadata = {name: str(value) for name, value in header.values.items()}
        return Contents(arrays, metadata=metadata, files=(path,))

    def write(self, out: Writer, contents: Contents) -> None:
        """Raises, because GGUF is not written."""
        raise CheckpointError(
            "GGUF can be read, but not written: save safetensors, and convert them with "
            "llama.cpp's convert_hf_to_gguf.py"
        )


def _array(file: SourceFile, name: str, entry: GgufEntry) -> tuple[StoredArray, LazyArray]:
    """Returns the bytes of an array in the file, and the array itself.

    The size of an array of an unknown type is unknown.
    """
    array: LazyArray
    if entry.type in _PLAIN:
        array = stored = StoredArray(file, entry.start, entry.shape, _PLAIN[entry.type])
    elif (row := row_bytes(entry.type, entry.shape[-1] if entry.shape else 0)) is not None:
        kind, width = row
        stored = StoredArray(file, entry.start, (*entry.shape[:-1], width), "uint8")
        array = Ggml(stored, kind)
    else:
        stored = StoredArray(file, entry.start, (0,), "uint8")
        array = UnreadableArray.of_unknown(file.path, name, entry.shape, f"type {entry.type}")
    if entry.start + stored.nbytes > file.size:
        raise CheckpointError("ends past the end of the file")
    return stored, array
