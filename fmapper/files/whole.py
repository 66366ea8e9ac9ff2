"""Files and folders that appear as a whole: what is written lies beside its target until then."""

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
    """Gives a temporary path, whose file replaces `target` if the block raises nothing.

    Until then it lies beside it as `NAME.PID-THREAD.tmp`. What a process that was killed has left
    there goes now.
    """
    beside = _beside(target, folder=False)
    try:
        yield beside
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """Gives a temporary file, which replaces `target` if the block raises nothing."""
    with new_path(target) as beside, beside.open("xb") as file:
        yield file


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Gives a temporary folder, which replaces `target` if the block raises nothing.

    Raises:
        FileExistsError: There is a folder of this name that holds something, or a file.
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
        shutil.rmtree(beside, ignore_errors=True)


def _beside(target: Path, *, folder: bool) -> Path:
    _clean_up(target, folder)
    beside = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    _remove(beside)  # of an earlier process of this number
    return beside


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clean_up(target: Path, folders: bool) -> None:
    """Removes the temporary files that dead processes have left."""
    if os.name != "posix":  # elsewhere there is no asking whether a process lives
        return
    left = re.compile(re.escape(target.name) + r"\.(\d{1,9})(?:-\d+)?\.tmp")
    with os.scandir(target.parent) as entries:
        found = [(entry, left.fullmatch(entry.name)) for entry in entries]
    for entry, match in found:
        kind = entry.is_dir if folders else entry.is_file
        if match and kind(follow_symlinks=False) and not _is_alive(int(match[1])):
            with contextlib.suppress(OSError):  # of others, or gone already
                _remove(Path(entry.path))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
