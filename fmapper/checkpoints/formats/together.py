"""Checkpoints that several processes write, each the parts of arrays that it holds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from fmapper.backends.discovery import adapters
from fmapper.backends.meshes import Box, Meshes
from fmapper.checkpoints.boxes import box_shape
from fmapper.checkpoints.formats.format import Contents, Format
from fmapper.checkpoints.formats.safetensors import Safetensors, SafetensorsFolder, layout
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import CheckpointError
from fmapper.files.meeting import Meeting
from fmapper.files.urls import Place, Url
from fmapper.moves.mover import to_numpy

Spread = Mapping[str, tuple[Meshes, Any, Mapping[Box, int]]]


def spread_arrays(contents: Contents) -> Spread | None:
    """Returns the arrays that are spread over several processes; None if there are none.

    Raises:
        CheckpointError: An array cannot be written in parts; names it.
    """
    spread = {}
    for name, lazy in contents.arrays.items():
        array = getattr(lazy, "array", None)
        for adapter in adapters(Meshes) if array is not None else ():
            try:
                writers = adapter.writers(array)
            except TypeError as error:
                raise CheckpointError(f"{name}: {error}") from None
            if writers is not None:
                spread[name] = adapter, array, writers
    return spread or None


def save(target: Place, form: Format, contents: Contents, spread: Spread) -> None:
    """Writes a checkpoint jointly with the other processes, which call this too."""
    if isinstance(target, Url) or not isinstance(form, Safetensors | SafetensorsFolder):
        raise CheckpointError(
            f"{target}: several processes can write only safetensors, to a file system that they "
            f"share; for {form.name}, gather the arrays first, or use the framework itself."
        )
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if form.is_folder and not is_free:  # every process sees it
        raise FileExistsError(f"{target} already exists and is not an empty folder")
    (adapter, _, _) = next(iter(spread.values()))
    rank, count = adapter.process()
    files, texts = layout(form, contents, target.name)
    meeting = Meeting(target, rank, count, is_folder=form.is_folder)

    def prepare() -> None:
        for name, (head, _, size) in files.items():
            with (meeting.data / name).open("xb") as file:
                file.write(head)
                file.truncate(size)
        for name, text in texts.items():
            (meeting.data / name).write_text(text, encoding="utf-8")

    def write() -> None:
        for name, (_, starts, _) in files.items():
            handle = os.open(meeting.data / name, os.O_WRONLY)
            try:
                for array, start in starts.items():
                    _write_array(handle, array, contents.arrays[array], spread, start, rank)
                os.fsync(handle)
            finally:
                os.close(handle)

    meeting.run(prepare, write)


def _write_array(
    handle: int, name: str, array: LazyArray, spread: Spread, start: int, rank: int
) -> None:
    """Writes this process's part of an array; process 0 writes replicated parts."""
    if name not in spread:
        for box, part in array.panels(8 << 20) if rank == 0 else ():
            _write_box(handle, part, box, array, start)
        return
    adapter, placed, writers = spread[name]
    held = adapter.held_parts(placed)
    for box, writer in writers.items():
        if writer == rank:
            _write_box(handle, to_numpy(held[box]), box, array, start)


def _write_box(handle: int, part: Any, box: Box, array: LazyArray, start: int) -> None:
    import numpy as np

    data = memoryview(np.ascontiguousarray(part).reshape(-1).view("u1").data)
    at = 0
    for offset, nbytes in _runs(box, array.shape, array.dtype.itemsize):
        done = 0
        while done < nbytes:
            piece = data[at + done : at + nbytes]
            done += os.pwrite(handle, piece, start + offset + done)
        at += nbytes


def _runs(box: Box, shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yields the contiguous runs of a box in an array: offset and bytes.

    Examples:
        >>> list(_runs(((0, 2), (1, 3)), (2, 4), 1)), list(_runs(((1, 2), (0, 4)), (2, 4), 1))
        ([(1, 2), (5, 2)], [(4, 4)])
    """
    import numpy as np

    strides = [math.prod(shape[at + 1 :]) * itemsize for at in range(len(shape))]
    whole = len(shape)
    while whole and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    outer = max(0, whole - 1)  # the dimensions before the last divided one
    nbytes = math.prod(box_shape(box[outer:])) * itemsize
    first = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
    for place in np.ndindex(*box_shape(box[:outer])) if nbytes else ():
        yield first + sum(i * s for i, s in zip(place, strides, strict=False)), nbytes
