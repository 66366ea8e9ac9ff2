"""Files of `torch.save`, alone or within another file: the pickle and the storages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fmapper import CheckpointError
from fmapper.checkpoints import (
    STORED_DTYPES,
    ConjugateArray,
    Contents,
    LazyArray,
    Misfit,
    SourceFile,
    StoredArray,
    StridedArray,
    SwappedArray,
    UnreadableArray,
    ZipMembers,
    check_count,
    check_depth,
    check_name,
    numpy_dtype,
    reason_of,
    show,
)
from fmapper_adapters.torch.checkpoints.pickled import (
    Dtype,
    NotAllowed,
    OtherTensor,
    StoredBytes,
    StoredTensor,
    names_of_tensors,
    unpickle,
)

MOST_PICKLE = 64 << 20  # bytes, without arrays
_MOST_EXPANDED = 64 << 20  # bytes of all arrays that exceed their storages
_VALUES = (bool, int, float, str)


def read_tensors(path: Path, open_archive: Callable[[], Storages]) -> Contents:
    """Returns the contents of a file of `torch.save`.

    Tensors of unsupported kinds raise when their values are read, so that others can be read.

    Raises:
        CheckpointError: The file is damaged, or holds objects that need code to be run.
    """
    contents = Contents({}, files=(path,))
    try:
        archive = open_archive()
        tree = archive.tree()
        first: dict[Any, str] = {}
        for name, leaf in _leaves(tree):
            if isinstance(leaf, OtherTensor):
                contents.arrays[name] = UnreadableArray(
                    leaf.shape,
                    _plain_dtype(leaf.dtype),
                    f"{path}: {name}: is not a dense tensor but {leaf.kind}; save {leaf.instead}",
                )
            elif not isinstance(leaf, StoredTensor):
                check_count(len(contents.values), "values")
                contents.values[name] = leaf
            elif first.setdefault(leaf, name) != name:
                contents.ties[name] = first[leaf]
            else:
                contents.arrays[name] = archive.array(name, leaf)
    except Misfit as error:
        raise CheckpointError(f"{path}: {error}") from None
    return contents


def torch_dtype(name: str, array: LazyArray) -> torch.dtype:
    """Returns the dtype of torch for an array to be written.

    Raises:
        CheckpointError: Torch lacks the dtype, or does not save it.
    """
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or array.dtype.name not in STORED_DTYPES:
        raise CheckpointError(f"{name}: torch does not save {array.dtype.name}; cast it first")
    return dtype


class Part:
    """A part of a file as a file."""

    def __init__(self, file: SourceFile, start: int, length: int) -> None:
        if not 0 <= start <= start + length <= file.size:
            raise CheckpointError(f"{file.path}: a piece ends past the end of the file")
        self.file, self.start, self.size = file, start, length

    def read_into(self, handle: int, out: memoryview, offset: int) -> None:
        """Fills a buffer from an offset in the part."""
        self.file.read_into(handle, out, self.start + offset)


class NotRead(Misfit):
    """Raised for a pickle with objects that need code to be run."""


@contextmanager
def explain_pickle() -> Iterator[None]:
    """Converts errors of unpickling to `Misfit` within the block."""
    try:
        yield
    except Misfit:
        raise
    except NotAllowed as error:
        raise NotRead(str(error)) from None
    except Exception as error:  # the unpickler may raise anything
        reason = reason_of(error)
        raise Misfit(f"its pickle is damaged: {type(error).__name__}: {reason}") from None


class Storages:
    """The storages of a file of torch, and the tensors in them.

    Args:
        part: The place of the file.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._is_big_endian = False
        self._expanded = 0  # bytes

    def tree(self) -> Any:
        """Returns the pickled tree, with descriptions of its tensors."""
        raise NotImplementedError

    def place(self, key: str) -> tuple[int, int] | None:
        """Returns offset and bytes of a storage in the part; None if it is missing."""
        raise NotImplementedError

    def array(self, name: str, tensor: StoredTensor) -> LazyArray:
        """Returns the stored array of a tensor."""
        key = tensor.storage.key
        place = self.place(key)
        if place is None:
            raise Misfit(f"{name}: is damaged: its storage {show(key)} is missing")
        begin, size = place
        dtype, item = tensor.dtype
        if dtype not in STORED_DTYPES:
            path = self._part.file.path
            return UnreadableArray.of_unknown(path, name, tensor.shape, dtype)
        if tensor.storage.elements * tensor.storage.dtype.size > size:
            raise Misfit(f"{name}: is damaged: it exceeds its storage")
        shape, strides = tensor.shape, tensor.strides
        count = math.prod(shape)
        is_dense = _is_dense(shape, strides)
        last = (
            count - 1 if is_dense else sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        )
        if count and (tensor.offset + last + 1) * item > size:
            raise Misfit(f"{name}: is damaged: it exceeds its storage")
        if count * item > size:
            self._expanded += count * item
            if self._expanded > _MOST_EXPANDED:
                reason = (
                    f"{self._part.file.path}: {name}: would take {count * item:,} bytes, more than "
                    "the file has: it was expanded before it was saved (save tensor.contiguous()), "
                    "or the file is damaged"
                )
                return UnreadableArray(shape, numpy_dtype(dtype), reason)
        start = self._part.start + begin + tensor.offset * item
        array = self._view(start, shape, strides, dtype, last + 1)
        if tensor.is_conjugate or tensor.is_negative:
            flags = {"conjugate": tensor.is_conjugate, "negative": tensor.is_negative}
            return ConjugateArray(array, **flags)
        return array

    def _view(
        self, start: int, shape: Sequence[int], strides: Sequence[int], dtype: str, length: int
    ) -> LazyArray:
        """Returns a view of `length` elements of a storage, from an offset in the file on."""
        if _is_dense(shape, strides):
            return self._base(start, shape, dtype)
        order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
        dense = [shape[axis] for axis in order]
        if not _is_dense(dense, [strides[axis] for axis in order]):
            return StridedArray(self._base(start, (length,), dtype), shape, strides)
        array = self._base(start, dense, dtype)
        return array.transpose([order.index(axis) for axis in range(len(shape))])

    def _base(self, start: int, shape: Sequence[int], dtype: str) -> LazyArray:
        array = StoredArray(self._part.file, start, shape, dtype)
        return SwappedArray(array) if self._is_big_endian else array


