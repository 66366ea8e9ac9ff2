"""Lets several processes write one result atomically, coordinated by files in a folder beside it.

The processes share only the file system. Each writes a heartbeat, so that if one dies the others
soon stop with an error that names it. The next meeting removes what a failed one has left.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fmapper.errors import CheckpointError

PATIENCE = 20.0  # seconds that a process may be silent
_BEAT = 0.25
_LOOK = 0.02
_PAUSE = 2.0  # the most that a late beat counts: the rest is a pause of this process


class Restart(Exception):
    """Raised where process 0 has begun a new meeting."""


class Meeting:
    """One process among several that write `target`, numbered from 0.

    Args:
        target: The file or folder that they write.
        rank: The number of this process.
        count: The number of processes.
        is_folder: Whether the target is a folder, which must not exist or be empty, or a file.
    """

    def __init__(self, target: Path, rank: int, count: int, *, is_folder: bool = False) -> None:
        self.target, self.rank, self.count, self.is_folder = target, rank, count, is_folder
        self.folder = target.with_name(f"{target.name}.parts.tmp")
        self.data = self.folder / "data"
        self.token = ""
        self._heard: dict[int, tuple[str, float]] = {}  # by rank: the last heartbeat, and its age
        self._lives = rank != 0  # process 0 only once the remains of an earlier meeting are gone
        self._stop = threading.Event()

    def run(self, prepare: Callable[[], None], write: Callable[[], None]) -> None:
        """Lets process 0 prepare files in `data`, all processes write, and process 0 move them.

        Raises:
            CheckpointError: Another process has failed or is silent for too long; names it.
        """
        with self._heartbeat():
            while True:
                try:
                    self._run(prepare, write)
                except Restart:
                    continue
                except (Exception, KeyboardInterrupt) as error:
                    self._put(f"failed-{self.rank}", f"{self.token}\n{error}")
                    if self.rank == 0:
                        shutil.rmtree(self.data, ignore_errors=True)
                    raise
                return

    def _run(self, prepare: Callable[[], None], write: Callable[[], None]) -> None:
        self.token = ""
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.data.mkdir(parents=True)
            self._lives = True
            prepare()
            self.token = uuid.uuid4().hex
            self._put("begin", self.token)
        else:
            self.token = self._join()
        try:
            write()
        except FileNotFoundError:
            if self.rank == 0:
                raise
            until = time.monotonic() + PATIENCE  # process 0 may have failed or restarted
            self._wait([0], lambda: time.monotonic() > until)
            raise
        self._put(f"done-{self.rank}", self.token)
        if self.rank:
            self._wait([0], lambda: self._read("end") == self.token)
            self._put(f"left-{self.rank}", self.token)
            return
        others = range(1, self.count)
        self._wait(others, lambda: all(self._says(f"done-{rank}") for rank in others))
        if self.is_folder:
            with contextlib.suppress(FileNotFoundError):
                self.target.rmdir()
            self.data.rename(self.target)
        else:
            next(self.data.iterdir()).replace(self.target)
        self._put("end", self.token)
        with contextlib.suppress(CheckpointError):  # the result is complete
            self._wait(others, lambda: all(self._says(f"left-{rank}") for rank in others))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _join(self) -> str:
        """Waits for a live meeting of process 0; the remains of an earlier one do not count."""
        first, begun = self._read("at-0"), [""]

        def is_there() -> bool:
            if self._read("at-0") == first:
                return False
            begun[0] = self._read("begin")  # after the heartbeat, when an old file is gone
            return begun[0] not in ("", self._read("end"))

        self._wait([0], is_there)
        return begun[0]

    # --- heartbeats -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _heartbeat(self) -> Iterator[None]:
        """Runs a thread that sends heartbeats and reads those of the other processes."""

        def beat() -> None:
            number, before = 0, time.monotonic()
            while not self._stop.wait(_BEAT if number else 0):
                number += 1
                if self._lives:
                    self._beat(number)
                now = time.monotonic()
                self._listen(min(now - before, _PAUSE))
                before = now

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _beat(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the folder does not exist yet
            (self.folder / f"at-{self.rank}").write_text(f"{uuid.uuid4().hex} {number}")

    def _listen(self, seconds: float) -> None:
        """Records the heartbeats of the others, some seconds after the last time."""
        for rank in range(self.count):
            text = self._read(f"at-{rank}")
            previous, age = self._heard.get(rank, ("", 0.0))
            if text and text != previous:
                self._heard[rank] = text, 0.0
            elif previous:
                self._heard[rank] = previous, age + seconds

    def _wait(self, others: Iterable[int], is_met: Callable[[], bool]) -> None:
        """Waits until a condition holds, while the others are alive and none has failed."""
        since = time.monotonic()
        while not is_met():
            now = time.monotonic()
            for rank in range(self.count):
                failure = self._read(f"failed-{rank}")
                if rank != self.rank and self.token and failure.startswith(f"{self.token}\n"):
                    reason = failure.partition("\n")[2]
                    raise CheckpointError(
                        f"{self.target}: process {rank} has failed: {reason}. Nothing was saved."
                    )
            for rank in range(self.count) if self.token else others:
                _, age = self._heard.get(rank, ("", now - since if rank in others else 0.0))
                if rank != self.rank and age > PATIENCE:
                    raise CheckpointError(
                        f"{self.target}: process {rank} of {self.count} has not responded for "
                        f"{PATIENCE:.0f} seconds: it died, or did not call save. Nothing was saved."
                    )
            if self.rank and self.token and self._read("begin") not in ("", self.token):
                raise Restart
            time.sleep(_LOOK)

    # --- the files of the folder ----------------------------------------------------------------

    def _says(self, name: str) -> bool:
        """Returns whether a process has written a file for this meeting."""
        return bool(self.token) and self._read(name) == self.token

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except OSError:
            return ""

    def _put(self, name: str, text: str) -> None:
        """Writes a file atomically."""
        with contextlib.suppress(OSError):
            beside = self.folder / f"{name}.{self.rank}.new"
            beside.write_text(text)
            beside.replace(self.folder / name)
