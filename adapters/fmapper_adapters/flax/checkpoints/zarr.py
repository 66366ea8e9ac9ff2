"""The arrays in a folder of Orbax: zarr in plain files or in a database (OCDBT), by tensorstore.

tensorstore aborts the process if it cannot allocate memory for a chunk or a result. Therefore the
metadata of arrays is checked here before tensorstore reads any, and results are read into memory of
NumPy.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fmapper import CheckpointError
from fmapper.checkpoints import (
    STORED_DTYPES,
    LazyArray,
    Misfit,
    read_json,
    reason_of,
    show,
    within,
)

_KEYS = (".zarray", "zarr.json")  # metadata keys of versions 2 and 3
MOST_ABOUT = 1 << 20  # bytes of the metadata of one array
_MOST_DIMENSIONS = 32  # limit of tensorstore
_MOST_RATIO = 1 << 15  # the best that zstd, the best of the compressions, can do
_AT_ONCE = 32  # values that are read at once
_LARGE = 8 << 20  # bytes; larger chunks are kept, since they are read in parts
_NUMBERS = re.compile(r"[<>|][biufc][0-9]{1,2}")
_FAILED = (ValueError, KeyError, OSError, RuntimeError, NotImplementedError)  # by tensorstore


class Layout(NamedTuple):
    """The shape, dtype and chunk shape of an array, and its version of zarr.

    For an unknown dtype, `unknown` has its name, and `dtype` is that of bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    driver: str
    unknown: str = ""


class Stores:
    """The arrays in a folder, at most two of them open: reading ahead may reach the next one.

    A chunk that is larger than the part being read is kept, so that it is not decompressed again
    for every part.

    Args:
        folder: The folder.
        nbytes: The bytes of its files.
        is_whole: Whether chunks that consist of zeros are stored as well.
    """

    def __init__(self, folder: Path, nbytes: int, is_whole: bool) -> None:
        import tensorstore

        self.folder = folder
        self._most = nbytes * _MOST_RATIO
        self._is_whole = is_whole
        self._lock = threading.Lock()
        self._open: dict[str, Any] = {}
        self._store: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
        if (folder / "manifest.ocdbt").exists():
            self._store = {"driver": "ocdbt", "base": self._store}
        self._values = tensorstore.KvStore.open(self._store).result()

    def layouts(self, names: Sequence[str]) -> Iterator[Layout]:
        """Yields the layout of each array.

        Raises:
            Misfit: An array is missing, or its metadata is damaged or exceeds the files.
        """
        parsed: dict[tuple[bytes, str], Layout] = {}  # most arrays share a few layouts
        for name, (data, key) in zip(names, self._about(names), strict=True):
            with within(ascii(name)[1:-1][:60]):
                if (data, key) not in parsed:
                    layout = _parse(data, key)
                    self._check_size(layout)
                    parsed[data, key] = layout
            yield parsed[data, key]

    def _about(self, names: Sequence[str]) -> Iterator[tuple[bytes, str]]:
        """Yields the metadata of each array, and the key under which it is stored."""
        length = 0
        for at in range(0, len(names), _AT_ONCE):
            group = names[at : at + _AT_ONCE]
            values = [self._values.read(_prefix(name) + _KEYS[0]) for name in group]
            for name, value in zip(group, values, strict=True):
                stored, key = value.result(), _KEYS[0]
                if stored.state != "value":
                    key = _KEYS[1]
                    stored = self._values.read(_prefix(name) + key).result()
                if stored.state != "value":
                    raise Misfit("orbax finds no array of this name", name[:60])
                length += len(stored.value)
                if len(stored.value) > MOST_ABOUT or length > MOST_ABOUT + 400 * len(names):
                    raise Misfit(f"has a {key} that is too large", name[:60])
                yield stored.value, key

    def _check_size(self, layout: Layout) -> None:
        """Raises if the files cannot hold a chunk, or the whole array if every chunk is stored."""
        chunk = math.prod(layout.chunk) * layout.dtype.itemsize
        nbytes = math.prod(layout.shape) * layout.dtype.itemsize if self._is_whole else 0
        if max(chunk, nbytes) > self._most:
            raise Misfit(
                f"has chunks of {chunk:,} bytes and {nbytes:,} in all, more than its files can hold"
            )

    def read_into(self, out: np.ndarray[Any, Any], name: str, layout: Layout, box: Any) -> None:
        """Reads a part of an array into memory of its shape and dtype, of any strides."""
        import tensorstore

        try:
            array = self._array(name, layout)
            part = array[tuple(slice(*pair) for pair in box)]
            tensorstore.array(out).write(part).result()
        except _FAILED as error:
            place = f"{self.folder}: {show(name)}"
            raise CheckpointError(f"{place}: {reason_of(error)}") from error
        except MemoryError:
            chunk = math.prod(layout.chunk) * layout.dtype.itemsize
            raise CheckpointError(
                f"{self.folder}: {show(name)}: there is no memory for a chunk of {chunk:,} bytes"
            ) from None

    def _array(self, name: str, layout: Layout) -> Any:
        """Returns an array of tensorstore."""
        with self._lock:
            if name not in self._open:
                if len(self._open) > 1:
                    del self._open[next(iter(self._open))]
                self._open[name] = self._open_array(name, layout)
            return self._open[name]

    def _open_array(self, name: str, layout: Layout) -> Any:
        import tensorstore

        spec: dict[str, Any] = {
            "driver": layout.driver,
            "kvstore": {**self._store, "path": self._store.get("path", "") + _prefix(name)},
        }
        if self._is_whole:
            spec["fill_missing_data_reads"] = False
        nbytes = math.prod(layout.chunk) * layout.dtype.itemsize
        context = None
        if nbytes > _LARGE:
            np.empty(2 * nbytes, np.uint8)  # raises MemoryError, where tensorstore would abort
            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": nbytes + _LARGE}})
        array = tensorstore.open(spec, open=True, read=True, context=context).result()
        if array.shape != layout.shape or array.dtype.numpy_dtype != layout.dtype:
            raise ValueError("has changed since its metadata was read")
        return array


