"""Arrays and texts in one safetensors file, read whole as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fmapper.files.dtypes import numpy_dtype
from fmapper.files.safetensors import Entry, lay_out
from fmapper.files.untrusted import Misfit
from fmapper.files.whole import new_file
from fmapper.machine import host_memory

_LARGE = 1 << 30  # bytes; for less, the available memory is not checked


def write_arrays(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes NumPy arrays and texts to a file, which is replaced as a whole.

    Raises:
        Misfit: The format lacks a dtype, or the header would be too long.
    """
    rows = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    head, _ = lay_out(rows, metadata)
    with new_file(path) as file:
        file.write(head)
        for array in arrays.values():
            file.write(_bytes(array))


def _bytes(array: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_arrays(file: BinaryIO, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Reads arrays of an open file.

    Raises:
        Misfit: The arrays do not fit into memory, or the file is damaged.
    """
    size = sum(entry.end - entry.start for entry in entries.values())
    memory = host_memory()[0] if size > _LARGE else None
    if memory is not None and size > memory:
        raise Misfit(f"holds {size >> 30:,} GiB of arrays, more than the memory of this machine")
    try:
        return {name: _array(file, entry) for name, entry in entries.items()}
    except MemoryError:
        raise Misfit(
            f"has {size >> 20:,} MiB of arrays, more than the memory that is available"
        ) from None


def _array(file: BinaryIO, entry: Entry) -> Any:
    import numpy as np

    file.seek(entry.start)
    data = file.read(entry.end - entry.start)
    if len(data) != entry.end - entry.start:
        raise Misfit("is damaged: it became shorter while it was read")
    if entry.dtype == "bool" and data.translate(None, b"\0\1"):
        raise Misfit("is damaged: a bool is neither true nor false")
    return np.frombuffer(data, numpy_dtype(entry.dtype)).reshape(entry.shape)
