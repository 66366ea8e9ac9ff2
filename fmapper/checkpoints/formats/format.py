"""The interface of checkpoint formats, and the list of them: ours, and those of adapters."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fmapper.backends.discovery import all_adapters
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import CheckpointError
from fmapper.files.bounded_json import read_json
from fmapper.files.bounds import check_name
from fmapper.files.safetensors import MOST_BYTES
from fmapper.files.untrusted import Misfit, member, show
from fmapper.files.urls import Place, Url
from fmapper.render import parse_bytes
from fmapper.suggest import did_you_mean

if TYPE_CHECKING:
    from fmapper.checkpoints.formats.writer import Writer

MOST_BYTES_OF_A_SHARD = 5_000_000_000  # the names of the Hub


@dataclass
class Contents:
    """The contents of a checkpoint.

    Attributes:
        arrays: The arrays by name; a tied one only under its first name.
        ties: The aliases of tied arrays -> their first names.
        values: Numbers, strings and bools by name; None is not stored.
        metadata: Further texts of the file by name.
        files: The files that contain the arrays.
        objects: The names of objects that were saved with all of their numbers.
    """

    arrays: dict[str, LazyArray]
    ties: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    files: tuple[Place, ...] = ()
    objects: frozenset[str] = frozenset()


class Format(ABC):
    """A format of checkpoints. Adapters add those of their frameworks: `Framework.formats`.

    Attributes:
        name: Its name for users.
        other_names: Further names, such as that of its framework.
        endings: The usual endings of its files or folders.
        is_folder: Whether it is written as a folder.
        urls: Whether it is read from URLs, by ranges of bytes, and written there as a stream: the
            methods then take a `Url`, too, which has the needed methods of a path.
    """

    name: ClassVar[str]
    other_names: ClassVar[tuple[str, ...]] = ()
    endings: ClassVar[tuple[str, ...]] = ()
    is_folder: ClassVar[bool] = False
    urls: ClassVar[bool] = False

    @classmethod
    def is_called(cls, name: str | None) -> bool:
        """Returns whether a name refers to this format."""
        return name == cls.name or name in cls.other_names

    def for_path(self, path: Path) -> Format:
        """Returns the variant of this format for a path: one file, or a folder of several."""
        return self

    def with_shards(self, nbytes: int) -> Format:
        """Returns this format with files of at most so many bytes of arrays.

        Raises:
            CheckpointError: It is not written in shards.
        """
        raise CheckpointError(
            f"max_shard_size: {self.name} is not written in shards here; only a folder of "
            "safetensors is, which has a name without an ending, or with another one"
        )

    @abstractmethod
    def is_at(self, path: Path) -> bool:
        """Returns whether a file or folder is in this format, by its first bytes or its files."""

    @abstractmethod
    def read(self, path: Path) -> Contents:
        """Reads names and offsets, but no arrays.

        Raises:
            CheckpointError: The file is damaged, or has contents that the format does not allow.
        """

    @abstractmethod
    def write(self, out: Writer, contents: Contents) -> None:
        """Writes arrays in sequence.

        Args:
            out: The writer of the file or folder.
            contents: The contents to write.

        Raises:
            CheckpointError: The format cannot hold it; says which array, and what to do.
        """


def formats() -> Iterator[Format]:
    """Yields every format: those that need no framework first, then those of frameworks in use."""
    from fmapper.checkpoints.formats.gguf import Gguf
    from fmapper.checkpoints.formats.npz import Npz
    from fmapper.checkpoints.formats.safetensors import Safetensors, SafetensorsFolder

    yield from (Safetensors(), SafetensorsFolder(), Npz(), Gguf())
    for adapter in all_adapters():
        yield from adapter.formats()


def read_contents(place: Place, name: str | None = None) -> tuple[Format, Contents]:
    """Returns the format and the contents of a checkpoint, without reading arrays.

    Raises:
        CheckpointError: It is damaged, or in no known format.
    """
    form = format_of(place, name)
    path = cast(Path, place)  # formats that accept a Url use only its methods
    with without_collection():
        contents = form.read(path)
    for key, array in contents.arrays.items():  # an empty array takes no bytes of the file
        if 0 in array.shape and math.prod(filter(None, array.shape)) > MOST_BYTES // 16:
            raise CheckpointError(f"{place}: {show(key)} is too large for any memory")
    return form, contents


_MOST_INTEGER = 10**25 - 1  # headers with longer numbers are refused
_MOST_NEAR = 100  # names that are looked at for an error


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Suspends garbage collection: headers have no cycles, and it takes as long as reading them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def format_of(place: Place, name: str | None = None) -> Format:
    """Returns the format of a checkpoint: the declared one, or the one that is detected.

    Raises:
        CheckpointError: It is in no known format.
    """
    if not place.exists():
        raise FileNotFoundError(f"{place}: no such file or folder")
    path = cast(Path, place)
    if isinstance(place, Path) and path.is_file() and not path.stat().st_size:
        raise CheckpointError(f"{path}: is empty")  # endless files, such as some in /proc
    for candidate in formats():
        if not (candidate.urls or isinstance(place, Path)):
            if candidate.is_called(name) or (name is None and place.suffix in candidate.endings):
                raise _needs_a_file(place, candidate.name)
        elif (name is None or candidate.is_called(name)) and candidate.is_at(path):
            return candidate
    if name is not None:
        return format_for(path, name)
    if isinstance(place, Url):
        raise CheckpointError(
            f"{place}: contains no safetensors, the only format that can be read from URLs"
        )
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder without a checkpoint{_near(path)}")
    names = ", ".join(f"{form.name} ({' '.join(form.endings) or 'a folder'})" for form in formats())
    raise CheckpointError(f"{path}: is not in a known format. Known formats: {names}.")


def _near(folder: Path) -> str:
    """Suggests the checkpoint with the highest number in a folder that is not one itself."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in itertools.islice(entries, _MOST_NEAR)]
    names.sort(key=lambda name: (int(name) if name.isdecimal() else -1, name), reverse=True)
    for name in names:
        with contextlib.suppress(OSError, CheckpointError):  # it may not be read
            if any(candidate.is_at(folder / name) for candidate in formats()):
                return f"; {show(name)} in it is one"
    return ", which would have files such as model.safetensors in it" if names else ": it is empty"