class StoredChunks(LazyArray):
    """An array in a folder of Orbax, read chunk by chunk."""

    def __init__(self, stores: Stores, name: str, layout: Layout) -> None:
        self.shape, self.dtype = layout.shape, layout.dtype
        self._stores, self._name, self._layout = stores, name, layout

    def _read(self, box: Any) -> Any:
        out = np.empty([stop - start for start, stop in box], self.dtype)
        self._fill(box, out)
        return out

    def _fill(self, box: Any, out: Any) -> None:
        self._stores.read_into(out, self._name, self._layout, box)


def _prefix(name: str) -> str:
    """Returns the prefix of the keys of an array; zarr appends a slash to a name without one."""
    return name if name.endswith("/") or not name else f"{name}/"


def _parse(data: bytes, key: str) -> Layout:
    try:
        about = read_json(data.decode())
    except UnicodeDecodeError:
        raise Misfit(f"has a {key} that is not text") from None
    if type(about) is not dict:
        raise Misfit(f"has a {key} that is not an object")
    if key == _KEYS[0]:
        chunk, dtype, driver = about.get("chunks"), about.get("dtype"), "zarr"
    else:
        grid = about.get("chunk_grid")
        settings = grid.get("configuration") if type(grid) is dict else None
        chunk = settings.get("chunk_shape") if type(settings) is dict else None
        dtype, driver = about.get("data_type"), "zarr3"
    shape = _sizes(about.get("shape"), 0)
    sizes = _sizes(chunk, 1)
    if len(shape) != len(sizes):
        raise Misfit(f"has {len(shape)} dimensions, and chunks of {len(sizes)}")
    if type(dtype) is str and dtype not in STORED_DTYPES and _UNKNOWN.fullmatch(dtype):
        return Layout(shape, np.dtype("V1"), sizes, driver, dtype)
    return Layout(shape, _dtype(dtype), sizes, driver)


def _sizes(numbers: Any, least: int) -> tuple[int, ...]:
    if type(numbers) is not list or len(numbers) > _MOST_DIMENSIONS:
        raise Misfit("has an invalid size")
    if not all(type(n) is int and least <= n < 1 << 62 for n in numbers):
        raise Misfit("has an invalid size")
    return tuple(numbers)


_UNKNOWN = re.compile(r"(?:u?int|b?float)\w{1,24}", re.ASCII)


def _dtype(name: Any) -> np.dtype[Any]:
    if type(name) is str and _NUMBERS.fullmatch(name):
        with contextlib.suppress(TypeError):
            name = np.dtype(name).name  # tensorstore converts to native byte order
    if type(name) is not str or name not in STORED_DTYPES:
        raise Misfit(f"has the unknown dtype {show(name)}")
    if hasattr(np, name):
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype
