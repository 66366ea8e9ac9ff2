"""Folders of Orbax, read and written by orbax itself, one part of an array at a time.

Orbax writes all arrays of a tree at once, each as a single chunk, and reads them whole. The handler
in this module writes one array after the other, in several chunks, through tensorstore, which Orbax
is built on. Existing folders are read in the chunks that they have: one chunk is in memory at a
time, and is kept until another array is read.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from fmapper import CheckpointError
from fmapper.checkpoints import (
    STORED_DTYPES,
    Contents,
    Format,
    LazyArray,
    Misfit,
    Writer,
    check_count,
    check_folder,
    check_name,
    nest,
    read_settings,
    tied_to_text,
    unite_tied,
    within,
)

_METADATA = "_METADATA"
_CUSTOM = "custom_metadata"  # of Orbax, in that file: what anybody wants to say there
_OURS = "fmapper"
_KINDS = ("np.ndarray", "jax.Array", "scalar", "string")
_STEP = "_CHECKPOINT_METADATA"
_SIGNS = (_METADATA, "manifest.ocdbt", _STEP)
_MOST_ABOUT = 1 << 20  # bytes of what is said of one array
_ITEM = "default"  # the folder that a CheckpointManager has its arrays in
_VALUES = (bool, int, float, str)
_LARGE = 8 << 20  # bytes of a chunk that is kept, since less than it is read at a time


class Orbax(Format):
    """A folder of `StandardCheckpointer` or `PyTreeCheckpointer`. Names are keys joined by dots.

    Orbax reads an array under each of its names, so a tied one is written so often. Which are tied
    is said in its custom metadata.
    """

    name: ClassVar[str] = "orbax"
    endings: ClassVar[tuple[str, ...]] = (".orbax",)
    is_folder: ClassVar[bool] = True

    def is_at(self, path: Path) -> bool:
        """Returns whether Orbax's files are in a folder."""
        return path.is_dir() and any((_inner(path) / sign).exists() for sign in _SIGNS)

    def read(self, path: Path) -> Contents:
        """Reads the metadata by Orbax."""
        import orbax.checkpoint as ocp

        folder = _inner(path).absolute()
        try:
            about = _about(path, folder)
        except Misfit as error:
            raise CheckpointError(f"{path}: {error}") from None
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                found = checkpointer.metadata(folder)
                tree = getattr(found, "item_metadata", found)
                tree = getattr(tree, "tree", tree)
                scalars = _scalars(checkpointer, folder, tree)
        except CheckpointError:
            raise
        except Exception as error:  # of orbax and tensorstore: they raise anything
            raise CheckpointError(f"{path}: orbax cannot read it: {error}") from None
        contents = Contents({}, files=(folder,))
        stores = _Stores(folder, about.get("store_array_data_equal_to_fill_value") is True)
        leaves = _leaves(tree)
        if len(leaves) < _count(about):
            raise CheckpointError(
                f"{path}: is damaged: orbax finds {len(leaves)} of the {_count(about)} arrays and "
                "numbers in its _METADATA"
            )
        for name, leaf in leaves:
            if name in scalars:
                contents.values[name] = scalars[name]
            elif not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise CheckpointError(f"{path}: {name}: orbax finds no array of this name")
            else:
                contents.arrays[name] = _Chunked(stores, name, leaf)
        custom = about.get(_CUSTOM)
        said = custom.get(_OURS) if isinstance(custom, dict) else None
        if isinstance(said, str):
            try:
                unite_tied(contents, said)
            except Misfit as error:
                raise CheckpointError(f"{folder / _METADATA}: {error}") from None
        return contents

    def write(self, out: Writer, contents: Contents) -> None:
        """Writes the tree by Orbax, which reads each array in turn."""
        import orbax.checkpoint as ocp

        handlers = ocp.type_handlers
        tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
        values = {name: value for name, value in contents.values.items() if value is not None}
        for name, array in contents.arrays.items():
            if array.dtype.name not in STORED_DTYPES:
                raise CheckpointError(f"{name}: orbax has no {array.dtype.name}")
            if not array.size:
                raise CheckpointError(f"{name}: orbax does not support arrays without elements")
        for name, value in values.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise CheckpointError(f"{name}: orbax has no integers of more than 64 bits")
        for name in (*contents.arrays, *contents.ties, *values):
            if _leads_out(name):
                raise CheckpointError(
                    f"{name}: orbax uses names as paths, and this one leads out of the folder"
                )
        if not contents.arrays and not values:
            raise CheckpointError("orbax does not write a checkpoint without arrays and values")
        registry = handlers.create_type_handler_registry(
            (LazyArray, _in_parts(out)),
            (jax.Array, handlers.ArrayHandler()),  # there is none; without it orbax warns
            (int, handlers.ScalarHandler()),
            (float, handlers.ScalarHandler()),
            (str, handlers.StringHandler()),
        )
        values = {n: int(v) if isinstance(v, bool) else v for n, v in values.items()}
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        tree = nest({**contents.arrays, **tied, **values})
        with ocp.Checkpointer(handler) as checkpointer:
            said = {_CUSTOM: {_OURS: tied_to_text(contents)}} if contents.ties else {}
            args = ocp.args.PyTreeSave(tree, **said)
            checkpointer.save(out.path.absolute(), args=args, force=True)


