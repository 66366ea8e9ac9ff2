"""Checkpoints in the safetensors format: one file, or a folder of shards with an index."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from fmapper.checkpoints.formats.format import MOST_BYTES_OF_A_SHARD, Contents, Format, file_in
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.remote import UrlFile
from fmapper.checkpoints.stored import SourceFile, StoredArray
from fmapper.checkpoints.unusual import UnreadableArray
from fmapper.errors import CheckpointError
from fmapper.files.bounded_json import read_json, read_json_file
from fmapper.files.bounds import check_count
from fmapper.files.dtypes import STORED_DTYPES
from fmapper.files.safetensors import MOST_HEADER, lay_out, read_header
from fmapper.files.untrusted import Misfit, open_regular, show
from fmapper.files.urls import Url

ENDING = ".safetensors"
INDEX = "model.safetensors.index.json"
_ABOUT = "fmapper"  # the key for contents that the format has no place for
_SHARD = re.compile(r"[\w.=+-]{1,200}\.safetensors")


class Safetensors(Format):
    """One file. Its metadata has ties, numbers and strings as JSON, under `fmapper`."""

    name: ClassVar[str] = "safetensors"
    endings: ClassVar[tuple[str, ...]] = (ENDING,)
    urls: ClassVar[bool] = True

    def for_path(self, path: Path) -> Format:
        """Returns this format for a name that ends with .safetensors, else a folder of shards."""
        return self if path.suffix == ENDING else SafetensorsFolder()

    def is_at(self, path: Path) -> bool:
        """Returns whether a file has the magic number or the ending of this format."""
        if not path.is_file():
            return False
        if path.suffix == ENDING:
            return True
        with _open(path) as file:
            head = file.read(9)
        return head[4:] == b"\0\0\0\0{" and len(head) == 9

    def read(self, path: Path) -> Contents:
        """Reads the header."""
        arrays, metadata = _read_file(path)
        return _with_about(arrays, metadata, (path,))

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes header and arrays."""
        with out.open() as file:
            _write_file(out, file, contents.arrays, _metadata(contents))


