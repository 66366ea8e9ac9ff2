"""How bytes go from one process to another."""

from __future__ import annotations

import itertools
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fmapper.errors import SyncError

_WINDOW = 4  # messages that wait in a folder for their receiver
_SHORTEST, _LONGEST = 5e-5, 5e-3  # seconds between two looks


class Transport:
    """Two functions that send and receive bytes.

    Messages between two processes arrive in their order, each as a whole. Several threads call the
    functions at the same time, each for another process. Several syncs may use it: all processes
    make and call these in the same order.

    Attributes:
        framework: The framework whose processes they are; empty where that is not known.

    Args:
        rank: The number of this process.
        size: How many there are.
        send: `send(data, rank)` sends bytes, as a `memoryview`, and returns when they may be
            changed.
        receive: `receive(rank)` waits for the next message of a process and returns its bytes.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[[memoryview, int], object],
        receive: Callable[[int], Any],
    ) -> None:
        self.rank, self.size, self.send, self.receive = rank, size, send, receive
        self.framework = ""
        self.syncs = itertools.count()  # the numbers of those that are made with it
        self.lock = threading.Lock()  # held by the one that is called


class Folder(Transport):
    """A transport through files, for processes of one machine or with a common file system.

    In `/dev/shm` it is shared memory. A run needs a new folder, and one `Folder` in each process.

    Args:
        path: The folder.
        rank: The number of this process.
        size: How many there are.

    Raises:
        SyncError: Another one has had this folder and this number.

    Examples:
        >>> import tempfile
        >>> from fmapper.sync import Folder
        >>> folder = Folder(tempfile.mkdtemp(), rank=0, size=1)
        >>> folder.send(memoryview(b"weights"), 0)
        >>> bytes(folder.receive(0))
        b'weights'
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, size: int) -> None:
        super().__init__(rank, size, self._send, self._receive)
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._sent = dict.fromkeys(range(size), 0)
        self._received = dict.fromkeys(range(size), 0)
        mark = self._path / f"process-{rank}"
        if mark.exists():  # its messages may be there yet
            raise SyncError(f"{path} has files of another Folder. Pass that one, or another path")
        self._write(mark, f"{os.getpid()} {platform.node()}".encode())

    def _send(self, data: memoryview, rank: int) -> None:
        number = self._sent[rank]
        self._sent[rank] += 1
        before = self._message(self.rank, rank, number - _WINDOW)
        self._wait(rank, lambda: not before.exists())
        self._write(self._message(self.rank, rank, number), data)

    def _receive(self, rank: int) -> Any:
        import numpy as np

        path = self._message(rank, self.rank, self._received[rank])
        self._wait(rank, path.exists)
        self._received[rank] += 1
        data = np.fromfile(path, np.uint8)
        path.unlink()
        return data

    def _message(self, sender: int, receiver: int, number: int) -> Path:
        return self._path / f"{sender}-{receiver}-{number}"

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        new = path.with_name(f"{path.name}.part")
        new.write_bytes(data)
        new.replace(path)

    def _wait(self, rank: int, is_due: Callable[[], bool]) -> None:
        """Waits for another process, unless it has ended."""
        pause = _SHORTEST
        while not is_due():
            if not self._is_alive(rank) and not is_due():
                raise SyncError(f"the process of rank {rank} has ended")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _is_alive(self, rank: int) -> bool:
        try:
            text = (self._path / f"process-{rank}").read_text()
            process = int(text.removesuffix(f" {platform.node()}"))
            os.kill(process, 0)
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except ProcessLookupError:
            return False
        except (OSError, ValueError):  # not begun, another machine's or user's, or not on Linux
            return True
        return state != "Z"  # a zombie


def default_transport() -> Transport | None:
    """Returns the transport of a framework that was started in several processes, if any."""
    from fmapper.backends.discovery import adapters
    from fmapper.backends.meshes import Meshes

    for adapter in adapters(Meshes):
        rank, size = adapter.process()
        functions = adapter.messages() if size > 1 else None
        if functions is not None:
            transport = Transport(rank, size, *functions)
            transport.framework = adapter.name
            return transport
    return None
