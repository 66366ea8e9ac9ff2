"""Files and folders by URL, on the file systems of fsspec, or by path."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fmapper.errors import BackendUnavailableError, CheckpointError
from fmapper.files.untrusted import Misfit, path_problem

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(://|::)")
_COLLAPSED = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/(?!/)")
_LOCAL = ("file", "local")
_BLOCK = 1 << 18  # bytes that are read ahead of a header


class Url:
    """A file or folder on a file system of fsspec.

    It has those methods of a path that reading and writing checkpoints needs. There are no links to
    follow: the host decides what a URL names.

    Attributes:
        text: The URL.
    """

    def __init__(self, text: str, system: Any, inner: str) -> None:
        self.text = text
        self.system = system
        self._inner = inner

    @classmethod
    def of(cls, text: str) -> Url:
        """Parses a URL.

        Raises:
            BackendUnavailableError: fsspec, or a package that it needs for this URL, is not
                installed.
        """
        try:
            import fsspec
        except ImportError:
            raise BackendUnavailableError(
                f"{text}: URLs need the package fsspec, which is not installed: pip install fsspec"
            ) from None
        try:
            # an instance of its own, because cached ones would share transactions between threads
            system, inner = fsspec.core.url_to_fs(text, skip_instance_cache=True)
        except ImportError as error:  # the error names the missing package
            raise BackendUnavailableError(f"{text}: {error}") from None
        except ValueError as error:
            raise CheckpointError(f"{text}: fsspec does not support it: {error}") from None
        return cls(text, system, inner)

    def __str__(self) -> str:
        """Returns the URL."""
        return self.text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        """Returns whether both are the same URL."""
        return isinstance(other, Url) and self.text == other.text

    def __hash__(self) -> int:
        """Returns the hash of the URL."""
        return hash(self.text)

    def __truediv__(self, name: str) -> Url:
        """Returns a file in this folder."""
        text = f"{self.text.rstrip('/')}/{name}"
        return Url(text, self.system, f"{self._inner.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """Returns the last part."""
        return posixpath.basename(self._inner.rstrip("/"))

    @property
    def suffix(self) -> str:
        """Returns the end of the name, from its last dot on."""
        return posixpath.splitext(self.name)[1]

    def exists(self) -> bool:
        """Returns whether the file or folder exists."""
        return bool(self.system.exists(self._inner))

    def is_file(self) -> bool:
        """Returns whether it is a file."""
        return bool(self.system.isfile(self._inner))

    def is_dir(self) -> bool:
        """Returns whether it is a folder."""
        return bool(self.system.isdir(self._inner))

    def names(self) -> list[str]:
        """Returns the names of the entries of the folder."""
        paths = self.system.ls(self._inner, detail=False)
        return sorted(posixpath.basename(str(path).rstrip("/")) for path in paths)

    def size(self) -> int:
        """Returns how many bytes the file has.

        Raises:
            Misfit: The host does not report it.
        """
        size = self.system.info(self._inner).get("size")
        if type(size) is not int or size < 0:
            raise Misfit("is on a host that does not report its size")
        return size

    def mark(self) -> str:
        """Returns a value that changes with the file; empty if the host has none."""
        return str(self.system.ukey(self._inner))

    def open(self) -> BinaryIO:
        """Opens the file for reading, from its beginning."""
        file: BinaryIO = self.system.open(self._inner, "rb", block_size=_BLOCK)
        return file

    def create(self) -> BinaryIO:
        """Opens the file for writing; within a transaction it appears at the end."""
        file: BinaryIO = self.system.open(self._inner, "wb")
        return file

    def remove(self) -> None:
        """Removes the file."""
        self.system.rm_file(self._inner)

    def read_range(self, start: int, stop: int) -> bytes:
        """Reads a range of bytes.

        Raises:
            Misfit: The host returns more or fewer bytes.
        """
        data: bytes = self.system.cat_file(self._inner, start=start, end=stop)
        if len(data) != stop - start:
            raise Misfit(f"its host returned {len(data)} bytes instead of {stop - start}")
        return data


Place: TypeAlias = Path | Url


def place_of(path: str | os.PathLike[str] | Url) -> Place:
    """Parses a path or a URL; `file://` is a path.

    Raises:
        BackendUnavailableError: fsspec, or a package that it needs for this URL, is not installed.
        CheckpointError: It is an invalid URL, a URL that `Path` has damaged, or not a possible name
            of a file.
    """
    if isinstance(path, Url):
        return path
    text = os.fspath(path)
    if problem := path_problem(text):
        raise CheckpointError(problem)
    if _URL.match(text):
        parts = urlsplit(text)
        if parts.scheme not in _LOCAL or "::" in text:
            return Url.of(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise CheckpointError(f"{text}: write file:///folder/name, or a path")
        return Path(url2pathname(parts.path))
    place = Path(text)
    if _COLLAPSED.match(text) and not place.exists() and not isinstance(path, str):
        raise CheckpointError(
            f"{text}: is a URL that became a Path, which collapses slashes: pass it as a string"
        )
    return place


def local_place(path: str | os.PathLike[str], what: str) -> Path:
    """Returns a local path; raises for a URL.

    Raises:
        CheckpointError: It is a URL.
    """
    text = os.fspath(path)
    if not path_problem(text) and _URL.match(text) and urlsplit(text).scheme not in _LOCAL:
        raise CheckpointError(
            f"{text}: {what} needs a local folder instead of a URL: copy it first, for example "
            f"with "
            "fsspec.filesystem(...).get(...), or huggingface_hub.snapshot_download"
        )
    place = place_of(path)
    assert isinstance(place, Path)
    return place
