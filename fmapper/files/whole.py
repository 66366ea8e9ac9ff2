"""Atomic writes: a temporary file or folder beside the target replaces it when it is complete."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """Yields a temporary path; its file replaces `target` unless the block raises.

    Until then the temporary file is beside it as `NAME.PID-THREAD.tmp`. Remains of killed processes
    are removed first.
    """
    beside = _beside(target, folder=False)
    try:
        yield beside
        beside.replace(target)
    finally:
        _remove_all(beside)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """Yields a temporary file that replaces `target` unless the block raises."""
    with new_path(target) as beside, beside.open("xb") as file:
        yield file


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces `target` unless the block raises.

    Raises:
        FileExistsError: The target is a file, or a folder that is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} already exists and is not an empty folder")
    beside = _beside(target, folder=True)
    beside.mkdir()
    try:
        yield beside
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()
        beside.rename(target)
    finally:
        with contextlib.suppress(OSError):
            _remove_all(beside)


def _beside(target: Path, *, folder: bool) -> Path:
    _clean_up(target, folder)
    beside = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    _remove(beside)  # left by an earlier process with this id
    return beside


def _remove_all(beside: Path) -> None:
    """Removes a temporary path, and files that libraries created beside it under longer names."""
    with os.scandir(beside.parent) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if name == beside.name or name.startswith(f"{beside.name}."):
            _remove(beside.with_name(name))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clean_up(target: Path, folders: bool) -> None:
    """Removes the temporary files of processes that have died."""
    if os.name != "posix":  # other systems cannot tell whether a process is alive
        return
    left = re.compile(re.escape(target.name) + r"\.(\d{1,9})(?:\.tmp|-\d+\.tmp(?:\..*)?)")
    with os.scandir(target.parent) as entries:
        matches = [(entry, left.fullmatch(entry.name)) for entry in entries]
    for entry, match in matches:
        kind = entry.is_dir if folders else entry.is_file
        if match and kind(follow_symlinks=False) and not _is_alive(int(match[1])):
            with contextlib.suppress(OSError):  # owned by another user, or already gone
                _remove(Path(entry.path))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # alive, owned by another user
        return True
    return True