class Archive(Storages):
    """A zip file of torch: a pickle and its storages.

    Args:
        part: The place of the zip file.
        handle: A handle of the open file.
        most: The largest number of members; None for the bound of whole files.
    """

    def __init__(self, part: Part, handle: int, most: int | None = None) -> None:
        super().__init__(part)
        members = ZipMembers(part, handle, most)
        for member in members.values():
            if not member.is_stored:
                raise Misfit(f"{show(member.name)} is compressed, which torch.save never does")
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Misfit(f"has {len(pickles)} members named data.pkl, where torch writes one")
        self._members = members
        # torch does not verify checksums, and omits them after set_crc32_options(False)
        self._has_checksums = any(member.checksum for member in members.values())
        self._prefix = pickles[0].removesuffix("data.pkl")
        self._begins: dict[str, int] = {}
        self.pickled = self._members[pickles[0]].size

    def tree(self, **unknown: Any) -> Any:
        """Returns the pickled tree, with descriptions of its tensors.

        Args:
            **unknown: With `unknown=value`, returns the value for a pickle with objects that are
            not allowed.
        """
        order = self._bytes("byteorder", 16) or b"little"
        if order not in (b"little", b"big"):
            raise Misfit(f"was written with the byte order {show(order.decode('latin1'))}")
        self._is_big_endian = order == b"big"
        data = self._bytes("data.pkl", MOST_PICKLE)
        try:
            with explain_pickle():
                return unpickle(data, names_of_tensors(), {})
        except NotRead:
            if unknown:
                return unknown["unknown"]
            raise

    def _bytes(self, name: str, most: int) -> bytes:
        member = self._members.get(self._prefix + name)
        if member is not None and member.size > most:
            raise Misfit(f"its {name} is too large")
        return b"".join(self._members.parts(member, check=self._has_checksums)) if member else b""

    def place(self, key: str) -> tuple[int, int] | None:
        """Returns offset and bytes of a storage in the part; None if it is missing."""
        member = self._members.get(f"{self._prefix}data/{key}")
        if member is None:
            return None
        if key not in self._begins:
            self._begins[key] = self._members.begin(member)
        return self._begins[key], member.size


def _plain_dtype(dtype: Dtype) -> Any:
    """Returns the dtype of NumPy that corresponds to a dtype of torch."""
    name = dtype.name.removeprefix("q")
    return numpy_dtype(name if name in STORED_DTYPES else "float32")


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts and lists by dotted name."""
    todo: list[tuple[str | None, int, Any]] = [(None, 0, tree)]
    count, length = 1, 0
    while todo:
        name, depth, node = todo.pop()
        children: Iterable[tuple[Any, Any]] = ()
        if isinstance(node, StoredTensor | OtherTensor):
            yield name or "", node
        elif isinstance(node, dict):
            children = node.items()
        elif isinstance(node, list | tuple) and not isinstance(node, StoredBytes):
            children = enumerate(node)
        elif isinstance(node, _VALUES):
            yield name or "", node
        if not children:
            continue
        count += len(node)
        check_count(count, "parts")
        check_depth(depth)
        entries = []
        for key, child in children:
            if not isinstance(key, str | int | float | None):
                place = "" if name is None else f" at {show(name)}"
                raise Misfit(f"has a dict{place} with keys that are not texts or numbers")
            try:
                full = str(key) if name is None else f"{name}.{key}"
            except ValueError:
                raise Misfit(f"has a key at {show(name)} that is too long") from None
            check_name(full)
            length += len(full)
            check_count(length, "bytes of names")
            entries.append((full, depth + 1, child))
        todo += reversed(entries)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether elements are contiguous."""
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        size = shape[axis]
        if strides[axis] != step and size != 1:
            return 0 in shape
        step *= size
    return True