def _inner(path: Path) -> Path:
    return path / _ITEM if (path / _ITEM).is_dir() else path


def _about(path: Path, folder: Path) -> dict[str, Any]:
    """Returns Orbax's metadata of a folder, once it is clear that no link leads out of it."""
    check_folder(path)
    if not (folder / _METADATA).exists():
        raise Misfit(f"has no {_METADATA}, which Orbax writes next to the arrays")
    for home in {path, folder}:
        other = home / _STEP
        if other.exists() and other.stat().st_size > _MOST_ABOUT:
            raise Misfit(f"has a {_STEP} that is too large")
    about = read_settings(folder / _METADATA)
    rows = about.get("tree_metadata")
    if not isinstance(rows, dict):
        raise Misfit(f"its {_METADATA} lists no arrays")
    check_count(len(rows), "arrays of Orbax")
    for row in rows.values():
        keys = row.get("key_metadata") if isinstance(row, dict) else None
        if not isinstance(keys, list) or not isinstance(row.get("value_metadata"), dict):
            raise Misfit(f"its {_METADATA} lists something that is not an array")
        name = ".".join(str(key.get("key")) for key in keys if isinstance(key, dict))
        with within(ascii(name)[1:-1][:60]):
            check_name(name)
            if _leads_out(name):
                raise Misfit("leads out of the folder")
            for file in (".zarray", "zarr.json"):
                place = f"{folder}/{name}/{file}"  # a few bytes, and only without OCDBT
                if os.path.exists(place) and os.path.getsize(place) > _MOST_ABOUT:
                    raise Misfit(f"has a {file} that is too large")
    return about


def _leads_out(name: str) -> bool:
    return name.startswith("/") or ".." in name.split("/")


def _count(about: dict[str, Any]) -> int:
    """Counts the arrays, numbers and texts, without the nodes that have no children."""
    rows = about["tree_metadata"].values()
    return sum(row["value_metadata"].get("value_type") in _KINDS for row in rows)


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=lambda node: hasattr(node, "directory"))
    return [(leaf.name, leaf) for leaf in leaves if hasattr(leaf, "directory")]


def _scalars(checkpointer: Any, folder: Path, tree: Any) -> dict[str, Any]:
    """Returns the numbers and strings of a checkpoint."""
    import orbax.checkpoint as ocp

    kinds = ("ScalarMetadata", "StringMetadata")
    is_leaf = lambda node: hasattr(node, "directory")  # noqa: E731
    chosen = jax.tree_util.tree_map(
        lambda leaf: 0 if type(leaf).__name__ in kinds else ocp.PLACEHOLDER, tree, is_leaf=is_leaf
    )
    names = jax.tree_util.tree_map(lambda leaf: getattr(leaf, "name", ""), tree, is_leaf=is_leaf)
    if 0 not in jax.tree_util.tree_leaves(chosen):
        return {}
    args = jax.tree_util.tree_map(lambda _: ocp.RestoreArgs(), chosen)
    restored = checkpointer.restore(folder, ocp.args.PyTreeRestore(item=chosen, restore_args=args))
    pairs = zip(jax.tree_util.tree_leaves(names), jax.tree_util.tree_leaves(restored), strict=True)
    return {
        name: value.item() if isinstance(value, np.generic | np.ndarray) else value
        for name, value in pairs
        if value is not ocp.PLACEHOLDER
    }


class _Stores:
    """The open arrays of a folder: at most two, because reading ahead may reach the next one.

    A chunk that is larger than the part that is read stays with its array, so that it is not
    decompressed again for every part.
    """

    def __init__(self, folder: Path, is_whole: bool) -> None:
        self.folder = folder
        self._is_whole = is_whole  # chunks of zeros are there, too
        self._lock = threading.Lock()
        self._open: dict[str, Any] = {}

    def open(self, name: str, shape: tuple[int, ...]) -> Any:
        """Returns an array of tensorstore."""
        with self._lock:
            if name not in self._open:
                if len(self._open) > 1:
                    del self._open[next(iter(self._open))]
                self._open[name] = self._open_array(name, shape)
            return self._open[name]

    def _open_array(self, name: str, shape: tuple[int, ...]) -> Any:
        import tensorstore

        store: dict[str, Any] = {"driver": "file", "path": f"{self.folder / name}/"}
        if (self.folder / "manifest.ocdbt").exists():
            base = f"file://{self.folder}/"
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        failed: Exception | None = None
        for driver in ("zarr", "zarr3"):
            spec: dict[str, Any] = {"driver": driver, "kvstore": store}
            if self._is_whole:
                spec["fill_missing_data_reads"] = False
            try:
                array = tensorstore.open(spec, open=True, read=True).result()
                if array.shape != shape:
                    raise CheckpointError(
                        f"{self.folder}: {name}: has a different shape than in the metadata"
                    )
                chunk: Any = array.chunk_layout.read_chunk.shape or shape
                nbytes = math.prod(chunk) * np.dtype(array.dtype.numpy_dtype).itemsize
                if nbytes > _LARGE:
                    room = {"cache_pool": {"total_bytes_limit": nbytes + _LARGE}}
                    context = tensorstore.Context(room)
                    array = tensorstore.open(spec, open=True, read=True, context=context).result()
                return array
            except (ValueError, KeyError, OSError, RuntimeError) as error:
                failed = failed or error
        raise CheckpointError(f"{self.folder}: {name}: {failed}") from failed


class _Chunked(LazyArray):
    """An array in a folder of Orbax."""

    def __init__(self, stores: _Stores, name: str, about: Any) -> None:
        dtype = np.dtype(about.dtype).name
        if dtype not in STORED_DTYPES:
            raise CheckpointError(f"{stores.folder}: {name}: has the unknown dtype {dtype}")
        self.shape, self.dtype = tuple(map(int, about.shape)), np.dtype(about.dtype)
        self._stores, self._name = stores, name

    def _read(self, box: Any) -> Any:
        array = self._stores.open(self._name, self.shape)
        try:
            return array[tuple(slice(*pair) for pair in box)].read().result()
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self._stores.folder}: {self._name}: {error}") from error


def _in_parts(out: Writer) -> Any:
    import orbax.checkpoint as ocp
    import tensorstore

    handlers: Any = ocp.type_handlers

    class Handler(handlers.NumpyHandler):  # type: ignore[misc]
        """Writes arrays one after the other, and each part by part."""

        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> Sequence[Any]:
            for value, info in zip(values, infos, strict=True):
                if hasattr(info, "await_path_creation"):  # Orbax makes its folder meanwhile
                    await info.await_path_creation()
                boxes = out.boxes(value)
                spec = handlers.get_json_tspec_write(
                    info,
                    use_ocdbt=info.is_ocdbt_checkpoint,
                    global_shape=value.shape,
                    local_shape=tuple(stop - start for start, stop in boxes[0]),  # of a chunk
                    dtype=value.dtype,
                    process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
                )
                store = await tensorstore.open(
                    tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
                )
                for box, data in zip(boxes, out.bytes_of(info.name, value), strict=True):
                    place = store[tuple(slice(*pair) for pair in box)]
                    await place.write(np.asarray(data).view(value.dtype).reshape(place.shape))
            return []

    return Handler()
