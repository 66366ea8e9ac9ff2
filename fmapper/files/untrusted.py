"""Reading of untrusted files: regular files only, links within the folder, one error."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_LONGEST_REASON = 300  # characters


class Misfit(Exception):
    """Raised for malformed contents; callers add to the place as it propagates.

    Attributes:
        message: What is wrong.
        place: Keys and positions, the innermost first.
    """

    def __init__(self, message: str, *place: int | str) -> None:
        super().__init__(message)
        self.message = message
        self.place = list(place)

    def __str__(self) -> str:
        """Returns the place and the message."""
        place = ""
        for key in reversed(self.place):
            place += f"[{key}]" if isinstance(key, int) else f".{key}"
        return f"{place.removeprefix('.')}: {self.message}" if place else self.message


class within:
    """Adds keys to the place of a `Misfit` that is raised inside."""

    __slots__ = ("keys",)

    def __init__(self, *keys: int | str) -> None:
        self.keys = keys

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, Misfit):
            error.place.extend(reversed(self.keys))


def path_problem(path: str | os.PathLike[str]) -> str:
    """Explains why no file can have this name; returns "" if one can.

    Python itself raises a `ValueError` that does not contain the name.
    """
    text = os.fspath(path)
    if not text:
        return "the path is empty"
    if "\0" in text:
        return f"{show(text)}: contains a NUL character, so no file can have this name"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return f"{show(text)}: contains half of a surrogate pair, so no file can have this name"
    return ""


def show(value: Any) -> str:
    """Formats a value from a file for an error: short, and without control characters."""
    text = ascii(value) if isinstance(value, str | int | float) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def reason_of(error: BaseException) -> str:
    """Returns the message of another library's error: short, and without control characters.

    The message may quote the contents of the file.
    """
    text = str(error).partition("\n")[0] or type(error).__name__
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict.

    Raises:
        Misfit: A key occurs twice.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Misfit("has a key twice")
    return members


def no_constant(name: str) -> Any:
    """Raises for NaN and infinities, which JSON lacks."""
    raise ValueError(f"{name} is not a number")


def member(folder: Path, name: str) -> Path:
    """Returns the path of a regular file in a folder.

    A link may lead to another file of the folder, or from a snapshot in the cache of the Hub to the
    blobs of the same repository, and nowhere else.

    Raises:
        Misfit: The file is missing, or a link that leads out of the folder.
    """
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except FileNotFoundError:
        raise Misfit(f"{show(name)} is missing") from None
    except (OSError, RuntimeError) as error:  # circular links, a folder that may not be read
        raise Misfit(f"{show(name)} cannot be found: {error}") from None
    in_cache = home.parent.name == "snapshots" and real.parent == home.parents[1] / "blobs"
    if real.parent != home and not in_cache:
        raise Misfit(f"{show(name)} is a link that leads out of the folder")
    return path


def check_folder(folder: Path) -> int:
    """Checks a folder that another library is going to read for links out of it.

    A link may lead to a file or folder within it, or from a snapshot in the cache of the Hub to the
    blobs of the same repository. All files must be regular ones: a pipe would block.

    Returns:
        The bytes of its files.

    Raises:
        Misfit: A link leads elsewhere, or a file is not a regular one.
    """
    home = folder.resolve()
    snapshots = next((place for place in home.parents if place.name == "snapshots"), None)
    blobs = None if snapshots is None else snapshots.parent / "blobs"
    todo, nbytes = [folder], 0
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                name = show(os.path.relpath(entry.path, folder))
                if entry.is_symlink():
                    try:
                        real = Path(entry.path).resolve(strict=True)
                    except (OSError, RuntimeError):
                        raise Misfit(f"{name} is a link that leads nowhere") from None
                    if home not in real.parents and (blobs is None or real.parent != blobs):
                        raise Misfit(f"{name} is a link that leads out of the folder")
                elif entry.is_dir():
                    todo.append(Path(entry.path))
                if entry.is_file():
                    nbytes += entry.stat().st_size
                elif not entry.is_dir():
                    raise Misfit(f"{name} is not a regular file")
    return nbytes


@contextlib.contextmanager
def open_regular(source: Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading: a pipe would block, and a device never ends.

    Raises:
        Misfit: It is not a regular file.
        OSError: The file does not exist, or cannot be read.
    """
    if not stat.S_ISREG(source.stat().st_mode):
        raise Misfit("is not a regular file")
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(source, "rb", opener=lambda path, _: os.open(path, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # the file was replaced meanwhile
            raise Misfit("is not a regular file")
        yield file