class SafetensorsFolder(Format):
    """A folder in the Hub's layout: `model.safetensors`, or shards of bounded size and an index.

    Args:
        most: The maximal bytes of arrays per file, unless a single array has more; None for 5 GB.
    """

    name: ClassVar[str] = "safetensors"
    is_folder: ClassVar[bool] = True
    urls: ClassVar[bool] = True

    def __init__(self, most: int | None = None) -> None:
        self.most = most

    def for_path(self, path: Path) -> Format:
        """Returns the format of one file for a name that ends with .safetensors."""
        return Safetensors().for_path(path)

    def with_shards(self, nbytes: int) -> Format:
        """Returns this format with files of at most so many bytes of arrays."""
        return SafetensorsFolder(nbytes)

    def is_at(self, path: Path) -> bool:
        """Returns whether a folder has an index, or files with that ending."""
        return path.is_dir() and (_is_there(path / INDEX) or bool(_files(path)))

    def read(self, path: Path) -> Contents:
        """Reads the headers of all shards, or of those in the index if there is one."""
        arrays: dict[str, LazyArray] = {}
        metadata: dict[str, str] = {}
        index = _read_index(file_in(path, INDEX)) if _is_there(path / INDEX) else None
        names = sorted(set(index.values())) if index is not None else _files(path)
        places: dict[str, str] = {}
        for name in names:
            shard, shard_metadata = _read_file(file_in(path, name))
            if not arrays.keys().isdisjoint(shard):
                twice = min(arrays.keys() & shard)
                raise CheckpointError(f"{path / name}: {show(twice)} is in another shard as well")
            places |= dict.fromkeys(shard, name)
            arrays |= shard
            metadata |= shard_metadata
            try:
                check_count(len(arrays), "arrays in all files")
            except Misfit as error:
                raise CheckpointError(f"{path}: {error}") from None
        if index is not None and not index.items() <= places.items():
            array, name = min(index.items() - places.items())
            raise CheckpointError(f"{path / INDEX}: {show(array)} is not in {show(name)}")
        return _with_about(arrays, metadata, tuple(path / name for name in names))

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes the shards, and an index if there are several."""
        metadata = _metadata(contents)
        for name, arrays in shards(contents.arrays, self.most):
            with out.open(name) as file:
                _write_file(out, file, arrays, metadata)
        index = index_of(contents.arrays, self.most)
        if index is not None:
            out.text(INDEX, index)


def layout(
    form: Format, contents: Contents, target: str
) -> tuple[dict[str, tuple[bytes, dict[str, int], int]], dict[str, str]]:
    """Returns the layout of the files to write: header, offsets, size; and texts."""
    parts, index = [(target, contents.arrays)], None
    if isinstance(form, SafetensorsFolder):
        parts = shards(contents.arrays, form.most)
        index = index_of(contents.arrays, form.most)
    metadata = _metadata(contents)
    files = {}
    for name, arrays in parts:
        rows = ((n, array.dtype.name, array.shape) for n, array in arrays.items())
        try:
            head, header = lay_out(rows, metadata)
        except Misfit as error:
            raise CheckpointError(str(error)) from None
        starts = {n: entry.start for n, entry in header.entries.items()}
        size = max((entry.end for entry in header.entries.values()), default=len(head))
        files[name] = head, starts, size
    return files, {} if index is None else {INDEX: index}


def _write_file(
    out: Writer, file: BinaryIO, arrays: Mapping[str, LazyArray], metadata: Mapping[str, str]
) -> None:
    """Writes one file, array by array."""
    try:
        head, _ = lay_out(
            ((name, array.dtype.name, array.shape) for name, array in arrays.items()), metadata
        )
    except Misfit as error:
        raise CheckpointError(str(error)) from None
    file.write(head)
    out.put_all(file, arrays)


def shards(
    arrays: Mapping[str, LazyArray], most: int | None = None
) -> list[tuple[str, dict[str, LazyArray]]]:
    """Groups arrays, in order, into named files of at most so many bytes."""
    most = most or MOST_BYTES_OF_A_SHARD
    parts: list[dict[str, LazyArray]] = [{}]
    size = 0
    for name, array in arrays.items():
        if parts[-1] and size + array.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    if len(parts) == 1:
        return [(f"model{ENDING}", parts[0])]
    return [
        (f"model-{number:05d}-of-{len(parts):05d}{ENDING}", part)
        for number, part in enumerate(parts, 1)
    ]


def index_of(arrays: Mapping[str, LazyArray], most: int | None = None) -> str | None:
    """Returns the index of the shards as JSON; None for a single shard."""
    parts = shards(arrays, most)
    if len(parts) == 1:
        return None
    size = sum(array.nbytes for array in arrays.values())
    places = {name: file for file, part in parts for name in part}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    return json.dumps(index, indent=2) + "\n"


def about_to_text(contents: Contents) -> str:
    """Encodes ties, values and names of objects as JSON; empty where there are none."""
    if not contents.ties and not contents.values and not contents.objects:
        return ""
    values = {name: _plain(value) for name, value in contents.values.items()}
    about = {"version": 1, "ties": contents.ties, "values": values}
    objects = {"objects": sorted(contents.objects)} if contents.objects else {}
    return json.dumps({**about, **objects}, allow_nan=False)


def _plain(value: Any) -> Any:
    strange = isinstance(value, float) and not math.isfinite(value)
    return {"float": repr(value)} if strange else value


def about_from_text(
    text: str, arrays: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], frozenset[str]]:
    """Decodes the ties, values and names of objects that `about_to_text` encodes.

    Raises:
        Misfit: The text is something else.
    """
    if not text:
        return {}, {}, frozenset()
    about = read_json(text)
    if type(about) is not dict or type(about.get("version")) is not int:
        raise Misfit("has no version")
    if about["version"] > 1:
        raise Misfit("was written by a newer fmapper")
    ties, values = about.get("ties", {}), about.get("values", {})
    if type(ties) is not dict or type(values) is not dict:
        raise Misfit("lacks ties or values")
    objects = about.get("objects", [])
    if type(objects) is not list or not all(type(name) is str for name in objects):
        raise Misfit("has objects that are not names")
    for name, first in ties.items():
        if type(first) is not str or first not in arrays or name in arrays:
            raise Misfit(f"{show(name)} is tied to {show(first)}, which is missing")
    taken = {*arrays, *ties}
    for name, value in values.items():
        if type(value) is dict and value.get("float") in ("inf", "-inf", "nan"):
            values[name] = float(value["float"])
        elif not isinstance(value, int | float | str) or name in taken:
            raise Misfit(f"{show(name)} is not a number or text")
    return ties, values, frozenset(objects)


def _metadata(contents: Contents) -> dict[str, str]:
    if _ABOUT in contents.metadata:
        raise CheckpointError(f"metadata[{_ABOUT!r}]: fmapper writes its own under this name")
    text = about_to_text(contents)
    return {"format": "pt", **contents.metadata, **({_ABOUT: text} if text else {})}


def _with_about(
    arrays: dict[str, LazyArray], metadata: dict[str, str], files: tuple[Path, ...]
) -> Contents:
    texts = {**metadata}
    try:
        ties, values, objects = about_from_text(texts.pop(_ABOUT, ""), arrays)
    except Misfit as error:
        raise CheckpointError(f"{files[0]}: {_ABOUT}: {error}") from None
    return Contents(arrays, ties, values, texts, files, objects)


def _read_file(path: Path) -> tuple[dict[str, LazyArray], dict[str, str]]:
    try:
        file = UrlFile(path) if isinstance(path, Url) else SourceFile(path)
        with _open(path) as handle:
            header = read_header(handle, file.size, unknown=True)
    except (Misfit, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    arrays: dict[str, LazyArray] = {
        name: StoredArray(file, entry.start, entry.shape, entry.dtype)
        if entry.dtype in STORED_DTYPES
        else UnreadableArray.of_unknown(path, name, entry.shape, entry.dtype)
        for name, entry in header.entries.items()
    }
    return arrays, header.metadata


def _is_there(path: Path) -> bool:
    """Returns whether a name exists, dangling links included."""
    return path.exists() if isinstance(path, Url) else os.path.lexists(path)


def _open(path: Path) -> AbstractContextManager[BinaryIO]:
    return path.open() if isinstance(path, Url) else open_regular(path)


def _files(folder: Path) -> list[str]:
    names = folder.names() if isinstance(folder, Url) else sorted(os.listdir(folder))
    return [name for name in names if name.endswith(ENDING)]


def _json_of_url(url: Url) -> Any:
    size = url.size()
    if size > MOST_HEADER:
        raise Misfit("is too long")
    try:
        return read_json(url.read_range(0, size).decode())
    except UnicodeDecodeError:
        raise Misfit("is not text") from None


def _read_index(path: Path) -> dict[str, str]:
    """Reads which file holds each array; only plain names in the same folder are allowed."""
    try:
        index = _json_of_url(path) if isinstance(path, Url) else read_json_file(path)
        places = index.get("weight_map") if type(index) is dict else None
        if type(places) is not dict or not places:
            raise Misfit("has no weight_map")
        checked: dict[str, bool] = {}
        for name, file_name in places.items():
            if type(file_name) is str and file_name in checked:
                continue
            if type(file_name) is not str or not _SHARD.fullmatch(file_name):
                raise Misfit(
                    f"{show(name)} refers to {show(file_name)}, which is not a file of the folder"
                )
            checked[file_name] = True
    except Misfit as error:
        raise CheckpointError(f"{path}: {error}") from None
    return places
