"""Files of `torch.save` before torch 1.6: five pickles one after the other, then the storages.

The pickles are a magic number, the version, facts about the machine, the saved object, and the keys
of the storages. The storages follow in the order of their keys: the number of elements, in eight
bytes, and the elements.
"""

from __future__ import annotations

from typing import Any

from fmapper.checkpoints import Misfit, check_count, show
from fmapper_adapters.torch.checkpoints.archive import MOST_PICKLE, Part, Storages, explain_pickle
from fmapper_adapters.torch.checkpoints.pickled import (
    StoredBytes,
    end_of_pickle,
    names_of_tensors,
    unpickle,
)

MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # the first pickle, without its end
_VERSION = 1001
_FIRST = 1 << 20  # bytes that are first searched for the end of a pickle


class LegacyFile(Storages):
    """The storages of such a file.

    Args:
        part: The place of the file.
        handle: A handle of the open file.
    """

    def __init__(self, part: Part, handle: int) -> None:
        super().__init__(part)
        self._handle = handle
        self._places: dict[str, tuple[int, int]] = {}

    def tree(self) -> Any:
        """Returns the pickled tree, with descriptions of its tensors, and locates the storages."""
        storages: dict[Any, StoredBytes] = {}
        at = len(MAGIC) + 1
        version, at = self._unpickle(at)
        if version != _VERSION:
            raise Misfit(f"has the unknown version {show(version)}")
        machine, at = self._unpickle(at)
        if type(machine) is not dict:
            raise Misfit("does not describe the machine that wrote it")
        self._is_big_endian = machine.get("little_endian") is False
        tree, at = self._unpickle(at, storages)
        keys, at = self._unpickle(at)
        if type(keys) is not list or not all(type(key) is str for key in keys):
            raise Misfit("does not list its storages")
        check_count(len(keys), "members")
        by_key = {storage.key: storage for storage in storages.values()}
        order = "big" if self._is_big_endian else "little"
        for key in keys:
            if key not in by_key or key in self._places:
                raise Misfit(f"lists a storage {show(key)} that no tensor has, or twice")
            count = int.from_bytes(self._bytes(at, 8), order)  # type: ignore[arg-type]
            size = count * by_key[key].dtype.size
            if count != by_key[key].elements or at + 8 + size > self._part.size:
                raise Misfit(f"is damaged: its storage {show(key)} has another size")
            self._places[key] = at + 8, size
            at += 8 + size
        return tree

    def place(self, key: str) -> tuple[int, int] | None:
        """Returns offset and bytes of a storage in the file; None if it is missing."""
        return self._places.get(key)

    def _unpickle(self, at: int, storages: dict[Any, StoredBytes] | None = None) -> tuple[Any, int]:
        """Returns the object pickled at an offset, and the offset of the next pickle."""
        length = _FIRST
        while True:
            data = self._bytes(at, length)
            try:
                end = end_of_pickle(data, storages is not None)
                break
            except Misfit:
                if length >= min(MOST_PICKLE, self._part.size - at):
                    raise
                length *= 4
        with explain_pickle():
            return unpickle(data[:end], names_of_tensors(), storages), at + end

    def _bytes(self, at: int, count: int) -> bytes:
        out = bytearray(max(0, min(count, self._part.size - at)))
        self._part.read_into(self._handle, memoryview(out), at)
        return bytes(out)
