"""What a format of checkpoints is, and which ones there are: ours, and those of adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fmapper.backends.discovery import all_adapters
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import CheckpointError
from fmapper.files.untrusted import Misfit, member
from fmapper.suggest import did_you_mean

MOST_BYTES_OF_A_SHARD = 5_000_000_000  # as the Hub has them


@dataclass
class Contents:
    """What a checkpoint holds.

    Attributes:
        arrays: The arrays by name; one that is tied stands under its first name only.
        ties: The other names of tied arrays, each with the first one.
        values: Numbers, strings and bools by name. None is nothing to keep.
        metadata: What else is said in the file, texts by name.
        files: The files that the arrays lie in.
    """

    arrays: dict[str, LazyArray]
    ties: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


class Format(ABC):
    """A format of checkpoints. Adapters have those of their frameworks: `Framework.formats`.

    Attributes:
        name: What users call it.
        endings: How names of files or folders in it end, by custom.
        is_folder: It is written as a folder.
    """

    name: ClassVar[str]
    endings: ClassVar[tuple[str, ...]] = ()
    is_folder: ClassVar[bool] = False

    def for_path(self, path: Path) -> Format:
        """Returns the form of this format for a path: one file, or a folder of several."""
        return self

    @abstractmethod
    def is_at(self, path: Path) -> bool:
        """Tells whether a file or folder is in this format, by its beginning or what lies in it."""

    @abstractmethod
    def read(self, path: Path) -> Contents:
        """Reads what is where, and no array.

        Raises:
            CheckpointError: The file is damaged, or holds what this format has not.
        """

    @abstractmethod
    def write(self, out: Writer, contents: Contents) -> None:
        """Writes arrays one after the other.

        Args:
            out: What to write through: the file, or a folder.
            contents: What to write.

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


def format_of(path: Path, name: str | None = None) -> Format:
    """Returns the format that a checkpoint is in, or that it is said to be in.

    Raises:
        CheckpointError: It is in none that is known here.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    for candidate in formats():
        if name in (None, candidate.name) and candidate.is_at(path):
            return candidate
    if name is not None:
        return format_for(path, name)
    known = ", ".join(f"{one.name} ({' '.join(one.endings) or 'a folder'})" for one in formats())
    raise CheckpointError(f"{path}: is in no format that is known here. Known: {known}.")


def format_for(path: Path, name: str | None) -> Format:
    """Returns the format to write: by its name, or by how the path ends.

    Raises:
        ValueError: There is no format of this name, or none for this ending.
    """
    if name is None:
        for candidate in formats():
            if path.suffix in candidate.endings:
                return candidate
        endings = ", ".join(ending for one in formats() for ending in one.endings)
        raise ValueError(
            f"{path}: which format? Give format=..., or a name that ends with one of {endings}."
        )
    for candidate in formats():
        if candidate.name == name:
            return candidate.for_path(path)
    names = sorted({one.name for one in formats()})
    hint = did_you_mean(name, names)
    raise ValueError(f"{name!r} is not a format.{hint} There are: {', '.join(names)}.")


def merge_ties(names: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns each object under its first name, and the other names with that one."""
    first: dict[int, str] = {}
    arrays, ties = {}, {}
    for name, array in names.items():
        if first.setdefault(id(array), name) == name:
            arrays[name] = array
        else:
            ties[name] = first[id(array)]
    return arrays, ties


def nest(named: Mapping[str, Any]) -> Any:
    """Returns nested dicts of what has names with dots."""
    tree: dict[str, Any] = {}
    for name, value in named.items():
        *keys, last = name.split(".")
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{name}: there is no place for it below an array")
        if last in node:
            raise CheckpointError(f"{name}: there is no place for it beside what is below it")
        node[last] = value
    return tree.get("", tree) if [*tree] == [""] else tree


def file_in(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder of a checkpoint, where it lies there.

    Raises:
        CheckpointError: It is not there, or a link that leads out of the folder.
    """
    try:
        return member(folder, name)
    except Misfit as error:
        raise CheckpointError(f"{folder}: {error}") from None