def _needs_a_file(url: Place, name: str) -> CheckpointError:
    return CheckpointError(
        f"{url}: {name} needs a local file or folder instead of a URL, because its reader and "
        "writer seek. Copy it first, for example with fsspec.filesystem(...).get(...) or "
        ".put(...); only safetensors supports URLs."
    )


def format_for(
    path: Place,
    name: str | None,
    max_shard_size: int | str | None = None,
    source: Format | None = None,
) -> Format:
    """Returns the format to write, by its name or by the ending of the path.

    Args:
        path: The file or folder.
        name: The name of a format.
        max_shard_size: The bytes of arrays in a file of a folder, as a number or as `2GB`.
        source: The format of a folder that is converted, which a path without an ending keeps.

    Raises:
        CheckpointError: No format has this name or ending, or it cannot be written to a URL or in
            shards.
    """
    if name is None and source is not None and source.is_folder:
        is_clear = any(path.suffix in candidate.endings for candidate in formats())
        name = None if is_clear else source.name
    form = _format_for(cast(Path, path), name)
    if isinstance(path, Url) and not form.urls:
        raise _needs_a_file(path, form.name)
    return form if max_shard_size is None else form.with_shards(shard_bytes(max_shard_size))


def shard_bytes(size: int | str) -> int:
    """Returns the bytes of a number or a text such as `2GB`.

    Raises:
        CheckpointError: It is not a size, or not positive.
    """
    nbytes = parse_bytes(size) if isinstance(size, str) else size
    if type(nbytes) is not int or nbytes < 1:
        raise CheckpointError(
            f"max_shard_size={size!r}: pass bytes, such as 1000, '1.5GiB' or '800MB'"
        )
    return nbytes


