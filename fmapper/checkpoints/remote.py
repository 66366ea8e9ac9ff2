"""Checkpoints behind URLs: arrays read as ranges of bytes, files written as streams."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.stored import SourceFile
from fmapper.errors import CheckpointError
from fmapper.files.untrusted import Misfit
from fmapper.files.urls import Url

_PIECE = 8 << 20  # bytes of a request


class UrlFile(SourceFile):
    """A file behind a URL; changes while it is read are detected by its length only."""

    __slots__ = ("_url",)

    is_local = is_copied = False

    def __init__(self, url: Url) -> None:
        self._url = url
        self.path = cast(Path, url)  # a Url has the needed methods
        self.size = url.size()

    @contextmanager
    def handle(self) -> Iterator[int]:
        """Yields a dummy file descriptor, because each read is a separate request."""
        yield -1

    def read_into(self, handle: int, out: memoryview, offset: int) -> None:
        """Fills a buffer with the bytes at an offset."""
        for at in range(0, len(out), _PIECE):
            part = out[at : at + _PIECE]
            try:
                part[:] = self._url.read_range(offset + at, offset + at + len(part))
            except Misfit as error:
                raise CheckpointError(f"{self._url}: {error}") from None


class UrlWriter(Writer):
    """Writes files behind a URL sequentially; they appear when all are complete.

    On a host without transactions each appears when it is complete, an index after its shards.
    """

    def __init__(
        self,
        url: Url,
        *,
        check: bool = False,
        on_bytes: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        super().__init__(cast(Path, url), check=check, on_bytes=on_bytes)
        self._url = url
        self._sums: list[tuple[Url, str, int, int, int]] = []  # url, array, offset, bytes, crc
        self._files: list[Url] = []
        self._at: Url = url

    @contextmanager
    def open(self, name: str | None = None) -> Iterator[BinaryIO]:
        """Opens the file, or one of a folder, for writing from its beginning."""
        self._at = self._url if name is None else self._url / name
        self._files.append(self._at)
        with self._at.create() as file:
            yield file

    def put_all(
        self, file: BinaryIO, arrays: Mapping[str, LazyArray], offset: int | None = None
    ) -> None:
        """Writes arrays one after another at the current position."""
        at = file.tell()
        if offset not in (None, at):
            raise CheckpointError(f"{self._at}: can only be written sequentially")
        for name, array in arrays.items():
            for data in self.bytes_of(name, array):
                file.write(data)
                if self._check:
                    self._sums.append((self._at, name, at, len(data), zlib.crc32(data)))
                at += len(data)

    def text(self, name: str, text: str) -> None:
        """Writes a text beside the files of a folder."""
        place = self._url / name
        self._files.append(place)
        with place.create() as file:
            file.write(text.encode())

    def compare(self) -> None:
        """Reads back what was written, if `check` is set; removes it if it differs.

        Raises:
            CheckpointError: It differs.
        """
        for url, name, at, nbytes, checksum in self._sums:
            if zlib.crc32(url.read_range(at, at + nbytes)) != checksum:
                for file in reversed(self._files):
                    with suppress(OSError):
                        file.remove()
                raise CheckpointError(f"{url}: {name}: reads back differently than it was written")


@contextmanager
def url_writer(
    url: Url, *, check: bool = False, on_bytes: Callable[[int], object] = lambda nbytes: None
) -> Iterator[UrlWriter]:
    """Yields a writer for a URL; the file appears when the block ends without an error."""
    writer = UrlWriter(url, check=check, on_bytes=on_bytes)
    with url.system.transaction:
        yield writer
    writer.compare()