def _format_for(path: Path, name: str | None) -> Format:
    if name is None:
        for candidate in formats():
            if path.suffix in candidate.endings:
                return candidate
        endings = ", ".join(ending for form in formats() for ending in form.endings)
        raise CheckpointError(
            f"{path}: cannot determine the format. Pass format= (--to on the command line), or a "
            f"name that ends with one of {endings}."
        )
    for candidate in formats():
        if candidate.is_called(name):
            return candidate.for_path(path)
    names = sorted({form.name for form in formats()})
    hint = did_you_mean(name, names)
    raise CheckpointError(f"{name!r} is not a format.{hint} Known formats: {', '.join(names)}.")


def check_contents(contents: Contents) -> None:
    """Checks that contents can be written and read again in any format.

    Raises:
        CheckpointError: A name, a text or a number cannot be stored; names it.
    """
    for name in itertools.chain(contents.arrays, contents.ties, contents.values):
        try:
            check_name(name)
        except Misfit:
            raise CheckpointError(
                f"{show(name)}: cannot be saved under this name, which is too long or has "
                "characters that cannot be printed. Rename the key."
            ) from None
    for name in contents.values.keys() & (contents.arrays.keys() | contents.ties.keys()):
        raise CheckpointError(f"{show(name)}: is both an array and a number or text. Rename one.")
    for key, text in contents.metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise CheckpointError(
                f"metadata[{key!r}]: is of type {type(text).__name__}, where texts are kept by name"
            )
    texts = {**contents.metadata, **{f"metadata {key}": key for key in contents.metadata}}
    for name, text in itertools.chain(contents.values.items(), texts.items()):
        if isinstance(text, str) and not _is_unicode(text):
            raise CheckpointError(
                f"{show(name)}: a string with half of a surrogate pair cannot be saved; "
                "make it an array of bytes"
            )
        if isinstance(text, int) and abs(text) > _MOST_INTEGER:
            raise CheckpointError(
                f"{show(name)}: an integer of more than 25 digits cannot be saved; make it a string"
            )


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def merge_ties(names: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns each object under its first name, and a map from other names to that one."""
    first: dict[int, str] = {}
    arrays, ties = {}, {}
    for name, array in names.items():
        if first.setdefault(id(array), name) == name:
            arrays[name] = array
        else:
            ties[name] = first[id(array)]
    return arrays, ties


def tied_to_text(contents: Contents) -> str:
    """Encodes ties as JSON, for formats that write a tied array under each of its names."""
    return json.dumps({"version": 1, "ties": contents.ties})


def unite_tied(contents: Contents, text: str) -> None:
    """Unites the arrays that a file has under each name of a tie.

    Args:
        contents: The contents of the file, which are changed.
        text: The result of `tied_to_text` for the saved contents.

    Raises:
        Misfit: The text is malformed, or names arrays that differ.
    """
    about, arrays = read_json(text), contents.arrays
    ties = about.get("ties") if type(about) is dict and about.get("version") == 1 else None
    if type(ties) is not dict:
        raise Misfit("describes ties in a form that this version cannot read")
    for name, first in ties.items():
        if type(first) is not str or name not in arrays or first not in arrays:
            raise Misfit(f"{show(name)} is tied to {show(first)}, and one of them is missing")
        alias, origin = arrays[name], arrays[first]
        if first in ties or (alias.shape, alias.dtype) != (origin.shape, origin.dtype):
            raise Misfit(f"{show(name)} is tied to {show(first)}, which is another array")
    for name, first in ties.items():
        contents.ties[name] = first
        del arrays[name]


def nest(named: Mapping[str, Any]) -> Any:
    """Nests a flat dict by the dots in its names."""
    tree: dict[str, Any] = {}
    for name, value in named.items():
        *keys, last = name.split(".")
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{name} would be nested inside another array")
        if last in node:
            raise CheckpointError(f"{name} is both an array and the parent of other arrays")
        node[last] = value
    return tree[""] if [*named] == [""] else tree


def file_in(folder: Path, name: str) -> Path:
    """Returns the path of a file in the folder of a checkpoint.

    Raises:
        CheckpointError: It does not exist, or is a link that leads out of the folder.
    """
    if isinstance(folder, Url):  # the host resolves its names, which cannot refer to local files
        return folder / name
    try:
        return member(folder, name)
    except Misfit as error:
        raise CheckpointError(f"{folder}: {error}") from None
